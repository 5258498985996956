"""Blocks copied from a row's own text: the search, what is learnt about copies, and the loop with them."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from distributions import check_distribution, exact_joint
from planted import planted_draft, planted_for, random_draft
from running import assisted, check_exact, new_tokens
from schedules import KnownCost, use_cost, use_schedule
from targets import build, left_pad, plain_greedy
from test_sampling_exact import PROMPT, processors, small_draft, small_target

from dspark_hf import record_generation
from dspark_hf.copying import Copy, CopyRecord, DraftRecord, RowText, net_gain
from dspark_hf.generation import loop as loop_module
from dspark_hf.generation.copies import CopyChoice, unpadded
from dspark_hf.generation.loop import DecodingLoop
from dspark_hf.generation.policy import ThroughputPolicy
from dspark_hf.generation.settings import Settings, resolve_settings

PROMPTS = [[5, 9, 11, 5, 9, 12, 7, 5, 9], [20, 21, 22], [30, 31, 32, 33, 30, 31, 32, 33, 30, 31]]
# nothing drafted is worth its time, and copies cost next to nothing
COPIES_ONLY = KnownCost(base=0.05, per_token=1e-5, draft=0.3)
BOTH = KnownCost(base=0.05, per_token=1e-4, draft=1e-4)
BOTH_IN_LARGE_BATCHES = KnownCost(base=1.0, per_token=1e-5, draft=1e-3)


def brute_force(text: list[int], most: int) -> Copy | None:
    """The definition: the longest of the latest eight matches, the later of two."""
    places = [at for at in range(2, len(text)) if text[at - 2 : at] == text[-2:]][-8:]
    found = []
    for place in places:
        longest = max(n for n in range(2, 33) if n <= place and text[place - n : place] == text[len(text) - n :])
        found.append((longest, place))
    if not found or most < 1:
        return None
    match, place = max(found)
    tokens = list(text)
    for offset in range(most):
        tokens.append(tokens[place + offset])
    return Copy(tokens[len(text) :], match)


@pytest.mark.parametrize("vocabulary", [2, 3, 6])
def test_search_finds_the_longest_of_the_latest_matches(vocabulary):
    chance, found = random.Random(vocabulary), 0
    for _ in range(300):
        text = [chance.randrange(vocabulary) for _ in range(chance.randrange(60))]
        row, cut = RowText(text[: len(text) // 2]), len(text) // 2
        row.extend(text[cut:])
        most = chance.randrange(9)
        assert row.find(most) == brute_force(text, most)
        found += row.find(most) is not None
    assert found > 100


def test_copy_that_reaches_the_end_repeats_itself():
    assert RowText([1, 2, 3, 1, 2, 3, 1, 2]).find(7) == Copy([3, 1, 2, 3, 1, 2, 3], 5)
    assert RowText([4] * 40).find(3) == Copy([4, 4, 4], 32)
    assert RowText([1, 2]).find(3) is None and RowText().find(3) is None


def test_padding_is_no_text():
    ids, mask = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool()
    assert unpadded(ids, mask) == [[5, 6], [1, 2, 3, 4]] and unpadded(ids, None) == ids.tolist()
    earlier = torch.cat([mask.new_ones(2, 3), mask], dim=1)  # with the columns of an earlier turn in front
    assert unpadded(ids, earlier) == [[5, 6], [1, 2, 3, 4]]
    assert unpadded(ids[:, :0], mask) == [[], []]  # embeddings in place of ids


@pytest.mark.parametrize("sampled", [False, True])
def test_record_learns_by_length_of_match(sampled):
    record, short, long = CopyRecord(sampled), Copy([1, 2, 3], 2), Copy([1, 2], 20)
    first = record.confidence(short)
    assert first == sorted(first) and record.confidence(long)[0] > first[-1]  # each right token makes the match longer
    for _ in range(60):
        record.update(short, verified=3, accepted=0)
        record.update(long, verified=2, accepted=2)
    assert record.confidence(short)[0] < 0.1 < record.confidence(long)[0] < 1.0
    assert record.confidence(short)[1:] == first[1:]  # never reached, nothing learnt
    assert record.confidence(long)[0] > 0.95


def test_net_gain_is_that_of_the_best_prefix():
    chance = random.Random(0)
    for _ in range(200):
        scores = [chance.random() for _ in range(chance.randrange(6))]
        token, slot = chance.random(), chance.random() * 0.5
        prefixes, alive, total = [0.0], 1.0, 0.0
        for score in scores:
            alive *= score
            total += token * alive - slot
            prefixes.append(total)
        assert net_gain(scores, token, slot) == pytest.approx(max(prefixes))


def test_draft_record_follows_what_drafts_bring():
    record = DraftRecord()
    for _ in range(40):
        record.update(verified=5.0, kept=0.25)
    assert record.kept == pytest.approx(0.25, abs=0.1) and record.verified == pytest.approx(5.0, abs=0.1)


# ------------------------------------------------------------------------------------------------ copies or drafts


def offer(copies, kept=1.0, ready=True, values=None):
    choice = CopyChoice(sampled=False)
    for _ in range(50):
        choice.drafts.update(3.0, kept)
    values = values or [1.0] * len(copies)
    return choice.offer(copies, values, [ready] * len(copies), plain=0.05, slot=0.001)


def test_longer_matches_are_copied_and_shorter_ones_drafted():
    long, short = Copy([1] * 7, 30), Copy([1] * 7, 2)
    mixed = offer([long, short, None], kept=2.5)
    assert mixed.taken(drafted=True) == [long, None, None]
    assert mixed.taken(drafted=False) == [long, short, None]
    assert mixed.gain_of_drafting > 0
    assert offer([long]).gain_of_drafting == 0.0
    assert offer([short], kept=2.5, ready=False).gain_of_drafting == 0.0  # its gate is closed
    assert offer([None, None]) is None


def test_a_row_that_sets_the_pace_is_worth_a_draft():
    copies = [Copy([1] * 7, 30), None]
    even, lagging = offer(copies), offer(copies, values=[0.2, 1.8])
    assert lagging.gain_of_drafting > even.gain_of_drafting > 0


def policy(cost, rows=1, **changes):
    return ThroughputPolicy(Settings(7, 0.0, "throughput", 7), cost, 7, rows, **changes)


@pytest.mark.parametrize(("right", "goes_on"), [(3, True), (0, False)])
def test_drafts_answer_for_themselves(right, goes_on):
    """Beside a row whose copies are all right a draft goes on if it is right too, and stops if it is not."""
    acting, drafted, copied = policy(KnownCost(base=0.05, per_token=0.001, draft=0.002), rows=2), [], 0
    limits = [99, 99]
    for _ in range(40):
        acting.offer([0, 1], [Copy([1] * 7, 30), None], limits, 10, 0)
        drafted.append(acting.wants_draft([0, 1], 10, 0))
        width = 7 if drafted[-1] else 0
        plan = acting.plan([0, 1], [[0.9] * 7] * 2 if width else None, width, limits, 10, 0)
        copied += bool(plan.copies)
        kept = [plan.lengths[0], min(right, plan.lengths[1])]
        acting.observe([0, 1], plan, kept, 2 + sum(kept), drafted[-1])
    assert drafted[0] and all(drafted) == goes_on  # what the copies bring is not the draft's, nor what they cost
    assert goes_on or sum(drafted[-20:]) <= 3  # probes
    assert copied  # less and less, as the row that copies gets ahead and can wait


def test_copies_go_on_while_the_gate_rests():
    acting = policy(KnownCost())
    acting.wants_draft([0], 10, 0)
    acting.gate.close()
    acting.offer([0], [Copy([1] * 5, 30)], [99], 10, 0)
    assert not acting.wants_draft([0], 10, 0)
    plan = acting.plan([0], None, 0, [99], 10, 0)
    assert plan.lengths == [5] and plan.seconds == pytest.approx(0.056) and len(plan.confidence[0]) == 5
    acting.observe([0], plan, [5], 6, False)


@pytest.mark.parametrize("width", [0, 7])
def test_drafting_ahead_waits_where_copying_needs_no_draft(width):
    """Also while the round in progress still has a block that was drafted ahead."""
    acting = policy(COPIES_ONLY)
    acting.wants_draft([0], 10, 0)
    acting.offer([0], [Copy([1] * 7, 30)], [99], 10, 0)
    plan = acting.plan([0], [[0.5] * 7] if width else None, width, [99], 10, 0)
    assert plan.copies and not acting.wants_draft([0], 10, 0)  # asked during the round
    acting.observe([0], plan, [7], 8, width > 0)
    assert acting.wants_draft([0], 10, 0)  # and now for a round without a copy


def test_copies_that_do_not_pay_are_not_taken():
    choice = CopyChoice(sampled=False)
    for _ in range(200):
        choice.record.update(Copy([1], 2), 1, 0)
    assert choice.offer([Copy([1] * 3, 2)], [1.0], [True], plain=0.05, slot=0.02).taken(drafted=False) == [None]


# ------------------------------------------------------------------------------------------------ in the loop


def looping(target):
    """`target` with little but its last token to go by, so that greedy text soon repeats itself."""
    target = copy.deepcopy(target)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.003)
            layer.mlp.down_proj.weight.mul_(0.003)
    return target


def ahead(monkeypatch):
    """Drafts the next block before the host knows this one, as on accelerators."""
    made = DecodingLoop.__init__
    monkeypatch.setattr(DecodingLoop, "__init__", lambda self, *a, **k: made(self, *a, **{**k, "draft_ahead": True}))


@pytest.mark.exactness
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("cost", [COPIES_ONLY, BOTH], ids=["copies only", "both"])
@pytest.mark.parametrize("drafts_ahead", [False, True])
def test_greedy_output_is_plain_generates(attention, cost, drafts_ahead, monkeypatch):
    """Ragged left-padded rows; random targets fall into loops, so that copies are accepted."""
    if drafts_ahead:
        ahead(monkeypatch)
    target = looping(build("qwen3", attention))
    use_cost(monkeypatch, cost)
    draft = planted_for(target, PROMPTS, 96, pattern=(1, 0, 3), confidence=[0.6] * 7)
    use_schedule(draft, "throughput")
    stats = check_exact(target, draft, PROMPTS, max_new_tokens=96).dspark_stats
    assert stats.copied > 30
    assert stats.tau > 1.5
    for event in stats.round_events:
        lengths = list(map(len, event.drafted))
        assert [len(row) for row in event.confidence or event.drafted] == lengths
        assert [len(row) for row in event.survival or event.drafted] == lengths
        assert all(kept <= checked for kept, checked in zip(event.accepted, event.verify_lengths, strict=True))
        assert all(checked <= length for checked, length in zip(event.verify_lengths, lengths, strict=True))
    if cost is BOTH:
        mixed = [event for event in stats.round_events if any(event.copied) and event.draft_width]
        assert mixed and len(stats.acceptance_by_position) > 0
    elif not drafts_ahead:
        assert not any(event.draft_width for event in stats.round_events if any(event.copied))


@pytest.mark.exactness
def test_processors_see_the_copied_prefixes(monkeypatch):
    """A penalty on repetition works against copies, and on each of their positions by its true prefix."""
    target = looping(build("qwen3", "sdpa"))
    use_cost(monkeypatch, COPIES_ONLY)
    draft = use_schedule(random_draft(target), "throughput")
    for penalty in (1.01, 1.3):
        kwargs = {"do_sample": False, "repetition_penalty": penalty, "max_new_tokens": 64}
        with record_generation() as stats:
            got = [assisted(target, draft, [row], **kwargs).sequences for row in PROMPTS]
        assert stats.verified > 20 and stats.copied > 0
        for row, sequence in zip(PROMPTS, got, strict=True):
            assert torch.equal(sequence, target.generate(**left_pad([row]), **kwargs))


class CountsVerified:
    """Rows that copied and rows that were drafted for, over the rounds of a test."""

    def __init__(self, stats):
        events = [event for event in stats.round_events if event.copied]
        pairs = [pair for event in events for pair in zip(event.copied, event.verify_lengths, strict=True)]
        self.copied = sum(length for copy, length in pairs if copy)
        self.beside = sum(length for copy, length in pairs if not copy)


SHARP = {"temperature": 0.4, "top_k": 0}


def repeating_pair():
    """A target of eight tokens, a draft with random weights, and a prompt that goes on as the target would."""
    target = looping(small_target())
    prompt = PROMPT + plain_greedy(target, [PROMPT], 14)[0]
    return target, use_schedule(small_draft(target), "throughput"), prompt


def samples_with(target, draft, prompt, settings, length=5, rows=4000, batches=5):
    torch.manual_seed(3)
    ids = torch.tensor([prompt]).repeat(rows, 1)
    with record_generation() as stats:
        found = [
            target.generate(ids, assistant_model=draft, max_new_tokens=length, do_sample=True, **settings)
            for _ in range(batches)
        ]
    return torch.cat(found)[:, len(prompt) :], stats


def windows(target, prompt, samples, settings):
    joint = exact_joint(target, prompt, 5, processors(**settings))
    check_distribution(samples[:, :3], joint.sum(dim=(3, 4)))
    check_distribution(samples[:, 2:4], joint.sum(dim=(0, 1, 4)))
    check_distribution(samples[:, 3:], joint.sum(dim=(0, 1, 2)))


@pytest.mark.exactness
@pytest.mark.parametrize("cost", [COPIES_ONLY, BOTH_IN_LARGE_BATCHES], ids=["copies only", "both"])
def test_sampling_follows_the_target(cost, monkeypatch):
    """By enumeration over a vocabulary of eight tokens."""
    target, draft, prompt = repeating_pair()
    use_cost(monkeypatch, cost)
    monkeypatch.setattr(DraftRecord, "kept", 0.7)  # worse than the longer matches, better than the shorter ones
    samples, stats = samples_with(target, draft, prompt, SHARP)
    counts = CountsVerified(stats)
    assert counts.copied > 2000 and stats.copied > 500
    assert (counts.beside > 500) == (cost is BOTH_IN_LARGE_BATCHES)
    windows(target, prompt, samples, SHARP)


@pytest.mark.exactness
def test_the_check_notices_a_wrong_q(monkeypatch):
    """Copies taken for draws from the draft's distribution would be kept too often: the test above must see it."""
    target, draft, prompt = repeating_pair()
    use_cost(monkeypatch, COPIES_ONLY)
    original = loop_module.with_copies

    def biased(*args):
        block = original(*args)
        block.q_drawn *= 0.5
        return block

    monkeypatch.setattr(loop_module, "with_copies", biased)
    samples, _ = samples_with(target, draft, prompt, SHARP)
    with pytest.raises(AssertionError):
        windows(target, prompt, samples, SHARP)


# ------------------------------------------------------------------------------------------------ the knob


def test_copies_can_be_limited_and_switched_off(monkeypatch):
    target = looping(build("qwen3", "sdpa"))
    use_cost(monkeypatch, COPIES_ONLY)
    draft = use_schedule(random_draft(target), "throughput")
    expected = plain_greedy(target, PROMPTS, 64)
    for most in (0, 2, 12):
        draft.generation_config.prompt_lookup_num_tokens = most
        output = assisted(target, draft, PROMPTS)
        events = output.dspark_stats.round_events
        lengths = [n for event in events for n, copied in zip(event.verify_lengths, event.copied) if copied]
        assert max(lengths, default=0) == most and (output.dspark_stats.copied > 0) == (most > 0)
        assert new_tokens(output, PROMPTS) == expected
    assert draft.generation_config.prompt_lookup_num_tokens == 12


@pytest.mark.parametrize("schedule", ["constant", "confidence"])
def test_fixed_rules_do_not_copy(schedule):
    target = build("qwen3", "sdpa")
    draft = use_schedule(planted_draft(target), schedule, 0.5)
    references = [p + c for p, c in zip(PROMPTS, plain_greedy(target, PROMPTS, 64), strict=True)]
    stats = assisted(target, draft.plan(references), PROMPTS).dspark_stats
    assert stats.copied == 0 and not any(any(event.copied) for event in stats.round_events)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "7"])
def test_a_wrong_number_of_copied_tokens_is_refused(wrong):
    target = build("qwen3", "sdpa")
    draft = random_draft(target)
    draft.generation_config.prompt_lookup_num_tokens = wrong
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens"):
        resolve_settings(draft, target.generation_config)


def test_lookup_asked_of_generate_names_the_knob():
    target = build("qwen3", "sdpa")
    with pytest.raises(ValueError, match="draft.generation_config.prompt_lookup_num_tokens"):
        assisted(target, random_draft(target), PROMPTS, prompt_lookup_num_tokens=5)


def test_the_knob_is_saved_with_the_draft(tmp_path):
    draft = random_draft(build("qwen3", "sdpa"))
    draft.generation_config.prompt_lookup_num_tokens = 3
    draft.save_pretrained(tmp_path)
    assert type(draft).from_pretrained(tmp_path).generation_config.prompt_lookup_num_tokens == 3
