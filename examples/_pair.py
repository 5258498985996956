"""What the examples share: the target and the draft they run with, unless told otherwise.

By default the target is SmolLM2-135M-Instruct (95 MB, fetched once) and the draft the one in this repository.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dspark_hf.demo import smollm2_folder

DRAFT = Path(__file__).resolve().parent.parent / "checkpoints" / "smollm2-135m-instruct-dspark"


def pair_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with `--model`, `--draft` and `--max-new-tokens`; the description is the example's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="target: repository or folder; default: SmolLM2-135M-Instruct")
    parser.add_argument("--draft", help=f"its DSpark draft: repository or folder; default: checkpoints/{DRAFT.name}")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N")
    return parser


def pair_names(args: argparse.Namespace) -> tuple[str, str]:
    """The target and the draft to load.

    Raises:
        SystemExit: with one line, where no draft is named and the repository holds none for the default target.
    """
    if args.draft is None and args.model is not None:
        raise SystemExit("--draft: name a draft for that target; the default one is for SmolLM2-135M-Instruct")
    if args.draft is None and not DRAFT.is_dir():
        raise SystemExit(f"--draft: {DRAFT} is not there; name a draft for SmolLM2-135M-Instruct")
    return args.model or str(smollm2_folder()), args.draft or str(DRAFT)


def chat_inputs(tokenizer, messages: list[dict], device="cpu") -> dict:
    """`input_ids` and `attention_mask` of a chat, in the target's own template: what its draft was trained on."""
    if tokenizer.chat_template is None:  # a base model continues text
        return dict(tokenizer("\n".join(message["content"] for message in messages), return_tensors="pt").to(device))
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return dict(tokenizer.apply_chat_template(messages, **options).to(device))
