"""Arguments that several subcommands share, and what they stand for: the pair of models, the prompts, the settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .. import DSparkDraftModel
from ..configuration_dspark import SCHEDULES


@dataclass(frozen=True)
class Pair:
    """A target with its draft, and the target's tokenizer where its folder holds one.

    Attributes:
        model (`PreTrainedModel`): the target, in evaluation mode.
        draft (`DSparkDraftModel`): the draft, on the target's device and in its dtype.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): `None` for a target without one.
    """

    model: PreTrainedModel
    draft: DSparkDraftModel
    tokenizer: PreTrainedTokenizerBase | None


def add_pair_arguments(
    parser: argparse.ArgumentParser, *, model_help: str, model_required: bool, draft_required: bool = True
) -> None:
    """Declare `--model`, `--draft` and how to load them."""
    group = parser.add_argument_group("models")
    group.add_argument("--model", metavar="REPO|FOLDER", required=model_required, help=model_help)
    group.add_argument(
        "--draft", metavar="REPO|FOLDER", required=draft_required, help="DSpark draft, any supported packaging"
    )
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of both models; auto: as the target was saved (default)",
    )
    group.add_argument("--device", help="e.g. cuda, mps or cpu; default: a GPU where there is one")
    group.add_argument("--attn-implementation", metavar="NAME", help="the target's attention, e.g. sdpa or eager")


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the length of the answer, the sampling settings and the draft's knobs."""
    group = parser.add_argument_group("generation (greedy unless a sampling flag is given)")
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    group.add_argument("--sample", action="store_true", help="draw from the target's distribution")
    group.add_argument("--temperature", type=float, metavar="T")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--seed", type=int, default=0, help="for sampling; default: 0")
    group = parser.add_argument_group("draft (defaults: what the draft's own generation_config.json says)")
    group.add_argument("--num-draft-tokens", type=int, metavar="N", help="at most N drafted tokens a round")
    group.add_argument("--schedule", choices=SCHEDULES, help="how to cut them short")
    group.add_argument("--confidence-threshold", type=float, metavar="C", help="0 verifies all, 1 none")


def load_pair(args: argparse.Namespace, model_name: str) -> Pair:
    """Load the target `model_name` and the draft `args.draft` onto one device, in one dtype.

    Raises:
        `OSError` or `ValueError`: a folder cannot be read, or the draft does not fit the target.
    """
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = {} if args.attn_implementation is None else {"attn_implementation": args.attn_implementation}
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=args.dtype, **options).to(device).eval()
    draft = DSparkDraftModel.from_pretrained(args.draft, dtype=model.dtype).to(device).eval()
    config = draft.generation_config
    for field, value in (
        ("num_assistant_tokens", args.num_draft_tokens),
        ("num_assistant_tokens_schedule", args.schedule),
        ("assistant_confidence_threshold", args.confidence_threshold),
    ):
        if value is not None:
            setattr(config, field, value)
    return Pair(model, draft, load_tokenizer(model_name))


def load_tokenizer(model_name: str) -> PreTrainedTokenizerBase | None:
    """The target's tokenizer, set to pad on the left; `None` where the target has none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_name, padding_side="left")
    except (OSError, ValueError, KeyError):
        return None
    # Some tokenizer classes make one out of nothing for a folder that has no tokenizer files.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        return None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def generation_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for `generate()` from what [`add_generation_arguments`] declared."""
    sampling = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    settings: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": args.sample or bool(sampling)}
    return settings | sampling


def encode_prompts(pair: Pair, prompts: list[str], *, chat: bool = True) -> dict[str, torch.Tensor]:
    """Tokenize prompts, left-padded, as one batch.

    Args:
        pair (`Pair`): its tokenizer is used.
        prompts (`list[str]`): R prompts.
        chat (`bool`, *optional*, defaults to `True`): wrap each as a user's message where there is a chat template.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` and `attention_mask`, each (R, longest prompt), on the target's device.

    Raises:
        `ValueError`: the target has no tokenizer.
    """
    if pair.tokenizer is None:
        raise ValueError("--model: its folder holds no tokenizer, so a prompt must be given as --prompt-ids 5,17,...")
    if chat and pair.tokenizer.chat_template:
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        prompts = pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        batch = pair.tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    else:
        batch = pair.tokenizer(prompts, padding=True, return_tensors="pt")
    return {name: batch[name].to(pair.model.device) for name in ("input_ids", "attention_mask")}


def encode_ids(pair: Pair, text: str) -> dict[str, torch.Tensor]:
    """One prompt given as comma-separated token ids; shapes as in [`encode_prompts`] with R = 1.

    Raises:
        `ValueError`: something in `text` is no token id of the target.
    """
    vocabulary = pair.model.get_input_embeddings().num_embeddings
    ids = [int(piece) if piece.strip().isdecimal() else -1 for piece in text.split(",")]
    if not all(0 <= token < vocabulary for token in ids):
        raise ValueError(f"--prompt-ids: expected numbers from 0 to {vocabulary - 1} between commas, got {text!r}")
    input_ids = torch.tensor([ids], device=pair.model.device)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def decode(pair: Pair, token_ids: list[int]) -> str:
    """The answer as text, or as its token ids for a target without a tokenizer."""
    if pair.tokenizer is None:
        return " ".join(map(str, token_ids))
    return pair.tokenizer.decode(token_ids, skip_special_tokens=True)


__all__ = [
    "Pair",
    "add_generation_arguments",
    "add_pair_arguments",
    "decode",
    "encode_ids",
    "encode_prompts",
    "generation_settings",
    "load_pair",
    "load_tokenizer",
]
