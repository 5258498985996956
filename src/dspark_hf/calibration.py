"""Calibration of the confidence head (DSpark, arXiv 2607.05147, section 3.2: sequential temperature scaling).

The scheduler multiplies confidences, so it is the running product a_k = c_1 ... c_k that must mean what it says: of
all prefixes with survival 0.6, six in ten are accepted whole. *Sequential temperature scaling* (STS) gets there slot
by slot, left to right: with the slots before it fixed, slot k takes the temperature that minimizes the expected
calibration error (ECE) of the product up to k. Dividing a logit by a positive number keeps the order of the scores.

A temperature cannot move a logit near 0, and so cannot repair a *bias*. Live anchors follow a rejection and are harder
than the random anchors of training, which is just such a bias. Each slot may therefore take a shift as well,

    c_k = sigmoid(z_k / temperature_k + shift_k),

still order-preserving, where that lowers the ECE on held-out rounds. Fit on *live* rounds with everything verified,
and judge on rounds of other prompts.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .confidence_metrics import (
    CLAMP,
    NUM_BINS,
    ConfidenceMetrics,
    ConfidenceRecord,
    PositionMetrics,
    apply_calibration,
    auc,
    brier,
    ece,
    measure_confidence,
    survival_from_logits,
)

MAX_LOG_TEMPERATURE = math.log(16.0)


@dataclass
class Calibration:
    """Per-slot calibration and how it did on held-out rounds.

    Attributes:
        temperature, shift (`list[float]`): K numbers each, for `apply_calibration`; saved with the draft.
        forms (`list[str]`): per slot "identity", "temperature" or "temperature+shift".
        before, sts, after (`ConfidenceMetrics`): held-out metrics of the raw head, of STS alone, and of the result.
        sts_temperature (`list[float]`): temperatures of STS alone.
        num_fit, num_held_out (`int`): rounds.
    """

    temperature: list[float]
    shift: list[float]
    forms: list[str]
    before: ConfidenceMetrics
    sts: ConfidenceMetrics
    after: ConfidenceMetrics
    sts_temperature: list[float]
    num_fit: int
    num_held_out: int

    def to_config(self) -> dict[str, list[float]]:
        """Value of `DSparkConfig.confidence_calibration`."""
        return {"temperature": list(self.temperature), "shift": list(self.shift)}

    def to_dict(self) -> dict:
        """The whole report as plain values for JSON."""
        report = {name: getattr(self, name) for name in ("forms", "sts_temperature", "num_fit", "num_held_out")}
        report.update({name: getattr(self, name).to_dict() for name in ("before", "sts", "after")})
        return {**self.to_config(), **report}


def fit_temperatures(record: ConfidenceRecord, num_bins: int = NUM_BINS) -> list[float]:
    """Sequential temperature scaling: per slot, left to right, the temperature with the lowest ECE of the product.

    Args:
        record (`ConfidenceRecord`): rounds to fit on.
        num_bins (`int`): bins of the ECE.

    Returns:
        `list[float]`, K temperatures between 1/16 and 16; 1 where no round got that far.
    """
    before, temperatures = torch.ones(len(record), dtype=torch.float64), []
    for k in range(record.logits.shape[1]):
        slot = _Slot.of(record, k, before)
        temperatures.append(_search_temperature(slot, num_bins))
        before = before * torch.sigmoid(record.logits[:, k].double() / temperatures[-1])
    return temperatures


def fit_calibration(
    fit: ConfidenceRecord,
    held_out: ConfidenceRecord,
    *,
    judge: ConfidenceRecord | None = None,
    num_bins: int = NUM_BINS,
    min_gain: float = 0.002,
) -> Calibration:
    """Fit STS and, slot by slot where it helps, a shift; judge on held-out rounds.

    Left to right each slot has four candidates, given what the slots before it chose: the raw score, the temperature
    with the lowest ECE, temperature and shift with the highest likelihood, and the same polished for ECE. All are
    fitted on `fit`; the lowest ECE on `judge` wins, a simpler form where it is within `min_gain`.

    Args:
        fit, held_out (`ConfidenceRecord`): rounds of different prompts. `held_out` makes the reported metrics.
        judge (`ConfidenceRecord`, *optional*): rounds that choose the form. By default a third of the prompts of `fit`
            does, and the parameters of the chosen form are then fitted on all of `fit`, so that `held_out` stays
            untouched by the choice.
        num_bins (`int`): bins of the ECE.
        min_gain (`float`): ECE that one more parameter must bring.

    Raises:
        ValueError: too few rounds to fit.
    """
    if len(fit) < 2 or len(held_out) < 1:
        raise ValueError(f"calibration needs rounds to fit and to judge, got {len(fit)} and {len(held_out)}.")
    train, judge = (fit, judge) if judge is not None else fit.split(2 / 3)
    slots = fit.logits.shape[1]
    forms, temperatures, shifts = [], [], []
    prefixes = {id(record): torch.ones(len(record), dtype=torch.float64) for record in (train, judge, fit)}

    def slot_of(record, k):
        return _Slot.of(record, k, prefixes[id(record)])

    for k in range(slots):
        candidates = _candidates(slot_of(train, k), num_bins)
        errors = [slot_of(judge, k).ece(*parameters, num_bins) for parameters in candidates.values()]
        names = list(candidates)
        best = 0
        for i in range(1, len(names)):
            # NaN, no data in the judge, never compares as better: the raw score stays.
            if errors[i] < errors[best] - min_gain:
                best = i
        forms.append(names[best])
        chosen = _candidates(slot_of(fit, k), num_bins)[names[best]]
        temperatures.append(chosen[0])
        shifts.append(chosen[1])
        for record in {id(record): record for record in (train, judge, fit)}.values():
            scores = torch.sigmoid(record.logits[:, k].double() / chosen[0] + chosen[1])
            prefixes[id(record)] = prefixes[id(record)] * scores
    sts = fit_temperatures(fit, num_bins)
    return Calibration(
        temperature=temperatures,
        shift=shifts,
        forms=[form.removesuffix(" (ece)") for form in forms],
        before=measure_confidence(held_out, num_bins=num_bins),
        sts=measure_confidence(held_out, sts, num_bins=num_bins),
        after=measure_confidence(held_out, temperatures, shifts, num_bins=num_bins),
        sts_temperature=sts,
        num_fit=len(fit),
        num_held_out=len(held_out),
    )


# ------------------------------------------------------------------------------------------------------------ searches


@dataclass(frozen=True)
class _Slot:
    """One slot's fitting problem: `before` is the calibrated product of the slots before it, all [N'] float64."""

    logits: Tensor
    before: Tensor
    outcome: Tensor

    @classmethod
    def of(cls, record: ConfidenceRecord, k: int, before: Tensor) -> "_Slot":
        known = record.known[:, k]
        return cls(record.logits[known, k].double(), before[known], record.prefix_accepted[known, k].double())

    def product(self, temperature: Tensor | float, shift: Tensor | float) -> Tensor:
        scores = torch.sigmoid(self.logits / torch.as_tensor(temperature) + torch.as_tensor(shift))
        return (self.before * scores).clamp(CLAMP, 1.0 - CLAMP)

    def ece(self, temperature: float, shift: float, num_bins: int) -> float:
        return ece(self.product(temperature, shift), self.outcome, num_bins)

    def scores(self, temperature: Tensor, shift: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
        """ECE and negative log-likelihood of the product for G parameter pairs, both [G]."""
        errors, likelihoods = [], []
        for t, s in zip(temperature.tolist(), shift.tolist(), strict=True):
            product = self.product(t, s)
            errors.append(ece(product, self.outcome, num_bins))
            likelihoods.append(-torch.where(self.outcome > 0, product, 1.0 - product).log().mean())
        return torch.tensor(errors), torch.tensor(likelihoods)


def _search_temperature(slot: _Slot, num_bins: int) -> float:
    """Coarse grid over 1/16 .. 16, then a fine one around the best; near-ties go to the likelier temperature."""
    if not len(slot.logits):
        return 1.0
    center, width = 0.0, MAX_LOG_TEMPERATURE
    for points in (33, 17, 17):
        grid = torch.linspace(center - width, center + width, points, dtype=torch.float64)
        grid = grid.clamp(-MAX_LOG_TEMPERATURE, MAX_LOG_TEMPERATURE)
        errors, likelihoods = slot.scores(grid.exp(), torch.zeros_like(grid), num_bins)
        # ECE is a step function of the temperature: the likelihood breaks its ties.
        near = errors <= errors.min() + 1e-4
        center = float(grid[torch.where(near, likelihoods, math.inf).argmin()])
        width /= 8
    return math.exp(center)


def _search_shift(slot: _Slot) -> tuple[float, float]:
    """Temperature and shift with the highest likelihood of the product, by a shrinking grid."""
    center, width = (0.0, 0.0), (MAX_LOG_TEMPERATURE, 4.0)
    for _ in range(6):
        temperatures = torch.linspace(center[0] - width[0], center[0] + width[0], 9, dtype=torch.float64)
        shifts = torch.linspace(center[1] - width[1], center[1] + width[1], 9, dtype=torch.float64)
        grid = torch.cartesian_prod(temperatures.clamp(-MAX_LOG_TEMPERATURE, MAX_LOG_TEMPERATURE), shifts)
        likelihoods = slot.scores(grid[:, 0].exp(), grid[:, 1], NUM_BINS)[1]
        best = grid[likelihoods.argmin()]
        center = (float(best[0]), float(best[1]))
        width = (width[0] / 2.5, width[1] / 2.5)
    return math.exp(center[0]), center[1]


def _polish(slot: _Slot, temperature: float, shift: float, num_bins: int) -> tuple[float, float]:
    """The shift near a likelihood fit that has the lowest ECE."""
    shifts = shift + torch.linspace(-0.5, 0.5, 41, dtype=torch.float64)
    errors, likelihoods = slot.scores(torch.full_like(shifts, temperature), shifts, num_bins)
    near = errors <= errors.min() + 1e-4
    return temperature, float(shifts[torch.where(near, likelihoods, math.inf).argmin()])


def _candidates(slot: _Slot, num_bins: int) -> dict[str, tuple[float, float]]:
    """Fitted (temperature, shift) by form, simplest first."""
    candidates = {"identity": (1.0, 0.0)}
    if len(slot.logits):
        candidates["temperature"] = (_search_temperature(slot, num_bins), 0.0)
        candidates["temperature+shift"] = _search_shift(slot)
        candidates["temperature+shift (ece)"] = _polish(slot, *candidates["temperature+shift"], num_bins)
    return candidates


__all__ = [
    "Calibration",
    "ConfidenceMetrics",
    "ConfidenceRecord",
    "PositionMetrics",
    "apply_calibration",
    "auc",
    "brier",
    "ece",
    "fit_calibration",
    "fit_temperatures",
    "measure_confidence",
    "survival_from_logits",
]
