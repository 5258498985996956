"""Arguments that name a checkpoint and how to read it, shared by the commands that look at files."""

from __future__ import annotations

import argparse
import json
from typing import Any

LAYOUTS = {"anchor-first": True, "1+N": False}


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the checkpoint, where it is, and what the user knows better than its configuration."""
    parser.add_argument("draft", metavar="REPO|FOLDER", help="the draft, in any packaging")
    group = parser.add_argument_group("where it is")
    group.add_argument("--revision", help="branch, tag or commit of a Hub repository")
    group.add_argument("--subfolder", help="folder inside the repository")
    group.add_argument("--token", help="for a private repository; default: the one you are logged in with")
    group.add_argument("--cache-dir", metavar="FOLDER", help="where repositories are kept")
    group.add_argument("--offline", action="store_true", help="use only what is in the cache")
    group = parser.add_argument_group("what you know better than its config.json")
    group.add_argument("--layout", choices=LAYOUTS, help="whether the anchor slot drafts")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="put a key into config.json before reading it; VALUE is JSON, null removes the key; may be repeated",
    )


def source_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for `checkpoints.open_checkpoint` from what [`add_source_arguments`] declared.

    Raises:
        `ValueError`: `--set` without an equals sign.
    """
    overrides = {}
    for text in args.set:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise ValueError(f"--set: expected KEY=VALUE, got {text!r}")
        try:
            overrides[key] = json.loads(value)
        except ValueError:
            overrides[key] = value  # a bare word is a string
    return {
        "revision": args.revision,
        "subfolder": args.subfolder,
        "token": args.token,
        "cache_dir": args.cache_dir,
        "local_files_only": args.offline,
        "config_overrides": overrides or None,
    }


def layout(args: argparse.Namespace) -> bool | None:
    """The block layout the user names, as `sample_from_anchor`."""
    return None if args.layout is None else LAYOUTS[args.layout]


__all__ = ["add_source_arguments", "layout", "source_options"]
