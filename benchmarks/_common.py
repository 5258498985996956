"""What every benchmark needs: the machine described, prompts as batches, timing, a table, a JSON file.

A number without its machine is worth little, so [`environment`] goes into every file: processor, cores, threads,
memory, accelerator, versions, commit. Folders are recorded by name only; where they lie says nothing to others.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Batch:
    """R prompts of one source, left-padded.

    Attributes:
        source (`str`): where the prompts come from, e.g. "gsm8k"; "-" when the file does not say.
        input_ids, attention_mask (`torch.Tensor`): each (R, longest prompt).
    """

    source: str
    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(self.source, self.input_ids.to(device), self.attention_mask.to(device))


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
    """The repository's commit, with "+" when tracked files were changed; `None` outside a clone."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def read_prompts(
    path: Path,
    load_tokenizer: Callable[[], PreTrainedTokenizerBase],
    *,
    sources: Sequence[str] = (),
    limit: int | None = None,
) -> dict[str, list[list[int]]]:
    """Prompts of a JSONL file as token ids, by source.

    Args:
        path (`Path`): one JSON object a line, with `prompt_ids` (used as they are) or `prompt` (wrapped in the chat
            template where there is one), and optionally `source`.
        load_tokenizer (callable): gives the target's tokenizer; called only when a line has no `prompt_ids`.
        sources (`Sequence[str]`, *optional*): only these.
        limit (`int`, *optional*): at most so many prompts of each source.

    Raises:
        `ValueError`: a line has neither field, or nothing is left.
    """
    prompts: dict[str, list[list[int]]] = {}
    tokenizer = None
    # Not splitlines(): a prompt may hold one of Unicode's other line breaks.
    for number, line in enumerate(path.read_text(encoding="utf-8").strip("\n").split("\n"), start=1):
        row = json.loads(line)
        source = row.get("source", "-")
        if sources and source not in sources:
            continue
        chosen = prompts.setdefault(source, [])
        if limit is not None and len(chosen) >= limit:
            continue
        if "prompt_ids" in row:
            chosen.append(row["prompt_ids"])
        elif "prompt" in row:
            tokenizer = tokenizer or load_tokenizer()
            chosen.append(encode(tokenizer, row["prompt"]))
        else:
            raise ValueError(f"{path.name}, line {number}: neither prompt_ids nor prompt")
    if not prompts:
        raise ValueError(f"{path.name} holds no prompts of {', '.join(sources) or 'any source'}")
    return prompts


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a prompt, as a user's message where the tokenizer has a chat template."""
    if not tokenizer.chat_template:
        return tokenizer(prompt)["input_ids"]
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def make_batches(prompts: dict[str, list[list[int]]], rows: int, pad: int) -> list[Batch]:
    """Batches of `rows` prompts, each from one source; a short last batch is filled up from the source's start."""
    batches = []
    for source, ids in prompts.items():
        for start in range(0, len(ids), rows):
            chosen = [ids[(start + row) % len(ids)] for row in range(rows)]
            width = max(map(len, chosen))
            input_ids = torch.tensor([[pad] * (width - len(row)) + row for row in chosen])
            attention_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in chosen])
            batches.append(Batch(source, input_ids, attention_mask))
    return batches


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


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table, aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for line in (header, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


def model_name(repo_or_folder: str) -> str:
    """What to call a model in a report: a folder by its last part, a repository in full."""
    return Path(repo_or_folder).resolve().name if Path(repo_or_folder).exists() else repo_or_folder


def save_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nsaved {path}")
