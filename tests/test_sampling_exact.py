"""Sampled output follows the target's distribution exactly (cases 8 to 11).

A target of eight tokens allows exact enumeration: 20,000 samples of each setting, taken as rows of large batches,
against the enumerated joint distribution of the first three tokens and of the third and fourth. The drafts are random
but real, and with eight tokens they accept often. Biased runs, made on purpose, must fail the same checks.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from distributions import check_distribution, exact_joint, histogram, total_variation
from packaging import version
from planted import draft_config, random_draft
from running import assisted, new_tokens, use_cost_table
from targets import build, left_pad
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import dspark_hf.sampling
from dspark_hf import DSparkDraftModel, record_generation

pytestmark = pytest.mark.exactness

VOCAB = 8
PROMPT = [3, 5, 1, 6]
SMALL = {"intermediate_size": 32, "head_dim": 8, "block_size": 5}
ROWS = 4000
SAMPLES = 20_000
LENGTH = 4
WARPED = {"temperature": 0.7, "top_k": 3, "top_p": 0.9}
PLAIN = {"temperature": 0.4, "top_k": 0}  # few cells with weight: the noise of 20,000 samples stays below 0.03
SETTINGS = {
    "temperature": PLAIN,
    "warped": WARPED,
    "min_p": {"temperature": 0.5, "top_k": 0, "min_p": 0.1},
    "typical_p": {"temperature": 0.9, "top_k": 0, "typical_p": 0.8},
    "hot": {"temperature": 1.5, "top_k": 3},
}


class Rigged(DSparkDraftModel):
    """A real draft whose confidences are computed by `confidence(previous [R, K], tokens [R, K]) -> [R, K]`."""

    confidence = None

    def draft_block(self, context_hidden, anchor_ids, position_ids, **kwargs):
        block = super().draft_block(context_hidden, anchor_ids, position_ids, **kwargs)
        previous = torch.cat([anchor_ids[:, None], block.tokens[:, :-1]], dim=1)
        block.confidence_logits = torch.logit(self.confidence(previous, block.tokens), eps=1e-6)
        return block


def small_target():
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    return build("qwen3", "sdpa", seed=2, vocab_size=VOCAB, initializer_range=0.25, **small)


def small_draft(target, head: str | None = "vanilla", seed: int = 0, scale: float = 0.2, **changes) -> DSparkDraftModel:
    return random_draft(target, head, seed, scale, **SMALL, **changes)


def processors(temperature=1.0, top_k=0, top_p=1.0, min_p=None, typical_p=None) -> LogitsProcessorList:
    """The warpers in the order in which generate() applies them."""
    chain = [TemperatureLogitsWarper(temperature)]
    chain += [TopKLogitsWarper(top_k)] if top_k else []
    chain += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    chain += [MinPLogitsWarper(min_p)] if min_p else []
    chain += [TypicalLogitsWarper(typical_p)] if typical_p else []
    return LogitsProcessorList(chain)


def sample(target, draft, settings, seed: int = 0, samples: int = SAMPLES, rows: int = ROWS):
    """Samples [N, LENGTH] and the statistics of all batches."""
    torch.manual_seed(seed)
    ids = torch.tensor([PROMPT]).repeat(rows, 1)
    kwargs = {"max_new_tokens": LENGTH, "do_sample": True, **settings}
    with record_generation() as stats:
        batches = [target.generate(ids, assistant_model=draft, **kwargs) for _ in range(samples // rows)]
    return torch.cat(batches)[:, len(PROMPT) :], stats


def check_windows(target, samples, settings) -> None:
    """The first three tokens, and the third and fourth with the first ones summed out."""
    joint = exact_joint(target, PROMPT, LENGTH, processors(**settings))
    check_distribution(samples[:, :3], joint.sum(dim=3))
    check_distribution(samples[:, 2:], joint.sum(dim=(0, 1)))


SAMPLED = [(setting, "vanilla") for setting in SETTINGS] + [("warped", head) for head in ("gated", "rnn", None)]


@pytest.mark.parametrize(("setting", "head"), SAMPLED)
def test_sampling_is_exact(setting, head):
    """Case 8."""
    target = small_target()
    samples, stats = sample(target, small_draft(target, head), SETTINGS[setting], seed=1)
    assert stats.acceptance_by_position[0] > 0.2
    check_windows(target, samples, SETTINGS[setting])


def spread_confidences(draft):
    """Confidences from nearly 0 to nearly 1, depending on the tokens before the slot."""
    with torch.no_grad():
        draft.confidence_head.proj.weight.mul_(12)
        draft.confidence_head.proj.bias.zero_()
    return draft


@pytest.mark.parametrize("threshold", [0.3, 0.7, 0.95])
def test_exact_with_confidence_cuts(threshold):
    """Case 9: thresholds on the draft's own (random) confidence head, spread so that cuts happen at every slot."""
    target = small_target()
    draft = spread_confidences(small_draft(target, seed=5))
    draft.generation_config.num_assistant_tokens_schedule = "confidence"
    draft.generation_config.assistant_confidence_threshold = threshold
    samples, stats = sample(target, draft, WARPED, seed=2)
    lengths = {length for event in stats.round_events for length in event.verify_lengths}
    assert lengths == {0, 1, 2}, lengths
    check_windows(target, samples, WARPED)


@pytest.mark.parametrize("steps", [(), (1100, 1700)], ids=["smooth", "jagged"])
def test_exact_with_the_scheduler(steps, monkeypatch):
    """Case 9: Algorithm 1 decides the verify lengths of all rows together."""
    use_cost_table(monkeypatch, per_token=1e-5, steps=steps)
    target = small_target()
    draft = spread_confidences(small_draft(target, seed=5))
    draft.generation_config.num_assistant_tokens_schedule = "throughput"
    samples, stats = sample(target, draft, WARPED, seed=3, rows=1000)
    assert len({length for event in stats.round_events for length in event.verify_lengths}) >= 2
    check_windows(target, samples, WARPED)


def rigged_draft(target, confidence, seed: int = 0) -> Rigged:
    draft = Rigged(draft_config(target, **SMALL))
    draft.load_state_dict(small_draft(target, seed=seed).state_dict())
    draft.confidence = confidence
    draft.generation_config.num_assistant_tokens_schedule = "confidence"
    draft.generation_config.assistant_confidence_threshold = 0.5
    return draft.eval()


@pytest.mark.parametrize("token", [1, 6])
def test_exact_when_confidence_follows_one_token(token):
    """Case 9: confidence high only after one token id. It may look at the tokens before the slot it decides."""
    target = small_target()
    draft = rigged_draft(target, lambda previous, tokens: torch.where(previous == token, 0.9, 0.1))
    samples, _ = sample(target, draft, WARPED, seed=4)
    check_windows(target, samples, WARPED)


def test_a_confidence_that_looks_at_its_own_token_is_noticed():
    """The twin of the test above with the forbidden dependency: the output is biased, and the check must say so."""
    target = small_target()
    _, stats = sample(target, small_draft(target), WARPED, samples=ROWS)
    second = exact_joint(target, PROMPT, 2, processors(**WARPED)).sum(dim=0)
    drafted = torch.tensor([tokens[0] for tokens in stats.round_events[0].drafted]).bincount(minlength=VOCAB) / ROWS
    token = (drafted * (1 - second)).argmax().item()  # the bias is about q (1 - p)
    draft = rigged_draft(target, lambda previous, tokens: torch.where(tokens == token, 0.1, 0.9))
    samples, _ = sample(target, draft, WARPED, seed=5)
    with pytest.raises(AssertionError):
        check_windows(target, samples, WARPED)


@pytest.mark.parametrize("where", ["acceptance", "residual"])
def test_a_bias_of_three_percent_is_noticed(where, monkeypatch):
    """The sampling tests must be able to fail: 0.03 too much acceptance, or 0.03 of the residual mass moved."""
    target = small_target()
    if where == "acceptance":
        exact_rule = dspark_hf.sampling.accept_sampled
        monkeypatch_everywhere(
            monkeypatch, "accept_sampled", lambda p, q, u, lengths: exact_rule(p + 0.03 * q.clamp_min(0), q, u, lengths)
        )
    else:
        exact_rule = dspark_hf.sampling.residual_weights

        def biased(p, q, rejected):
            weights = exact_rule(p, q, rejected)
            weights = weights / weights.sum(dim=-1, keepdim=True)
            moved = torch.minimum(weights, torch.full_like(weights, 0.03))
            top = weights.argmax(dim=-1, keepdim=True)
            weights = weights - moved
            return weights.scatter_add(1, top, moved.sum(dim=-1, keepdim=True))

        monkeypatch_everywhere(monkeypatch, "residual_weights", biased)
    samples, _ = sample(target, small_draft(target), PLAIN, seed=1)
    with pytest.raises(AssertionError):
        check_windows(target, samples, PLAIN)


def monkeypatch_everywhere(monkeypatch, name: str, replacement) -> None:
    """Replaces a function of `dspark_hf.sampling` in every module that imported it by name."""
    import sys

    original = getattr(dspark_hf.sampling, name)
    modules = [m for n, m in sys.modules.items() if n.startswith("dspark_hf") and getattr(m, name, None) is original]
    for module in modules:
        monkeypatch.setattr(module, name, replacement)


def test_a_planted_bias_fails_the_check_itself():
    """The statistics alone: 20,000 samples of a distribution that differs by 0.03 in one cell."""
    target = small_target()
    exact = exact_joint(target, PROMPT, 3, processors(**WARPED))
    biased = exact.flatten().clone()
    order = biased.argsort(descending=True)
    biased[order[0]] -= 0.03
    biased[order[1]] += 0.03
    generator = torch.Generator().manual_seed(0)
    cells = torch.multinomial(biased, SAMPLES, replacement=True, generator=generator)
    fair = torch.multinomial(exact.flatten(), SAMPLES, replacement=True, generator=generator)
    unravel = lambda flat: torch.stack([flat // VOCAB**2, flat // VOCAB % VOCAB, flat % VOCAB], dim=1)  # noqa: E731
    check_distribution(unravel(fair), exact)
    with pytest.raises(AssertionError):
        check_distribution(unravel(cells), exact)


def test_tiny_temperature_equals_greedy():
    """Case 11."""
    target = build("qwen3", "sdpa")
    rows = [[7, 30, 4], [12, 55, 31, 8, 60], [9]]
    greedy = assisted(target, random_draft(target), rows, max_new_tokens=24, do_sample=False)
    cold = assisted(target, random_draft(target), rows, max_new_tokens=24, do_sample=True, temperature=1e-6, top_k=0)
    assert new_tokens(cold, rows) == new_tokens(greedy, rows)


def test_seeds():
    """Same seed, same output; another seed, another output; the global generator is what decides."""
    target = small_target()
    draft = small_draft(target)
    runs = []
    for seed in (11, 11, 12):
        torch.manual_seed(seed)
        runs.append(assisted(target, draft, [PROMPT] * 16, max_new_tokens=20, do_sample=True).sequences)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_rows_are_independent():
    """Neighbouring rows of one batch: the joint distribution of their second tokens is the product."""
    target = small_target()
    samples, _ = sample(target, small_draft(target), WARPED, seed=6)
    joint = exact_joint(target, PROMPT, 2, processors(**WARPED))
    second = joint.sum(dim=0)
    pairs = torch.stack([samples[0::2, 1], samples[1::2, 1]], dim=1)
    check_distribution(pairs, second[:, None] * second[None, :], distance=0.04)


# name -> (fields of the draft, how the loop is changed)
LAYOUTS = {
    "reduced vocabulary": ({"draft_vocab_size": 4, "stores_head": True}, {}),
    "padded vocabulary": ({"vocab_size": 6, "draft_vocab_size": 6, "mask_token_id": 5}, {}),
    "one plus n": ({"sample_from_anchor": False}, {}),
    "drafted ahead": ({}, {"draft_ahead": True}),
    "rectangular": ({}, {"path": "rectangular"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_in_every_layout(layout, monkeypatch):
    """Drafts over part of the vocabulary, the other block layout, and the other ways through the loop."""
    import dspark_hf.generation.hook as hook

    changes, loop_changes = LAYOUTS[layout]
    target = small_target()
    draft = small_draft(target, **changes)
    if draft.d2t is not None:
        draft.d2t.copy_(torch.tensor([2, 4, 4, 4]))  # draft ids 0..3 are target ids 2, 5, 6, 7
    if "draft_ahead" in loop_changes:
        loop = hook.DecodingLoop
        monkeypatch.setattr(hook, "DecodingLoop", lambda *args, **kwargs: loop(*args, **kwargs | loop_changes))
    if "path" in loop_changes:
        monkeypatch.setattr(hook, "verification_path", lambda model: (loop_changes["path"], ""))
    samples, stats = sample(target, draft, WARPED, seed=9)
    assert stats.accepted > 0
    assert stats.path == loop_changes.get("path", "packed")
    check_windows(target, samples, WARPED)


def test_exact_behind_prefix_dependent_processors():
    """A ragged batch of two prompts with a repetition penalty: each prompt's rows follow its own distribution."""
    target = small_target()
    prompts = [PROMPT, [7, 2]]
    inputs = left_pad(prompts)
    penalty = 1.6
    draft = small_draft(target)
    torch.manual_seed(10)
    batches = []
    for _ in range(4):
        rows = {name: value.repeat(2000, 1) for name, value in inputs.items()}
        output = target.generate(
            **rows,
            assistant_model=draft,
            max_new_tokens=LENGTH,
            do_sample=True,
            repetition_penalty=penalty,
            temperature=0.7,
            top_k=3,
        )
        batches.append(output[:, len(PROMPT) :].reshape(2000, 2, LENGTH))
    samples = torch.cat(batches)
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty), *processors(temperature=0.7, top_k=3)])
    for row, prompt in enumerate(prompts):
        if row == 1 and version.parse(transformers.__version__) < version.parse("5.23.0"):
            continue  # plain generate() counts a row's padding as tokens there, and so do we
        joint = exact_joint(target, prompt, LENGTH, chain)
        check_distribution(samples[:, row, :3], joint.sum(dim=3), distance=0.05)
        check_distribution(samples[:, row, 2:], joint.sum(dim=(0, 1)), distance=0.05)


def test_num_return_sequences_samples_each_copy():
    target = small_target()
    torch.manual_seed(7)
    batches = [
        assisted(
            target, small_draft(target), [PROMPT], max_new_tokens=3, do_sample=True, num_return_sequences=2000, **WARPED
        ).sequences
        for _ in range(5)
    ]
    samples = torch.cat(batches)[:, len(PROMPT) :]
    exact = exact_joint(target, PROMPT, 3, processors(**WARPED))
    check_distribution(samples, exact, distance=0.04)
    assert total_variation(histogram(samples, VOCAB), exact) > 0  # they are not all one sample


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_q_is_what_the_token_was_drawn_from(head, monkeypatch):
    """Case 10: the q that acceptance reads, recomputed from the recorded predecessors."""
    target = small_target()
    draft = small_draft(target, head)
    blocks, states, read = [], [], []
    draft_block, base_logits = DSparkDraftModel.draft_block, DSparkDraftModel.compute_base_logits
    exact_rule = dspark_hf.sampling.accept_sampled

    def recording_block(self, context_hidden, anchor_ids, position_ids, **kwargs):
        block = draft_block(self, context_hidden, anchor_ids, position_ids, **kwargs)
        blocks.append((anchor_ids.clone(), block))
        return block

    def recording_logits(self, hidden, shared=None):
        logits = base_logits(self, hidden, shared)
        states.append((hidden.clone(), logits.clone()))  # the bias is added in place
        return logits

    def recording_rule(p, q, uniforms, lengths):
        read.append((q.clone(), lengths.clone()))
        return exact_rule(p, q, uniforms, lengths)

    monkeypatch.setattr(DSparkDraftModel, "draft_block", recording_block)
    monkeypatch.setattr(DSparkDraftModel, "compute_base_logits", recording_logits)
    monkeypatch_everywhere(monkeypatch, "accept_sampled", recording_rule)
    torch.manual_seed(8)
    assisted(target, draft, [PROMPT] * 64, max_new_tokens=40, do_sample=True, **WARPED)

    warp = processors(**WARPED)
    compared = 0
    # No row ends in the first four rounds: 40 tokens do not fit into four blocks of five drafts and one more.
    for (anchors, block), (hidden, base), (q, lengths) in list(zip(blocks, states, read, strict=False))[:4]:
        previous = torch.cat([anchors[:, None], block.tokens[:, :-1]], dim=1)
        logits = base + draft.markov_head.bias_teacher_forced(previous, hidden)
        torch.testing.assert_close(block.logits, logits, atol=1e-5, rtol=0)
        probabilities = warp(None, logits.reshape(-1, VOCAB)).softmax(dim=-1).reshape(logits.shape)
        recomputed = probabilities.gather(2, block.tokens[..., None]).squeeze(2)
        assert (recomputed > 0).all()
        seen = torch.arange(q.shape[1]) < lengths[:, None]
        torch.testing.assert_close(q[seen], recomputed[:, : q.shape[1]][seen], atol=1e-6, rtol=0)
        compared += seen.sum().item()
    assert compared == 4 * 64 * 5
