"""A report of the side-by-side benchmark as text."""

from __future__ import annotations

from typing import Any

from .baselines import BASELINES
from .machine import markdown_table

HEADER = ("R", "prompts", "method", "tok/s", "of plain", "quartiles", "tau", "verified", "same", "deficit", "first ms")
HEADER += ("reached", "ideal")


def machine_line(report: dict[str, Any]) -> str:
    """Where a report was measured, in a line."""
    machine = report["environment"]
    where = machine["gpu"] if report.get("device", "cpu") != "cpu" else None
    where = where or f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores"
    versions = f"torch {machine['torch']}, Transformers {machine['transformers']}, commit {machine['commit']}"
    return f"{where}, {versions}, {machine['date'][:10]}"


def bench_table(report: dict[str, Any]) -> str:
    """All results, a line each."""
    return markdown_table(HEADER, [_line(result) for result in report["results"]])


def _line(result: dict[str, Any]) -> list[str]:
    low, _, high = result["speedup_quartiles"]
    cells = [str(result["rows"]), result["domain"], result["method"], f"{result['tokens_per_second']:.1f}"]
    cells += [f"{result['speedup']:.2f}", f"{low:.2f}-{high:.2f}"]
    cells += [_number(result, "tau"), _number(result, "mean_verify_length")]
    cells += [f"{result['identical_rows']}/{result['compared_rows']}"]
    cells += [f"{result['deficits']['max']:.3f}" if "deficits" in result else ""]
    cells += [f"{1000 * result['first_token_seconds']:.0f}"]
    return cells + [_number(result, "reached"), _number(result, "ideal_speedup")]


def _number(result: dict[str, Any], name: str) -> str:
    return f"{result[name]:.2f}" if name in result else ""


def breakdown(result: dict[str, Any]) -> dict[str, float]:
    """What a round costs beyond its two bare forwards, by part, as shares of the round.

    "draft" and "verify" are what the loop's forwards take beyond the bare ones (masks, ragged cache, capture); they
    may be negative where the machine was faster than when the bare ones were timed.
    """
    whole = sum(result["part_seconds_per_round"].values())
    parts = dict(result["part_seconds_per_round"])
    for part in ("draft", "verify"):
        if part in parts:
            parts[part] -= result[f"bare_{part}_seconds"]
    return {part: seconds / whole for part, seconds in parts.items()}


def describe(report: dict[str, Any]) -> str:
    """The report as text: the machine, the table, what eats the rest, what is missing and why."""
    lines = [f"{report['target']} with {report['draft']}, {report['dtype']}: {machine_line(report)}", ""]
    lines.append(bench_table(report))
    for result in report["results"]:
        if result["domain"] == report["results"][0]["domain"] and "reached" in result:
            parts = sorted(breakdown(result).items(), key=lambda pair: -pair[1])
            text = ", ".join(f"{part} {share:+.1%}" for part, share in parts)
            lines.append(f"beyond bare forwards, R={result['rows']} {result['method']}: {text}")
    for name, reason in report["unavailable"].items():
        lines.append(f"left out: {BASELINES.get(name, name)}: {reason}")
    return "\n".join(lines)


__all__ = ["bench_table", "breakdown", "describe", "machine_line"]
