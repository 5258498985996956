"""`dspark-hf demo`: the same prompts answered by plain `generate()` and by DSpark, side by side."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from pathlib import Path

import torch
from transformers.utils import logging

from ..demo import Comparison, compare, smollm2_folder
from . import arguments
from .generate import describe

PAGE = Path(__file__).resolve().parents[3] / "space" / "app.py"
PROMPTS = (
    "Write a Python function to check whether a string is a palindrome.",
    "A bakery bakes 18 trays of rolls every morning, with 12 rolls on each tray. It sells 150 rolls before noon and "
    "half of the rest in the afternoon. How many rolls are left in the evening?",
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "demo",
        help="plain generate() against DSpark on the same prompt",
        description="Answer each prompt with plain generate() and with DSpark; compare answers and time taken.",
    )
    parser.add_argument("--prompt", action="append", help="may be given several times; default: two prompts")
    parser.add_argument("--prompt-ids", metavar="IDS", help="the prompt as comma-separated token ids")
    parser.add_argument("--no-chat", action="store_true", help="do not apply the tokenizer's chat template")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="timed runs of each; the faster counts")
    parser.add_argument("--space", action="store_true", help="show it live in the browser instead (in a clone)")
    arguments.add_pair_arguments(
        parser,
        model_help="target model; default: SmolLM2-135M-Instruct, fetched once",
        model_required=False,
        draft_required=False,
    )
    arguments.add_generation_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand."""
    if args.space:
        return show(args)
    if args.draft is None:
        raise ValueError("--draft: name a DSpark draft for the target.")
    logging.disable_progress_bar()  # the demo's models load in a second
    pair = arguments.load_pair(args, args.model or str(smollm2_folder()))
    settings = arguments.generation_settings(args)
    dtype = str(pair.model.dtype).removeprefix("torch.")
    print(f"Target {args.model or 'SmolLM2-135M-Instruct'}, {dtype}, {pair.model.device.type}", end="")
    print(f", {torch.get_num_threads()} threads" if pair.model.device.type == "cpu" else "")
    if args.prompt_ids is not None:
        prompts = {f"token ids {args.prompt_ids}": arguments.encode_ids(pair, args.prompt_ids)}
    else:
        texts = args.prompt or PROMPTS
        prompts = {text: arguments.encode_prompts(pair, [text], chat=not args.no_chat) for text in texts}
    for prompt, inputs in prompts.items():
        print(f"\n== prompt: {prompt}")
        comparison = compare(pair.model, pair.draft, inputs, repeats=args.repeats, seed=args.seed, **settings)
        print(report(comparison, pair, sampled=settings["do_sample"]))
    return 0


def show(args: argparse.Namespace) -> int:
    """Start the page of `space/`, which lies beside the package in a clone and is no part of an installation."""
    if not PAGE.is_file():
        raise ValueError("--space: the page is not installed with the package; in a clone run `make space`.")
    given = (("--target", args.model), ("--draft", args.draft))
    return subprocess.call([sys.executable, str(PAGE), *(part for pair in given if pair[1] for part in pair)])


def report(comparison: Comparison, pair: arguments.Pair, *, sampled: bool) -> str:
    """The comparison as text: both answers, their speed, what the draft achieved, and the verdict."""
    plain, dspark = comparison.plain_ids, comparison.dspark_ids
    ratio = comparison.dspark_speed / comparison.plain_speed
    return "\n".join(
        (
            f"\n== plain generate(): {len(plain)} tokens, {comparison.plain_speed:.1f} tokens/s",
            arguments.decode(pair, plain).strip(),
            f"\n== DSpark: {len(dspark)} tokens, {comparison.dspark_speed:.1f} tokens/s ({ratio:.2f} times plain)",
            arguments.decode(pair, dspark).strip(),
            "",
            describe(comparison.stats),
            verdict(comparison, pair, sampled=sampled),
        )
    )


def verdict(comparison: Comparison, pair: arguments.Pair, *, sampled: bool) -> str:
    """One sentence on whether the answers are the same, and on the first difference if they are not."""
    difference = comparison.difference
    if difference is None:
        return "outputs identical"
    if sampled:
        return "outputs differ, as sampled answers do: one distribution, different random draws"
    if math.isnan(difference.logit_gap):
        return f"outputs differ in length: one ends after {difference.index} tokens, equal up to there"
    left, right = (repr(arguments.decode(pair, [token])) for token in (difference.plain, difference.dspark))
    return (
        f"outputs differ from token {difference.index} on: plain {left}, DSpark {right}; the target's logits for the "
        f"two are {difference.logit_gap:+.4f} apart"
    )


__all__ = ["add_parser", "report", "run", "verdict"]
