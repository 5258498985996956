"""Training on a machine without network, on a tiny target: what is packed trains there, and what goes wrong is said.

Commands run in this process, except where the process itself is the matter: a start of Python takes seconds.
"""

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import targets
import torch
from byte_tokenizer import byte_tokenizer
from test_training import write_data

from dspark_hf import DSparkDraftModel
from dspark_hf.cli import main as dspark_hf

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.append(str(EXAMPLES))

import _gpu_pack as packing  # noqa: E402
import _gpu_work  # noqa: E402
import _pieces as pieces  # noqa: E402
import gpu_training  # noqa: E402
from _gpu_run import GpuRun  # noqa: E402
from _gpu_work import Work, newest, whole_lines  # noqa: E402

STEPS = 12


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder of packed inputs: tiny target with a tokenizer, recipe, data, prompts."""
    folder = tmp_path_factory.mktemp("gpu")
    target = targets.build("qwen3")
    target.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    write_data(folder / "data.jsonl", target)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "hello")))
    (folder / "recipe.args").write_text(
        f"--model {folder / 'target'}  # --data none\n"
        f"--data {folder / 'data.jsonl'} --eval-data {folder / 'data.jsonl'}\n"
        f"--layers 1 --block-size 3 --rank 8 --max-steps {STEPS} --anchors 8 --lr 2e-3 --save-every 4 --device cuda\n"
    )
    options = ["--prompts", str(folder / "prompts.jsonl"), "--dtype", "float32", "--megabytes", "0.2"]
    argv = ["pack", "--recipe", str(folder / "recipe.args"), "--output", str(folder / "inputs"), *options]
    assert gpu_training.main(argv) == 0
    return folder / "inputs"


@pytest.fixture
def commands(monkeypatch) -> list[list[str]]:
    """Runs the program's commands in this process; the list of what was run."""
    run: list[list[str]] = []

    def in_process(command, env, check, timeout):
        assert command[1:3] == ["-m", "dspark_hf.cli"] and env["HF_HUB_OFFLINE"] == "1" and check
        run.append(command[3:])
        if status := dspark_hf(command[3:]):
            raise subprocess.CalledProcessError(status, command)

    errors = {name: getattr(subprocess, name) for name in ("TimeoutExpired", "CalledProcessError")}
    monkeypatch.setattr(_gpu_work, "subprocess", SimpleNamespace(run=in_process, **errors))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return run


def run_argv(inputs: Path, tmp_path: Path, *more: str) -> list[str]:
    folders = ["--inputs", str(inputs), "--work", str(tmp_path / "work"), "--output", str(tmp_path / "out")]
    options = ["--device", "cpu", "--minutes", "10", "--probe-seconds", "0.01", "--megabytes", "0.05"]
    return ["run", *folders, *options, "--generate", "--responses 2 --max-new-tokens 8", *more]


# The way there and back -----------------------------------------------------------------------------------------------


def test_pack_run_unpack(inputs, commands, tmp_path, capsys):
    listing = json.loads((inputs / "inputs.json").read_text())["pieces"]
    assert len(listing) > 2 and max(piece["bytes"] for piece in listing) == 200_000
    assert gpu_training.main(run_argv(inputs, tmp_path)) == 0
    assert [command[0] for command in commands] == ["prepare", "train", "train", "calibrate"]
    work = tmp_path / "work"
    state = json.loads((work / "state.json").read_text())
    assert state["answers"] == 4 and state["recipe_steps"] == STEPS and 1 <= state["steps"] <= STEPS
    trained = commands[2]
    assert str(work / "inputs" / "data" / "0.jsonl") in trained and str(work / "answers.jsonl") in trained
    assert trained[trained.index("--eval-data") + 1] == str(work / "inputs" / "held_out" / "0.jsonl")
    assert trained[trained.index("--device") + 1] == "cpu"  # whatever the recipe says

    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("checkpoint.[0-9]*")]
    assert len(sizes) > 1 and max(sizes) == 50_000
    assert gpu_training.main(["unpack", "--inputs", str(tmp_path / "out"), "--output", str(tmp_path / "draft")]) == 0
    steps = state["steps"]
    assert f"trained {steps} of {steps} planned steps (the recipe has {STEPS}); calib" in capsys.readouterr().out
    draft = DSparkDraftModel.from_pretrained(tmp_path / "draft")
    assert draft.config.confidence_calibration is not None
    assert json.loads((tmp_path / "draft" / "training.json").read_text())["steps"] == state["steps"]
    target = targets.build("qwen3")
    output = target.generate(torch.tensor([[5, 6, 7]]), assistant_model=draft, max_new_tokens=20, do_sample=False)
    assert output[0, 3:].tolist() == targets.plain(target, [5, 6, 7], max_new_tokens=20, do_sample=False)

    commands.clear()  # what is done is not done again
    assert gpu_training.main(run_argv(inputs, tmp_path)) == 0
    assert [command[0] for command in commands] == ["calibrate"]


def test_time_runs_out_and_a_second_run_goes_on(inputs, commands, tmp_path, monkeypatch, capsys):
    work = tmp_path / "work"
    work.mkdir()
    facts = {"answers": 0, "steps": STEPS, "recipe_steps": STEPS, "loading": 0.0}
    (work / "state.json").write_text(json.dumps(facts))
    with monkeypatch.context() as hurry:
        hurry.setattr(Work, "left", property(lambda self: 75.001))  # 75 are kept for what follows
        assert gpu_training.main(run_argv(inputs, tmp_path)) == 0
    unpack = ["unpack", "--inputs", str(tmp_path / "out"), "--output"]
    assert gpu_training.main([*unpack, str(tmp_path / "first")]) == 0
    assert f"trained 1 of {STEPS} planned steps" in capsys.readouterr().out
    assert DSparkDraftModel.from_pretrained(tmp_path / "first").config.block_size == 3
    assert newest(work / "draft").name == "checkpoint-1"

    assert gpu_training.main(run_argv(inputs, tmp_path)) == 0
    assert gpu_training.main([*unpack, str(tmp_path / "second")]) == 0
    assert json.loads((tmp_path / "second" / "training.json").read_text())["steps"] == STEPS
    assert json.loads((tmp_path / "second" / "run.json").read_text())["trained"] == STEPS


def test_steps_are_planned_to_fit(inputs, commands, tmp_path, monkeypatch):
    """At 2 steps in 0.5 seconds, 77 seconds of which 75 are kept hold 95 % of 8 steps."""
    argv = run_argv(inputs, tmp_path, "--probe-seconds", "0.5")
    run = GpuRun(gpu_training.parse_args(argv))
    probe = tmp_path / "work" / "probe" / "checkpoint-2"
    probe.mkdir(parents=True)
    (probe / "trainer_state.json").write_text(json.dumps({"global_step": 2, "max_steps": 1000}))
    monkeypatch.setattr(Work, "left", property(lambda self: 77.0))
    run.probe(["train"])
    assert run.work.state["steps"] == 7 and run.work.state["recipe_steps"] == 1000 and commands == []
    monkeypatch.setattr(Work, "left", property(lambda self: 75.0))
    with pytest.raises(ValueError, match="no time is left to train, at 4.00 steps a second"):
        run.probe(["train"])
    (probe / "trainer_state.json").write_text(json.dumps({"global_step": 2, "max_steps": 2}))
    run.probe(["train"])  # a recipe that the probe has finished fits
    assert run.work.state["steps"] == 2


def test_a_draft_that_cannot_be_calibrated_comes_home(inputs, commands, tmp_path, capsys):
    argv = run_argv(inputs, tmp_path, "--train=--no-confidence", "--generate-minutes", "0")
    assert gpu_training.main(argv) == 0
    assert json.loads((tmp_path / "work" / "state.json").read_text())["answers"] == 0
    assert gpu_training.main(["unpack", "--inputs", str(tmp_path / "out"), "--output", str(tmp_path / "draft")]) == 0
    assert "not calibrated" in capsys.readouterr().out
    assert not DSparkDraftModel.from_pretrained(tmp_path / "draft").config.enable_confidence_head


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_missing_and_damaged_pieces_are_named(tmp_path, capsys):
    random_bytes = random.Random(0).randbytes(1_000_000)
    (tmp_path / "file").write_bytes(random_bytes)
    folder = tmp_path / "pieces"
    paths = pieces.write_pieces({"sub/file": tmp_path / "file"}, folder, "inputs", 0.3)
    assert [path.name for path in paths] == [f"inputs.00{number}" for number in range(4)]
    pieces.read_pieces(folder, "inputs", tmp_path / "whole")
    assert (tmp_path / "whole" / "sub" / "file").read_bytes() == random_bytes
    with pytest.raises(ValueError, match="exists already"):
        pieces.read_pieces(folder, "inputs", tmp_path / "whole")

    argv = ["run", "--inputs", str(folder), "--work", str(tmp_path / "work"), "--output", str(tmp_path / "out")]
    paths[1].unlink()
    data = bytearray(paths[2].read_bytes())
    data[77] ^= 1
    paths[2].write_bytes(data)
    paths[3].write_bytes(paths[3].read_bytes()[:-1])
    assert gpu_training.main(argv) == 1
    message = "of the 4 pieces in {}, missing: inputs.001; damaged: inputs.002, inputs.003. Bring those again"
    assert message.format(folder) in capsys.readouterr().err
    assert not (tmp_path / "work" / "inputs").exists()
    (folder / "inputs.json").write_text("{")
    assert gpu_training.main(argv) == 1 and "inputs.json is damaged" in capsys.readouterr().err
    (folder / "inputs.json").unlink()
    assert gpu_training.main(argv) == 1 and "inputs.json is missing" in capsys.readouterr().err

    pieces.write_pieces({"file": tmp_path / "file"}, folder, "inputs", 2)  # one piece: the others are of no use now
    assert sorted(path.name for path in folder.iterdir()) == ["inputs.000", "inputs.json"]
    with pytest.raises(ValueError, match="--megabytes"):
        pieces.write_pieces({"file": tmp_path / "file"}, folder, "inputs", 0)


def test_a_work_folder_belongs_to_its_inputs(inputs, tmp_path, capsys):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "state.json").write_text(json.dumps({"inputs": []}))
    assert gpu_training.main(run_argv(inputs, tmp_path)) == 1
    assert "belongs to other inputs" in capsys.readouterr().err


def test_a_recipe_without_data(tmp_path, capsys):
    (tmp_path / "recipe.args").write_text("--layers 2\n--eval-data a.jsonl b.jsonl --lr 1e-3\n")
    argv = ["pack", "--recipe", str(tmp_path / "recipe.args"), "--output", str(tmp_path / "inputs")]
    assert gpu_training.main(argv) == 1
    assert "names no training data" in capsys.readouterr().err
    words = (tmp_path / "recipe.args").read_text().split()
    assert packing.values_of(words, "--eval-data") == ["a.jsonl", "b.jsonl"] and packing.values_of(words, "--lr") == [
        "1e-3"
    ]
    assert packing.values_of(words, "--data") == []


def test_processes_end_in_time_and_failures_are_heard(tmp_path, capfd):
    work = Work(tmp_path, 60)
    assert work.command("inspect", "--help", limit=0) is False  # Python itself takes longer to start
    with pytest.raises(ValueError, match="`dspark-hf inspect` failed with status 1"):
        work.command("inspect", str(tmp_path / "nowhere"))
    assert "nowhere" in "".join(capfd.readouterr())


def test_half_written_answers_are_cut(tmp_path):
    path = tmp_path / "answers.jsonl"
    assert whole_lines(path) == 0
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a"')
    assert whole_lines(path) == 2 and path.read_bytes() == b'{"a": 1}\n{"a": 2}\n'
    with pytest.raises(ValueError, match="before nothing had a checkpoint"):
        newest(tmp_path / "nothing")
