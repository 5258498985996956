"""What the attention of a packed forward hands to the model's own function."""

from types import SimpleNamespace

import pytest
import torch

from dspark_hf.generation import packed_attention as packed
from dspark_hf.generation.masks import VerifyStep, verifying

HEADS, DIM, SLOTS = 4, 8, 6


@pytest.fixture
def seen(monkeypatch):
    """Arguments of the model's attention function, which answers with the queries."""
    calls = []

    def function(module, query, key, value, mask, **kwargs):
        calls.append(SimpleNamespace(query=query, mask=mask))
        return query.transpose(1, 2), None

    monkeypatch.setattr(packed, "attention_function", lambda module, name: function)
    return calls


def attend(counts, mask):
    rows, width = len(counts), max(counts)
    flat = torch.cat([torch.arange(count) + row * width for row, count in enumerate(counts)])
    step = VerifyStep(counts, torch.full((rows,), SLOTS - width), True, flat, "sdpa")
    query = torch.randn(1, HEADS, sum(counts), DIM)
    keys = torch.zeros(rows, HEADS, SLOTS, DIM)
    with verifying(step):
        output, _ = packed.packed_attention(torch.nn.Identity(), query, keys, keys, mask)
    assert output.equal(query.transpose(1, 2)), "packed again as it was"


def test_a_mask_that_hides_nothing_is_left_out(seen):
    attend([1], torch.zeros(1, 1, 1, SLOTS))
    attend([1, 1], torch.zeros(2, 1, 1, SLOTS))
    assert [call.mask for call in seen] == [None, None]


def test_a_mask_that_hides_something_or_orders_a_block_is_kept(seen):
    hiding = torch.zeros(2, 1, 1, SLOTS)
    hiding[1, ..., :2] = torch.finfo(torch.float32).min
    attend([1, 1], hiding)
    attend([2], torch.zeros(1, 1, 2, SLOTS))
    assert [call.mask is None for call in seen] == [False, False]


def test_each_mask_is_looked_through_once():
    step, mask = VerifyStep([1], torch.tensor([5]), True, torch.arange(1), "sdpa"), torch.zeros(1, 1, 1, SLOTS)
    assert step.hides_nothing(mask)
    mask += 1.0
    assert step.hides_nothing(mask), "one look a forward"
    assert not step.hides_nothing(mask.clone())


@pytest.mark.parametrize("counts", [[3], [1], [2, 2], [3, 1, 2]])
def test_rows_are_laid_out_as_a_rectangle(seen, counts):
    width = max(counts)
    attend(counts, torch.zeros(len(counts), 1, width, SLOTS))
    assert seen[0].query.shape == (len(counts), HEADS, width, DIM)
