"""The training objective: random anchors, one mask for all blocks, three losses.

A sequence that the target wrote is a training set of its own (arXiv 2607.05147, section 3.3): every response token is
an anchor for which the target's next tokens are known. One step draws some anchors per row and drafts a block from
each of them in a single forward, under a mask that lets a block see the context before its own anchor and itself:

    queries \\ keys   context 0..C-1         block 0   block 1   ...
    block a          position < anchor(a)   -         itself    -

Slot k of a block (k = 0 is the anchor's own slot) predicts the token at anchor + k + 1, with the Markov head
teacher-forced on the true tokens. With p_d the draft's and p_t the target's distribution for that token, and weights
w_k = exp(-k / decay) that favour early slots (eq. 8), the loss is

    ce · CE(p_d, token) + l1 · ‖p_d - p_t‖₁ + confidence · BCE(c_k, 1 - ½ ‖p_d - p_t‖₁)        (eq. 9 to 12)

1 - ½ ‖p_d - p_t‖₁ is the probability that rejection sampling accepts the slot, hence what the confidence head must
say; it is a label there and carries no gradient. Each term is Σ w x / (Σ w + 1e-6) over the supervised slots.

All functions here are pure: random numbers come in as an argument. `plain_loss` keeps all logits at once and is the
readable twin of `fused_loss.py`.

Axes: R rows, T tokens, A anchors (blocks) per row, K slots per block, S = T + A·K keys, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

EPSILON = 1e-6


@dataclass(frozen=True)
class LossSettings:
    """Weights of the objective; the defaults are the official recipe for DSpark.

    Attributes:
        ce (`float`): weight of the cross entropy against the data's tokens.
        l1 (`float`): weight of the L1 distance (0 to 2) between draft and target distribution.
        confidence (`float`): weight of the confidence head's binary cross entropy; ignored without that head.
        decay (`float`, *optional*): slots after which a slot's weight has fallen by e; `None` or 0 weighs all alike.
    """

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float | None = 4.0

    def __post_init__(self):
        for name in ("ce", "l1", "confidence"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"`{name}` is the weight of a loss term and must be 0 or more, got {value!r}.")
        if self.ce == 0 and self.l1 == 0:
            raise ValueError("`ce` and `l1` are both 0: nothing would train the draft's tokens.")


@dataclass(frozen=True)
class Blocks:
    """The blocks of a step, for draft and loss.

    Attributes:
        anchors (`torch.Tensor` [R, A]): index of each anchor within its row; 0 for a dummy.
        keep (`torch.Tensor` [R, A], bool): False for dummies, which fill rows with too few possible anchors.
        input_ids (`torch.Tensor` [R, A, K]): anchor, then mask tokens; a dummy is all mask tokens.
        position_ids (`torch.Tensor` [R, A, K]): for the rotary embedding.
        labels (`torch.Tensor` [R, A, K]): the token each slot should predict (target ids).
        previous_ids (`torch.Tensor` [R, A, K]): the token before it, which the Markov head reads.
        label_sources (`torch.Tensor` [R, A, K]): index of the token after which the target predicts the label.
        supervised (`torch.Tensor` [R, A, K], bool): slots that count; a hole in the loss mask ends a block.
    """

    anchors: torch.Tensor
    keep: torch.Tensor
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    previous_ids: torch.Tensor
    label_sources: torch.Tensor
    supervised: torch.Tensor


def sample_anchors(
    loss_mask: torch.Tensor, num_anchors: int, uniforms: torch.Tensor, segment_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws anchors without replacement: the valid positions with the smallest uniforms, in order of position.

    A position is valid when it and the one after it both belong to the response, so a prompt token is never an anchor
    and every anchor has a label.

    Args:
        loss_mask (`torch.Tensor` [R, T]): nonzero where the target wrote the token.
        num_anchors (`int`): A.
        uniforms (`torch.Tensor` [R, T - 1]): random numbers in [0, 1).
        segment_ids (`torch.Tensor` [R, T], *optional*): number of the packed sequence each token belongs to.

    Returns:
        Anchors [R, A] and whether they are real [R, A]; dummies come last, at position 0.
    """
    mask = loss_mask.bool()
    valid = mask[:, :-1] & mask[:, 1:]
    if segment_ids is not None:
        valid &= segment_ids[:, :-1] == segment_ids[:, 1:]
    rows, candidates = valid.shape
    drawn = uniforms.masked_fill(~valid, 2.0).argsort(dim=1, stable=True)[:, :num_anchors]
    positions = drawn.masked_fill(~valid.gather(1, drawn), candidates).sort(dim=1).values
    if candidates < num_anchors:
        positions = F.pad(positions, (0, num_anchors - candidates), value=candidates)
    keep = positions < candidates
    return positions.masked_fill(~keep, 0), keep


def make_blocks(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: torch.Tensor,
    keep: torch.Tensor,
    *,
    block_size: int,
    mask_token_id: int,
    position_ids: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
) -> Blocks:
    """Inputs, labels and supervision of the block behind each anchor.

    Args:
        input_ids, loss_mask (`torch.Tensor` [R, T]): the rows.
        anchors, keep (`torch.Tensor` [R, A]): from `sample_anchors`.
        block_size (`int`): K.
        mask_token_id (`int`): token of the slots after the anchor.
        position_ids (`torch.Tensor` [R, T], *optional*): positions of the tokens; 0..T-1 if unset.
        segment_ids (`torch.Tensor` [R, T], *optional*): as in `sample_anchors`; labels do not cross its borders.

    Returns:
        `Blocks`.
    """
    rows, length = input_ids.shape
    slots = torch.arange(block_size, device=input_ids.device)
    wanted = anchors[..., None] + slots + 1
    label_index = wanted.clamp(max=length - 1).masked_fill(~keep[..., None], 0)
    labels = _take(input_ids, label_index)
    supervised = keep[..., None] & (wanted < length) & _take(loss_mask, label_index).bool()
    if segment_ids is not None:
        supervised &= _take(segment_ids, label_index) == _take(segment_ids, anchors)[..., None]
    anchor_tokens = _take(input_ids, anchors)
    block_ids = torch.full_like(labels, mask_token_id)
    block_ids[..., 0] = torch.where(keep, anchor_tokens, mask_token_id)
    anchor_positions = anchors if position_ids is None else _take(position_ids, anchors)
    return Blocks(
        anchors=anchors,
        keep=keep,
        input_ids=block_ids,
        position_ids=anchor_positions[..., None] + slots,
        labels=labels,
        previous_ids=torch.cat([anchor_tokens[..., None], labels[..., :-1]], dim=-1),
        label_sources=(label_index - 1).clamp(min=0),
        supervised=supervised.cumprod(dim=-1).bool(),
    )


def block_mask(
    blocks: Blocks,
    context_length: int,
    *,
    segment_ids: torch.Tensor | None = None,
    window: int | None = None,
    window_per_slot: bool = False,
    causal: bool = False,
    dummies_see_themselves: bool = False,
) -> torch.Tensor:
    """What each slot attends to: its own block, and the context before its anchor.

    Args:
        blocks (`Blocks`): the blocks.
        context_length (`int`): T.
        segment_ids (`torch.Tensor` [R, T], *optional*): restricts the context to the anchor's own sequence.
        window (`int`, *optional*): context tokens before the anchor that a sliding layer sees.
        window_per_slot (`bool`): the window counts back from each slot, itself included, instead of from the anchor.
        causal (`bool`): slots see only earlier slots of their block (sliding layers of some drafts).
        dummies_see_themselves (`bool`): False hides everything from dummies, as the official code does. A softmax
            over nothing is 0 in current kernels but was NaN in older ones, so training prefers True; dummies are not
            supervised either way.

    Returns:
        [R, A·K, T + A·K], bool, True = visible.
    """
    anchors, keep = blocks.anchors, blocks.keep
    (rows, count), slots = anchors.shape, blocks.input_ids.shape[-1]
    device = anchors.device
    keys = torch.arange(context_length, device=device)
    context = (keys < anchors[..., None]) & keep[..., None]  # [R, A, T]
    if segment_ids is not None:
        context &= segment_ids[:, None] == _take(segment_ids, anchors)[..., None]
    context = context[:, :, None].expand(rows, count, slots, context_length)
    if window is not None:
        ahead = torch.arange(1, slots + 1, device=device) if window_per_slot else torch.zeros(slots, device=device)
        context = context & (keys >= (anchors[..., None] + ahead - window)[..., None])
    inside = torch.ones(slots, slots, dtype=torch.bool, device=device)
    inside = inside.tril() if causal else inside
    same = torch.eye(count, dtype=torch.bool, device=device)[:, None, :, None] & inside[None, :, None]  # [A, K, A, K]
    shown = torch.ones_like(keep) if dummies_see_themselves else keep
    block = same & shown[:, :, None, None, None]  # [R, A, K, A, K]
    mask = torch.cat([context, block.flatten(-2)], dim=-1)
    return mask.flatten(1, 2)


def slot_weights(supervised: torch.Tensor, decay: float | None) -> torch.Tensor:
    """Weights w_k [R, A, K] of the slots, 0 where nothing is supervised (eq. 8)."""
    weights = supervised.float()
    if decay is None or decay <= 0:
        return weights
    return weights * torch.exp(-torch.arange(supervised.shape[-1], device=supervised.device) / decay)


def weighted_mean(values: torch.Tensor, weights: torch.Tensor, total: torch.Tensor | float | None = None):
    """Σ w x / (Σ w + 1e-6); `total` replaces Σ w where it was summed over several processes."""
    return (values * weights).sum() / ((weights.sum() if total is None else total) + EPSILON)


def acceptance(draft_logits: torch.Tensor, target_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """L1 distance [...] of two distributions given as logits [..., V], and the acceptance probability 1 - L1 / 2."""
    distance = (draft_logits.float().softmax(-1) - target_logits.float().softmax(-1)).abs().sum(-1)
    return distance, (1.0 - 0.5 * distance).clamp(0.0, 1.0)


def plain_loss(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    labels: torch.Tensor,
    supervised: torch.Tensor,
    confidence_logits: torch.Tensor | None,
    settings: LossSettings,
) -> dict[str, torch.Tensor]:
    """The objective with every logit in memory; for full vocabularies, small models and tests.

    Args:
        draft_logits (`torch.Tensor` [R, A, K, V]): Markov bias included.
        target_logits (`torch.Tensor` [R, A, K, V]): the target's, at `Blocks.label_sources`.
        labels (`torch.Tensor` [R, A, K]), supervised (`torch.Tensor` [R, A, K]): from `Blocks`.
        confidence_logits (`torch.Tensor` [R, A, K], *optional*): raw; `None` without the head.
        settings (`LossSettings`): weights.

    Returns:
        `loss`, its terms `ce`, `l1` and `confidence` before weighting, and `accept_rate` [R, A, K] (detached).
    """
    weights = slot_weights(supervised, settings.decay)
    cross_entropy = F.cross_entropy(draft_logits.float().flatten(0, -2), labels.flatten(), reduction="none")
    distance, accept_rate = acceptance(draft_logits, target_logits)
    accept_rate = accept_rate.detach()
    terms = {"ce": weighted_mean(cross_entropy.view_as(weights), weights), "l1": weighted_mean(distance, weights)}
    loss = settings.ce * terms["ce"] + settings.l1 * terms["l1"]
    if confidence_logits is not None:
        terms["confidence"] = confidence_loss(confidence_logits, accept_rate, weights)
        loss = loss + settings.confidence * terms["confidence"]
    return {"loss": loss, "accept_rate": accept_rate, **terms}


def confidence_loss(
    logits: torch.Tensor, accept_rate: torch.Tensor, weights: torch.Tensor, total: torch.Tensor | float | None = None
) -> torch.Tensor:
    """Binary cross entropy (eq. 11) of confidence logits [...] against acceptance probabilities [...], weighted."""
    entropy = F.binary_cross_entropy_with_logits(logits.float(), accept_rate.float(), reduction="none")
    return weighted_mean(entropy, weights, total)


def metric_sums(
    accept_rate: torch.Tensor,
    supervised: torch.Tensor,
    confidence_logits: torch.Tensor | None = None,
    decay: float | None = None,
) -> dict[str, torch.Tensor]:
    """Numerators and denominators of the metrics, to be added up over steps and processes; see `metrics_from_sums`.

    Args:
        accept_rate (`torch.Tensor` [R, A, K]): acceptance probability of each slot, given the true tokens before it.
        supervised (`torch.Tensor` [R, A, K], bool): slots that count.
        confidence_logits (`torch.Tensor` [R, A, K], *optional*): raw.
        decay (`float`, *optional*): what the confidence metrics are weighted with, as in `slot_weights`.

    Returns:
        Sums over R and A: `slots` [K], `accept` [K], `blocks` [], `survival` [], `weights` []; with confidence logits
        also `confidence_error`, `confidence_bias` and `survival_bias`, each [].
    """
    counted, weights = supervised.float(), slot_weights(supervised, decay)
    accept = accept_rate.detach().float() * counted
    survival = accept.cumprod(dim=-1)
    sums = {
        "slots": counted.sum(dim=(0, 1)),
        "accept": accept.sum(dim=(0, 1)),
        "blocks": counted[..., 0].sum(),
        "survival": survival.sum(),
        "weights": weights.sum(),
    }
    if confidence_logits is not None:
        confidence = confidence_logits.detach().float().sigmoid() * counted
        sums["confidence_error"] = ((confidence - accept).abs() * weights).sum()
        sums["confidence_bias"] = ((confidence - accept) * weights).sum()
        sums["survival_bias"] = ((confidence.cumprod(dim=-1) - survival) * weights).sum()
    return sums


def metrics_from_sums(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """Metrics of the summed steps.

    Returns:
        `tau` (accepted tokens per round, bonus included, if slots are accepted independently given the true text: 1 +
        the mean over blocks of the summed survival) and `accept@k` for every slot k; for drafts with a confidence head
        `confidence_error` (mean absolute), `confidence_bias` (mean, positive = overconfident) and `survival_bias` (the
        same of the running products), weighted by slot. Other sums, such as loss terms, are divided by the sum called
        `<name>_weights`, or else by `weights`.
    """
    values = {name: total.tolist() for name, total in sums.items()}
    blocks, slots, accepted = values.pop("blocks"), values.pop("slots"), values.pop("accept")
    metrics = {"tau": 1.0 + values.pop("survival") / max(blocks, 1.0)}
    for slot, (total, count) in enumerate(zip(accepted, slots)):
        metrics[f"accept@{slot}"] = total / max(count, 1.0)
    for name in [name for name in values if not name.endswith("weights")]:
        metrics[name] = values[name] / (values.get(f"{name}_weights", values["weights"]) + EPSILON)
    return metrics


def _take(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`values` [R, T] at `index` [R, ...]."""
    return values.gather(1, index.flatten(1)).view_as(index)


__all__ = [
    "Blocks",
    "LossSettings",
    "acceptance",
    "block_mask",
    "confidence_loss",
    "make_blocks",
    "metric_sums",
    "metrics_from_sums",
    "plain_loss",
    "sample_anchors",
    "slot_weights",
    "weighted_mean",
]
