"""The benchmarks of load and thresholds run on a tiny pair and report what they say they do."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from golden_set import golden

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import acceptance  # noqa: E402
import load  # noqa: E402
import teacher_forced  # noqa: E402
import thresholds  # noqa: E402


@pytest.fixture
def prompts(tmp_path):
    """Golden prompts under the names of two domains' sources."""
    samples = golden("qwen3_rnn").runs["greedy_thr0.0"]["samples"]
    rows = [sample["output_ids"][: sample["num_input_tokens"]] for sample in samples] * 2
    sources = ["gsm8k", "math500", "mt-bench"] * len(rows)
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"source": source, "prompt_ids": ids}) for source, ids in zip(sources, rows, strict=False)]
    path.write_text("\n".join(lines) + "\n")
    return path


def arguments(tiny_pair, prompts, output):
    target, draft = map(str, tiny_pair)
    flags = ["--target", target, "--draft", draft, "--prompts", str(prompts), "--output", str(output)]
    return flags + ["--domains", "math", "chat", "--dtype", "float32", "--device", "cpu"]


def test_load(tiny_pair, prompts, tmp_path, capsys):
    output = tmp_path / "load.json"
    flags = ["--rows", "1", "2", "--max-new-tokens", "12", "--useless-tokens", "16", "--useless-repeats", "1"]
    flags += ["--table-seconds", "1"]
    load.main(arguments(tiny_pair, prompts, output) + flags)
    text = output.read_text()
    report = json.loads(text)
    assert str(tmp_path) not in text and str(tiny_pair[0]) not in text
    found = {(result["rows"], result["domain"], result["setting"]) for result in report["results"]}
    rules = ("plain", "7 drafted", "confidence", "throughput", "throughput, no copies")
    assert found == {(rows, domain, rule) for rows in (1, 2) for domain in ("math", "chat") for rule in rules}
    for result in report["results"]:
        assert result["tokens_per_second"] > 0 and result["tokens_per_second_by_table"] > 0
        assert result["setting"] == "plain" or 0 <= result["mean_verify_length"] <= 7
        assert result["setting"] != "throughput" or 0 < result["scheduling"] < 1
    (useless,) = report["useless"]
    assert useless["tokens"] == 16 and len(useless["seconds"][0]) == 1
    assert {"cpu", "threads", "torch", "commit"} <= set(report["environment"])
    assert {point["rows"] for point in report["table"]["verify_points"]} == {1, 2}
    assert len(report["verdicts"]) == 2 * 4 * 2 + 2 + 1 + 1
    assert "scheduling takes" in capsys.readouterr().out


def test_rules_follow_the_given_answers(tiny_pair):
    import torch
    from transformers import AutoModelForCausalLM

    from dspark_hf import DSparkDraftModel

    target = AutoModelForCausalLM.from_pretrained(tiny_pair[0])
    draft = DSparkDraftModel.from_pretrained(tiny_pair[1])
    prompts = torch.tensor([[3, 4, 5], [7, 8, 9]])
    options = {"assistant_model": draft, "do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    own = target.generate(prompts, **options)[:, 3:].tolist()
    # the first token is the prompt's to give
    answers = [[row[0], *((token + 1) % target.config.vocab_size for token in row[1:])] for row in own]
    with load.following(answers):
        assert target.generate(prompts, **options)[:, 3:].tolist() == answers
    assert target.generate(prompts, **options)[:, 3:].tolist() == own


def test_acceptance(tiny_pair, prompts, tmp_path, capsys):
    output = tmp_path / "acceptance.json"
    target, draft = map(str, tiny_pair)
    flags = ["--target", target, "--draft", draft, "--beside", draft, "--prompts", str(prompts), "--rows", "2"]
    flags += ["--sources", "gsm8k", "mt-bench", "--limit", "3", "--dtype", "float32", "--max-new-tokens", "10"]
    acceptance.main([*flags, "--output", str(output)])
    text = output.read_text()
    assert str(tmp_path) not in text and target not in text and draft not in text
    results = json.loads(text)["results"]
    ways = [(result["temperature"], result["source"]) for result in results]
    assert ways == [(heat, source) for heat in (0.0, 1.0) for source in ("gsm8k", "mt-bench", "all")] * 2
    greedy = [result for result in results if result["temperature"] == 0.0]
    assert [result["tau"] for result in greedy[:3]] == [result["tau"] for result in greedy[3:]], "the same draft"
    first, second, whole = greedy[:3]
    assert min(first["tau"], second["tau"]) <= whole["tau"] <= max(first["tau"], second["tau"])
    assert whole["mean_of_sources"] == pytest.approx((first["tau"] + second["tau"]) / 2)
    sources = [json.loads(line)["source"] for line in prompts.read_text().splitlines()]
    assert whole["prompts"] == sum(min(3, sources.count(source)) for source in ("gsm8k", "mt-bench"))
    assert whole["tau"] > 1
    assert len(whole["acceptance_by_position"]) == 7 and whole["acceptance_by_position"][0] > 0.3
    assert "mean of sources" in capsys.readouterr().out


def test_teacher_forced(tiny_pair, tmp_path, capsys):
    samples = golden("qwen3_rnn").runs["greedy_thr0.0"]["samples"]
    cut = [(sample["output_ids"], sample["num_input_tokens"]) for sample in samples]
    data, output = tmp_path / "answers.jsonl", tmp_path / "teacher_forced.json"
    data.write_text("".join(json.dumps({"prompt_ids": ids[:n], "response_ids": ids[n:]}) + "\n" for ids, n in cut))
    target, draft = map(str, tiny_pair)
    own = tmp_path / "own"
    shutil.copytree(draft, own)
    arguments = {"batch_size": 2, "accumulate": 3, "anchors": 5, "head": "rnn", "rank": 8}
    record = {"arguments": arguments, "steps": 7, "epochs": 1.5, "processes": 1}
    (own / "training.json").write_text(json.dumps(record))
    flags = ["--target", target, "--drafts", draft, str(own), "--data", str(data), "--dtype", "float32"]
    teacher_forced.main([*flags, "--anchors", "8", "--output", str(output)])
    text = output.read_text()
    assert str(tmp_path) not in text and target not in text
    first, second = json.loads(text)["results"]
    assert first["training"] is None
    assert second["training"] == {"steps": 7, "blocks": 210, "epochs": 1.5, "head": "rnn, rank 8"}
    assert first["tau"] == second["tau"] > 1.5, "the same draft, on the same anchors"
    assert len(first["acceptance"]) == 7 and first["acceptance"][0] > 0.3
    assert "accepted by slot" in capsys.readouterr().out


def test_prompts_of_a_domain_take_turns():
    assert load.take_turns([[[1], [2], [3], [4]], [[10], [20]]]) == [[1], [10], [2], [3], [20], [4]]


def test_useless_copy_is_sure_and_leaves_the_draft_alone(tiny_pair):
    import torch

    from dspark_hf import DSparkDraftModel

    draft = DSparkDraftModel.from_pretrained(tiny_pair[1])
    before = {name: parameter.clone() for name, parameter in draft.named_parameters()}
    rigged = load.useless_copy(draft)
    assert all(torch.equal(parameter, before[name]) for name, parameter in draft.named_parameters())
    assert not torch.equal(rigged.fc.weight, draft.fc.weight)
    head = rigged.confidence_head
    assert head.proj.weight.abs().sum() == 0 and head.proj.bias.item() == 4.0


def test_thresholds(tiny_pair, prompts, tmp_path, capsys):
    output = tmp_path / "thresholds.json"
    flags = ["--rows", "2", "--max-new-tokens", "24", "--thresholds", "0", "0.5", "0.9"]
    thresholds.main(arguments(tiny_pair, prompts, output) + flags)
    text = output.read_text()
    report = json.loads(text)
    assert str(tmp_path) not in text
    assert [(r["domain"], r["threshold"]) for r in report["results"]] == [
        (domain, threshold) for domain in ("math", "chat") for threshold in (0.0, 0.5, 0.9)
    ]
    for domain in ("math", "chat"):
        rows = [result for result in report["results"] if result["domain"] == domain]
        lengths = [result["mean_verify_length"] for result in rows]
        assert lengths == sorted(lengths, reverse=True)
        assert rows[0]["tokens_per_step"] >= rows[-1]["tokens_per_step"] >= 1
    assert "tokens per step" in capsys.readouterr().out


def test_thresholds_plot(tiny_pair, prompts, tmp_path):
    pytest.importorskip("matplotlib")
    flags = ["--rows", "1", "--max-new-tokens", "8", "--thresholds", "0", "0.5", "--plot", str(tmp_path / "sweep.png")]
    thresholds.main(arguments(tiny_pair, prompts, tmp_path / "out.json") + flags)
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
