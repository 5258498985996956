"""What the packagings with a flat, Qwen 3 style `config.json` have in common.

A packaging's own module says where its settings are, how its tensors are called and which block layout it means; the
rest of a configuration is read here, from keys where they describe the draft and from tensor headers where keys are
unreliable: biases, query and key norms, head width, which weights are stored, which heads there are.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from ..configuration_dspark import DSparkConfig
from .files import TensorInfo
from .settings import MASK_KEYS, attention_fields, declared_layout, require_keys, required, rope_fields, setting

Tensors = Mapping[str, TensorInfo]

QWEN3_KEYS = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads rms_norm_eps"


Layout = tuple[bool, str]


def qwen3_config(
    config: Mapping[str, Any],
    tensors: Tensors,
    packaging: str,
    *,
    anchor_first: bool | None,
    default_layout: Layout,
    depth: int | None = None,
    notes: tuple[str, ...] = (),
    **known: Any,
) -> tuple[DSparkConfig, list[str]]:
    """A draft's configuration, and what was assumed in reading it.

    Args:
        config (`dict`): contents of `config.json`.
        tensors (`dict`): headers under the draft's own tensor names.
        packaging (`str`): how messages call it.
        anchor_first (`bool`, *optional*): the user's word on the block layout.
        default_layout (`tuple[bool, str]`): layout where nobody says, with the reason.
        depth (`int`, *optional*): number of target layers.
        notes (`tuple[str, ...]`): what the packaging's reader assumed already.
        known: fields it knows already, such as `block_size`.

    Raises:
        ValueError: for missing or contradictory keys.
    """
    names = dict(block_size=("block_size",), mask_token_id=MASK_KEYS, target_layer_ids=("target_layer_ids",))
    names = {name: keys for name, keys in names.items() if name not in known}
    fields = {**required(config, packaging, **names), **known}
    anchor_first, layout_note = choose_layout(config, anchor_first, default_layout)
    layers, layer_notes = qwen3_fields(config, tensors, packaging)
    heads, head_notes = head_fields(config, tensors)
    taps, tap_notes = tap_fields(config, tensors, fields.pop("target_layer_ids"), depth)
    fields = {**layers, **heads, **taps, **fields, "sample_from_anchor": anchor_first}
    return DSparkConfig(**fields), [layout_note, *notes, *layer_notes, *head_notes, *tap_notes]


def choose_layout(config: Mapping[str, Any], override: bool | None, default: Layout) -> Layout:
    """Whether the anchor slot drafts, and a note on how that is known: override, then keys, then the packaging."""
    anchor_first, reason = default if override is None else (override, "override")
    if override is None:
        anchor_first, reason = declared_layout(config) or default
    return anchor_first, f"block layout: {'anchor-first' if anchor_first else '1+N'}, by {reason}"


def qwen3_fields(config: Mapping[str, Any], tensors: Tensors, packaging: str) -> tuple[dict[str, Any], list[str]]:
    """Fields of Qwen 3 style layers (also Llama-like), with notes on what was assumed.

    Raises:
        ValueError: for missing keys, and for layers that are of another kind.
    """
    require_keys(config, (*QWEN3_KEYS.split(), "vocab_size"), packaging)
    rope, rope_notes = rope_fields(config, packaging)
    attention, attention_notes = attention_fields(config)
    head_dim = config.get("head_dim") or _head_dim(config, tensors)
    _refuse_gated_queries(config, tensors, head_dim)
    fields = dict(
        **shared_fields(config, tensors),
        backbone="qwen3",
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        hidden_act=config.get("hidden_act", "silu"),
        **rope,
        **attention,
    )
    return fields, rope_notes + attention_notes


def shared_fields(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Fields that do not depend on the layer family."""
    return dict(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=config["num_attention_heads"],
        rms_norm_eps=config["rms_norm_eps"],
        qk_norm=has_layer_tensor(tensors, "self_attn.q_norm.weight"),
        attention_bias=has_layer_tensor(tensors, "self_attn.q_proj.bias"),
        attention_output_bias=has_layer_tensor(tensors, "self_attn.o_proj.bias"),
        mlp_bias=has_layer_tensor(tensors, "mlp.gate_proj.bias"),
        vocab_size=config["vocab_size"],
        stores_embedding="embed_tokens.weight" in tensors,
        stores_head="lm_head.weight" in tensors,
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=config.get("eos_token_id"),
        pad_token_id=config.get("pad_token_id"),
        initializer_range=config.get("initializer_range", 0.02),
    )


def _head_dim(config: Mapping[str, Any], tensors: Tensors) -> int:
    norm = tensors.get("layers.0.self_attn.q_norm.weight")
    return norm.shape[0] if norm is not None else config["hidden_size"] // config["num_attention_heads"]


def _refuse_gated_queries(config: Mapping[str, Any], tensors: Tensors, head_dim: int) -> None:
    queries = tensors.get("layers.0.self_attn.q_proj.weight")
    if queries is not None and queries.shape[0] == 2 * config["num_attention_heads"] * head_dim:
        raise ValueError("This draft has gated-attention layers (a query projection of twice the width), unsupported.")


def head_fields(config: Mapping[str, Any], tensors: Tensors) -> tuple[dict[str, Any], list[str]]:
    """Fields of the Markov and confidence heads, going by the file where it and the configuration disagree."""
    notes = []
    stored = tensors.get("markov_head.markov_w1.weight")
    rank = setting(config, "markov_rank", "dspark_markov_rank")
    if rank is None:
        rank = 0 if stored is None else stored.shape[-1]
        notes += [f"Markov rank {rank}, by the tensors"] if rank else []
    confidence, confidence_notes = _has_confidence_head(config, tensors)
    fields = dict(
        markov_rank=rank,
        markov_head_type=(setting(config, "markov_head_type") or "vanilla") if rank else "vanilla",
        enable_confidence_head=confidence,
        confidence_head_with_markov=_with_markov(config, tensors, rank) if confidence else rank > 0,
        confidence_calibration=config.get("confidence_calibration") if confidence else None,
    )
    return fields, notes + confidence_notes


def _has_confidence_head(config: Mapping[str, Any], tensors: Tensors) -> tuple[bool, list[str]]:
    stored = "confidence_head.proj.weight" in tensors
    declared = setting(config, "enable_confidence_head", "use_confidence_head")
    if declared is None:
        alpha = setting(config, "confidence_head_alpha")
        declared = None if alpha is None else alpha > 0
    if declared is not None and bool(declared) != stored:
        message = f"`enable_confidence_head` is {declared}, but the file has {'a' if stored else 'no'} confidence head"
        warnings.warn(f"{message}; going by the file.", stacklevel=2)
        return stored, [message]
    return stored, []


def _with_markov(config: Mapping[str, Any], tensors: Tensors, rank: int) -> bool:
    declared = setting(config, "confidence_head_with_markov")
    if declared is not None:
        return bool(declared)
    width = tensors["confidence_head.proj.weight"].shape[-1]
    return rank > 0 and width == config["hidden_size"] + rank


def tap_fields(
    config: Mapping[str, Any], tensors: Tensors, taps: list[int], depth: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Fields of the tapped target layers, with a note when the target's last layer is among them."""
    fields = dict(
        target_layer_ids=list(taps),
        num_target_layers=depth,
        target_hidden_size=tap_width(tensors, taps, config["hidden_size"]),
    )
    if depth is not None and taps[-1] == depth - 1:
        return fields, [
            f"layer {taps[-1]}, the target's last, is tapped before the final norm; some trainers tap it after, and a "
            "draft of theirs will have few tokens accepted"
        ]
    return fields, []


def tap_width(tensors: Tensors, taps: list[int], hidden_size: int) -> int:
    """Width of one tapped state, from the input width of `fc` (all taps concatenated)."""
    info = tensors.get("fc.weight")
    if info is None or len(info.shape) != 2:
        return hidden_size  # reported as a missing or misshapen tensor when the weights are checked
    width, rest = divmod(info.shape[1], max(len(taps), 1))
    if rest or width == 0:
        raise ValueError(
            f"`fc.weight` {list(info.shape)} does not divide into the {len(taps)} taps {taps}: the list of tapped "
            "layers is wrong."
        )
    return width


def has_layer_tensor(tensors: Tensors, name: str) -> bool:
    """Whether draft layer 0 has tensor `name`; all layers are alike, so this decides optional parts."""
    return f"layers.0.{name}" in tensors


def renamed(tensors: Tensors, names: Mapping[str, str]) -> dict[str, TensorInfo]:
    """Tensor headers under the draft's own names; `names` maps those to the checkpoint's."""
    return {ours: tensors[theirs] for ours, theirs in names.items()}


__all__ = [
    "Layout",
    "Tensors",
    "choose_layout",
    "has_layer_tensor",
    "head_fields",
    "qwen3_config",
    "qwen3_fields",
    "renamed",
    "shared_fields",
    "tap_fields",
    "tap_width",
]
