"""One training step of a draft as a single module, so that it can be wrapped for several processes.

Given a batch of rows with the target's features, the step draws anchors, runs the draft on all blocks at once, and
hands the supervised slots to the fused loss. Wrapping the whole step, instead of the draft alone, is what lets
`DistributedDataParallel` see every parameter that takes part: the backbone through its forward, the heads through the
loss.

Denominators are summed over all processes before they divide, so a step on N processes has exactly the gradient of
one process with N times the rows.
"""

import torch
import torch.distributed as dist
from torch import nn

from ..heads import MarkovHead
from ..modeling_dspark import DSparkDraftModel
from ..sharing import SharedWeights
from .features import TargetHead
from .fused_loss import SlotBatch, fused_token_loss
from .objective import (
    EPSILON,
    Blocks,
    LossSettings,
    block_mask,
    confidence_loss,
    make_blocks,
    metric_sums,
    sample_anchors,
    slot_weights,
)


class TrainingStep(nn.Module):
    """Loss of a batch.

    Args:
        draft (`DSparkDraftModel`): the draft; its embedding and head are frozen here.
        shared (`SharedWeights`): from `draft.shared_weights(target)`.
        target_head (`TargetHead`): the target's output head.
        settings (`LossSettings`): weights of the objective.
        num_anchors (`int`): A, blocks per row.
        chunk_size (`int`, *optional*): as in `fused_token_loss`.
        target_columns (`TargetHead`, *optional*): the head of a reduced draft vocabulary alone; takes the place of
            `target_head` in batches that bring normalisers.

    Raises:
        ValueError: for a draft in the 1+N layout, whose anchor slot drafts nothing.
    """

    def __init__(
        self,
        draft: DSparkDraftModel,
        shared: SharedWeights,
        target_head: TargetHead,
        settings: LossSettings,
        *,
        num_anchors: int = 512,
        chunk_size: int | None = None,
        target_columns: TargetHead | None = None,
    ):
        super().__init__()
        if not draft.config.sample_from_anchor:
            raise ValueError("Only drafts whose anchor slot predicts (`sample_from_anchor=True`) can be trained.")
        if num_anchors < 1:
            raise ValueError(f"`num_anchors` must be at least 1, got {num_anchors}.")
        self.draft = draft
        for frozen in (draft.embed_tokens, draft.lm_head):
            if frozen is not None:
                frozen.requires_grad_(False)
        # A dataclass, not a module: what is borrowed from the target is neither saved nor synchronised.
        self.shared, self.target_head = shared, target_head
        self.settings, self.num_anchors, self.chunk_size = settings, num_anchors, chunk_size
        self.register_buffer("draft_ids", _draft_ids(draft), persistent=False)
        self.target_columns = target_columns

    def forward(
        self,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        uniforms: torch.Tensor,
        context_hidden: torch.Tensor,
        target_hidden: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        segment_ids: torch.Tensor | None = None,
        normalisers: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Loss and metric sums of a batch.

        Args:
            input_ids, loss_mask (`torch.Tensor` [R, T]): tokens, and which of them the target wrote.
            uniforms (`torch.Tensor` [R, T - 1]): random numbers that choose the anchors.
            context_hidden (`torch.Tensor` [R, T, taps·H_target]): tapped states of all tokens.
            target_hidden (`torch.Tensor` [R, T, H_target]): final normed states of all tokens.
            position_ids, segment_ids (`torch.Tensor` [R, T], *optional*): for packed rows.
            normalisers (`torch.Tensor` [R, T], *optional*): from `FeatureCache`; with `target_columns`.

        Returns:
            `loss` [], and the sums of `metric_sums` together with those of the loss terms, all detached.
        """
        config = self.draft.config
        anchors, keep = sample_anchors(loss_mask, self.num_anchors, uniforms, segment_ids)
        used = max(1, int(keep.sum(dim=1).max()))  # dummies come last; what no row needs is cut
        blocks = make_blocks(
            input_ids,
            loss_mask,
            anchors[:, :used],
            keep[:, :used],
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            position_ids=position_ids,
            segment_ids=segment_ids,
        )
        hidden = self._backbone(blocks, context_hidden, position_ids, segment_ids)
        embeddings, latents = self._markov(blocks, hidden)

        weights = slot_weights(blocks.supervised, self.settings.decay)
        slots, index = self._supervised(blocks, hidden, latents, target_hidden, normalisers)
        kept = weights.flatten()[index]
        ce_kept = kept * (slots.labels >= 0)
        totals, processes = self._totals(torch.stack([kept.sum(), ce_kept.sum()]))
        loss, cross_entropy, distance = fused_token_loss(
            self.draft,
            self.shared,
            self.target_head if slots.normalisers is None else self.target_columns,
            slots,
            ce_weights=ce_kept * (self.settings.ce * processes / (totals[1] + EPSILON)),
            l1_weights=kept * (self.settings.l1 * processes / (totals[0] + EPSILON)),
            chunk_size=self.chunk_size,
        )
        accept_rate = torch.zeros_like(weights).flatten()
        accept_rate[index] = (1.0 - 0.5 * distance).clamp(0.0, 1.0)
        accept_rate = accept_rate.view_as(weights)
        terms = {"ce": (cross_entropy * ce_kept).sum(), "ce_weights": ce_kept.sum(), "l1": (distance * kept).sum()}
        confidence = None
        if self.draft.confidence_head is not None:
            confidence = self.draft.confidence_head(hidden, embeddings)
            mean = confidence_loss(confidence, accept_rate, weights, totals[0])
            loss = loss + self.settings.confidence * processes * mean
            terms["confidence"] = (mean * (totals[0] + EPSILON)).detach()
        metrics = metric_sums(accept_rate, blocks.supervised, confidence, self.settings.decay)
        return {"loss": loss, **metrics, **terms}

    def _backbone(self, blocks: Blocks, context_hidden, position_ids, segment_ids) -> torch.Tensor:
        """Draft hidden states [R, A, K, H] of all blocks in one forward."""
        rows, length = context_hidden.shape[:2]
        if position_ids is None:
            position_ids = torch.arange(length, device=context_hidden.device).expand(rows, length)
        output = self.draft(
            blocks.input_ids.flatten(1),
            context_hidden,
            torch.cat([position_ids, blocks.position_ids.flatten(1)], dim=1),
            attention_mask=self._masks(blocks, length, segment_ids),
            shared=self.shared,
            return_logits=False,
        )
        return output.last_hidden_state.unflatten(1, blocks.input_ids.shape[1:])

    def _masks(self, blocks: Blocks, length: int, segment_ids) -> dict[str, torch.Tensor]:
        """The block mask of every kind of layer."""
        config, masks = self.draft.config, {}
        for layer_type in set(config.layer_types):
            sliding = layer_type == "sliding_attention"
            masks[layer_type] = block_mask(
                blocks,
                length,
                segment_ids=segment_ids,
                window=config.sliding_window if sliding else None,
                window_per_slot=config.sliding_window_per_slot,
                causal=sliding and not config.sliding_window_non_causal,
                dummies_see_themselves=True,
            )
        return masks

    def _markov(self, blocks: Blocks, hidden: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Embeddings of the previous tokens and what the output table projects, both [R, A, K, r]."""
        head = self.draft.markov_head
        if head is None:
            return None, None
        embeddings = head.markov_w1(blocks.previous_ids.clamp(max=self.draft.config.vocab_size - 1))
        return embeddings, teacher_forced_latents(head, embeddings, hidden)

    def _supervised(
        self, blocks: Blocks, hidden, latents, target_hidden, normalisers
    ) -> tuple[SlotBatch, torch.Tensor]:
        """The supervised slots, ordered by the state their label follows, and their numbers [N] among all R·A·K."""
        rows, length, width = target_hidden.shape
        index = blocks.supervised.flatten().nonzero().squeeze(1)
        first = torch.arange(rows, device=target_hidden.device)[:, None, None] * length
        sources = (blocks.label_sources + first).flatten()[index]
        # Blocks overlap: most states predict the label of several slots, and need their logits only once.
        states, sources = torch.unique(sources, return_inverse=True)
        order = sources.argsort(stable=True)
        index, sources = index[order], sources[order]
        labels = blocks.labels.flatten()[index]
        slots = SlotBatch(
            hidden=hidden.flatten(0, 2)[index],
            latent=None if latents is None else latents.flatten(0, 2)[index],
            target_hidden=target_hidden.reshape(rows * length, width)[states],
            sources=sources,
            labels=labels if self.draft_ids is None else self.draft_ids[labels],
            normalisers=None if normalisers is None else normalisers.flatten()[states],
        )
        return slots, index

    def _totals(self, totals: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Sums over all processes of a training step, and their number."""
        if not self.training or not dist.is_available() or not dist.is_initialized():
            return totals, 1
        dist.all_reduce(totals)
        return totals, dist.get_world_size()


def teacher_forced_latents(head: MarkovHead, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """What the Markov head's output table projects, for whole blocks of known tokens.

    Args:
        head (`MarkovHead`): the head.
        embeddings (`torch.Tensor` [..., K, r]): of the token before each slot.
        hidden (`torch.Tensor` [..., K, H]): draft hidden states.

    Returns:
        [..., K, r]; `head.markov_w2` of it is `head.bias_teacher_forced`.
    """
    state = head.initial_state(hidden)
    if state is None:
        return head._latent(embeddings, hidden, None)[0]
    latents = []
    for embedding, slot_hidden in zip(embeddings.unbind(-2), hidden.unbind(-2)):
        latent, state = head._latent(embedding, slot_hidden, state)
        latents.append(latent)
    return torch.stack(latents, dim=-2)


def _draft_ids(draft: DSparkDraftModel) -> torch.Tensor | None:
    """Draft id of every target id [V], -1 outside the draft's vocabulary; `None` when both are the same."""
    targets = draft.draft_to_target
    if targets is None:
        return None
    lookup = targets.new_full((draft.config.vocab_size,), -1)
    lookup[targets] = torch.arange(targets.shape[0], device=targets.device)
    return lookup


__all__ = ["TrainingStep", "teacher_forced_latents"]
