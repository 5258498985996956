"""The machine described, a run timed, memory watched, a report saved.

A number without its machine is worth little, so [`environment`] goes into every file: processor, cores, threads,
memory, accelerator, versions, commit. Folders are recorded by name only; where they lie says nothing to others.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

SIGNIFICANT_DIGITS = 5


def environment() -> dict[str, Any]:
    """The machine and the software, ready for JSON. Memory in GiB; load: other work on the machine, in cores."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
    }


def cpu_model() -> str:
    """The processor's name, from the system's own list where there is one."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The repository's commit, with "+" when tracked files were changed; `None` where this is no clone."""
    here = Path(__file__).resolve().parent

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # an installed copy may lie inside somebody else's repository
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def synchronize(device: torch.device) -> None:
    """Wait for the accelerator, so that a clock read afterwards has seen its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def timed(run: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Result and wall-clock seconds of `run()`."""
    synchronize(device)
    start = time.perf_counter()
    result = run()
    synchronize(device)
    return result, time.perf_counter() - start


def reset_peak_memory(device: torch.device) -> None:
    """Let [`peak_memory`] count from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not Linux, or not allowed: then the peak is that of the process
        pass


def peak_memory(device: torch.device) -> float | None:
    """Most memory held since [`reset_peak_memory`], MiB: of the accelerator, else of the process; `None` if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), None)
    return None if line is None else int(line.split()[1]) / 1024


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table, aligned."""
    print(markdown_table(header, rows))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned."""
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = (header, ["-" * width for width in widths], *rows)
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def model_name(repo_or_folder: str) -> str:
    """What to call a model in a report: a folder by its last part, a repository in full."""
    return Path(repo_or_folder).resolve().name if Path(repo_or_folder).exists() else repo_or_folder


def training_record(draft: str) -> dict[str, Any] | None:
    """Head, steps, blocks and epochs of a draft's training, from what `dspark-hf train` left beside it; else `None`.

    Those of all its runs, where one went on from another's draft.
    """
    record = Path(draft) / "training.json"
    if not record.is_file():
        return None
    runs = [json.loads(record.read_text(encoding="utf-8"))]
    while "continues" in runs[-1]:
        runs.append(runs[-1]["continues"])
    made = runs[-1]["arguments"]
    return {
        "head": "none" if made["head"] == "none" else f"{made['head']}, rank {made['rank']}",
        "steps": sum(run["steps"] for run in runs),
        "blocks": sum(_blocks(run) for run in runs),
        "epochs": sum(run["epochs"] for run in runs),
    }


def _blocks(run: dict[str, Any]) -> int:
    chosen = run["arguments"]
    return run["steps"] * run["processes"] * chosen["accumulate"] * chosen["batch_size"] * chosen["anchors"]


def rounded(value: Any) -> Any:
    """`value` with every float at five significant digits and NaN as `None`; keeps stored runs small and valid."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(entry) for entry in value]
    return value


def save_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report, with its folder: one line for each result, so that a changed run is a readable difference."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for key, value in rounded(report).items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    print(f"\nsaved {path}")


__all__ = [
    "cpu_model",
    "environment",
    "markdown_table",
    "model_name",
    "peak_memory",
    "print_table",
    "reset_peak_memory",
    "rounded",
    "save_json",
    "synchronize",
    "timed",
    "training_record",
]
