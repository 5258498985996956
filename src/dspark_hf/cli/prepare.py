"""`dspark-hf prepare`: the target's own responses to prompts, as training data for `dspark-hf train`."""

from __future__ import annotations

import argparse
import sys

from .arguments import load_tokenizer
from .target import add_target_arguments, load_target


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "prepare",
        help="let the target answer prompts, as training data",
        description="Let the target answer prompts, as training data for its draft. Running the same command again "
        "continues where it stopped.",
    )
    add_target_arguments(parser)
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts",
        required=True,
        metavar="FILE|DATASET",
        help="JSONL file or Hub dataset; each row has `prompt` (text), `messages` (a chat) or `prompt_ids`",
    )
    group.add_argument("--column", metavar="NAME", help="another name for the text or the messages")
    group.add_argument("--split", default="train", help="of a Hub dataset; default: train")
    group.add_argument("--config", metavar="NAME", help="configuration of a Hub dataset")
    group.add_argument("--limit", type=int, metavar="N", help="use the first N prompts")
    group.add_argument("--max-prompt-tokens", type=int, metavar="N", help="leave longer prompts out")
    group.add_argument("--no-chat", action="store_true", help="do not apply the tokenizer's chat template")
    group.add_argument("--system", metavar="TEXT", help="a system message for every prompt")
    group.add_argument("--thinking", choices=("on", "off"), help="for chat templates that can switch it")
    group = parser.add_argument_group("responses")
    group.add_argument("--output", required=True, metavar="FILE", help="JSONL file to append to")
    group.add_argument("--responses", type=int, default=1, metavar="N", help="answers per prompt; default: 1")
    group.add_argument(
        "--greedy", type=float, default=0.5, metavar="SHARE", help="share of greedy answers; default: 0.5"
    )
    group.add_argument("--temperature", type=float, default=1.0, metavar="T", help="of the sampled ones; default: 1")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--top-k", type=int, default=0, metavar="K")
    group.add_argument("--max-new-tokens", type=int, default=1024, metavar="N", help="default: 1024")
    group.add_argument("--batch-size", type=int, default=64, metavar="N", help="answers at once; default: 64")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument(
        "--shard", default="0/1", metavar="I/N", help="every N-th prompt from number I on, each to its own output"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand."""
    from ..training.prepare import ResponseOptions, read_prompts, tokenize_prompts, write_responses

    options = ResponseOptions(
        responses=args.responses,
        greedy=args.greedy,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
    )
    shard = _shard(args.shard)
    tokenizer = load_tokenizer(args.model)
    prompts = tokenize_prompts(
        read_prompts(args.prompts, split=args.split, config=args.config),
        tokenizer,
        column=args.column,
        chat=not args.no_chat,
        system=args.system,
        thinking=None if args.thinking is None else args.thinking == "on",
        max_tokens=args.max_prompt_tokens,
        limit=args.limit,
    )
    target = load_target(args)
    added = write_responses(
        target,
        prompts,
        args.output,
        options,
        tokenizer=tokenizer,
        batch_size=args.batch_size,
        shard=shard,
        settings={"model": args.model, "dtype": str(target.dtype).removeprefix("torch.")},
        progress=sys.stderr.isatty(),
    )
    print(f"{added} responses added to {args.output}")
    return 0


def _shard(text: str) -> tuple[int, int]:
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or int(parts[0]) >= int(parts[1]):
        raise ValueError(f"--shard: expected I/N with I from 0 to N - 1, got {text!r}")
    return int(parts[0]), int(parts[1])


__all__ = ["add_parser", "run"]
