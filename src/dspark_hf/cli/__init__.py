"""The command `dspark-hf`.

One module per subcommand, each with two functions: `add_parser(commands)` declares its arguments and sets `run`, and
`run(args)` does the work and returns the exit status. To add a command, write such a module and list it in `COMMANDS`.
"""

from __future__ import annotations

import argparse
import sys

from . import bench, calibrate, convert, demo, generate, inspect, prepare, profile, serve_command, train

COMMANDS = (generate, bench, prepare, train, calibrate, profile, inspect, convert, serve_command, demo)


def build_parser() -> argparse.ArgumentParser:
    """The parser of `dspark-hf` with all its subcommands."""
    parser = argparse.ArgumentParser(
        prog="dspark-hf",
        description="DSpark speculative decoding inside Transformers' generate(): same output, sooner.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `dspark-hf` with `argv` (default: the process's own) and return the exit status.

    What a user can put right (a wrong argument, a missing file, a draft that does not fit its target) ends with one
    line on stderr and status 1; anything else keeps its traceback.
    """
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"dspark-hf {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


__all__ = ["build_parser", "main"]
