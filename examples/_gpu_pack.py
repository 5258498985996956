"""The `pack` step of gpu_training.py: target, recipe, data and package as pieces, this program's files beside them."""

from __future__ import annotations

import argparse
import gzip
import shutil
import tempfile
from pathlib import Path

import torch
from _pieces import write_pieces
from transformers import AutoModelForCausalLM, AutoTokenizer

CALIBRATION_PROMPTS = 64


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declares the options of the step."""
    add = command.add_argument
    add("--recipe", type=Path, required=True, help="arguments of `dspark-hf train`")
    add("--model", help="target; default: the recipe's, else SmolLM2-135M-Instruct")
    add("--data", nargs="+", metavar="JSONL", help="responses to train on; default: the recipe's")
    add("--eval-data", nargs="+", metavar="JSONL", help="held-out ones; default: the recipe's")
    add("--prompts", type=Path, metavar="JSONL", help="for the target to answer on the GPU as well")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="of the target")


def pack(args: argparse.Namespace) -> list[Path]:
    """Writes the pieces.

    Raises:
        ValueError: neither the recipe nor `args` names training data.
    """
    lines = args.recipe.read_text(encoding="utf-8").splitlines()
    words = [word for line in lines for word in line.split("#")[0].split()]
    data, held_out = args.data or values_of(words, "--data"), args.eval_data or values_of(words, "--eval-data")
    if not data:
        raise ValueError(f"--data: {args.recipe} names no training data, so name the files here")
    model = args.model or next(iter(values_of(words, "--model")), None) or smollm2()
    with tempfile.TemporaryDirectory() as scratch:
        stage = Path(scratch)
        shutil.copy(args.recipe, stage / "recipe.args")
        save_target(model, stage / "target", getattr(torch, args.dtype))
        save_package(stage / "source")
        sets = {"data": data, "held_out": held_out, "prompts": [args.prompts] if args.prompts else []}
        for name, files in sets.items():
            (stage / name).mkdir()
            for number, file in enumerate(files):
                (stage / name / f"{number}.jsonl.gz").write_bytes(gzip.compress(Path(file).read_bytes()))
        rows = [row for file in held_out or data for row in Path(file).read_bytes().split(b"\n") if row]
        chosen = rows[:: -(-len(rows) // CALIBRATION_PROMPTS)]  # from all over the files
        (stage / "calibration.jsonl").write_bytes(b"".join(row + b"\n" for row in chosen))
        files = {path.name: path for path in sorted(stage.iterdir())}
        pieces = write_pieces(files, args.output, "inputs", args.megabytes)
    for file in Path(__file__).parent.glob("*.py"):
        if file.stem in ("gpu_training", "_gpu_pack", "_gpu_run", "_gpu_work", "_pieces"):
            shutil.copy(file, args.output)
    return pieces


def values_of(words: list[str], option: str) -> list[str]:
    """What follows an option of a recipe, up to the next one; empty without it."""
    if option not in words:
        return []
    rest = words[words.index(option) + 1 :]
    return rest[: next((place for place, word in enumerate(rest) if word.startswith("--")), len(rest))]


def save_target(model: str, folder: Path, dtype: torch.dtype) -> None:
    """The target's weights in `dtype`, and its tokenizer where it has one."""
    AutoModelForCausalLM.from_pretrained(model, dtype=dtype).save_pretrained(folder)
    if not Path(model).is_dir() or any(Path(model).glob("tokenizer*")):
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def save_package(folder: Path) -> None:
    """A copy of the package that runs here."""
    import dspark_hf

    package = Path(dspark_hf.__file__).parent
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))


def smollm2() -> str:
    """Folder of SmolLM2-135M-Instruct, fetched at the first use."""
    from dspark_hf.demo import smollm2_folder

    return str(smollm2_folder())
