"""How many slots of a block are drafted: a slot as long as it pays, and one to look beyond."""

import pytest
import torch
from schedules import KnownCost

from dspark_hf.draft_width import DraftWidth
from dspark_hf.generation.policy import ThroughputPolicy
from dspark_hf.generation.settings import Settings


def test_slots_that_pay_and_one_more():
    width = DraftWidth(7)
    assert width.tokens == 7
    width.observe([0.3, 0.2, 0.05, 0.0, 0.0, 0.0, 0.0], slot_seconds=0.1)
    assert width.tokens == 3
    width.observe([0.0] * 3, slot_seconds=0.1)  # one poor round: the first two slots still pay on average
    assert width.tokens == 3
    for _ in range(5):
        width.observe([0.0] * width.tokens, slot_seconds=0.1)
    assert width.tokens == 1
    tokens = []
    for _ in range(7):
        width.observe([0.5] * width.tokens, slot_seconds=0.1)
        tokens.append(width.tokens)
    assert tokens == [2, 3, 4, 5, 6, 7, 7]


def test_free_slots_are_drafted_while_they_save_anything():
    width = DraftWidth(5)
    width.observe([0.1, 0.1, 0.1, 0.01, 0.01], slot_seconds=0.0)
    assert width.tokens == 5
    assert DraftWidth(1).tokens == 1


class SlotCost(KnownCost):
    """Every drafted token costs the same."""

    def draft_seconds(self, rows=1, tokens=0):
        return self.draft * (tokens or 7)


@pytest.mark.parametrize("per_slot, expected", [(0.0, 4), (0.012, 3)])
def test_the_policy_drafts_less_where_slots_are_dear(per_slot, expected):
    """Four rows of which three slots are worth verifying, but only two are worth a dear draft."""
    settings = Settings(num_tokens=7, schedule="throughput", threshold=0.0)
    policy = ThroughputPolicy(settings, SlotCost(base=0.05, per_token=0.001, draft=per_slot), width=7, rows=4)
    rows, context = list(range(4)), 100
    for _ in range(6):
        assert policy.wants_draft(rows, context, 0)
        width = policy.draft_tokens
        scores = [[1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5][:width]] * 4
        plan = policy.plan(rows, scores, width, [40] * 4, context, 0)
        kept = [min(2, length) for length in plan.lengths]
        policy.observe(rows, plan, kept, sum(kept) + 4, True)
        assert policy._round is None
    assert policy.draft_tokens == expected, plan.lengths


def test_savings_are_tokens_at_their_price_less_their_verification():
    settings = Settings(num_tokens=2, schedule="throughput", threshold=0.0)
    policy = ThroughputPolicy(settings, KnownCost(base=0.1, per_token=0.01, draft=0.0), width=2, rows=2)
    plan = policy.plan([0, 1], [[0.9, 0.1], [0.8, 0.05]], 2, [9, 9], 100, 0)
    assert plan.lengths == [1, 1]
    price = min(0.12 / 2, plan.seconds / plan.expected_tokens)
    assert policy._round.savings == pytest.approx([(0.9 + 0.8) * price - 0.02, 0.0])
    assert torch.tensor(plan.seconds).item() == pytest.approx(0.14)
