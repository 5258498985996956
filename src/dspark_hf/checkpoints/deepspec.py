"""Reader for the DeepSpec layout: the official checkpoints (`deepseek-ai/dspark_*`, `deepseek-ai/dflash_*_block7`),
NeMo AutoModel's Qwen 3 and Gemma 4 drafts, MiniCPM5-style files without vocabulary weights, and forks that keep it.

Their `config.json` is a copy of the target's with the draft's settings added at top level, so most keys describe the
target, and some mislead: `model_type` is the target's, and Gemma 4's `head_dim` and `num_key_value_heads` are not what
its draft layers use. The DFlash ones are the same format with `markov_rank` 0; they, too, draft from the anchor slot.
"""

from typing import Any

from ..configuration_dspark import DSparkConfig
from .detect import Reader
from .flat import (
    Layout,
    Tensors,
    choose_layout,
    has_layer_tensor,
    head_fields,
    qwen3_config,
    shared_fields,
    tap_fields,
)
from .settings import MASK_KEYS, declared_layout, require_keys, required, setting


def _matches(config: dict[str, Any], tensors: Tensors) -> bool:
    injects_context = "fc.weight" in tensors or "hidden_norm.weight" in tensors
    return injects_context and any(setting(config, key) is not None for key in ("target_layer_ids", "markov_rank"))


def _resolve(
    config: dict[str, Any], tensors: Tensors, sample_from_anchor: bool | None
) -> tuple[DSparkConfig, list[str]]:
    depth = setting(config, "num_target_layers")
    default = _default_layout(config, tensors, asked=sample_from_anchor is None and declared_layout(config) is None)
    if not has_layer_tensor(tensors, "pre_feedforward_layernorm.weight"):
        return qwen3_config(
            config, tensors, "DeepSpec", anchor_first=sample_from_anchor, default_layout=default, depth=depth
        )
    block = required(
        config, "DeepSpec", block_size=("block_size",), mask_token_id=MASK_KEYS, target_layer_ids=("target_layer_ids",)
    )
    anchor_first, layout_note = choose_layout(config, sample_from_anchor, default)
    heads, head_notes = head_fields(config, tensors)
    taps, tap_notes = tap_fields(config, tensors, block.pop("target_layer_ids"), depth)
    fields = {**_gemma4_fields(config, tensors), **heads, **taps, **block, "sample_from_anchor": anchor_first}
    layer_note = "head width and key/value heads are those of the target's full-attention layers (`global_head_dim`)"
    return DSparkConfig(**fields), [layout_note, layer_note, *head_notes, *tap_notes]


def _default_layout(config: dict[str, Any], tensors: Tensors, asked: bool) -> Layout:
    if any("DSpark" in name for name in config.get("architectures") or []):
        return True, "the DeepSpec architecture"
    if "markov_head.markov_w1.weight" in tensors:
        return True, "the Markov head"
    if not asked:
        return False, "nothing"
    raise ValueError(
        "This looks like a DFlash draft, and nothing says whether its anchor slot drafts. Pass "
        "`sample_from_anchor=True` to `from_pretrained` if it was trained with DeepSpec, `False` otherwise."
    )


def _gemma4_fields(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    keys = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads rms_norm_eps vocab_size rope_parameters"
    )
    require_keys(config, (*keys.split(), "global_head_dim", "final_logit_softcapping"), "DeepSpec Gemma 4")
    if config.get("hidden_size_per_layer_input") or config.get("enable_moe_block"):
        raise ValueError("Gemma 4 drafts with per-layer inputs or experts are not supported.")
    k_eq_v = not has_layer_tensor(tensors, "self_attn.v_proj.weight")
    rope = config["rope_parameters"].get("full_attention")
    if rope is None:
        raise ValueError("The DeepSpec Gemma 4 config.json lacks `rope_parameters['full_attention']`.")
    # Draft layers are full-attention layers of the target, which have their own head width and number of KV heads.
    kv_heads = config.get("num_global_key_value_heads") if k_eq_v else None
    return dict(
        **shared_fields(config, tensors),
        backbone="gemma4",
        num_key_value_heads=kv_heads or config["num_key_value_heads"],
        head_dim=config["global_head_dim"],
        hidden_act=config.get("hidden_activation") or config.get("hidden_act", "gelu_pytorch_tanh"),
        rope_parameters=dict(rope),
        max_position_embeddings=config.get("max_position_embeddings", 40960),
        k_eq_v=k_eq_v,
        final_logit_softcapping=config["final_logit_softcapping"],
    )


def _rename(tensors: Tensors) -> dict[str, str]:
    return {name: name for name in tensors}


READER = Reader("deepspec", _matches, _resolve, _rename)

__all__ = ["READER"]
