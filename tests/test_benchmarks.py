"""The generation benchmark runs on a tiny pair and reports what it says it does."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import generate as benchmark  # noqa: E402

from dspark_hf.benchmarking import prompts as prompt_files  # noqa: E402


@pytest.fixture
def prompts(tmp_path):
    """A prompt file with two sources, and one prompt holding a line break that is not a line feed."""
    rows = [
        {"source": "a", "prompt_ids": [38, 154, 86, 151, 46]},
        {"source": "a", "prompt": "x\u2028y", "prompt_ids": [146, 38, 154, 86, 151, 109, 20]},
        {"source": "b", "prompt_ids": [139, 115, 50]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_prompts_become_left_padded_batches_of_one_source(prompts):
    def no_tokenizer():
        raise AssertionError("every line has prompt_ids")

    found = prompt_files.read_prompts(prompts, no_tokenizer)
    assert {source: len(ids) for source, ids in found.items()} == {"a": 2, "b": 1}
    assert set(prompt_files.read_prompts(prompts, no_tokenizer, sources=["b"])) == {"b"}
    assert len(prompt_files.read_prompts(prompts, no_tokenizer, limit=1)["a"]) == 1
    with pytest.raises(ValueError, match="no prompts of c"):
        prompt_files.read_prompts(prompts, no_tokenizer, sources=["c"])

    first, second = prompt_files.make_batches(found, 2, pad=0)
    assert (first.source, second.source) == ("a", "b")
    assert first.input_ids[0].tolist() == [0, 0, 38, 154, 86, 151, 46]
    assert first.attention_mask.sum(1).tolist() == [5, 7]
    assert second.input_ids.tolist() == [[139, 115, 50]] * 2  # a short last batch starts over


def test_report_of_a_run(prompts, tiny_pair, tmp_path, capsys):
    target, draft = map(str, tiny_pair)
    output = tmp_path / "out" / "report.json"
    argv = ["--target", target, "--draft", draft, "--prompts", str(prompts), "--output", str(output)]
    argv += ["--rows", "1", "2", "--dtypes", "float32", "--draft-lengths", "3", "7", "--schedules", "confidence"]
    argv += ["--max-new-tokens", "16", "--repeats", "1", "--device", "cpu"]
    benchmark.main(argv)

    text = output.read_text()
    report = json.loads(text)
    assert str(tmp_path) not in text and target not in text  # where folders lie is nobody's business
    assert {"cpu", "cores", "threads", "memory_gib", "torch", "transformers", "commit"} <= set(report["environment"])
    settings = {(result["rows"], result["source"], result["setting"]) for result in report["results"]}
    names = ("plain", "3 drafted", "7 drafted", "confidence")
    assert settings == {(rows, source, name) for rows in (1, 2) for source in ("all", "a", "b") for name in names}
    for result in report["results"]:
        assert result["tokens_per_second"] > 0
        if result["setting"] != "plain":
            assert result["identical_rows"] == result["compared_rows"] and result["tau"] >= 1
        if result["schedule"] == "constant":
            assert result["overhead"] > 0 and result["ideal_speedup"] > 0
            assert result["bare_draft_seconds"] > 0 and result["bare_verify_seconds"] > 0
    assert "7 drafted" in capsys.readouterr().out
