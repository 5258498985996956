"""What a confidence threshold trades: acceptance rate against tokens per step, by domain (paper, figure 5).

    python benchmarks/thresholds.py --target TARGET --draft DRAFT --prompts prompts.jsonl --plot thresholds.png

Each domain's prompts are answered in one batch under the schedule "confidence" with rising thresholds. Acceptance rate:
share of the verified drafts that the target took. Tokens per step: tokens per row and forward of the target, its own
included. A higher threshold verifies less, of which more is accepted, at the price of more steps. No clock is involved:
the numbers are the same on any machine, up to rounding.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load import add_common_arguments, batches_of, load, new_report, total

from dspark_hf.benchmarking.machine import print_table, save_json
from dspark_hf.benchmarking.runner import Measurement, Runner, Setting

THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_common_arguments(parser)
    parser.add_argument("--rows", type=int, default=8, metavar="R", help="prompts of a batch; default: 8")
    parser.add_argument("--limit", type=int, default=8, metavar="N", help="prompts of each domain, at least a batch")
    parser.add_argument("--thresholds", nargs="+", type=float, default=list(THRESHOLDS), metavar="C")
    parser.add_argument("--rule", default="confidence", choices=("confidence", "survival"), help="per slot, or product")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the sweep (needs matplotlib)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    plot, args.plot = args.plot, None  # a place, which says nothing to others
    target, draft, prompts = load(args)
    runner, block = Runner(args, target, draft), draft.config.num_draft_tokens
    report = new_report("thresholds", args)
    report["calibrated"] = draft.config.confidence_calibration is not None
    report["results"] = []
    batches = batches_of(args, target, prompts, args.rows, args.limit)
    for domain in prompts:
        for threshold in args.thresholds:
            setting = Setting(args.rule, block, threshold)
            measurements = [Measurement(domain) for batch in batches if batch.source == domain]
            chosen = [batch for batch in batches if batch.source == domain]
            for measurement, batch in zip(measurements, chosen, strict=True):
                runner.run(setting, batch, measurement)
            report["results"].append({"domain": domain, "threshold": threshold, **summary(measurements)})
    print_results(report["results"])
    if args.output is not None:
        save_json(args.output, report)
    if plot is not None:
        draw(report["results"], plot)


def summary(measurements: list[Measurement]) -> dict[str, Any]:
    stats = total(measurements)
    rounds = sum(len(event.rows) for event in stats.round_events)
    return {
        "acceptance_rate": stats.accepted / stats.verified if stats.verified else None,
        "tokens_per_step": stats.tau,
        "mean_verify_length": stats.verified / max(1, rounds),
        "expected_tokens_per_step": stats.expected_tau,
        "rounds": rounds,
        "tokens": [[len(answer) for answer in measurement.answers] for measurement in measurements],
    }


def print_results(results: list[dict[str, Any]]) -> None:
    rows = []
    for result in results:
        rate = result["acceptance_rate"]
        rows.append(
            [
                result["domain"],
                f"{result['threshold']:.2f}",
                "" if rate is None else f"{rate:.1%}",
                f"{result['tokens_per_step']:.2f}",
                f"{result['mean_verify_length']:.2f}",
            ]
        )
    print_table(("prompts", "threshold", "accepted", "tokens per step", "verified"), rows)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Two panels over the threshold, a line per domain."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for domain in dict.fromkeys(result["domain"] for result in results):
        chosen = [result for result in results if result["domain"] == domain and result["acceptance_rate"] is not None]
        thresholds = [result["threshold"] for result in chosen]
        left.plot(thresholds, [100 * result["acceptance_rate"] for result in chosen], "o-", markersize=3, label=domain)
        right.plot(thresholds, [result["tokens_per_step"] for result in chosen], "o-", markersize=3, label=domain)
    left.set(xlabel="confidence threshold", ylabel="accepted of the verified drafts, %", ylim=(0, 100))
    right.set(xlabel="confidence threshold", ylabel="tokens per step", ylim=(1, None))
    left.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


if __name__ == "__main__":
    main()
