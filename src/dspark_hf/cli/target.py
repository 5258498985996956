"""The target of a subcommand that needs no draft: its arguments, and how it is loaded."""

from __future__ import annotations

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--model` and how to load it."""
    group = parser.add_argument_group("target")
    group.add_argument("--model", metavar="REPO|FOLDER", required=True, help="the target")
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of the target; auto: as it was saved (default)",
    )
    group.add_argument("--device", help="e.g. cuda or cpu; default: a GPU where there is one")
    group.add_argument("--attn-implementation", metavar="NAME", help="the target's attention, e.g. sdpa or eager")


def load_target(args: argparse.Namespace, device: torch.device | str | None = None) -> PreTrainedModel:
    """Load the target onto one device, in evaluation mode.

    Raises:
        `OSError` or `ValueError`: it cannot be read.
    """
    device = device or args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = {} if args.attn_implementation is None else {"attn_implementation": args.attn_implementation}
    config = AutoConfig.from_pretrained(args.model)
    # Targets that also see images are causal language models all the same; their text side is what is used.
    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    loader = AutoModelForCausalLM if causal else AutoModelForImageTextToText
    return loader.from_pretrained(args.model, dtype=args.dtype, **options).to(device).eval()


__all__ = ["add_target_arguments", "load_target"]
