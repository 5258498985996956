"""How many drafted tokens to verify, per row and round (DSpark, arXiv 2607.05147, section 3.2 and Algorithm 1).

A draft proposes K tokens for each of R rows. Its confidence head says how likely slot k is to be accepted given that
every slot before it was, c_{r,k}. The running product a_{r,k} = c_{r,1} ... c_{r,k} is the *survival* of the prefix. A
round that verifies l_r drafts of row r sends B = sum_r (1 + l_r) tokens through the target and is expected to commit
sum_r (1 + sum_{j <= l_r} a_{r,j}) of them, so its throughput is

    Theta = sum_r (1 + sum_{j <= l_r} a_{r,j}) / (draft seconds + verify seconds(B)).

Algorithm 1 maximises Theta over all rows together: slots are admitted in order of falling survival while Theta rises.

Why this leaves the target's distribution untouched. Rejection sampling is exact as long as the decision to verify
slot k never looks at the token drafted there. c_{r,k} is computed from tokens before slot k, but c_{r,k+1} has seen
token k. Everything that precedes slot (r, k) in the order has at least its survival, so in row r it is slots before k
only, and stopping at the first slot which does not raise Theta uses nothing else. Picking the best Theta *over all*
lengths looks past that slot and leaks: in the paper's appendix A it turns p = (0.7, 0.3) into 0.85. Two ways around a
jagged cost curve, where stopping early stops too early, are therefore kept apart here:

* `throughput_lengths` (early stop) may always decide the current round;
* `best_budget` (maximum over all lengths) may only produce a number for *later* rounds, where `budget_lengths` hands
  that many slots to the rows that survive best now.

Where a step is filled up to a round number of tokens anyway, the slots that follow in the order take the free places:
how many they are follows from where the early stop was, so nothing more has been looked at.

The functions are pure and cheap: a handful of operations on small CPU tensors whatever the number of rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# "survival" is the threshold on the running product, "budget" the stale-budget form of Algorithm 1.
POLICIES = ("constant", "confidence", "survival", "throughput", "budget")

# Seconds of a verify step by number of tokens: entry b is the cost of b tokens (entry 0 is never read).
Cost = Tensor | Sequence[float] | Callable[[int], float]
# Tokens that a step of so many is filled up to.
Fill = Callable[[int], int]


@dataclass(frozen=True)
class Schedule:
    """The verify lengths of one round and what they are expected to bring.

    Attributes:
        lengths (`Tensor` [R], int64, CPU): drafted tokens to verify per row, 0 to K.
        expected_tokens (`float` or `None`): tokens the round is expected to commit over all R rows, the token that
            verification itself yields included; `None` without survival.
        verify_tokens (`int`): tokens that go through the target, sum of 1 + length.
        seconds (`float` or `None`): predicted duration, draft and verification; `None` without a cost.
        theta (`float` or `None`): predicted tokens per second, rows of other calls included (`load_rows`).
    """

    lengths: Tensor
    expected_tokens: float | None
    verify_tokens: int
    seconds: float | None = None
    theta: float | None = None


@dataclass(frozen=True)
class Payoff:
    """Whether drafting is worth its cost.

    Attributes:
        pays (`bool`): the best Theta with drafting is above plain decoding's.
        theta (`float`): best predicted tokens per second with drafting, draft cost included.
        plain_theta (`float`): predicted tokens per second of plain decoding.
        budget (`int`): number of drafted tokens, over all rows, at which the best Theta is reached.
        plain_seconds (`float`): predicted seconds of one plain step.
    """

    pays: bool
    theta: float
    plain_theta: float
    budget: int
    plain_seconds: float


def survival(confidence: Tensor | Sequence[Sequence[float]]) -> Tensor:
    """Probability that the whole prefix up to a slot is accepted: the running product of the scores, a_k.

    Args:
        confidence ([R, K] or [..., K]): calibrated conditional scores in [0, 1]. NaN counts as 0.

    Returns:
        `Tensor` like `confidence`, float64 where the device has it, never rising along K.
    """
    scores = torch.as_tensor(confidence)
    wide = torch.float32 if scores.device.type == "mps" else torch.float64
    return torch.nan_to_num(scores.to(wide), nan=0.0).clamp(0.0, 1.0).cumprod(-1)


def constant_lengths(num_rows: int, num_slots: int, limit: Tensor | Sequence[int] | None = None) -> Tensor:
    """Verify every drafted slot.

    Args:
        num_rows (`int`): R.
        num_slots (`int`): K.
        limit ([R], *optional*): most drafts a row may verify, e.g. its remaining budget minus one.

    Returns:
        `Tensor` [R], int64.
    """
    return _capped(torch.full((num_rows,), num_slots, dtype=torch.int64), limit)


def confidence_lengths(confidence: Tensor, threshold: float, limit: Tensor | Sequence[int] | None = None) -> Tensor:
    """Cut each row before the first slot whose *own* score is below `threshold` (DeepSpec's rule, strictly below).

    Args:
        confidence ([R, K]): conditional scores in [0, 1].
        threshold (`float`): 0 or less keeps everything; 1 or more keeps nothing, which is plain decoding, even where
            a saturated score rounds to 1.
        limit ([R], *optional*): most drafts a row may verify.

    Returns:
        `Tensor` [R], int64, on the device of `confidence`.
    """
    scores = torch.as_tensor(confidence)
    if threshold <= 0:
        kept = torch.ones_like(scores, dtype=torch.int64)
    elif threshold >= 1:
        kept = torch.zeros_like(scores, dtype=torch.int64)
    else:
        kept = (scores >= threshold).long().cumprod(-1)
    return _capped(kept.sum(-1), limit)


def survival_lengths(survival: Tensor, threshold: float, limit: Tensor | Sequence[int] | None = None) -> Tensor:
    """Cut each row before the first slot whose *survival* (running product) is below `threshold`.

    Args:
        survival ([R, K]): running products, see `survival`.
        threshold (`float`): as in `confidence_lengths`.
        limit ([R], *optional*): most drafts a row may verify.

    Returns:
        `Tensor` [R], int64.
    """
    return confidence_lengths(survival, threshold, limit)


def throughput_lengths(
    survival: Tensor,
    cost: Cost,
    *,
    draft_seconds: float = 0.0,
    limit: Tensor | Sequence[int] | None = None,
    load_rows: int = 0,
    fill: Fill | None = None,
) -> Schedule:
    """Algorithm 1: admit slots of all rows in order of falling survival, stop at the first that does not raise Theta.

    Args:
        survival ([R, K]): running products, never rising along K.
        cost (`Cost`): verify seconds by number of tokens.
        draft_seconds (`float`): cost of drafting, the same whatever is verified.
        limit ([R], *optional*): most drafts a row may verify; negative counts as 0.
        load_rows (`int`): rows that other calls decode at the same time. They add one token each to the step and one
            committed token each to Theta, so that the marginal cost is read where the machine really is.
        fill (`Fill`, *optional*): what a step is filled up to; if drafts are verified at all, then as many more.

    Returns:
        `Schedule`. Its Theta may be below plain decoding's; then skip the *next* draft. Dropping this round's
        verification instead would leak, since Theta has seen the tokens.
    """
    arguments = {"draft_seconds": draft_seconds, "limit": limit, "load_rows": load_rows, "fill": fill}
    return throughput_round(survival, cost, **arguments)[0]


def throughput_round(
    survival: Tensor,
    cost: Cost,
    *,
    draft_seconds: float = 0.0,
    limit: Tensor | Sequence[int] | None = None,
    load_rows: int = 0,
    margin: float = 0.0,
    fill: Fill | None = None,
) -> tuple[Schedule, Payoff]:
    """`throughput_lengths` for this round and `speculation_pays` for later ones, in one pass. Arguments as there."""
    slots, order, num_valid = _ranked(survival, limit)
    expected, seconds = _along_order(slots, order, num_valid, cost, draft_seconds, load_rows)
    theta = expected / seconds
    thetas, rows = theta.tolist(), slots.shape[0]
    admitted = next((n for n in range(num_valid) if thetas[n + 1] <= thetas[n]), num_valid)
    if admitted and fill is not None:
        admitted = min(num_valid, fill(rows + admitted) - rows)
    chosen = Schedule(
        lengths=_lengths_of(order[:admitted], rows),
        expected_tokens=float(expected[admitted]) - load_rows,
        verify_tokens=rows + admitted,
        seconds=float(seconds[admitted]),
        theta=thetas[admitted],
    )
    budget = max(range(num_valid + 1), key=thetas.__getitem__)
    plain_seconds = float(seconds[0]) - draft_seconds
    plain = float(expected[0]) / plain_seconds
    pays = thetas[budget] > plain * (1.0 + margin)
    return chosen, Payoff(pays, thetas[budget], plain, budget, plain_seconds)


def budget_lengths(survival: Tensor, budget: int, limit: Tensor | Sequence[int] | None = None) -> Tensor:
    """Verify the `budget` slots that survive best: the stale-budget form of Algorithm 1 for jagged cost curves.

    Exact as long as `budget` was settled before this round's tokens were drafted: the rank of a slot among all slots
    depends on no token at or after it.

    Args:
        survival ([R, K]): running products of this round.
        budget (`int`): drafted tokens to verify over all rows, from older rounds (`best_budget`).
        limit ([R], *optional*): most drafts a row may verify.

    Returns:
        `Tensor` [R], int64. Slots with survival 0 are left out, so fewer than `budget` may come back.
    """
    slots, order, num_valid = _ranked(survival, limit)
    chosen = order[: max(0, min(budget, num_valid))]
    alive = slots.t().reshape(-1)[chosen] > 0
    return _lengths_of(chosen[alive], slots.shape[0])


def best_budget(
    survival: Tensor,
    cost: Cost,
    *,
    draft_seconds: float = 0.0,
    limit: Tensor | Sequence[int] | None = None,
    load_rows: int = 0,
) -> int:
    """The number of drafted tokens at which Theta is highest, over *all* numbers.

    Retrospective: the maximum depends on every confidence of the round and so on every drafted token. Use it for a
    budget of later rounds and never for the round that `survival` comes from. Arguments as in `throughput_lengths`;
    `cost`, `limit` and `load_rows` may be those of the round to come.
    """
    return speculation_pays(survival, cost, draft_seconds=draft_seconds, limit=limit, load_rows=load_rows).budget


def speculation_pays(
    survival: Tensor,
    cost: Cost,
    *,
    draft_seconds: float = 0.0,
    limit: Tensor | Sequence[int] | None = None,
    load_rows: int = 0,
    margin: float = 0.0,
) -> Payoff:
    """Compare the best Theta with drafting against plain decoding's R / seconds(R).

    Args:
        survival ([R, K]): what is expected of the next draft, from past rounds only: an average, the last round's
            values, or ones for "could a perfect draft pay at this load?".
        cost, draft_seconds, limit, load_rows: as in `throughput_lengths`.
        margin (`float`): share by which drafting must win, e.g. 0.02.

    Returns:
        `Payoff`. Retrospective like `best_budget`: a decision about later rounds.
    """
    arguments = {"draft_seconds": draft_seconds, "limit": limit, "load_rows": load_rows, "margin": margin}
    return throughput_round(survival, cost, **arguments)[1]


def predict(
    survival: Tensor | None,
    lengths: Tensor | Sequence[int],
    cost: Cost | None = None,
    *,
    draft_seconds: float = 0.0,
    load_rows: int = 0,
) -> Schedule:
    """What given verify lengths are expected to bring.

    Args:
        survival ([R, K], *optional*): running products.
        lengths ([R]): drafted tokens to verify per row.
        cost, draft_seconds, load_rows: as in `throughput_lengths`; without `cost` there is no time and no Theta.
    """
    lengths = _on_host(lengths, torch.int64)
    rows = lengths.shape[0]
    tokens = rows + int(lengths.sum())
    expected = seconds = theta = None
    if survival is not None:
        slots = _on_host(survival, torch.float64)
        kept = torch.arange(slots.shape[-1]) < lengths[:, None]
        expected = rows + float((slots * kept).sum())
    if cost is not None:
        seconds = draft_seconds + float(_cost_window(cost, tokens + load_rows, 0)[0])
        theta = None if expected is None else (expected + load_rows) / seconds
    return Schedule(lengths, expected, tokens, seconds, theta)


def schedule(
    policy: str,
    confidence: Tensor | None,
    *,
    num_rows: int | None = None,
    num_slots: int | None = None,
    threshold: float = 0.0,
    cost: Cost | None = None,
    draft_seconds: float = 0.0,
    limit: Tensor | Sequence[int] | None = None,
    load_rows: int = 0,
    budget: int | None = None,
) -> Schedule:
    """Verify lengths by the name of a policy, with the prediction where there is something to predict from.

    Args:
        policy (`str`): one of `POLICIES`. "constant" verifies everything; "confidence" cuts at the first slot below
            `threshold`; "survival" does so on the running product; "throughput" is Algorithm 1 on `cost`, within the
            cut by `threshold` where one is set; "budget" spends `budget` slots on the best survivors.
        confidence ([R, K] or `None`): calibrated conditional scores; only "constant" works without.
        num_rows, num_slots (`int`, *optional*): R and K where `confidence` is `None`.
        threshold, cost, draft_seconds, limit, load_rows, budget: see the functions above.

    Raises:
        ValueError: unknown policy, or one that lacks what it needs.
    """
    if policy not in POLICIES:
        raise ValueError(f"schedule policy {policy!r} is unknown: choose one of {', '.join(POLICIES)}.")
    if confidence is None:
        if policy != "constant":
            raise ValueError(f"policy {policy!r} needs confidence scores: use 'constant' for a draft without them.")
        if num_rows is None or num_slots is None:
            raise ValueError("policy 'constant' without confidence scores needs num_rows and num_slots.")
        lengths = constant_lengths(num_rows, num_slots, limit)
        return predict(None, lengths, cost, draft_seconds=draft_seconds, load_rows=load_rows)
    alive = survival(_on_host(confidence, torch.float64))
    if policy == "throughput":
        if cost is None:
            raise ValueError("policy 'throughput' needs cost: measure a ThroughputProfile first, or use 'confidence'.")
        if threshold > 0:
            # A cut at slot k uses scores up to k only, so it may narrow what Algorithm 1 chooses from.
            limit = confidence_lengths(_on_host(confidence, None), threshold, limit)
        return throughput_lengths(alive, cost, draft_seconds=draft_seconds, limit=limit, load_rows=load_rows)
    if policy == "budget":
        if budget is None:
            raise ValueError("policy 'budget' needs budget: take it from best_budget() on an older round.")
        lengths = budget_lengths(alive, budget, limit)
    elif policy == "confidence":
        lengths = confidence_lengths(_on_host(confidence, None), threshold, limit)
    elif policy == "survival":
        lengths = survival_lengths(alive, threshold, limit)
    else:
        lengths = constant_lengths(*alive.shape, limit)
    return predict(alive, lengths, cost, draft_seconds=draft_seconds, load_rows=load_rows)


# ---------------------------------------------------------------------------------------------------------------------


def _on_host(values, dtype: torch.dtype | None) -> Tensor:
    return torch.as_tensor(values).to(device="cpu", dtype=dtype)


def _capped(lengths: Tensor, limit: Tensor | Sequence[int] | None) -> Tensor:
    if limit is None:
        return lengths
    return torch.minimum(lengths, torch.as_tensor(limit, dtype=lengths.dtype, device=lengths.device).clamp(min=0))


def _ranked(survival: Tensor, limit: Tensor | Sequence[int] | None) -> tuple[Tensor, Tensor, int]:
    """Survival on the host [R, K], the flat [K, R] indices by falling survival, and how many of them `limit` allows.

    Slot-major order and a stable sort: among equals earlier slots go first. Within a row that keeps prefixes whole,
    and the decision about a slot blind to later ones; across rows it spreads saturated scores evenly.
    """
    slots = _on_host(survival, torch.float64)
    if slots.dim() != 2:
        raise ValueError(f"survival must have shape [R, K], got {tuple(slots.shape)}: add the row or slot dimension.")
    flat = slots.t().reshape(-1)
    if limit is None:
        return slots, flat.sort(descending=True, stable=True).indices, flat.numel()
    allowed = torch.arange(slots.shape[1])[:, None] < _on_host(limit, torch.int64)
    order = flat.masked_fill(~allowed.reshape(-1), -1.0).sort(descending=True, stable=True).indices
    return slots, order, int(allowed.sum())


def _along_order(
    slots: Tensor, order: Tensor, num_valid: int, cost: Cost, draft_seconds: float, load_rows: int
) -> tuple[Tensor, Tensor]:
    """Expected tokens and seconds after admitting the first n = 0 .. num_valid slots, both [num_valid + 1]."""
    rows = slots.shape[0] + load_rows
    expected = torch.empty(num_valid + 1, dtype=torch.float64)
    expected[0] = rows
    torch.cumsum(slots.t().reshape(-1)[order[:num_valid]], 0, out=expected[1:])
    expected[1:] += rows
    return expected, _cost_window(cost, rows, num_valid) + draft_seconds


def _lengths_of(chosen: Tensor, rows: int) -> Tensor:
    return torch.bincount(chosen % rows, minlength=rows)


def _cost_window(cost: Cost, first: int, count: int) -> Tensor:
    """Verify seconds of `first` .. `first + count` tokens, continued linearly where the table ends."""
    if callable(cost):
        return torch.tensor([cost(tokens) for tokens in range(first, first + count + 1)], dtype=torch.float64)
    table = _on_host(cost, torch.float64)
    window = table[first : first + count + 1]
    if window.shape[0] == count + 1:
        return window
    if table.shape[0] < 3:
        raise ValueError(f"cost has {table.shape[0]} entries: give at least 0, 1 and 2 tokens (index = tokens).")
    slope = (table[-1] - table[-2]).clamp(min=0.0)
    tokens = torch.arange(first, first + count + 1)
    beyond = table[-1] + slope * (tokens - (table.shape[0] - 1))
    return torch.where(tokens < table.shape[0], table[tokens.clamp(max=table.shape[0] - 1)], beyond)
