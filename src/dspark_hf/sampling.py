"""Exact verification of drafted blocks: acceptance and residual (speculative sampling, arXiv 2211.17192, algorithm 1).

Why the output is the target's: token d drawn from q is kept with probability min(1, p(d)/q(d)); the first rejected slot
is redrawn from the normalised (p - q)+, and a fully accepted prefix is followed by a draw from p. Summed over d, the
slot's distribution is p for any q, as long as q is exactly what d was drawn from and the verify length did not depend
on d. Every function here is pure: tensors in, tensors out, all R rows at once.
"""

import torch

# Below this mass the residual is rounding noise of p = q; the slot is then drawn from p itself.
RESIDUAL_FLOOR = 1e-8


def accepted_prefix(accept: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """
    Length of each row's accepted prefix.

    Args:
        accept (`torch.BoolTensor` of shape `(R, K)`): Whether each slot alone would be accepted.
        lengths (`torch.LongTensor` of shape `(R,)`): Verify length; slots from there on do not count.

    Returns:
        `torch.LongTensor` of shape `(R,)`.
    """
    slots = torch.arange(accept.shape[1], device=accept.device)
    return (accept & (slots < lengths[:, None])).long().cumprod(dim=1).sum(dim=1)


def accept_greedy(drafts: torch.Tensor, choices: torch.Tensor, lengths: torch.Tensor):
    """
    Greedy acceptance: a slot is accepted when the target's choice is the drafted token.

    Args:
        drafts (`torch.LongTensor` of shape `(R, K)`): Drafted tokens.
        choices (`torch.LongTensor` of shape `(R, K + 1)`): The target's argmax after the anchor and after each draft.
            Entries behind `lengths` are not read.
        lengths (`torch.LongTensor` of shape `(R,)`): Verify lengths.

    Returns:
        Accepted lengths `(R,)` and the token that follows the accepted prefix `(R,)`.
    """
    accepted = accepted_prefix(drafts == choices[:, : drafts.shape[1]], lengths)
    return accepted, choices.gather(1, accepted[:, None]).squeeze(1)


def accept_sampled(p: torch.Tensor, q: torch.Tensor, uniforms: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """
    Accepted lengths under sampling.

    Args:
        p (`torch.Tensor` of shape `(R, K)`): Target probability of each drafted token.
        q (`torch.Tensor` of shape `(R, K)`): Probability with which it was drawn.
        uniforms (`torch.Tensor` of shape `(R, K)`): Independent draws from [0, 1).
        lengths (`torch.LongTensor` of shape `(R,)`): Verify lengths.
    """
    # strict and without a division: p = 0 is never accepted, and q = 0 cannot divide
    return accepted_prefix(uniforms * q < p, lengths)


def residual_weights(p: torch.Tensor, q: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """
    Unnormalised distribution of the token behind the accepted prefix.

    Args:
        p (`torch.Tensor` of shape `(R, V)`): Target distribution at that slot.
        q (`torch.Tensor` of shape `(R, V)`): Draft distribution there; not read for rows that rejected nothing.
        rejected (`torch.BoolTensor` of shape `(R,)`): Whether the slot's drafted token was rejected.

    Returns:
        `torch.Tensor` of shape `(R, V)`: (p - q)+ for rejected slots, p otherwise.
    """
    residual = (p - q).clamp_min(0)
    use = rejected & (residual.sum(dim=-1) > RESIDUAL_FLOOR)
    return torch.where(use[:, None], residual, p)


def draw(weights: torch.Tensor) -> torch.Tensor:
    """
    One draw per row from unnormalised weights `(R, V)`; the weights of each row must not all be zero.

    Exponential race: the smallest of independent Exp(w_i) times is i with probability w_i / sum(w). Unlike
    `torch.multinomial` it never reads a value back to the host.
    """
    return (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1)
