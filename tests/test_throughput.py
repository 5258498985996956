"""Cost table: measuring under a budget with a fake clock, monotone interpolation, fingerprints, damaged files."""

import json
import logging

import pytest
import torch

from dspark_hf.cost_curves import flattened, isotonic
from dspark_hf.fingerprints import device_name, fingerprint, fingerprint_fields, profile_path
from dspark_hf.scheduling import schedule
from dspark_hf.throughput import DraftPoint, ThroughputProfile, VerifyPoint


class FakeMachine:
    """A clock that advances by a known cost at each call, plus a first-call penalty and outliers where asked for."""

    def __init__(self, base=0.04, per_row=0.004, per_token=0.002, per_context=1e-5, draft=0.01, cold=0.0):
        self.now, self.calls, self.cold, self.draft_cost = 0.0, [], cold, draft
        self.base, self.per_row, self.per_token, self.per_context = base, per_row, per_token, per_context
        self.spikes = {}

    def clock(self):
        return self.now

    def cost(self, rows, tokens, context):
        return self.base + self.per_row * rows + self.per_token * tokens + self.per_context * context * rows

    def verify(self, rows, per_row, context):
        self.calls.append((rows, per_row, context))
        self.now += self.cost(rows, rows * per_row, context) + self.spikes.pop(len(self.calls), 0.0)
        self.now += self.cold if len(self.calls) == 1 else 0.0

    def draft(self, rows):
        self.calls.append(("draft", rows))
        self.now += self.draft_cost * (1 + 0.1 * rows)

    def measure(self, **options):
        return ThroughputProfile.measure(self.verify, self.draft, clock=self.clock, **options)


SURE = 10**8  # samples of a point that leave nothing to chance
FIELDS = {"target": "Tiny", "target_sizes": {"hidden_size": 64}, "threads": 2}


def test_affine_costs_are_read_exactly_between_and_beyond_the_points():
    machine = FakeMachine()
    profile = machine.measure(rows=(2, 4, 16), contexts=(128, 512), time_budget=100.0)
    for rows, tokens, context in [(2, 2, 128), (3, 9, 128), (4, 13, 300), (8, 40, 512), (24, 100, 512), (3, 24, 1000)]:
        assert profile.verify_seconds(tokens, rows, context) == pytest.approx(machine.cost(rows, tokens, context))
    assert profile.plain_seconds(4, 128) == pytest.approx(machine.cost(4, 4, 128))
    assert profile.draft_seconds(8) == pytest.approx(0.018)
    assert profile.seconds(12, 4, 128) == pytest.approx(machine.cost(4, 12, 128) + 0.014)


def test_table_is_monotone_positive_and_kept():
    noisy = [VerifyPoint(1, t, 256, s, SURE) for t, s in [(1, 0.043), (2, 0.041), (4, 0.045), (8, 0.052)]]
    noisy += [VerifyPoint(4, t, 256, s, SURE) for t, s in [(4, 0.060), (8, 0.055), (16, 0.058), (32, 0.110)]]
    profile = ThroughputProfile(FIELDS, noisy)
    for rows in (1, 2, 3, 4, 9):
        table = profile.cost_table(rows * 8, rows, 300)
        assert table.shape[0] == rows * 8 + 1
        assert (table[1:] >= table[:-1]).all() and (table > 0).all()
        assert profile.cost_table(rows * 8, rows, 310) is table  # same context step: no new table
        assert profile.cost_table(rows, rows, 310) is table
    assert profile.verify_seconds(4, 4) == profile.verify_seconds(8, 4) == pytest.approx(0.0575, rel=1e-3)
    assert profile.draft_seconds(3) == 0.0


def test_drafts_of_fewer_tokens_cost_less():
    points = [DraftPoint(rows, 0.01 + 0.002 * rows * tokens, tokens=tokens) for rows in (1, 4) for tokens in (7, 2)]
    profile = ThroughputProfile({}, [VerifyPoint(1, 1, 0, 0.1)], points)
    for tokens in range(1, 8):
        assert profile.draft_seconds(2, tokens) == pytest.approx(0.01 + 0.004 * tokens)
    assert profile.draft_seconds(2) == profile.draft_seconds(2, 9) == pytest.approx(0.038)
    assert profile.seconds(2, 2) == pytest.approx(profile.verify_seconds(2, 2) + 0.038), "a whole block"
    noisy = ThroughputProfile({}, profile.verify_points, [DraftPoint(1, 0.02, tokens=2), DraftPoint(1, 0.01, tokens=7)])
    assert noisy.draft_seconds(1, 1) == noisy.draft_seconds(1, 4) == pytest.approx(0.01)
    only = ThroughputProfile({}, profile.verify_points, [DraftPoint(1, 0.02)])
    assert only.draft_seconds(1, 3) == pytest.approx(0.02), "how long it was is not known"


def test_drafts_of_several_lengths_are_timed_and_kept(tmp_path):
    asked = []
    profile = ThroughputProfile.measure(
        lambda *shape: None, lambda *shape: asked.append(shape), draft_tokens=(7, 2), rows=(1, 3), max_samples=1
    )
    assert set(asked) == {(1, 7), (1, 2), (3, 7), (3, 2)}
    assert {(point.rows, point.tokens) for point in profile.draft_points} == set(asked)
    again = ThroughputProfile.load(profile.save(tmp_path / "profile.json"))
    assert again.draft_points == profile.draft_points
    wider = ThroughputProfile.measure(
        lambda *shape: None, lambda *shape: None, draft_tokens=(7, 2), rows=(8,), profile=again, max_samples=1
    )
    assert len(wider.draft_points) == 6


def test_isotonic_is_least_squares():
    assert isotonic([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert isotonic([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    assert isotonic([]) == []


def test_longer_contexts_are_never_cheaper_by_extrapolated_noise():
    points = [VerifyPoint(1, t, c, 0.05 - 0.001 * (c > 128)) for c in (128, 256) for t in (1, 8)]
    profile = ThroughputProfile({}, points)
    assert profile.verify_seconds(4, 1, 4096) == pytest.approx(0.049)


def test_fewer_rows_than_measured_keep_a_positive_cost():
    profile = ThroughputProfile({}, [VerifyPoint(16, 16, 0, 0.1), VerifyPoint(16, 32, 0, 0.3)])
    assert 0 < profile.verify_seconds(1, 1) <= profile.verify_seconds(8, 8) < 0.1


def test_median_ignores_the_cold_call_and_a_spike():
    machine = FakeMachine(cold=1.0)
    machine.spikes[9] = 0.5
    profile = machine.measure(time_budget=30.0)
    for point in profile.verify_points:
        assert point.seconds == pytest.approx(machine.cost(1, point.tokens, 256))
        assert point.samples == 5
    assert [(point.rows, point.seconds) for point in profile.draft_points] == [(1, pytest.approx(0.011))]


@pytest.mark.parametrize("budget", [1.0, 2.5, 6.0])
def test_time_budget_holds(budget):
    machine = FakeMachine()
    profile = machine.measure(rows=(16, 1), contexts=(256, 1024), time_budget=budget)
    assert machine.now <= budget + 0.2  # at most one call that turned out dearer than any before
    assert profile.measured_seconds == pytest.approx(machine.now)
    measured = {(point.rows, point.tokens // point.rows) for point in profile.verify_points}
    assert {(16, 1), (16, 8)} <= measured and profile.draft_points


def test_a_slow_model_gets_the_three_calls_that_matter():
    machine = FakeMachine(base=2.0)
    profile = machine.measure(time_budget=1.0)
    assert machine.calls[1:] == [(1, 1, 256), ("draft", 1), (1, 8, 256)]
    assert [point.tokens for point in profile.verify_points] == [1, 8]


def test_points_can_be_added_later():
    machine = FakeMachine()
    first = machine.measure(fields=FIELDS, rows=(1,))
    assert first.covers(1, 256) and not first.covers(4, 256) and not first.covers(1, 2048)
    assert first.missing(4, 256) == [256] and first.missing(4, 2048) == [2048]
    more = machine.measure(rows=(4,), contexts=(2048,), profile=first)
    assert more.fields == FIELDS and more.covers(1, 256)
    assert more.missing(4, 300) == [256] and more.missing(1, 300) == [2048]  # read between 256 and 2048
    assert more.verify_seconds(1, 1, 256) == pytest.approx(machine.cost(1, 1, 256))
    assert more.measured_seconds > first.measured_seconds
    assert len(first.verify_points) == 4 and len(more.verify_points) == 8


def test_feeds_the_scheduler():
    profile = FakeMachine(per_token=0.004).measure(rows=(1, 16), time_budget=50.0)
    confidence = torch.full((16, 7), 0.8)
    means = []
    for rows in (1, 4, 16):
        table = profile.cost_table(rows * 8, rows, 256)
        chosen = schedule("throughput", confidence[:rows], cost=table, draft_seconds=profile.draft_seconds(rows))
        means.append(float(chosen.lengths.double().mean()))
    assert means == sorted(means, reverse=True) and means[0] > means[-1]


# ------------------------------------------------------------------------------------------------------------ on disk


def test_round_trip(tmp_path):
    profile = FakeMachine().measure(fields=FIELDS, rows=(1, 2))
    path = profile.save(tmp_path / "deep" / "profile.json")
    again = ThroughputProfile.load(path)
    assert again == profile
    assert again.verify_seconds(5, 2, 300) == profile.verify_seconds(5, 2, 300)
    assert [entry.name for entry in path.parent.iterdir()] == ["profile.json"]


def test_default_path_is_under_the_hugging_face_home(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    path = FakeMachine().measure(fields=FIELDS).save()
    assert path == tmp_path / "dspark_hf" / "profiles" / f"{fingerprint(FIELDS)}.json"
    assert ThroughputProfile.find(FIELDS) is not None
    assert ThroughputProfile.find({**FIELDS, "threads": 4}) is None


def test_measured_once_and_announced_in_one_line(tmp_path, caplog):
    machine = FakeMachine()
    with caplog.at_level(logging.WARNING, logger="dspark_hf"):
        first = ThroughputProfile.load_or_measure(FIELDS, machine.measure, tmp_path)
        calls = len(machine.calls)
        second = ThroughputProfile.load_or_measure(FIELDS, machine.measure, tmp_path)
    assert second == first and len(machine.calls) == calls
    assert len(caplog.records) == 1 and "Measured the cost" in caplog.text
    changed = {**FIELDS, "threads": 1}
    ThroughputProfile.load_or_measure(changed, machine.measure, tmp_path)
    assert len(machine.calls) > calls


def damage_truncated(text):
    return text[: len(text) // 2]


def damage_negative(text):
    content = json.loads(text)
    content["verify_points"][0]["seconds"] = -1.0
    return json.dumps(content)


def damage_fields(text):
    content = json.loads(text)
    content["fields"]["threads"] = 64
    return json.dumps(content)


def damage_missing(text):
    content = json.loads(text)
    del content["draft_points"]
    return json.dumps(content)


def damage_format(text):
    return json.dumps({**json.loads(text), "format": 99})


DAMAGES = [
    damage_truncated,
    damage_negative,
    damage_fields,
    damage_missing,
    damage_format,
    lambda text: "[]",
    lambda text: "",
    lambda text: text.replace('"verify_points": [', '"verify_points": [3, '),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_measured_again_with_a_logged_line(tmp_path, caplog, damage):
    machine = FakeMachine()
    ThroughputProfile.load_or_measure(FIELDS, machine.measure, tmp_path)
    path = profile_path(FIELDS, tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match="not a usable throughput profile"):
        ThroughputProfile.load(path)
    calls = len(machine.calls)
    with caplog.at_level(logging.WARNING, logger="dspark_hf"):
        ThroughputProfile.load_or_measure(FIELDS, machine.measure, tmp_path)
    assert len(machine.calls) > calls and "not a usable throughput profile" in caplog.text
    assert ThroughputProfile.load(path).fields == FIELDS


def test_binary_rubbish_is_damage_too(tmp_path):
    path = profile_path(FIELDS, tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    assert ThroughputProfile.find(FIELDS, tmp_path) is None


def test_an_unwritable_home_does_not_stop_anything(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, logger="dspark_hf"):
        profile = ThroughputProfile.load_or_measure(FIELDS, FakeMachine().measure, tmp_path / "file")
    assert profile.verify_points and "not saved" in caplog.text


@pytest.mark.parametrize(
    "points",
    [
        [],
        [VerifyPoint(1, 1, 0, 0.0)],
        [VerifyPoint(1, 1, 0, float("nan"))],
        [VerifyPoint(4, 2, 0, 0.1)],
        [VerifyPoint(0, 1, 0, 0.1)],
    ],
)
def test_impossible_points_are_refused(points):
    with pytest.raises(ValueError, match="measure"):
        ThroughputProfile({}, points)
    with pytest.raises(ValueError, match="measure"):
        ThroughputProfile({}, [VerifyPoint(1, 1, 0, 0.1)], [DraftPoint(1, -0.1)])


@pytest.mark.parametrize("wrong", [{"rows": ()}, {"rows": (0,)}, {"contexts": (-1,)}, {"tokens_per_row": (0, 1)}])
def test_grid_is_checked(wrong):
    with pytest.raises(ValueError, match="rows"):
        FakeMachine().measure(**wrong)


# ------------------------------------------------------------------------------------------------------ fingerprints


class TinyModel(torch.nn.Module):
    """As much of a Transformers model as the fingerprint looks at."""

    def __init__(self, hidden=8, attention="sdpa", dtype=torch.float32):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden, hidden, dtype=dtype))
        self.config = type("Config", (), {"hidden_size": hidden, "_attn_implementation": attention})()


def test_fingerprint_follows_everything_that_matters(monkeypatch):
    base = fingerprint(fingerprint_fields(TinyModel(), TinyModel(4)))
    assert base == fingerprint(fingerprint_fields(TinyModel(), TinyModel(4)))
    others = [
        fingerprint_fields(TinyModel(16), TinyModel(4)),
        fingerprint_fields(TinyModel(attention="eager"), TinyModel(4)),
        fingerprint_fields(TinyModel(dtype=torch.bfloat16), TinyModel(4)),
        fingerprint_fields(TinyModel(), TinyModel(5)),
        fingerprint_fields(TinyModel()),
    ]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    others.append(fingerprint_fields(TinyModel(), TinyModel(4)))
    monkeypatch.undo()
    monkeypatch.setattr("dspark_hf.fingerprints.version", lambda package: "0.0")
    others.append(fingerprint_fields(TinyModel(), TinyModel(4)))
    assert len({base, *map(fingerprint, others)}) == 1 + len(others)


def test_fingerprint_is_blind_to_order_and_names_the_device():
    assert fingerprint({"a": 1, "b": {"c": 2, "d": 3}}) == fingerprint({"b": {"d": 3, "c": 2}, "a": 1})
    assert device_name("cpu") and device_name("meta") == "meta"


def test_points_within_noise_of_a_line_are_put_on_it():
    """One point that is 4 % off must not make its tokens dear and the next ones free."""
    points = [VerifyPoint(1, tokens, 0, seconds, 4) for tokens, seconds in ((1, 68.0), (2, 69.4), (4, 75.5), (8, 76.5))]
    profile = ThroughputProfile({}, points)
    steps = [profile.verify_seconds(tokens + 1) - profile.verify_seconds(tokens) for tokens in range(1, 8)]
    assert max(steps) == pytest.approx(min(steps)) and 1.0 < steps[0] < 1.6
    assert all(abs(profile.verify_seconds(point.tokens) / point.seconds - 1) < 0.05 for point in points)


def test_other_rows_help_to_place_a_point():
    """Rows measured one after another share a plane, so that one bad sample does not decide about its tokens alone."""
    plane = [(rows, rows * width, 70.0 + rows + rows * width) for rows in (1, 2, 4) for width in (1, 2, 4, 8)]
    points = [VerifyPoint(rows, tokens, 0, seconds) for rows, tokens, seconds in plane]
    points[6] = VerifyPoint(2, 8, 0, 80.0 * 1.12)
    places, seconds = [(1, point.rows, point.tokens) for point in points], [point.seconds for point in points]
    alone = flattened(places[4:8], seconds[4:8], [1] * 4)[2]
    assert 80.0 < flattened(places, seconds, [1] * 12)[6] < 81.2 < alone


def test_real_steps_of_the_curve_stay():
    curve = ((1, 40.0), (2, 40.0), (4, 40.0), (8, 60.0))
    for samples, off in ((SURE, 1e-4), (25, 0.0501)):
        profile = ThroughputProfile({}, [VerifyPoint(1, tokens, 0, seconds, samples) for tokens, seconds in curve])
        assert [profile.verify_seconds(at) for at, _ in curve] == pytest.approx([at for _, at in curve], rel=off)
        assert profile.verify_seconds(8) > 1.3 * profile.verify_seconds(4)
    assert flattened([(1, 1), (1, 2)], [1.0, 1.01], [1, 1]) == pytest.approx([1.0, 1.01])
