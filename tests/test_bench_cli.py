"""`dspark-hf bench`: the report it prints and stores, and how it refuses."""

import json
import re

import pytest
from golden_set import golden

from dspark_hf.cli import main


@pytest.fixture
def prompts(tmp_path):
    """Golden prompts under the names of three sources, one of them nobody's."""
    samples = golden("qwen3_rnn").runs["greedy_thr0.0"]["samples"]
    rows = [sample["output_ids"][: sample["num_input_tokens"]] for sample in samples] * 2
    sources = ["gsm8k", "mbpp", "poems"] * 2
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"source": source, "prompt_ids": ids}) for source, ids in zip(sources, rows, strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return path


def bench(tiny_pair, prompts, *flags):
    return main(["bench", *map(str, tiny_pair), "--prompts", str(prompts), "--device", "cpu", *flags])


def test_report(tiny_pair, prompts, tmp_path, capsys):
    output = tmp_path / "out" / "bench.json"
    flags = ["--rows", "1", "2", "--dtype", "float32", "--draft-lengths", "3", "7", "--max-new-tokens", "16"]
    flags += ["--repeats", "2", "--limit", "1", "--output", str(output)]
    assert bench(tiny_pair, prompts, *flags) == 0
    text = output.read_text()
    report = json.loads(text)
    assert str(tmp_path) not in text and str(tiny_pair[0]) not in text  # where folders lie is nobody's business
    assert "NaN" not in text
    assert {"cpu", "cores", "threads", "memory_gib", "torch", "transformers", "commit", "date"} <= set(
        report["environment"]
    )
    assert report["arguments"]["seed"] == 0 and report["dtype"] == "float32"
    assert report["draft_shape"]["block"] == 7 and report["draft_shape"]["head"] == "rnn"
    assert set(report["unavailable"]) == {"compiled", "DFlash", "assistant"}
    cells = {(r["rows"], r["domain"], r["method"]) for r in report["results"]}
    domains = ("all", "math", "code", "poems")
    drafted = ("3 drafted", "7 drafted", "confidence", "throughput", "throughput, no copies")
    single, batched = ("plain", "static cache", "prompt lookup", *drafted), ("plain", "static cache", *drafted)
    expected = {(1, domain, method) for domain in domains for method in single}
    assert cells == expected | {(2, domain, method) for domain in domains for method in batched}
    for result in report["results"]:
        assert result["tokens_per_second"] > 0 and result["peak_mib"] > 0
        assert result["identical_rows"] == result["compared_rows"] == len(sum(result["tokens"], []))
        assert result["deficits"]["max"] < 1e-4
        if result["schedule"] is not None:
            assert 1 <= result["tau"] <= 8 and len(result["acceptance_by_position"]) <= result["draft_length"]
            assert sum(result["shares"].values()) == pytest.approx(1.0, abs=1e-3)
            assert result["reached"] > 0 and result["ideal_speedup"] > 0
        if result["schedule"] == "constant":
            assert 0 <= result["confidence"]["ece"] <= 1 and result["confidence"]["rounds"] > 0
    shown = capsys.readouterr().out
    assert "beyond bare forwards, R=1 7 drafted" in shown and "left out: " in shown
    assert len(re.findall(r"^\| [12] ", shown, re.MULTILINE)) == len(cells)


def test_quick_leaves_some_out_at_batches(tiny_pair, prompts, tmp_path):
    output = tmp_path / "bench.json"
    flags = ["--quick", "--rows", "1", "2", "--max-new-tokens", "6", "--domains", "all", "--no-bare", "--no-deficits"]
    assert bench(tiny_pair, prompts, *flags, "--output", str(output)) == 0
    report = json.loads(output.read_text())
    assert report["arguments"]["limit"] == 4 and report["arguments"]["repeats"] == 1
    assert report["arguments"]["max_new_tokens"] == 6  # what is given counts more
    assert {r["domain"] for r in report["results"]} == {"all"}
    assert {r["method"] for r in report["results"] if r["rows"] == 2} == {*("plain", "7 drafted", "throughput")}
    assert all("deficits" not in r and "reached" not in r for r in report["results"])


def test_sampled_runs_have_no_deficits(tiny_pair, prompts, tmp_path):
    output = tmp_path / "bench.json"
    flags = ["--rows", "1", "--limit", "1", "--max-new-tokens", "8", "--temperature", "1", "--domains", "math"]
    flags += ["--repeats", "1", "--no-baselines", "--schedules", "--no-bare", "--output", str(output)]
    assert bench(tiny_pair, prompts, *flags) == 0
    plain, ours = json.loads(output.read_text())["results"]
    assert (plain["method"], ours["method"]) == ("plain", "7 drafted")
    assert "deficits" not in plain and "deficits" not in ours


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--domains", "prose"], "no prompts of prose: there are math, code, poems"),
        (["--draft-lengths", "8"], "8 is not between 1 and 7"),
        (["--schedules", "always"], "always is not one of confidence, throughput"),
        (["--rows", "0"], "--rows must be at least 1"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--prompts", "no-such-file.jsonl"], "there is no file no-such-file.jsonl"),
    ],
)
def test_refusals(tiny_pair, prompts, capsys, flags, words):
    assert bench(tiny_pair, prompts, *flags) == 1
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


def test_prompt_files_that_are_none(tiny_pair, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    for text, words in (("hello", "line 1: not JSON"), ('{"text": 1}', "neither prompt_ids nor prompt")):
        path.write_text(text + "\n")
        assert bench(tiny_pair, path) == 1
        assert words in capsys.readouterr().err
    path.write_text('{"prompt": "hello"}\n')
    assert bench(tiny_pair, path) == 1
    assert "no tokenizer, so it needs prompt_ids" in capsys.readouterr().err
