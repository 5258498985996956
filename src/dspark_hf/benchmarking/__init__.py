"""Measuring: every way to decode side by side, what the machine would allow, and how exact the answers are."""

from .baselines import Baselines, build_baselines
from .bench import Benchmark, Plan
from .dflash import DFlashAdapter
from .exactness import DeficitTable, deficits
from .runner import Measurement, Runner, Setting

__all__ = [
    "Baselines",
    "Benchmark",
    "DFlashAdapter",
    "DeficitTable",
    "Measurement",
    "Plan",
    "Runner",
    "Setting",
    "build_baselines",
    "deficits",
]
