"""`dspark-hf serve-command`: the line that serves a target with a draft, for users who outgrow one machine."""

from __future__ import annotations

import argparse
import shlex

from ..checkpoints import launch_line, serving_config
from ..checkpoints.detect import detect_reader
from ..checkpoints.engines import verdicts
from ..checkpoints.files import open_checkpoint
from ..checkpoints.inspection import named_targets
from . import source


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "serve-command",
        help="print the line that serves a draft with vLLM or SGLang",
        description="Print the command that starts vLLM or SGLang with a target and its draft. If the engine would "
        "not serve the draft as it is, say why, and how to convert it where that helps.",
    )
    source.add_source_arguments(parser)
    parser.add_argument("--engine", required=True, choices=("vllm", "sglang"))
    parser.add_argument("--target", metavar="REPO|FOLDER", help="the target; default: the one the draft names")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand.

    Raises:
        `ValueError`: the engine would not serve this draft, or no target is named.
    """
    files = open_checkpoint(args.draft, headers_only=True, **source.source_options(args))
    reader = detect_reader(files)
    config = reader.read_config(files.config, files.tensors, source.layout(args))
    verdict = verdicts(files, reader, config)[args.engine]
    if not verdict.serves:
        raise ValueError(
            f"{args.engine} {verdict.version} would not serve {args.draft!r} as it is: "
            f"{'; '.join(verdict.obstacles)}. {_remedy(args, config)}"
        )
    target = args.target or next(iter(named_targets(files.config)), None)
    if target is None:
        raise ValueError("the draft does not name its target; pass --target")
    print(launch_line(args.engine, args.draft, target, config, revision=args.revision))
    return 0


def _remedy(args: argparse.Namespace, config) -> str:
    try:
        serving_config(config)
    except ValueError as error:
        return f"Converting does not help: {error}"
    command = ["dspark-hf", "convert", args.draft, "FOLDER", "--to", "serving"]
    command += ["--target", args.target] if args.target else []
    return f"Convert it first: {shlex.join(command)}"


__all__ = ["add_parser", "run"]
