"""Decoder layers of the draft: Qwen 3 style (also Llama-like) and Gemma 4 style.

What sets a draft layer apart from an ordinary decoder layer is its attention (arXiv 2607.05147, eq. 2 and 3): queries
come from the block only, while keys and values come from the block *and* from the context, which is the target's
tapped hidden states projected once for all layers. The context stream is never updated by the layers, so each layer
merely applies its own key and value projections to it, and those keys and values can be cached for good.

Inside the block attention is bidirectional. Sliding layers see `sliding_window` context tokens before the anchor, and
are causal inside the block unless the configuration says otherwise.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_dspark import DSparkConfig
from .draft_cache import DraftCache


class DSparkRMSNorm(nn.Module):
    """RMS norm in float32. Qwen 3 rounds to the input's dtype before the weight, Gemma 4 after it.

    Args:
        size (`int`): width of the last axis.
        config (`DSparkConfig`): for `rms_norm_eps` and `backbone`.
        with_weight (`bool`): False for Gemma 4's value norm.
    """

    def __init__(self, size: int, config: DSparkConfig, with_weight: bool = True):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.weight_in_float = config.backbone == "gemma4"
        self.weight = nn.Parameter(torch.ones(size)) if with_weight else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalises the last axis of `hidden` [..., size]."""
        normed = hidden.float()
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is None:
            return normed.to(hidden.dtype)
        if self.weight_in_float:
            return (normed * self.weight.float()).to(hidden.dtype)
        return self.weight * normed.to(hidden.dtype)


class DSparkRotaryEmbedding(nn.Module):
    """Cosines and sines for position ids, from Transformers' own rope parameters.

    Args:
        config (`DSparkConfig`): `rope_parameters`, `head_dim`.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.interleaved = config.rope_interleaved
        rope_type = config.rope_parameters.get("rope_type", "default")
        # Frequencies are not weights: computed here for real even when the model is created on the meta device, and no
        # buffer, so that casting the model to half precision leaves them in float32.
        with torch.device("cpu"):
            if rope_type == "default":
                exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
                inv_freq, self.scaling = 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0
            else:
                inv_freq, self.scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
        self._inv_freq = {torch.device("cpu"): inv_freq}

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [..., D] in `dtype` for `position_ids` [...]."""
        device = position_ids.device
        if device not in self._inv_freq:
            self._inv_freq[device] = self._inv_freq[torch.device("cpu")].to(device)
        angles = position_ids[..., None].float() * self._inv_freq[device]
        angles = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotary embedding of `states` [..., heads, D] with cos, sin [..., D]; half-split unless `interleaved`."""
    if interleaved:
        turned = torch.stack([-states[..., 1::2], states[..., ::2]], dim=-1).flatten(-2)
    else:
        first, second = states.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    return states * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)


class DSparkAttention(nn.Module):
    """Attention of block queries over context and block.

    Args:
        config (`DSparkConfig`): head counts, biases, norms.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.kv_heads = config.num_key_value_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.interleaved = config.rope_interleaved
        # Gemma 4 folds the scale into its query norm.
        self.scale = 1.0 if config.backbone == "gemma4" else config.head_dim**-0.5
        hidden, bias = config.hidden_size, config.attention_bias
        query_width, kv_width = config.num_attention_heads * config.head_dim, self.kv_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, query_width, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_width, bias=bias)
        self.v_proj = None if config.k_eq_v else nn.Linear(hidden, kv_width, bias=bias)
        self.o_proj = nn.Linear(query_width, hidden, bias=config.attention_output_bias)
        self.q_norm = DSparkRMSNorm(config.head_dim, config) if config.qk_norm else None
        self.k_norm = DSparkRMSNorm(config.head_dim, config) if config.qk_norm else None
        self.v_norm = DSparkRMSNorm(config.head_dim, config, with_weight=False) if config.v_norm else None

    def project_kv(
        self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (normed, rotated) and values, both [..., H_kv, D], of `states` [..., H]; cos, sin [..., D]."""
        shape = (*states.shape[:-1], self.kv_heads, self.head_dim)
        keys = self.k_proj(states).view(shape)
        values = keys if self.v_proj is None else self.v_proj(states).view(shape)
        if self.k_norm is not None:
            keys = self.k_norm(keys)
        if self.v_norm is not None:
            values = self.v_norm(values)
        return rotate(keys, cos, sin, self.interleaved), values

    def forward(
        self,
        states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attends from the block to context and block.

        Args:
            states (`torch.Tensor` [R, K, H]): the block.
            keys, values (`torch.Tensor` [R, S, H_kv, D]): context and block.
            cos, sin (`torch.Tensor` [R, K, D]): for the block.
            mask (`torch.Tensor`, *optional*): bool, True = visible, [R, 1, 1, S] or [R, 1, groups·K, S].

        Returns:
            [R, K, H].
        """
        rows, slots = states.shape[:2]
        queries = self.q_proj(states).view(rows, slots, -1, self.head_dim)
        if self.q_norm is not None:
            queries = self.q_norm(queries)
        queries = rotate(queries, cos, sin, self.interleaved)
        # The query heads that share a KV head become further queries of it, so K and V are read once, not repeated.
        queries = queries.view(rows, slots, self.kv_heads, self.groups, self.head_dim).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(rows, self.kv_heads, self.groups * slots, self.head_dim)
        mixed = F.scaled_dot_product_attention(
            queries, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=self.scale
        )
        mixed = mixed.view(rows, self.kv_heads, self.groups, slots, self.head_dim).permute(0, 3, 1, 2, 4)
        return self.o_proj(mixed.reshape(rows, slots, -1))


class DSparkMLP(nn.Module):
    """Gated MLP.

    Args:
        config (`DSparkConfig`): widths, activation, bias.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[..., H] to [..., H]."""
        return self.down_proj(self.act(self.gate_proj(states)) * self.up_proj(states))


class Qwen3DraftLayer(nn.Module):
    """Pre-norm layer: norm, attention, add; norm, MLP, add."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.self_attn = DSparkAttention(config)
        self.mlp = DSparkMLP(config)
        self.input_layernorm = DSparkRMSNorm(config.hidden_size, config)
        self.post_attention_layernorm = DSparkRMSNorm(config.hidden_size, config)

    def forward(self, hidden: torch.Tensor, cos, sin, mask, join) -> torch.Tensor:
        """One layer over the block `hidden` [R, K, H].

        `join(keys, values)` puts the block's keys and values [R, K, H_kv, D] behind the context's and returns both as
        [R, S, H_kv, D]; the other arguments are those of `DSparkAttention`.
        """
        states = self.input_layernorm(hidden)
        keys, values = join(*self.self_attn.project_kv(states, cos, sin))
        hidden = hidden + self.self_attn(states, keys, values, cos, sin, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Gemma4DraftLayer(nn.Module):
    """Gemma 4 layer: norms before and after both parts, then a stored scalar on the result."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.self_attn = DSparkAttention(config)
        self.mlp = DSparkMLP(config)
        self.input_layernorm = DSparkRMSNorm(config.hidden_size, config)
        self.post_attention_layernorm = DSparkRMSNorm(config.hidden_size, config)
        self.pre_feedforward_layernorm = DSparkRMSNorm(config.hidden_size, config)
        self.post_feedforward_layernorm = DSparkRMSNorm(config.hidden_size, config)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, hidden: torch.Tensor, cos, sin, mask, join) -> torch.Tensor:
        """As `Qwen3DraftLayer.forward`."""
        states = self.input_layernorm(hidden)
        keys, values = join(*self.self_attn.project_kv(states, cos, sin))
        mixed = self.self_attn(states, keys, values, cos, sin, mask)
        hidden = hidden + self.post_attention_layernorm(mixed)
        mixed = self.mlp(self.pre_feedforward_layernorm(hidden))
        return (hidden + self.post_feedforward_layernorm(mixed)) * self.layer_scalar


Masks = Mapping[str, torch.Tensor | None]


def given_context_masks(
    config: DSparkConfig,
    position_ids: torch.Tensor,
    context_length: int,
    attention_mask: torch.Tensor | Mapping[str, torch.Tensor] | None,
) -> Masks:
    """Masks by layer type for a context passed along with its block, none of it cached.

    Args:
        config (`DSparkConfig`): layer types and window.
        position_ids (`torch.Tensor` [R, C + K]): context, then block.
        context_length (`int`): C.
        attention_mask: as in `DSparkDraftModel.forward`.

    Returns:
        For each layer type `None`, [R, 1, 1, S] or [R, 1, groups·K, S], bool, True = visible.
    """
    if _is_complete(attention_mask):
        return _complete_masks(config, attention_mask, position_ids.device)
    rows, slots = position_ids.shape[0], position_ids.shape[1] - context_length
    keys = None if attention_mask is None else attention_mask.to(position_ids.device).bool()
    masks = {"full_attention": None if keys is None else keys[:, None, None]}
    if "sliding_attention" in config.layer_types:
        block = _block_mask(config, slots, position_ids.device)
        # Every query of a block shares the anchor's window, unless it has one of its own.
        first = position_ids[:, context_length:]
        first = first + 1 if config.sliding_window_per_slot else first[:, :1].expand_as(first)
        context = position_ids[:, None, :context_length] >= (first - config.sliding_window)[..., None]
        mask = torch.cat([context, block.expand(rows, slots, slots)], dim=-1)
        masks["sliding_attention"] = _fold_groups(config, mask if keys is None else mask & keys[:, None])
    return masks


def cached_context_masks(
    config: DSparkConfig,
    cache: DraftCache,
    slots: int,
    kv_length: int,
    attention_mask: torch.Tensor | Mapping[str, torch.Tensor] | None,
) -> Masks:
    """Masks by layer type for a cached context with the block behind it; S = `kv_length`, else as above."""
    device = cache.lengths.device
    if _is_complete(attention_mask):
        return _complete_masks(config, attention_mask, device)
    index, lengths = torch.arange(kv_length, device=device), cache.lengths[:, None]
    keys = None if cache.uniform else index < lengths + slots
    if attention_mask is not None:
        given = attention_mask.to(device).bool()
        keys = given if keys is None else keys & given
    masks = {"full_attention": None if keys is None else keys[:, None, None]}
    if "sliding_attention" in config.layer_types:
        place = (index - lengths)[:, None]  # [R, 1, S]: number of a slot within the block, negative in the context
        slot = torch.arange(slots, device=device)[:, None]
        first = slot + 1 if config.sliding_window_per_slot else torch.zeros_like(slot)
        block = _block_mask(config, slots, device)[slot, place.clamp(0, slots - 1)]
        mask = torch.where(place < 0, place >= first - config.sliding_window, block & (place < slots))
        masks["sliding_attention"] = _fold_groups(config, mask if keys is None else mask & keys[:, None])
    return masks


def _block_mask(config: DSparkConfig, slots: int, device: torch.device) -> torch.Tensor:
    """Which slots [K, K] of its own block each slot sees in a sliding layer."""
    mask = torch.ones(slots, slots, dtype=torch.bool, device=device)
    mask = mask if config.sliding_window_non_causal else mask.tril()
    # Only a window shorter than the block reaches in here.
    return mask.triu(1 - config.sliding_window) if config.sliding_window_per_slot else mask


def _is_complete(attention_mask) -> bool:
    """Whether the caller masks each query himself."""
    return isinstance(attention_mask, Mapping) or (attention_mask is not None and attention_mask.dim() > 2)


def _complete_masks(config: DSparkConfig, attention_mask, device: torch.device) -> Masks:
    masks = {}
    for layer_type in set(config.layer_types):
        mask = attention_mask[layer_type] if isinstance(attention_mask, Mapping) else attention_mask
        mask = mask.squeeze(1) if mask.dim() == 4 else mask
        masks[layer_type] = _fold_groups(config, mask.to(device).bool())
    return masks


def _fold_groups(config: DSparkConfig, mask: torch.Tensor) -> torch.Tensor:
    """[R, K or 1, S] to [R, 1, groups·K or 1, S], for the query heads that attention folds into the query axis."""
    groups = config.num_attention_heads // config.num_key_value_heads
    return (mask if mask.shape[1] == 1 else mask.repeat(1, groups, 1))[:, None]


DRAFT_LAYERS = {"qwen3": Qwen3DraftLayer, "gemma4": Gemma4DraftLayer}

__all__ = [
    "DRAFT_LAYERS",
    "DSparkAttention",
    "DSparkMLP",
    "DSparkRMSNorm",
    "DSparkRotaryEmbedding",
    "Gemma4DraftLayer",
    "Qwen3DraftLayer",
    "cached_context_masks",
    "given_context_masks",
    "rotate",
]
