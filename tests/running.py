"""Shared steps of the runtime tests: run a batch with a draft, split the output, read the statistics."""

from __future__ import annotations

import logging
import warnings

import torch
from targets import PAD_TOKEN_ID, left_pad, plain_greedy

from dspark_hf.throughput import DraftPoint, ThroughputProfile, VerifyPoint

BATCHED_PATHS = ("packed", "rectangular")


def assisted(target, draft, rows: list[list[int]], **kwargs):
    """`generate()` of a left-padded batch with `draft`; returns the dict output (with `.dspark_stats`)."""
    kwargs.setdefault("max_new_tokens", 64)
    return target.generate(**left_pad(rows), assistant_model=draft, return_dict_in_generate=True, **kwargs)


def new_tokens(output, rows: list[list[int]]) -> list[list[int]]:
    """New tokens per row, the padding behind an end of sequence included."""
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    width = max(len(row) for row in rows)
    return sequences[:, width:].tolist()


def plain_batch(target, rows: list[list[int]], **kwargs) -> torch.Tensor:
    """Plain batched `generate()` of the same left-padded batch."""
    kwargs.setdefault("max_new_tokens", 64)
    return target.generate(**left_pad(rows), **kwargs)


def padded(rows: list[list[int]], pad: int = PAD_TOKEN_ID) -> list[list[int]]:
    """Right-padded to the longest row, as `generate()` returns finished rows."""
    width = max(len(row) for row in rows)
    return [row + [pad] * (width - len(row)) for row in rows]


def accepted_by_row(stats, num_rows: int) -> list[list[int]]:
    """Accepted draft tokens per row and round in which the row ran."""
    by_row = [[] for _ in range(num_rows)]
    for event in stats.round_events:
        for row, accepted in zip(event.rows, event.accepted, strict=True):
            by_row[row].append(accepted)
    return by_row


def verify_lengths_by_row(stats, num_rows: int) -> list[list[int]]:
    """Draft tokens submitted for verification per row and round in which the row ran."""
    by_row = [[] for _ in range(num_rows)]
    for event in stats.round_events:
        for row, length in zip(event.rows, event.verify_lengths, strict=True):
            by_row[row].append(length)
    return by_row


def check_exact(target, draft, rows: list[list[int]], max_new_tokens: int = 64, paths=BATCHED_PATHS, **kwargs):
    """Greedy batch against each prompt on its own. Returns the dict output; counts every row in `COMPARED`."""
    output = assisted(target, draft, rows, max_new_tokens=max_new_tokens, do_sample=False, **kwargs)
    expected = plain_greedy(target, rows, max_new_tokens)
    for number, (got, want) in enumerate(zip(new_tokens(output, rows), expected, strict=True)):
        first = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
        assert got == want, f"row {number} differs from plain generate() from new token {first}: {got} != {want}"
    assert output.dspark_stats.path in paths
    return output


def planned_acceptance(draft, row: int, budget: int, block_size: int) -> list[int]:
    """Accepted tokens per round that a `PlantedDraft` must reach in a row that runs `budget` tokens to the end.

    The prefill gives one token, and every round commits its accepted tokens and one more; a draft is never longer than
    what the budget leaves beside that one.
    """
    committed, rounds = 1, []
    while committed < budget:
        right = draft.right(row, len(rounds))
        rounds.append(min(right, block_size, budget - committed - 1))
        committed += rounds[-1] + 1
    return rounds


class Messages:
    """Collects what `dspark_hf` says inside a `with` block, through `warnings` and through its logger alike."""

    def __enter__(self) -> Messages:
        self.logged: list[str] = []
        self.handler = logging.Handler(level=logging.WARNING)
        self.handler.emit = lambda record: self.logged.append(record.getMessage())
        self.logger = logging.getLogger("dspark_hf")
        self.logger.addHandler(self.handler)
        self.catcher = warnings.catch_warnings(record=True)
        self.warned = self.catcher.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *exception) -> None:
        self.catcher.__exit__(*exception)
        self.logger.removeHandler(self.handler)

    def matching(self, *words: str) -> list[str]:
        """Messages that contain one of the words, whatever the case."""
        texts = self.logged + [str(warning.message) for warning in self.warned]
        return [text for text in texts if any(word.lower() in text.lower() for word in words)]


def use_cost_table(monkeypatch, per_token: float = 0.001, base: float = 0.05, draft: float = 0.005, steps=()) -> None:
    """Gives the "throughput" schedule a known cost table in place of one measured on this machine.

    Args:
        per_token, base, draft: seconds of a verified token, of a step, and of a draft.
        steps: numbers of tokens from which on a step costs `base` once more (a jagged curve).
    """

    def seconds(tokens: int) -> float:
        return base * (1 + sum(tokens >= step for step in steps)) + per_token * tokens

    points = [
        VerifyPoint(rows, tokens, context, seconds(tokens))
        for context in (0, 512)
        for rows in (1, 2, 4, 8, 64, 512, 4096)
        for tokens in sorted({rows * n for n in range(1, 9)}.union(*({s - 1, s} for s in steps if s > rows)))
    ]
    profile = ThroughputProfile({}, points, [DraftPoint(1, draft), DraftPoint(4096, draft)])
    monkeypatch.setattr("dspark_hf.generation.hook.profile_for", lambda *args, **kwargs: profile)
