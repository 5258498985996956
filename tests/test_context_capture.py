"""The hidden states that reach the draft are raw outputs of the tapped layers (case 18); a wrong pair (case 17)."""

from __future__ import annotations

import pytest
import torch
from planted import planted_draft, planted_for, random_draft
from running import Messages, assisted, check_exact, new_tokens
from targets import BATCHED, build, clear_prompts, plain_greedy, prompts

from dspark_hf import DSparkDraftModel

TAPS = {
    "qwen3": [-1, 0, 2, 3],
    "gemma2": [-1, 1, 3],
    "gemma3": [0, 3],
    "gemma4": [-1, 1, 3],
    "gemma4_kv_shared": [0, 2, 3],
}


@torch.no_grad()
def raw_states(target, ids: list[int], taps: list[int]) -> torch.Tensor:
    """Outputs of the tapped layers on one unpadded sequence, [tokens, T * H], by hooks of this test's own."""
    layers, seen, handles = target.model.layers, {}, []

    def keep(tap):
        def hook(module, args, output):
            seen[tap] = output[0] if isinstance(output, tuple) else output

        return hook

    def keep_input(module, args, kwargs):
        seen[-1] = args[0] if args else kwargs["hidden_states"]

    for tap in taps:
        if tap == -1:
            handles.append(layers[0].register_forward_pre_hook(keep_input, with_kwargs=True))
        else:
            handles.append(layers[tap].register_forward_hook(keep(tap)))
    target(input_ids=torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.cat([seen[tap] for tap in taps], dim=-1)[0]


def received(draft, num_rows: int, rounds_too: bool = False) -> list[dict[int, torch.Tensor]]:
    """Per row, position -> hidden state as the draft got it last; of the prompt only, or of every round."""
    states: list[dict[int, torch.Tensor]] = [{} for _ in range(num_rows)]
    for hidden, positions, rows, _ in draft.contexts if rounds_too else draft.contexts[:1]:
        for state, position, row in zip(hidden, positions.tolist(), rows.tolist(), strict=True):
            states[row][position] = state
    return states


def planted_with_taps(target, rows, taps, max_new_tokens):
    draft = planted_draft(target, target_layer_ids=taps)
    continuations = plain_greedy(target, rows, max_new_tokens)
    return draft.plan([p + c for p, c in zip(rows, continuations, strict=True)])


@pytest.mark.parametrize("lengths", [(1,), (2,), (9,), (3, 7, 12), (1, 9, 2)])
@pytest.mark.parametrize("name", TAPS)
def test_prompt_states_are_the_raw_layer_outputs(name, lengths):
    """The last layer's tap is its raw output, not the state behind the final norm, and -1 is the embedding output."""
    target = build(name, "sdpa" if name != "gemma2" else "eager")
    rows = prompts(lengths, seed=8)
    draft = planted_with_taps(target, rows, TAPS[name], 4)
    assisted(target, draft, rows, max_new_tokens=4)
    for row, states in enumerate(received(draft, len(rows))):
        expected = raw_states(target, rows[row], TAPS[name])
        assert sorted(states) == list(range(len(rows[row])))
        got = torch.stack([states[position] for position in range(len(rows[row]))])
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", TAPS)
def test_states_of_every_round(name):
    """Behind the prompt come the verified tokens that were kept, each at its own position and slot."""
    target = build(name, "eager")
    rows = clear_prompts(target, (3, 7, 12), 32)
    draft = planted_with_taps(target, rows, TAPS[name], 32)
    output = check_exact(target, draft, rows, max_new_tokens=32)
    texts = [p + c for p, c in zip(rows, new_tokens(output, rows), strict=True)]
    for row, states in enumerate(received(draft, len(rows), rounds_too=True)):
        expected = raw_states(target, texts[row], TAPS[name])
        # The last token of all has no state: nothing was verified behind it.
        got = torch.stack([states[position] for position in range(len(texts[row]) - 8)])
        torch.testing.assert_close(got, expected[: len(got)], atol=2e-4, rtol=2e-4)
    for _, positions, _, slots in draft.contexts:
        assert torch.equal(positions, slots)  # no earlier turn here: slot and position are the same


@pytest.mark.parametrize("chunk", [1, 3, 5, 64])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_prompt_in_chunks(name, chunk):
    """Chunked prefill hands over the same states, and the output stays the same."""
    target = build(name, "sdpa")
    rows = clear_prompts(target, (11, 4), 16, seed=2)
    draft = planted_with_taps(target, rows, [0, 3], 16)
    check_exact(target, draft, rows, max_new_tokens=16, prefill_chunk_size=chunk)
    chunks = -(-11 // chunk)
    states: list[dict[int, torch.Tensor]] = [{}, {}]
    for hidden, positions, numbers, _ in draft.contexts[:chunks]:
        for state, position, row in zip(hidden, positions.tolist(), numbers.tolist(), strict=True):
            states[row][position] = state
    for row, got in enumerate(states):
        stacked = torch.stack([got[position] for position in range(len(rows[row]))])
        torch.testing.assert_close(stacked, raw_states(target, rows[row], [0, 3]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", BATCHED)
def test_draft_cache_holds_the_projected_context(name):
    """What draft_block sees at the end: a fresh draft forward over the whole context proposes the same block."""
    target = build(name, "eager")
    rows = clear_prompts(target, (5, 9), 12, seed=3)
    draft = planted_with_taps(target, rows, [0, 3], 12)
    seen = []
    backbone = DSparkDraftModel._backbone

    def recording(self, input_ids, context_hidden, position_ids, cache, *args):
        hidden = backbone(self, input_ids, context_hidden, position_ids, cache, *args)
        seen.append((input_ids, position_ids, cache.rows.tolist(), cache.lengths.tolist(), hidden))
        return hidden

    draft._backbone = recording.__get__(draft)
    output = check_exact(target, draft, rows, max_new_tokens=12)
    texts = [p + c for p, c in zip(rows, new_tokens(output, rows), strict=True)]
    shared = draft.shared_weights(target)
    assert len(seen) >= 2
    for input_ids, position_ids, numbers, lengths, hidden in seen:
        for i, row in enumerate(numbers):
            anchor = position_ids[i, 0].item()
            assert lengths[i] == anchor and input_ids[i, 0].item() == texts[row][anchor]
            context = raw_states(target, texts[row][:anchor], [0, 3])[None]
            fresh = backbone(
                draft, input_ids[i : i + 1], context, torch.arange(anchor + 7)[None], None, None, shared, None
            )
            torch.testing.assert_close(hidden[i : i + 1], fresh, atol=2e-3, rtol=2e-3)


def test_a_pair_that_accepts_nothing_is_exact_and_warned_about_once():
    """Case 17: a draft that fits and is always wrong. Once per draft, however many calls."""
    target = build("llama", "sdpa")
    rows = clear_prompts(target, (3, 7, 12), 64)
    draft = planted_for(target, rows)
    with Messages() as messages:
        for _ in range(3):
            output = check_exact(target, draft.plan(draft.references, pattern=(0,)), rows)
    assert output.dspark_stats.accepted == 0 and output.dspark_stats.tau == 1
    said = messages.matching("accepted")
    assert len(said) == 1, said
    assert any(word in said[0].lower() for word in ("target_layer_ids", "layout", "another target", "different target"))


def test_a_random_draft_is_exact():
    target = build("llama", "sdpa")
    rows = clear_prompts(target, (3, 7, 12), 64)
    output = check_exact(target, random_draft(target, seed=99), rows)
    assert output.dspark_stats.tau < 1.3


def test_a_pair_that_works_is_not_warned_about():
    target = build("llama", "sdpa")
    rows = clear_prompts(target, (3, 7, 12), 64)
    with Messages() as messages:
        check_exact(target, planted_for(target, rows), rows)
    assert messages.matching("accepted") == []
