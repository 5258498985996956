"""`dspark-hf calibrate` and `dspark-hf profile`: what they record, report and save, and that decoding reads it."""

from __future__ import annotations

import json

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from golden_set import golden
from planted import planted_draft, planted_for, random_draft
from running import assisted
from schedules import use_schedule
from targets import build, clear_prompts, plain_greedy
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDraftModel
from dspark_hf.calibration_run import RoundRecorder, calibrate, describe, record_confidence, save_calibration
from dspark_hf.cli import main
from dspark_hf.confidence_metrics import ConfidenceRecord
from dspark_hf.stats import RoundEvent

CALIBRATION = {
    "temperature": [0.5, 1.0, 2.0, 1.5, 1.0, 0.8, 3.0],
    "shift": [-0.4, 0.0, 0.3, -1.0, 0.0, 0.2, 0.5],
}


def inputs(rows):
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.ones(len(rows), len(rows[0]), dtype=torch.long)}


# ------------------------------------------------------------------------------------------------------- recording


def test_live_rounds_with_everything_verified():
    """One entry per row and round: the raw confidences, whatever calibration the draft has, and what came of them."""
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, (7, 7, 7), 64)
    draft = use_schedule(planted_for(target, rows, confidence=[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]), "confidence", 0.75)
    draft.config.confidence_calibration = CALIBRATION
    before = draft.config.to_dict(), draft.generation_config.to_dict()
    seen = []
    record = record_confidence(target, draft, [inputs(rows)], max_new_tokens=40, progress=seen.append)
    assert (draft.config.to_dict(), draft.generation_config.to_dict()) == before and seen == [3]
    full = record.lengths == 7
    assert full.float().mean() > 0.6  # all but the last rounds of a row
    expected = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]).expand(int(full.sum()), -1)
    torch.testing.assert_close(record.logits[full].sigmoid(), expected, atol=1e-5, rtol=0)
    assert set(record.accepted[full].tolist()) == {0, 3, 7}  # as planted
    assert record.groups.unique().tolist() == [0, 1, 2]


def test_every_prompt_is_a_group():
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, (7,) * 5, 32)
    draft = random_draft(target)
    record = record_confidence(target, draft, [inputs(rows[:3]), inputs(rows[3:])], max_new_tokens=12)
    assert record.groups.unique().tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="no drafted round"):
        record_confidence(target, draft, [inputs(rows[:2])], max_new_tokens=1)
    headless = random_draft(target, enable_confidence_head=False, confidence_head_with_markov=False)
    with pytest.raises(ValueError, match="no confidence head"):
        record_confidence(target, headless, [inputs(rows[:2])])


def test_rounds_cut_by_a_stop_tell_nothing_about_what_came_after():
    def event(verified, accepted, committed):
        return RoundEvent(0, [0], [[1] * verified], [[0.5] * verified], None, [verified], [accepted], [committed], 0, 0)

    recorder = RoundRecorder([42])
    recorder.on_round(event(7, 3, [1, 2, 3, 4]))  # a rejection: later slots are known to be lost
    recorder.on_round(event(7, 7, [1] * 8))
    recorder.on_round(event(7, 3, [1, 2, 3]))  # end of sequence as the third drafted token
    recorder.on_round(event(2, 1, [1, 2]))
    recorder.on_round(event(0, 0, [1]))  # nothing verified
    record = recorder.record()
    assert record.lengths.tolist() == [7, 7, 3, 2] and record.accepted.tolist() == [3, 7, 3, 1]
    assert record.groups.tolist() == [42] * 4 and record.logits.shape == (4, 7)


def biased_record(rounds=3000, slots=5, bias=1.2) -> ConfidenceRecord:
    """Confidences too high by a shift that no temperature can mend."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rounds, slots, generator=generator)
    taken = torch.rand(rounds, slots, generator=generator) < (logits - bias).sigmoid()
    accepted = taken.long().cumprod(1).sum(1)
    return ConfidenceRecord(logits, accepted, torch.full((rounds,), slots), torch.arange(rounds) // 20)


def test_a_bias_needs_the_shift_and_the_report_says_so():
    result = calibrate(biased_record(), 7)
    assert result.forms[:3] == ["temperature+shift"] * 3 and result.forms[5:] == ["identity"] * 2
    assert len(result.temperature) == len(result.shift) == 7
    assert result.after.ece_mean < 0.5 * result.before.ece_mean and result.after.ece_mean < 0.03
    assert result.after.ece_mean < result.sts.ece_mean
    assert result.after.auc_mean == pytest.approx(result.before.auc_mean, abs=0.05)
    text = describe(result)
    assert "temperature+shift" in text and "STS" in text and "AUC" in text and "Brier" in text
    assert f"{result.noise_floor:.3f}" in text and f"{result.num_held_out} of other prompts" in text
    with pytest.raises(ValueError, match="three prompts"):
        calibrate(biased_record(rounds=40), 7)


# ---------------------------------------------------------------------------------------------- kept with the draft


def test_decoding_reads_the_calibration_that_was_saved(tmp_path):
    """save_pretrained, from_pretrained, generate(): the confidences of a round are the calibrated ones."""
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, (7,), 64)
    draft = random_draft(target)
    first = assisted(target, draft, rows, max_new_tokens=16).dspark_stats.round_events
    draft.config.confidence_calibration = CALIBRATION
    draft.save_pretrained(tmp_path)
    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    assert loaded.config.confidence_calibration == CALIBRATION
    second = assisted(target, use_schedule(loaded, "constant"), rows, max_new_tokens=16).dspark_stats.round_events
    assert len(first) == len(second)
    for raw, calibrated in zip(first, second, strict=True):
        assert raw.drafted == calibrated.drafted and raw.accepted == calibrated.accepted
        if raw.confidence is None:
            continue
        slots = len(raw.confidence[0])
        logits = torch.logit(torch.tensor(raw.confidence))
        temperature, shift = (torch.tensor(CALIBRATION[name][:slots]) for name in ("temperature", "shift"))
        torch.testing.assert_close(
            torch.tensor(calibrated.confidence), (logits / temperature + shift).sigmoid(), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("calibration", [{"temperature": [2.0] * 7}, {"shift": [-0.5] * 7}])
def test_half_a_calibration_is_one_too(calibration):
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, (7,), 64)
    draft = planted_for(target, rows, confidence=[0.8] * 7)
    draft.config.confidence_calibration = calibration
    event = assisted(target, draft, rows, max_new_tokens=16).dspark_stats.round_events[0]
    logit = torch.logit(torch.tensor(0.8)) / calibration.get("temperature", [1])[0] + calibration.get("shift", [0])[0]
    assert event.confidence[0] == pytest.approx([logit.sigmoid().item()] * 7, abs=1e-5)


def test_cuts_follow_the_calibrated_scores():
    """A threshold between the raw and the calibrated score; the output stays plain generate()'s."""
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, (7,), 64)
    draft = use_schedule(planted_draft(target), "confidence", 0.6)
    for shift, kept in ((0.0, 7), (-2.0, 0)):
        draft.config.confidence_calibration = {"temperature": [1.0] * 7, "shift": [0.0] * 3 + [shift] * 4}
        draft.plan([rows[0] + plain_greedy(target, rows, 64)[0]], confidence=[0.8] * 7)
        output = assisted(target, draft, rows)
        assert output.sequences[0, 7:].tolist() == plain_greedy(target, rows, 64)[0]
        assert output.dspark_stats.round_events[0].verify_lengths == [kept or 3]


def test_an_own_folder_keeps_its_weights_and_another_packaging_is_refused(tmp_path, tiny_pair):
    result = calibrate(biased_record(slots=7), 7)
    draft = random_draft(build("qwen3"))
    draft.save_pretrained(tmp_path / "own")
    weights = (tmp_path / "own" / "model.safetensors").read_bytes()
    save_calibration(draft, result, tmp_path / "own")
    assert (tmp_path / "own" / "model.safetensors").read_bytes() == weights
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert DSparkDraftModel.from_pretrained(tmp_path / "own").config.confidence_calibration == result.to_config()
    save_calibration(draft, result, tmp_path / "new")
    assert DSparkDraftModel.from_pretrained(tmp_path / "new").config.confidence_calibration == result.to_config()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ValueError, match="another packaging"):
        save_calibration(draft, result, foreign)


# ----------------------------------------------------------------------------------------------------- the commands


@pytest.fixture
def prompts(tmp_path):
    """The golden prompts, several times over with another first token, as JSONL."""
    samples = golden("qwen3_rnn").runs["greedy_thr0.0"]["samples"]
    rows = [sample["output_ids"][: sample["num_input_tokens"]] for sample in samples]
    rows += [[token, *row[1:]] for row in rows for token in (7, 11)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_ids": row}) + "\n" for row in rows))
    return path


def run(capsys, *argv):
    status = main([str(argument) for argument in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_calibrate_reports_and_saves(capsys, tiny_pair, prompts, tmp_path):
    target, draft = tiny_pair
    output = tmp_path / "calibrated"
    status, out, err = run(
        capsys, "calibrate", target, draft, "--prompts", prompts, "--output", output, "--max-new-tokens", "48"
    )
    assert status == 0, err
    assert "mean" in out and "STS" in out and "calibration saved" in out
    text = (output / "calibration.json").read_text()
    report = json.loads(text)
    assert str(tmp_path) not in text and str(target) not in text
    slots = len(report["temperature"])
    assert len(report["before"]["per_position"]) == len(report["after"]["per_position"]) == slots
    assert {"ece", "auc", "brier", "reliability"} <= set(report["after"]["per_position"][0])
    assert {"before", "sts", "after", "noise_floor", "forms", "setting", "sts_temperature"} <= set(report)
    assert report["setting"]["max_new_tokens"] == 48 and "torch" in report["setting"]["versions"]
    loaded = DSparkDraftModel.from_pretrained(output)
    assert loaded.config.confidence_calibration == {key: report[key] for key in ("temperature", "shift")}
    # and once more in place, with the raw confidences again: the same fit
    status, out, err = run(capsys, "calibrate", target, output, "--prompts", prompts, "--max-new-tokens", "48")
    assert status == 0, err
    again = json.loads((output / "calibration.json").read_text())
    assert again["temperature"] == pytest.approx(report["temperature"], rel=1e-3)
    assert again["before"]["summary"] == pytest.approx(report["before"]["summary"], rel=1e-3)
    model = AutoModelForCausalLM.from_pretrained(target)
    ids = torch.tensor([json.loads(prompts.read_text().splitlines()[0])["prompt_ids"]])
    plain = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
    draft = use_schedule(DSparkDraftModel.from_pretrained(output), "confidence", 0.5)
    speculative = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0, assistant_model=draft)
    assert torch.equal(plain, speculative)


def test_calibrate_reads_text_and_samples(capsys, tmp_path):
    target = build("qwen3")
    target.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    random_draft(target).save_pretrained(tmp_path / "draft")
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo more\nand a third\nfour\n")
    argv = ["calibrate", tmp_path / "target", tmp_path / "draft", "--prompts", file, "--max-new-tokens", "12"]
    status, out, err = run(capsys, *argv, "--temperature", "1.5", "--no-save", "--limit", "3", "--batch-size", "2")
    assert status == 0, err
    assert "saved with" not in out and not (tmp_path / "draft" / "calibration.json").exists()
    status, out, err = run(capsys, *argv, "--report", tmp_path / "report", "--no-save")
    assert status == 0 and json.loads((tmp_path / "report" / "calibration.json").read_text())["num_fit"] > 0


def test_reliability_diagram(capsys, tiny_pair, prompts, tmp_path):
    pytest.importorskip("matplotlib")
    argv = ["calibrate", *tiny_pair, "--prompts", prompts, "--no-save", "--report", tmp_path, "--max-new-tokens", "24"]
    status, out, _ = run(capsys, *argv)
    assert status == 0 and "reliability.png" in out
    assert (tmp_path / "reliability.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["TARGET", "DRAFT", "--prompts", "PROMPTS"], "--output"),
        (["TARGET", "DRAFT", "--prompts", "no-such-file.jsonl", "--no-save"], "no-such-file"),
        (["TARGET", "DRAFT", "--prompts", "PROMPTS", "--no-save", "--limit", "2"], "three prompts"),
        (["TARGET", "DRAFT", "--prompts", "PROMPTS", "--no-save", "--held-out", "1"], "--held-out"),
    ],
)
def test_calibrate_refuses_in_one_line(capsys, tiny_pair, prompts, argv, words):
    places = {"TARGET": tiny_pair[0], "DRAFT": tiny_pair[1], "PROMPTS": prompts}
    status, _, err = run(capsys, "calibrate", *(places.get(word, word) for word in argv))
    assert status == 1
    message = err[err.index("dspark-hf calibrate: ") :]
    assert words in message and "Traceback" not in err


def test_profile_prints_saves_and_draws(capsys, tiny_pair, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    flags = ["--rows", "1", "2", "--context", "16", "64", "--seconds", "1.5"]
    status, out, err = run(capsys, "profile", *tiny_pair, *flags)
    assert status == 0, err
    assert "context 16" in out and "context 64" in out and "8 tokens" in out and "saved as" in out
    (path,) = (tmp_path / "dspark_hf" / "profiles").iterdir()
    status, out, _ = run(capsys, "profile", *tiny_pair, *flags, "--json", "--no-save")
    report = json.loads(out)
    assert status == 0 and report["path"] is None
    assert {(point["rows"], point["context"]) for point in report["verify_points"]} == {
        (rows, context) for rows in (1, 2) for context in (16, 64)
    }
    assert json.loads(path.read_text())["fields"] == report["fields"]
    status, _, err = run(capsys, "profile", *tiny_pair, "--rows", "0")
    assert status == 1 and "--rows" in err


def test_profile_plot(capsys, tiny_pair, tmp_path):
    pytest.importorskip("matplotlib")
    flags = ["--rows", "1", "--seconds", "1", "--no-save", "--plot", tmp_path / "cost.png"]
    assert run(capsys, "profile", *tiny_pair, *flags)[0] == 0
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
