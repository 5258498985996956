"""A cache handed from turn to turn: the output stays plain generate()'s and the draft remembers its context."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDraftModel
from dspark_hf._compat import CACHE_KEY

GOLDEN = Path(__file__).parent / "golden"
FIRST, LATER = 9, 5


@pytest.fixture(scope="module")
def pair():
    target = AutoModelForCausalLM.from_pretrained(GOLDEN / "qwen3_target", dtype=torch.float32)
    draft = DSparkDraftModel.from_pretrained(GOLDEN / "qwen3_rnn" / "draft")
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    return target, draft


def _prompts(seed: int, padded: bool):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, 180, (2, FIRST), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    return ids, mask, torch.randint(8, 180, (2, LATER), generator=generator)


def _turn(target, ids, mask, cache=None, **kwargs):
    extra = {} if cache is None else {CACHE_KEY: cache}
    return target.generate(
        ids, attention_mask=mask, max_new_tokens=24, do_sample=False, return_dict_in_generate=True, **extra, **kwargs
    )


def _longer(mask, ids):
    return torch.cat([mask, mask.new_ones(mask.shape[0], ids.shape[1] - mask.shape[1])], dim=1)


@pytest.mark.exactness
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("padded", [False, True])
def test_second_turn_equals_plain_and_a_fresh_call(pair, seed, padded):
    target, draft = pair
    ids, mask, more = _prompts(seed, padded)
    first = _turn(target, ids, mask, assistant_model=draft)
    plain = _turn(target, ids, mask)
    assert torch.equal(first.sequences, plain.sequences)
    for ours, theirs in zip(first[CACHE_KEY].layers, plain[CACHE_KEY].layers):
        real = mask[:, None, :, None].bool()
        assert ours.keys.shape == theirs.keys.shape
        # padded slots hold what a masked query computed; nothing reads them
        difference = (ours.keys - theirs.keys)[:, :, :FIRST].masked_fill(~real, 0).abs().max()
        assert difference < 1e-4 and (ours.keys - theirs.keys)[:, :, FIRST:].abs().max() < 1e-4

    ids = torch.cat([first.sequences, more], dim=1)
    mask = _longer(mask, ids)
    fresh = _turn(target, ids, mask, assistant_model=draft)
    second = _turn(target, ids, mask, cache=first[CACHE_KEY], assistant_model=draft)
    assert torch.equal(second.sequences, _turn(target, ids, mask, cache=plain[CACHE_KEY]).sequences)
    # with its context kept, the draft proposes what it would have had it read everything again
    assert second.dspark_stats.accepted_lengths == fresh.dspark_stats.accepted_lengths
    assert second.dspark_stats.accepted > 0


@pytest.mark.exactness
def test_a_cache_from_plain_generate_is_taken_too(pair):
    target, draft = pair
    ids, mask, more = _prompts(5, padded=True)
    first, twin = _turn(target, ids, mask), _turn(target, ids, mask)
    ids = torch.cat([first.sequences, more], dim=1)
    mask = _longer(mask, ids)
    second = _turn(target, ids, mask, cache=first[CACHE_KEY], assistant_model=draft)
    assert torch.equal(second.sequences, _turn(target, ids, mask, cache=twin[CACHE_KEY]).sequences)


@pytest.mark.exactness
def test_a_context_that_no_longer_fits_is_ignored(pair):
    target, draft = pair
    ids, mask, more = _prompts(6, padded=False)
    first, twin = _turn(target, ids, mask, assistant_model=draft), _turn(target, ids, mask)
    for output in (first, twin):
        output[CACHE_KEY].crop(-4)
    ids = torch.cat([first.sequences[:, :-4], more], dim=1)
    mask = _longer(mask, ids)
    second = _turn(target, ids, mask, cache=first[CACHE_KEY], assistant_model=draft)
    assert torch.equal(second.sequences, _turn(target, ids, mask, cache=twin[CACHE_KEY]).sequences)


@pytest.mark.exactness
@pytest.mark.parametrize("schedule", ["constant", "confidence", "throughput"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_drafting_ahead_changes_nothing(pair, schedule, do_sample, monkeypatch):
    """What accelerators do to save a copy per round; on a CPU it is off."""
    from dspark_hf.generation import hook

    target, draft = pair
    ids, mask, _ = _prompts(7, padded=True)
    draft.generation_config.num_assistant_tokens_schedule = schedule
    draft.generation_config.assistant_confidence_threshold = 0.3
    loop = hook.DecodingLoop
    monkeypatch.setattr(hook, "DecodingLoop", lambda *args, **kwargs: loop(*args, draft_ahead=True, **kwargs))
    try:
        out = target.generate(ids, attention_mask=mask, assistant_model=draft, max_new_tokens=40, do_sample=do_sample)
        if not do_sample:
            plain = target.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
            assert torch.equal(out, plain)
    finally:
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
