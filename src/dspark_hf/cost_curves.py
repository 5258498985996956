"""Curves through measured costs: what a `ThroughputProfile` makes of a few noisy points.

Pure functions of numbers: smoothing (`flattened`), monotone piecewise linear curves (`Curve`), and reading between the
curves of different numbers of rows (`at_rows`).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_NOISE = 0.25  # share by which a single sample may be off


@dataclass(frozen=True)
class Curve:
    """A never-falling piecewise linear function with positive values."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    @classmethod
    def fit(cls, values: dict[int, float]) -> "Curve":
        x = sorted(values)
        return cls(tuple(x), tuple(isotonic([values[at] for at in x])))

    def __call__(self, at: float) -> float:
        if len(self.x) == 1:
            return self.y[0]
        i = min(max(bisect_right(self.x, at) - 1, 0), len(self.x) - 2)
        slope = (self.y[i + 1] - self.y[i]) / (self.x[i + 1] - self.x[i])
        # Extrapolated downwards a steep first segment could reach zero; no step takes less than its share of one.
        return max(self.y[i] + slope * (at - self.x[i]), self.y[0] * min(1.0, max(at, 0.0) / self.x[0]), 1e-9)


def isotonic(values: Sequence[float]) -> list[float]:
    """The never-falling sequence nearest to `values` in least squares (pool adjacent violators)."""
    pools: list[list[float]] = []  # [sum, count]
    for value in values:
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += count
    return [total / count for total, count in pools for _ in range(int(count))]


def flattened(places: Sequence[Sequence[float]], seconds: Sequence[float], samples: Sequence[int]) -> list[float]:
    """Seconds of each point, moved towards a plane through all as far as its samples may be off by chance.

    A step's cost is nearly affine in its rows and tokens on most machines, and a point that is off makes the tokens
    before it look dear and those behind it free. What chance does not explain stays in the curve.

    Args:
        places ([N, D]): coordinates of each point, the constant 1 included.
        seconds ([N]): what was measured there, the median of `samples` samples.
        samples ([N]): how many.
    """
    host = {"dtype": torch.float64, "device": "cpu"}
    measured, at = torch.tensor(seconds, **host), torch.tensor(places, **host)
    # shares count, not seconds; the points may all lie on one line, which this solver does not mind
    plane = torch.linalg.lstsq(at / measured[:, None], torch.ones_like(measured)[:, None], driver="gelsd").solution
    noise = _NOISE / torch.tensor(samples, **host).clamp(min=1).sqrt()
    return torch.clamp((at @ plane)[:, 0], measured * (1 - noise), measured * (1 + noise)).tolist()


def bracket(known: Sequence[int], at: float) -> tuple[int, int, float]:
    """The two of the sorted `known` around `at` and the weight of the second; above the last the weight exceeds 1."""
    if at <= known[0] or len(known) == 1:
        return known[0], known[0], 0.0
    i = min(bisect_right(known, at) - 1, len(known) - 2)
    return known[i], known[i + 1], (at - known[i]) / (known[i + 1] - known[i])


def at_rows(curves: dict[int, Curve], tokens: float, rows: int) -> float:
    """Seconds of `tokens` tokens over `rows` rows, between and beyond the curves of the row counts measured."""
    low, high, weight = bracket(list(curves), rows)
    if low == high:
        # One row count, or fewer rows than ever measured: what counts is the number of tokens.
        return curves[low](tokens)
    # Same tokens per row on both curves: exact where the cost is affine in rows and tokens.
    per_row = tokens / rows
    few, many = curves[low](per_row * low), curves[high](per_row * high)
    return few + weight * (many - few) if weight <= 1 else many + (weight - 1) * max(0.0, many - few)


__all__ = ["Curve", "at_rows", "bracket", "flattened", "isotonic"]
