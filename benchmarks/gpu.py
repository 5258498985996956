"""What a round costs on one data-centre GPU, in under eight minutes and with nothing downloaded.

    python benchmarks/gpu.py --output benchmarks/results/gpu.json
    python benchmarks/gpu.py --shapes tiny --device cpu          # the same on any machine, for the script's sake

Random weights of true shapes (Qwen3-4B and 8B with their five-layer drafts), for 1 to 128 rows. **Acceptance is
forced**: drawn from `--profile`, not earned by a trained draft. What is measured is real all the same: the time of a
round and of its parts, the share of the sequential head, the scheduler's time, how often the host waits for the device,
the speed against plain `generate()` that a draft of that acceptance would give, and what the bare forwards cost as
CUDA graphs and under torch.compile, which is how far an engine with them could go.

Sections run in the order of their importance and stop when `--budget-seconds` are used up; the JSON is written after
each, with what was left out and why.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from _gpu_measure import PairBench, reason_of
from _gpu_pair import SHAPES, build_pair, expected_tau

from dspark_hf.benchmarking.machine import environment, print_table, rounded, save_json

PROFILE = [0.85, 0.80, 0.77, 0.75, 0.74, 0.73, 0.72]
PARTS = ("plain_step", "backbone", "block", "verify")
SECTIONS = ("rounds", "graphs", "syncs", "scheduler", "compile")
_COMPILE_SECONDS = 90  # that a compilation may take on a GPU: it cannot be interrupted
_BUILD_SECONDS = 20


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), help="default: 4b 8b on a GPU, else tiny")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[1, 8, 32, 128, 2, 4, 16, 64], metavar="R", help="in this order"
    )
    parser.add_argument(
        "--profile",
        nargs="+",
        type=float,
        default=PROFILE,
        metavar="P",
        help="forced acceptance of each slot, given that those before it were accepted",
    )
    parser.add_argument("--context", type=int, metavar="N", help="prompt tokens per row; default: 256, tiny: 32")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="per row and call; default: 64, tiny: 24")
    parser.add_argument("--samples", type=int, metavar="N", help="timed repetitions; default: 3, tiny: 1")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--sync-rows", nargs="*", type=int, default=[1, 8], metavar="R", help="where syncs are counted")
    parser.add_argument("--compile-rows", nargs="*", type=int, default=[1], metavar="R", help="where to compile")
    parser.add_argument("--compile-backend", metavar="NAME", help="default: inductor on a GPU, none elsewhere")
    parser.add_argument("--budget-seconds", type=float, default=420, metavar="S", help="default: 420")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), metavar="JSON", help="default: gpu.json")
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = torch.device(args.device).type == "cuda"
    args.shapes = args.shapes or (["4b", "8b"] if on_gpu else ["tiny"])
    args.compile_backend = args.compile_backend or ("inductor" if on_gpu else None)
    for name, value, tiny in (("context", 256, 32), ("new_tokens", 64, 24), ("samples", 3, 1)):
        if getattr(args, name) is None:
            setattr(args, name, tiny if args.shapes == ["tiny"] else value)
    if min(args.rows) < 1 or args.samples < 1 or args.context < 8 or args.new_tokens < 2:
        parser.error("--rows and --samples must be at least 1, --new-tokens 2 and --context 8")
    return args


class Budget:
    """Seconds left of a run, shared out evenly over what is still to do.

    Args:
        seconds (`float`): of the whole run.
        parts (`int`): shapes; each may use what is left divided by those still to come.
    """

    def __init__(self, seconds: float, parts: int):
        self.began, self.seconds, self.parts = time.monotonic(), seconds, parts
        self.deadline = self.began
        self._seconds: dict[str, dict[int, float]] = {}  # by kind and rows

    @property
    def used(self) -> float:
        return time.monotonic() - self.began

    def next_part(self) -> None:
        """Begin the next shape."""
        self.deadline = time.monotonic() + (self.seconds - self.used) / self.parts
        self.parts -= 1

    def allows(self, kind: str, rows: int = 1, expected: float = 0.0) -> bool:
        """Whether something fits, to judge by its like with at least as many rows, else by twice that with fewer.

        Args:
            kind (`str`): what it is.
            rows (`int`): its size.
            expected (`float`): seconds to expect while nothing of its kind has been measured.
        """
        known = self._seconds.get(kind, {})
        as_large = [seconds for size, seconds in known.items() if size >= rows]
        estimate = min(as_large) if as_large else 2 * max(known.values()) if known else expected
        return time.monotonic() + 1.25 * estimate < self.deadline

    def took(self, kind: str, seconds: float, rows: int = 1) -> None:
        """Remember how long something took."""
        self._seconds.setdefault(kind, {})[rows] = seconds


class Run:
    """A run of the benchmark and its report, which is on disk after every measurement."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.device = args, torch.device(args.device)
        self.budget = Budget(args.budget_seconds, len(args.shapes))
        settings = {name: value for name, value in vars(args).items() if name != "output"}
        self.report: dict[str, Any] = {
            "benchmark": "gpu",
            "forced": True,
            "note": "random weights; acceptance is forced by the profile and says nothing about a trained draft",
            "profile": args.profile,
            "expected_tau": expected_tau(args.profile),
            "environment": environment(),
            "settings": settings,
            "seconds": 0.0,
            "models": [],
            "results": [],
            "not_measured": [],
        }
        self.failed = False

    def measure(self) -> None:
        """All shapes; leaves what does not fit the budget."""
        for name in self.args.shapes:
            self.budget.next_part()
            if not self.budget.allows("build", expected=_BUILD_SECONDS if self.device.type == "cuda" else 0.0):
                self.leave_out(name, "build", None, "no time left in the budget")
                continue
            began = time.monotonic()
            try:
                target, draft = build_pair(SHAPES[name], self.device, getattr(torch, self.args.dtype), self.args.seed)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                self.failed = True
                self.leave_out(name, "build", None, reason_of(error))
                self._free()
                continue
            self.budget.took("build", time.monotonic() - began)
            self.report["models"].append(
                {
                    "shape": name,
                    "name": SHAPES[name].name,
                    "target_parameters": sum(parameter.numel() for parameter in target.parameters()),
                    "draft_parameters": sum(parameter.numel() for parameter in draft.parameters()),
                    "build_seconds": time.monotonic() - began,
                }
            )
            options = {name: getattr(self.args, name) for name in ("context", "new_tokens", "samples", "seed")}
            self._measure_pair(name, PairBench(target, draft, self.args.profile, **options))
            del target, draft
            self._free()

    def _measure_pair(self, name: str, bench: PairBench) -> None:
        rounds: dict[int, dict[str, Any]] = {}
        too_many: dict[str, int] = {}  # rows that did not fit into memory
        for section, rows, measurement in self._plan(bench, rounds):
            if rows >= too_many.get(section, rows + 1):
                self.leave_out(name, section, rows, "out of memory with fewer rows")
                continue
            if section == "scheduler" and rows not in rounds:
                self.leave_out(name, section, rows, f"rounds of {rows} rows were not measured")
                continue
            if section != "compile" and not self.budget.allows(section, rows):
                self.leave_out(name, section, rows, "no time left in the budget")
                continue
            began = time.monotonic()
            try:
                result = measurement()
            except torch.OutOfMemoryError:
                too_many[section] = rows
                self.leave_out(name, section, rows, "out of memory")
            except Exception as error:  # the other measurements are worth having all the same
                self.failed = True
                self.leave_out(name, section, rows, reason_of(error))
            else:
                if section == "rounds":
                    rounds[rows] = result
                self.report["results"].append({"shape": name, "section": section, "rows": rows, **result})
                print(f"{self.budget.used:6.1f} s  {name}, {section}, {rows} rows", flush=True)
            self._free()
            self.budget.took(section, time.monotonic() - began, rows)
            self.save()

    def _plan(self, bench: PairBench, rounds: dict) -> Iterator[tuple[str, int, Callable[[], dict[str, Any]]]]:
        """Sections in the order of their importance, with their numbers of rows."""
        args = self.args
        if "rounds" in args.sections:
            yield from (("rounds", rows, lambda r=rows: bench.rounds(r)) for rows in args.rows)
        if "graphs" in args.sections:
            yield from (("graphs", rows, lambda r=rows: bench.graphs(r)) for rows in args.rows)
        if "syncs" in args.sections:
            yield from (("syncs", rows, lambda r=rows: bench.syncs(r)) for rows in args.sync_rows)
        if "scheduler" in args.sections:
            yield from (("scheduler", rows, lambda r=rows: bench.scheduler(r, rounds[r])) for rows in args.rows)
        if "compile" in args.sections and args.compile_backend is not None:
            backend = args.compile_backend
            expected = _COMPILE_SECONDS if self.device.type == "cuda" else 0.0
            has_time = lambda: self.budget.allows("one compilation", expected=expected)  # noqa: E731
            yield from (
                ("compile", rows, lambda r=rows: bench.compiled(r, backend, has_time)) for rows in args.compile_rows
            )

    def leave_out(self, shape: str, section: str, rows: int | None, reason: str) -> None:
        self.report["not_measured"].append({"shape": shape, "section": section, "rows": rows, "reason": reason})
        print(f"{self.budget.used:6.1f} s  {shape}, {section}, {rows} rows left out: {reason}", flush=True)

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def save(self) -> None:
        """Write the report as it stands, so that a killed run leaves what it has."""
        self.report["seconds"] = self.budget.used
        path = self.args.output
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_text(json.dumps(rounded(self.report), indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, path)


def print_report(report: dict[str, Any]) -> None:
    """One table per shape: a round and its parts in milliseconds, and what the same forwards cost as CUDA graphs."""
    profile = " ".join(f"{share:.2f}" for share in report["profile"])
    print(f"\nForced acceptance {profile}: {report['expected_tau']:.2f} tokens a round. Milliseconds.")
    for model in report["models"]:
        print(f"\n{model['name']}, {report['settings']['dtype']}, context {report['settings']['context']}\n")
        found = {
            (result["section"], result["rows"]): result
            for result in report["results"]
            if result["shape"] == model["shape"]
        }
        lines = []
        for rows in sorted({rows for section, rows in found if section == "rounds"}):
            lines.append(
                _line(rows, found[("rounds", rows)], found.get(("graphs", rows)), found.get(("scheduler", rows)))
            )
        if lines:
            header = ("rows", "plain", "round", "draft", "head", "verify", "rest", "head %", "scheduler %", "tau")
            print_table((*header, "speed", "graphs: plain", "draft + verify", "speed at most"), lines)
        for (section, rows), result in found.items():
            if section == "syncs" and result["per_round"] is not None:
                waits = f"{result['per_round']:.1f} times a round, {result['per_plain_step']:.1f} times a plain step"
                print(f"\n{rows} rows: the host waits {waits}.")
            if section == "compile":
                times = [f"{part} {1e3 * result[part]:.2f}" for part in PARTS if result[part] is not None]
                print(f"\n{rows} rows, compiled: {', '.join(times) or 'nothing'}.")
        for section in ("graphs", "compile"):
            reasons = {
                f"{part}: {reason}"
                for (kind, _), result in found.items()
                if kind == section
                for part, reason in result["reasons"].items()
            }
            if reasons:
                print(f"\nNot measured, {section}: {'; '.join(sorted(reasons))}.")


def _line(rows: int, result: dict, graphs: dict | None, scheduler: dict | None) -> list[str]:
    times = [result[name] for name in ("plain_step", "round", "draft", "head", "verify", "rest")]
    cells = [f"{rows}", *(f"{1e3 * seconds:.2f}" for seconds in times), f"{result['head_percent']:.1f}"]
    cells.append("" if scheduler is None else f"{scheduler['percent']:.1f}")
    cells += [f"{result['forced_tau']:.2f}", f"{result['forced_decode_speed']:.2f}"]
    if graphs is None or None in (graphs["plain_step"], graphs["block"], graphs["verify"]):
        return [*cells, "", "", ""]
    floor = graphs["block"] + graphs["verify"]
    most = result["forced_tau"] * graphs["plain_step"] / floor
    return [*cells, f"{1e3 * graphs['plain_step']:.2f}", f"{1e3 * floor:.2f}", f"{most:.2f}"]


def main(argv: Sequence[str] | None = None) -> int:
    run = Run(parse_args(argv))
    try:
        run.measure()
    finally:  # whatever happens, what was measured is kept
        run.save()
    print_report(run.report)
    save_json(run.args.output, run.report)
    return 1 if run.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
