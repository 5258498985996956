"""The parts of docs/measured.md, one function for each kind of stored run. A chart is put into `charts` by its name."""

from __future__ import annotations

from typing import Any

from _svg import bars, lines

from dspark_hf.benchmarking.baselines import BASELINES, RANK_ZERO
from dspark_hf.benchmarking.machine import markdown_table
from dspark_hf.benchmarking.shares import MEANING
from dspark_hf.benchmarking.tables import breakdown, machine_line

Report = dict[str, Any]
Charts = dict[str, str]
BUSY = 0.7  # load from which a run is said to have had company
ENOUGH = 10  # rounds in a bin from which its share is drawn
SHOWN = 0.0005  # parts below this share of a round are left out of a table


def bench(name: str, report: Report, charts: Charts) -> list[str]:
    """The side-by-side benchmark."""
    results = report["results"]
    domains = list(dict.fromkeys(result["domain"] for result in results))
    parts = [f"## Side by side: `{name}.json`", describe_run(report), "### Speed", speed_table(results, domains)]
    single = [result for result in results if result["rows"] == min(r["rows"] for r in results)]
    methods = list(dict.fromkeys(result["method"] for result in single if result["method"] != "plain"))
    cells = {(result["method"], result["domain"]): result for result in single}
    charts[f"{name}-speed.svg"] = bars(
        f"Speed, times plain generate(), batch {single[0]['rows']}",
        domains,
        {method: [cells[method, domain]["speedup"] for domain in domains] for method in methods},
        line=1.0,
    )
    parts.append(f"![Speed by method and domain](measured/{name}-speed.svg)")
    if chosen := _whole_blocks(single):
        series = {_label(result): _conditional(result["acceptance_by_position"]) for result in chosen}
        title = "Share accepted at a position, of the blocks accepted up to it"
        charts[f"{name}-acceptance.svg"] = lines(title, series, "drafted position", top=1.0)
        parts += ["### Acceptance", ACCEPTANCE_TEXT, acceptance_table(chosen)]
        parts.append(f"![Acceptance by position](measured/{name}-acceptance.svg)")
    overall = [result for result in results if result["domain"] == domains[0]]
    parts += ["### The physical limit", LIMIT_TEXT, limit_table(overall)]
    if any("shares" in result for result in overall):
        parts += ["### Where the time goes", SHARES_TEXT, shares_table(overall)]
    parts += ["### Exactness", EXACT_TEXT, exactness_table(overall)]
    if report["unavailable"]:
        parts.append("### Left out")
        parts.append("\n".join(f"- {BASELINES.get(n, n)}: {reason}" for n, reason in report["unavailable"].items()))
    return parts


def _whole_blocks(results: list[dict]) -> list[dict]:
    """Results with the longest constant length, by domain, and over all prompts of a rank-0 draft beside it."""
    drafted = [result for result in results if result.get("acceptance_by_position")]
    constant = [result for result in drafted if result["schedule"] == "constant"]
    longest = max((result["draft_length"] for result in constant), default=0)
    first = results[0]["domain"]
    rank_zero = [r for r in drafted if r["method"] == RANK_ZERO and r["domain"] == first]
    return [result for result in constant if result["draft_length"] == longest] + rank_zero


def _label(result: dict) -> str:
    return f"{result['domain']}, rank-0 draft" if result["method"] == RANK_ZERO else result["domain"]


def _conditional(acceptance: list[float]) -> list[tuple[int, float]]:
    """Points (position, share accepted of those accepted so far), as far as there are any."""
    before = [1.0, *acceptance]
    return [(slot, now / before[slot - 1]) for slot, now in enumerate(acceptance, start=1) if before[slot - 1]]


ACCEPTANCE_TEXT = (
    "Whole blocks verified. *Slot*: share of blocks accepted up to and with it. *ECE* and *AUC* of the confidences' "
    "running product, as the draft has them calibrated; *floor* is the ECE that a perfect head would show on as few "
    "rounds."
)
LIMIT_TEXT = (
    "A round cannot cost less than one forward of the draft and one of the target. Both were timed bare, outside any "
    "loop, right after each run: *ideal* is the speed beside plain decoding's bare steps if a round were just those "
    "two, *reached* the share of a round that they take. The rest of a round by part, in percent of it; what *draft* "
    "and *verify* take is beyond the bare forwards, and below zero where the machine was slower when those were timed."
)
SHARES_TEXT = "Percent of a whole call, prompts included, by part of the decoding loop."
EXACT_TEXT = (
    "*Same*: rows equal to plain generate() token for token. *Deficit*: how far a token's logit is below the largest, "
    "with the target reading prompt and answer in one forward; plain generate() has some of its own in half precision."
)


def describe_run(report: Report) -> str:
    """Machine, models, prompts and settings of a side-by-side run, in a sentence or two."""
    arguments = report["arguments"]
    prompts = sorted(set(report["prompts_by_domain"].values()))
    limit = arguments["limit"]
    count = str(limit) if limit is not None else f"{prompts[0]} to {prompts[-1]}" if prompts[1:] else str(prompts[0])
    sampling = f"temperature {arguments['temperature']:g}" if arguments["temperature"] is not None else "greedy"
    times = f"{arguments['repeats']} run{'s' * (arguments['repeats'] > 1)} of each"
    return (
        f"{report['target']} in {report['dtype']}, {sampling}, up to {arguments['max_new_tokens']} new tokens, {count} "
        f"{'prompt' if count == '1' else 'prompts'} of each domain at batch 1 and whole batches above, {times}. Draft: "
        f"{draft_shape(report['draft_shape'])}. Measured on {machine_line(report)}.{other_work(report)}"
    )


def draft_shape(shape: dict[str, Any]) -> str:
    """A draft's shape in a few words."""
    head = f"{shape['head']} Markov head of rank {shape['rank']}" if shape["head"] else "no Markov head"
    confidence = "no confidence head"
    if shape["confidence"]:
        confidence = f"{'calibrated' if shape['calibrated'] else 'uncalibrated'} confidence head"
    layers = f"{shape['layers']} layer{'s' * (shape['layers'] > 1)}"
    vocabulary = f"{shape['draft_vocabulary']} of {shape['vocabulary']} tokens"
    return f"{layers}, block {shape['block']}, {head}, {confidence}, {vocabulary}"


def speed_table(results: list[dict], domains: list[str]) -> str:
    """Tokens a second and times plain by batch and method, a pair of columns for each domain."""
    header = ["batch", "method", *(f"{domain}: tok/s, times plain" for domain in domains)]
    header += ["quartiles", "first token ms", "peak MiB"]
    rows = []
    cells = {(result["rows"], result["method"], result["domain"]): result for result in results}
    for size, method in dict.fromkeys((result["rows"], result["method"]) for result in results):
        found = [cells[size, method, domain] for domain in domains]
        row = [str(size), method, *(f"{r['tokens_per_second']:.1f}, {r['speedup']:.2f}" for r in found)]
        low, _, high = found[0]["speedup_quartiles"]
        row += [f"{low:.2f} to {high:.2f}", f"{1000 * found[0]['first_token_seconds']:.0f}"]
        rows.append([*row, f"{found[0]['peak_mib']:.0f}" if "peak_mib" in found[0] else ""])
    return markdown_table(header, rows)


def acceptance_table(chosen: list[dict]) -> str:
    """Tau, verify length, acceptance by position and confidence of a constant length, by domain."""
    width = max(len(result["acceptance_by_position"]) for result in chosen)
    header = ["prompts", "tau", *(f"slot {slot}" for slot in range(1, width + 1)), "ECE (floor)", "AUC"]
    rows = []
    for result in chosen:
        row = [_label(result), f"{result['tau']:.2f}", *(f"{p:.2f}" for p in result["acceptance_by_position"])]
        row += [""] * (2 + width - len(row))
        fare = result.get("confidence")
        row += ["", ""] if fare is None else [f"{fare['ece']:.3f} ({fare['floor']:.3f})", number(fare["auc"], 2)]
        rows.append(row)
    return markdown_table(header, rows)


def limit_table(results: list[dict]) -> str:
    """Ideal and reached by setting, and what eats the rest."""
    measured = [result for result in results if "reached" in result and "part_seconds_per_round" in result]
    if not measured:
        return "Not measured in this run."
    rests = [breakdown(result) for result in measured]
    parts = [part for part in MEANING if any(abs(rest.get(part, 0.0)) >= SHOWN for rest in rests)]
    header = ["batch", "setting", "tau", "verified", "round ms", "bare draft", "bare verify", "bare step", "ideal"]
    header += ["reached", "of plain generate()", *parts]
    rows = []
    for result, rest in zip(measured, rests, strict=True):
        row = [str(result["rows"]), result["method"], f"{result['tau']:.2f}", f"{result['mean_verify_length']:.2f}"]
        names = ("round", "bare_draft", "bare_verify", "bare_step")
        row += [f"{1000 * result[f'{name}_seconds']:.1f}" for name in names]
        row += [f"{result[name]:.2f}" for name in ("ideal_speedup", "reached", "reached_of_plain")]
        rows.append([*row, *(f"{100 * rest.get(part, 0.0):.1f}" for part in parts)])
    return markdown_table(header, rows)


def shares_table(results: list[dict]) -> str:
    """Shares of whole calls by part, and what the parts are."""
    measured = [result for result in results if "shares" in result]
    parts = [part for part in MEANING if any(result["shares"].get(part, 0.0) >= SHOWN for result in measured)]
    rows = [
        [str(r["rows"]), r["method"], *(f"{100 * r['shares'].get(part, 0.0):.1f}" for part in parts)] for r in measured
    ]
    meaning = "; ".join(f"*{part}*: {MEANING[part]}" for part in parts)
    return f"{markdown_table(('batch', 'setting', *parts), rows)}\n\n{meaning}."


def exactness_table(results: list[dict]) -> str:
    """Rows equal to plain generation's, and deficits."""
    header = ("batch", "method", "same", "tokens", "not the best choice", "mean deficit", "99 %", "largest")
    rows = []
    for result in results:
        row = [str(result["rows"]), result["method"], f"{result['identical_rows']} of {result['compared_rows']}"]
        if "deficits" in result:
            found = result["deficits"]
            row += [str(found["tokens"]), f"{found['not_best']:.2%}"]
            row += [f"{found[name]:.4f}" for name in ("mean", "p99", "max")]
        rows.append(row + [""] * (len(header) - len(row)))
    return markdown_table(header, rows)


def scaling(name: str, report: Report, charts: Charts) -> list[str]:
    """One axis at a time, random weights."""
    sizes = report["arguments"]
    parts = [
        f"## Scaling: `{name}.json`",
        f"Random weights: {sizes['layers']} target layers of width {sizes['hidden_size']}, {sizes['draft_layers']} "
        f"draft layers, Markov head of rank {sizes['rank']}, {sizes['dtype']}; {machine_line(report)}. Milliseconds. "
        "*Head*: the sequential head's steps, in percent of a round; it is large here because the target is small. "
        f"*Break-even*: tokens that a round must give to pay.{other_work(report)}",
    ]
    for axis in ("context", "rows", "gamma", "vocabulary"):
        found = sorted((r for r in report["results"] if axis in r["axes"]), key=lambda r: r[axis])
        header = (axis, "round", "bare draft", "bare verify", "plain step", "head", "head %", "overhead", "break-even")
        names = ("round", "bare_draft", "bare_verify", "bare_step", "head")
        rows = [
            [str(r[axis]), *(f"{1000 * r[f'{n}_seconds']:.1f}" for n in names), f"{r['head_percent']:.1f}"]
            + [f"{r['overhead']:.2f}", f"{r['break_even']:.2f}"]
            for r in found
        ]
        parts.append(markdown_table(header, rows))
    charts[f"{name}-context.svg"] = context_chart(report)
    parts.append(f"![Cost by context](measured/{name}-context.svg)")
    return parts


def context_chart(report: Report) -> str:
    """Milliseconds of a round and of its forwards by context."""
    found = sorted((r for r in report["results"] if "context" in r["axes"]), key=lambda r: r["context"])
    labels = (("round", "round"), ("bare draft", "bare_draft"), ("bare verify", "bare_verify"), ("step", "bare_step"))
    series = {label: [(r["context"], 1000 * r[f"{key}_seconds"]) for r in found] for label, key in labels}
    return lines("Milliseconds by context", series, "context, tokens")


def free_draft(name: str, report: Report, charts: Charts) -> list[str]:
    """The loop alone: a draft that is free and forced to be right."""
    count = len(report["runs"])
    tau = sum(run["tau"] for run in report["runs"]) / count
    return [
        f"## A free draft: `{name}.json`",
        f"Forced acceptance: the draft looks the target's own answer up at no cost, so a round is one verification and "
        f"the loop. {count} prompts, tau {tau:.2f}: {report['speed']:.2f} times plain generate(). "
        f"Measured on {machine_line(report)}.{other_work(report)}",
    ]


def generate(name: str, report: Report, charts: Charts) -> list[str]:
    """Plain generation and constant lengths, with the overhead of a round."""
    header = ("batch", "prompts", "setting", "tok/s", "times plain", "tau", "same", "round over bare forwards", "ideal")
    rows = []
    for result in report["results"]:
        row = [str(result["rows"]), result["source"], result["setting"]]
        row += [f"{result['tokens_per_second']:.1f}", f"{result['speedup']:.2f}"]
        if "tau" in result:
            row += [f"{result['tau']:.2f}", f"{result['identical_rows']} of {result['compared_rows']}"]
            row += [number(result.get("overhead"), 2), number(result.get("ideal_speedup"), 2)]
        rows.append(row + [""] * (len(header) - len(row)))
    settings = report["arguments"]
    return [
        f"## Constant lengths: `{name}.json`",
        f"{report['target']} in {', '.join(settings['dtypes'])}, up to {settings['max_new_tokens']} new tokens. "
        f"Measured on {machine_line(report)}.{other_work(report)}",
        markdown_table(header, rows),
    ]


def load(name: str, report: Report, charts: Charts) -> list[str]:
    """Schedules by load, and what must hold."""
    header = ("batch", "prompts", "rule", "tok/s", "times plain", "verified", "tau", "rounds without a draft")
    rows = []
    for result in report["results"]:
        row = [str(result["rows"]), result["domain"], result["setting"]]
        row += [f"{result['tokens_per_second']:.1f}", f"{result['speedup']:.2f}"]
        if "tau" in result:
            row += [f"{result['mean_verify_length']:.2f}", f"{result['tau']:.2f}"]
            row += [f"{result['share_without_draft']:.2f}"]
        rows.append(row + [""] * (len(header) - len(row)))
    scheduled = [result for result in report["results"] if result["setting"] == "throughput"]
    series = {
        domain: [(r["rows"], r["mean_verify_length"]) for r in scheduled if r["domain"] == domain]
        for domain in dict.fromkeys(r["domain"] for r in scheduled)
    }
    charts[f"{name}-verified.svg"] = lines("Mean verify length under the throughput schedule", series, "batch")
    verdicts = "\n".join(f"- {'holds' if holds else 'fails'}: {text}" for text, holds in report["verdicts"].items())
    machine = f"{report['target']}; measured on {machine_line(report)}.{other_work(report)}"
    image = f"![verify length by batch](measured/{name}-verified.svg)"
    return [f"## Load: `{name}.json`", machine, image, markdown_table(header, rows), verdicts]


def thresholds(name: str, report: Report, charts: Charts) -> list[str]:
    """What a confidence threshold trades."""
    header = ("prompts", "threshold", "accepted of the verified", "tokens a step", "verified")
    rows = [
        [r["domain"], f"{r['threshold']:.2f}", "" if r["acceptance_rate"] is None else f"{r['acceptance_rate']:.1%}"]
        + [f"{r['tokens_per_step']:.2f}", f"{r['mean_verify_length']:.2f}"]
        for r in report["results"]
    ]
    shown = [result for result in report["results"] if result["acceptance_rate"] is not None]
    for value, scale, label in (("acceptance_rate", 100, "accepted, %"), ("tokens_per_step", 1, "tokens per step")):
        series = {
            domain: [(r["threshold"], scale * r[value]) for r in shown if r["domain"] == domain]
            for domain in dict.fromkeys(r["domain"] for r in shown)
        }
        charts[f"{name}-{value}.svg"] = lines(f"{label}, by confidence threshold", series, "threshold")
    images = "\n\n".join(f"![{value}](measured/{name}-{value}.svg)" for value in ("acceptance_rate", "tokens_per_step"))
    machine = f"{report['target']}; measured on {machine_line(report)}.{other_work(report)}"
    return [f"## Confidence thresholds: `{name}.json`", machine, images, markdown_table(header, rows)]


def acceptance(name: str, report: Report, charts: Charts) -> list[str]:
    """Tau by source of prompts, greedy and sampled, and what is accepted up to each slot."""
    ways: dict[tuple[str, float], dict[str, dict]] = {}  # results by draft and temperature, then by source
    for result in report["results"]:
        ways.setdefault((result["draft"], result["temperature"]), {})[result["source"]] = result
    names = [f"{draft}, {f'temperature {heat:g}' if heat else 'greedy'}" for draft, heat in ways]
    *sources, whole = next(iter(ways.values()))
    rows = [[source, *(f"{found[source]['tau']:.2f}" for found in ways.values())] for source in sources]
    rows.append(["mean of the sets", *(f"{found[whole]['mean_of_sources']:.2f}" for found in ways.values())])
    rows.append(["all rounds together", *(f"{found[whole]['tau']:.2f}" for found in ways.values())])
    shares = {name: found[whole]["acceptance_by_position"] for name, found in zip(names, ways.values(), strict=True)}
    width = max(map(len, shares.values()))
    slots = [[name, *(f"{p:.2f}" for p in ps), *[""] * (width - len(ps))] for name, ps in shares.items()]
    series = {name: _conditional(ps) for name, ps in shares.items()}
    charts[f"{name}.svg"] = lines("Share accepted at a slot, of the blocks accepted up to it", series, "slot", top=1.0)
    arguments = report["arguments"]
    text = (
        f"{report['target']}, {arguments['dtype']}, up to {arguments['max_new_tokens']} new tokens, whole blocks "
        f"verified: tokens a row and round (tau), then the share of blocks accepted up to a slot and with it, over all "
        f"prompts ({next(iter(ways.values()))[whole]['prompts']}, at most {arguments['limit']} of each set)."
    )
    return [
        f"## Acceptance: `{name}.json`",
        text,
        markdown_table(["prompts", *names], rows),
        markdown_table(("accepted up to slot", *(str(slot) for slot in range(1, width + 1))), slots),
        f"![acceptance by slot](measured/{name}.svg)",
    ]


def calibration(name: str, report: Report, charts: Charts) -> list[str]:
    """What `dspark-hf calibrate` reports: the running product of the confidences against what was accepted."""
    setting = report["setting"]
    stages = {"raw": report["before"], "STS": report["sts"], "saved": report["after"]}
    header = ("slot", "accepted", *(f"ECE, {stage}" for stage in stages), "AUC, raw", "AUC, saved", "form")
    rows = []
    for slot, form in enumerate(report["forms"]):
        found = {stage: values["per_position"][slot] for stage, values in stages.items()}
        row = [str(slot + 1), f"{found['raw']['target_mean']:.3f}", *(number(found[s]["ece"], 3) for s in stages)]
        rows.append([*row, number(found["raw"]["auc"], 3), number(found["saved"]["auc"], 3), form])
    means = {stage: values["summary"] for stage, values in stages.items()}
    row = ["mean", f"{means['raw']['target_mean']:.3f}", *(number(means[s]["ece_mean"], 3) for s in stages)]
    rows.append([*row, number(means["raw"]["auc_mean"], 3), number(means["saved"]["auc_mean"], 3), ""])
    bins = {stage: stages[stage]["per_position"][0]["reliability"] for stage in ("raw", "saved")}
    series = {
        stage: [(round(sum(b["range"]) / 2, 3), b["avg_target"]) for b in found if b["weight"] >= ENOUGH]
        for stage, found in bins.items()
    }
    ideal = sorted({x for points in series.values() for x, _ in points})
    charts[f"{name}.svg"] = lines(
        "Share accepted at the first slot, by confidence", series | {"exact": [(x, x) for x in ideal]}, "confidence"
    )
    text = (
        f"`dspark-hf calibrate` on {setting['prompts']}: {setting['draft']} for {setting['target']}, "
        f"{setting['dtype']} on {setting['device']}, {setting['max_new_tokens']} new tokens, "
        f"{'sampled' if setting['do_sample'] else 'greedy'}. Fitted on {report['num_fit']} live rounds, judged on "
        f"{report['num_held_out']} of other prompts, where a perfect head would show an ECE of "
        f"{report['noise_floor']:.3f}. STS: temperatures alone."
    )
    image = f"![reliability](measured/{name}.svg)"
    return [f"## Calibration: `{name}.json`", text, image, markdown_table(header, rows)]


def gpu(name: str, report: Report, charts: Charts) -> list[str]:
    """True shapes with random weights on an accelerator, acceptance forced."""
    settings = report["settings"]
    parts = [
        f"## True shapes: `{name}.json`",
        f"Random weights of true shapes; acceptance is forced by a profile of {report['expected_tau']:.2f} tokens a "
        f"round, so *tau* and *speed* say what a round costs and nothing about a trained draft. {settings['dtype']}, "
        f"context {settings['context']}, {machine_line(report | {'device': settings['device']})}. Milliseconds.",
    ]
    header = ("batch", "plain step", "round", "draft", "head", "verify", "rest", "head %", "scheduler %", "forced tau")
    header += ("forced speed", "graphs: plain step", "graphs: draft + verify", "forced speed at most")
    for model in report["models"]:
        found = {(r["section"], r["rows"]): r for r in report["results"] if r["shape"] == model["shape"]}
        sizes = sorted({rows for section, rows in found if section == "rounds"})
        rows = [
            _gpu_row(size, *(found.get((part, size)) for part in ("rounds", "graphs", "scheduler"))) for size in sizes
        ]
        if rows:
            parts += [f"### {model['name']}", markdown_table(header, rows)]
    return parts


def _gpu_row(size: int, found: dict, graphs: dict | None, scheduler: dict | None) -> list[str]:
    names = ("plain_step", "round", "draft", "head", "verify", "rest")
    row = [str(size), *(f"{1000 * found[name]:.2f}" for name in names), f"{found['head_percent']:.2f}"]
    row += ["" if scheduler is None else f"{scheduler['percent']:.2f}", f"{found['forced_tau']:.2f}"]
    row.append(f"{found['forced_decode_speed']:.2f}")
    if graphs is None or None in (graphs["plain_step"], graphs["block"], graphs["verify"]):
        return [*row, "", "", ""]
    both = graphs["block"] + graphs["verify"]
    most = found["forced_tau"] * graphs["plain_step"] / both
    return [*row, f"{1000 * graphs['plain_step']:.2f}", f"{1000 * both:.2f}", f"{most:.2f}"]


def other_work(report: Report) -> str:
    """A warning where the machine was busy when a run began."""
    busy = report["environment"].get("load") or 0.0
    if busy < BUSY:
        return ""
    return f" The machine had other work (a load of {busy:g} when the run began): read the ratios accordingly."


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


SECTIONS = {
    "bench": bench,
    "scaling": scaling,
    "free_draft": free_draft,
    "acceptance": acceptance,
    "load": load,
    "thresholds": thresholds,
    "calibration": calibration,
    "generate": generate,
    "gpu": gpu,
}
