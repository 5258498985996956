"""Scheduling in the decoding loop: what is verified, what a load changes, when nothing is drafted (cases 19 and 20).

The cost of a step is given by the test, so that decisions depend on nothing but the code. Measuring it is tested in
`test_profiling.py`, and exactness of sampling under every policy in `test_policy_exact.py`.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
from planted import ForwardCounter, planted_draft, planted_for, random_draft
from running import BATCHED_PATHS, accepted_by_row, assisted, check_exact, verify_lengths_by_row
from schedules import KnownCost, use_cost, use_schedule
from targets import build, clear_prompts, plain_greedy
from transformers import StoppingCriteria

from dspark_hf.draft_gate import DraftGate
from dspark_hf.generation.load import LOAD, Load
from dspark_hf.generation.policy import ConstantPolicy, ThroughputPolicy
from dspark_hf.generation.settings import Settings

LENGTHS = (3, 7, 12)
SCORES = [0.95, 0.9, 0.8, 0.9, 0.6, 0.9, 0.95]


def target_and_rows(lengths=LENGTHS, budget=64):
    target = build("qwen3", "sdpa")
    return target, clear_prompts(target, lengths, budget)


# ------------------------------------------------------------------------------------------ confidence cuts (case 19)


@pytest.mark.parametrize(
    ("schedule", "threshold", "kept"),
    [
        ("confidence", 0.0, 7),
        ("confidence", 0.5, 7),
        ("confidence", 0.7, 4),
        ("confidence", 0.85, 2),
        ("confidence", 0.99, 0),
        ("survival", 0.0, 7),
        ("survival", 0.65, 3),  # 0.95, 0.855, 0.684, 0.616: the running product
        ("survival", 0.8, 2),
        ("survival", 0.96, 0),
        ("constant", 0.99, 7),
    ],
)
def test_verify_width_is_the_kept_prefix_plus_one(schedule, threshold, kept):
    target, rows = target_and_rows((7,))
    draft = use_schedule(planted_for(target, rows, confidence=SCORES), schedule, threshold)
    with ForwardCounter(target) as counter:
        output = check_exact(target, draft, rows)
    widths = [tokens for _, tokens in counter.shapes[-output.dspark_stats.rounds :]]
    lengths = verify_lengths_by_row(output.dspark_stats, 1)[0]
    assert widths == [length + 1 for length in lengths]
    assert lengths[0] == kept and max(lengths) == kept
    for event in (event for event in output.dspark_stats.round_events if event.confidence is not None):
        torch.testing.assert_close(torch.tensor(event.survival), torch.tensor(event.confidence).cumprod(-1))
        torch.testing.assert_close(event.confidence[0], SCORES[: len(event.confidence[0])], atol=1e-5, rtol=0)


@pytest.mark.parametrize("path", BATCHED_PATHS)
def test_every_row_has_its_own_width(path, monkeypatch):
    """Packed, the forward holds exactly the kept prefixes plus one; as a rectangle, the widest of them."""
    monkeypatch.setattr("dspark_hf.generation.hook.verification_path", lambda model: (path, ""))
    target, rows = target_and_rows()

    def confidence(row, number, tokens):
        sure = (2 * row + number) % 8
        return [0.9] * sure + [0.2] * (7 - sure)

    draft = use_schedule(planted_for(target, rows, confidence=confidence), "confidence", 0.5)
    with ForwardCounter(target) as counter:
        output = check_exact(target, draft, rows)
    lengths = output.dspark_stats.verify_lengths
    forwards = counter.shapes[-len(lengths) :]
    if path == "packed":
        assert forwards == [(1, sum(row) + len(row)) for row in lengths]
    else:
        assert forwards == [(len(row), max(row) + 1) for row in lengths]
    assert {length for row in lengths for length in row} == set(range(8))
    assert output.dspark_stats.accepted > 20


@pytest.mark.parametrize("schedule", ["confidence", "survival", "throughput"])
def test_threshold_one_is_plain_decoding(schedule, monkeypatch):
    use_cost(monkeypatch, KnownCost())
    target, rows = target_and_rows()
    draft = use_schedule(planted_for(target, rows, confidence=[1.0] * 7), schedule, 1.0)
    with ForwardCounter(target) as counter:
        output = check_exact(target, draft, rows)
    assert counter.shapes[-63:] == [(1, 3)] * 63 and output.dspark_stats.rounds == 63
    assert draft.calls == [] and output.dspark_stats.share_without_draft == 1.0


def test_threshold_narrows_the_throughput_schedule(monkeypatch):
    use_cost(monkeypatch, KnownCost(per_token=1e-6))
    target, rows = target_and_rows((7,))
    for threshold, kept in ((0.0, 7), (0.7, 4)):
        draft = use_schedule(planted_for(target, rows, confidence=SCORES), "throughput", threshold)
        lengths = verify_lengths_by_row(check_exact(target, draft, rows).dspark_stats, 1)[0]
        assert max(lengths) == kept


# ------------------------------------------------------------------------------------------------- load (case 20)


@pytest.mark.parametrize("jump", [0.0, 0.4])
def test_throughput_is_plain_greedy_over_ragged_batches(jump, monkeypatch):
    use_cost(monkeypatch, KnownCost(jump=jump))
    target, rows = target_and_rows()
    output = check_exact(target, use_schedule(planted_for(target, rows), "throughput"), rows)
    assert output.dspark_stats.tau > 2
    continuations = plain_greedy(target, rows, 64)
    eos = [continuations[2][5], continuations[0][17], continuations[1][30]]
    plain = assisted(target, planted_for(target, rows), rows, eos_token_id=eos)
    output = assisted(target, use_schedule(planted_for(target, rows), "throughput"), rows, eos_token_id=eos)
    assert torch.equal(output.sequences, plain.sequences)


def test_mean_verify_length_falls_as_rows_are_added(monkeypatch):
    use_cost(monkeypatch, KnownCost(per_token=0.004))
    target, rows = target_and_rows((3, 4, 5, 6) * 4, 32)
    means = {}
    for count in (1, 2, 4, 8, 16):
        draft = planted_for(target, rows[:count], 32, confidence=[0.85] * 7)
        output = check_exact(target, use_schedule(draft, "throughput"), rows[:count], max_new_tokens=32)
        full = [event for event in output.dspark_stats.round_events if len(event.rows) == count]
        drafted = [length for event in full for length in event.verify_lengths if any(event.verify_lengths)]
        means[count] = sum(drafted) / len(drafted)
    assert list(means.values()) == sorted(means.values(), reverse=True), means
    assert means[1] > 1.5 * means[16], means


class Visitor:
    """A streamer that hands every round to a function."""

    def __init__(self, visit):
        self.visit, self.events = visit, []

    def put(self, value):
        pass

    def end(self):
        pass

    def on_round(self, event):
        self.events.append(event)
        self.visit(event)


def test_rows_of_other_calls_are_seen_within_one_round(monkeypatch):
    """Another thread's call comes and goes; the next round knows, and verifies less in between."""
    use_cost(monkeypatch, KnownCost(per_token=0.01))
    target, rows = target_and_rows((7,))
    others = clear_prompts(target, (3, 4, 5, 6) * 2, 16)
    arrived, leave = threading.Event(), threading.Event()

    def wait(event):
        arrived.set()
        assert leave.wait(60)

    def other_call():
        draft = random_draft(target)
        inputs = {"input_ids": torch.tensor([row[:3] for row in others]), "max_new_tokens": 4}
        target.generate(**inputs, assistant_model=draft, streamer=Visitor(wait))

    thread = threading.Thread(target=other_call)

    def visit(event):
        if event.index == 2:
            thread.start()
            assert arrived.wait(60)
        if event.index == 5:
            leave.set()
            thread.join(60)

    draft = use_schedule(planted_for(target, rows, pattern=(4,), confidence=[0.8] * 7), "throughput")
    main = Visitor(visit)
    expected = plain_greedy(target, rows, 64)[0]
    output = target.generate(torch.tensor(rows), assistant_model=draft, max_new_tokens=64, streamer=main)
    assert output[0, 7:].tolist() == expected
    assert [event.load for event in main.events[:9]] == [0, 0, 0, 8, 8, 8, 0, 0, 0]
    lengths = [event.verify_lengths[0] for event in main.events[:9]]
    assert max(lengths[3:6]) < min(lengths[:3]) and lengths[6] == lengths[0]


def test_plain_calls_are_seen_too(monkeypatch):
    """generate() without a draft, in another thread, shows itself by its forwards and is forgotten when they stop."""
    use_cost(monkeypatch, KnownCost(per_token=0.01))
    target, rows = target_and_rows((7,))
    running, stop = threading.Event(), threading.Event()

    class Criterion(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            running.set()
            return torch.full((input_ids.shape[0],), stop.is_set())

    def other_call():
        target.generate(torch.randint(5, 90, (6, 3)), max_new_tokens=100_000, stopping_criteria=[Criterion()])

    thread = threading.Thread(target=other_call)

    def visit(event):
        if event.index == 2:
            thread.start()
            assert running.wait(60)
        if event.index == 5:
            stop.set()
            thread.join(60)
        time.sleep(0.05)  # lets the other thread make a step

    draft = use_schedule(planted_for(target, rows, pattern=(4,), confidence=[0.8] * 7), "throughput")
    main = Visitor(visit)
    output = target.generate(torch.tensor(rows), assistant_model=draft, max_new_tokens=64, streamer=main)
    assert output[0, 7:].tolist() == plain_greedy(target, rows, 64)[0]
    loads = [event.load for event in main.events[:10]]
    assert loads[:6] == [0, 0, 0, 6, 6, 6] and loads[8:] == [0, 0]


def test_a_call_that_fails_leaves_no_load_behind():
    target, rows = target_and_rows((7,))

    def fail(event):
        raise RuntimeError("stop")

    draft = planted_for(target, rows)
    with pytest.raises(RuntimeError, match="stop"):
        target.generate(torch.tensor(rows), assistant_model=draft, max_new_tokens=8, streamer=Visitor(fail))
    with LOAD.call(target) as report:
        assert report(3) == 0


def test_load_counts_the_other_calls_on_the_same_target():
    load = Load()
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    with load.call(first) as one, load.call(first) as two, load.call(second) as elsewhere:
        assert (one(3), two(4), elsewhere(5)) == (0, 3, 0)
        assert one(2) == 4 and two(4) == 2
        two(0)
        assert one(2) == 0
    assert not first._forward_pre_hooks and not second._forward_pre_hooks


def test_a_call_at_its_prompt_counts():
    load, target = Load(), torch.nn.Linear(4, 4)
    at_prompt, finish = threading.Event(), threading.Event()

    def other_call():
        with load.call(target):
            target(torch.zeros(5, 4))
            at_prompt.set()
            finish.wait(60)

    thread = threading.Thread(target=other_call)
    with load.call(target) as mine:
        target(torch.zeros(2, 4))
        assert mine(2) == 0
        thread.start()
        assert at_prompt.wait(60)
        assert mine(2) == 5
        finish.set()
        thread.join(60)
        assert mine(2) == 0


def test_a_load_that_leaves_no_gain_stops_drafting_at_once_and_its_end_resumes():
    """Not even a perfect draft would pay under the load: no round is drafted, none probes; afterwards it goes on."""
    cost = KnownCost(per_token=0.05, base=0.01, draft=0.005, free_tokens=12)  # the machine is full at twelve tokens
    policy = ThroughputPolicy(Settings(7, 0.0, "throughput"), cost, 7, 1)
    for load, wants in ((0, True), (11, False), (0, True)):
        for _ in range(200):
            assert policy.wants_draft([0], 100, load) == wants
            width = 7 if wants else 0
            plan = policy.plan([0], [[0.9] * 7] if wants else None, width, [50], 100, load)
            policy.observe([0], plan, [min(4, plan.lengths[0])], 1 + min(4, plan.lengths[0]), wants)


# ----------------------------------------------------------------------------------------------------- never slower


def model_time(stats) -> tuple[float, float]:
    """Seconds by the cost table that a run took, and that plain decoding of as many tokens would have taken."""
    events = stats.round_events
    committed = [sum(map(len, event.committed)) / len(event.rows) for event in events]
    plain = sum(tokens * event.plain_seconds for tokens, event in zip(committed, events, strict=True))
    return sum(event.expected_seconds for event in events), plain


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("draft_cost", [0.005, 0.02])
@pytest.mark.parametrize("copies", [False, True])
def test_a_useless_draft_costs_at_most_three_percent(count, draft_cost, copies, monkeypatch):
    """Sure of everything, always wrong: over 256 tokens the scheduler gives it up, and says so in the statistics."""
    use_cost(monkeypatch, KnownCost(draft=draft_cost))
    target, rows = target_and_rows((7, 3, 12, 5)[:count], 256)
    draft = planted_for(target, rows, 256, pattern=(0,), confidence=[0.98] * 7)
    output = check_exact(target, use_schedule(draft, "throughput", copies=copies), rows, max_new_tokens=256)
    stats = output.dspark_stats
    spent, plain = model_time(stats)
    assert spent <= 1.03 * plain
    assert stats.accepted == stats.copied and (copies or not stats.copied) and stats.share_without_draft > 0.9
    assert stats.share_without_draft == sum(not e.draft_width for e in stats.round_events) / stats.rounds
    assert stats.time_saved is not None and stats.expected_tau > 1


def test_a_good_draft_is_never_paused(monkeypatch):
    use_cost(monkeypatch, KnownCost())
    target, rows = target_and_rows()
    draft = planted_for(target, rows, confidence=[0.9] * 7, pattern=(7, 5, 6))
    output = check_exact(target, use_schedule(draft, "throughput"), rows)
    tail = sum(len(event.rows) == 1 for event in output.dspark_stats.round_events[-2:]) / output.dspark_stats.rounds
    assert output.dspark_stats.share_without_draft <= tail  # the last token of a row needs no draft
    spent, plain = model_time(output.dspark_stats)
    assert spent < 0.5 * plain


def one_good_one_bad(target, rows, budget):
    """A draft that is nearly always right about row 0 and never about row 1, and sure of both."""
    good, bad = plain_greedy(target, rows, budget)
    wrong = [(token + 1) % 96 for token in bad]
    draft = planted_draft(target).plan([rows[0] + good, rows[1] + wrong], pattern=(7, 6, 5), confidence=[0.9] * 7)
    return use_schedule(draft, "throughput", copies=False)


def test_a_row_whose_drafts_fail_does_not_pay_for_the_others(monkeypatch):
    """Its gate closes; the row that accepts goes on, since every row in the batch makes a step longer."""
    use_cost(monkeypatch, KnownCost(base=0.01, per_row=0.03, per_token=0.003))
    target, rows = target_and_rows((7, 9), 128)
    output = check_exact(target, one_good_one_bad(target, rows, 128), rows, max_new_tokens=128)
    lengths = verify_lengths_by_row(output.dspark_stats, 2)
    accepted = accepted_by_row(output.dspark_stats, 2)
    assert sum(accepted[1]) == 0
    together = len(accepted[0])  # rounds in which the good row still ran
    assert sum(lengths[0]) / together > 5
    assert sum(lengths[1][:together]) < 0.6 * sum(lengths[0])
    assert lengths[1][together:].count(0) > 0.9 * len(lengths[1][together:])


def test_a_batch_is_not_made_slower_by_hurrying_some_of_its_rows(monkeypatch):
    """Where rows cost nothing of their own, the call ends when the unlucky row does: drafting stops soon."""
    use_cost(monkeypatch, KnownCost(per_token=0.0005))
    target, rows = target_and_rows((7, 9), 128)
    output = check_exact(target, one_good_one_bad(target, rows, 128), rows, max_new_tokens=128)
    spent = sum(event.expected_seconds for event in output.dspark_stats.round_events)
    assert spent <= 1.03 * 127 * KnownCost(per_token=0.0005).seconds(2, 2)


def test_the_draft_sees_what_was_decoded_without_it(monkeypatch):
    """Context collected in rounds without a draft reaches the cache in order, before the next draft."""
    use_cost(monkeypatch, KnownCost())
    target, rows = target_and_rows(LENGTHS, 100)

    def confidence(row, number, tokens):
        return [0.98] * 7

    runs = {}
    for schedule in ("constant", "throughput"):
        draft = planted_for(target, rows, 100, pattern=(0,), confidence=confidence)
        check_exact(target, use_schedule(draft, schedule), rows, max_new_tokens=100)
        seen = {}
        for states, positions, numbers, _ in draft.contexts:
            for state, position, row in zip(states, positions.tolist(), numbers.tolist(), strict=True):
                seen[row, position] = state  # a rejected token's slot is written again
        runs[schedule] = seen
    shared = set(runs["constant"]) & set(runs["throughput"])
    assert len(shared) > 250
    for key in shared:
        if key[1] < len(rows[key[0]]) + 80:
            torch.testing.assert_close(runs["throughput"][key], runs["constant"][key], atol=1e-4, rtol=1e-4)


def test_one_probe_at_a_time_when_drafting_ahead():
    policy = ThroughputPolicy(Settings(7, 0.0, "throughput"), KnownCost(), 7, 1)
    policy.gate = DraftGate(allowance=0.0, first_pause=2)

    def play(drafted):
        """One round as the loop plays it when it drafts ahead; returns whether the next one is drafted already."""
        plan = policy.plan([0], [[0.9] * 7] if drafted else None, 7 if drafted else 0, [50], 100, 0)
        ahead = policy.wants_draft([0], 100, 0)
        policy.observe([0], plan, [0], 1, drafted)
        return ahead

    assert policy.wants_draft([0], 100, 0)
    while policy.gate.is_open:
        assert play(True)  # the next block is drafted before this one's loss closes the gate
    pause = policy.gate.pause
    assert not play(True)
    assert policy.gate.closings == 1 and policy.gate.pause == pause
    while not policy.gate.is_open:
        assert not play(False)
    assert policy.gate.is_probing and policy.wants_draft([0], 100, 0)
    assert not play(True)  # the probe's outcome is not known yet
    assert policy.gate.closings == 2


def test_drafting_ahead_with_the_scheduler(monkeypatch):
    import dspark_hf.generation.hook as hook

    loop = hook.DecodingLoop
    monkeypatch.setattr(hook, "DecodingLoop", lambda *args, **kwargs: loop(*args, **{**kwargs, "draft_ahead": True}))
    use_cost(monkeypatch, KnownCost(jump=0.3))
    target, rows = target_and_rows()
    for pattern in ((0, 3, 7), (0,)):
        check_exact(target, use_schedule(planted_for(target, rows, pattern=pattern), "throughput"), rows)


# --------------------------------------------------------------------------------------------------------- telemetry


def test_predicted_and_realised_are_told_per_round(monkeypatch):
    cost = KnownCost(per_token=0.002)
    use_cost(monkeypatch, cost)
    target, rows = target_and_rows()
    draft = use_schedule(planted_for(target, rows, confidence=SCORES), "throughput")
    stats = check_exact(target, draft, rows).dspark_stats
    for event in stats.round_events:
        count = len(event.rows)
        tokens = count + sum(event.verify_lengths)
        assert event.plain_seconds == pytest.approx(cost.seconds(count, count))
        expected = float(count)
        if any(event.drafted):
            expected += sum(sum(row[:n]) for row, n in zip(event.survival, event.verify_lengths, strict=True))
        assert event.expected_tokens == pytest.approx(expected, rel=1e-4)
        draft_cost = cost.draft_seconds(count) if any(event.drafted) else 0.0
        assert event.expected_seconds == pytest.approx(draft_cost + cost.seconds(tokens, count))
    report = stats.to_dict()
    assert report["expected_tau"] > 1 and report["share_without_draft"] < 0.5 and report["time_saved"] is not None


def test_a_seed_decides_whatever_the_clock_says(monkeypatch):
    """Same seed, same cost table: same output and same plans, run after run."""
    use_cost(monkeypatch, KnownCost(jump=0.4, per_token=0.003))
    target, rows = target_and_rows()
    draft = use_schedule(random_draft(target), "throughput")
    runs = []
    for _ in range(3):
        torch.manual_seed(3)
        output = assisted(target, draft, rows, do_sample=True, temperature=1.5)
        runs.append((output.sequences.tolist(), output.dspark_stats.verify_lengths))
    assert runs[0] == runs[1] == runs[2]


def test_scheduling_is_cheap():
    """All decisions of a round at 16 rows, in a fraction of the milliseconds that any forward takes."""
    rows = list(range(16))
    policy = ThroughputPolicy(Settings(7, 0.0, "throughput"), KnownCost(), 7, 16)
    scores = torch.rand(16, 7, generator=torch.Generator().manual_seed(0)).tolist()
    times = []
    for _ in range(50):
        start = time.perf_counter()
        policy.wants_draft(rows, 100, 0)
        plan = policy.plan(rows, scores, 7, [50] * 16, 100, 0)
        policy.observe(rows, plan, [1] * 16, 32, True)
        times.append(time.perf_counter() - start)
    assert min(times) < 2e-3


def test_constant_policy_without_confidences():
    policy = ConstantPolicy(Settings(7, 0.5, "constant"))
    assert policy.wants_draft([0, 1], 10, 0)
    assert policy.plan([0, 1], None, 5, [9, 2], 10, 0).lengths == [5, 2]
    assert policy.plan([0, 1], None, 0, [9, 2], 10, 0).lengths == [0, 0]
