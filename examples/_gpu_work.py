"""A work folder with a deadline: commands of `dspark-hf` run in it, and what is done is noted, to go on later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


class Work:
    """The folder, the time, and the notes.

    Args:
        folder (`Path`): created if needed; its `state.json` holds what earlier runs noted.
        seconds (`float`): for this run.
    """

    def __init__(self, folder: Path, seconds: float):
        self.folder, self.deadline = folder, time.monotonic() + seconds
        folder.mkdir(parents=True, exist_ok=True)
        self.notes = folder / "state.json"
        self.state: dict = json.loads(self.notes.read_text(encoding="utf-8")) if self.notes.is_file() else {}

    @property
    def source(self) -> Path:
        """The package that came with the inputs; it is what runs, whatever is installed."""
        return self.folder / "inputs" / "source"

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.deadline - time.monotonic()

    def note(self, **facts) -> None:
        """Keeps facts for this run and the next."""
        self.state.update(facts)
        unfinished = self.notes.with_suffix(".part")
        unfinished.write_text(json.dumps(self.state, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self.notes)

    def command(self, *words: object, limit: float | None = None) -> bool:
        """Runs a command of `dspark-hf`; False where it was ended because its `limit` seconds were over.

        Raises:
            ValueError: it failed; its own message is above.
        """
        paths = [str(self.source), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
        print(f"{self.left:5.0f} s left: dspark-hf {words[0]}", flush=True)
        try:
            subprocess.run(
                [sys.executable, "-m", "dspark_hf.cli", *map(str, words)],
                env=environment,
                check=True,
                timeout=None if limit is None else max(1.0, limit),
            )
        except subprocess.TimeoutExpired:
            print(f"{self.left:5.0f} s left: its time is up", flush=True)
            return False
        except subprocess.CalledProcessError as error:
            raise ValueError(f"`dspark-hf {words[0]}` failed with status {error.returncode}; see above") from None
        return True


def whole_lines(path: Path) -> int:
    """Cuts off a last line that was not written to its end; how many there are then."""
    data = path.read_bytes() if path.is_file() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        path.write_bytes(whole)
    return whole.count(b"\n")


def newest(folder: Path) -> Path:
    """The latest checkpoint of a training folder."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    if not found:
        raise ValueError(f"--minutes: time ran out before {folder.name} had a checkpoint; run again to go on")
    return found[-1]


def export_newest(folder: Path, output: Path) -> int:
    """Writes the latest checkpoint of a training folder as a draft in bfloat16; returns its step."""
    from dspark_hf import DSparkDraftModel  # late: on a bare machine it comes with the inputs

    checkpoint = newest(folder)
    DSparkDraftModel.from_pretrained(checkpoint).bfloat16().save_pretrained(output)
    return int(checkpoint.name.split("-")[1])
