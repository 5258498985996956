"""Scheduler: slow twins, exactness by enumeration, the paper's appendix A, caps and predictions."""

import itertools

import pytest
import torch

from dspark_hf.draft_gate import AcceptanceTracker, DraftGate, row_costs, time_saved
from dspark_hf.scheduling import (
    best_budget,
    budget_lengths,
    confidence_lengths,
    predict,
    schedule,
    speculation_pays,
    survival,
    survival_lengths,
    throughput_lengths,
)

# ------------------------------------------------------------------------------------------------ slow twins


def theta_of(a, lengths, cost, draft_seconds=0.0, load_rows=0):
    rows, tokens = len(a) + load_rows, len(a) + load_rows + sum(lengths)
    return (rows + sum(sum(row[:n]) for row, n in zip(a, lengths, strict=True))) / (draft_seconds + cost(tokens))


def brute_force(a, cost, draft_seconds=0.0, limit=None, load_rows=0):
    """Best Theta over every vector of lengths."""
    slots = len(a[0])
    caps = [slots] * len(a) if limit is None else [max(0, min(slots, n)) for n in limit]
    options = itertools.product(*(range(n + 1) for n in caps))
    return max((theta_of(a, lengths, cost, draft_seconds, load_rows), lengths) for lengths in options)


def early_stop_twin(a, cost, draft_seconds=0.0, limit=None, load_rows=0):
    """Algorithm 1, one admission at a time."""
    slots = len(a[0])
    caps = [slots] * len(a) if limit is None else [max(0, min(slots, n)) for n in limit]
    lengths = [0] * len(a)
    while True:
        frontier = [(-a[r][n], n, r) for r, n in enumerate(lengths) if n < caps[r]]
        if not frontier:
            return lengths
        row = min(frontier)[2]
        longer = [n + (r == row) for r, n in enumerate(lengths)]
        if not theta_of(a, longer, cost, draft_seconds, load_rows) > theta_of(
            a, lengths, cost, draft_seconds, load_rows
        ):
            return lengths
        lengths = longer


COSTS = {
    "flat": lambda b: 1.0,
    "linear": lambda b: 0.5 + 0.1 * b,
    "steep": lambda b: 0.05 + 0.5 * b,
    "convex": lambda b: 1.0 + 0.01 * b * b,
    "jagged": lambda b: 1.0 + 0.6 * ((b - 1) // 4),
}


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("rows,slots", [(1, 7), (2, 4), (3, 3)])
def test_throughput_equals_its_twin(name, rows, slots):
    generator = torch.Generator().manual_seed(rows * 10 + slots)
    for trial in range(20):
        a = survival(torch.rand(rows, slots, generator=generator))
        limit = None if trial % 2 else torch.randint(-1, slots + 1, (rows,), generator=generator)
        draft, load = 0.1 * (trial % 3), trial % 4
        got = throughput_lengths(a, COSTS[name], draft_seconds=draft, limit=limit, load_rows=load)
        caps = None if limit is None else limit.tolist()
        assert got.lengths.tolist() == early_stop_twin(a.tolist(), COSTS[name], draft, caps, load)
        assert got.theta == pytest.approx(theta_of(a.tolist(), got.lengths.tolist(), COSTS[name], draft, load))
        assert got.verify_tokens == rows + int(got.lengths.sum())
        again = predict(a, got.lengths, COSTS[name], draft_seconds=draft, load_rows=load)
        assert (again.expected_tokens, again.seconds, again.theta) == pytest.approx(
            (got.expected_tokens, got.seconds, got.theta)
        )


@pytest.mark.parametrize("name", COSTS)
def test_early_stop_finds_the_maximum_on_convex_costs(name):
    generator = torch.Generator().manual_seed(5)
    for trial in range(20):
        a = survival(torch.rand(3, 3, generator=generator))
        draft, limit = 0.2 * (trial % 2), None if trial % 3 else [2, 0, 3]
        best, _ = brute_force(a.tolist(), COSTS[name], draft, limit)
        early = throughput_lengths(a, COSTS[name], draft_seconds=draft, limit=limit)
        pays = speculation_pays(a, COSTS[name], draft_seconds=draft, limit=limit)
        assert pays.theta == pytest.approx(best)  # prefixes of the greedy order contain the optimum, whatever the cost
        assert early.theta <= best + 1e-12
        if name != "jagged":
            assert early.theta == pytest.approx(best)


def test_stale_budget_climbs_over_a_step_that_stops_algorithm_1():
    a = survival(torch.full((1, 7), 0.9))
    cost = {b: 1.0 + (0.8 if b > 1 else 0.0) for b in range(1, 9)}.__getitem__  # two tokens cost as much as eight
    assert throughput_lengths(a, cost).lengths.tolist() == [7]
    a_low = survival(torch.full((1, 7), 0.7))
    assert throughput_lengths(a_low, cost).lengths.tolist() == [0]
    assert best_budget(a_low, cost) == 7
    assert budget_lengths(a, 7).tolist() == [7]


def test_budget_goes_to_the_best_survivors():
    a = torch.tensor([[0.9, 0.5, 0.1], [0.8, 0.7, 0.6], [0.0, 0.0, 0.0]])
    assert budget_lengths(a, 3).tolist() == [1, 2, 0]
    assert budget_lengths(a, 4).tolist() == [1, 3, 0]
    assert budget_lengths(a, 99).tolist() == [3, 3, 0]  # nothing survives in the last row
    assert budget_lengths(a, 4, limit=[3, 1, 3]).tolist() == [3, 1, 0]
    assert budget_lengths(a, -1).tolist() == [0, 0, 0]


def test_a_step_that_is_filled_up_anyway_verifies_what_there_is_room_for():
    def fill(tokens):
        return -(-tokens // 8) * 8

    generator, filled_up = torch.Generator().manual_seed(9), 0
    for trial in range(40):
        a = survival(torch.rand(3, 7, generator=generator))
        limit = None if trial % 2 else [7, 2, 4]
        stop = throughput_lengths(a, COSTS["linear"], draft_seconds=0.1, limit=limit)
        more = throughput_lengths(a, COSTS["linear"], draft_seconds=0.1, limit=limit, fill=fill)
        room = fill(stop.verify_tokens) - 3 if stop.verify_tokens > 3 else 0
        assert more.lengths.tolist() == budget_lengths(a, room, limit).tolist()
        assert more.verify_tokens == 3 + int(more.lengths.sum())
        filled_up += more.verify_tokens > stop.verify_tokens
    assert filled_up > 20


# ------------------------------------------------------------------------------------------------ threshold rules


def test_survival_is_the_running_product():
    c = torch.tensor([[0.5, 0.5, 1.0], [1.0, float("nan"), 1.0]])
    assert survival(c).tolist() == [[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]


def test_confidence_cut_is_per_slot_and_strict():
    c = torch.tensor([[0.9, 0.5, 0.9], [0.49, 0.9, 0.9], [0.9, 0.9, 0.9]])
    assert confidence_lengths(c, 0.5).tolist() == [3, 0, 3]  # equal to the threshold is kept
    assert survival_lengths(survival(c), 0.5).tolist() == [1, 0, 3]
    assert confidence_lengths(c, 0.5, limit=torch.tensor([1, 5, -2])).tolist() == [1, 0, 0]


@pytest.mark.parametrize("policy", ["confidence", "survival"])
def test_threshold_extremes(policy):
    c = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    assert schedule(policy, c, threshold=0.0).lengths.tolist() == [3, 3]
    assert schedule(policy, c, threshold=-1.0).lengths.tolist() == [3, 3]
    assert schedule(policy, c, threshold=1.0).lengths.tolist() == [0, 0]  # plain decoding, saturated or not


def test_saturated_scores_are_shared_among_rows():
    assert budget_lengths(torch.ones(3, 7), 6).tolist() == [2, 2, 2]


# ------------------------------------------------------------------------------------------------ dispatch and costs


def test_schedule_by_name():
    c, cost = torch.full((2, 4), 0.9), COSTS["linear"]
    assert schedule("constant", c, limit=[4, 1]).lengths.tolist() == [4, 1]
    assert schedule("constant", None, num_rows=2, num_slots=3).expected_tokens is None
    full = schedule("throughput", c, cost=cost)
    assert full.lengths.tolist() == throughput_lengths(survival(c), cost).lengths.tolist()
    assert schedule("throughput", c, cost=cost, threshold=0.95).lengths.tolist() == [0, 0]
    assert schedule("budget", c, budget=3, cost=cost).lengths.tolist() == [2, 1]
    assert schedule("throughput", c.tolist(), cost=cost).lengths.tolist() == full.lengths.tolist()


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("heuristic", torch.ones(1, 1)), "heuristic"),
        (("throughput", torch.ones(1, 1)), "needs cost"),
        (("budget", torch.ones(1, 1)), "needs budget"),
        (("confidence", None), "confidence scores"),
        (("constant", None), "num_rows"),
    ],
)
def test_schedule_refuses_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule(*arguments)


def test_cost_table_is_indexed_by_tokens_and_continued():
    table = torch.tensor([0.0, 1.0, 1.5, 2.0])
    a = torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    assert predict(a, [2], table).seconds == pytest.approx(2.0)
    assert predict(a, [4], table).seconds == pytest.approx(3.0)
    assert predict(a, [0], table, load_rows=2).seconds == pytest.approx(2.0)
    with pytest.raises(ValueError, match="entries"):
        predict(a, [4], [0.0, 1.0])
    with pytest.raises(ValueError, match=r"\[R, K\]"):
        throughput_lengths(a[0], table)


def test_verify_length_falls_with_load():
    cost = lambda b: 1.0 if b <= 8 else 1.0 + 0.12 * (b - 8)  # noqa: E731
    a = survival(torch.full((1, 7), 0.8))
    means = [float(throughput_lengths(a.expand(rows, 7), cost).lengths.double().mean()) for rows in (1, 2, 4, 8, 16)]
    assert means[0] == 7 and means == sorted(means, reverse=True) and means[-1] < means[0]
    by_others = [int(throughput_lengths(a, cost, load_rows=rows).lengths) for rows in (0, 4, 16)]
    assert by_others == sorted(by_others, reverse=True) and by_others[-1] < by_others[0]


def test_speculation_pays_counts_the_draft():
    a = survival(torch.full((1, 3), 0.5))  # at most 1.875 tokens
    assert speculation_pays(a, COSTS["flat"], draft_seconds=0.8).pays
    verdict = speculation_pays(a, COSTS["flat"], draft_seconds=0.9)
    assert not verdict.pays and verdict.budget == 3 and verdict.plain_seconds == pytest.approx(1.0)
    assert not speculation_pays(a, COSTS["flat"], draft_seconds=0.8, margin=0.1).pays


# ------------------------------------------------------------------------------------------------ exactness


def output_distribution(p, q, confidence, choose, length, rows=1):
    """Exact distribution of the first `length` tokens of every row, all randomness enumerated.

    `p(prefix)` and `q(prefix)` are lists over the vocabulary, `confidence(prefix)` the score of the slot after the
    drafted prefix, `choose(scores [R, K]) -> lengths [R]` the policy under test. One round; what the round leaves open
    is continued with p, as later rounds would.
    """
    slots, vocabulary = length, len(p(()))
    total = {}
    drafts = list(itertools.product(range(vocabulary), repeat=slots))

    def finish(prefix, weight, out):
        if len(prefix) >= length:
            out[prefix[:length]] = out.get(prefix[:length], 0.0) + weight
            return
        for token, probability in enumerate(p(prefix)):
            finish(prefix + (token,), weight * probability, out)

    def verify(draft, verified):
        """Distribution of one row's first tokens given its draft and verify length."""
        out, weight = {}, 1.0
        for k in range(verified):
            target, proposal = p(draft[:k]), q(draft[:k])
            accept = min(1.0, target[draft[k]] / proposal[draft[k]])
            residual = [max(t - d, 0.0) for t, d in zip(target, proposal, strict=True)]
            if accept < 1.0:
                for token, mass in enumerate(residual):
                    finish(draft[:k] + (token,), weight * (1 - accept) * mass / sum(residual), out)
            weight *= accept
        finish(draft[:verified], weight, out)
        return out

    def draft_probability(draft):
        probability = 1.0
        for k in range(slots):
            probability *= q(draft[:k])[draft[k]]
        return probability

    for combination in itertools.product(drafts, repeat=rows):
        scores = torch.tensor([[confidence(d[:k]) for k in range(slots)] for d in combination], dtype=torch.float64)
        lengths = choose(scores).tolist()
        weight = 1.0
        for draft in combination:
            weight *= draft_probability(draft)
        joint = [verify(d, n) for d, n in zip(combination, lengths, strict=True)]
        for outcome in itertools.product(*(row.items() for row in joint)):
            key, chance = tuple(tokens for tokens, _ in outcome), weight
            for _, probability in outcome:
                chance *= probability
            total[key] = total.get(key, 0.0) + chance
    return total


def appendix_a(choose, length=2):
    """p = (0.7, 0.3), q = (0.5, 0.5); the second slot is certain after token 0 and hopeless after token 1."""
    found = output_distribution(
        p=lambda prefix: (0.7, 0.3),
        q=lambda prefix: (0.5, 0.5),
        confidence=lambda prefix: 0.8 if not prefix else (1.0 if prefix[-1] == 0 else 0.0),
        choose=choose,
        length=length,
    )
    return sum(chance for (tokens,), chance in found.items() if tokens[0] == 0)


def appendix_a_cost(tokens):
    return 1.0 / {1: 1.0, 2: 0.5, 3: 0.45}[tokens]


def test_appendix_a_a_retrospective_maximum_leaks():
    def retrospective(scores):
        a = survival(scores)
        return budget_lengths(a, best_budget(a, appendix_a_cost))

    assert appendix_a(retrospective) == pytest.approx(0.85)


def test_appendix_a_ours_does_not():
    assert appendix_a(lambda c: throughput_lengths(survival(c), appendix_a_cost).lengths) == pytest.approx(0.7)
    for budget in (0, 1, 2):
        assert appendix_a(lambda c, n=budget: budget_lengths(survival(c), n)) == pytest.approx(0.7)
    for threshold in (0.3, 0.7, 0.95):
        assert appendix_a(lambda c, t=threshold: confidence_lengths(c, t)) == pytest.approx(0.7)
        assert appendix_a(lambda c, t=threshold: survival_lengths(survival(c), t)) == pytest.approx(0.7)


POLICIES_UNDER_TEST = {
    "throughput-linear": lambda c: throughput_lengths(survival(c), COSTS["linear"], draft_seconds=0.3).lengths,
    "throughput-jagged": lambda c: throughput_lengths(survival(c), COSTS["jagged"]).lengths,
    "throughput-filled": lambda c: throughput_lengths(
        survival(c), COSTS["linear"], draft_seconds=0.3, fill=lambda tokens: -(-tokens // 3) * 3
    ).lengths,
    "throughput-threshold": lambda c: schedule("throughput", c, cost=COSTS["linear"], threshold=0.5).lengths,
    "budget-2": lambda c: budget_lengths(survival(c), 2),
    "budget-capped": lambda c: budget_lengths(survival(c), 3, limit=[1, 2][: len(c)]),
    "confidence-0.7": lambda c: confidence_lengths(c, 0.7),
    "survival-0.4": lambda c: survival_lengths(survival(c), 0.4),
}


@pytest.mark.parametrize("policy", POLICIES_UNDER_TEST)
@pytest.mark.parametrize("rows,length", [(1, 3), (2, 2)])
def test_every_policy_is_exact_also_jointly_over_rows(policy, rows, length):
    """Scores rigged to give away the previous token, ties included; rows share one budget, yet stay independent."""

    def p(prefix):
        return (0.6, 0.4) if sum(prefix) % 2 else (0.25, 0.75)

    def q(prefix):
        return (0.5, 0.5) if len(prefix) % 2 else (0.8, 0.2)

    def confidence(prefix):
        return (0.85, 1.0, 0.4)[prefix[-1] * 2 - (len(prefix) % 2) if prefix else 0]

    found = output_distribution(p, q, confidence, POLICIES_UNDER_TEST[policy], length, rows)
    for outcome in itertools.product(itertools.product(range(2), repeat=length), repeat=rows):
        expected = 1.0
        for tokens in outcome:
            for k in range(length):
                expected *= p(tokens[:k])[tokens[k]]
        assert found.get(outcome, 0.0) == pytest.approx(expected, abs=1e-12), outcome


# ------------------------------------------------------------------------------------------------ the gate


def play(gate, acceptance, cost, tokens=256, seed=0, slots=7, predicted=None):
    """Plain steps that `tokens` tokens take at batch 1 under the gate; drafted rounds cost `cost` steps."""
    generator = torch.Generator().manual_seed(seed)
    draws = iter(torch.rand(20_000, generator=generator).tolist())
    done, spent = 0.0, 0.0
    while done < tokens:
        rate = acceptance(done) if callable(acceptance) else acceptance
        if gate.is_open:
            accepted = 0
            while accepted < slots and next(draws) < rate:
                accepted += 1
            gate.observe(1 + accepted, cost, predicted)
            done, spent = done + 1 + accepted, spent + cost
        else:
            gate.skip()
            done, spent = done + 1, spent + 1
    return spent / done


@pytest.mark.parametrize("predicted", [None, 1.0, 6.0])
@pytest.mark.parametrize("cost", [1.2, 1.5, 1.75])
def test_a_useless_draft_costs_at_most_three_percent(cost, predicted):
    gate = DraftGate()
    assert play(gate, 0.0, cost, predicted=predicted) <= 1.03
    assert gate.share_without_draft > 0.9


def test_a_good_draft_is_not_shut_out():
    # 0.5 per slot is 1.99 tokens per round: a third faster at 1.5 steps, but half the rounds lose.
    times = [play(DraftGate(), 0.5, 1.5, seed=seed) for seed in range(40)]
    assert sum(times) / len(times) < 1.03 * 1.5 / 1.99
    gate = DraftGate()
    play(gate, 0.8, 1.5)
    assert gate.closings == 0 and gate.share_without_draft == 0.0


def test_the_gate_notices_a_change_of_text():
    gate = DraftGate()
    assert play(gate, lambda done: 0.0 if done < 200 else 0.9, 1.5, tokens=600) < 0.75
    assert gate.is_open
    assert play(DraftGate(), lambda done: 0.9 if done < 200 else 0.0, 1.5, tokens=600) < 0.85


def test_back_off_doubles_up_to_its_cap_and_is_forgotten():
    gate, pauses = DraftGate(allowance=0.0, first_pause=2, max_pause=9), []
    for _ in range(5):
        while gate.is_open:
            gate.observe(1.0, 1.4)
        pauses.append(gate.pause)
        gate.skip(gate.pause)
        assert gate.is_probing and gate.is_open
    assert pauses == [2, 4, 8, 9, 9]
    for _ in range(40):
        gate.observe(5.0, 1.4)
    for _ in range(200):
        if not gate.is_open:
            break
        gate.observe(1.0, 1.4)
    assert gate.pause == 2


def test_good_promises_that_bring_nothing_close_the_gate_at_last():
    """A batch waits for its slowest row: tokens come as promised, the account says that the call gains nothing."""

    def lost(gate, tokens=200):
        done = spent = 0.0
        while done < tokens:
            if gate.is_open:
                gate.observe(1.5, 1.4, 1.5, banked_tokens=1.0)
                spent += 0.4
            else:
                gate.skip()
            done += 1
        return spent

    gate = DraftGate(allowance=0.5, patience=2.0, first_pause=16)
    assert lost(gate) < 6.0 and gate.closings > 2
    assert lost(DraftGate(allowance=0.5, first_pause=16)) > 60.0
    with pytest.raises(ValueError, match="patience"):
        DraftGate(allowance=2.0, patience=1.0)


def test_broken_promises_close_the_gate_sooner_than_bad_luck():
    rounds = {}
    for predicted in (1.5, 7.0):
        gate = DraftGate()
        while gate.is_open:
            gate.observe(1.0, 1.3, predicted)
        rounds[predicted] = gate.drafted_rounds
    assert rounds[7.0] <= 3 < rounds[1.5]
    assert play(DraftGate(), 0.0, 1.3, predicted=7.0) < 1.012


def test_wake_and_close():
    gate = DraftGate()
    gate.close()
    assert not gate.is_open and gate.pause == 4
    gate.close()
    assert gate.pause == 4 and gate.closings == 1
    gate.wake()
    assert gate.is_open and gate.is_probing
    gate.observe(4.0, 1.5)
    assert gate.is_open and not gate.is_probing


@pytest.mark.parametrize("wrong", [{"decay": 1.0}, {"first_pause": 0}, {"backoff": 0.5}, {"allowance": -1.0}])
def test_gate_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DraftGate(**wrong)


def test_acceptance_tracker_learns_conditional_rates():
    tracker = AcceptanceTracker(3, prior=0.5)
    assert tracker.conditional.tolist() == [0.5, 0.5, 0.5]
    for _ in range(300):
        # slot 0 always accepted, slot 1 every other time, slot 2 never tried
        tracker.update([1, 2], [2, 2])
    assert tracker.conditional.tolist() == pytest.approx([1.0, 0.5, 0.5], abs=0.02)
    assert tracker.survival(2).shape == (2, 3)
    assert tracker.survival(1)[0].tolist() == pytest.approx([1.0, 0.5, 0.25], abs=0.02)


def test_time_saved():
    assert time_saved(tokens=6, rows=2, seconds=0.2, plain_seconds=0.1) == pytest.approx(0.1)


def test_gains_of_rows_add_up_to_that_of_the_batch_but_for_the_draft():
    lengths, accepted, draft, verify, plain = [3, 0, 1], [2, 0, 0], 0.1, 0.5, 0.3
    costs = row_costs(lengths, verify - plain, rate=3 / plain)
    assert costs == pytest.approx([1 + 10 * 0.15, 1.0, 1 + 10 * 0.05])
    gains = [1 + kept - cost for kept, cost in zip(accepted, costs)]
    batch = sum(1 + kept for kept in accepted) - 3 * (draft + verify) / plain
    assert sum(gains) - 3 * draft / plain == pytest.approx(batch)
    assert row_costs([0, 0], 0.0, 5.0) == [1.0, 1.0]
