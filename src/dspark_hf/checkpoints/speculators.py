"""Reader for the speculators packaging (vLLM project), models "dspark" and "dflash".

The decoder's shape is nested in `transformer_layer_config`, a diff against the defaults of a Transformers
configuration class. Tapped layers are indices into `hidden_states`, one more than the layer whose output they are. The
vocabulary may be reduced, with `d2t` holding offsets.

The block layout needs care: `sample_from_anchor` did not exist before July 2026, and files without it are 1+N,
whatever today's class default says. `speculative_tokens` tells the two apart; when nothing does, this reader asks
instead of guessing.
"""

import warnings
from typing import Any

from transformers import AutoConfig

from ..configuration_dspark import DSparkConfig
from .detect import Reader, Tensors, has_layer_tensor, require_keys, tap_width


def _matches(config: dict[str, Any], tensors: Tensors) -> bool:
    return config.get("speculators_model_type") in ("dspark", "dflash")


def _read_config(config: dict[str, Any], tensors: Tensors, sample_from_anchor: bool | None) -> DSparkConfig:
    require_keys(
        config,
        ("block_size", "mask_token_id", "aux_hidden_state_layer_ids", "transformer_layer_config"),
        "speculators",
    )
    nested = config["transformer_layer_config"]
    decoder = _decoder_config(nested)
    taps = [index - 1 for index in config["aux_hidden_state_layer_ids"]]
    layer_types = nested.get("layer_types") or ["full_attention"] * decoder.num_hidden_layers
    markov, rank = _markov_fields(config, tensors)
    return DSparkConfig(
        backbone="qwen3",
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        num_hidden_layers=decoder.num_hidden_layers,
        num_attention_heads=decoder.num_attention_heads,
        num_key_value_heads=decoder.num_key_value_heads,
        head_dim=getattr(decoder, "head_dim", None) or decoder.hidden_size // decoder.num_attention_heads,
        hidden_act=decoder.hidden_act,
        rms_norm_eps=decoder.rms_norm_eps,
        qk_norm=has_layer_tensor(tensors, "self_attn.q_norm.weight"),
        attention_bias=has_layer_tensor(tensors, "self_attn.q_proj.bias"),
        attention_output_bias=has_layer_tensor(tensors, "self_attn.o_proj.bias"),
        mlp_bias=has_layer_tensor(tensors, "mlp.gate_proj.bias"),
        rope_parameters=_rope_parameters(decoder),
        max_position_embeddings=decoder.max_position_embeddings,
        layer_types=layer_types,
        sliding_window=_sliding_window(nested, decoder) if "sliding_attention" in layer_types else None,
        sliding_window_non_causal=bool(config.get("sliding_window_non_causal", False)),
        vocab_size=_target_vocabulary(tensors, decoder),
        draft_vocab_size=_draft_vocabulary(config, tensors, decoder),
        stores_embedding="embed_tokens.weight" in tensors,
        stores_head="lm_head.weight" in tensors,
        block_size=config["block_size"],
        sample_from_anchor=_layout(config) if sample_from_anchor is None else sample_from_anchor,
        mask_token_id=config["mask_token_id"],
        target_layer_ids=taps,
        target_hidden_size=tap_width(tensors, taps, decoder.hidden_size),
        **markov,
        **_confidence_fields(config, tensors, rank),
        bos_token_id=nested.get("bos_token_id"),
        eos_token_id=nested.get("eos_token_id"),
        pad_token_id=nested.get("pad_token_id"),
    )


def _decoder_config(nested: dict[str, Any]):
    """The nested diff, completed with the defaults of its class."""
    fields = {key: value for key, value in nested.items() if key not in ("model_type", "layer_types")}
    model_type = nested.get("model_type", "qwen3")
    try:
        return AutoConfig.for_model(model_type, **fields)
    except ValueError as error:
        raise ValueError(f"`transformer_layer_config` has an unknown model_type {model_type!r}.") from error


def _rope_parameters(decoder) -> dict[str, Any]:
    rope = dict(decoder.rope_parameters)
    rope.pop("partial_rotary_factor", None)  # the decoder rotates the full head
    return rope


def _sliding_window(nested: dict[str, Any], decoder) -> int | None:
    # Qwen3's own configuration drops the window unless `use_sliding_window` is set, which these files leave out.
    return nested.get("sliding_window") or decoder.sliding_window or getattr(type(decoder), "sliding_window", None)


def _target_vocabulary(tensors: Tensors, decoder) -> int:
    for name in ("embed_tokens.weight", "markov_head.markov_w1.weight", "t2d"):
        if name in tensors:
            return tensors[name].shape[0]
    return decoder.vocab_size


def _draft_vocabulary(config: dict[str, Any], tensors: Tensors, decoder) -> int:
    for name in ("d2t", "lm_head.weight"):
        if name in tensors:
            return tensors[name].shape[0]
    size = config.get("draft_vocab_size")
    if size is not None and size != _target_vocabulary(tensors, decoder):
        raise ValueError(f"`draft_vocab_size` is {size}, a reduced vocabulary, but there are no `d2t` and `lm_head`.")
    return _target_vocabulary(tensors, decoder)


def _layout(config: dict[str, Any]) -> bool:
    declared = config.get("sample_from_anchor")
    if declared is not None:
        return bool(declared)
    block = config["block_size"]
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or []
    tokens = {proposal.get("speculative_tokens") for proposal in proposals}
    if tokens == {block}:
        return True
    if tokens == {block - 1} or config["speculators_model_type"] == "dflash":
        return False
    raise ValueError(
        "The speculators config.json does not say whether the anchor slot drafts (`sample_from_anchor`). Pass "
        "`sample_from_anchor=False` to `from_pretrained` if the file was made before July 2026, `True` otherwise; "
        "with the wrong value hardly any draft is accepted."
    )


def _markov_fields(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], int]:
    stored = tensors.get("markov_head.markov_w1.weight")
    default = 0 if stored is None else stored.shape[-1]
    rank = config.get("markov_rank", default) if config["speculators_model_type"] == "dspark" else default
    return dict(markov_rank=rank, markov_head_type=config.get("markov_head_type") or "vanilla"), rank


def _confidence_fields(config: dict[str, Any], tensors: Tensors, rank: int) -> dict[str, Any]:
    stored = "confidence_head.proj.weight" in tensors
    declared = config.get("enable_confidence_head")
    if declared is not None and declared != stored:
        warnings.warn(
            f"`enable_confidence_head` is {declared}, but the file has {'a' if stored else 'no'} confidence head; "
            "going by the file.",
            stacklevel=2,
        )
    return dict(
        enable_confidence_head=stored,
        confidence_head_with_markov=config.get("confidence_head_with_markov", rank > 0) if stored else rank > 0,
    )


def _rename(tensors: Tensors) -> dict[str, str]:
    names = {name: name for name in tensors if name != "t2d"}  # t2d is d2t's inverse
    # A full vocabulary needs no map, and a stored one is all zeros.
    if "d2t" in tensors and tensors["d2t"].shape == (_full_vocabulary(tensors),):
        del names["d2t"]
    return names


def _full_vocabulary(tensors: Tensors) -> int | None:
    for name in ("embed_tokens.weight", "markov_head.markov_w1.weight", "t2d"):
        if name in tensors:
            return tensors[name].shape[0]
    return None


READER = Reader("speculators", _matches, _read_config, _rename)

__all__ = ["READER"]
