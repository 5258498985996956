"""Greedy output of ragged batches equals plain `generate()` on each unpadded prompt, on every batched architecture.

The drafts are planted (see `planted.py`), so every run here has accepted tokens, rejected tokens, full blocks and
rounds with nothing accepted, at different offsets in each row. `test_number_of_combinations` holds the size of the
claim.
"""

from __future__ import annotations

import copy

import pytest
import torch
from planted import ForwardCounter, draft_config, planted_draft, planted_for, random_draft
from running import (
    Messages,
    accepted_by_row,
    assisted,
    check_exact,
    new_tokens,
    padded,
    plain_batch,
    planned_acceptance,
    use_cost_table,
    verify_lengths_by_row,
)
from targets import BATCHED, attentions, build, clear_prompts, plain, plain_greedy
from transformers import Qwen3ForCausalLM

from dspark_hf import DSparkDraftModel

pytestmark = pytest.mark.exactness

LENGTHS = (3, 7, 12)
EVERY = [(name, attn) for name in BATCHED for attn in attentions(name)]
SLIDING = [(n, a) for n, a in EVERY if n in ("mistral", "gemma2", "gemma3", "gemma4", "gpt_oss", "olmo3", "cohere2")]
BATCHES = [
    (name, attn, size, pattern)
    for name, attn in (("llama", "sdpa"), ("mistral", "eager"), ("gemma4", "sdpa"), ("gpt_oss", "eager"))
    for size in (1, 2, 5, 8)
    for pattern in ((7,), (0,), (1, 6), (2, 7, 1, 0), (6, 5, 4, 3, 2, 1, 0))
]
DEPTHS = [(attn, depth) for attn in ("eager", "sdpa") for depth in range(1, 8)]
THRESHOLDS = [(name, threshold) for name in ("qwen3", "gemma3") for threshold in (0.3, 0.7, 0.95, 1.0)]
REAL = [(head, anchor) for head in ("vanilla", "gated", "rnn", None) for anchor in (True, False)]
BATCH_LENGTHS = (5, 1, 9, 2, 14, 3, 8, 11)


def test_number_of_combinations():
    """What the exactness tests of this file compare: one prompt in one batch with one setting is one combination."""
    rows = 3 * (len(EVERY) + len(SLIDING) + len(DEPTHS) + len(REAL)) + 4 * len(THRESHOLDS)
    rows += sum(size for _, _, size, _ in BATCHES)
    assert rows >= 500, rows


@pytest.mark.parametrize(("name", "attn"), EVERY)
def test_every_architecture(name, attn):
    """Cases 1 and 4: rotating acceptance, ragged left padding, and the acceptance that was planted is reached."""
    target = build(name, attn)
    rows = clear_prompts(target, LENGTHS, 64)
    draft = planted_for(target, rows)
    output = check_exact(target, draft, rows, paths=("packed",))
    accepted = accepted_by_row(output.dspark_stats, len(rows))
    assert accepted == [planned_acceptance(draft, row, 64, 7) for row in range(len(rows))]
    assert output.dspark_stats.tau > 2.5


@pytest.mark.parametrize(("name", "attn"), SLIDING)
def test_prompts_longer_than_the_window(name, attn):
    target = build(name, attn)
    rows = clear_prompts(target, (31, 10, 22), 24, seed=5)
    check_exact(target, planted_for(target, rows, 24, pattern=(3, 7, 0, 5)), rows, max_new_tokens=24)


@pytest.mark.parametrize(("name", "attn", "size", "pattern"), BATCHES)
def test_batch_sizes_and_patterns(name, attn, size, pattern):
    target = build(name, attn)
    rows = clear_prompts(target, BATCH_LENGTHS, 32, seed=1)[:size]
    draft = planted_for(target, rows, 32, pattern=pattern)
    output = check_exact(target, draft, rows, max_new_tokens=32)
    accepted = accepted_by_row(output.dspark_stats, size)
    assert accepted == [planned_acceptance(draft, row, 32, 7) for row in range(size)]


@pytest.mark.parametrize(("attn", "depth"), DEPTHS)
def test_depth_sweep(attn, depth):
    """Case 15: every cap on the drafted tokens is exact and kept."""
    target = build("qwen3", attn)
    rows = clear_prompts(target, LENGTHS, 64)
    draft = planted_for(target, rows)
    draft.generation_config.num_assistant_tokens = depth
    output = check_exact(target, draft, rows)
    lengths = verify_lengths_by_row(output.dspark_stats, len(rows))
    assert all(max(row) == depth for row in lengths)
    assert output.dspark_stats.tau <= depth + 1


def test_depth_beyond_the_block_is_capped_with_one_warning():
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    draft = planted_for(target, rows)
    draft.generation_config.num_assistant_tokens = 12
    with Messages() as messages:
        output = check_exact(target, draft, rows)
        check_exact(target, planted_again(draft), rows)
    assert max(max(row) for row in verify_lengths_by_row(output.dspark_stats, len(rows))) == 7
    assert len(messages.matching("num_assistant_tokens")) == 1, messages.matching("")


def planted_again(draft):
    """The same plan from its first round on."""
    return draft.plan(draft.references, draft.pattern, draft.labels, draft.confidence)


def test_depth_passed_to_generate_overrides_the_drafts():
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    draft = planted_for(target, rows)
    output = check_exact(target, draft, rows, num_assistant_tokens=2)
    assert max(max(row) for row in verify_lengths_by_row(output.dspark_stats, len(rows))) == 2
    assert draft.generation_config.num_assistant_tokens == 7


@pytest.mark.parametrize(("name", "threshold"), THRESHOLDS)
def test_confidence_cuts(name, threshold):
    """Greedy output does not depend on where confidence cuts, and the cut is at the first slot below the threshold."""
    target = build(name, "sdpa")
    rows = clear_prompts(target, (4, 9, 2, 6), 40, seed=2)
    scores = [0.99, 0.9, 0.8, 0.96, 0.5, 0.4, 0.2]
    draft = planted_for(
        target, rows, 40, pattern=(7, 0, 4), confidence=lambda row, n, tokens: scores[row:] + scores[:row]
    )
    draft.generation_config.num_assistant_tokens_schedule = "confidence"
    draft.generation_config.assistant_confidence_threshold = threshold
    output = check_exact(target, draft, rows, max_new_tokens=40, paths=("packed", "rectangular"))
    for row, lengths in enumerate(verify_lengths_by_row(output.dspark_stats, len(rows))):
        rigged = scores[row:] + scores[:row]
        kept = next((i for i, score in enumerate(rigged) if score < threshold), 7)
        assert max(lengths) == kept
        assert set(lengths[:-3]) <= {kept}


COSTS = {"flat": {}, "steep": {"per_token": 0.02, "base": 0.01}, "jagged": {"steps": (4, 9, 14), "base": 0.02}}


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("schedule", ["constant", "confidence", "throughput"])
def test_every_schedule(schedule, costs, monkeypatch):
    if schedule != "throughput" and costs != "flat":
        pytest.skip("only the throughput schedule reads costs")
    use_cost_table(monkeypatch, **COSTS[costs])
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    draft = planted_for(target, rows, confidence=[0.9, 0.8, 0.9, 0.3, 0.9, 0.1, 0.1])
    draft.generation_config.num_assistant_tokens_schedule = schedule
    draft.generation_config.assistant_confidence_threshold = 0.5
    check_exact(target, draft, rows)


@pytest.mark.parametrize(("head", "anchor"), REAL)
def test_real_drafts_of_every_head_and_layout(head, anchor):
    """Random real drafts: the heads, both block layouts and the reduced vocabulary run, whatever they accept."""
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    draft = random_draft(target, head, sample_from_anchor=anchor)
    output = check_exact(target, draft, rows)
    lengths = verify_lengths_by_row(output.dspark_stats, len(rows))
    assert max(max(row) for row in lengths) == (7 if anchor else 6)


def test_planted_draft_of_the_other_layout():
    target = build("mistral", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    continuations = plain_greedy(target, rows, 64)
    draft = planted_draft(target, sample_from_anchor=False)
    draft.plan([p + c for p, c in zip(rows, continuations, strict=True)], pattern=(6, 0, 3))
    output = check_exact(target, draft, rows)
    assert output.dspark_stats.tau > 3
    assert draft_config(target, sample_from_anchor=False).num_draft_tokens == 6


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_buffers_grow(name):
    """More slots than one block of the buffers holds, in one row only by its own length."""
    target = build(name, "sdpa")
    rows = clear_prompts(target, (250, 4), 40, seed=3)
    check_exact(target, planted_for(target, rows, 40, pattern=(7, 2)), rows, max_new_tokens=40)
    (row,) = clear_prompts(target, (6,), 290, seed=4)
    output = check_exact(target, planted_for(target, [row], 290, pattern=(7, 7, 5)), [row], max_new_tokens=290)
    assert output.dspark_stats.rounds < 290 / 6


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_one_forward_of_each_model_per_round(attn):
    """Case 2, and case 7's width: a verify forward carries the anchors and submitted drafts of running rows only."""
    target = build("qwen3", attn)
    rows = clear_prompts(target, LENGTHS, 64)
    assisted(target, planted_for(target, rows), rows)  # the one-time self-check of this target
    draft = planted_for(target, rows)
    with ForwardCounter(target) as counter:
        stats = check_exact(target, draft, rows).dspark_stats
    assert len(draft.calls) in (stats.rounds - 1, stats.rounds)  # nothing to draft when one token is left
    assert len(counter.shapes) == stats.rounds + 1
    for shape, event in zip(counter.shapes[1:], stats.round_events, strict=True):
        widths = [1 + length for length in event.verify_lengths]
        want = (1, sum(widths)) if stats.path == "packed" else (len(widths), max(widths))
        assert shape == want


def find_early_ends(continuations: list[list[int]], windows: list[range]) -> list[int]:
    """EOS ids that end row r first at a step in windows[r]."""
    for step0 in windows[0]:
        for step1 in windows[1]:
            for step2 in windows[2]:
                ids = {continuations[0][step0], continuations[1][step1], continuations[2][step2]}
                first = [next(i for i, t in enumerate(c) if t in ids) for c in continuations]
                if first == [step0, step1, step2]:
                    return sorted(ids)
    raise RuntimeError("no set of EOS ids ends the rows in this order")


@pytest.mark.parametrize("penalty", [None, 1.3])
@pytest.mark.parametrize(
    ("name", "attn"), [("qwen3", "eager"), ("qwen3", "sdpa"), ("gemma3", "sdpa"), ("llama", "sdpa")]
)
def test_rows_that_finish_early(name, attn, penalty):
    """Case 3: rows end in the order 2, 0, 1; statistics freeze, and the rows that go on are not disturbed."""
    target = build(name, attn)
    rows = clear_prompts(target, LENGTHS, 64, seed=11)
    kwargs = {} if penalty is None else {"repetition_penalty": penalty}
    # In a batch of its own kind: before 5.23 the repetition penalty counts the padding of a row too.
    continuations = plain_batch(target, rows, **kwargs)[:, max(LENGTHS) :].tolist()
    references = [p + c for p, c in zip(rows, continuations, strict=True)]
    eos = find_early_ends(continuations, [range(14, 26), range(30, 45), range(3, 11)])
    ends = [next(i for i, t in enumerate(c) if t in eos) for c in continuations]
    assert ends[2] < ends[0] < ends[1]

    free = assisted(target, planted_draft(target).plan(references), rows, **kwargs)
    assert new_tokens(free, rows) == continuations
    output = assisted(target, planted_draft(target).plan(references), rows, eos_token_id=eos, **kwargs)
    assert new_tokens(output, rows) == padded([c[: end + 1] for c, end in zip(continuations, ends, strict=True)])
    expected = plain_batch(target, rows, eos_token_id=eos, **kwargs)
    assert torch.equal(output.sequences, expected)

    undisturbed = accepted_by_row(free.dspark_stats, 3)
    for row, accepted in enumerate(accepted_by_row(output.dspark_stats, 3)):
        assert sum(accepted) + len(accepted) + 1 >= ends[row] + 1
        assert accepted[:-1] == undisturbed[row][: len(accepted) - 1]
        assert len(accepted) < len(undisturbed[row])


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_acceptance_in_a_batch_equals_acceptance_alone(attn, tiny_pair):
    """Case 4 with a trained draft: positions, masks and reshaping leave every row's acceptance as it is alone."""
    target = Qwen3ForCausalLM.from_pretrained(tiny_pair[0], attn_implementation=attn).eval()
    draft = DSparkDraftModel.from_pretrained(tiny_pair[1])
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    prompt = [146, 38, 154, 86, 151, 109, 20, 64, 19, 150, 42, 82]
    text = prompt + plain(target, prompt, max_new_tokens=60, do_sample=False)
    rows = [text[:3], text[5:14], text[20:50], text[31:38], prompt, text[8:28]]
    together = assisted(target, draft, rows, do_sample=False)
    for number, row in enumerate(rows):
        alone = assisted(target, draft, [row], do_sample=False)
        assert new_tokens(alone, [row])[0] == new_tokens(together, rows)[number]
        assert accepted_by_row(alone.dspark_stats, 1)[0] == accepted_by_row(together.dspark_stats, len(rows))[number]
    assert together.dspark_stats.tau > 2


@pytest.mark.parametrize(("name", "attn"), [("qwen3", "sdpa"), ("qwen3", "eager"), ("llama", "sdpa")])
def test_a_row_without_a_draft_runs_plain_generates_own_kernels(name, attn):
    """Bit for bit in half precision: one token of one row has nothing to mask, as in plain `generate()`."""
    target = copy.deepcopy(build(name, attn)).bfloat16()
    draft = random_draft(target).bfloat16()
    draft.generation_config.num_assistant_tokens_schedule = "confidence"
    draft.generation_config.assistant_confidence_threshold = 1.0
    options = {"max_new_tokens": 16, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    prompt = torch.tensor([[3, 14, 15, 9, 26]])
    theirs = target.generate(prompt, **options)
    ours = target.generate(prompt, assistant_model=draft, **options)
    assert ours.dspark_stats.share_without_draft == 1.0
    assert ours.sequences.equal(theirs.sequences)
    assert all(mine.equal(other) for mine, other in zip(ours.logits, theirs.logits, strict=True))
