"""Where the time of a round goes: seconds by part of the decoding loop.

The loop's own steps are timed from outside, while a `with` block lasts: a clock is read where one part calls another,
so that every moment counts for exactly one part. On an accelerator the reading waits for it, which costs the overlap
of host and device: use such a run for shares, not for speed.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..generation.drafter import Drafter
from ..generation.loop import DecodingLoop
from ..generation.policy import ConstantPolicy, ThroughputPolicy
from ..generation.verifier import Verifier
from .machine import synchronize

PREFILL, REST = "prefill", "rest"
# Part -> the methods that are it. What a part calls of another part counts there; a prefill is counted as a whole.
PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    REST: ((DecodingLoop, "run"),),
    PREFILL: ((DecodingLoop, "_prefill"),),
    "draft": ((Drafter, "draft_round"),),
    "verify": ((Verifier, "__call__"),),
    "context": ((Drafter, "extend"), (Drafter, "flush")),
    "schedule": (
        (DecodingLoop, "_offer_copies"),
        *((owner, name) for owner in (ConstantPolicy, ThroughputPolicy) for name in ("wants_draft", "plan", "observe")),
    ),
    "processors": ((DecodingLoop, "_process"),),
    "accept": ((DecodingLoop, "_accept"),),
    "commit": ((DecodingLoop, "_commit"),),
    "rows": ((DecodingLoop, "_leave"),),
}
MEANING = {
    "prefill": "the prompt's forward, target and draft",
    "draft": "the draft's forward and its sequential head",
    "verify": "the target's forward over anchors and drafted tokens, with masks and cache",
    "context": "new hidden states into the draft's context",
    "schedule": "deciding what to draft, copy and verify",
    "processors": "logits processors, and scores in float32 where they are needed",
    "accept": "acceptance and the token that follows",
    "commit": "stopping rules, streaming, collecting tokens",
    "rows": "cache lengths, rows that leave",
    "rest": "everything else in the loop: index arithmetic, the copy to the host, statistics",
}


@contextmanager
def timed_parts(device: torch.device) -> Iterator[Counter[str]]:
    """Seconds by part of all decoding loops that run inside the context, in this thread."""
    spent: Counter[str] = Counter()
    stack: list[str] = []
    since = 0.0

    def switch() -> None:
        nonlocal since
        synchronize(device)
        now = time.perf_counter()
        if stack:
            spent[stack[-1]] += now - since
        since = now

    def counted(part: str, method: Callable) -> Callable:
        @functools.wraps(method)
        def run(*args, **kwargs):
            if stack and stack[-1] == PREFILL:
                return method(*args, **kwargs)
            switch()
            stack.append(part)
            try:
                return method(*args, **kwargs)
            finally:
                switch()
                stack.pop()

        return run

    originals = [(owner, name, vars(owner)[name]) for methods in PARTS.values() for owner, name in methods]
    try:
        for part, methods in PARTS.items():
            for owner, name in methods:
                setattr(owner, name, counted(part, vars(owner)[name]))
        yield spent
    finally:
        for owner, name, method in originals:
            setattr(owner, name, method)


def shares(parts: Counter[str]) -> dict[str, float]:
    """Share of each part in the whole call."""
    whole = sum(parts.values())
    return {part: parts[part] / whole for part in PARTS if parts[part]}


__all__ = ["MEANING", "PARTS", "PREFILL", "REST", "shares", "timed_parts"]
