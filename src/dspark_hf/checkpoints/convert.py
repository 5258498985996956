"""From one packaging to another, with a record of how.

The record, `provenance.json`, says what was read (commit and digests), what was assumed in reading it, what was
written, and with which versions: enough to tell years later where a folder of weights came from.
"""

import hashlib
import os
import platform
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils.hub import cached_file

from .detect import detect_reader
from .engines import CHECKED
from .exports import write_serving, write_speculators
from .files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, CheckpointFiles, open_checkpoint, read_json
from .inspection import expected_shapes, named_targets
from .loading import fill_draft, single_device, tensor_problems
from .writer import Vocabulary, write_deepspec, write_json, write_native

PACKAGINGS = ("native", "deepspec", "speculators", "serving")
PROVENANCE_FILE = "provenance.json"


def convert_checkpoint(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    packaging: str,
    *,
    target: str | None = None,
    dtype: str | torch.dtype = "auto",
    sample_from_anchor: bool | None = None,
    command: str | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Reads a draft in any packaging and writes it in another.

    Args:
        source (`str` or `os.PathLike`): folder or Hub repository.
        destination (`str` or `os.PathLike`): folder that is not there or empty.
        packaging (`str`): `"native"`, `"deepspec"`, `"speculators"`, or `"serving"` for vLLM and SGLang both.
        target (`str`, *optional*): folder or repository of the target: gives DeepSpec its embedding and head, serving
            files a comparison with them, and speculators the verifier's name.
        dtype (`str` or `torch.dtype`): of the written weights; `"auto"` keeps the stored one.
        sample_from_anchor (`bool`, *optional*): overrides the block layout the source declares.
        command (`str`, *optional*): command line, for the record.
        progress (callable, *optional*): called with one line per step.
        options: further ones of `open_checkpoint`.

    Returns:
        What `provenance.json` says.

    Raises:
        ValueError: when the source cannot be read, or the packaging cannot express it.
    """
    if packaging not in PACKAGINGS:
        raise ValueError(f"Unknown packaging {packaging!r}; known are {', '.join(PACKAGINGS)}.")
    folder = Path(destination)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} is there already and not an empty folder.")
    say = progress or (lambda line: None)
    say(f"reading {source}")
    files = open_checkpoint(source, **options)
    reader = detect_reader(files)
    config, notes = reader.resolve(files.config, files.tensors, sample_from_anchor)
    draft = _build(files, reader, config, dtype)
    say(f"{reader.name} to {packaging}: {len(files.tensors)} tensors")
    changes = _changes(draft.config, packaging, str(draft.dtype), files)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _write(draft, folder, packaging, target or next(iter(named_targets(files.config)), None), target, options)
    changes += [str(warning.message) for warning in caught]
    say("reading back what was written")
    written = open_checkpoint(folder)
    written_reader = detect_reader(written)
    _check(written, written_reader)
    record = {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "source": {
            "location": str(source),
            "revision": files.revision,
            "packaging": reader.name,
            "assumed": notes,
            "sha256": _digests(files),
        },
        "target": target,
        "written": {"packaging": packaging, "changes": changes, "sha256": _digests(written)},
        "versions": {name: _version(name) for name in ("dspark-hf", "transformers", "torch", "safetensors")}
        | {"python": platform.python_version()},
        "engines_checked": CHECKED,
    }
    write_json(record, folder, PROVENANCE_FILE)
    return record


def _build(files: CheckpointFiles, reader, config, dtype):
    from ..modeling_dspark import DSparkDraftModel  # that module imports this package

    with torch.device("meta"):
        draft = DSparkDraftModel(config)
    fill_draft(draft, files, reader, dtype, single_device(None))
    return draft.eval()


def _write(draft, folder: Path, packaging: str, verifier: str | None, target: str | None, options) -> None:
    vocabulary = None
    if target is not None and packaging in ("deepspec", "serving"):
        vocabulary = target_vocabulary(target, token=options.get("token"), cache_dir=options.get("cache_dir"))
    if packaging == "native":
        write_native(draft, folder)
    elif packaging == "deepspec":
        write_deepspec(draft, folder, vocabulary=vocabulary)
    elif packaging == "speculators":
        write_speculators(draft, folder, verifier=verifier)
    else:
        write_serving(draft, folder, vocabulary=vocabulary)


def _changes(config, packaging: str, dtype: str, files: CheckpointFiles) -> list[str]:
    changes = [f"weights written as {dtype.removeprefix('torch.')}"]
    if packaging != "native" and config.rope_interleaved:
        changes.append("query and key rows reordered for a half-split rotary embedding")
    if packaging != "native" and files.generation_config is not None:
        changes.append("generation settings are not part of the packaging and were left out")
    return changes


def _check(written: CheckpointFiles, reader) -> None:
    config = reader.read_config(written.config, written.tensors)
    problems = tensor_problems(written, reader.rename(written.tensors), expected_shapes(config))
    if problems:
        raise ValueError(f"What was written to {written.location!r} cannot be read back: {problems}.")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its sources
        return "not installed"


def _digests(files: CheckpointFiles) -> dict[str, str]:
    paths = sorted({files.config_file, *(info.file for info in files.tensors.values())})
    digests = {}
    for path in paths:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
        digests[Path(path).name] = digest.hexdigest()
    return digests


def target_vocabulary(target: str, *, token: str | bool | None = None, cache_dir: str | None = None) -> Vocabulary:
    """Embedding and head of a target, read from the files that hold them and no others.

    Raises:
        ValueError: when they cannot be told among the target's tensors.
    """

    def find(name: str) -> str | None:
        try:
            options = {"token": token, "cache_dir": cache_dir, "_raise_exceptions_for_missing_entries": False}
            return cached_file(target, name, **options)
        except Exception as error:  # the transport below has exceptions of its own, which differ by version
            raise ValueError(f"{target!r} has no {name} that can be read: {error}") from error

    if find(CONFIG_FILE) is None:
        raise ValueError(f"{target!r} has no config.json, so it is no target.")
    index = find(INDEX_FILE)
    if index is not None:
        files = {name: file for name, file in read_json(index, target)["weight_map"].items()}
    else:
        single = find(SINGLE_FILE)
        if single is None:
            raise ValueError(f"{target!r} has no safetensors weights.")
        with safe_open(single, framework="pt") as reader:
            files = {name: SINGLE_FILE for name in reader.keys()}  # noqa: SIM118 - not a mapping

    def only(ending: str) -> str | None:
        found = [name for name in files if name == ending or name.endswith(f".{ending}")]
        if len(found) > 1:
            raise ValueError(f"{target!r} has several tensors called {ending}: {', '.join(found)}.")
        return found[0] if found else None

    embedding = only("embed_tokens.weight")
    if embedding is None:
        raise ValueError(f"{target!r} has no embed_tokens.weight.")
    tensors = {}
    for name in {embedding, only("lm_head.weight") or embedding}:
        with safe_open(find(files[name]), framework="pt") as reader:
            tensors[name] = reader.get_tensor(name)
    return Vocabulary(tensors[embedding], tensors[only("lm_head.weight") or embedding])


__all__ = ["PACKAGINGS", "PROVENANCE_FILE", "convert_checkpoint", "target_vocabulary"]
