"""How likely each slot of a block is accepted when the tokens before it are the target's own, for drafts of one target.

    python benchmarks/teacher_forced.py --target TARGET --drafts A B --data held-out.jsonl --output teacher_forced.json

The evaluation of `dspark-hf train`: blocks behind random anchors in the target's stored answers, the same ones for
every draft, and tau as the tokens that a round would give at temperature 1. Live acceptance is lower (`acceptance.py`)
and depends on the text that each draft happens to decode; this separates two drafts with less noise. What is known of
a draft's training comes from the `training.json` beside it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDraftModel
from dspark_hf.benchmarking.machine import environment, model_name, print_table, save_json, training_record
from dspark_hf.training import DSparkTrainer, DSparkTrainingArguments, ResponseRows


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", required=True, metavar="REPO|FOLDER")
    parser.add_argument("--drafts", required=True, nargs="+", metavar="FOLDER", help="the first beside the others")
    parser.add_argument("--data", required=True, nargs="+", type=Path, metavar="JSONL", help="held-out answers")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--anchors", type=int, default=48, metavar="N", help="blocks of each answer; default: 48")
    parser.add_argument("--max-length", type=int, default=448, metavar="N", help="tokens of a row; default: 448")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: PyTorch's choice")
    parser.add_argument("--output", type=Path, metavar="JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).eval()
    rows = ResponseRows(
        [str(path) for path in args.data],
        vocab_size=target.config.get_text_config(decoder=True).vocab_size,
        max_length=args.max_length,
        seed=args.seed,
    )
    results = []
    for place in args.drafts:
        draft = DSparkDraftModel.from_pretrained(place, dtype=torch.float32)
        names = {"draft": model_name(place), "training": training_record(place)}
        results.append(names | measure(args, target, draft, rows))
    print_results(results)
    if args.output is not None:
        places = ("target", "drafts", "data", "output")
        report = {
            "benchmark": "teacher_forced",
            "environment": environment(),
            "target": model_name(args.target),
            "data": [path.name for path in args.data],
            "arguments": {key: value for key, value in vars(args).items() if key not in places},
            "answers": len(rows),
            "results": results,
        }
        save_json(args.output, report)


def measure(args, target, draft: DSparkDraftModel, rows: ResponseRows) -> dict[str, Any]:
    """Tau, and acceptance of each slot given true tokens before it."""
    with tempfile.TemporaryDirectory() as folder:
        settings = DSparkTrainingArguments(
            output_dir=folder,
            per_device_eval_batch_size=args.batch_size,
            num_anchors=args.anchors,
            bf16=args.dtype == "bfloat16",
            use_cpu=not torch.accelerator.is_available(),
            seed=args.seed,
            report_to=[],
            disable_tqdm=True,
        )
        metrics = DSparkTrainer(draft, target, settings, eval_dataset=rows).evaluate()
    slots = range(draft.config.num_draft_tokens)
    return {"tau": metrics["eval_tau"], "acceptance": [metrics[f"eval_accept@{slot}"] for slot in slots]}


def print_results(results: list[dict[str, Any]]) -> None:
    first = results[0]["tau"]
    rows = [
        [result["draft"], f"{result['tau']:.3f}", f"{first / result['tau']:.3f}"]
        + [" ".join(f"{share:.2f}" for share in result["acceptance"])]
        for result in results
    ]
    print_table(("draft", "tau", "the first one's over it", "accepted by slot"), rows)


if __name__ == "__main__":
    main()
