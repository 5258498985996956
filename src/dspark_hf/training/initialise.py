"""A new draft for a target: its configuration, and weights to start from.

A draft layer is made like the target's layers (width, heads, activation, rotary embedding), because it reads the
target's states and shares its embedding and head. Starting from the target's own last layers then saves about a third
of the steps early on: the layers already know what to do with such states, and `fc` starts as the identity on the tap
that used to be their input. What a family does differently (fused projections, norm weights stored as w - 1, a query
scale) is folded in; what cannot be expressed is left as initialised and reported.

Embedding and head are the target's, frozen (arXiv 2607.05147, section 3.3), so a draft for the full vocabulary stores
neither. A reduced vocabulary stores its own head: the target's rows for those tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..configuration_dspark import ROPE_TYPES, DSparkConfig
from ..generation.capture import decoder_layers
from ..modeling_dspark import DSparkDraftModel
from .features import TargetHead, embedding_factor

_SANDWICH = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class DraftOptions:
    """What can be chosen about a new draft.

    Attributes:
        num_layers (`int`): draft layers.
        taps (`Sequence[int]`, *optional*): target layers to read; by default five, evenly spaced.
        block_size (`int`): γ, tokens drafted per round.
        markov_rank (`int`): rank of the Markov head; 0 for none (DFlash).
        markov_head_type (`str`): `"vanilla"`, `"gated"` or `"rnn"`.
        confidence (`bool`): with a confidence head.
        mask_token_id (`int`): token that fills a block.
        draft_vocab_size (`int`, *optional*): tokens the draft can propose; all if unset.
        qk_norm (`bool`, *optional*): query/key norms; as the target has them if unset.
        warm_start (`bool`): start from the target's own layers.
        source_layers (`Sequence[int]`, *optional*): which; by default the last `num_layers` that fit.
    """

    num_layers: int = 5
    taps: Sequence[int] | None = None
    block_size: int = 7
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    confidence: bool = True
    mask_token_id: int | None = None
    draft_vocab_size: int | None = None
    qk_norm: bool | None = None
    warm_start: bool = True
    source_layers: Sequence[int] | None = None


def default_taps(num_target_layers: int, count: int = 5) -> list[int]:
    """Evenly spaced layers from the second to the third from last, as the published drafts have them."""
    first, last = min(1, num_target_layers - 1), max(num_target_layers - 3, min(2, num_target_layers - 1))
    count = min(count, last - first + 1)
    if count == 1:
        return [last]
    return [round(first + step * (last - first) / (count - 1)) for step in range(count)]


def new_draft(target: nn.Module, options: DraftOptions) -> tuple[DSparkDraftModel, list[str]]:
    """A draft for `target`, in float32 on the CPU.

    Args:
        target (`PreTrainedModel`): as for `TargetFeatures`.
        options (`DraftOptions`): what to make.

    Returns:
        The draft, and notes on what was not taken over from the target.

    Raises:
        ValueError: naming the option that does not fit the target.
    """
    layers, head = decoder_layers(target), TargetHead(target)
    for name in ("taps", "source_layers"):
        for layer in getattr(options, name) or ():
            if not (-1 if name == "taps" else 0) <= layer < len(layers):
                raise ValueError(f"`{name}`: the target has layers 0 to {len(layers) - 1}, got {layer}.")
    if options.source_layers is not None and len(options.source_layers) != options.num_layers:
        raise ValueError(
            f"`source_layers` must name one layer for each of the {options.num_layers} draft layers, got "
            f"{list(options.source_layers)}."
        )
    sources = _source_layers(layers, options)
    warm = options.warm_start and _built_alike(layers[sources[-1]])
    draft = DSparkDraftModel(_config(target, head, layers[sources[-1]], options, warm))
    notes = ["all layers: the target's are built differently"] if options.warm_start and not warm else []
    if warm:
        notes = _warm_start(draft, [layers[number] for number in sources], sources[0])
    if (weight := _norm_weight(_final_norm(target), draft.config.hidden_size)) is not None:
        # A constant factor on the target's logits goes into the norm before the shared head.
        draft.norm.weight.data.copy_(weight * head.scale)
    return draft, notes


def set_vocabulary(draft: DSparkDraftModel, target: nn.Module, token_ids: torch.Tensor) -> None:
    """Gives a draft with a reduced vocabulary its tokens and the target's head rows for them.

    Args:
        draft (`DSparkDraftModel`): with `draft_vocab_size` below `vocab_size`.
        target (`PreTrainedModel`): the target.
        token_ids (`torch.Tensor` [V_draft]): target ids, ascending.
    """
    draft.d2t.copy_(token_ids - torch.arange(len(token_ids), device=token_ids.device))
    weight = target.get_output_embeddings().weight
    draft.lm_head.weight.data.copy_(weight[token_ids.to(weight.device)])


def choose_mask_token(vocab_size: int, tokenizer, counts: torch.Tensor) -> int:
    """A token that never occurs in the text, for the slots of a block.

    Args:
        vocab_size (`int`): V of the target.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the target's.
        counts (`torch.Tensor` [V]): occurrences in the training data.

    Returns:
        The tokenizer's mask token, else the first row of the embedding that no token uses, else an unused special
        token, else the token that occurs least.
    """
    if tokenizer is not None:
        if tokenizer.mask_token_id is not None and tokenizer.mask_token_id < vocab_size:
            return tokenizer.mask_token_id
        if len(tokenizer) < vocab_size:
            return len(tokenizer)
        added = [token for token in sorted(tokenizer.added_tokens_decoder, reverse=True) if token < vocab_size]
        unused = [token for token in added if not counts[token] and token not in (tokenizer.eos_token_id, 0)]
        if unused:
            return unused[0]
    # The last of the rarest: low ids are often control tokens.
    return vocab_size - 1 - int(counts[:vocab_size].flip(0).argmin())


# Configuration --------------------------------------------------------------------------------------------------------


def _config(target: nn.Module, head: TargetHead, layer: nn.Module, options: DraftOptions, warm: bool) -> DSparkConfig:
    text = target.config.get_text_config(decoder=True)
    attention, depth = getattr(layer, "self_attn", nn.Identity()), text.num_hidden_layers
    sandwich = all(hasattr(layer, name) for name in _SANDWICH)
    parts = _projections(layer)
    head_dim, kv_heads = _head_sizes(text, attention)
    has_norms = _norm_size(getattr(attention, "q_norm", None)) == head_dim
    reduced = options.draft_vocab_size is not None and options.draft_vocab_size < head.vocab_size
    intermediate = getattr(text, "intermediate_size", None)
    return DSparkConfig(
        backbone="gemma4" if sandwich else "qwen3",
        hidden_size=text.hidden_size,
        intermediate_size=intermediate if isinstance(intermediate, int) else 4 * text.hidden_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act=getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", None) or "silu",
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or getattr(text, "layer_norm_eps", None) or 1e-6,
        attention_bias=_has_bias(parts, "q_proj"),
        attention_output_bias=_has_bias(parts, "o_proj"),
        mlp_bias=_has_bias(parts, "gate_proj"),
        qk_norm=(has_norms or not warm) if options.qk_norm is None else options.qk_norm,
        v_norm=hasattr(attention, "v_norm"),
        k_eq_v=sandwich and "k_proj" in parts and "v_proj" not in parts,
        rope_parameters=_rope(text),
        max_position_embeddings=text.max_position_embeddings,
        final_logit_softcapping=head.softcap,
        embedding_scale=embedding_factor(target),
        vocab_size=head.vocab_size,
        draft_vocab_size=options.draft_vocab_size if reduced else None,
        stores_embedding=False,
        stores_head=reduced,
        block_size=options.block_size,
        mask_token_id=options.mask_token_id,
        target_layer_ids=list(options.taps) if options.taps is not None else default_taps(depth),
        num_target_layers=depth,
        markov_rank=options.markov_rank,
        markov_head_type=options.markov_head_type,
        enable_confidence_head=options.confidence,
        confidence_head_with_markov=options.markov_rank > 0,
        bos_token_id=text.bos_token_id,
        eos_token_id=target.generation_config.eos_token_id if target.can_generate() else text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )


def _head_sizes(text, attention: nn.Module) -> tuple[int, int]:
    """Width of an attention head and number of KV heads, of the target's layer where it says so."""
    heads = text.num_attention_heads
    if hasattr(text, "kv_lora_rank"):  # latent attention: heads of several widths; the draft's are ordinary ones
        return text.hidden_size // heads // 2 * 2, heads
    head_dim = getattr(attention, "head_dim", None) or getattr(text, "head_dim", None) or text.hidden_size // heads
    groups = getattr(attention, "num_key_value_groups", None)
    return head_dim, heads // groups if groups else getattr(text, "num_key_value_heads", None) or heads


def _rope(text) -> dict:
    """Flat rotary parameters of the target's full-attention layers, of a kind the draft can use."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = {key: value for key, value in parameters.items() if isinstance(value, dict)}
    parameters = nested.get("full_attention") or next(iter(nested.values()), None) or parameters
    parameters = {key: value for key, value in parameters.items() if value is not None}
    kind, theta = parameters.get("rope_type", "default"), parameters.get("rope_theta", 10000.0)
    if kind not in ROPE_TYPES:
        return {"rope_type": "default", "rope_theta": theta}
    if kind != "proportional":
        parameters.pop("partial_rotary_factor", None)  # the draft's layers rotate whole heads
    return {**parameters, "rope_type": kind, "rope_theta": theta}


def _built_alike(layer: nn.Module) -> bool:
    """Whether a target layer normalises where one of the two draft layers does: other layouts would start off worse."""
    norms = {name for name, _ in layer.named_children() if "norm" in name}
    pre_norm = {"input_layernorm", "post_attention_layernorm"}
    return norms == pre_norm or norms >= {*pre_norm, *_SANDWICH}


# Weights --------------------------------------------------------------------------------------------------------------


def _source_layers(layers: nn.ModuleList, options: DraftOptions) -> list[int]:
    if options.source_layers is not None:
        return list(options.source_layers)

    def shape_of(layer):
        return {name: weight.shape for name, (weight, _) in _projections(layer).items()}

    # Some families alternate two kinds of layers; those like the last full-attention layer fit into one draft.
    kinds = [getattr(getattr(layer, "self_attn", None), "is_sliding", False) for layer in layers]
    last = max((number for number, sliding in enumerate(kinds) if not sliding), default=len(layers) - 1)
    fitting = [number for number, layer in enumerate(layers) if shape_of(layer) == shape_of(layers[last])]
    fitting = fitting[-options.num_layers :]
    return [fitting[0]] * (options.num_layers - len(fitting)) + fitting


def _projections(layer: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Weight and bias of a target layer's projections under the draft's names; fused ones are split."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    found = {}
    for module, names in ((attention, "q_proj k_proj v_proj o_proj"), (mlp, "gate_proj up_proj down_proj")):
        for name in names.split():
            part = getattr(module, name, None)
            if isinstance(part, nn.Linear) and part.weight.is_floating_point():
                found[name] = (part.weight, part.bias)
    fused = getattr(attention, "qkv_proj", None)
    if isinstance(fused, nn.Linear) and (width := getattr(attention, "head_dim", None)):
        kv_rows = (fused.weight.shape[0] - layer.self_attn.o_proj.weight.shape[1]) // 2
        sizes = [fused.weight.shape[0] - 2 * kv_rows, kv_rows, kv_rows]
        if kv_rows % width == 0:
            found |= dict(zip(("q_proj", "k_proj", "v_proj"), _split(fused, sizes)))
    fused = getattr(mlp, "gate_up_proj", None)
    if isinstance(fused, nn.Linear):
        found |= dict(zip(("gate_proj", "up_proj"), _split(fused, [fused.weight.shape[0] // 2] * 2)))
    return found


def _split(linear: nn.Linear, sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    biases = [None] * len(sizes) if linear.bias is None else linear.bias.split(sizes)
    return list(zip(linear.weight.split(sizes), biases))


@torch.no_grad()
def _warm_start(draft: DSparkDraftModel, sources: list[nn.Module], first: int) -> list[str]:
    """Copies what fits; returns what did not."""
    missing = []
    for number, (layer, source) in enumerate(zip(draft.layers, sources)):
        parts = _projections(source)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
            own = getattr(layer.self_attn if name in ("q_proj", "k_proj", "v_proj", "o_proj") else layer.mlp, name)
            if own is None:
                continue
            weight, bias = parts.get(name, (None, None))
            if weight is None or weight.shape != own.weight.shape:
                missing.append(f"layers.{number}.{name}")
                continue
            own.weight.copy_(weight)
            if own.bias is not None and bias is not None:
                own.bias.copy_(bias)
        for name, norm in layer.named_children():
            if name.endswith("layernorm") and not _copy_norm(norm, getattr(source, name, None)):
                missing.append(f"layers.{number}.{name}")
        _warm_start_attention(layer.self_attn, getattr(source, "self_attn", nn.Identity()))
        if isinstance(scalar := getattr(source, "layer_scalar", None), torch.Tensor):
            layer.layer_scalar.copy_(scalar)
    _start_fc(draft, first)
    _copy_norm(draft.hidden_norm, getattr(sources[0], "input_layernorm", None))
    return missing


def _warm_start_attention(own: nn.Module, source: nn.Module) -> None:
    if own.q_norm is not None:
        for name in ("q_norm", "k_norm"):
            _copy_norm(getattr(own, name), getattr(source, name, None))
    scaling = getattr(source, "scaling", None)
    if isinstance(scaling, float) and abs(scaling / own.scale - 1.0) > 1e-6:
        queries = own.q_norm if own.q_norm is not None else own.q_proj
        for parameter in queries.parameters():
            parameter.mul_(scaling / own.scale)


def _start_fc(draft: DSparkDraftModel, first_source: int) -> None:
    """`fc` starts as the tap nearest to what the first source layer used to read, with a little of the others."""
    config, taps = draft.config, draft.config.target_layer_ids
    draft.fc.weight.mul_(0.1)
    tap = min(range(len(taps)), key=lambda number: abs(taps[number] - (first_source - 1)))
    width = config.target_hidden_size
    if width == config.hidden_size:
        draft.fc.weight[:, tap * width : (tap + 1) * width] += torch.eye(width)


def _copy_norm(own: nn.Module, source: nn.Module | None) -> bool:
    weight = _norm_weight(source, own.weight.shape[0])
    if weight is not None:
        own.weight.copy_(weight)
    return weight is not None


@torch.no_grad()
def _norm_weight(norm: nn.Module | None, size: int) -> torch.Tensor | None:
    """The factor an RMS norm applies to each channel, whether it stores it as w or w - 1; `None` for another norm."""
    if norm is None or _norm_size(norm) != size:
        return None
    weight = norm.weight
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(2, size, generator=generator).to(device=weight.device, dtype=weight.dtype)
    factors = norm(probe).float() / probe.float() * probe.float().pow(2).mean(-1, keepdim=True).sqrt()
    # Median over channels: a probe value near 0 says nothing about its channel in half precision.
    stored = [weight.float(), weight.float() + 1.0]
    errors = [(factors - candidate).abs().median().item() for candidate in stored]
    best = min(range(2), key=errors.__getitem__)
    return stored[best] if errors[best] < 2e-2 * max(1.0, stored[best].abs().median().item()) else None


def _norm_size(norm: nn.Module | None) -> int | None:
    weight = getattr(norm, "weight", None)
    return weight.shape[0] if isinstance(weight, torch.Tensor) and weight.dim() == 1 else None


def _final_norm(target: nn.Module) -> nn.Module | None:
    decoder = target.get_decoder()
    return next((module for name in ("norm", "final_layernorm") if (module := getattr(decoder, name, None))), None)


def _has_bias(parts: dict, name: str) -> bool:
    return name in parts and parts[name][1] is not None


__all__ = ["DraftOptions", "choose_mask_token", "default_taps", "new_draft", "set_vocabulary"]
