"""Whole greedy runs of the official code: the same output and the same accepted length in every round.

The official loop works on one prompt; here every prompt also runs in a left-padded batch with the others. It counts a
round's acceptance beyond the token budget and drafts on when nothing can be added any more, which `capped` undoes.
"""

from __future__ import annotations

import functools
import json

import pytest
import torch
import transformers
from golden_set import CASES, golden
from running import accepted_by_row, new_tokens, use_cost_table, verify_lengths_by_row
from targets import left_pad

pytestmark = pytest.mark.exactness

BUDGET = 64


@functools.cache
def golden_target(name: str, attn: str):
    folder = golden(name).target_folder
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(folder, attn_implementation=attn).float().eval()


def generate(name: str, attn: str, rows: list[list[int]], threshold: float = 0.0, **kwargs):
    """A run with the official thresholding; 0 verifies all seven slots."""
    draft = golden(name).draft
    schedule = "constant" if threshold == 0 else "confidence"
    if not draft.config.enable_confidence_head:
        schedule = "constant"  # the official loop ignores the threshold without a head
    saved = draft.generation_config
    draft.generation_config = transformers.GenerationConfig(
        num_assistant_tokens=7, num_assistant_tokens_schedule=schedule, assistant_confidence_threshold=threshold
    )
    target = golden_target(name, attn)
    try:
        return target.generate(
            **left_pad(rows),
            assistant_model=draft,
            pad_token_id=0,
            return_dict_in_generate=True,
            **{"do_sample": False, "max_new_tokens": BUDGET, **kwargs},
        )
    finally:
        draft.generation_config = saved


def capped(accepted: list[int], submitted: list[int], budget: int) -> tuple[list[int], list[int]]:
    """The official per-round numbers without what lies beyond the budget."""
    committed, kept, verified = 1, [], []
    for right, width in zip(accepted, submitted, strict=True):
        if committed >= budget:
            break
        limit = budget - committed - 1
        kept.append(min(right, limit))
        verified.append(min(width, limit))
        committed += kept[-1] + 1
    return kept, verified


def compare(output, rows, samples, budget: int = BUDGET) -> None:
    generated = new_tokens(output, rows)
    accepted = accepted_by_row(output.dspark_stats, len(rows))
    verified = verify_lengths_by_row(output.dspark_stats, len(rows))
    for row, sample in enumerate(samples):
        assert generated[row] == sample["output_ids"][sample["num_input_tokens"] :], row
        expected = capped(sample["accepted_draft_lengths"], sample["proposal_lengths"], budget)
        assert (accepted[row], verified[row]) == expected, row
    assert output.dspark_stats.path in ("packed", "rectangular")


def prompts_of(samples) -> list[list[int]]:
    return [sample["output_ids"][: sample["num_input_tokens"]] for sample in samples]


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_greedy_runs(name, threshold, attn):
    samples = golden(name).runs[f"greedy_thr{threshold}"]["samples"]
    rows = prompts_of(samples)
    compare(generate(name, attn, rows, threshold), rows, samples)
    for row, sample in zip(rows, samples, strict=True):
        compare(generate(name, attn, [row], threshold), [row], [sample])


@pytest.mark.parametrize("name", CASES)
def test_drafted_tokens_and_confidences_of_every_round(name):
    """The proposals themselves, slot by slot, in a ragged batch."""
    samples = golden(name).runs["greedy_thr0.0"]["samples"]
    rows = prompts_of(samples)
    output = generate(name, "sdpa", rows)
    seen = [0] * len(rows)
    compared = 0
    for event in output.dspark_stats.round_events:
        for i, row in enumerate(event.rows):
            record = samples[row]["rounds"][seen[row]]
            width = len(event.drafted[i])
            assert event.drafted[i] == record["sampled_draft_tokens"][:width]
            if event.confidence is not None:
                want = torch.tensor(record["confidence_logits_full_block"][:width]).sigmoid()
                torch.testing.assert_close(torch.tensor(event.confidence[i]), want, atol=1e-4, rtol=0)
                survival = want.cumprod(dim=0)
                torch.testing.assert_close(torch.tensor(event.survival[i]).float(), survival, atol=1e-4, rtol=0)
            seen[row] += 1
            compared += width
    assert compared > 100


@pytest.mark.parametrize("name", CASES)
def test_max_new_tokens_10(name):
    samples = golden(name).runs["greedy_max_new_10"]
    rows = prompts_of(samples)
    compare(generate(name, "sdpa", rows, max_new_tokens=10), rows, samples, budget=10)


STOP_RUNS = [(name, kind) for name in CASES for kind in golden(name).runs["stop_token_runs"]]


@pytest.mark.parametrize(("name", "kind"), STOP_RUNS)
def test_stop_token_runs(name, kind):
    """Each way in which a stop token can arrive: out of prefill, drafted, as the replacement, as the bonus token."""
    run = golden(name).runs["stop_token_runs"][kind]
    rows = prompts_of([run])
    output = generate(name, "sdpa", rows, eos_token_id=run["stop_token_ids"])
    assert output.sequences[0].tolist() == run["output_ids"] == run["plain_greedy_output_ids"]
    # Where the stop token was drafted, the official numbers count it as accepted and leave the bonus out.
    accepted = accepted_by_row(output.dspark_stats, 1)[0]
    assert accepted == capped(run["accepted_draft_lengths"], run["proposal_lengths"], BUDGET)[0]


@pytest.mark.parametrize("name", CASES)
def test_stop_tokens_of_three_rows_at_once(name):
    """Every row ends by its own stop token in one batch, and equals its run alone."""
    runs = list(golden(name).runs["stop_token_runs"].values())[1:4]
    samples = golden(name).runs["greedy_thr0.0"]["samples"]
    rows = prompts_of(samples)
    stops = sorted({token for run in runs for token in run["stop_token_ids"]})
    output = generate(name, "sdpa", rows, eos_token_id=stops)
    target = golden_target(name, "sdpa")
    expected = target.generate(
        **left_pad(rows), do_sample=False, pad_token_id=0, eos_token_id=stops, max_new_tokens=BUDGET
    )
    assert torch.equal(output.sequences, expected)
    for row, prompt in enumerate(rows):
        alone = generate(name, "sdpa", [prompt], eos_token_id=stops)
        assert accepted_by_row(alone.dspark_stats, 1)[0] == accepted_by_row(output.dspark_stats, 3)[row]


@pytest.mark.parametrize("name", CASES)
def test_sampled_run_is_reproducible(name):
    """Sampling with a trained draft accepts, and a seed gives the same output twice."""
    rows = prompts_of(golden(name).runs["greedy_thr0.0"]["samples"])
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        outputs.append(generate(name, "sdpa", rows, do_sample=True, max_new_tokens=32))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert outputs[0].dspark_stats.tau > 1.5


@pytest.mark.parametrize("name", CASES)
def test_the_default_schedule(name, monkeypatch):
    """The draft as it is loaded, on a cost table: exact, whatever the schedule makes of it."""
    use_cost_table(monkeypatch)
    samples = golden(name).runs["greedy_thr0.0"]["samples"]
    rows = prompts_of(samples)
    target = golden_target(name, "sdpa")
    output = target.generate(
        **left_pad(rows), assistant_model=golden(name).draft, do_sample=False, pad_token_id=0, max_new_tokens=BUDGET
    )
    expected = [sample["output_ids"][sample["num_input_tokens"] :] for sample in samples]
    assert new_tokens(output, rows) == expected


def test_the_default_schedule_measures_itself(tiny_pair, tmp_path, monkeypatch):
    """First use: the cost table is measured, saved, and used again."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    for name in CASES:
        sample = golden(name).runs["greedy_thr0.0"]["samples"][0]
        row = sample["output_ids"][: sample["num_input_tokens"]]
        draft = type(golden(name).draft).from_pretrained(golden(name).draft.name_or_path)
        for _ in range(2):
            output = golden_target(name, "sdpa").generate(
                torch.tensor([row]), assistant_model=draft, do_sample=False, pad_token_id=0, max_new_tokens=BUDGET
            )
            assert output[0].tolist() == sample["output_ids"]
    assert len(list(tmp_path.rglob("*.json"))) >= 1
