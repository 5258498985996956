"""Opening a checkpoint: its configuration, and the names, shapes and dtypes of its tensors, without reading weights.

Only safetensors are opened. Their headers tell all shapes, so a folder can be judged, and refused with the full list
of what is wrong, before any weight is touched. Weights are memory-mapped: a tensor that keeps its dtype and stays on
the CPU is backed by the file itself.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils.hub import cached_file

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth", "pytorch_model.pt")


@dataclass(frozen=True)
class TensorInfo:
    """What a safetensors header says about one tensor.

    Attributes:
        shape (`tuple[int, ...]`): its shape.
        dtype (`str`): safetensors' name of its dtype, such as `"BF16"`.
        file (`str`): path of the file that holds it.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str


@dataclass(frozen=True)
class CheckpointFiles:
    """An opened checkpoint.

    Attributes:
        location (`str`): what the user asked for.
        config (`dict`): contents of `config.json`.
        tensors (`dict[str, TensorInfo]`): every tensor of every shard, by name.
        generation_config (`dict`, *optional*): contents of `generation_config.json`.
    """

    location: str
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    generation_config: dict[str, Any] | None


def open_checkpoint(
    folder_or_repo: str | os.PathLike,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    cache_dir: str | None = None,
    force_download: bool = False,
) -> CheckpointFiles:
    """Opens a folder or Hub repository.

    Raises:
        ValueError: when the folder, `config.json` or the safetensors weights are missing, or weights are pickled only.
    """
    location = os.fspath(folder_or_repo)
    if not os.path.isdir(location) and (os.path.isabs(location) or location.count("/") > 1 or location[:1] in ".~"):
        raise ValueError(f"There is no folder {location!r}. Pass an existing folder or a Hub repository id.")
    options: dict[str, Any] = {
        "revision": revision,
        "subfolder": subfolder or "",
        "token": token,
        "local_files_only": local_files_only,
        "cache_dir": cache_dir,
        "force_download": force_download,
    }

    def find(name: str, required: bool = False) -> str | None:
        try:
            return cached_file(location, name, _raise_exceptions_for_missing_entries=required, **options)
        except OSError as error:
            raise ValueError(f"{location!r} has no {name} that can be read: {error}") from error

    config_file = find("config.json", required=True)
    if config_file is None:
        raise ValueError(f"{location!r} has no config.json, so it is not a draft checkpoint.")
    single, index = find(SINGLE_FILE), None
    if single is None:
        index = find(INDEX_FILE)
    if single is None and index is None:
        _refuse_without_safetensors(location, subfolder, find)
    shards = [single] if single is not None else [find(name) for name in _shard_names(index)]
    generation_file = find("generation_config.json")
    return CheckpointFiles(
        location=location,
        config=_read_json(config_file),
        tensors=_read_headers(shards, location),
        generation_config=None if generation_file is None else _read_json(generation_file),
    )


def _refuse_without_safetensors(location: str, subfolder: str | None, find) -> None:
    folder = Path(location, subfolder or "")
    if folder.is_dir():
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    else:
        pickles = [name for name in PICKLES if find(name) is not None]
    if pickles:
        raise ValueError(
            f"{location!r} has pickled weights only ({', '.join(pickles)}). They can run code when loaded and are not "
            f"read; convert them to {SINGLE_FILE}."
        )
    raise ValueError(f"{location!r} has no {SINGLE_FILE} and no {INDEX_FILE}.")


def _shard_names(index: str) -> list[str]:
    return sorted(set(_read_json(index)["weight_map"].values()))


def _read_headers(shards: list[str | None], location: str) -> dict[str, TensorInfo]:
    tensors = {}
    for shard in shards:
        if shard is None:
            raise ValueError(f"{location!r} lacks a file that its {INDEX_FILE} names.")
        with safe_open(shard, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                view = reader.get_slice(name)
                tensors[name] = TensorInfo(tuple(view.get_shape()), view.get_dtype(), shard)
    return tensors


def _read_json(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def load_draft_weights(
    files: CheckpointFiles,
    names: Mapping[str, str],
    expected: Mapping[str, tuple[int, ...]],
    dtype: str | torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Reads exactly the tensors a draft expects.

    Args:
        files (`CheckpointFiles`): the opened checkpoint.
        names (`dict[str, str]`): the draft's tensor name to the checkpoint's.
        expected (`dict[str, tuple]`): the draft's tensor names and shapes.
        dtype (`str` or `torch.dtype`): of floating-point tensors; `"auto"` for that of the stored `fc.weight`.
        device (`torch.device`): where they go.

    Returns:
        A state dict with the draft's names.

    Raises:
        ValueError: listing every missing, unexpected and misshapen tensor at once.
    """
    missing = sorted(set(expected) - set(names))
    unexpected = sorted(names[name] for name in set(names) - set(expected))
    misshapen = [
        f"{names[name]} is {list(files.tensors[names[name]].shape)}, expected {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in names and files.tensors[names[name]].shape != shape
    ]
    problems = {"missing tensors": missing, "unexpected tensors": unexpected, "wrong shapes": misshapen}
    if any(problems.values()):
        listing = "; ".join(f"{what}: {', '.join(which)}" for what, which in problems.items() if which)
        raise ValueError(f"The weights of {files.location!r} do not fit its configuration: {listing}.")
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype)
    state: dict[str, torch.Tensor] = {}
    by_file: dict[str, list[str]] = {}
    for name in sorted(expected, key=lambda name: name != "fc.weight"):  # fc first: it decides "auto"
        by_file.setdefault(files.tensors[names[name]].file, []).append(name)
    for file, wanted in by_file.items():
        with safe_open(file, framework="pt") as reader:
            for name in wanted:
                tensor = reader.get_tensor(names[name])
                if not tensor.is_floating_point():
                    state[name] = tensor.to(device)
                    continue
                if dtype == "auto":
                    dtype = tensor.dtype
                state[name] = tensor.to(device=device, dtype=dtype)
    return state


def single_device(device_map: str | int | torch.device | dict | None) -> torch.device:
    """The one device a `device_map` names: CPU for `None`, the accelerator (if any) for `"auto"`.

    Raises:
        ValueError: for a map that splits the model.
    """
    if isinstance(device_map, dict):
        if set(device_map) != {""}:
            raise ValueError("`device_map`: a draft lives on one device; pass a device, or {'': device}.")
        device_map = device_map[""]
    if device_map is None:
        return torch.device("cpu")
    if device_map == "auto":
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device(device_map)


def check_auto_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Lets through what Transformers' Auto classes add on their own; anything else is a mistake of the caller.

    Raises:
        TypeError: for an unknown argument.
        ValueError: when asked not to use safetensors.
    """
    unknown = sorted(set(kwargs) - {"_from_auto", "adapter_kwargs", "trust_remote_code", "proxies", "use_safetensors"})
    if unknown:
        raise TypeError(f"`DSparkDraftModel.from_pretrained` got unexpected arguments: {', '.join(unknown)}.")
    if kwargs.get("use_safetensors") is False:
        raise ValueError("`use_safetensors=False`: drafts are loaded from safetensors only.")


def check_vocabulary_map(target_ids: torch.Tensor, vocab_size: int) -> None:
    """Checks the target ids [V_draft] of a reduced vocabulary.

    Raises:
        ValueError: when they leave the vocabulary or repeat, as absolute ids read as offsets would.
    """
    inside = bool((target_ids >= 0).all()) and bool((target_ids < vocab_size).all())
    if not inside or target_ids.unique().numel() != target_ids.numel():
        raise ValueError(
            "`d2t` must hold offsets (target id minus draft id) that lead to distinct tokens of the target's "
            f"vocabulary of {vocab_size}."
        )


__all__ = [
    "CheckpointFiles",
    "TensorInfo",
    "check_auto_kwargs",
    "check_vocabulary_map",
    "load_draft_weights",
    "open_checkpoint",
    "single_device",
]
