"""Every example runs, on a tiny pair, and keeps to what users may import."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from bigram_pair import write_pair
from running import use_cost_table

import dspark_hf

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
# What trains on a GPU machine without network is a small tool of several files, with tests of its own.
FILES = [path for path in sorted(EXAMPLES.glob("*.py")) if not path.stem.startswith(("gpu", "_gpu", "_pieces"))]
# The package's public modules, and what of them: None stands for all that `__all__` lists.
PUBLIC = {"dspark_hf": None, "dspark_hf.demo": None, "dspark_hf.cli": {"main"}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list[str]:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    return ["--model", str(target), "--draft", str(draft)]


@pytest.fixture
def example(monkeypatch, capsys):
    """`example(name, *argv)` runs an example's `main` and returns what it printed."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(name: str, *argv: str) -> str:
        module = load(name)
        module.main(list(argv))
        return capsys.readouterr().out

    return run


def load(name: str):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def taus(text: str) -> list[float]:
    """Every tau that a text mentions."""
    return [float(number) for number in re.findall(r"tau (\d+\.\d+)", text)]


# Runs -----------------------------------------------------------------------------------------------------------------


def test_quickstart(example, pair, monkeypatch):
    use_cost_table(monkeypatch)
    text = example("quickstart", *pair, "--max-new-tokens", "40")
    assert "identical: True" in text
    rounds, tau = re.search(r"(\d+) rounds of (\d+\.\d+) tokens", text).groups()
    assert int(rounds) * float(tau) == pytest.approx(39, abs=0.5) and float(tau) > 1.5


@pytest.mark.smollm2
@pytest.mark.slow
def test_the_default_pair(example, smollm2_path):
    """As typed in by hand, without a model or a draft named."""
    text = example("quickstart", "--max-new-tokens", "32")
    assert "identical: True" in text


def test_a_target_without_a_chat_template(example, pair):
    import _pair
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair[1])
    tokenizer.chat_template = None
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    ids = _pair.chat_inputs(tokenizer, messages)["input_ids"]
    assert ids.shape[0] == 1 and "one" in tokenizer.decode(ids[0]) and "two" in tokenizer.decode(ids[0])


def test_pipeline_batch(example, pair, monkeypatch):
    use_cost_table(monkeypatch)
    text = example("pipeline_batch", *pair, "--max-new-tokens", "24", "--batch-size", "4")
    assert text.count("> ") >= 4 and "1 calls, 96 tokens" in text and "packed" in text
    assert taus(text)[0] > 1.5 and re.search(r"by position: \d\.\d\d", text)
    assert "2 calls, 96 tokens" in example("pipeline_batch", *pair, "--max-new-tokens", "24", "--batch-size", "2")


def test_chat_streaming(example, pair, monkeypatch):
    use_cost_table(monkeypatch)
    text = example("chat_streaming", *pair, "--max-new-tokens", "20", "--marks")
    assert len(taus(text)) == 3 and text.count("[20 tokens in ") == 3
    marks = [(int(kept), int(verified)) for kept, verified in re.findall(r"‹(\d+)/(\d+)›", text)]
    assert len(marks) > 3 and all(kept <= verified <= 7 for kept, verified in marks)
    rounds = [int(number) for number in re.findall(r"in (\d+) rounds", text)]
    assert sum(rounds) == len(marks)


def test_chat_with_own_turns_and_sampling(example, pair, monkeypatch):
    use_cost_table(monkeypatch)
    turns = iter(["Hello", "And again", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(turns))
    text = example("chat_streaming", *pair, "--max-new-tokens", "8", "--interactive", "--temperature", "0.7")
    assert len(taus(text)) == 2


def test_load_aware_batch(example, pair, monkeypatch):
    """Cheap tokens: all is verified. Dear ones: less, or nothing is drafted."""
    flags = ("load_aware_batch", *pair, "--max-new-tokens", "24", "--rows", "1", "4")
    use_cost_table(monkeypatch, per_token=1e-6)
    cheap = example(*flags)
    use_cost_table(monkeypatch, per_token=0.05, base=0.001)
    dear = example(*flags)
    for text in (cheap, dear):
        assert [line for line in text.splitlines() if line.endswith(" s")] and "3 calls at once" in text
        assert len(taus(text)) == 2 * 2 + 3 and text.count("constant") == 2

    def verified(text: str) -> list[int]:
        return [int(share) for share in re.findall(r"throughput .*?(\d+)% of the drafts", text)]

    assert max(verified(dear)) < min(verified(cheap))


def test_custom_processors(example, pair, monkeypatch):
    use_cost_table(monkeypatch)
    text = example("custom_processors", *pair, "--max-new-tokens", "48", "--sentences", "1")
    assert "identical to plain generate(): True" in text
    answer, tokens = text.rsplit("\n\n", 1)[0], int(re.search(r"(\d+) tokens; identical", text)[1])
    if tokens < 48:
        assert sum(answer.count(mark) for mark in ".!?") == 1  # not one token past the mark


def test_sentence_limit_counts_each_row():
    from byte_tokenizer import byte_tokenizer

    sys.path.insert(0, str(EXAMPLES))
    try:
        module = load("custom_processors")
    finally:
        sys.path.remove(str(EXAMPLES))
    tokenizer = byte_tokenizer()
    rows = [tokenizer(text)["input_ids"] for text in ("ab. one! c", "ab. only on")]
    width = min(map(len, rows))
    ids = torch.tensor([row[:width] for row in rows])
    assert module.SentenceLimit(tokenizer, 3, 1)(ids, None).tolist() == [True, False]
    scores = module.FreshWords(window=4, strength=2.0)(torch.tensor([[5, 6, 7, 8]]), torch.zeros(1, 10))
    assert scores[0, 8] == -2.0 and scores[0, 6] > scores[0, 7] > scores[0, 8] and scores[0, 9] == 0.0


def test_train_and_calibrate(example, pair, tmp_path):
    folder = tmp_path / "my-draft"
    flags = ["--max-new-tokens", "24", "--steps", "40", "--rank", "32", "--draft-vocab", "64"]
    text = example("train_and_calibrate", *pair[:2], "--output", str(folder), *flags)
    commands = re.findall(r"^\$ dspark-hf (\w+)", text, re.MULTILINE)
    assert commands == ["prepare", "train", "calibrate"]
    draft = dspark_hf.DSparkDraftModel.from_pretrained(folder)
    assert draft.config.draft_vocab_size == 64 and draft.config.confidence_calibration is not None
    assert taus(text)[-1] > 1.0


def test_rollouts(example, pair, monkeypatch):
    use_cost_table(monkeypatch)
    text = example("rollouts", *pair, "--steps", "2", "--group", "3", "--max-new-tokens", "12", "--lr", "1e-3")
    assert len(taus(text)) == 2 and text.count("in 9 rollouts") == 2
    assert min(taus(text)) > 1.2


def test_rollouts_end_with_the_end_of_sequence(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    mask = load("rollouts").completion_mask(torch.tensor([[5, 2, 0, 0], [5, 6, 7, 8]]), eos=2)
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_serving_handover(example, pair, tmp_path):
    text = example("serving_handover", *pair, "--output", str(tmp_path / "served"))
    assert "vllm serve " in text and "sglang.launch_server" in text and "ready for: vllm, sglang" in text
    assert (tmp_path / "served" / "serving" / "provenance.json").is_file()


def test_serving_handover_says_why_not(example, tmp_path, capsys):
    from planted import random_draft
    from targets import build

    target = build("gemma3", "sdpa")
    target.save_pretrained(tmp_path / "target")
    random_draft(target, backbone="gemma4").save_pretrained(tmp_path / "draft")
    flags = ["--model", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]
    assert "No engine runs this draft" in example("serving_handover", *flags, "--output", str(tmp_path / "served"))


def test_multi_gpu_on_one_device(example, pair, monkeypatch):
    use_cost_table(monkeypatch)
    text = example("multi_gpu", *pair, "--device-map", "cpu", "--max-new-tokens", "16")
    assert "draft on cpu" in text and "packed" in text and taus(text)[0] > 1.2


def test_multi_gpu(example, pair, monkeypatch):
    if torch.cuda.device_count() < 2:
        with pytest.raises(SystemExit, match="two GPUs"):
            example("multi_gpu", *pair)
        pytest.skip("needs two GPUs")
    use_cost_table(monkeypatch)
    text = example("multi_gpu", *pair, "--device-map", "balanced", "--max-new-tokens", "16")
    assert text.count("target on cuda") >= 2 and taus(text)[0] > 1.2


# What they keep to ----------------------------------------------------------------------------------------------------


def test_every_example_is_run():
    source = Path(__file__).read_text(encoding="utf-8")
    names = {path.stem for path in FILES if not path.stem.startswith("_")}
    run = set(re.findall(r'example\(\s*"(\w+)"', source)) | set(re.findall(r'flags = \("(\w+)"', source))
    assert names - run == set() and run <= names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_short_and_public(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "an example explains itself"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name.split(".")[0] != "dspark_hf" or alias.name in PUBLIC, alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dspark_hf":
            assert node.module in PUBLIC, f"{node.module} is private"
            public = PUBLIC[node.module] or set(importlib.import_module(node.module).__all__)
            assert {alias.name for alias in node.names} <= public


@pytest.mark.parametrize("path", [path for path in FILES if not path.stem.startswith("_")], ids=lambda path: path.stem)
def test_usage_is_right(path):
    """The docstring shows how to start the example, with flags that it has."""
    text = path.read_text(encoding="utf-8")
    usage = re.findall(r"^    python examples/(\w+)\.py(.*)$", ast.get_docstring(ast.parse(text)), re.MULTILINE)
    known = set(
        re.findall(r'add_argument\(\s*"(--[a-z-]+)"', text + (EXAMPLES / "_pair.py").read_text(encoding="utf-8"))
    )
    assert usage and {name for name, _ in usage} == {path.stem}
    assert {flag for _, words in usage for flag in re.findall(r"--[a-z-]+", words)} <= known


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--model", "somewhere"], "name a draft for that target"), ([], "is not there")],
)
def test_no_draft_is_one_line(example, monkeypatch, tmp_path, flags, words):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import _pair

    monkeypatch.setattr(_pair, "DRAFT", tmp_path / "nothing")
    with pytest.raises(SystemExit, match=words):
        example("quickstart", *flags)
