"""What the demonstrations share: a real target that needs no model hub, and a comparison with plain generation."""

from .compare import Comparison, compare
from .smollm2 import smollm2_folder

__all__ = ["Comparison", "compare", "smollm2_folder"]
