"""Caches: handed in from an earlier turn, handed back for the next one, and the kinds that `generate()` knows."""

from __future__ import annotations

import pytest
import torch
from planted import planted_draft, planted_for, random_draft
from running import assisted, new_tokens
from targets import build, clear_prompts, left_pad, plain_greedy
from transformers import DynamicCache, Qwen3ForCausalLM

from dspark_hf import DSparkDraftModel
from dspark_hf._compat import CACHE_KEY

pytestmark = pytest.mark.exactness

LENGTHS = (3, 7, 12)


def next_turn(sequences: torch.Tensor, mask: torch.Tensor, extra: list[list[int]]):
    """Inputs of a second turn: everything so far, then new tokens of each row."""
    new = torch.tensor(extra)
    seen = torch.ones(len(extra), sequences.shape[1] - mask.shape[1], dtype=torch.long)
    return torch.cat([sequences, new], dim=1), torch.cat([mask, seen, torch.ones_like(new)], dim=1)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize("first", ["plain", "assisted"])
@pytest.mark.parametrize("second", ["plain", "assisted"])
def test_cache_of_an_earlier_turn(first, second, name, size):
    """A cache handed in and the cache handed back, between plain and assisted turns in every order."""
    if first == second == "plain":
        pytest.skip("that is the reference")
    target = build(name, "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)[:size]
    inputs = left_pad(rows)
    kwargs = {"max_new_tokens": 12, "return_dict_in_generate": True}
    one = target.generate(
        **inputs, **kwargs, assistant_model=planted_for(target, rows) if first == "assisted" else None
    )
    extra = [[40 + row, 8, 77, 21] for row in range(size)]
    ids, mask = next_turn(one.sequences, inputs["attention_mask"], extra)
    expected = target.generate(input_ids=ids, attention_mask=mask, max_new_tokens=20)
    cache = one[CACHE_KEY]
    assert cache is not None and cache.get_seq_length() == one.sequences.shape[1] - 1
    draft = None
    if second == "assisted":
        texts = [[t for t, m in zip(i, k, strict=True) if m] for i, k in zip(ids.tolist(), mask.tolist(), strict=True)]
        draft = planted_draft(target)
        draft.plan([text + e[ids.shape[1] :] for text, e in zip(texts, expected.tolist(), strict=True)])
    two = target.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=20, assistant_model=draft, return_dict_in_generate=True,
        **{CACHE_KEY: cache},
    )  # fmt: skip
    assert torch.equal(two.sequences, expected)
    if second == "assisted":
        assert two.dspark_stats.accepted >= two.dspark_stats.rounds


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@pytest.mark.parametrize("second", ["plain", "assisted"])
def test_turns_after_rows_of_different_lengths(second, name):
    """Rows that ended early carry padding between their turns, which the mask of the next turn hides."""
    target = build(name, "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    inputs = left_pad(rows)
    free = plain_greedy(target, rows, 64)
    eos = [free[0][9], free[2][4]]
    kwargs = {"max_new_tokens": 16, "return_dict_in_generate": True, "eos_token_id": eos}
    one = target.generate(**inputs, **kwargs, assistant_model=planted_for(target, rows))
    assert torch.equal(one.sequences, target.generate(**inputs, **kwargs).sequences)
    ids, mask = next_turn(one.sequences, inputs["attention_mask"], [[40 + row, 8, 77] for row in range(3)])
    for row in range(3):
        new = one.sequences[row, inputs["input_ids"].shape[1] :].tolist()
        end = next((i for i, token in enumerate(new) if token in eos), len(new) - 1)
        mask[row, inputs["input_ids"].shape[1] + end + 1 : one.sequences.shape[1]] = 0
    assert (mask[:, inputs["input_ids"].shape[1] : one.sequences.shape[1]] == 0).any()
    expected = target.generate(input_ids=ids, attention_mask=mask, max_new_tokens=20)
    draft = None
    if second == "assisted":
        texts = [[t for t, m in zip(i, k, strict=True) if m] for i, k in zip(ids.tolist(), mask.tolist(), strict=True)]
        draft = planted_draft(target)
        draft.plan([text + e[ids.shape[1] :] for text, e in zip(texts, expected.tolist(), strict=True)])
    two = target.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=20, assistant_model=draft, **{CACHE_KEY: one[CACHE_KEY]}
    )
    assert torch.equal(two, expected)


@pytest.mark.parametrize("size", [1, 3])
def test_the_drafts_context_comes_with_the_cache(size, tiny_pair):
    """A trained draft accepts in the second turn what it accepts without a cache: it has not lost the first turn."""
    target = Qwen3ForCausalLM.from_pretrained(tiny_pair[0]).eval()
    draft = DSparkDraftModel.from_pretrained(tiny_pair[1])
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    prompt = [146, 38, 154, 86, 151, 109, 20, 64, 19, 150, 42, 82]
    rows = [prompt, prompt[:5], prompt[2:9]][:size]
    inputs = left_pad(rows)
    kwargs = {"max_new_tokens": 24, "return_dict_in_generate": True, "pad_token_id": 0, "do_sample": False}
    one = target.generate(**inputs, **kwargs, assistant_model=draft)
    ids, mask = next_turn(one.sequences, inputs["attention_mask"], [prompt[:4]] * size)
    again = {"input_ids": ids, "attention_mask": mask, **kwargs}
    without = target.generate(**again, assistant_model=draft)
    two = target.generate(**again, assistant_model=draft, **{CACHE_KEY: one[CACHE_KEY]})
    assert torch.equal(two.sequences, without.sequences)
    assert two.dspark_stats.accepted_lengths == without.dspark_stats.accepted_lengths
    assert two.dspark_stats.tau > 1.5
    # A third turn behind the second, on the cache that has been through both.
    ids, mask = next_turn(two.sequences, mask, [prompt[5:8]] * size)
    again = {"input_ids": ids, "attention_mask": mask, **kwargs}
    without = target.generate(**again, assistant_model=draft)
    three = target.generate(**again, assistant_model=draft, **{CACHE_KEY: two[CACHE_KEY]})
    assert torch.equal(three.sequences, without.sequences)
    assert three.dspark_stats.accepted_lengths == without.dspark_stats.accepted_lengths


def test_a_cache_of_another_draft():
    """The draft of the second turn is not that of the first: nothing of the other's context is used."""
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    inputs = left_pad(rows)
    one = target.generate(
        **inputs, max_new_tokens=12, return_dict_in_generate=True, assistant_model=random_draft(target, "rnn")
    )
    ids, mask = next_turn(one.sequences, inputs["attention_mask"], [[40, 8]] * 3)
    expected = target.generate(input_ids=ids, attention_mask=mask, max_new_tokens=20)
    other = random_draft(target, "vanilla", seed=9, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    two = target.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=20, assistant_model=other, **{CACHE_KEY: one[CACHE_KEY]}
    )
    assert torch.equal(two, expected)


def test_an_empty_cache_handed_in():
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    output = assisted(target, planted_for(target, rows), rows, **{CACHE_KEY: DynamicCache(config=target.config)})
    assert new_tokens(output, rows) == plain_greedy(target, rows, 64)


@pytest.mark.parametrize(
    "kwargs", [{"use_cache": False}, {"cache_implementation": "static"}, {"cache_implementation": "dynamic"}]
)
def test_cache_options_do_not_change_the_output(kwargs):
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    output = assisted(target, planted_for(target, rows), rows, **kwargs)
    assert new_tokens(output, rows) == plain_greedy(target, rows, 64)
