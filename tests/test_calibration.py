"""Confidence metrics against the official recorder's numbers, and recovery of known miscalibration."""

import json
import math
import sys

import pytest
import torch
from conftest import TINY_GOLDEN
from safetensors.torch import load_file

from dspark_hf.calibration import (
    ConfidenceRecord,
    apply_calibration,
    auc,
    brier,
    ece,
    ece_floor,
    fit_calibration,
    fit_temperatures,
    measure_confidence,
    survival_from_logits,
)

# ------------------------------------------------------------------------------------------------ official numbers


def read_golden(folder):
    folder = folder / "confidence_metrics"
    return load_file(folder / "record.safetensors"), json.loads((folder / "metrics.json").read_text())


def golden_record(tensors, name):
    lengths = tensors[f"{name}.effective_proposal_length"]
    accepted = torch.minimum(tensors[f"{name}.accept_prefix_mask"].sum(1), lengths)
    return ConfidenceRecord(tensors[f"{name}.confidence_logits"], accepted, lengths)


def assert_same(found, expected, where):
    """Equal structure; counts and bins exactly, averages to the rounding of a float32 sigmoid."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f"{where}[{i}]")
    elif expected is None or not isinstance(expected, float):
        assert found == expected, where
    else:
        assert found == pytest.approx(expected, rel=0, abs=1e-7 if where.endswith("avg_pred") else 3e-9), where


def compare_with_the_official_recorder(folder, name):
    tensors, metrics = read_golden(folder)
    expected = metrics["records"][name]
    found = measure_confidence(golden_record(tensors, name), None, None, metrics["num_bins"], metrics["num_fine_bins"])
    found = found.to_dict()
    assert_same(found["per_position"], expected["row"]["per_position"], name)
    assert_same(found["summary"], expected["summary"], name)
    for position, reference in zip(found["per_position"], expected["row"]["per_position"], strict=True):
        assert position["auc"] == reference["auc"]
        assert position["total_weight"] == reference["total_weight"]
        for ours, theirs in zip(position["reliability"], reference["reliability"], strict=True):
            assert (ours["bin"], ours["weight"], ours["range"]) == (theirs["bin"], theirs["weight"], theirs["range"])


@pytest.mark.parametrize("name", ["ragged", "saturated"])
def test_metrics_equal_the_official_recorder_on_a_subset(name):
    compare_with_the_official_recorder(TINY_GOLDEN, name)


@pytest.mark.parametrize("name", ["full", "calibrated", "ragged", "saturated"])
def test_metrics_equal_the_official_recorder(golden_folder, name):
    compare_with_the_official_recorder(golden_folder, name)


# ------------------------------------------------------------------------------------------------ metrics by hand


def test_metrics_by_hand():
    predicted = torch.tensor([0.1, 0.12, 0.9, 0.9], dtype=torch.float64)
    outcome = torch.tensor([0, 1, 1, 1])
    assert ece(predicted, outcome) == pytest.approx((abs(0.22 - 1) + abs(1.8 - 2)) / 4)
    assert brier(predicted, outcome) == pytest.approx((0.01 + 0.88**2 + 0.01 + 0.01) / 4)
    assert auc(predicted, outcome) == 1.0
    assert auc(predicted, torch.tensor([1, 0, 0, 0])) == 0.0
    assert auc(torch.tensor([0.5, 0.5]), torch.tensor([0, 1])) == 0.5  # ties count half
    assert math.isnan(auc(predicted, torch.ones(4)))
    nothing = torch.zeros(0, dtype=torch.float64)
    assert math.isnan(ece(nothing, nothing)) and math.isnan(brier(nothing, nothing))


def test_auc_equals_pair_counting():
    generator = torch.Generator().manual_seed(0)
    predicted = torch.randint(0, 50, (200,), generator=generator).double() / 50
    outcome = (torch.rand(200, generator=generator) < predicted).long()
    positive, negative = predicted[outcome == 1], predicted[outcome == 0]
    difference = positive[:, None] - negative[None, :]
    pairs = ((difference > 0).double() + 0.5 * (difference == 0).double()).mean()
    assert auc(predicted, outcome) == pytest.approx(float(pairs))


def test_survival_is_clamped_and_multiplied_in_double():
    logits = torch.tensor([[100.0, 0.0, -100.0]])
    assert survival_from_logits(logits)[0].tolist() == pytest.approx([1 - 1e-8, 0.5, 1e-8])
    assert survival_from_logits(logits).dtype == torch.float64


def test_apply_calibration_is_per_slot_and_keeps_shape_and_dtype():
    logits = torch.randn(2, 3, 4, dtype=torch.bfloat16)
    temperature, shift = [1.0, 2.0, 4.0, 8.0, 16.0], [0.0, 1.0, 0.0, -1.0, 5.0]
    out = apply_calibration(logits, temperature, shift)  # a capped block uses the first slots
    assert out.shape == logits.shape and out.dtype == logits.dtype
    assert torch.equal(out[..., 0], logits[..., 0])
    assert torch.allclose(out[..., 3].float(), logits[..., 3].float() / 8 - 1, atol=0.02)
    assert apply_calibration(logits) is logits


# ------------------------------------------------------------------------------------------------ records


def synthetic(num_rounds, temperature, shift, seed=0, slots=5, rounds_per_prompt=10, spread=1.5, center=0.8):
    """Rounds whose true score is sigmoid(z / temperature + shift)."""
    generator = torch.Generator().manual_seed(seed)
    logits = center + spread * torch.randn(num_rounds, slots, generator=generator)
    true = torch.sigmoid(logits / torch.tensor(temperature) + torch.tensor(shift))
    accepted = (torch.rand(num_rounds, slots, generator=generator) < true).long().cumprod(1).sum(1)
    groups = torch.arange(num_rounds) // rounds_per_prompt
    return ConfidenceRecord(logits, accepted, torch.full((num_rounds,), slots), groups)


def test_split_keeps_prompts_whole_and_concatenate_keeps_them_apart():
    record = synthetic(200, [1.0] * 5, [0.0] * 5)
    first, second = record.split(0.25, seed=3)
    assert len(first) == 50 and len(second) == 150
    assert not set(first.groups.tolist()) & set(second.groups.tolist())
    both = ConfidenceRecord.concatenate([record, record])
    assert len(both) == 400 and len(both.groups.unique()) == 40


def test_record_from_round_events():
    record = ConfidenceRecord.from_rounds([[0.5, 1.0, 0.25], [0.75]], [1, 0], [3, 1], [7, 8])
    assert record.logits.shape == (2, 3) and record.logits.isfinite().all()
    assert torch.sigmoid(record.logits)[record.known].tolist() == pytest.approx([0.5, 1.0, 0.25, 0.75], abs=1e-6)
    assert record.groups.tolist() == [7, 8] and record.prefix_accepted.tolist() == [[True, False, False], [False] * 3]


@pytest.mark.parametrize(
    "logits,accepted,lengths,message",
    [
        (torch.zeros(3), [0, 0, 0], [1, 1, 1], r"\[N, K\]"),
        (torch.zeros(2, 3), [0], [1, 1], "accepted"),
        (torch.zeros(2, 3), [2, 0], [1, 1], "accepted <= lengths"),
        (torch.zeros(2, 3), [0, 0], [4, 1], "lengths <= K"),
    ],
)
def test_records_are_checked(logits, accepted, lengths, message):
    with pytest.raises(ValueError, match=message):
        ConfidenceRecord(logits, accepted, lengths)


# ------------------------------------------------------------------------------------------------ recovery


def test_sts_recovers_temperatures():
    true = [3.0, 2.0, 0.5, 1.0, 1.5]
    record = synthetic(20_000, true, [0.0] * 5)
    found = fit_temperatures(record)
    for k, (got, wanted) in enumerate(zip(found, true, strict=True)):
        # later slots have fewer live rounds and a small product, so they are known less well
        assert abs(math.log(got / wanted)) < (0.15 if k < 2 else 0.6), (k, got, wanted)
    held_out = synthetic(20_000, true, [0.0] * 5, seed=1)
    before, after = measure_confidence(held_out), measure_confidence(held_out, found)
    assert after.ece_mean < 0.015 < before.ece_mean / 2


def test_a_bias_needs_the_shift():
    """Logits near 0 with a bias of -1: no temperature moves them."""
    shift = [-1.0] * 5
    fit = synthetic(3000, [1.0] * 5, shift, spread=0.8, center=0.1)
    held_out = synthetic(3000, [1.0] * 5, shift, seed=1, spread=0.8, center=0.1)
    result = fit_calibration(fit, held_out)
    assert result.before.ece_mean > 0.06
    assert result.after.ece_mean <= 0.03 and result.after.ece_mean <= result.before.ece_mean / 2
    assert result.sts.ece_mean > 2 * result.after.ece_mean
    assert result.forms[0] == "temperature+shift"
    assert result.shift[0] == pytest.approx(-1.0, abs=0.2)
    # temperature is positive and one per slot, so the order of the scores in a slot cannot change
    assert all(t > 0 for t in result.temperature)
    first = result.after.per_position[0]
    assert first.auc == pytest.approx(result.before.per_position[0].auc, abs=0.005)


def test_a_calibrated_head_is_left_alone():
    fit = synthetic(4000, [1.0] * 5, [0.0] * 5)
    held_out = synthetic(4000, [1.0] * 5, [0.0] * 5, seed=1)
    result = fit_calibration(fit, held_out)
    assert result.after.ece_mean <= result.before.ece_mean + 0.005
    assert result.after.ece_mean < 2 * result.noise_floor + 0.005


def test_noise_floor_is_what_a_perfect_head_shows():
    found, floors = [], []
    for seed in range(20):
        record = synthetic(400, [1.0] * 5, [0.0] * 5, seed=seed)
        found.append(measure_confidence(record).ece_mean)
        floors.append(ece_floor(record))
    assert sum(found) / sum(floors) == pytest.approx(1.0, abs=0.1)
    assert ece_floor(synthetic(6400, [1.0] * 5, [0.0] * 5)) == pytest.approx(floors[0] / 4, rel=0.1)


def test_folds_keep_prompts_whole():
    record = synthetic(200, [1.0] * 5, [0.0] * 5)
    fold = record.folds(5)
    assert set(fold.tolist()) == set(range(5))
    for group in record.groups.unique():
        assert len(fold[record.groups == group].unique()) == 1


def test_slots_nobody_reached_stay_raw():
    record = synthetic(300, [2.0] * 5, [0.0] * 5)
    lengths = record.lengths.clamp(max=2)
    short = ConfidenceRecord(record.logits, torch.minimum(record.accepted, lengths), lengths, record.groups)
    assert fit_temperatures(short)[2:] == [1.0, 1.0, 1.0]
    result = fit_calibration(*short.split())
    assert result.temperature[2:] == [1.0] * 3 and result.shift[2:] == [0.0] * 3
    assert result.forms[2:] == ["identity"] * 3


def test_report_is_json_and_fits_the_config():
    result = fit_calibration(*synthetic(400, [2.0] * 5, [0.0] * 5).split())
    report = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert report["temperature"] == result.to_config()["temperature"] and len(report["shift"]) == 5
    assert {"before", "sts", "after"} <= report.keys()
    assert report["num_fit"] + report["num_held_out"] == 400


def test_fit_refuses_too_little():
    record = synthetic(1, [1.0] * 5, [0.0] * 5)
    with pytest.raises(ValueError, match="rounds"):
        fit_calibration(record, record)
    with pytest.raises(ValueError, match="two groups"):
        record.split()
    more = synthetic(100, [1.0] * 5, [0.0] * 5)
    with pytest.raises(ValueError, match="folds"):
        fit_calibration(more, more, folds=1)


# ------------------------------------------------------------------------------------------------ pictures


def test_plots_write_an_image(tmp_path):
    pytest.importorskip("matplotlib")
    from dspark_hf.plots import plot_profile, plot_reliability
    from dspark_hf.throughput import DraftPoint, ThroughputProfile, VerifyPoint

    result = fit_calibration(*synthetic(200, [2.0] * 5, [0.0] * 5).split())
    points = [VerifyPoint(rows, rows * width, 256, 0.05 + 0.002 * rows * width) for rows in (1, 4) for width in (1, 8)]
    drafts = [DraftPoint(rows, 0.01 * rows, tokens=tokens) for rows in (1, 4) for tokens in (2, 7)]
    profile = ThroughputProfile({"device": "test"}, points, drafts)
    for path in (
        plot_reliability(result, tmp_path / "a.png"),
        plot_reliability(result.after, tmp_path / "b" / "b.png"),
        plot_profile(profile, tmp_path / "c.png"),
    ):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_plots_name_the_missing_package(tmp_path, monkeypatch):
    from dspark_hf.plots import plot_reliability

    for module in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot_reliability(measure_confidence(synthetic(20, [1.0] * 5, [0.0] * 5)), tmp_path / "a.png")
