"""Targets that the batched loop cannot serve: another route or a clear refusal, never a wrong answer, one warning."""

from __future__ import annotations

import weakref

import pytest
import torch
from planted import planted_draft, random_draft
from running import BATCHED_PATHS, Messages, assisted, new_tokens, plain_batch
from targets import RECURRENT, attentions, build, clear_prompts, left_pad, plain, plain_greedy, prompts
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GenerationConfig,
    LlamaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from dspark_hf.generation import capability

LENGTHS = (3, 7, 12)


@pytest.mark.exactness
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_targets(name, attn):
    """Their state cannot be lowered to a length: the output is plain generate's, and one warning says why."""
    if attn not in attentions(name):
        pytest.skip(f"{name} has no {attn} attention")
    target = build(name, attn)
    rows = prompts(LENGTHS, seed=3)
    expected = plain_batch(target, rows, max_new_tokens=24)
    draft = planted_draft(target)
    draft.plan([row + e[max(LENGTHS) :] for row, e in zip(rows, expected.tolist(), strict=True)])
    with Messages() as messages:
        outputs = [assisted(target, draft, rows, max_new_tokens=24) for _ in range(2)]
        alone = assisted(target, draft, rows[1:2], max_new_tokens=24)
    for output in outputs:
        assert torch.equal(output.sequences, expected)
        assert output.dspark_stats.path == "plain"
        assert output.dspark_stats.new_tokens == 3 * 24
    assert alone.sequences[0].tolist() == rows[1] + plain(target, rows[1], max_new_tokens=24)
    said = messages.matching("without the DSpark draft")
    assert len(said) == 1, said
    assert type(target).__name__ in said[0]


@pytest.mark.exactness
@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "mamba"])
def test_recurrent_targets_keep_their_options(name):
    """End of sequence, scores, sampling with a seed: all of it is plain generate's."""
    target = build(name, "eager")
    rows = prompts(LENGTHS, seed=4)
    draft = random_draft(target)
    free = plain_batch(target, rows, max_new_tokens=24)
    asked = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 24}
    eos = free[0, max(LENGTHS) + 5].item()
    expected = target.generate(**left_pad(rows), eos_token_id=eos, **asked)
    output = target.generate(**left_pad(rows), eos_token_id=eos, assistant_model=draft, **asked)
    assert torch.equal(output.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(output.scores, expected.scores, strict=True))
    outputs = []
    for assistant in (None, draft):
        torch.manual_seed(3)
        outputs.append(target.generate(**left_pad(rows), assistant_model=assistant, do_sample=True, max_new_tokens=24))
    assert torch.equal(*outputs)


class ForgetfulLlama(LlamaForCausalLM):
    """Its forward of several tokens behind a cache is wrong, as happens; single tokens and whole prompts are right."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is not None and input_ids.shape[1] > 1 and cache.get_seq_length() > input_ids.shape[1]:
            output.logits = output.logits.roll(1, dims=-1)
        return output


class StrangeLlama(LlamaForCausalLM):
    """Its forward cannot take more than one sequence length per batch nor positions of its own."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() > 2 or isinstance(attention_mask, dict):
            raise RuntimeError("this model makes its own masks")
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


def variant(model_class, seed: int = 0):
    base = build("llama", "sdpa", seed=seed)
    model = model_class(base.config).float().eval()
    model.load_state_dict(base.state_dict())
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None, do_sample=False)
    return model


@pytest.mark.exactness
def test_a_target_whose_cached_forward_is_wrong():
    """The self-check sees it: nothing but plain decoding is right for such a target."""
    target = variant(ForgetfulLlama)
    rows = clear_prompts(build("llama", "sdpa"), LENGTHS, 32)
    expected = plain_greedy(build("llama", "sdpa"), rows, 32)
    draft = planted_draft(target).plan([p + c for p, c in zip(rows, expected, strict=True)])
    with Messages() as messages:
        output = assisted(target, draft, rows, max_new_tokens=32)
        alone = assisted(target, draft, rows[:1], max_new_tokens=32)
    assert new_tokens(output, rows) == expected and new_tokens(alone, rows[:1]) == expected[:1]
    assert output.dspark_stats.path == alone.dspark_stats.path == "plain"
    assert len(messages.matching("without the DSpark draft")) == 1


def bloom():
    config = BloomConfig(
        vocab_size=96, hidden_size=64, n_layer=3, n_head=4, initializer_range=0.3, pad_token_id=0, bos_token_id=None,
        eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(5)
    model = BloomForCausalLM(config).float().eval()
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None, do_sample=False)
    return model


SEQUENTIAL = {"own masks": lambda: variant(StrangeLlama, seed=3)}


@pytest.mark.exactness
@pytest.mark.parametrize("pattern", [(0, 3, 7), (7,)])
def test_a_target_without_position_ids(pattern):
    """Alibi instead of positions: whichever route the self-check allows, the output is plain generate's."""
    target = bloom()
    rows = prompts(LENGTHS, seed=6)
    expected = plain_batch(target, rows, max_new_tokens=40)
    references = [row + e[max(LENGTHS) :] for row, e in zip(rows, expected.tolist(), strict=True)]
    output = assisted(target, planted_draft(target).plan(references, pattern=pattern), rows, max_new_tokens=40)
    assert torch.equal(output.sequences, expected)
    for row in rows:
        single = plain(target, row, max_new_tokens=40)
        draft = planted_draft(target).plan([row + single], pattern=pattern)
        assert new_tokens(assisted(target, draft, [row], max_new_tokens=40), [row])[0] == single


@pytest.mark.exactness
@pytest.mark.parametrize("kind", SEQUENTIAL)
@pytest.mark.parametrize("pattern", [(0, 3, 7), (7,), (1, 2)])
def test_stock_loop_for_single_prompts(kind, pattern):
    """Where only the stock cache is right, a single prompt is still drafted for, through the candidate generator."""
    target = SEQUENTIAL[kind]()
    for row in prompts(LENGTHS, seed=6):
        expected = plain(target, row, max_new_tokens=40)
        draft = planted_draft(target).plan([row + expected], pattern=pattern)
        output = assisted(target, draft, [row], max_new_tokens=40)
        assert new_tokens(output, [row])[0] == expected
        assert output.dspark_stats.path == "sequential"
        assert output.dspark_stats.accepted > output.dspark_stats.rounds / 2
        committed = [token for event in output.dspark_stats.round_events for token in event.committed[0]]
        assert expected[0:1] + committed == expected or committed == expected


@pytest.mark.exactness
@pytest.mark.parametrize("kind", SEQUENTIAL)
def test_stock_loop_stops_where_plain_stops(kind):
    target = SEQUENTIAL[kind]()
    (row,) = prompts((7,), seed=6)
    free = plain(target, row, max_new_tokens=40)
    for step in range(0, 18):
        eos = free[step]
        expected = plain(target, row, max_new_tokens=40, eos_token_id=eos)
        draft = planted_draft(target).plan([row + free], pattern=(7, 3))
        output = assisted(target, draft, [row], max_new_tokens=40, eos_token_id=eos)
        assert new_tokens(output, [row])[0] == expected, step
    for budget in range(1, 12):
        draft = planted_draft(target).plan([row + free], pattern=(7, 3))
        assert new_tokens(assisted(target, draft, [row], max_new_tokens=budget), [row])[0] == free[:budget]


class EveryThird(StoppingCriteria):
    """A criterion that must see every prefix."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -3:].sum(dim=1) % 13 == 0


@pytest.mark.exactness
@pytest.mark.parametrize("kind", SEQUENTIAL)
def test_stock_loop_is_left_where_it_would_be_wrong(kind):
    """Batches and per-token criteria take plain decoding there."""
    target = SEQUENTIAL[kind]()
    rows = prompts(LENGTHS, seed=6)
    draft = random_draft(target)
    batch = assisted(target, draft, rows, max_new_tokens=20)
    assert torch.equal(batch.sequences, plain_batch(target, rows, max_new_tokens=20))
    assert batch.dspark_stats.path == "plain"
    kwargs = {"stopping_criteria": StoppingCriteriaList([EveryThird()]), "max_new_tokens": 40}
    assert torch.equal(assisted(target, draft, rows[:1], **kwargs).sequences, plain_batch(target, rows[:1], **kwargs))


def forget_decisions(monkeypatch) -> None:
    """As in a fresh process."""
    monkeypatch.setattr(capability, "_DECIDED", {})
    monkeypatch.setattr(capability, "_KNOWN", weakref.WeakKeyDictionary())


def test_the_self_check_runs_once_per_kind_of_target(monkeypatch):
    decided = []
    decide = capability._decide
    monkeypatch.setattr(capability, "_decide", lambda *args: decided.append(1) or decide(*args))
    forget_decisions(monkeypatch)
    rows = clear_prompts(build("qwen3", "sdpa"), LENGTHS, 64)
    for attn in ("sdpa", "eager", "sdpa", "eager"):
        output = assisted(build("qwen3", attn), random_draft(build("qwen3", attn)), rows, max_new_tokens=8)
        assert output.dspark_stats.path in BATCHED_PATHS
    assert len(decided) == 2


def test_the_self_check_leaves_no_trace(monkeypatch):
    """Neither the random state nor training mode nor gradients change."""
    forget_decisions(monkeypatch)
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    draft = random_draft(target)
    torch.manual_seed(21)
    before = torch.get_rng_state()
    assisted(target, draft, rows, max_new_tokens=6)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled() and not target.training
