"""Streamers see what plain `generate()` sends them (case 14), and the telemetry adds up."""

from __future__ import annotations

import pytest
from byte_tokenizer import byte_tokenizer
from planted import planted_for
from running import assisted, new_tokens, plain_batch
from targets import build, clear_prompts, plain_greedy
from transformers import TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

from dspark_hf import record_generation

pytestmark = pytest.mark.exactness

LENGTHS = (3, 7, 12)


class Recorder(BaseStreamer):
    """Keeps the chunks as plain generate's callers see them."""

    def __init__(self):
        self.chunks, self.ends = [], 0

    def put(self, value):
        assert self.ends == 0
        self.chunks.append(value.clone())

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("eos", [None, 9])
def test_streamer_calls_equal_plain(size, eos):
    """Case 14: the same chunks in the same shapes, one end."""
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)[:size]
    continuations = plain_greedy(target, rows, 64)
    kwargs = {} if eos is None else {"eos_token_id": sorted({c[eos + r] for r, c in enumerate(continuations)})}
    plain_recorder, recorder = Recorder(), Recorder()
    plain_batch(target, rows, streamer=plain_recorder, **kwargs)
    assisted(target, planted_for(target, rows), rows, streamer=recorder, **kwargs)
    assert [chunk.tolist() for chunk in recorder.chunks] == [chunk.tolist() for chunk in plain_recorder.chunks]
    assert recorder.ends == plain_recorder.ends == 1


def test_text_streamers():
    """The joined text equals the final text."""
    target, tokenizer = build("qwen3", "sdpa"), byte_tokenizer()
    rows = clear_prompts(target, (7,), 64)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    output = assisted(target, planted_for(target, rows), rows, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(new_tokens(output, rows)[0])


def test_text_streamer_refuses_batches(capsys):
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    with pytest.raises(ValueError, match="batch size 1"):
        assisted(target, planted_for(target, rows), rows, streamer=TextStreamer(byte_tokenizer()))


class RoundRecorder(Recorder):
    """Also takes the rounds."""

    def __init__(self):
        super().__init__()
        self.rounds = []

    def on_round(self, event):
        self.rounds.append(event)


def test_on_round():
    """One event per round, and their committed tokens are the text without its first token."""
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    recorder = RoundRecorder()
    output = assisted(target, planted_for(target, rows), rows, streamer=recorder)
    stats = output.dspark_stats
    assert [event.index for event in recorder.rounds] == list(range(stats.rounds))
    committed = [[token] for token in output.sequences[:, max(LENGTHS)].tolist()]
    for event in recorder.rounds:
        assert event.draft_seconds >= 0 and event.verify_seconds > 0
        for i, row in enumerate(event.rows):
            committed[row] += event.committed[i]
            length, accepted = event.verify_lengths[i], event.accepted[i]
            assert len(event.committed[i]) == accepted + 1 and accepted <= length <= len(event.drafted[i])
            assert event.committed[i][:accepted] == event.drafted[i][:accepted]
    assert committed == new_tokens(output, rows)


def test_statistics_add_up():
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    with record_generation() as recorded:
        first = assisted(target, planted_for(target, rows), rows).dspark_stats
        second = assisted(target, planted_for(target, rows[:1]), rows[:1]).dspark_stats
    assert first.new_tokens == 3 * 64 and second.new_tokens == 64
    assert recorded.new_tokens == 4 * 64
    assert recorded.rounds == first.rounds + second.rounds
    assert recorded.accepted == first.accepted + second.accepted
    for stats in (first, second):
        assert stats.accepted == sum(sum(lengths) for lengths in stats.accepted_lengths)
        assert len(stats.acceptance_by_position) == 7
        assert stats.draft_seconds > 0 and stats.verify_seconds > 0 and stats.other_seconds >= 0
    row_rounds = sum(len(event.rows) for event in first.round_events)
    assert first.tau == pytest.approx((first.accepted + row_rounds) / row_rounds)
