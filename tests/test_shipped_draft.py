"""The draft that comes with this repository: what it is, that its recipe is the one in `examples/`, that it works."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDraftModel, record_generation
from dspark_hf.cli import build_parser

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "checkpoints" / "smollm2-135m-instruct-dspark"
# One after the other: `continues` of a record is the run before it.
RECIPES = [ROOT / "examples" / name for name in ("smollm2-longer.args", "smollm2.args")]


def test_folder_is_small_and_whole():
    names = {path.name for path in FOLDER.iterdir()}
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors", "training.json"} <= names
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 25e6
    config = json.loads((FOLDER / "config.json").read_text())
    calibration = config["confidence_calibration"]
    assert len(calibration["temperature"]) == config["block_size"] == 7
    assert not config["stores_head"] and not config["stores_embedding"]


def test_recipes_are_what_it_was_trained_with():
    record = json.loads((FOLDER / "training.json").read_text())
    for path in RECIPES:
        needed = ["--model", "", "--data", "", "--output", ""]
        recipe = vars(build_parser().parse_args(["train", f"@{path}", *needed]))
        # places, how it was run, and what `max_steps` takes the place of
        apart = {"model", "draft", "data", "eval_data", "output", "resume", "dtype", "device", "epochs"}
        apart |= {"run", "command"}
        changed = {key for key in record["arguments"] if key not in apart and record["arguments"][key] != recipe[key]}
        assert not changed, path.name
        assert record["steps"] == recipe["max_steps"]
        record = record.get("continues")
    assert record is None


def test_card_says_what_its_files_say():
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    front = card.split("---")[1]
    assert "license: apache-2.0" in front and "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in front
    record = json.loads((FOLDER / "training.json").read_text())
    assert f"{record['evaluation']['eval_tau']:.3f}" in card
    for result in json.loads((ROOT / "benchmarks" / "results" / "teacher_forced.json").read_text())["results"]:
        assert f"{result['tau']:.3f}" in card, result["draft"]
    results = json.loads((ROOT / "benchmarks" / "results" / "acceptance.json").read_text())["results"]
    for result in results:
        if result["draft"] == FOLDER.name and result["source"] != "all":
            assert re.search(rf"\| {re.escape(result['source'])} \|.*\b{result['tau']:.2f}\b", card), result


@pytest.mark.smollm2
def test_it_is_exact_and_accepts(smollm2_path):
    target = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    draft = DSparkDraftModel.from_pretrained(FOLDER, dtype=torch.float32)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    prompts = [
        "A baker makes 12 loaves an hour for 5 hours and sells 40 of them. How many are left?",
        "Write a Python function that returns the sum of the even numbers in a list.",
    ]
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        plain = target.generate(**inputs, max_new_tokens=64, do_sample=False)
        with record_generation() as stats:
            output = target.generate(**inputs, max_new_tokens=64, do_sample=False, assistant_model=draft)
        assert output.tolist() == plain.tolist()
        assert stats.tau > 1.5, prompt
