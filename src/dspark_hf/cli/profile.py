"""`dspark-hf profile`: what a round costs on this machine, measured and kept for later `generate()` calls."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from ..generation.profiling import measure_profile, save_profile
from ..throughput import ThroughputProfile
from . import arguments


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "profile",
        help="measure what drafting and verifying cost on this machine",
        description='Measure the cost table of the "throughput" schedule and save it where generate() finds it. '
        "generate() measures a short one itself at first use; this one takes its time.",
    )
    add_positional_pair(parser)
    group = parser.add_argument_group("grid")
    group.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16], metavar="R", help="default: 1 4 16")
    group.add_argument("--context", nargs="+", type=int, default=[256], metavar="C", help="cached tokens; default: 256")
    group.add_argument("--seconds", type=float, default=30.0, metavar="S", help="time to spend; default: 30")
    group = parser.add_argument_group("output")
    group.add_argument("--plot", type=Path, metavar="PNG", help="draw the table (needs matplotlib)")
    group.add_argument("--json", action="store_true", help="print the measurements as JSON instead of a table")
    group.add_argument("--no-save", action="store_true", help="keep nothing")
    parser.set_defaults(run=run)


def add_positional_pair(parser: argparse.ArgumentParser) -> None:
    """Declare MODEL and DRAFT and how to load them, for [`arguments.load_pair`]."""
    parser.add_argument("model", metavar="MODEL", help="target: repository or folder")
    parser.add_argument("draft", metavar="DRAFT", help="its DSpark draft: repository or folder")
    group = parser.add_argument_group("models")
    group.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    group.add_argument("--device", help="e.g. cuda, mps or cpu; default: a GPU where there is one")
    group.add_argument("--attn-implementation", metavar="NAME", help="the target's attention, e.g. sdpa or eager")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: PyTorch's choice")
    parser.set_defaults(num_draft_tokens=None, schedule=None, confidence_threshold=None)


def load_positional_pair(args: argparse.Namespace) -> arguments.Pair:
    """The pair that [`add_positional_pair`] declared."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return arguments.load_pair(args, args.model)


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand."""
    if min(args.rows) < 1 or min(args.context) < 1 or args.seconds <= 0:
        raise ValueError("--rows, --context and --seconds must be positive.")
    pair = load_positional_pair(args)
    profile = measure_profile(
        pair.model, pair.draft, rows=args.rows, contexts=args.context, time_budget=args.seconds, max_samples=20
    )
    saved = None if args.no_save else save_profile(profile)
    if args.json:
        print(json.dumps({**asdict(profile), "path": None if saved is None else str(saved)}, indent=1))
    else:
        print(describe(profile))
        print(f"saved as {saved}" if saved is not None else "not saved")
    if args.plot is not None:
        from ..plots import plot_profile

        plot_profile(profile, args.plot)
    return 0


def describe(profile: ThroughputProfile) -> str:
    """The cost table as text: milliseconds of a step by tokens per row, of the draft, and when drafting pays.

    *Break-even* is the number of tokens that a round must give each row to be worth its time, with everything verified.
    """
    contexts = sorted({point.context for point in profile.verify_points})
    lines = []
    for context in contexts:
        points = [point for point in profile.verify_points if point.context == context]
        widths = sorted({point.tokens // point.rows for point in points})
        header = "".join(f"{f'{width} tokens':>11}" for width in widths)
        lines.append(f"context {context}, ms:   rows{header}      draft  break-even")
        for rows in sorted({point.rows for point in points}):
            cells = [1e3 * profile.verify_seconds(rows * width, rows, context) for width in widths]
            even = profile.seconds(rows * widths[-1], rows, context) / profile.plain_seconds(rows, context)
            text = "".join(f"{cell:11.1f}" for cell in cells)
            lines.append(f"{rows:>{len(f'context {context}, ms:') + 7}}{text}{_ms(profile, rows):11.1f}{even:12.2f}")
    lines.append(f"measured in {profile.measured_seconds:.1f} s")
    return "\n".join(lines)


def _ms(profile: ThroughputProfile, rows: int) -> float:
    return 1e3 * profile.draft_seconds(rows)


__all__ = ["add_parser", "add_positional_pair", "describe", "load_positional_pair", "run"]
