"""Transformers' own DFlash generator, driven by a draft of this package that has no sequential head.

`generate(assistant_model=..., speculation_type="dflash")` runs a draft with an interface of its own:

- The draft gets *embeddings* of a block [anchor, mask, mask, ...], hidden states of the tokens committed since the last
  block, and positions of both. It returns the block's hidden states; the target's own head turns them into tokens.
- Blocks are 1+N: the first slot, the anchor's, predicts nothing.

[`DFlashAdapter`] is that interface around a [`DSparkDraftModel`]. A draft that predicts from its anchor slot is given a
block that is one slot longer and leaves the last slot alone, its hidden states moved on by one: then what Transformers
drops is the empty slot, and every drafted token is the draft's own. The context is kept in the draft's own cache.

The tokens are chosen with the target's whole vocabulary, and the Markov and confidence heads have no part in it. So a
draft with a Markov head, or with a head that is not the target's, would be at a disadvantage here and is refused.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .._compat import HAS_DFLASH_GENERATOR
from ..modeling_dspark import DSparkDraftModel
from ..sharing import SharedWeights


class DFlashAdapter(nn.Module):
    """A draft as Transformers' `DFlashTokenCandidateGenerator` calls it. Serves one `generate()` call at a time.

        target.generate(**inputs, assistant_model=DFlashAdapter(draft, target), speculation_type="dflash")

    Args:
        draft (`DSparkDraftModel`): a draft without a sequential head (`markov_rank` 0).
        target (`PreTrainedModel`): its target.

    Raises:
        ValueError: naming the reason, if that generator cannot do this draft justice.
    """

    def __init__(self, draft: DSparkDraftModel, target: PreTrainedModel):
        super().__init__()
        if reason := why_not(draft, target):
            raise ValueError(reason)
        self.draft = draft
        self.config = copy.deepcopy(draft.config)
        self.shift = 1 if draft.config.sample_from_anchor else 0
        self.config.block_size = draft.config.block_size + self.shift
        self.generation_config = copy.deepcopy(draft.generation_config)
        self._cache = None

    @property
    def device(self) -> torch.device:
        return self.draft.device

    @torch.no_grad()
    def forward(
        self, noise_embeds: torch.Tensor, context_hidden_states: torch.Tensor, position_ids: torch.Tensor, **_: Any
    ) -> BaseModelOutput:
        """Hidden states of one block.

        Args:
            noise_embeds (`torch.Tensor` [1, K', H]): embeddings of anchor and mask tokens, as the target scales them.
            context_hidden_states (`torch.Tensor` [1, C, T·H]): of the tokens committed since the last block.
            position_ids (`torch.Tensor` [1, C + K']): positions of both. A context that starts at 0 is a new prompt.

        Returns:
            `BaseModelOutput`: `last_hidden_state` [1, K', H]; slot 0 is not read by the caller.
        """
        slots, context = self.draft.config.block_size, context_hidden_states.shape[1]
        start = int(position_ids[0, 0])
        if start == 0:
            self._cache = self.draft.new_cache(1, uniform=True)
        if self._cache is None:
            raise ValueError("the prompt must be read in this call: a cache from an earlier one leaves out its states.")
        embeddings = noise_embeds[0, :slots] / self.draft.config.embedding_scale
        # The draft looks tokens up in a table; here the table holds just the block, in order.
        hidden = self.draft(
            torch.arange(slots, device=self.device)[None],
            context_hidden_states,
            position_ids[:, : context + slots],
            cache=self._cache,
            shared=SharedWeights(embedding=embeddings, head=None),
            kv_length=start + context + slots,
            return_logits=False,
        ).last_hidden_state
        if self.shift:
            hidden = torch.cat([hidden[:, :1], hidden], dim=1)
        return BaseModelOutput(last_hidden_state=hidden)


def why_not(draft: DSparkDraftModel, target: PreTrainedModel) -> str | None:
    """Why Transformers' DFlash generator cannot be driven with `draft` in fairness; `None` if it can."""
    config = draft.config
    if not HAS_DFLASH_GENERATOR:
        return "this version of Transformers has no DFlash generator: 5.24 or later is needed."
    if config.markov_rank:
        return "the draft has a Markov head, which Transformers' DFlash generator does not know: name a rank-0 draft."
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    if depth - 1 in config.target_layer_ids:
        return "the draft reads the target's last layer, whose state Transformers hands over normed."
    if config.final_logit_softcapping is not None:
        return "the draft caps its logits, Transformers' DFlash generator does not."
    if draft.lm_head is not None and not _is_the_targets_head(draft, target):
        return "the draft has a head of its own, and Transformers' DFlash generator uses the target's."
    return None


def _is_the_targets_head(draft: DSparkDraftModel, target: PreTrainedModel) -> bool:
    """Whether every row of the draft's head is the target's row for that token."""
    theirs = getattr(target.get_output_embeddings(), "weight", None)
    if theirs is None or theirs.shape[-1] != draft.lm_head.weight.shape[-1]:
        return False
    ids = draft.to_target_ids(torch.arange(draft.config.draft_vocab_size, device=draft.device)).to(theirs.device)
    ours = draft.lm_head.weight.to(device=theirs.device, dtype=torch.float32)
    return bool(torch.allclose(ours, theirs[ids].float(), atol=1e-3, rtol=1e-2))


__all__ = ["DFlashAdapter", "why_not"]
