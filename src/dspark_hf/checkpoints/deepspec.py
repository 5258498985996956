"""Reader for the official DeepSpec checkpoints (`deepseek-ai/dspark_*`, `deepseek-ai/dflash_*_block7`).

Their `config.json` is a copy of the target's with the draft's settings added at top level, so most keys describe the
target, and some mislead: `model_type` is the target's, and Gemma 4's `head_dim` and `num_key_value_heads` are not what
its draft layers use. The DFlash ones are the same format with `markov_rank` 0; they, too, draft from the anchor slot.
"""

from typing import Any

from ..configuration_dspark import DSparkConfig
from .detect import Reader, Tensors, has_layer_tensor, require_keys, tap_width


def _matches(config: dict[str, Any], tensors: Tensors) -> bool:
    injects_context = "fc.weight" in tensors or "hidden_norm.weight" in tensors
    return injects_context and ("target_layer_ids" in config or "markov_rank" in config)


def _read_config(config: dict[str, Any], tensors: Tensors, sample_from_anchor: bool | None) -> DSparkConfig:
    required = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads rms_norm_eps "
        "vocab_size block_size mask_token_id target_layer_ids rope_parameters"
    )
    require_keys(config, tuple(required.split()), "DeepSpec")
    rank = config.get("markov_rank", 0)
    confidence = bool(config.get("enable_confidence_head", False))
    fields = dict(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=config["num_attention_heads"],
        rms_norm_eps=config["rms_norm_eps"],
        max_position_embeddings=config.get("max_position_embeddings", 40960),
        qk_norm=has_layer_tensor(tensors, "self_attn.q_norm.weight"),
        attention_bias=has_layer_tensor(tensors, "self_attn.q_proj.bias"),
        attention_output_bias=has_layer_tensor(tensors, "self_attn.o_proj.bias"),
        mlp_bias=has_layer_tensor(tensors, "mlp.gate_proj.bias"),
        vocab_size=config["vocab_size"],
        stores_embedding="embed_tokens.weight" in tensors,
        stores_head="lm_head.weight" in tensors,
        block_size=config["block_size"],
        sample_from_anchor=_layout(config, tensors) if sample_from_anchor is None else sample_from_anchor,
        mask_token_id=config["mask_token_id"],
        target_layer_ids=config["target_layer_ids"],
        num_target_layers=config.get("num_target_layers"),
        target_hidden_size=tap_width(tensors, config["target_layer_ids"], config["hidden_size"]),
        markov_rank=rank,
        markov_head_type=config.get("markov_head_type", "vanilla") if rank else "vanilla",
        enable_confidence_head=confidence,
        confidence_head_with_markov=config.get("confidence_head_with_markov", rank > 0) if confidence else rank > 0,
        confidence_calibration=config.get("confidence_calibration") if confidence else None,
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=config.get("eos_token_id"),
        pad_token_id=config.get("pad_token_id"),
        initializer_range=config.get("initializer_range", 0.02),
    )
    if has_layer_tensor(tensors, "pre_feedforward_layernorm.weight"):
        return DSparkConfig(**fields, **_gemma4_fields(config, tensors))
    return DSparkConfig(**fields, **_qwen3_fields(config))


def _layout(config: dict[str, Any], tensors: Tensors) -> bool:
    if config.get("sample_from_anchor") is not None:
        return bool(config["sample_from_anchor"])
    if config.get("dspark_bonus_anchor") is not None:
        return not config["dspark_bonus_anchor"]
    architectures = config.get("architectures") or []
    if "markov_head.markov_w1.weight" in tensors or any("DSpark" in name for name in architectures):
        return True
    raise ValueError(
        "This looks like a DFlash draft, and nothing says whether its anchor slot drafts. Pass "
        "`sample_from_anchor=True` to `from_pretrained` if it was trained with DeepSpec, `False` otherwise."
    )


def _qwen3_fields(config: dict[str, Any]) -> dict[str, Any]:
    rope = {key: value for key, value in config["rope_parameters"].items() if value is not None}
    # Copied from the target; the draft's layers rotate the full head whatever it says.
    rope.pop("partial_rotary_factor", None)
    sliding = "sliding_attention" in (config.get("layer_types") or ())
    return dict(
        backbone="qwen3",
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        hidden_act=config.get("hidden_act", "silu"),
        rope_parameters=rope,
        layer_types=config.get("layer_types"),
        sliding_window=config.get("sliding_window") if sliding else None,
    )


def _gemma4_fields(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    require_keys(config, ("global_head_dim", "final_logit_softcapping"), "DeepSpec Gemma 4")
    if config.get("hidden_size_per_layer_input") or config.get("enable_moe_block"):
        raise ValueError("Gemma 4 drafts with per-layer inputs or experts are not supported.")
    k_eq_v = not has_layer_tensor(tensors, "self_attn.v_proj.weight")
    rope = config["rope_parameters"].get("full_attention")
    if rope is None:
        raise ValueError("The DeepSpec Gemma 4 config.json lacks `rope_parameters['full_attention']`.")
    # Draft layers are full-attention layers of the target, which have their own head width and number of KV heads.
    kv_heads = config.get("num_global_key_value_heads") if k_eq_v else None
    return dict(
        backbone="gemma4",
        num_key_value_heads=kv_heads or config["num_key_value_heads"],
        head_dim=config["global_head_dim"],
        hidden_act=config.get("hidden_activation") or config.get("hidden_act", "gelu_pytorch_tanh"),
        rope_parameters=dict(rope),
        k_eq_v=k_eq_v,
        final_logit_softcapping=config["final_logit_softcapping"],
    )


def _rename(tensors: Tensors) -> dict[str, str]:
    return {name: name for name in tensors}


READER = Reader("deepspec", _matches, _read_config, _rename)

__all__ = ["READER"]
