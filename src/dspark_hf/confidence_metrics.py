"""How well confidences match acceptance: records of verified rounds, ECE, AUC, Brier score and reliability bins.

The scheduler multiplies confidences (DSpark, arXiv 2607.05147, section 3.2), so what is measured is the running
product a_k = c_1 ... c_k against the fate of the whole prefix, slot by slot. Bins, clamping and weighting are those of
the official code's recorder; the numbers agree with it up to rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_BINS = 20
NUM_FINE_BINS = 1000
# Probabilities stay clear of 0 and 1, where a logarithm or a last bin would not take them.
CLAMP = 1e-8


@dataclass
class ConfidenceRecord:
    """What the confidence head said in N rounds of single rows, and what came of it.

    Attributes:
        logits ([N, K]): raw confidence logits.
        accepted ([N], int64): accepted drafts of the round.
        lengths ([N], int64): drafts whose fate is known: those verified, fewer where the round stopped early.
        groups ([N], int64, *optional*): prompt that a round belongs to, so that a split keeps prompts whole.
    """

    logits: Tensor
    accepted: Tensor
    lengths: Tensor
    groups: Tensor | None = None

    def __post_init__(self):
        self.logits = torch.as_tensor(self.logits, dtype=torch.float32, device="cpu")
        if self.logits.dim() != 2:
            raise ValueError(f"logits must have shape [N, K], got {tuple(self.logits.shape)}.")
        rounds = self.logits.shape[0]
        if self.groups is None:
            self.groups = torch.arange(rounds)
        for name in ("accepted", "lengths", "groups"):
            values = torch.as_tensor(getattr(self, name), dtype=torch.int64, device="cpu")
            if values.shape != (rounds,):
                raise ValueError(f"{name} must have shape [{rounds}] like logits, got {tuple(values.shape)}.")
            setattr(self, name, values)
        if (self.accepted > self.lengths).any() or (self.lengths > self.logits.shape[1]).any():
            raise ValueError("need accepted <= lengths <= K in every round: lengths counts the drafts verified.")

    def __len__(self) -> int:
        return self.logits.shape[0]

    @classmethod
    def from_rounds(
        cls,
        confidence: Sequence[Sequence[float]],
        accepted: Sequence[int],
        lengths: Sequence[int],
        groups: Sequence[int] | None = None,
    ) -> "ConfidenceRecord":
        """A record of uncalibrated scores in [0, 1], as round events carry them, one entry per row and round.

        Rounds with fewer slots than the longest are filled up; `lengths` never reaches the filling.

        Args:
            confidence (N lists of up to K numbers): scores of the drafted slots.
            accepted, lengths, groups (N numbers): see the class.
        """
        width = max(map(len, confidence), default=0)
        scores = torch.tensor([[*row, *[0.5] * (width - len(row))] for row in confidence], dtype=torch.float64)
        # A float32 sigmoid saturates at 1 for logits above 17, whose logit would be infinite.
        return cls(torch.logit(scores.reshape(-1, width), eps=1e-7), accepted, lengths, groups)

    @property
    def known(self) -> Tensor:
        """[N, K], bool: slots whose fate is known."""
        return torch.arange(self.logits.shape[1]) < self.lengths[:, None]

    @property
    def prefix_accepted(self) -> Tensor:
        """[N, K], bool: the prefix up to and including the slot was accepted."""
        return torch.arange(self.logits.shape[1]) < self.accepted[:, None]

    def select(self, rounds: Tensor) -> "ConfidenceRecord":
        """The rounds that an index or mask picks."""
        return ConfidenceRecord(self.logits[rounds], self.accepted[rounds], self.lengths[rounds], self.groups[rounds])

    def split(self, share: float = 0.5, seed: int = 0) -> tuple["ConfidenceRecord", "ConfidenceRecord"]:
        """Two parts that share no group, the first with about `share` of the groups."""
        groups = self.groups.unique()
        if len(groups) < 2:
            raise ValueError("a split needs rounds of at least two groups (prompts).")
        order = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))]
        count = min(max(1, round(share * len(groups))), len(groups) - 1)
        first = torch.isin(self.groups, order[:count])
        return self.select(first), self.select(~first)

    def folds(self, count: int, seed: int = 0) -> Tensor:
        """[N], int64: number of the fold, 0 to `count` - 1, that each round belongs to; a group is in one fold only."""
        groups, index = self.groups.unique(return_inverse=True)
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))
        return order[index] % count

    @staticmethod
    def concatenate(records: Sequence["ConfidenceRecord"]) -> "ConfidenceRecord":
        """All rounds of several records; groups are renumbered so that they stay apart."""
        parts, offset = [], 0
        for record in records:
            groups = record.groups.unique(return_inverse=True)[1] + offset
            offset += int(groups.max()) + 1 if len(record) else 0
            parts.append((record.logits, record.accepted, record.lengths, groups))
        return ConfidenceRecord(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def apply_calibration(
    confidence_logits: Tensor, temperature: Sequence[float] | None = None, shift: Sequence[float] | None = None
) -> Tensor:
    """Calibrated logits z / temperature + shift, per slot. The order of scores within a slot stays.

    Args:
        confidence_logits ([..., K']): raw logits of the first K' <= K slots.
        temperature ([K], *optional*): positive; none means 1.
        shift ([K], *optional*): none means 0.

    Returns:
        `Tensor` like `confidence_logits`.
    """
    slots, like = confidence_logits.shape[-1], {"dtype": confidence_logits.dtype, "device": confidence_logits.device}
    if temperature is not None:
        confidence_logits = confidence_logits / torch.as_tensor(temperature, **like)[:slots]
    if shift is not None:
        confidence_logits = confidence_logits + torch.as_tensor(shift, **like)[:slots]
    return confidence_logits


def ece(predicted: Tensor, outcome: Tensor, num_bins: int = NUM_BINS) -> float:
    """Expected calibration error: mean distance of prediction and outcome over equal bins, weighted by count.

    Args:
        predicted ([N], float64): probabilities in [0, 1].
        outcome ([N]): 0 or 1.
        num_bins (`int`): bins, by floor(p * num_bins).

    Returns:
        `float`; NaN without data.
    """
    counts, predictions, outcomes = _binned(predicted, outcome, num_bins)
    return float((predictions - outcomes).abs().sum() / counts.sum())


def auc(predicted: Tensor, outcome: Tensor, num_bins: int = NUM_FINE_BINS) -> float:
    """Area under the ROC curve from histograms: pairs in one bin count half. NaN where an outcome does not occur."""
    counts, _, positives = _binned(predicted, outcome, num_bins)
    negatives = counts - positives
    below = negatives.cumsum(0) - negatives
    return float((positives * (below + 0.5 * negatives)).sum() / (positives.sum() * negatives.sum()))


def brier(predicted: Tensor, outcome: Tensor) -> float:
    """Mean squared error of the probabilities; NaN without data."""
    return float((predicted.double() - outcome.double()).square().mean())


def survival_from_logits(
    logits: Tensor, temperature: Sequence[float] | None = None, shift: Sequence[float] | None = None
) -> Tensor:
    """Running product of the scores as the official recorder forms it: float32 sigmoid, float64 product, clamped.

    Args:
        logits ([N, K]): raw confidence logits.
        temperature, shift ([K], *optional*): calibration, see `apply_calibration`.

    Returns:
        `Tensor` [N, K], float64.
    """
    scores = torch.sigmoid(apply_calibration(logits.float(), temperature, shift))
    return scores.double().cumprod(-1).clamp(CLAMP, 1.0 - CLAMP)


def ece_floor(
    record: "ConfidenceRecord",
    temperature: Sequence[float] | None = None,
    shift: Sequence[float] | None = None,
    num_bins: int = NUM_BINS,
) -> float:
    """ECE that a perfectly calibrated head would still show on this many rounds, averaged over slots by their rounds.

    A bin of n rounds with mean prediction p misses by about sqrt(2 p (1 - p) / (pi n)) through chance alone. A measured
    ECE near the floor says "too few rounds", not "badly calibrated". A few hundred rounds of seven slots have a floor
    of 0.03 to 0.04.
    """
    survival = survival_from_logits(record.logits, temperature, shift)
    missed = 0.0
    for k in range(record.logits.shape[1]):
        predicted = survival[record.known[:, k], k]
        variance = _binned(predicted, predicted * (1.0 - predicted), num_bins)[2]
        missed += float((variance * (2.0 / math.pi)).sqrt().sum())
    return missed / max(1, int(record.known.sum()))


@dataclass
class PositionMetrics:
    """Calibration of the running product at one slot. NaN where there is no data, AUC also where one outcome lacks.

    Attributes:
        position (`int`): slot, from 0.
        total_weight (`float`): rounds whose fate is known up to here.
        ece, auc, brier (`float`): see the functions of that name.
        pred_mean, target_mean (`float`): mean predicted and realised share of accepted prefixes.
        reliability (`list[dict]`): per non-empty bin its number, range, mean prediction, mean outcome and weight.
    """

    position: int
    total_weight: float
    ece: float
    auc: float
    brier: float
    pred_mean: float
    target_mean: float
    reliability: list[dict]


@dataclass
class ConfidenceMetrics:
    """Calibration of all slots and their means, weighted by rounds (AUC over slots that have one)."""

    per_position: list[PositionMetrics]
    ece_mean: float
    auc_mean: float
    brier_mean: float
    pred_mean: float
    target_mean: float

    def to_dict(self) -> dict:
        """Plain values for JSON; NaN becomes `None`."""
        summary = {name: _plain(getattr(self, name)) for name in _SUMMARY}
        rows = [{name: _plain(value) for name, value in vars(metrics).items()} for metrics in self.per_position]
        return {"per_position": rows, "summary": summary}


_SUMMARY = {"ece_mean": "ece", "auc_mean": "auc", "brier_mean": "brier", "pred_mean": "pred_mean"}
_SUMMARY["target_mean"] = "target_mean"


def measure_confidence(
    record: ConfidenceRecord,
    temperature: Sequence[float] | None = None,
    shift: Sequence[float] | None = None,
    num_bins: int = NUM_BINS,
    num_fine_bins: int = NUM_FINE_BINS,
) -> ConfidenceMetrics:
    """Compare the running product with what was accepted, slot by slot, as DeepSpec's recorder does.

    Prediction for slot k: the product of the first k scores. Outcome: the whole prefix up to k was accepted. A slot
    counts where its fate is known. ECE in `num_bins` equal bins, AUC from `num_fine_bins`.

    Args:
        record (`ConfidenceRecord`): rounds; they should have been verified whole, since a cut by confidence selects.
        temperature, shift ([K], *optional*): calibration to measure under; none measures the raw head.
    """
    survival = survival_from_logits(record.logits, temperature, shift)
    positions = []
    for k in range(record.logits.shape[1]):
        known = record.known[:, k]
        predicted, outcome = survival[known, k], record.prefix_accepted[known, k].double()
        counts, predictions, outcomes = (column.tolist() for column in _binned(predicted, outcome, num_bins))
        reliability = [
            {
                "bin": i,
                "range": [i / num_bins, (i + 1) / num_bins],
                "avg_pred": predictions[i] / counts[i],
                "avg_target": outcomes[i] / counts[i],
                "weight": counts[i],
            }
            for i in range(num_bins)
            if counts[i]
        ]
        positions.append(
            PositionMetrics(
                k,
                float(len(predicted)),
                ece(predicted, outcome, num_bins),
                auc(predicted, outcome, num_fine_bins),
                brier(predicted, outcome),
                float(predicted.mean()),
                float(outcome.mean()),
                reliability,
            )
        )
    means = {}
    for summary, name in _SUMMARY.items():
        pairs = [(getattr(m, name), m.total_weight) for m in positions if not math.isnan(getattr(m, name))]
        weight = sum(count for _, count in pairs)
        means[summary] = sum(value * count for value, count in pairs) / weight if weight else math.nan
    return ConfidenceMetrics(positions, **means)


def _binned(predicted: Tensor, outcome: Tensor, num_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Count, sum of predictions and sum of outcomes per bin, each [num_bins] float64."""
    predicted, outcome = predicted.double(), outcome.double()
    bins = (predicted * num_bins).floor().long().clamp(0, num_bins - 1)
    sums = torch.zeros(3, num_bins, dtype=torch.float64)
    sums[0].index_add_(0, bins, torch.ones_like(predicted))
    sums[1].index_add_(0, bins, predicted)
    sums[2].index_add_(0, bins, outcome)
    return sums[0], sums[1], sums[2]


def _plain(value):
    return None if isinstance(value, float) and math.isnan(value) else value
