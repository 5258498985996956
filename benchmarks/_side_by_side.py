"""The side-by-side run as a part of docs/measured.md: speed, acceptance, physical limit, exactness."""

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
        series = {_label(result): conditional(result["acceptance_by_position"]) for result in chosen}
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


def conditional(acceptance: list[float]) -> list[tuple[int, float]]:
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
        f"{draft_shape(report['draft_shape'])}{_blocks_seen(report)}. Measured on {machine_line(report)}."
        f"{other_work(report)}"
    )


def _blocks_seen(report: Report) -> str:
    """What the drafts were trained on, where that is known; a rank-0 draft may have had less."""
    own, rank_zero = report.get("draft_training"), report.get("dflash_training")
    seen = "" if own is None else f", trained on {own['blocks']:,} blocks"
    return seen if rank_zero is None else f"{seen} (the rank-0 draft on {rank_zero['blocks']:,})"


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


def other_work(report: Report) -> str:
    """A warning where the machine was busy when a run began."""
    busy = report["environment"].get("load") or 0.0
    if busy < BUSY:
        return ""
    return f" The machine had other work (a load of {busy:g} when the run began): read the ratios accordingly."


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
