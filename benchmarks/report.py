"""Writes the measured figures into the README and docs/measured.md, from the stored runs and nothing else.

    python benchmarks/report.py           # after a run was stored in benchmarks/results/
    python benchmarks/report.py --check   # status 1 if a page does not say what the runs say

The README's part lies between two markers. A test holds both pages to the stored runs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _sections import SECTIONS
from _side_by_side import Charts, Report, describe_run, other_work

from dspark_hf.benchmarking.machine import markdown_table
from dspark_hf.benchmarking.tables import machine_line

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
WIDTH = 125

INTRODUCTION = """# Measured

Every figure here was written by `benchmarks/report.py` from the runs stored in `benchmarks/results/`. To measure on
your machine, and to have this page and the table of the README written anew:

- `make bench`: the whole benchmark with the model and the draft of the demo, every way to decode on the same prompts.
- `make report`: the pages from what is stored.

For your own pair: `dspark-hf bench TARGET DRAFT --prompts prompts.jsonl`.

All ways run in one process, on the same prompts, in the same dtype, with the same stopping. They take turns in an
order that rotates, after a warm-up. Speed divides all tokens by the medians of all seconds, prompts included;
quartiles are over single runs, each beside plain `generate()`'s run of the same turn. Peak memory is that of the whole
process on a CPU.
"""
LEGEND = (
    "Speed is in multiples of plain `generate()`'s, prompts included. *Same answers*: rows equal to it token for "
    "token. *Copied*: share of the tokens that were copied from the text so far, where the schedule found that to pay; "
    '"no copies" is the draft alone. *Reached*: share of a round that its bare forwards take; 1 would be the physical '
    "limit."
)
NOTHING = "Nothing is stored yet: `make bench` measures."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="stored runs")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="FOLDER", help="where README.md and docs/ are")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if something is stale")
    args = parser.parse_args(argv)
    pages = render(load_reports(args.results), (args.root / "README.md").read_text(encoding="utf-8"))
    stale = stale_files(pages, args.root)
    if args.check:
        for name in stale:
            print(f"{name} does not say what {args.results.name} says: run benchmarks/report.py", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        path = args.root / name
        if name not in pages:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pages[name], encoding="utf-8")
    print(f"written: {', '.join(stale) or 'nothing, all is up to date'}")
    return 0


def load_reports(folder: Path) -> dict[str, Report]:
    """Stored runs by name, those of one kind together, in the order in which the page shows them."""
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return {name: reports[name] for kind in SECTIONS for name in reports if kind_of(reports[name]) == kind}


def kind_of(report: Report) -> str:
    """Which benchmark a run is of; an early one did not say, nor do the reports of `dspark-hf calibrate`."""
    if "sts_temperature" in report:
        return "calibration"
    return report.get("benchmark") or ("free_draft" if "forced" in report else "unknown")


def stale_files(pages: dict[str, str], root: Path) -> list[str]:
    """Files that differ from what they should be, and charts that no run stands behind."""
    stale = [name for name, text in pages.items() if not _same(root / name, text)]
    charts = (path.relative_to(root).as_posix() for path in sorted((root / "docs" / "measured").glob("*.svg")))
    return stale + [name for name in charts if name not in pages]


def _same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


def render(reports: dict[str, Report], readme: str) -> dict[str, str]:
    """Contents of every generated file by its path: README, docs/measured.md, and the charts.

    Raises:
        `ValueError`: the README has no markers.
    """
    if not re.search(f"{BEGIN}.*{END}", readme, re.DOTALL):
        raise ValueError(f"README.md has no place for the figures: {BEGIN} and {END}, each on a line of its own")
    charts: Charts = {}
    parts = [INTRODUCTION.strip()]
    for name, report in reports.items():
        parts += [wrap(part) for part in SECTIONS[kind_of(report)](name, report, charts)]
    head, tail = readme.split(BEGIN)[0], readme.split(END)[1]
    return {
        "README.md": f"{head}{BEGIN}\n{summary(reports)}\n{END}{tail}",
        "docs/measured.md": "\n\n".join(parts if reports else [*parts, NOTHING]) + "\n",
        **{f"docs/measured/{name}": text for name, text in charts.items()},
    }


def wrap(part: str) -> str:
    """A paragraph at the page's width; tables, lists, headings and images stay as they are."""
    pieces = []
    for piece in part.split("\n\n"):
        plain = not piece.startswith(("|", "#", "!", "- "))
        pieces.append(textwrap.fill(piece, WIDTH, break_on_hyphens=False, break_long_words=False) if plain else piece)
    return "\n\n".join(pieces)


# ------------------------------------------------------------------------------------------------ the README's part


def summary(reports: dict[str, Report]) -> str:
    """What the README says: the first side-by-side run or, without one, runs of constant lengths."""
    more = "All figures, the physical limit, exactness and how to repeat them: [docs/measured.md](docs/measured.md)."
    bench = next((report for report in reports.values() if kind_of(report) == "bench"), None)
    if bench is not None:
        text = f"`dspark-hf bench`: {describe_run(bench)} {LEGEND}"
        return "\n\n".join([wrap(text), bench_table(bench), wrap(more)])
    runs = [report for report in reports.values() if kind_of(report) == "generate"]
    if not runs:
        return f"{NOTHING} {more}"
    free = [report for report in reports.values() if kind_of(report) == "free_draft"]
    text = (
        f"`benchmarks/generate.py`: {runs[0]['target']} in {', '.join(runs[0]['arguments']['dtypes'])}, greedy, "
        f"alternating with plain `generate()` in the same process, on {machine_line(runs[0])}.{other_work(runs[0])}"
    )
    return "\n\n".join([wrap(text), constant_table(runs, free), wrap(more)])


def bench_table(report: Report) -> str:
    """Times plain by domain: every way at batch 1, plain and DSpark above it."""
    results = report["results"]
    domains = list(dict.fromkeys(result["domain"] for result in results))
    header = ["batch", "way to decode", *domains, "tau", "copied", "same answers", "reached"]
    cells = {(result["rows"], result["method"], result["domain"]): result for result in results}
    smallest = min(result["rows"] for result in results)
    rows = []
    for size, method in dict.fromkeys((result["rows"], result["method"]) for result in results):
        first: dict[str, Any] = cells[size, method, domains[0]]
        if method == "plain" or (size > smallest and first["schedule"] is None):
            continue
        row = [str(size), named(first), *(f"{cells[size, method, domain]['speedup']:.2f}" for domain in domains)]
        row += [f"{first['tau']:.2f}" if "tau" in first else ""]
        row += [f"{first['copied_share']:.0%}" if first.get("copied_share") else ""]
        row += [f"{first['identical_rows']} of {first['compared_rows']}"]
        rows.append([*row, f"{first['reached']:.2f}" if "reached" in first else ""])
    return markdown_table(header, rows)


def named(result: dict[str, Any]) -> str:
    """A method as the README calls it."""
    return result["method"] if result["schedule"] is None else f"**DSpark**, {result['method']}"


def constant_table(runs: list[Report], free: list[Report]) -> str:
    header = ("", "tau", "speed, times plain", "a round over its two bare forwards")
    rows = [
        [
            f"batch {r['rows']}, {r['draft_length']} drafted tokens ({r['compared_rows']} prompts)",
            f"{r['tau']:.2f}",
            f"{r['speedup']:.2f}",
            f"{r['overhead']:.2f}",
        ]
        for report in runs
        for r in report["results"]
        if r["source"] == "all" and "overhead" in r
    ]
    for report in free:
        tau = sum(run["tau"] for run in report["runs"]) / len(report["runs"])
        text = f"batch 1, a free draft forced to be right ({len(report['runs'])} prompts)"
        rows.append([text, f"{tau:.2f}", f"{report['speed']:.2f}", ""])
    return markdown_table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
