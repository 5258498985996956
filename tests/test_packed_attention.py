"""What a packed forward computes, and what its attention hands to the model's own function."""

import copy
from types import SimpleNamespace

import pytest
import torch
from targets import build

from dspark_hf._compat import CACHE_KEY
from dspark_hf.generation import packed_attention as packed
from dspark_hf.generation.capture import decoder_layers
from dspark_hf.generation.masks import VerifyStep, verifying
from dspark_hf.generation.ragged_cache import RaggedCache, new_dynamic_cache
from dspark_hf.generation.verifier import Verifier

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


@pytest.mark.parametrize(
    "dtype,counts,computed",
    [
        (torch.bfloat16, [4, 1, 7], 16),
        (torch.bfloat16, [2, 1, 3], 6),
        (torch.bfloat16, [5, 5, 5], 15),
        (torch.bfloat16, [8] * 8 + [2], 80),
        (torch.float32, [4, 1, 7], 12),
    ],
)
def test_ragged_half_precision_steps_keep_to_few_numbers_of_tokens(dtype, counts, computed):
    """The tokens that fill a step up change nothing: not the logits, not the cache, not the tokens behind them."""
    target = copy.deepcopy(build("qwen3", "sdpa")).to(dtype)
    seen = []
    target.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].numel()))
    rows, width, past = len(counts), max(counts), 6
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(5, 60, (rows, past), generator=generator)
    tokens = torch.randint(5, 60, (rows, width), generator=generator)
    found = []
    for fill in (None, int):
        source = new_dynamic_cache(target.config)
        target(input_ids=prompt, use_cache=True, **{CACHE_KEY: source})
        cache = RaggedCache(source, [past] * rows, past + 2 * width)
        verifier = Verifier(target, decoder_layers(target), cache, "packed", None)
        verifier.fill = fill or verifier.fill
        positions = torch.full((rows,), past)
        logits, _, index, offsets = verifier(tokens, counts, positions, None)
        assert len(index) == len(offsets) == seen[-1] == (sum(counts) if fill else computed)
        cache.lengths = [past + count for count in counts]
        following, *_ = verifier(tokens[:, :1], [1] * rows, positions + torch.tensor(counts), None)
        found.append((logits, following))
    for filled, alone in zip(*found):
        assert filled.shape == alone.shape
        torch.testing.assert_close(filled, alone, rtol=0.0, atol=0.03 if dtype is torch.bfloat16 else 1e-6)
