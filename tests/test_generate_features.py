"""What plain `generate()` offers works with a draft too, with plain batched output (cases 12, 13)."""

from __future__ import annotations

import pytest
import torch
import transformers
from byte_tokenizer import byte_tokenizer
from planted import planted_draft, planted_for, random_draft
from running import BATCHED_PATHS, assisted, new_tokens, plain_batch
from targets import PAD_TOKEN_ID, build, clear_prompts, left_pad, plain_greedy
from transformers import LogitsProcessor, LogitsProcessorList

from dspark_hf import record_generation

pytestmark = pytest.mark.exactness

LENGTHS = (3, 7, 12)


class ParityBan(LogitsProcessor):
    """Bans tokens of one parity, by the length of the prefix and by each row's own last token."""

    def __call__(self, input_ids, scores):
        parity = (input_ids.shape[1] + input_ids[:, -1:]) % 2
        banned = torch.arange(scores.shape[1])[None] % 2 == parity
        return scores.masked_fill(banned, float("-inf"))


class CountPenalty(LogitsProcessor):
    """Lowers every token by how often the row holds it, prompt and padding included."""

    def __call__(self, input_ids, scores):
        counts = torch.zeros_like(scores).scatter_add(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
        return scores - 1.5 * counts


def allowed_tokens(batch_id: int, ids: torch.Tensor) -> list[int]:
    """Depends on the row and on the prefix's last token and length."""
    return [t for t in range(96) if (t + batch_id + ids.shape[0] + int(ids[-1])) % 3]


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "min_length": {"min_length": 30, "eos_token_id": [5, 17, 33, 60]},
    "min_new_tokens": {"min_new_tokens": 15, "eos_token_id": [5, 17, 33, 60]},
    "bad_words_ids": {"bad_words_ids": [[7], [11, 12], [40, 41, 42], [64], [80, 3]]},
    "suppress_tokens": {"suppress_tokens": list(range(3, 96, 5))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(0, 96, 2))},
    "forced_bos_token_id": {"forced_bos_token_id": 44},
    "forced_eos_token_id": {"forced_eos_token_id": 23},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": 61},
    "sequence_bias": {"sequence_bias": [[[9], 4.0], [[12, 30], -6.0], [[55], 3.0], [[71, 72], 5.0]]},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed_tokens},
    "remove_invalid_values": {"remove_invalid_values": True, "renormalize_logits": True},
    "custom by prefix": {"logits_processor": LogitsProcessorList([ParityBan()])},
    "custom by count": {"logits_processor": LogitsProcessorList([CountPenalty()])},
    "all together": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [6, 66],
        "min_new_tokens": 12,
        "eos_token_id": [5, 17, 33, 60],
        "logits_processor": LogitsProcessorList([CountPenalty(), ParityBan()]),
    },
}


def plan_of(target, rows, sequences: torch.Tensor, **plan):
    """A planted draft that proposes what plain generate made of each row."""
    width = max(len(row) for row in rows)
    return planted_draft(target).plan(
        [row + seq[width:].tolist() for row, seq in zip(rows, sequences, strict=True)], **plan
    )


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_logits_processors(processor, name):
    """Case 12: each must see the true prefix at its true padded length, at every position of a block."""
    target = build(name, "eager" if name == "gemma2" else "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    kwargs = {**PROCESSORS[processor], "max_new_tokens": 40}
    expected = plain_batch(target, rows, **kwargs)
    output = assisted(target, plan_of(target, rows, expected), rows, **kwargs)
    assert torch.equal(output.sequences, expected)
    assert output.dspark_stats.path in BATCHED_PATHS
    assert output.dspark_stats.accepted >= 2 * output.dspark_stats.rounds


def test_a_processor_that_runs_the_model_is_refused_or_right():
    """Classifier-free guidance keeps a cache of its own: never a wrong answer."""
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, (6,), 64)
    kwargs = {"guidance_scale": 1.5, "max_new_tokens": 20}
    expected = plain_batch(target, rows, **kwargs)
    try:
        output = assisted(target, plan_of(target, rows, expected), rows, **kwargs)
    except ValueError as error:
        assert "UnbatchedClassifierFreeGuidanceLogitsProcessor" in str(error) or "guidance_scale" in str(error)
    else:
        assert torch.equal(output.sequences, expected)


@pytest.mark.parametrize("eos", [None, "early"])
@pytest.mark.parametrize("kwargs", [{}, {"repetition_penalty": 1.3}])
def test_scores_and_logits(kwargs, eos):
    """Case 13: one entry per new token per row, equal within 1e-4, and nothing else in the output."""
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    free = plain_batch(target, rows, **kwargs)[:, max(LENGTHS) :].tolist()
    if eos is not None:
        kwargs = {**kwargs, "eos_token_id": [free[2][5], free[0][13], free[1][20]]}
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 32}
    expected = plain_batch(target, rows, **kwargs, **asked)
    draft = plan_of(target, rows, expected.sequences)
    output = target.generate(**left_pad(rows), assistant_model=draft, **kwargs, **asked)
    assert torch.equal(output.sequences, expected.sequences)
    steps = expected.sequences.shape[1] - max(LENGTHS)
    assert len(output.scores) == len(output.logits) == len(expected.scores) == steps
    ended = torch.zeros(len(rows), dtype=torch.bool)
    for step in range(steps):
        for got, want in ((output.scores[step], expected.scores[step]), (output.logits[step], expected.logits[step])):
            assert got.shape == want.shape and got.dtype == want.dtype
            torch.testing.assert_close(got[~ended], want[~ended], atol=1e-4, rtol=0)
        if eos is not None:
            ended |= torch.isin(expected.sequences[:, max(LENGTHS) + step], torch.tensor(kwargs["eos_token_id"]))
    assert output.hidden_states is None and output.attentions is None


def test_transition_scores():
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    asked = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 20}
    output = target.generate(**left_pad(rows), assistant_model=planted_for(target, rows), **asked)
    expected = target.generate(**left_pad(rows), **asked)
    got, want = (
        target.compute_transition_scores(o.sequences, o.scores, normalize_logits=True) for o in (output, expected)
    )
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_num_return_sequences_greedy():
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    draft = planted_for(target, rows, copies=2)
    output = assisted(target, draft, rows, num_return_sequences=2, do_sample=True, temperature=1e-6, top_k=0)
    expected = [c for c in plain_greedy(target, rows, 64) for _ in range(2)]
    assert new_tokens(output, rows) == expected
    assert output.dspark_stats.accepted > 50


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
@pytest.mark.parametrize("shift", [0, 5])
def test_position_ids_of_the_caller(name, shift):
    """The draft counts from its own zero: rotary positions are relative, and the shift is nothing to it."""
    target = build(name, "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    inputs = left_pad(rows)
    positions = (inputs["attention_mask"].cumsum(dim=1) - 1).clamp_min(0) + shift
    expected = target.generate(**inputs, position_ids=positions.clone(), max_new_tokens=40)
    draft = plan_of(target, rows, expected)
    output = target.generate(**inputs, position_ids=positions, max_new_tokens=40, assistant_model=draft)
    assert torch.equal(output, expected)
    assert sum(len(call["rows"]) for call in draft.calls) < 40 * 3 / 2


def test_no_attention_mask():
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, (6, 6, 6), 64)
    input_ids = torch.tensor(rows)
    expected = target.generate(input_ids=input_ids, max_new_tokens=40)
    output = target.generate(input_ids=input_ids, max_new_tokens=40, assistant_model=planted_for(target, rows))
    assert torch.equal(output, expected)


def test_positional_inputs_and_plain_tensor_output():
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, (6,), 64)
    output = target.generate(torch.tensor(rows), max_new_tokens=16, assistant_model=planted_for(target, rows))
    assert isinstance(output, torch.Tensor)
    assert output[0].tolist() == rows[0] + plain_greedy(target, rows, 64)[0][:16]


def test_inputs_embeds():
    """Without ids: the output holds new tokens only, as plain generate's does."""
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, (6,), 64)
    embeds = target.get_input_embeddings()(torch.tensor(rows))
    expected = target.generate(inputs_embeds=embeds, max_new_tokens=20)
    try:
        output = target.generate(inputs_embeds=embeds, max_new_tokens=20, assistant_model=planted_for(target, rows))
    except ValueError as error:
        assert "inputs_embeds" in str(error)
    else:
        assert torch.equal(output, expected)


def test_pipeline():
    """The pipeline knows nothing of drafts; statistics come through `record_generation`."""
    target, tokenizer = build("qwen3", "sdpa"), byte_tokenizer()
    pipe = transformers.pipeline("text-generation", model=target, tokenizer=tokenizer)
    texts = ["hello you", "ab", "what is it?"]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    expected = [tokenizer.decode(c, skip_special_tokens=True) for c in plain_greedy(target, rows, 24)]
    draft = planted_for(target, rows, 24)
    with record_generation() as stats:
        outputs = transformers.pipeline(
            "text-generation", model=target, tokenizer=tokenizer, assistant_model=draft
        )(texts, batch_size=3, max_new_tokens=24, return_full_text=False, do_sample=False)  # fmt: skip
    assert [output[0]["generated_text"] for output in outputs] == expected
    assert stats.new_tokens >= 3 * 24 and stats.accepted > 20
    draft = planted_for(target, rows, 24)
    outputs = pipe(
        texts, batch_size=3, max_new_tokens=24, return_full_text=False, do_sample=False, assistant_model=draft
    )
    assert [output[0]["generated_text"] for output in outputs] == expected


class LoraLinear(torch.nn.Module):
    """What an adapter does to a projection."""

    def __init__(self, base: torch.nn.Linear):
        super().__init__()
        self.base_layer = base
        generator = torch.Generator().manual_seed(1)
        self.down = torch.randn(4, base.in_features, generator=generator) * 0.1
        self.up = torch.randn(base.out_features, 4, generator=generator) * 0.1

    def forward(self, hidden):
        return self.base_layer(hidden) + hidden @ self.down.T @ self.up.T


class Wrapped(torch.nn.Module):
    """Delegates to the model inside, as adapter libraries do."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def get_base_model(self):
        return self.base_model

    def generate(self, *args, **kwargs):
        return self.base_model.generate(*args, **kwargs)


def test_adapted_target():
    """Adapters change the target's modules in place and wrap the model."""
    target = build("llama", "sdpa", seed=17)  # an object of its own: it is changed here
    for layer in target.model.layers:
        for name in ("q_proj", "v_proj"):
            if not isinstance(getattr(layer.self_attn, name), LoraLinear):
                setattr(layer.self_attn, name, LoraLinear(getattr(layer.self_attn, name)))
    rows = clear_prompts(target, LENGTHS, 64)
    output = Wrapped(target).generate(
        **left_pad(rows), assistant_model=planted_for(target, rows), max_new_tokens=64, return_dict_in_generate=True
    )
    assert new_tokens(output, rows) == plain_greedy(target, rows, 64)
    assert output.dspark_stats.path in BATCHED_PATHS


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the library's own calls into Transformers
def test_peft():
    peft = pytest.importorskip("peft", reason="peft is not installed; `test_adapted_target` covers the mechanism")
    target = peft.get_peft_model(
        build("llama", "sdpa", seed=18), peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    rows = clear_prompts(target, LENGTHS, 64)
    output = assisted(target, planted_for(target, rows), rows)
    assert new_tokens(output, rows) == plain_greedy(target, rows, 64)


class Int8Linear(torch.nn.Module):
    """A weight-only quantised projection: integer weights, a scale per output, and no float weight to look at."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
        self.weight = torch.nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, hidden):
        return torch.nn.functional.linear(hidden, self.weight.to(hidden.dtype) * self.scale, self.bias)


@pytest.mark.parametrize("head", [False, True])
def test_quantised_target(head):
    """Linear layers of another class, the output head among them or not: the draft borrows the head as it is."""
    target = build("llama", "sdpa", seed=19 + head)  # an object of its own: it is changed here
    for name, module in list(target.named_modules()):
        if type(module) is torch.nn.Linear and (head or name != "lm_head"):
            target.set_submodule(name, Int8Linear(module))
    rows = clear_prompts(target, LENGTHS, 64)
    output = assisted(target, planted_for(target, rows), rows)
    assert new_tokens(output, rows) == plain_greedy(target, rows, 64)
    assert output.dspark_stats.path in BATCHED_PATHS and output.dspark_stats.tau > 2


@pytest.mark.parametrize("known", [80, 96])
def test_padded_vocabulary(known):
    """The target's embedding and head have rows behind the draft's vocabulary; plain generate may choose them too."""
    target = build("qwen3", "sdpa", vocab_size=128)
    rows = clear_prompts(target, LENGTHS, 64)
    continuations = plain_greedy(target, rows, 64)
    assert max(max(c) for c in continuations) >= 96
    draft = random_draft(target, vocab_size=known, draft_vocab_size=known, mask_token_id=70)
    output = assisted(target, draft, rows)
    assert new_tokens(output, rows) == continuations


def test_reduced_draft_vocabulary():
    """Draft ids map to target ids; tokens outside the draft's vocabulary are simply never proposed."""
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    draft = random_draft(target, draft_vocab_size=32, stores_head=True)
    draft.d2t.copy_(torch.arange(32) * 2 + 1)  # draft id i is target id 3 i + 1
    output = assisted(target, draft, rows)
    assert new_tokens(output, rows) == plain_greedy(target, rows, 64)
    drafted = {token for event in output.dspark_stats.round_events for tokens in event.drafted for token in tokens}
    assert drafted <= set(range(1, 96, 3)) and len(drafted) > 5


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_beams": 2},
        {"num_beams": 2, "do_sample": True},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"output_attentions": True, "return_dict_in_generate": True},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 2},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_what_cannot_be_done_raises(kwargs):
    """Transformers would silently ignore the draft, or leave the output out."""
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    draft = planted_for(target, rows)
    with pytest.raises((ValueError, NotImplementedError)):
        target.generate(**left_pad(rows), assistant_model=draft, max_new_tokens=8, **kwargs)
    assert draft.calls == []


def test_the_users_configs_are_not_written_to():
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    draft = planted_for(target, rows)
    before = [
        target.generation_config.to_dict(),
        target.config.to_dict(),
        draft.generation_config.to_dict(),
        draft.config.to_dict(),
    ]
    config = transformers.GenerationConfig(max_new_tokens=20, pad_token_id=PAD_TOKEN_ID, num_assistant_tokens=3)
    given = config.to_dict()
    target.generate(**left_pad(rows), assistant_model=draft, generation_config=config)
    after = [
        target.generation_config.to_dict(),
        target.config.to_dict(),
        draft.generation_config.to_dict(),
        draft.config.to_dict(),
    ]
    assert after == before
    assert config.to_dict() == given
