"""What the loop itself costs: a draft that is free and always right.

    python benchmarks/free_draft.py --target TARGET --draft DRAFT --prompts prompts.jsonl --source gsm8k

The draft's forwards are replaced by a look-up of the target's own continuation, so a round is one verification and the
loop's bookkeeping. The speed-up over plain `generate()` is then bounded by the width of the block and the price of a
wider forward alone. Forced acceptance: the figure says nothing about real drafts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDraftModel, record_generation
from dspark_hf.benchmarking.machine import environment, model_name, print_table, save_json, timed
from dspark_hf.benchmarking.prompts import make_batches, read_prompts
from dspark_hf.modeling_dspark import DraftBlock


class FreeDraft(DSparkDraftModel):
    """Proposes `answer`, the target's continuation of a single prompt, at no cost."""

    answer: torch.Tensor  # (prompt and continuation,)

    def extend_context(self, context_hidden, position_ids, cache, rows, slots, *, lengths=None):
        cache.lengths = lengths

    def draft_block(self, context_hidden, anchor_ids, position_ids, *args, num_tokens=None, **kwargs):
        start = int(position_ids[0, 0]) + 1
        tokens = self.answer[start : start + num_tokens]
        tokens = torch.nn.functional.pad(tokens, (0, num_tokens - tokens.shape[0]))[None]
        return DraftBlock(tokens=tokens, logits=tokens.new_zeros(1, num_tokens, 1), confidence_logits=None)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", required=True, metavar="REPO|FOLDER")
    parser.add_argument("--draft", required=True, metavar="REPO|FOLDER", help="lends its block size and taps")
    parser.add_argument("--prompts", required=True, type=Path, metavar="JSONL")
    parser.add_argument("--source", nargs="+", default=[])
    parser.add_argument("--limit", type=int, default=3, metavar="N")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: PyTorch's choice")
    parser.add_argument("--output", type=Path, metavar="JSON")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, args.dtype)).eval()
    draft = DSparkDraftModel.from_pretrained(args.draft, dtype=getattr(torch, args.dtype))
    draft.__class__ = FreeDraft
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    prompts = read_prompts(
        args.prompts, lambda: AutoTokenizer.from_pretrained(args.target), sources=args.source, limit=args.limit
    )
    runs = []
    for batch in make_batches(prompts, 1, 0):
        kwargs = {"do_sample": False, "max_new_tokens": args.max_new_tokens, "attention_mask": batch.attention_mask}
        # in half precision a block's forward may break a near-tie differently: then its own answer is the right one
        draft.answer = target.generate(batch.input_ids, **kwargs)[0]
        for _ in range(4):
            draft.answer = target.generate(batch.input_ids, assistant_model=draft, **kwargs)[0]
        tokens = draft.answer.shape[0] - batch.input_ids.shape[1]
        plain, ours = [], []
        for _ in range(args.repeats):
            plain.append(timed(lambda k=kwargs, b=batch: target.generate(b.input_ids, **k), target.device)[1])
            with record_generation() as stats:
                call = lambda k=kwargs, b=batch: target.generate(b.input_ids, assistant_model=draft, **k)  # noqa: E731
                ours.append(timed(call, target.device)[1])
        runs.append({"source": batch.source, "tokens": tokens, "tau": stats.tau, "plain": plain, "free": ours})
    header = ["prompt", "tokens", "tau", "plain tok/s", "free draft tok/s", "speed"]
    lines = []
    for run in runs:
        plain, free = run["tokens"] / median(run["plain"]), run["tokens"] / median(run["free"])
        lines.append([run["source"], f"{run['tokens']}", f"{run['tau']:.2f}", f"{plain:.1f}", f"{free:.1f}"])
        lines[-1].append(f"{free / plain:.2f}")
    total = sum(median(run["plain"]) for run in runs) / sum(median(run["free"]) for run in runs)
    print(f"\n{model_name(args.target)}, {args.dtype}, greedy, batch 1, draft forced to be right\n")
    print_table(header, lines)
    print(f"\nall: {total:.2f} times plain generate()")
    if args.output:
        report = {"benchmark": "free_draft", "environment": environment(), "forced": True, "speed": total}
        save_json(args.output, report | {"runs": runs})


if __name__ == "__main__":
    main()
