"""`dspark-hf generate`: answer prompts with a target and its draft."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import TextStreamer

from .. import record_generation
from ..stats import GenerationStats
from . import arguments


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "generate",
        help="answer prompts with a target and its draft",
        description="Answer prompts with a target and its DSpark draft. Several prompts run as one batch.",
    )
    parser.add_argument("prompt", nargs="*", help="one or more prompts")
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="more prompts, one a line; - for stdin")
    parser.add_argument("--prompt-ids", metavar="IDS", help="one prompt as comma-separated token ids")
    parser.add_argument("--no-chat", action="store_true", help="do not apply the tokenizer's chat template")
    parser.add_argument("--stats", action="store_true", help="print what the draft achieved, to stderr")
    arguments.add_pair_arguments(parser, model_help="target model", model_required=True)
    arguments.add_generation_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand."""
    prompts = list(args.prompt)
    if args.prompt_file is not None:
        text = sys.stdin.read() if str(args.prompt_file) == "-" else args.prompt_file.read_text(encoding="utf-8")
        prompts += [line for line in text.splitlines() if line.strip()]
    if bool(prompts) == (args.prompt_ids is not None):
        raise ValueError("give prompts as arguments or in --prompt-file, or one as --prompt-ids")
    pair = arguments.load_pair(args, args.model)
    if args.prompt_ids is not None:
        inputs = arguments.encode_ids(pair, args.prompt_ids)
    else:
        inputs = arguments.encode_prompts(pair, prompts, chat=not args.no_chat)
    settings = arguments.generation_settings(args)
    # One answer is shown as it grows; several would be interleaved.
    stream = inputs["input_ids"].shape[0] == 1 and pair.tokenizer is not None
    if stream:
        settings["streamer"] = TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)

    torch.manual_seed(args.seed)
    start = time.perf_counter()
    with record_generation() as stats:
        output = pair.model.generate(**inputs, assistant_model=pair.draft, **settings)
    answers = output[:, inputs["input_ids"].shape[1] :].tolist()
    seconds = time.perf_counter() - start

    if not stream:
        for number, answer in enumerate(answers):
            if len(answers) > 1:
                print(f"--- {number + 1}")
            print(arguments.decode(pair, answer))
    if args.stats:
        print(describe(stats), f"{seconds:.2f} s", sep="\n", file=sys.stderr)
    return 0


def describe(stats: GenerationStats) -> str:
    """The statistics of a run, in two or three lines."""
    by_position = " ".join(f"{rate:.2f}" for rate in stats.acceptance_by_position)
    copied = f", {stats.copied} of them copied from the text" if stats.copied else ""
    return "\n".join(
        (
            f"tau {stats.tau:.2f} tokens a round over {stats.rounds} rounds; {stats.accepted} of {stats.drafted} "
            f"drafted tokens accepted{copied} (by position: {by_position or '-'})",
            f"draft {stats.draft_seconds:.2f} s, verify {stats.verify_seconds:.2f} s, "
            f"rest {stats.other_seconds:.2f} s",
        )
    )


__all__ = ["add_parser", "describe", "run"]
