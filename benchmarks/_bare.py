"""What the two forwards of a round cost on their own, outside any generation loop.

A round cannot be cheaper than one forward of the draft over its block plus one forward of the target over the tokens
to verify. Both are measured here at the shapes of the real run: the draft through `draft_block` with its cache already
filled, the target through its plain `forward` on a filled `DynamicCache`. Everything a real round costs beyond that
(extending the draft's context, masks, capture, acceptance, stopping) is overhead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from _common import median_seconds
from transformers import DynamicCache, PreTrainedModel

from dspark_hf import DSparkDraftModel
from dspark_hf._compat import CACHE_KEY


@dataclass(frozen=True)
class BareCost:
    """Seconds of bare forwards for `rows` rows with `context` tokens each.

    Attributes:
        step (`float`): the target over 1 token a row: plain decoding's step.
        verify (`float`): the target over 1 + `draft_length` tokens a row.
        draft (`float`): the draft's block, its sequential head run over `draft_length` slots.
    """

    rows: int
    context: int
    draft_length: int
    step: float
    verify: float
    draft: float

    @property
    def round(self) -> float:
        """Seconds a round would take if it were its two forwards and nothing else."""
        return self.draft + self.verify


@torch.no_grad()
def bare_cost(
    target: PreTrainedModel, draft: DSparkDraftModel, *, rows: int, context: int, draft_length: int, repeats: int = 9
) -> BareCost:
    """Measure one shape.

    Args:
        target (`PreTrainedModel`), draft (`DSparkDraftModel`): the pair, on one device, in one dtype.
        rows (`int`): R.
        context (`int`): tokens already in both caches, per row.
        draft_length (`int`): l; the target verifies 1 + l tokens a row.
        repeats (`int`, *optional*, defaults to 9): timed runs of each forward; the median counts.
    """
    device = target.device
    tokens = torch.randint(target.get_input_embeddings().num_embeddings, (rows, context), device=device)
    cache = DynamicCache()
    target(input_ids=tokens, use_cache=True, logits_to_keep=1, **{CACHE_KEY: cache})

    def forward(width: int) -> None:
        positions = torch.arange(context, context + width, device=device).expand(rows, -1)
        target(input_ids=tokens[:, :width], position_ids=positions, use_cache=True, **{CACHE_KEY: cache})
        cache.crop(-width)

    block = draft.config.block_size
    shared = draft.shared_weights(target)
    memory = draft.new_cache(rows, slots=context + block, uniform=True)
    memory.lengths = torch.full_like(memory.lengths, context)
    positions = torch.arange(context, context + block, device=draft.device).expand(rows, -1)

    def draft_block() -> None:
        draft.draft_block(
            None,
            tokens[:, 0],
            positions,
            cache=memory,
            shared=shared,
            num_tokens=draft_length,
            kv_length=context + block,
        )

    def seconds(run) -> float:
        return median_seconds(run, device, repeats=repeats)

    return BareCost(
        rows=rows,
        context=context,
        draft_length=draft_length,
        step=seconds(lambda: forward(1)),
        verify=seconds(lambda: forward(1 + draft_length)),
        draft=seconds(draft_block),
    )
