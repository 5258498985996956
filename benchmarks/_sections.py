"""The parts of docs/measured.md, one function for each kind of stored run. A chart is put into `charts` by its name."""

from __future__ import annotations

from _side_by_side import Charts, Report, bench, conditional, number, other_work
from _svg import lines

from dspark_hf.benchmarking.machine import markdown_table
from dspark_hf.benchmarking.tables import machine_line

ENOUGH = 10  # rounds in a bin from which its share is drawn


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
    header = ("batch", "prompts", "rule", "tok/s", "times plain", "by table", "verified", "tau", "copied")
    header += ("rounds without a draft", "scheduling")
    steady = {(r["rows"], r["domain"], r["setting"]): r["tokens_per_second_by_table"] for r in report["results"]}
    rows = []
    for result in report["results"]:
        row = [str(result["rows"]), result["domain"], result["setting"]]
        row += [f"{result['tokens_per_second']:.1f}", f"{result['speedup']:.2f}"]
        row += [f"{result['tokens_per_second_by_table'] / steady[result['rows'], result['domain'], 'plain']:.2f}"]
        if "tau" in result:
            row += [f"{result['mean_verify_length']:.2f}", f"{result['tau']:.2f}"]
            row += [f"{result.get('copied_share', 0.0):.0%}", f"{result['share_without_draft']:.2f}"]
            row += [f"{result['scheduling']:.2%}"] if "scheduling" in result else []
        rows.append(row + [""] * (len(header) - len(row)))
    scheduled = [result for result in report["results"] if result["setting"] == "throughput"]
    series = {
        domain: [(r["rows"], r["mean_verify_length"]) for r in scheduled if r["domain"] == domain]
        for domain in dict.fromkeys(r["domain"] for r in scheduled)
    }
    charts[f"{name}-verified.svg"] = lines("Mean verify length under the throughput schedule", series, "batch")
    verdicts = "\n".join(f"- {'holds' if holds else 'fails'}: {text}" for text, holds in report["verdicts"].items())
    machine = (
        f"{report['target']}; measured on {machine_line(report)}.{other_work(report)} The cost table that decides is "
        "measured first, for all batches, as `dspark-hf profile` does. *By table*: what the same rounds take by a "
        "second one, measured at the end, since machines change speed from minute to minute. *Copied*: share of the "
        "tokens that were copied from the text; the useless draft has no copies."
    )
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
    series = {name: conditional(ps) for name, ps in shares.items()}
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


def teacher_forced(name: str, report: Report, charts: Charts) -> list[str]:
    """Acceptance by slot with the true tokens before it, of several drafts on the same answers."""
    results = report["results"]
    width = max(len(result["acceptance"]) for result in results)
    header = ("draft", "head", "steps", "blocks seen", "epochs", "tau", *(f"slot {n}" for n in range(1, width + 1)))
    rows = []
    for result in results:
        known = result["training"] or {}
        row = [result["draft"], *(str(known.get(key, "")) for key in ("head", "steps", "blocks"))]
        row += [number(known.get("epochs"), 1), f"{result['tau']:.3f}"]
        rows.append([*row, *(f"{share:.2f}" for share in result["acceptance"])])
    series = {r["draft"]: list(enumerate(r["acceptance"], start=1)) for r in results}
    charts[f"{name}.svg"] = lines("Share accepted at a slot, the tokens before it given", series, "slot", top=1.0)
    text = (
        f"{report['target']}, {report['arguments']['dtype']}: {report['answers']} held-out answers, blocks behind "
        "random anchors, the same for every draft. A slot counts as accepted with the probability that rejection "
        "sampling at temperature 1 keeps it, given the answer's own tokens before it; tau is what a round would give."
    )
    image = f"![acceptance by slot](measured/{name}.svg)"
    return [f"## The true tokens given: `{name}.json`", text, markdown_table(header, rows), image]


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


SECTIONS = {
    "bench": bench,
    "scaling": scaling,
    "free_draft": free_draft,
    "acceptance": acceptance,
    "teacher_forced": teacher_forced,
    "load": load,
    "thresholds": thresholds,
    "calibration": calibration,
    "generate": generate,
    "gpu": gpu,
}
