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
    ece_floor,
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
        noise_floor (`float`): mean ECE that a perfect head would show on so few held-out rounds, see `ece_floor`.
        num_fit, num_held_out (`int`): rounds.
    """

    temperature: list[float]
    shift: list[float]
    forms: list[str]
    before: ConfidenceMetrics
    sts: ConfidenceMetrics
    after: ConfidenceMetrics
    sts_temperature: list[float]
    noise_floor: float
    num_fit: int
    num_held_out: int

    def to_config(self) -> dict[str, list[float]]:
        """Value of `DSparkConfig.confidence_calibration`."""
        return {"temperature": list(self.temperature), "shift": list(self.shift)}

    def to_dict(self) -> dict:
        """The whole report as plain values for JSON."""
        report = {
            name: getattr(self, name) for name in ("forms", "sts_temperature", "noise_floor", "num_fit", "num_held_out")
        }
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
        temperatures.append(_search_temperature(slot, num_bins)[0])
        before = before * torch.sigmoid(record.logits[:, k].double() / temperatures[-1])
    return temperatures


def fit_calibration(
    fit: ConfidenceRecord,
    held_out: ConfidenceRecord,
    *,
    num_bins: int = NUM_BINS,
    min_gain: float = 0.002,
    folds: int = 5,
) -> Calibration:
    """Fit STS and, slot by slot where it helps, a shift; report on held-out rounds.

    Left to right each slot has three candidates, given what the slots before it chose: the raw score, the temperature
    with the lowest ECE, and the likeliest temperature and shift. Every candidate is fitted with one fold of prompts
    left out and predicts that fold; the ECE of all those predictions together chooses. A form with one more parameter
    must lower it by `min_gain` and must not be less likely, since ECE is noisy. The chosen form is then fitted on all
    of `fit`. `held_out` takes no part in any choice.

    Args:
        fit, held_out (`ConfidenceRecord`): rounds of different prompts, see `ConfidenceRecord.split`. A few thousand
            rounds each make an ECE of 0.02 visible, see `Calibration.noise_floor`.
        num_bins (`int`): bins of the ECE.
        min_gain (`float`): ECE that one more parameter must bring.
        folds (`int`): parts of the prompts for the choice, at least 2.

    Raises:
        ValueError: too few rounds or prompts to fit.
    """
    if len(fit) < 2 or len(held_out) < 1 or len(fit.groups.unique()) < 2:
        raise ValueError(
            f"calibration needs rounds of at least two prompts, got {len(fit)} and {len(held_out)} rounds."
        )
    if folds < 2:
        raise ValueError(f"folds must be at least 2, got {folds}.")
    fold = fit.folds(min(folds, len(fit.groups.unique())))
    before = torch.ones(len(fit), dtype=torch.float64)
    forms, temperatures, shifts = [], [], []
    for k in range(fit.logits.shape[1]):
        slot = _Slot.of(fit, k, before)
        form = _choose(slot, fold[fit.known[:, k]], num_bins, min_gain)
        temperature, shift = FORMS[form](slot, num_bins)
        forms.append(form)
        temperatures.append(temperature)
        shifts.append(shift)
        before = before * torch.sigmoid(fit.logits[:, k].double() / temperature + shift)
    sts = fit_temperatures(fit, num_bins)
    return Calibration(
        temperature=temperatures,
        shift=shifts,
        forms=forms,
        before=measure_confidence(held_out, num_bins=num_bins),
        sts=measure_confidence(held_out, sts, num_bins=num_bins),
        after=measure_confidence(held_out, temperatures, shifts, num_bins=num_bins),
        sts_temperature=sts,
        noise_floor=ece_floor(held_out, temperatures, shifts, num_bins),
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

    def part(self, rounds: Tensor) -> "_Slot":
        return _Slot(self.logits[rounds], self.before[rounds], self.outcome[rounds])

    def product(self, temperature: float, shift: float) -> Tensor:
        """Running product up to this slot, [N']."""
        scores = torch.sigmoid(self.logits / temperature + shift)
        return (self.before * scores).clamp(CLAMP, 1.0 - CLAMP)

    def penalty(self, log_temperature: Tensor, shift: Tensor) -> Tensor:
        """Mean negative log-likelihood of G parameter pairs, plus a weak prior around (0, 0), [G].

        The prior is worth less than one round; it keeps slots that few rounds reached near the raw score.
        """
        scores = torch.sigmoid(self.logits / log_temperature.exp()[:, None] + shift[:, None])
        product = (self.before * scores).clamp(CLAMP, 1.0 - CLAMP)
        misses = _log_loss(product, self.outcome).mean(1)
        return misses + 0.5 * (log_temperature.square() + (0.5 * shift).square()) / len(self.logits)


def _log_loss(product: Tensor, outcome: Tensor) -> Tensor:
    return -torch.where(outcome > 0, product, 1.0 - product).log()


def _raw(slot: _Slot, num_bins: int) -> tuple[float, float]:
    return 1.0, 0.0


def _search_temperature(slot: _Slot, num_bins: int) -> tuple[float, float]:
    """Lowest ECE: a grid over 1/16 .. 16, refined twice; near-ties go to the likelier temperature."""
    if not len(slot.logits):
        return 1.0, 0.0
    center, width = 0.0, MAX_LOG_TEMPERATURE
    for points in (33, 17, 17):
        grid = torch.linspace(center - width, center + width, points, dtype=torch.float64)
        grid = grid.clamp(-MAX_LOG_TEMPERATURE, MAX_LOG_TEMPERATURE)
        errors = torch.tensor([ece(slot.product(math.exp(at), 0.0), slot.outcome, num_bins) for at in grid.tolist()])
        # ECE is a noisy step function of the temperature: what lies within its noise is decided by likelihood.
        near = errors <= errors.min() + 0.05 / math.sqrt(len(slot.logits))
        center = float(grid[torch.where(near, slot.penalty(grid, torch.zeros_like(grid)), math.inf).argmin()])
        width /= 8
    return math.exp(center), 0.0


def _search_shift(slot: _Slot, num_bins: int) -> tuple[float, float]:
    """Likeliest temperature and shift, by a shrinking grid."""
    if not len(slot.logits):
        return 1.0, 0.0
    center, width = torch.zeros(2, dtype=torch.float64), torch.tensor([MAX_LOG_TEMPERATURE, 4.0], dtype=torch.float64)
    steps = torch.linspace(-1.0, 1.0, 9, dtype=torch.float64)
    for _ in range(7):
        grid = center + torch.cartesian_prod(steps, steps) * width
        grid[:, 0].clamp_(-MAX_LOG_TEMPERATURE, MAX_LOG_TEMPERATURE)
        center = grid[slot.penalty(grid[:, 0], grid[:, 1]).argmin()]
        width = width / 2.5
    return math.exp(center[0]), float(center[1])


FORMS = {"identity": _raw, "temperature": _search_temperature, "temperature+shift": _search_shift}


def _choose(slot: _Slot, fold: Tensor, num_bins: int, min_gain: float) -> str:
    """The form with the lowest cross-fitted ECE, simpler ones first."""
    best = ("identity", math.inf, math.inf)
    if not len(slot.logits):
        return best[0]
    for form, search in FORMS.items():
        predicted = torch.empty_like(slot.before)
        for number in fold.unique():
            left_out = fold == number
            predicted[left_out] = slot.part(left_out).product(*search(slot.part(~left_out), num_bins))
        error, loss = ece(predicted, slot.outcome, num_bins), float(_log_loss(predicted, slot.outcome).mean())
        if error < best[1] - min_gain and loss <= best[2]:
            best = (form, error, loss)
    return best[0]


__all__ = [
    "Calibration",
    "ConfidenceMetrics",
    "ConfidenceRecord",
    "PositionMetrics",
    "apply_calibration",
    "auc",
    "brier",
    "ece",
    "ece_floor",
    "fit_calibration",
    "fit_temperatures",
    "measure_confidence",
    "survival_from_logits",
]
