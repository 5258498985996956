"""Train a draft on a GPU machine that has no network, within minutes: everything goes in and comes out as small files.

    python examples/gpu_training.py pack --recipe examples/smollm2.args --output inputs       # here
    python inputs/gpu_training.py run --inputs inputs --work work --output out                # on the GPU machine
    python examples/gpu_training.py unpack --inputs out --output my-draft                     # here

`pack` puts the target in bfloat16, the recipe, its data and this package into pieces below 60 MB. `run` joins them,
lets the target answer more prompts where some were packed, trains as many steps of the recipe as fit, calibrates, and
writes the draft as pieces below 16 MB. It keeps to `--minutes`, and run again with the same `--work` it goes on where
it stopped. The machine needs PyTorch and Transformers with Accelerate; this package comes along.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import _gpu_pack
import _gpu_run
from _pieces import read_pieces


def pack(args: argparse.Namespace) -> None:
    """inputs into pieces"""
    report(_gpu_pack.pack(args), args.output)


def run(args: argparse.Namespace) -> None:
    """train on the GPU machine"""
    report(_gpu_run.GpuRun(args).run(), args.output)


def unpack(args: argparse.Namespace) -> None:
    """the trained draft as a folder"""
    read_pieces(args.inputs, "checkpoint", args.output)
    record = json.loads((args.output / "run.json").read_text(encoding="utf-8"))
    steps = f"trained {record['trained']} of {record['steps']} planned steps (the recipe has {record['recipe_steps']})"
    print(f"{args.output}: {steps}; {'' if record['calibrated'] else 'not '}calibrated")


def report(pieces: list[Path], folder: Path) -> None:
    """How much there is to carry."""
    sizes = [path.stat().st_size / 1e6 for path in pieces]
    print(f"{len(pieces)} pieces in {folder}, {sum(sizes):.1f} MB in all, the largest {max(sizes):.1f} MB")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(required=True, metavar="STEP")
    for step in (pack, run, unpack):
        command = steps.add_parser(step.__name__, help=step.__doc__)
        command.set_defaults(step=step)
        command.add_argument("--output", type=Path, required=True, help="folder to write to")
        if step is not pack:
            command.add_argument("--inputs", type=Path, required=True, help="folder with the pieces")
        if step is not unpack:
            size = 56.0 if step is pack else 15.0
            command.add_argument("--megabytes", type=float, default=size, help=f"largest piece; default: {size:.0f}")
        if step is not unpack:
            (_gpu_pack if step is pack else _gpu_run).add_arguments(command)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        args.step(args)
    except (ValueError, OSError) as error:
        print(f"gpu_training {args.step.__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
