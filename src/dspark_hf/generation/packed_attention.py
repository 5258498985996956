"""Attention over packed rows.

A packed forward runs embeddings, projections, experts, norms and the head on the N tokens that are really verified,
`[1, N]`. Only attention needs the rows back: here the queries are laid out as a rectangle `[R, Q]`, the model's own
attention function does the work, and its output is packed again. Keys and values come from the ragged cache as rows.
"""

import sys
from types import SimpleNamespace

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .masks import VerifyStep, current_step, original_attention


def attention_function(module, name: str):
    """The function behind an implementation name; `eager` is defined beside the module."""
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def unpack_rows(step: VerifyStep, packed: torch.Tensor) -> torch.Tensor:
    """`[1, H, N, D]` to `[R, H, Q, D]`; slots that no token fills are zero."""
    if step.rows == 1:
        return packed
    _, heads, _, dim = packed.shape
    if step.is_uniform:
        return packed.view(heads, step.rows, step.width, dim).transpose(0, 1)
    out = packed.new_zeros(step.rows * step.width, heads, dim)
    out.index_copy_(0, step.flat.to(packed.device), packed[0].transpose(0, 1))
    return out.view(step.rows, step.width, heads, dim).transpose(1, 2)


def pack_rows(step: VerifyStep, rows: torch.Tensor) -> torch.Tensor:
    """`[R, Q, H, D]` to `[1, N, H, D]`."""
    if step.rows == 1:
        return rows
    flat = rows.reshape(step.rows * step.width, *rows.shape[2:])
    if not step.is_uniform:
        flat = flat.index_select(0, step.flat.to(rows.device))
    return flat.unsqueeze(0)


def packed_attention(module, query, key, value, attention_mask, **kwargs):
    """Attention of a packed forward; the original function's answer in any other forward."""
    step = current_step()
    if step is None or not step.packed:
        name = original_attention(module.config) if step is None else step.delegate
        return attention_function(module, name)(module, query, key, value, attention_mask, **kwargs)
    function = attention_function(module, step.delegate)
    query = unpack_rows(step, query)
    if attention_mask is not None and step.hides_nothing(attention_mask):
        attention_mask = None
    groups = getattr(module, "num_key_value_groups", 1)
    if step.delegate == "sdpa" and groups > 1 and attention_mask is not None and attention_mask.shape[1] == 1:
        output = _fold_query_heads(step, function, module, query, key, value, attention_mask, groups, kwargs)
        return pack_rows(step, output), None
    output, weights = function(module, query, key, value, attention_mask, **kwargs)
    return pack_rows(step, output), weights


def _fold_query_heads(step, function, module, query, key, value, mask, groups: int, kwargs: dict) -> torch.Tensor:
    """
    Grouped-query attention without repeating keys and values: the query heads of a group become more queries.

    Returns `[R, Q, H, D]`. The function sees a module with one query head per key head.
    """
    rows, heads, width, dim = query.shape
    folded = step.grouped_masks.get(id(mask))
    if folded is None:
        # the mask itself is kept too: an id is unique only while its object lives
        folded = step.grouped_masks[id(mask)] = (mask.repeat(1, 1, groups, 1), mask)
    view = SimpleNamespace(num_key_value_groups=1, is_causal=False, training=module.training, config=module.config)
    query = query.reshape(rows, heads // groups, groups * width, dim)
    output, _ = function(view, query, key, value, folded[0], **kwargs)
    output = output.view(rows, groups, width, heads // groups, -1)
    return output.permute(0, 2, 3, 1, 4).reshape(rows, width, heads, -1)
