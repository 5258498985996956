"""DSpark in Transformers' own vocabulary: a logits processor, a candidate generator, `custom_generate`."""

from __future__ import annotations

import importlib.metadata
import inspect
from pathlib import Path

import pytest
import torch
from planted import planted_draft, planted_for, random_draft
from running import assisted, check_exact, new_tokens, plain_batch
from targets import build, clear_prompts, left_pad, plain, plain_greedy
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.generation import CandidateGenerator
from transformers.generation.streamers import BaseStreamer

import dspark_hf
from dspark_hf import DSparkCandidateGenerator, DSparkLogitsProcessor, decoder
from dspark_hf.generation.candidate_generator import decode_sequentially

LENGTHS = (3, 7, 12)
HUB = Path(__file__).resolve().parent.parent / "hub"


@pytest.fixture
def hub() -> str:
    """Transformers checks a repository's requirements by the names of installed distributions."""
    try:
        importlib.metadata.version("dspark-hf")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("dspark-hf is not installed (only on the path), which the Hub repository's requirements ask for")
    return str(HUB)


# Logits processor ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduced", [False, True])
def test_processor_adds_the_markov_bias(reduced):
    target = build("qwen3", "sdpa")
    changes = {"draft_vocab_size": 32, "stores_head": True} if reduced else {}
    draft = random_draft(target, "vanilla", **changes)
    if reduced:
        draft.d2t.copy_(torch.arange(32) * 2)
    processor = DSparkLogitsProcessor(draft)
    assert isinstance(processor, LogitsProcessor)
    ids = torch.tensor([[4, 8, 15], [16, 23, 42]])
    scores = torch.randn(2, draft.config.draft_vocab_size)
    head = draft.markov_head
    want = scores + head.markov_w2(head.markov_w1(ids[:, -1]))
    torch.testing.assert_close(processor(ids, scores), want)
    if reduced:  # scores over the target's vocabulary: what the draft lacks is impossible
        full = torch.randn(2, 96)
        got = processor(ids, full)
        known = torch.arange(32) * 3
        torch.testing.assert_close(got[:, known], full[:, known] + head.markov_w2(head.markov_w1(ids[:, -1])))
        others = [i for i in range(96) if i not in known.tolist()]
        assert torch.isinf(got[:, others]).all()


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_a_sampling_loop_with_the_processor_drafts_the_same_block(head):
    """Base logits, then the processor slot by slot in a list with others: the block of `draft_block`."""
    target = build("qwen3", "sdpa")
    draft = random_draft(target, head)
    shared = draft.shared_weights(target)
    context, anchors = torch.randn(2, 5, 128), torch.tensor([7, 50])
    positions = torch.arange(12).expand(2, -1)
    block = draft.draft_block(context, anchors, positions, shared=shared)
    inputs = torch.full((2, 7), draft.config.mask_token_id)
    inputs[:, 0] = anchors
    with torch.no_grad():
        output = draft(inputs, context, positions, shared=shared)
    processor = DSparkLogitsProcessor(draft)
    chain = LogitsProcessorList([processor])
    if head != "vanilla":
        processor.begin_block(output.last_hidden_state)
    ids = anchors[:, None]
    for slot in range(7):
        scores = chain(ids, output.base_logits[:, slot])
        torch.testing.assert_close(scores, block.logits[:, slot], atol=1e-4, rtol=1e-4)
        ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(ids[:, 1:], block.tokens)


def test_processor_in_generate():
    """It runs in any Transformers loop: the target's own logits with the bias of the last token."""
    target = build("qwen3", "sdpa")
    draft = random_draft(target, scale=1.0)
    (row,) = clear_prompts(target, (7,), 64)
    biased = plain(target, row, max_new_tokens=12, logits_processor=LogitsProcessorList([DSparkLogitsProcessor(draft)]))
    text = list(row)
    for _ in range(12):
        with torch.no_grad():
            logits = target(torch.tensor([text])).logits[0, -1]
            head = draft.markov_head
            text.append((logits + head.markov_w2(head.markov_w1(torch.tensor(text[-1])))).argmax().item())
    assert biased == text[len(row) :]
    assert biased != plain_greedy(target, [row], 64)[0][:12]


def test_processor_refuses_what_it_cannot_do():
    target = build("qwen3", "sdpa")
    with pytest.raises(ValueError, match="markov"):
        DSparkLogitsProcessor(random_draft(target, None))
    with pytest.raises(ValueError, match="begin_block"):
        DSparkLogitsProcessor(random_draft(target, "rnn"))(torch.tensor([[1]]), torch.zeros(1, 96))


# Candidate generator ---------------------------------------------------------------------------------------------


def stock_loop(monkeypatch, target, draft, row, **kwargs):
    """Transformers' batch-1 loop with our candidate generator, through the package's own route to it."""
    with monkeypatch.context() as patch:
        patch.setattr("dspark_hf.generation.hook.verification_path", lambda model: ("sequential", "the test says so"))
        return assisted(target, draft, [row], **kwargs)


def test_candidate_generator_is_one():
    target = build("qwen3", "sdpa")
    generator = DSparkCandidateGenerator(target, random_draft(target))
    assert isinstance(generator, CandidateGenerator)
    assert generator.requires_model_outputs
    parameters = inspect.signature(generator.get_candidates).parameters
    assert set(inspect.signature(CandidateGenerator.get_candidates).parameters) - {"self", "kwargs"} <= set(parameters)


@pytest.mark.exactness
@pytest.mark.parametrize("pattern", [(0, 3, 7), (7,), (0,)])
@pytest.mark.parametrize("name", ["qwen3", "llama", "deepseek_v3"])
def test_stock_loop_equals_batched_loop(name, pattern, monkeypatch):
    """The same text and the same acceptance in every round."""
    target = build(name, "sdpa")
    for row in clear_prompts(target, LENGTHS, 64):
        batched = check_exact(target, planted_for(target, [row], pattern=pattern), [row])
        stock = stock_loop(monkeypatch, target, planted_for(target, [row], pattern=pattern), row)
        assert torch.equal(stock.sequences, batched.sequences)
        assert stock.dspark_stats.path == "sequential"
        assert stock.dspark_stats.accepted_lengths == batched.dspark_stats.accepted_lengths
        assert stock.dspark_stats.new_tokens == batched.dspark_stats.new_tokens


@pytest.mark.exactness
@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_stock_loop_drafts_the_same_tokens(head, monkeypatch, tiny_pair):
    """With a trained draft: what is proposed does not depend on the loop."""
    from transformers import Qwen3ForCausalLM

    target = Qwen3ForCausalLM.from_pretrained(tiny_pair[0]).eval()
    draft = dspark_hf.DSparkDraftModel.from_pretrained(tiny_pair[1])
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    row = [146, 38, 154, 86, 151, 109, 20, 64, 19, 150, 42, 82]
    batched = assisted(target, draft, [row], do_sample=False, pad_token_id=0)
    stock = stock_loop(monkeypatch, target, draft, row, do_sample=False, pad_token_id=0)
    assert torch.equal(stock.sequences, batched.sequences)
    drafted = [[event.drafted for event in output.dspark_stats.round_events] for output in (stock, batched)]
    assert drafted[0] == drafted[1]


@pytest.mark.exactness
def test_stock_loop_by_hand():
    """The generator in a loop that a user drives: `decode_sequentially` is nothing but that loop."""
    target = build("qwen3", "sdpa")
    (row,) = clear_prompts(target, (7,), 64)
    draft = planted_for(target, [row])
    generator = DSparkCandidateGenerator(target, draft, max_length=len(row) + 30)
    seen = []
    propose = generator.get_candidates
    generator.get_candidates = lambda *args, **kwargs: seen.append(1) or propose(*args, **kwargs)

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        return decode_sequentially(
            generator,
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **model_kwargs,
        )

    ids = torch.tensor([row])
    output = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, custom_generate=loop)
    assert output[0, len(row) :].tolist() == plain_greedy(target, [row], 64)[0][:30]
    assert len(seen) >= 5 and generator.stats.accepted > 10
    assert not any(layer._forward_hooks for layer in target.model.layers)


def test_candidate_generator_refuses_batches():
    target = build("qwen3", "sdpa")
    generator = DSparkCandidateGenerator(target, random_draft(target))
    with pytest.raises(ValueError, match="one row"):
        generator.get_candidates(torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.exactness
def test_stock_loop_samples_exactly(monkeypatch):
    """Batch 1 is slow to sample from, so fewer samples: enough to see a q that is not what was drawn from."""
    from distributions import check_distribution, exact_joint
    from test_sampling_exact import PROMPT, WARPED, processors, small_draft, small_target

    target = small_target()
    draft = small_draft(target)
    monkeypatch.setattr("dspark_hf.generation.hook.verification_path", lambda model: ("sequential", "the test"))
    torch.manual_seed(3)
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)
    samples = [
        target.generate(ids, attention_mask=mask, assistant_model=draft, max_new_tokens=3, do_sample=True, **WARPED)
        for _ in range(800)
    ]
    samples = torch.cat(samples)[:, len(PROMPT) :]
    check_distribution(samples, exact_joint(target, PROMPT, 3, processors(**WARPED)), distance=0.1)


# custom_generate -------------------------------------------------------------------------------------------------


class Recorder(BaseStreamer):
    def __init__(self):
        self.chunks, self.rounds, self.ends = [], [], 0

    def put(self, value):
        self.chunks.append(value.tolist())

    def end(self):
        self.ends += 1

    def on_round(self, event):
        self.rounds.append(event)


@pytest.mark.exactness
@pytest.mark.parametrize("installed", [True, False])
def test_custom_generate_callable(installed):
    """The same loop without a replaced method."""
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    if not installed:
        dspark_hf.uninstall()
    try:
        draft, streamer = planted_for(target, rows), Recorder()
        output = target.generate(
            **left_pad(rows),
            custom_generate=decoder(draft, streamer=streamer),
            max_new_tokens=64,
            return_dict_in_generate=True,
        )
    finally:
        dspark_hf.install()
    assert new_tokens(output, rows) == plain_greedy(target, rows, 64)
    assert output.dspark_stats.tau > 2
    assert len(streamer.rounds) == output.dspark_stats.rounds and streamer.ends == 1


@pytest.mark.exactness
def test_custom_generate_callable_with_options():
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    free = plain_greedy(target, rows, 64)
    kwargs = {"repetition_penalty": 1.2, "eos_token_id": [free[1][9], free[0][20]], "max_new_tokens": 40}
    expected = plain_batch(target, rows, **kwargs)
    references = [row + e[max(LENGTHS) :] for row, e in zip(rows, expected.tolist(), strict=True)]
    draft = planted_draft(target).plan(references)
    output = target.generate(**left_pad(rows), custom_generate=decoder(draft), **kwargs)
    assert torch.equal(output, expected)


@pytest.mark.exactness
@pytest.mark.parametrize("installed", [True, False])
def test_custom_generate_repository(installed, hub):
    """The Hub-style folder: Transformers loads its function and hands it every argument."""
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    if not installed:
        dspark_hf.uninstall()
    try:
        streamer = Recorder()
        output = target.generate(
            **left_pad(rows),
            assistant_model=planted_for(target, rows),
            custom_generate=hub,
            trust_remote_code=True,
            streamer=streamer,
            max_new_tokens=64,
            return_dict_in_generate=True,
        )
    finally:
        dspark_hf.install()
    assert new_tokens(output, rows) == plain_greedy(target, rows, 64)
    assert output.dspark_stats.tau > 2
    assert len(streamer.rounds) == output.dspark_stats.rounds


def test_custom_generate_repository_needs_a_draft(hub):
    target = build("qwen3", "sdpa")
    with pytest.raises(ValueError, match="assistant_model"):
        target.generate(torch.tensor([[4, 5]]), custom_generate=hub, trust_remote_code=True, max_new_tokens=4)


def test_hook_keeps_the_signature():
    """generate() inspects it to decide what to pass."""
    for name in ("_assisted_decoding", "_validate_generation_mode"):
        method = getattr(GenerationMixin, name)
        assert inspect.signature(method) == inspect.signature(method.__wrapped__)
