"""Opening a checkpoint: its configuration, and the names, shapes and dtypes of its tensors, without reading weights.

Only safetensors are opened. Their headers tell all shapes, so a folder can be judged, and refused with the full list
of what is wrong, before any weight is touched. What a configuration or an index already rules out is refused before
anything large is downloaded. All files of a repository come from one commit, the one its configuration came from.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open
from transformers.utils.hub import cached_file, extract_commit_hash

from .names import plain_names
from .refusals import refuse_by_config, refuse_by_names
from .remote import remote_header

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth", "pytorch_model.pt")
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".bin.index.json")
GIT_LFS_POINTER = b"version https://git-lfs"

Find = Callable[..., str | None]


@dataclass(frozen=True)
class TensorInfo:
    """What a safetensors header says about one tensor.

    Attributes:
        shape (`tuple[int, ...]`): its shape.
        dtype (`str`): safetensors' name of its dtype, such as `"BF16"`.
        file (`str`): path of the file that holds it.
        stored_name (`str`, *optional*): its name in the file, where that has a wrapper's prefix.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str
    stored_name: str | None = None


@dataclass(frozen=True)
class CheckpointFiles:
    """An opened checkpoint.

    Attributes:
        location (`str`): what the user asked for.
        config (`dict`): contents of `config.json`.
        tensors (`dict[str, TensorInfo]`): every tensor of every shard, by name without a wrapper's prefix.
        generation_config (`dict`, *optional*): contents of `generation_config.json`.
        revision (`str`, *optional*): commit the files are from, for a Hub repository.
        config_file (`str`, *optional*): path of `config.json`.
    """

    location: str
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    generation_config: dict[str, Any] | None
    revision: str | None = None
    config_file: str | None = None


def open_checkpoint(
    folder_or_repo: str | os.PathLike,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    cache_dir: str | None = None,
    force_download: bool = False,
    config_overrides: Mapping[str, Any] | None = None,
    headers_only: bool = False,
) -> CheckpointFiles:
    """Opens a folder or Hub repository.

    Args:
        folder_or_repo (`str` or `os.PathLike`): folder or repository id.
        revision, subfolder, token, local_files_only, cache_dir, force_download: as in Transformers.
        config_overrides (`dict`, *optional*): keys to put into `config.json` before it is read; `None` removes one.
        headers_only (`bool`): of a repository that is not in the cache, fetch the headers of its weights alone.

    Raises:
        ValueError: when the folder, `config.json` or the safetensors weights are missing, damaged or pickled only, or
            hold a model that is recognised and not read.
    """
    location = os.fspath(folder_or_repo)
    is_folder = os.path.isdir(location)
    if not is_folder and (os.path.isabs(location) or location.count("/") > 1 or location[:1] in ".~"):
        raise ValueError(f"There is no folder {location!r}. Pass an existing folder or a Hub repository id.")
    options: dict[str, Any] = {
        "revision": revision,
        "subfolder": subfolder or "",
        "token": token,
        "local_files_only": local_files_only,
        "cache_dir": cache_dir,
        "force_download": force_download,
    }

    def find(name: str, required: bool = False, **changes) -> str | None:
        try:
            return cached_file(
                location, name, _raise_exceptions_for_missing_entries=required, **{**options, **changes}
            )
        except Exception as error:  # the transport below has exceptions of its own, which differ by version
            raise ValueError(f"{location!r} has no {name} that can be read: {error}") from error

    config_file = find(CONFIG_FILE, required=True)
    if config_file is None:
        raise ValueError(f"{location!r} has no config.json, so it is not a draft checkpoint.")
    config = {**read_json(config_file, location), **(config_overrides or {})}
    config = {key: value for key, value in config.items() if value is not None or key not in (config_overrides or {})}
    commit = None if is_folder else extract_commit_hash(config_file, None)
    options["revision"] = commit or revision
    if "backbone" not in config:  # our own saves are never refused
        _refuse(location, refuse_by_config(config))
    headers = None
    if headers_only and not (is_folder or local_files_only):
        headers = _remote_headers(location, find, options)
    generation_file = find("generation_config.json")
    return CheckpointFiles(
        location=location,
        config=config,
        tensors=_plain(_local_headers(location, find, options) if headers is None else headers),
        generation_config=None if generation_file is None else read_json(generation_file, location),
        revision=commit,
        config_file=config_file,
    )


def _refuse(location: str, reason: str | None) -> None:
    if reason is not None:
        raise ValueError(f"{location!r} {reason}.")


def _local_headers(location: str, find: Find, options: Mapping[str, Any]) -> dict[str, TensorInfo]:
    single = find(SINGLE_FILE)
    if single is not None:
        return _read_headers([single], location)
    index = find(INDEX_FILE)
    if index is None:
        _refuse_without_safetensors(location, find, options)
    return _read_headers([find(name) for name in _shard_names(index, location)], location)


def _remote_headers(location: str, find: Find, options: Mapping[str, Any]) -> dict[str, TensorInfo] | None:
    """Headers fetched on their own, or `None` when the weights are in the cache or not there at all."""
    if find(SINGLE_FILE, local_files_only=True) is not None:
        return None
    fetch = {key: options[key] for key in ("revision", "subfolder", "token")}
    header = remote_header(location, SINGLE_FILE, **fetch)
    index = find(INDEX_FILE) if header is None else None
    if header is None and index is None:
        return None
    parts = (
        {SINGLE_FILE: header}
        if header is not None
        else {name: remote_header(location, name, **fetch) for name in _shard_names(index, location)}
    )
    if any(part is None for part in parts.values()):
        raise ValueError(f"{location!r} lacks a file that its {INDEX_FILE} names.")
    return {
        name: TensorInfo(shape, dtype, file) for file, part in parts.items() for name, (shape, dtype) in part.items()
    }


def _refuse_without_safetensors(location: str, find: Find, options: Mapping[str, Any]) -> None:
    names = _file_names(location, find, options)
    pickles = sorted(name for name in names if name.endswith(PICKLE_ENDINGS))
    if pickles:
        raise ValueError(
            f"{location!r} has pickled weights only ({', '.join(pickles)}). They can run code when loaded and are not "
            f"read; convert them to {SINGLE_FILE}."
        )
    if any(name.endswith(".gguf") for name in names):
        raise ValueError(f"{location!r} has GGUF weights only, which are not read; use the original safetensors.")
    raise ValueError(f"{location!r} has no {SINGLE_FILE} and no {INDEX_FILE}.")


def _file_names(location: str, find: Find, options: Mapping[str, Any]) -> list[str]:
    folder = Path(location, options["subfolder"])
    if folder.is_dir():
        return [path.name for path in folder.iterdir()]
    try:
        return HfApi(token=options["token"]).list_repo_files(location, revision=options["revision"])
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError):
        return [name for name in PICKLES if find(name) is not None]


def _shard_names(index: str, location: str) -> list[str]:
    weight_map = read_json(index, location).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{location!r}: {INDEX_FILE} has no `weight_map`.")
    _refuse(location, refuse_by_names(plain_names(weight_map).values()))
    return sorted(set(weight_map.values()))


def _read_headers(shards: list[str | None], location: str) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        if shard is None:
            raise ValueError(f"{location!r} lacks a file that its {INDEX_FILE} names.")
        try:
            with safe_open(shard, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 - not a mapping
                    if name in tensors:
                        raise ValueError(f"{location!r} has {name} in two files.")
                    view = reader.get_slice(name)
                    tensors[name] = TensorInfo(tuple(view.get_shape()), view.get_dtype(), shard)
        except SafetensorError as error:
            with open(shard, "rb") as file:
                pointer = file.read(len(GIT_LFS_POINTER)) == GIT_LFS_POINTER
            what = (
                "is a Git LFS pointer, not the file itself: run `git lfs pull`"
                if pointer
                else "is truncated or damaged"
            )
            raise ValueError(f"{location!r}: {Path(shard).name} {what} ({error}).") from error
    return tensors


def _plain(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    names = plain_names(tensors)
    return {
        names[stored]: info if names[stored] == stored else TensorInfo(info.shape, info.dtype, info.file, stored)
        for stored, info in tensors.items()
    }


def read_json(path: str, location: str) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint at `location`.

    Raises:
        ValueError: when the file holds none.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except ValueError as error:
        raise ValueError(f"{location!r}: {Path(path).name} is not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{location!r}: {Path(path).name} is no JSON object.")
    return content


__all__ = ["CheckpointFiles", "TensorInfo", "open_checkpoint", "read_json"]
