"""Reading and writing draft checkpoints: one module per packaging, one writer.

`load_checkpoint_config` tells what a folder or Hub repository holds without reading its weights.
"""

import os

from ..configuration_dspark import DSparkConfig
from .convert import PACKAGINGS, convert_checkpoint
from .detect import Reader, detect_reader, read_config, readers
from .engines import CHECKED, Verdict, launch_line, verdicts
from .exports import serving_config, speculators_config, write_serving, write_speculators
from .files import CheckpointFiles, TensorInfo, open_checkpoint
from .inspection import Inspection, inspect_checkpoint
from .loading import (
    check_auto_kwargs,
    check_vocabulary_map,
    fill_draft,
    load_draft_weights,
    single_device,
    tensor_problems,
)
from .writer import Vocabulary, deepspec_config, push_native, write_deepspec, write_native


def load_checkpoint_config(
    folder_or_repo: str | os.PathLike, *, sample_from_anchor: bool | None = None, **hub_options
) -> tuple[DSparkConfig, Reader]:
    """Configuration of a checkpoint, and the reader of its packaging (`reader.name`), without reading weights.

    Args:
        folder_or_repo (`str` or `os.PathLike`): folder or Hub repository.
        sample_from_anchor (`bool`, *optional*): overrides the block layout the checkpoint declares.
        hub_options: those of `open_checkpoint`.

    Raises:
        ValueError: when the checkpoint is incomplete or in a packaging that is not read.
    """
    return read_config(open_checkpoint(folder_or_repo, **hub_options), sample_from_anchor=sample_from_anchor)


__all__ = [
    "CHECKED",
    "PACKAGINGS",
    "CheckpointFiles",
    "Inspection",
    "Reader",
    "TensorInfo",
    "Verdict",
    "Vocabulary",
    "check_auto_kwargs",
    "check_vocabulary_map",
    "convert_checkpoint",
    "deepspec_config",
    "detect_reader",
    "fill_draft",
    "inspect_checkpoint",
    "launch_line",
    "load_checkpoint_config",
    "load_draft_weights",
    "open_checkpoint",
    "push_native",
    "read_config",
    "readers",
    "serving_config",
    "single_device",
    "speculators_config",
    "tensor_problems",
    "verdicts",
    "write_deepspec",
    "write_native",
    "write_serving",
    "write_speculators",
]
