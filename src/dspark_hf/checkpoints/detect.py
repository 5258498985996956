"""Which packaging a checkpoint is in.

Several exporters write DSpark-like drafts, and their architecture strings overlap: `DSparkDraftModel`,
`Qwen3DSparkModel` and `DFlashDraftModel` each label at least two formats. So detection goes by configuration keys and
tensor names. What is recognised but not read is refused by name, and what is not recognised is refused too: a draft
loaded under wrong assumptions does not fail, it only never gets a token accepted.

A packaging is one module with a `READER`; to add one, write the module and put its reader into `readers`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..configuration_dspark import DSparkConfig
from .files import CheckpointFiles, TensorInfo
from .refusals import foreign_code, refuse_by_config, refuse_by_dtypes, refuse_by_names

Tensors = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Reader:
    """One packaging, as pure functions of its configuration and tensor headers.

    Attributes:
        name (`str`): how messages call the packaging.
        matches (callable): `matches(config, tensors) -> bool`.
        resolve (callable): `resolve(config, tensors, sample_from_anchor) -> (DSparkConfig, notes)`, where
            `sample_from_anchor` is the user's override or `None`, and `notes` says what was assumed.
        rename (callable): `rename(tensors) -> {draft tensor name: checkpoint tensor name}`; tensors left out of it
            carry nothing the draft needs.
    """

    name: str
    matches: Callable[[dict[str, Any], Tensors], bool]
    resolve: Callable[[dict[str, Any], Tensors, bool | None], tuple[DSparkConfig, list[str]]]
    rename: Callable[[Tensors], dict[str, str]]

    def read_config(
        self, config: dict[str, Any], tensors: Tensors, sample_from_anchor: bool | None = None
    ) -> DSparkConfig:
        """The configuration alone."""
        return self.resolve(config, tensors, sample_from_anchor)[0]


def readers() -> tuple[Reader, ...]:
    """All packagings, in the order in which they are tried."""
    from . import deepspec, dflash, modelopt, specforge, speculators, torchspec, transformers_dflash

    modules = (speculators, transformers_dflash, torchspec, modelopt, specforge, dflash, deepspec)
    return tuple(module.READER for module in modules)


def detect_reader(files: CheckpointFiles) -> Reader:
    """The reader for an opened checkpoint.

    Raises:
        ValueError: for a packaging that is recognised but not supported, for one that is not recognised, and for a
            model that needs code from its repository.
    """
    from . import native

    config, tensors = files.config, files.tensors
    if native.READER.matches(config, tensors):
        return native.READER
    reason = refuse_by_config(config) or refuse_by_names(tensors)
    reason = reason or refuse_by_dtypes(config, (info.dtype for info in tensors.values()))
    if reason is not None:
        raise ValueError(f"{files.location!r} {reason}.")
    code = foreign_code(config)
    if code:
        raise ValueError(
            f"{files.location!r} asks for code from its repository (`auto_map`: {', '.join(map(str, code))}), which "
            "this package never runs, whatever `trust_remote_code` says: its class is no DSpark or DFlash draft. If "
            "it computes what one does, pass `config_overrides={'auto_map': None}`."
        )
    for reader in readers():
        if reader.matches(config, tensors):
            return reader
    known = ", ".join(reader.name for reader in (native.READER, *readers()))
    raise ValueError(
        f"{files.location!r} is in no packaging this package knows (model_type {config.get('model_type')!r}, "
        f"architectures {config.get('architectures')}). It reads: {known}."
    )


def read_config(files: CheckpointFiles, *, sample_from_anchor: bool | None = None) -> tuple[DSparkConfig, Reader]:
    """Configuration of an opened checkpoint, and the reader that made it.

    Raises:
        ValueError: as `detect_reader`, and for keys that are missing or contradictory.
    """
    reader = detect_reader(files)
    return reader.read_config(files.config, files.tensors, sample_from_anchor), reader


__all__ = ["Reader", "Tensors", "detect_reader", "read_config", "readers"]
