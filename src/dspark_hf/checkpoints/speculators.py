"""Reader for the speculators packaging (vLLM project), models "dspark" and "dflash".

The decoder's shape is nested in `transformer_layer_config`, a diff against the defaults of a Transformers
configuration class. Tapped layers are indices into `hidden_states`, one more than the layer whose output they are. The
vocabulary may be reduced, with `d2t` holding offsets. Embedding and, with a full vocabulary, head are stored in older
files and left to the target in newer ones.

The block layout needs care: `sample_from_anchor` did not exist before July 2026, and files without it are 1+N,
whatever today's class default says. `speculative_tokens` tells the two apart; when nothing does, this reader asks
instead of guessing.
"""

import warnings
from typing import Any

from transformers import AutoConfig

from ..configuration_dspark import DSparkConfig
from .detect import Reader
from .flat import Tensors, has_layer_tensor, tap_width
from .settings import TARGET_ROPE_KEYS, require_keys


def _matches(config: dict[str, Any], tensors: Tensors) -> bool:
    return config.get("speculators_model_type") in ("dspark", "dflash")


def _resolve(
    config: dict[str, Any], tensors: Tensors, sample_from_anchor: bool | None
) -> tuple[DSparkConfig, list[str]]:
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
    confidence, notes = _confidence_fields(config, tensors, rank)
    anchor_first, reason = (sample_from_anchor, "override") if sample_from_anchor is not None else _layout(config)
    notes = [f"block layout: {'anchor-first' if anchor_first else '1+N'}, by {reason}", *notes]
    if "sliding_attention" in layer_types and config.get("sliding_window_non_causal") is None:
        notes.append("sliding layers are causal inside the block: no `sliding_window_non_causal` says otherwise")
    fields = dict(
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
        sample_from_anchor=anchor_first,
        mask_token_id=config["mask_token_id"],
        target_layer_ids=taps,
        target_hidden_size=tap_width(tensors, taps, decoder.hidden_size),
        **markov,
        **confidence,
        bos_token_id=nested.get("bos_token_id"),
        eos_token_id=nested.get("eos_token_id"),
        pad_token_id=nested.get("pad_token_id"),
    )
    return DSparkConfig(**fields), notes


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
    rope = dict(rope.get("sliding_attention") or rope)  # of parameters by layer type, the one the library takes
    # The decoder rotates the full head, and its positions have one axis.
    return {key: value for key, value in rope.items() if key not in TARGET_ROPE_KEYS and value is not None}


def _sliding_window(nested: dict[str, Any], decoder) -> int | None:
    # Qwen3's own configuration drops the window unless `use_sliding_window` is set, which these files leave out.
    return nested.get("sliding_window") or decoder.sliding_window or getattr(type(decoder), "sliding_window", None)


def _target_vocabulary(tensors: Tensors, decoder) -> int:
    for name in ("embed_tokens.weight", "markov_head.markov_w1.weight", "t2d"):
        if name in tensors:
            return tensors[name].shape[0]
    return decoder.vocab_size


def _draft_vocabulary(config: dict[str, Any], tensors: Tensors, decoder) -> int:
    if "d2t" in tensors and "lm_head.weight" not in tensors:
        raise ValueError("There is `d2t`, a reduced vocabulary, but no `lm_head.weight` for it.")
    for name in ("d2t", "lm_head.weight"):
        if name in tensors:
            return tensors[name].shape[0]
    size = config.get("draft_vocab_size")
    if size is not None and size != _target_vocabulary(tensors, decoder):
        raise ValueError(f"`draft_vocab_size` is {size}, a reduced vocabulary, but there are no `d2t` and `lm_head`.")
    return _target_vocabulary(tensors, decoder)


def _layout(config: dict[str, Any]) -> tuple[bool, str]:
    declared = config.get("sample_from_anchor")
    if declared is not None:
        return bool(declared), "`sample_from_anchor`"
    block = config["block_size"]
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or []
    tokens = {proposal.get("speculative_tokens") for proposal in proposals}
    if tokens in ({block}, {block - 1}):
        return tokens == {block}, f"`speculative_tokens` {tokens.pop()} for `block_size` {block}"
    if config["speculators_model_type"] == "dflash":
        return False, "the DFlash model type"
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


def _confidence_fields(config: dict[str, Any], tensors: Tensors, rank: int) -> tuple[dict[str, Any], list[str]]:
    stored = "confidence_head.proj.weight" in tensors
    declared, notes = config.get("enable_confidence_head"), []
    if declared is not None and declared != stored:
        warnings.warn(
            f"`enable_confidence_head` is {declared}, but the file has {'a' if stored else 'no'} confidence head; "
            "going by the file.",
            stacklevel=2,
        )
        notes = [f"confidence head: the configuration says {declared}, the file {stored}"]
    fields = dict(
        enable_confidence_head=stored,
        confidence_head_with_markov=config.get("confidence_head_with_markov", rank > 0) if stored else rank > 0,
        confidence_calibration=config.get("confidence_calibration") if stored else None,
    )
    return fields, notes


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


READER = Reader("speculators", _matches, _resolve, _rename)

__all__ = ["READER"]
