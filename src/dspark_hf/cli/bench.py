"""`dspark-hf bench`: plain `generate()`, Transformers' other ways to speed up, and DSpark, side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from .. import DSparkDraftModel
from . import arguments
from .profile import add_positional_pair, load_positional_pair

# What --quick sets where nothing is given: a run of about ten minutes on one CPU core with a model of 135 M parameters.
QUICK = {"limit": 4, "max_new_tokens": 64, "repeats": 1, "rows": [1, 4, 8]}
DEFAULTS = {"limit": None, "max_new_tokens": 128, "repeats": 3, "rows": [1, 4, 8]}


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "bench",
        help="measure speed, acceptance and exactness beside what you would use instead",
        description="Answer the same prompts with plain generate(), with Transformers' own ways to speed up and with "
        "DSpark, taking turns in one process. Reports speed, tau, acceptance, exactness, and the physical limit.",
    )
    add_positional_pair(parser)
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts",
        required=True,
        type=Path,
        metavar="FILE",
        help="JSONL with `prompt` (text) or `prompt_ids`, and `source`, in each row",
    )
    group.add_argument(
        "--domains", nargs="+", metavar="NAME", help="math, code, chat, a source's name, or all; default: each domain"
    )
    group.add_argument("--limit", type=int, metavar="N", help="prompts of each domain, up to whole batches")
    group.add_argument("--no-chat", action="store_true", help="do not apply the tokenizer's chat template")
    group = parser.add_argument_group("DSpark")
    group.add_argument("--draft-lengths", nargs="*", type=int, metavar="N", help="constant; default: the block size")
    group.add_argument("--schedules", nargs="*", default=["confidence", "throughput"], metavar="NAME")
    group.add_argument("--threshold", type=float, default=0.5, metavar="C", help="of confidence; default: 0.5")
    group = parser.add_argument_group("baselines")
    group.add_argument("--no-baselines", action="store_true", help="only plain generate()")
    group.add_argument("--dflash", metavar="REPO|FOLDER", help="rank-0 draft for Transformers' DFlash generator")
    group.add_argument("--assistant", metavar="REPO|FOLDER", help="small model for Transformers' assisted generation")
    group.add_argument("--lookup-tokens", type=int, default=10, metavar="N", help="of prompt lookup; default: 10")
    group.add_argument("--compile", action="store_true", help="compile on a CPU too")
    group = parser.add_argument_group("runs (greedy unless a sampling flag is given)")
    group.add_argument("--quick", action="store_true", help="4 prompts a domain, 64 tokens, 1 repeat, less at batches")
    group.add_argument("--rows", nargs="+", type=int, metavar="R", help="batch sizes; default: 1 4 8")
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="default: 128")
    group.add_argument("--repeats", type=int, metavar="N", help="default: 3")
    group.add_argument("--temperature", type=float, metavar="T")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--seed", type=int, default=0, help="default: 0")
    group.add_argument("--no-bare", action="store_true", help="leave the bare forwards out")
    group.add_argument("--no-deficits", action="store_true", help="leave the teacher-forced check out")
    group = parser.add_argument_group("output")
    group.add_argument("--output", type=Path, metavar="JSON", help="store the run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand."""
    from ..benchmarking.bench import Benchmark
    from ..benchmarking.machine import model_name, save_json, training_record
    from ..benchmarking.prompts import group_by_domain, read_prompts
    from ..benchmarking.tables import describe

    for name, value in (QUICK if args.quick else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    check(args)
    pair = load_positional_pair(args)
    by_source = read_prompts(args.prompts, lambda: pair.tokenizer, chat=not args.no_chat)
    prompts = group_by_domain(by_source, args.domains)
    baselines = load_baselines(args, pair)
    benchmark = Benchmark(pair.model, pair.draft, baselines, plan(args, pair.draft), _say)
    places = ("model", "draft", "prompts", "output", "dflash", "assistant", "run", "command")
    report: dict[str, Any] = benchmark.run(prompts)
    report |= {
        "target": model_name(args.model),
        "draft": model_name(args.draft),
        "draft_training": training_record(args.draft),
        "dflash_training": None if args.dflash is None else training_record(args.dflash),
        "prompts": args.prompts.name,
        "arguments": {name: value for name, value in vars(args).items() if name not in places},
    }
    print(describe(report))
    if args.output is not None:
        results = report.pop("results")  # last in the file: what it is about comes first
        save_json(args.output, report | {"results": results})
    return 0


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot be measured, before anything is loaded."""
    from ..benchmarking.bench import SCHEDULES

    for name in ("limit", "max_new_tokens", "repeats", "lookup_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")
    if min(args.rows) < 1:
        raise ValueError(f"--rows must be at least 1, got {min(args.rows)}.")
    if unknown := [name for name in args.schedules if name not in SCHEDULES[1:]]:
        raise ValueError(f"--schedules: {', '.join(unknown)} is not one of {', '.join(SCHEDULES[1:])}.")
    if not args.prompts.is_file():
        raise ValueError(f"--prompts: there is no file {args.prompts}.")


def plan(args: argparse.Namespace, draft: DSparkDraftModel):
    """What to measure, from the arguments."""
    from ..benchmarking.bench import Plan

    block = draft.config.num_draft_tokens
    lengths = [block] if args.draft_lengths is None else args.draft_lengths
    if wrong := [length for length in lengths if not 1 <= length <= block]:
        raise ValueError(f"--draft-lengths: {wrong[0]} is not between 1 and {block}, the draft's block.")
    return Plan(
        rows=args.rows,
        limit=args.limit,
        repeats=args.repeats,
        draft_lengths=lengths,
        schedules=args.schedules,
        threshold=args.threshold,
        thin_batches=args.quick,
        bare=not args.no_bare,
        exactness=not args.no_deficits,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
    )


def load_baselines(args: argparse.Namespace, pair: arguments.Pair):
    """Transformers' own ways to decode that can run with this pair."""
    from ..benchmarking.baselines import Baselines, build_baselines

    if args.no_baselines:
        return Baselines()
    options = {"dtype": pair.model.dtype}
    rank_zero = assistant = None
    if args.dflash is not None:
        rank_zero = DSparkDraftModel.from_pretrained(args.dflash, **options).to(pair.model.device).eval()
    if args.assistant is not None:
        assistant = AutoModelForCausalLM.from_pretrained(args.assistant, **options).to(pair.model.device).eval()
    return build_baselines(
        pair.model,
        pair.draft,
        rank_zero=rank_zero,
        assistant=assistant,
        lookup_tokens=args.lookup_tokens,
        compile_anywhere=args.compile,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


__all__ = ["add_parser", "run"]
