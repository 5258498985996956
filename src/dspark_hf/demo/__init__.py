"""What the demonstrations share: a real target that needs no model hub, and a comparison with plain generation."""

from .compare import Comparison, Difference, compare, first_difference
from .smollm2 import smollm2_folder

__all__ = ["Comparison", "Difference", "compare", "first_difference", "smollm2_folder"]
