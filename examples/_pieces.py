"""Files as pieces small enough to carry: one tar archive, cut, with a list of checksums that is written last.

Whoever joins them checks every piece first and names all that are missing or damaged, so that only those have to be
carried again. An archive is unpacked beside its place and then renamed: a folder is complete or not there.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path


def write_pieces(files: Mapping[str, Path], folder: Path, name: str, megabytes: float) -> list[Path]:
    """Writes `files` (name in the archive: file or folder) as `NAME.000`, `NAME.001`, ... and `NAME.json`.

    No piece is larger than `megabytes` (of 1,000,000 bytes). Returns the pieces.
    """
    if megabytes <= 0:
        raise ValueError(f"--megabytes: a piece must have a size, got {megabytes}")
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob(f"{name}.[0-9][0-9][0-9]"), folder / f"{name}.json"]:
        old.unlink(missing_ok=True)
    cutter = _Cutter(folder, name, max(1, int(megabytes * 1e6)))
    with tarfile.open(fileobj=cutter, mode="w|") as archive:
        for member, path in files.items():
            archive.add(path, member)
    cutter.close()
    pieces = [{"name": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path)} for path in cutter.paths]
    (folder / f"{name}.json").write_text(json.dumps({"pieces": pieces}, indent=1) + "\n", encoding="utf-8")
    return cutter.paths


def checked_pieces(folder: Path, name: str) -> list[dict]:
    """The pieces as their list has them: name, bytes, sha256.

    Raises:
        ValueError: naming every piece that is missing or has other contents than were written.
    """
    listing = folder / f"{name}.json"
    if not listing.is_file():
        raise ValueError(f"{listing} is missing: it is written last, with the checksums of all pieces; bring it along")
    try:
        pieces = json.loads(listing.read_text(encoding="utf-8"))["pieces"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{listing} is damaged; bring it again") from None
    missing = [piece["name"] for piece in pieces if not (folder / piece["name"]).is_file()]
    there = [piece for piece in pieces if piece["name"] not in missing]
    damaged = [piece["name"] for piece in there if _sha256(folder / piece["name"]) != piece["sha256"]]
    problems = [f"{word}: {', '.join(names)}" for word, names in (("missing", missing), ("damaged", damaged)) if names]
    if problems:
        raise ValueError(f"of the {len(pieces)} pieces in {folder}, {'; '.join(problems)}. Bring those again")
    return pieces


def read_pieces(folder: Path, name: str, output: Path) -> None:
    """Unpacks the pieces into the new folder `output`.

    Raises:
        ValueError: as `checked_pieces` does, or when `output` is there already.
    """
    if output.exists():
        raise ValueError(f"{output} exists already: name a new folder")
    pieces = checked_pieces(folder, name)
    unfinished = output.with_name(output.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    with tarfile.open(fileobj=_Joined([folder / piece["name"] for piece in pieces]), mode="r|") as archive:
        archive.extractall(unfinished, filter="data")
    unfinished.rename(output)


class _Cutter:
    """A file to write to that goes on in the next piece when one is full."""

    def __init__(self, folder: Path, name: str, size: int):
        self.folder, self.name, self.size, self.paths, self.file = folder, name, size, [], None

    def write(self, data: bytes) -> int:
        rest = memoryview(data)
        while rest:
            if self.file is None or self.file.tell() == self.size:
                self.close()
                self.paths.append(self.folder / f"{self.name}.{len(self.paths):03d}")
                self.file = self.paths[-1].open("wb")
            rest = rest[self.file.write(rest[: self.size - self.file.tell()]) :]
        return len(data)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class _Joined:
    """Files read one after another."""

    def __init__(self, paths: list[Path]):
        self.files = [path.open("rb") for path in paths]

    def read(self, size: int = -1) -> bytes:
        while self.files:
            if data := self.files[0].read(size):
                return data
            self.files.pop(0).close()
        return b""


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
