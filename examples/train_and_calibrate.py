"""A draft for your own model, from nothing: prepare, train, calibrate, use. Small enough for a CPU and a coffee break.

    python examples/train_and_calibrate.py --output my-draft
    python examples/train_and_calibrate.py --model TARGET --output my-draft --prompts prompts.jsonl --steps 2000

Each step is a command of `dspark-hf`, run here by calling it; the lines printed can be typed in a shell instead. With
the few prompts below the draft learns little: what a real run needs is in docs/training.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

import torch
from _pair import chat_inputs, smollm2_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDraftModel, record_generation
from dspark_hf.cli import main as dspark_hf

TOPICS = ("a list", "a string", "a number", "a file", "a date", "a word", "a table", "a set")
TASKS = ("Write a Python function that checks {}.", "Explain in one sentence what {} is.", "Give an example of {}.")


def run(*words: object) -> None:
    """One command of `dspark-hf`, shown and run. Stops where it fails; its own message says why."""
    command = [str(word) for word in words]
    print(f"\n$ dspark-hf {shlex.join(command)}")
    status = dspark_hf(command)
    if status:
        raise SystemExit(status)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="target; default: SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, required=True, help="folder for the draft; responses go beside it")
    parser.add_argument("--prompts", type=Path, help="JSONL with `prompt` in each row; default: two dozen short tasks")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="of each response")
    parser.add_argument("--steps", type=int, default=60, metavar="N")
    parser.add_argument("--layers", type=int, default=1, metavar="N")
    parser.add_argument("--rank", type=int, default=64, metavar="R")
    parser.add_argument("--draft-vocab", type=int, default=8192, metavar="N")
    args = parser.parse_args(argv)
    target = args.model or str(smollm2_folder())

    args.output.parent.mkdir(parents=True, exist_ok=True)
    prompts, responses = args.prompts, args.output.with_name(args.output.name + "-responses.jsonl")
    if prompts is None:
        prompts = args.output.with_name(args.output.name + "-prompts.jsonl")
        rows = [{"prompt": task.format(topic)} for topic in TOPICS for task in TASKS]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    # 1. What the target itself answers, half of it greedy, half sampled. Stopped, it goes on where it was.
    run("prepare", "--model", target, "--prompts", prompts, "--output", responses,
        "--max-new-tokens", args.max_new_tokens)  # fmt: skip

    # 2. A draft that agrees with it. A small one likes a higher learning rate than the official five layers.
    run("train", "--model", target, "--data", responses, "--output", args.output, "--max-steps", args.steps,
        "--layers", args.layers, "--rank", args.rank, "--draft-vocab", args.draft_vocab, "--anchors", 32,
        "--max-length", 512, "--lr", 2e-3, "--log-every", max(1, args.steps // 4))  # fmt: skip

    # 3. Confidences that mean what they say. For real, take prompts that the draft was not trained on.
    run("calibrate", target, args.output, "--prompts", prompts, "--max-new-tokens", args.max_new_tokens)

    # 4. The draft at work.
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    draft = DSparkDraftModel.from_pretrained(args.output)
    draft.generation_config.num_assistant_tokens_schedule = "constant"  # a draft this weak would not be asked else
    inputs = chat_inputs(tokenizer, [{"role": "user", "content": TASKS[0].format(TOPICS[0])}])
    with record_generation() as stats:
        model.generate(**inputs, assistant_model=draft, do_sample=False, max_new_tokens=args.max_new_tokens)
    print(f"\ntau {stats.tau:.2f} over {stats.rounds} rounds (1 would be a draft that is never right)")


if __name__ == "__main__":
    main()
