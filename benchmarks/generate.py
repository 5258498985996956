"""Plain `generate()` against DSpark, in one process.

    python benchmarks/generate.py --target TARGET --draft DRAFT --prompts prompts.jsonl --source gsm8k mbpp \
        --rows 1 8 --dtypes bfloat16 float32 --draft-lengths 3 7 --schedules throughput --output out.json

Speed. Every batch of prompts is answered by plain `generate()` and by DSpark in every setting, taking turns, in an
order that rotates with each repeat, so that a machine that warms up or slows down is unfair to nobody. Of each (batch,
setting) the median over the repeats counts; a line of the table divides all tokens by all those seconds.

Overhead. What a round costs beyond its two forwards is this package's own doing. So the same shapes are measured bare:
the draft's block with its cache filled, and a plain forward of the target over 1 + l tokens on a filled cache.
*overhead* is the wall time of a run's rounds (prefill left out) over the sum of their bare costs, with the rows that
were still running in each; *ideal* is the speed-up over plain decoding if it were 1. Both are medians over all runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dspark_hf import DSparkDraftModel
from dspark_hf.benchmarking.bare import BareForwards
from dspark_hf.benchmarking.machine import environment, model_name, print_table, save_json
from dspark_hf.benchmarking.prompts import make_batches, read_prompts
from dspark_hf.benchmarking.runner import Measurement, Runner, Setting, overhead, speed


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", required=True, metavar="REPO|FOLDER")
    parser.add_argument("--draft", required=True, metavar="REPO|FOLDER")
    parser.add_argument("--prompts", required=True, type=Path, metavar="JSONL", help="prompt_ids or prompt, and source")
    parser.add_argument("--source", nargs="+", default=[], help="only prompts of these sources")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N prompts of each source")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8], metavar="R", help="batch sizes")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--draft-lengths", nargs="*", type=int, metavar="N", help="constant; default: the block size")
    parser.add_argument("--schedules", nargs="*", default=[], choices=("confidence", "throughput"))
    parser.add_argument("--threshold", type=float, default=0.5, help="of the confidence schedule; default: 0.5")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--temperature", type=float, metavar="T", help="sample; default: greedy")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: PyTorch's choice")
    parser.add_argument("--attn-implementation", metavar="NAME")
    parser.add_argument("--no-bare", action="store_true", help="leave the bare forwards out")
    parser.add_argument("--output", type=Path, metavar="JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    places = ("target", "draft", "prompts", "output")
    report: dict[str, Any] = {
        "benchmark": "generate",
        "environment": environment(),
        "target": model_name(args.target),
        "draft": model_name(args.draft),
        "prompts": args.prompts.name,
        "arguments": {name: value for name, value in vars(args).items() if name not in places},
        "results": [],
    }
    for dtype in args.dtypes:
        target, draft, prompts = load(args, dtype)
        for rows in args.rows:
            results = measure(args, target, draft, prompts, rows)
            report["results"] += [{"dtype": dtype, "rows": rows, **result} for result in results]
    print_results(report)
    if args.output is not None:
        save_json(args.output, report)


def load(args: argparse.Namespace, dtype: str) -> tuple[PreTrainedModel, DSparkDraftModel, dict[str, list[list[int]]]]:
    """Target, draft, and prompts by source."""
    options = {"attn_implementation": args.attn_implementation} if args.attn_implementation else {}
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype, **options).to(args.device).eval()
    draft = DSparkDraftModel.from_pretrained(args.draft, dtype=target.dtype).to(args.device).eval()
    prompts = read_prompts(
        args.prompts, lambda: AutoTokenizer.from_pretrained(args.target), sources=args.source, limit=args.limit
    )
    return target, draft, prompts


def settings_of(args: argparse.Namespace, draft: DSparkDraftModel) -> list[Setting]:
    """Plain generation first, then every DSpark setting asked for."""
    block = draft.config.num_draft_tokens
    lengths = [block] if args.draft_lengths is None else args.draft_lengths
    thresholds = {"confidence": args.threshold, "throughput": 0.0}
    constant = [Setting("constant", length) for length in lengths]
    return [Setting(), *constant, *(Setting(name, block, thresholds[name]) for name in args.schedules)]


def measure(
    args: argparse.Namespace,
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    prompts: dict[str, list[list[int]]],
    rows: int,
) -> list[dict[str, Any]]:
    """All settings at one batch size: a result for each setting over all sources, then for each source on its own."""
    settings = settings_of(args, draft)
    runner = Runner(args, target, draft)
    pad = target.generation_config.pad_token_id
    batches = make_batches(prompts, rows, pad if pad is not None else 0)
    batches = [batch.to(target.device) for batch in batches]

    # Twice, so that nobody pays for first use: self-check, cost table, allocator, kernels of new shapes.
    for setting in 2 * settings:
        runner.run(setting, batches[0], Measurement("warm-up"), max_new_tokens=min(16, args.max_new_tokens))
    # Contexts grow during a run; the middle of the answer stands for all of it.
    length = median(int(row) for batch in batches for row in batch.attention_mask.sum(1))
    bare = None if args.no_bare else BareForwards(target, draft, int(length) + args.max_new_tokens // 2)
    measured = {setting: [Measurement(batch.source) for batch in batches] for setting in settings}
    for number, batch in enumerate(batches):
        for repeat in range(args.repeats):
            turn = (number + repeat) % len(settings)
            for setting in settings[turn:] + settings[:turn]:
                measurement = measured[setting][number]
                stats = runner.run(setting, batch, measurement)
                if bare is not None and setting.schedule == "constant":
                    measurement.costs.append(bare.compare(stats, setting.draft_length))

    results = []
    sources = list(dict.fromkeys(batch.source for batch in batches))
    for source in [None, *sources] if len(sources) > 1 else [None]:
        chosen = {s: [m for m in measured[s] if source in (None, m.source)] for s in settings}
        for setting in settings:
            result = speed(chosen[setting], chosen[settings[0]])
            if costs := [cost for measurement in chosen[setting] for cost in measurement.costs]:
                result |= overhead(costs) | {"runs": [asdict(cost) for cost in costs]}
            results.append({"source": source or "all", "setting": setting.name, **asdict(setting), **result})
    return results


def print_results(report: dict[str, Any]) -> None:
    """The report as a table."""
    machine = report["environment"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores"
    print(f"\n{report['target']} with {report['draft']}: {where}, torch {machine['torch']}, ", end="")
    print(f"transformers {machine['transformers']}, commit {machine['commit']}\n")
    header = (
        "dtype",
        "R",
        "prompts",
        "setting",
        "tok/s",
        "speed",
        "tau",
        "verified",
        "same",
        "round ms",
        "overhead",
        "ideal",
    )
    rows = []
    for result in report["results"]:
        row = [result["dtype"], str(result["rows"]), result["source"], result["setting"]]
        row += [f"{result['tokens_per_second']:.1f}", f"{result['speedup']:.2f}"]
        if "tau" in result:
            row += [f"{result['tau']:.2f}", f"{result['mean_verify_length']:.1f}"]
            row += [f"{result['identical_rows']}/{result['compared_rows']}"]
        if "overhead" in result:
            row += [
                f"{1000 * result['round_seconds']:.1f}",
                f"{result['overhead']:.2f}",
                f"{result['ideal_speedup']:.2f}",
            ]
        rows.append(row + [""] * (len(header) - len(row)))
    print_table(header, rows)


if __name__ == "__main__":
    main()
