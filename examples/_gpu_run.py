"""The `run` step of gpu_training.py: join, answer more prompts, train what fits into the time, calibrate, cut.

Each step is a command of `dspark-hf` in a process of its own, so that one which runs out of time can be ended. How many
optimizer steps fit is found by training for a few seconds first: the learning rate has to reach its end in time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from pathlib import Path

import torch
from _gpu_work import Work, export_newest, newest, whole_lines
from _pieces import checked_pieces, read_pieces, write_pieces

NEVER = 10**9  # steps between evaluations: only the one at the end
PLANNED = 0.95  # of the time left, in case a step takes longer than the first ones


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declares the options of the step."""
    add = command.add_argument
    add("--work", type=Path, required=True, help="folder for everything in between; the same one to go on")
    add("--minutes", type=float, default=7.5, help="for this run, in all; default: 7.5")
    add("--generate-minutes", type=float, default=2.0, help="of it for answering packed prompts; default: 2")
    add("--generate", default="--responses 2 --max-new-tokens 192 --batch-size 512", help="options of `prepare`")
    add("--train", default="", help="options of `train` instead of the recipe's: --train='--batch-size 32'")
    add("--probe-seconds", type=float, default=15.0, help="of training, to measure its speed; default: 15")
    add("--reserve-seconds", type=float, default=75.0, help="for what follows training; default: 75")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: a GPU where there is one")


class GpuRun:
    """One run; `args` as `add_arguments` declares them, with `inputs`, `output` and `megabytes`."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.work = args, Work(args.work, 60 * args.minutes)
        self.inputs, self.draft, self.answers = (args.work / name for name in ("inputs", "draft", "answers.jsonl"))

    def run(self) -> list[Path]:
        """All steps that are not done yet; returns the pieces of the draft."""
        self.join()
        prompts, state = self.inputs / "prompts" / "0.jsonl", self.work.state
        if prompts.is_file() and "answers" not in state:
            self.answer(prompts)
        data = [*sorted((self.inputs / "data").glob("*.jsonl")), *([self.answers] if state.get("answers") else [])]
        held_out = sorted((self.inputs / "held_out").glob("*.jsonl"))
        train = ["train", f"@{self.inputs / 'recipe.args'}", "--model", self.inputs / "target", "--data", *data]
        train += [*(["--eval-data", *held_out] if held_out else []), "--eval-every", NEVER, "--keep", 1]
        train += ["--device", self.args.device, *self.args.train.split()]
        if "steps" not in state:
            self.probe(train)
        draft = self.train(train)
        self.work.note(calibrated=self.calibrate(draft))
        (draft / "run.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        files = {path.name: path for path in sorted(draft.iterdir()) if path.is_file()}
        return write_pieces(files, self.args.output, "checkpoint", self.args.megabytes)

    def join(self) -> None:
        pieces = checked_pieces(self.args.inputs, "inputs")
        if self.work.state.get("inputs", pieces) != pieces:
            raise ValueError(f"--work: {self.args.work} belongs to other inputs; name another folder")
        if not self.inputs.is_dir():
            read_pieces(self.args.inputs, "inputs", self.inputs)
        for packed in self.inputs.glob("*/*.jsonl.gz"):
            packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
            packed.unlink()
        sys.path.insert(0, str(self.work.source))
        self.work.note(inputs=pieces, device=self.args.device)

    def answer(self, prompts: Path) -> None:
        words = ["--model", self.inputs / "target", "--prompts", prompts, "--output", self.answers]
        words += ["--device", self.args.device, *self.args.generate.split()]
        limit = min(60 * self.args.generate_minutes, self.work.left - self.args.reserve_seconds)
        if limit > 0:
            self.work.command("prepare", *words, limit=limit)
        self.work.note(answers=whole_lines(self.answers))

    def probe(self, train: list) -> None:
        """How many steps the recipe has, and how many fit into what is left."""
        folder, seconds, began = self.args.work / "probe", self.args.probe_seconds, time.monotonic()
        if not list(folder.glob("checkpoint-*")):
            self.work.command(*train, "--output", folder, "--save-every", NEVER, "--time-limit", seconds / 60)
        trained = json.loads((newest(folder) / "trainer_state.json").read_text(encoding="utf-8"))
        steps, speed = trained["max_steps"], trained["global_step"] / seconds
        loading = max(0.0, time.monotonic() - began - seconds)  # which comes again
        if trained["global_step"] < steps:  # else the whole recipe took less than the probe
            steps = min(steps, int(PLANNED * speed * (self.work.left - loading - self.args.reserve_seconds)))
        if steps < 1:
            raise ValueError(f"--minutes: no time is left to train, at {speed:.2f} steps a second")
        self.work.note(steps=steps, recipe_steps=trained["max_steps"], steps_per_second=speed, loading=loading)

    def train(self, train: list) -> Path:
        """The trained draft; where time ran out, that of the newest checkpoint."""
        seconds = self.work.left - self.work.state["loading"] - self.args.reserve_seconds
        finished = self.draft / "training.json"
        if not finished.is_file() and seconds > 0:
            steps = self.work.state["steps"]
            words = ["--resume", "--max-steps", steps, "--save-every", max(1, steps // 4), "--time-limit", seconds / 60]
            self.work.command(*train, "--output", self.draft, *words, limit=self.work.left - 20)
        if finished.is_file():
            self.work.note(trained=json.loads(finished.read_text(encoding="utf-8"))["steps"])
            return self.draft
        unfinished = self.args.work / "unfinished"
        self.work.note(trained=export_newest(self.draft, unfinished))
        return unfinished

    def calibrate(self, draft: Path) -> bool:
        """Whether the confidences could be calibrated; a draft is worth bringing home without, too."""
        words = [self.inputs / "target", draft, "--prompts", self.inputs / "calibration.jsonl", "--batch-size", "32"]
        try:
            return self.work.command("calibrate", *words, "--device", self.args.device, limit=self.work.left - 5)
        except ValueError:  # it has said why
            return False
