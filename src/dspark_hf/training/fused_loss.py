"""The token losses without the logits: computed and differentiated a few hundred slots at a time.

Four tensors [slots, V] in float32 (logits, probabilities, the target's, the gradient) are what training a draft for a
vocabulary of 150,000 would spend most of its memory on: 2.4 GB each for 4,000 slots. None of them is needed after the
loss: its gradient with respect to the logits z is known in closed form. With p = softmax(z), q the target's
distribution, y the token and s = sign(p - q),

    d CE / dz = p - onehot(y)          d ‖p - q‖₁ / dz = p · (s - Σ p s)

so the forward pass works through the supervised slots in chunks, reduces each chunk's gradient to the small tensors it
flows into (hidden states, Markov latents, the Markov output table) and lets the logits go. The backward pass only
scales what was stored. `objective.plain_loss` is the twin that the tests compare with.

A reduced draft vocabulary keeps the objective exact: p is 0 outside it, which adds the target's mass there to the L1
distance. A token outside it has no cross entropy: the draft cannot propose it.

Blocks overlap, so several slots ask for the target's distribution after the same token. Slots come in the order of
that token, and each distribution is computed once per chunk.

Axes: N supervised slots, M distinct states of the target, H hidden, r Markov rank, V vocabulary of the target, V_draft
of the draft.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from ..modeling_dspark import DSparkDraftModel
from ..sharing import SharedWeights, frozen_linear
from .features import TargetHead

# Elements of one [chunk, V] tensor in float32. 134 MB keep an accelerator busy; on a CPU each pass over the chunk is
# faster when the next one still finds it in a cache and the allocator reuses its pages.
CHUNK_ELEMENTS, CPU_CHUNK_ELEMENTS = 2**25, 2**22


@dataclass(frozen=True)
class SlotBatch:
    """Supervised slots of a step, flattened.

    Attributes:
        hidden (`torch.Tensor` [N, H]): draft hidden states after the final norm.
        latent (`torch.Tensor` [N, r], *optional*): what the Markov head's output table projects; `None` without one.
        target_hidden (`torch.Tensor` [M, H_target]): final hidden states of the target, each after which it predicts
            the label of at least one slot.
        sources (`torch.Tensor` [N]): which of them belongs to each slot, ascending.
        labels (`torch.Tensor` [N]): draft-vocabulary ids; -1 for a token outside it.
        normalisers (`torch.Tensor` [M], *optional*): logsumexp of the target's logits over its whole vocabulary; with
            them the target's head needs the draft's columns only.
    """

    hidden: torch.Tensor
    latent: torch.Tensor | None
    target_hidden: torch.Tensor
    sources: torch.Tensor
    labels: torch.Tensor
    normalisers: torch.Tensor | None = None


def fused_token_loss(
    draft: DSparkDraftModel,
    shared: SharedWeights,
    target_head: TargetHead,
    slots: SlotBatch,
    *,
    ce_weights: torch.Tensor,
    l1_weights: torch.Tensor,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Σ ce_weight · CE + l1_weight · L1 over the slots, with gradients for hidden states, latents and `markov_w2`.

    Args:
        draft (`DSparkDraftModel`): for its head, Markov output table and vocabulary; the head stays frozen.
        shared (`SharedWeights`): the head to use, from `draft.shared_weights(target)`.
        target_head (`TargetHead`): the target's own output head; its `columns` of the draft's tokens where the slots
            bring normalisers.
        slots (`SlotBatch`): the slots.
        ce_weights, l1_weights (`torch.Tensor` [N]): factor of each slot's terms in the loss, denominators included.
        chunk_size (`int`, *optional*): slots per chunk; by default so many that a [chunk, V] tensor takes 134 MB, and
            17 MB on a CPU.

    Returns:
        The loss [], and per slot the cross entropy [N] and the L1 distance [N], both detached.

    Raises:
        ValueError: when the head has no plain weight to differentiate through.
    """
    weight = getattr(shared.head, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        raise ValueError(
            "Training needs a plain floating-point output head; load the target with its `lm_head` unquantised."
        )
    if chunk_size is None:
        elements = CPU_CHUNK_ELEMENTS if slots.hidden.device.type == "cpu" else CHUNK_ELEMENTS
        chunk_size = max(1, elements // max(target_head.vocab_size, weight.shape[0]))
    markov = None if draft.markov_head is None else draft.markov_head.markov_w2.weight
    terms = _Terms(draft, shared, target_head, slots, ce_weights, l1_weights, chunk_size, torch.is_grad_enabled())
    return _FusedTokenLoss.apply(slots.hidden, slots.latent, markov, terms)


@dataclass(frozen=True)
class _Terms:
    """What the loss is computed from, apart from the tensors that receive gradients."""

    draft: DSparkDraftModel
    shared: SharedWeights
    target_head: TargetHead
    slots: SlotBatch
    ce_weights: torch.Tensor
    l1_weights: torch.Tensor
    chunk_size: int
    differentiate: bool


class _FusedTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, latent, markov, terms: _Terms):
        draft, slots, count = terms.draft, terms.slots, hidden.shape[0]
        softcap = draft.config.final_logit_softcapping
        cross_entropy = torch.zeros(count, device=hidden.device)
        distance = torch.zeros(count, device=hidden.device)
        gradients = _Gradients(hidden, latent, markov) if terms.differentiate else None
        # Autocast would round the head's inputs again; the dtypes are chosen here, once for all chunks.
        mixed = torch.is_autocast_enabled(hidden.device.type)
        dtype = torch.get_autocast_dtype(hidden.device.type) if mixed else hidden.dtype
        table = None if markov is None else markov.to(dtype)
        terms = replace(terms, shared=_in_precision(terms.shared, dtype))
        sources = slots.sources.tolist()  # host copy, once: where each chunk's states begin and end
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, count, terms.chunk_size):
                chunk = slice(start, start + terms.chunk_size)
                base = draft.compute_base_logits(hidden[chunk], terms.shared).float()
                logits = base
                if table is not None:
                    bias = F.linear(latent[chunk].to(dtype), table)
                    # The base logits themselves are only needed again where a soft cap bends them.
                    logits = base.add_(bias) if softcap is None else base + bias
                    del bias
                states = slice(sources[start], sources[min(start + terms.chunk_size, count) - 1] + 1)
                target, outside = _target_probabilities(
                    terms.target_head(slots.target_hidden[states]),
                    draft.draft_to_target,
                    None if slots.normalisers is None else slots.normalisers[states, None],
                )
                which = slots.sources[chunk] - states.start
                cross_entropy[chunk], distance[chunk], gradient = _chunk_terms(
                    logits,
                    target[which],
                    slots.labels[chunk],
                    terms.ce_weights[chunk],
                    terms.l1_weights[chunk],
                    terms.differentiate,
                )
                distance[chunk] += outside[which]
                del logits, target
                if softcap is None:
                    base = None
                if terms.differentiate:
                    gradients.add(chunk, gradient, base, latent, table, terms, dtype)
                del base, gradient
        ctx.gradients = gradients
        ctx.mark_non_differentiable(cross_entropy, distance)
        loss = (cross_entropy * terms.ce_weights + distance * terms.l1_weights).sum()
        return loss, cross_entropy, distance

    @staticmethod
    def backward(ctx, grad_loss, _grad_cross_entropy, _grad_distance):
        stored = ctx.gradients
        # In place: the table is as large as the largest parameter, and each of these is used once.
        parts = (stored.hidden, stored.latent, stored.markov)
        return (*(None if part is None else part.mul_(grad_loss) for part in parts), None)


class _Gradients:
    """Gradients of the loss, collected chunk by chunk."""

    def __init__(self, hidden: torch.Tensor, latent: torch.Tensor | None, markov: torch.Tensor | None):
        self.hidden = torch.zeros_like(hidden)
        self.latent = None if latent is None else torch.zeros_like(latent)
        self.markov = None if markov is None else torch.zeros_like(markov)

    def add(self, chunk, gradient, base, latent, table, terms, dtype) -> None:
        """Takes in `gradient` [chunk, V_draft] with respect to the logits; overwrites it and `base`."""
        if table is not None:
            narrow = gradient.to(dtype)
            self.latent[chunk] = narrow @ table
            self.markov += narrow.T @ latent[chunk].to(dtype)
            del narrow
        if base is not None:
            gradient.mul_(base.div_(terms.draft.config.final_logit_softcapping).square_().neg_().add_(1.0))
        weight = terms.shared.head.weight[: terms.draft.config.draft_vocab_size]
        self.hidden[chunk] = (gradient.to(device=weight.device, dtype=weight.dtype) @ weight).to(self.hidden.device)


def _in_precision(shared: SharedWeights, dtype: torch.dtype) -> SharedWeights:
    """`shared` with a float32 head, as a draft in training stores its own, in `dtype`."""
    if type(shared.head) is not nn.Linear or shared.head.weight.dtype is not torch.float32 or dtype is torch.float32:
        return shared
    weight, bias = shared.head.weight, shared.head.bias
    return replace(shared, head=frozen_linear(weight.to(dtype), None if bias is None else bias.to(dtype)))


def _target_probabilities(
    logits: torch.Tensor, draft_to_target: torch.Tensor | None, normaliser: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's probabilities [m, V_draft] of the draft's tokens and their rest [m]; overwrites `logits`.

    `logits` are [m, V], or [m, V_draft] where the `normaliser` [m, 1] of all V is given.
    """
    if normaliser is None:
        normaliser = logits.logsumexp(dim=-1, keepdim=True)
        if draft_to_target is None:
            return logits.sub_(normaliser).exp_(), logits.new_zeros(logits.shape[0])
        logits = logits[:, draft_to_target]
    probabilities = logits.sub_(normaliser).exp_()
    return probabilities, (1.0 - probabilities.sum(-1)).clamp(min=0.0)


def _chunk_terms(
    logits: torch.Tensor,
    target: torch.Tensor,
    labels: torch.Tensor,
    ce_weights: torch.Tensor,
    l1_weights: torch.Tensor,
    differentiate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """CE [n], L1 inside the draft's vocabulary [n] and the gradient [n, V_draft] of a chunk.

    `logits` [n, V_draft] is only read; the target's probabilities `target` [n, V_draft] are overwritten.
    """
    inside = labels >= 0
    index = labels.clamp(min=0)[:, None]
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    cross_entropy = torch.where(inside, (normaliser - logits.gather(1, index)).squeeze(1), 0.0)
    probabilities = (logits - normaliser).exp_()
    difference = target.neg_().add_(probabilities)  # p - q
    distance = torch.linalg.vector_norm(difference, ord=1, dim=-1)
    if not differentiate:
        return cross_entropy, distance, None
    sign = difference.sign_()
    mean_sign = (probabilities[:, None] @ sign[..., None]).squeeze(-1)
    ce_weights = torch.where(inside, ce_weights, 0.0)[:, None]
    gradient = probabilities.mul_(sign.sub_(mean_sign).mul_(l1_weights[:, None]).add_(ce_weights))
    gradient.scatter_add_(1, index, -ce_weights)
    return cross_entropy, distance, gradient


__all__ = ["SlotBatch", "fused_token_loss"]
