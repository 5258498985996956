"""Numbers of the official code to compare with: the full set where `DSPARK_GOLDEN` names it, else a small subset."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from dspark_hf import DSparkDraftModel

ROOT = Path(os.environ.get("DSPARK_GOLDEN") or Path(__file__).parent / "golden")
CASES = sorted(path.parent.name for path in ROOT.glob("*/golden.safetensors"))
PROMPTS, ROUNDS = range(3), range(2)


@dataclass(frozen=True)
class Golden:
    """One case: its tensors by name, its runs as JSON, and its draft."""

    name: str
    tensors: dict[str, torch.Tensor]
    runs: dict
    draft: DSparkDraftModel

    def __call__(self, prompt: int, round_number: int, name: str) -> torch.Tensor:
        return self.tensors[f"p{prompt}.round{round_number}.{name}"]

    @property
    def target_folder(self) -> Path:
        own = ROOT / self.name / "target"
        return own if own.is_dir() else ROOT / "qwen3_target"


@functools.cache
def golden(name: str) -> Golden:
    """Loads a case once per process; treat it as read-only."""
    folder = ROOT / name
    return Golden(
        name=name,
        tensors=load_file(folder / "golden.safetensors"),
        runs=json.loads((folder / "golden.json").read_text())["runs"],
        draft=DSparkDraftModel.from_pretrained(folder / "draft"),
    )
