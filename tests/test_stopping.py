"""Stopping inside a block: end of sequence, stop strings, custom criteria and exact budgets (cases 5, 6, 7).

Plain batched `generate()` decides after every single token; a block of accepted tokens may hold the stop in its middle.
"""

from __future__ import annotations

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from planted import ForwardCounter, planted_draft, planted_for
from running import assisted, new_tokens, plain_batch, verify_lengths_by_row
from targets import build, clear_prompts, left_pad, plain_greedy
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

LENGTHS = (3, 7, 12)
PATTERNS = [(7,), (0, 3, 7)]
UNSEEN = 10_000  # an EOS id that no target has


class Recorder(BaseStreamer):
    """Keeps every call of a streamer."""

    def __init__(self):
        self.chunks: list[torch.Tensor] = []
        self.ends = 0

    def put(self, value):
        self.chunks.append(value.clone())

    def end(self):
        self.ends += 1


def target_and_rows(seed: int = 0, attn: str = "sdpa", name: str = "qwen3"):
    target = build(name, attn)
    return target, clear_prompts(target, LENGTHS, 64, seed=seed)


def first_of(continuation: list[int], step: int) -> int:
    """The first step from `step` on whose token has not occurred before in the row."""
    return next(i for i in range(step, len(continuation)) if continuation[i] not in continuation[:i])


@pytest.mark.exactness
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("step", range(17))
def test_end_of_sequence_at_every_offset(step, pattern):
    """Case 5: two blocks' worth of offsets, one EOS id per row at a different offset, the prefill's token included."""
    target, rows = target_and_rows()
    continuations = plain_greedy(target, rows, 64)
    eos = sorted({c[first_of(c, step + 3 * row)] for row, c in enumerate(continuations)})
    recorder = Recorder()
    output = assisted(target, planted_for(target, rows, pattern=pattern), rows, eos_token_id=eos, streamer=recorder)
    expected = plain_batch(target, rows, eos_token_id=eos)
    assert torch.equal(output.sequences, expected)
    streamed = torch.stack(recorder.chunks[1:], dim=1)
    assert torch.equal(streamed, expected[:, max(LENGTHS) :])
    assert recorder.ends == 1


@pytest.mark.exactness
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("step", range(10))
def test_end_of_sequence_of_a_single_row(step, pattern):
    """Batch 1: nothing comes behind the end, neither in the output nor out of the streamer."""
    target, rows = target_and_rows(seed=1)
    for row in rows[:2]:
        (continuation,) = plain_greedy(target, [row], 64)
        step = first_of(continuation, step)
        recorder = Recorder()
        draft = planted_for(target, [row], pattern=pattern)
        output = assisted(target, draft, [row], eos_token_id=[continuation[step], 95], streamer=recorder)
        expected = plain_batch(target, [row], eos_token_id=[continuation[step], 95])
        assert torch.equal(output.sequences, expected)
        assert (
            torch.cat([chunk.flatten() for chunk in recorder.chunks[1:]]).tolist() == expected[0, len(row) :].tolist()
        )


def test_end_of_sequence_out_of_prefill_needs_no_round():
    target, rows = target_and_rows()
    eos = sorted({c[0] for c in plain_greedy(target, rows, 64)})
    assisted(target, planted_for(target, rows), rows)  # the one-time self-check of this target
    with ForwardCounter(target) as counter:
        output = assisted(target, planted_for(target, rows), rows, eos_token_id=eos)
    assert output.sequences.shape[1] == max(LENGTHS) + 1
    assert len(counter.shapes) == 1
    assert output.dspark_stats.rounds == 0


def special_bytes(continuation: list[int], step: int, pieces: list[bytes]) -> dict[int, bytes] | None:
    """Ids -> bytes so that the text from `step` on starts with the pieces; None when ids repeat or are reserved."""
    ids = continuation[step : step + len(pieces)]
    reserved = {ord(c) - 31 for c in "abcdef"} | {0}
    fresh = all(token not in continuation[:step] for token in ids)
    return (
        dict(zip(ids, pieces, strict=True))
        if len(set(ids)) == len(ids) == len(pieces) and fresh and not (set(ids) & reserved)
        else None
    )


# What the text at the chosen step is made of, and the stop string looked for in it.
STOPS = {
    "one token": ([b"\xc2\xa7"], "§"),
    "two tokens": ([b"\xc2\xa7", b"\xc2\xb6"], "§¶"),
    "three tokens": ([b"\xc2\xa7", b"\xc2\xb6", b"\xc2\xb5"], "§¶µ"),
    "inside one token": ([b"xx\xc2\xa7yy"], "\xa7"),
    "end and start of tokens": ([b"xx\xc2\xa7", b"\xc2\xb6yy"], "§¶"),
    "one character in two tokens": ([b"\xc3", b"\xa9"], "é"),
    "one character in four tokens": ([b"\xf0", b"\x9f", b"\x98", b"\x80"], "😀"),
    "ends inside a character's tokens": ([b"\xc3", b"\xa9\xc3", b"\xa8"], "é"),
}


@pytest.mark.exactness
@pytest.mark.parametrize("kind", STOPS)
def test_stop_strings_at_every_offset(kind):
    """Case 6: at every offset of a block and across its edge, cut where plain generate cuts."""
    pieces, stop = STOPS[kind]
    target, rows = target_and_rows(seed=2)
    rows = rows[:1]
    (continuation,) = plain_greedy(target, rows, 64)
    tried = 0
    for step in range(1, 40):
        special = special_bytes(continuation, step, pieces)
        if special is None:
            continue
        kwargs = {"stop_strings": [stop, "never seen"], "tokenizer": byte_tokenizer(special)}
        expected = plain_batch(target, rows, **kwargs)
        assert expected.shape[1] < len(rows[0]) + 64, "plain generate did not stop either: the test tests nothing"
        for pattern in PATTERNS:
            output = assisted(target, planted_for(target, rows, pattern=pattern), rows, **kwargs)
            assert torch.equal(output.sequences, expected), (step, pattern)
        tried += 1
        if tried == 10:
            break
    assert tried >= 8


@pytest.mark.exactness
@pytest.mark.parametrize("eos", [None, [UNSEEN]])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_stop_strings_in_a_batch(pattern, eos):
    """Every row stops at another offset, by another string.

    Without any EOS id plain generate lets stopped rows run on until all have stopped; with one it pads them.
    """
    target, rows = target_and_rows(seed=2)
    continuations = plain_greedy(target, rows, 64)
    tokenizer = byte_tokenizer()
    texts = [tokenizer.decode(c) for c in continuations]
    assert all(len(text) == 64 for text in texts)
    for offset in range(1, 9):
        stops = [
            texts[0][offset : offset + 1],
            texts[1][offset + 5 : offset + 7],
            texts[2][2 * offset : 2 * offset + 3],
        ]
        kwargs = {"stop_strings": stops, "tokenizer": tokenizer, "eos_token_id": eos}
        output = assisted(target, planted_for(target, rows, pattern=pattern), rows, **kwargs)
        assert torch.equal(output.sequences, plain_batch(target, rows, **kwargs)), offset


class SumStops(StoppingCriteria):
    """Ends a row when its last three tokens sum to a multiple of `modulus`: looks at the row's own text only."""

    def __init__(self, modulus: int):
        self.modulus = modulus

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -3:].sum(dim=1) % self.modulus == 0


class LengthStops(StoppingCriteria):
    """Ends every row at a padded length."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.mark.exactness
@pytest.mark.parametrize("eos", [None, [UNSEEN]])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "criteria", [[SumStops(11)], [SumStops(23)], [LengthStops(29)], [SumStops(31), LengthStops(40)]]
)
def test_custom_criteria(criteria, pattern, eos):
    target, rows = target_and_rows(seed=3)
    kwargs = {"stopping_criteria": StoppingCriteriaList(criteria), "eos_token_id": eos}
    output = assisted(target, planted_for(target, rows, pattern=pattern), rows, **kwargs)
    expected = plain_batch(target, rows, **kwargs)
    assert torch.equal(output.sequences, expected)
    assert expected.shape[1] < max(LENGTHS) + 64


@pytest.mark.exactness
@pytest.mark.parametrize("pattern", PATTERNS)
def test_exact_budget(pattern):
    """Case 7: the length is exact, and nothing is submitted that the budget could not take."""
    target, rows = target_and_rows(seed=4)
    for budget in range(1, 21):
        draft = planted_for(target, rows, pattern=pattern)
        output = assisted(target, draft, rows, max_new_tokens=budget)
        assert new_tokens(output, rows) == [c[:budget] for c in plain_greedy(target, rows, 64)]
        events = output.dspark_stats.round_events
        for row, lengths in enumerate(verify_lengths_by_row(output.dspark_stats, len(rows))):
            committed = 1
            mine = [e.accepted[e.rows.index(row)] for e in events if row in e.rows]
            for length, accepted in zip(lengths, mine, strict=True):
                assert length <= budget - committed - 1
                committed += accepted + 1
            assert committed == budget


@pytest.mark.exactness
def test_max_length():
    """Padded prompt length counts, as in plain generate; one token is prefill alone."""
    target, rows = target_and_rows(seed=4)
    for extra in (1, 2, 9):
        length = max(LENGTHS) + extra
        draft = planted_for(target, rows)
        kwargs = {"max_length": length, "max_new_tokens": None}
        output = assisted(target, draft, rows, **kwargs)
        assert output.sequences.shape[1] == length
        assert torch.equal(output.sequences, plain_batch(target, rows, **kwargs))
        assert len(draft.calls) <= extra - 1


@pytest.mark.exactness
def test_min_new_tokens_with_end_of_sequence():
    target, rows = target_and_rows(seed=5)
    free = plain_greedy(target, rows, 64)
    eos = [free[0][2], free[1][4], free[2][0]]
    for minimum in (1, 5, 12):
        kwargs = {"eos_token_id": eos, "min_new_tokens": minimum, "max_new_tokens": 30}
        expected = plain_batch(target, rows, **kwargs)
        continuations = expected[:, max(LENGTHS) :].tolist()
        draft = planted_draft(target).plan([p + c for p, c in zip(rows, continuations, strict=True)])
        assert torch.equal(assisted(target, draft, rows, **kwargs).sequences, expected)


def test_padding_is_the_callers():
    """The pad id of finished rows is the one generate() was told."""
    target, rows = target_and_rows()
    continuations = plain_greedy(target, rows, 64)
    eos = [continuations[1][first_of(continuations[1], 4)]]
    kwargs = {"eos_token_id": eos, "pad_token_id": 77, "max_new_tokens": 20}
    output = assisted(target, planted_for(target, rows), rows, **kwargs)
    expected = target.generate(**left_pad(rows), **kwargs)
    assert torch.equal(output.sequences, expected)
