"""Reading and writing draft checkpoints: one module per packaging, one writer.

`load_checkpoint_config` tells what a folder or Hub repository holds without reading its weights.
"""

import os

from ..configuration_dspark import DSparkConfig
from .detect import Reader, detect_reader, read_config
from .files import (
    CheckpointFiles,
    TensorInfo,
    check_auto_kwargs,
    check_vocabulary_map,
    load_draft_weights,
    open_checkpoint,
    single_device,
)
from .writer import deepspec_config, write_deepspec, write_native


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
    "CheckpointFiles",
    "Reader",
    "TensorInfo",
    "check_auto_kwargs",
    "check_vocabulary_map",
    "deepspec_config",
    "detect_reader",
    "load_checkpoint_config",
    "load_draft_weights",
    "open_checkpoint",
    "read_config",
    "single_device",
    "write_deepspec",
    "write_native",
]
