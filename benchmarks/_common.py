"""What every benchmark needs, by the names it had here before it moved into the package."""

from dspark_hf.benchmarking.machine import environment, model_name, print_table, save_json, synchronize, timed
from dspark_hf.benchmarking.prompts import Batch, make_batches, read_prompts

__all__ = [
    "Batch",
    "environment",
    "make_batches",
    "model_name",
    "print_table",
    "read_prompts",
    "save_json",
    "synchronize",
    "timed",
]
