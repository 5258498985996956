"""`dspark-hf convert`: a draft from one packaging into another."""

from __future__ import annotations

import argparse
import shlex
import sys

from ..checkpoints import PACKAGINGS, convert_checkpoint
from . import source


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "convert",
        help="write a draft in another packaging",
        description="Read a draft in any packaging and write it in another, with a provenance.json beside it. What "
        "the other packaging cannot express is refused by name.",
    )
    source.add_source_arguments(parser)
    parser.add_argument("output", metavar="OUTPUT", help="folder to write; must not be there, or be empty")
    parser.add_argument(
        "--to",
        required=True,
        choices=PACKAGINGS,
        help="native: this package's own; deepspec: the official layout; speculators: vLLM's trainer; serving: one "
        "file that vLLM and SGLang both load",
    )
    parser.add_argument(
        "--target",
        metavar="REPO|FOLDER",
        help="the target: deepspec takes embedding and head from it where the draft stores none, serving compares "
        "stored ones with it and leaves them out, speculators notes its name",
    )
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand."""
    record = convert_checkpoint(
        args.draft,
        args.output,
        args.to,
        target=args.target,
        dtype=args.dtype,
        sample_from_anchor=source.layout(args),
        command=_command(args),
        progress=lambda line: print(f"{line} ...", file=sys.stderr),
        **source.source_options(args),
    )
    for note in (*record["source"]["assumed"], *record["written"]["changes"]):
        print(f"  {note}")
    print(f"{args.output}: {record['source']['packaging']} to {args.to}, recorded in provenance.json")
    return 0


def _command(args: argparse.Namespace) -> str:
    """The command line for the record, without a token."""
    words = ["dspark-hf", "convert", args.draft, args.output, "--to", args.to]
    for flag in ("target", "revision", "subfolder", "layout"):
        value = getattr(args, flag)
        words += [f"--{flag}", value] if value is not None else []
    words += [word for text in args.set for word in ("--set", text)]
    return shlex.join(words + (["--dtype", args.dtype] if args.dtype != "auto" else []))


__all__ = ["add_parser", "run"]
