"""How the cost of a round grows: with context, batch, drafted tokens and vocabulary. Random weights, no download.

    python benchmarks/scaling.py --output scaling.json

One axis at a time moves away from a base point. At each point `generate()` runs rounds with the draft (random weights
accept next to nothing, so a call of n tokens is about n rounds), and the bare forwards of a round are timed beside it.

- *break-even*: tokens that a round must give to pay, that is, the bare round over a bare step of plain decoding.
- *overhead*: wall time of a round over its bare forwards.
- *head*: the sequential head's steps, in percent of a round. It reads a matrix of rank times vocabulary for every
  drafted token, so it weighs most beside a small target with a large vocabulary, as the defaults have it; beside
  billions of parameters and many rows it all but vanishes (`benchmarks/gpu.py`).

The defaults take about three minutes on one CPU core. Larger by arguments: `--hidden-size`, `--layers`, the axes.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from dspark_hf import DSparkDraftModel, record_generation
from dspark_hf.benchmarking.bare import BareForwards
from dspark_hf.benchmarking.machine import environment, print_table, save_json, synchronize
from dspark_hf.training import DraftOptions, new_draft

AXES = ("context", "rows", "gamma", "vocabulary")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    group = parser.add_argument_group("axes: the first value of each is the base point")
    group.add_argument("--context", nargs="+", type=int, default=[512, 128, 2048, 4096], metavar="C")
    group.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16], metavar="R")
    group.add_argument("--gamma", nargs="+", type=int, default=[7, 1, 3, 15], metavar="N", help="drafted tokens")
    group.add_argument("--vocabulary", nargs="+", type=int, default=[32768, 131072, 262144], metavar="V")
    group = parser.add_argument_group("sizes")
    group.add_argument("--hidden-size", type=int, default=256, metavar="H", help="a multiple of 64; default: 256")
    group.add_argument("--layers", type=int, default=6, metavar="N", help="of the target; default: 6")
    group.add_argument("--draft-layers", type=int, default=2, metavar="N", help="default: 2")
    group.add_argument("--rank", type=int, default=128, metavar="R", help="of the Markov head; default: 128")
    group.add_argument("--head", default="vanilla", choices=("vanilla", "gated", "rnn"))
    group = parser.add_argument_group("runs")
    group.add_argument("--rounds", type=int, default=12, metavar="N", help="of each call; default: 12")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="calls at each point; default: 3")
    group.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    group.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: PyTorch's choice")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--output", type=Path, metavar="JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    logging.getLogger("dspark_hf").setLevel(logging.ERROR)  # that a random draft is of no use is no news here
    report: dict[str, Any] = {
        "benchmark": "scaling",
        "environment": environment(),
        "arguments": {name: value for name, value in vars(args).items() if name != "output"},
        "results": [],
    }
    pair, built = None, None
    for point in points(args):
        if built != (point["gamma"], point["vocabulary"]):
            pair, built = None, (point["gamma"], point["vocabulary"])  # the old one is freed first
            pair = build_pair(args, *built)
        report["results"].append(measure(args, *pair, point))
        print(".", end="", flush=True)
    print()
    for axis in AXES:
        print()
        print_results([result for result in report["results"] if axis in result["axes"]], axis)
    if args.output is not None:
        save_json(args.output, report)


def points(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The base point, then every point that differs from it on one axis; those of one pair of models together."""
    base = {axis: getattr(args, axis)[0] for axis in AXES}
    found = [base | {"axes": list(AXES)}]
    for axis in AXES:
        found += [base | {axis: value, "axes": [axis]} for value in getattr(args, axis)[1:]]
    return found


def build_pair(args: argparse.Namespace, gamma: int, vocabulary: int) -> tuple[PreTrainedModel, DSparkDraftModel]:
    """A random target and a random draft of block `gamma` for it, which borrows embedding and head."""
    heads = max(1, args.hidden_size // 64)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=64,
        max_position_embeddings=max(args.context) + args.rounds * (gamma + 1) + 64,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=None,
    )
    dtype = getattr(torch, args.dtype)
    target = Qwen3ForCausalLM(config).to(args.device, dtype).eval()
    options = DraftOptions(
        num_layers=args.draft_layers,
        taps=[0, args.layers - 1],
        block_size=gamma,
        markov_rank=args.rank,
        markov_head_type=args.head,
        mask_token_id=vocabulary - 1,
        warm_start=False,
    )
    draft = new_draft(target, options)[0].to(args.device, dtype).eval()
    draft.requires_grad_(False)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    return target, draft


def measure(args: argparse.Namespace, target, draft: DSparkDraftModel, point: dict[str, Any]) -> dict[str, Any]:
    """One point: rounds in `generate()`, the head's share of them, bare forwards. Seconds a round."""
    rows, gamma = point["rows"], point["gamma"]
    ids = torch.randint(target.config.vocab_size - 1, (rows, point["context"]), device=args.device)
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "assistant_model": draft, "do_sample": False}
    kwargs |= {"max_new_tokens": args.rounds + gamma + 1, "num_assistant_tokens": gamma}
    bare = BareForwards(target, draft, point["context"])
    target.generate(**kwargs | {"max_new_tokens": gamma + 3})
    runs = []
    for _ in range(args.repeats):
        with record_generation() as stats:
            target.generate(**kwargs)
        with timed_head(draft, ids.device) as spent, record_generation() as watched:
            target.generate(**kwargs)  # apart, since on an accelerator reading the clock waits for it
        block, verify, step = bare.seconds(rows, gamma)
        wall = (stats.seconds - stats.prefill_seconds) / stats.rounds
        runs.append(
            {
                "round_seconds": wall,
                "bare_draft_seconds": block,
                "bare_verify_seconds": verify,
                "bare_step_seconds": step,
                "head_seconds": spent[0] / watched.rounds,
                "head_percent": 100 * spent[0] / (watched.seconds - watched.prefill_seconds),
                "overhead": wall / (block + verify),
                "break_even": (block + verify) / step,
            }
        )
    return point | {name: median(run[name] for run in runs) for name in runs[0]}


@contextmanager
def timed_head(draft: DSparkDraftModel, device: torch.device) -> Iterator[list[float]]:
    """Adds up the seconds of the Markov head's steps, in the first entry of the list."""
    spent, head = [0.0], draft.markov_head
    step = head.step

    def timed(*args, **kwargs):
        synchronize(device)
        start = time.perf_counter()
        result = step(*args, **kwargs)
        synchronize(device)
        spent[0] += time.perf_counter() - start
        return result

    head.step = timed
    try:
        yield spent
    finally:
        del head.step


def print_results(results: list[dict[str, Any]], axis: str) -> None:
    header = [axis, "round ms", "draft", "verify", "plain step", "head ms", "head %", "overhead", "break-even"]
    rows = []
    for result in sorted(results, key=lambda result: result[axis]):
        names = ("round", "bare_draft", "bare_verify", "bare_step", "head")
        times = [f"{1000 * result[f'{name}_seconds']:.1f}" for name in names]
        figures = [f"{result[name]:.2f}" for name in ("head_percent", "overhead", "break_even")]
        rows.append([str(result[axis]), *times, *figures])
    print_table(header, rows)


if __name__ == "__main__":
    main()
