"""Training checkpoints that are either complete or not there.

A checkpoint is written into a hidden folder beside the finished ones, sealed with a list of its files and their
checksums, and only then renamed to `checkpoint-<step>`. A full disk or a kill in the middle therefore costs the steps
since the last checkpoint and nothing else, and older checkpoints are deleted only when the new one stands. On resume
the list tells a damaged file from a whole one, and the message says which checkpoint is still good.
"""

import json
import os
import re
import shutil
import zlib
from pathlib import Path

INCOMPLETE = ".incomplete"
MANIFEST = "files.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def seal(folder: Path) -> None:
    """Writes the list of files of a checkpoint, with sizes and checksums, and sees everything onto the disk."""
    files = {path.name: {"bytes": path.stat().st_size, "crc32": _checksum(path)} for path in _files(folder)}
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(files, file, indent=1)
    for name in (*files, MANIFEST):
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words; `None` when every file is as it was written."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, expected in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            if _checksum(path) != expected["crc32"]:
                return f"{name} has other contents than were written"
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so writing it never finished"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Checkpoints in a training folder, in the order of their steps."""
    found = [path for path in Path(folder).glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step a checkpoint was written after."""
    return int(_NAME.fullmatch(checkpoint.name)[1])


def checkpoint_to_resume(folder: str | Path) -> Path | None:
    """The newest checkpoint of a training folder; `None` when it has none.

    Raises:
        ValueError: when that one is damaged, naming the newest whole one.
    """
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        return None
    check(checkpoints[-1])
    return checkpoints[-1]


def check(checkpoint: Path) -> None:
    """Raises `ValueError` for a damaged checkpoint, with what to do about it."""
    reason = damage(checkpoint)
    if reason is None:
        return
    older = [path for path in list_checkpoints(checkpoint.parent) if path != checkpoint and damage(path) is None]
    advice = f"Delete that folder to resume from {older[-1].name}, which is whole." if older else "No other is whole."
    raise ValueError(f"{checkpoint} is damaged: {reason}. {advice}")


def publish(written: Path, final: Path) -> None:
    """Moves a sealed checkpoint to its place; one that is there already stays until then."""
    replaced = written.parent / f"replaced-{final.name}"
    if final.exists():
        os.replace(final, replaced)
    os.replace(written, final)
    shutil.rmtree(written.parent, ignore_errors=True)


def rotate(folder: str | Path, keep: int | None, best: str | None = None) -> None:
    """Deletes all but the newest `keep` checkpoints and the `best` one; `None` keeps all."""
    if keep is None or keep < 1:
        return
    for checkpoint in list_checkpoints(folder)[:-keep]:
        if best is None or checkpoint.resolve() != Path(best).resolve():
            shutil.rmtree(checkpoint, ignore_errors=True)


def write_failure(folder: str | Path, step: int, error: BaseException) -> OSError:
    """The error to raise when a checkpoint could not be written; removes what there is of it."""
    shutil.rmtree(Path(folder) / INCOMPLETE, ignore_errors=True)
    finished = list_checkpoints(folder)
    free = shutil.disk_usage(folder).free / 1e6
    kept = f"{finished[-1].name} is finished and untouched" if finished else "no checkpoint was finished before"
    return OSError(
        f"the checkpoint of step {step} could not be written to {folder} ({error}); {free:.0f} MB are free there. "
        f"{kept[0].upper()}{kept[1:]}. Make room and resume."
    )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)


def _checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            checksum = zlib.crc32(piece, checksum)
    return checksum


__all__ = [
    "INCOMPLETE",
    "check",
    "checkpoint_to_resume",
    "damage",
    "list_checkpoints",
    "publish",
    "rotate",
    "seal",
    "step_of",
    "write_failure",
]
