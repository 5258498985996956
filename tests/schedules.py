"""Known costs for the scheduling tests, and drafts set to a schedule."""

from __future__ import annotations

import torch


class KnownCost:
    """Stands in for a `ThroughputProfile`: seconds by tokens, whatever the context.

    Args:
        base: seconds of any step.
        per_token: seconds of each token, those of other calls included.
        per_row: seconds of each row, however many tokens it verifies.
        jump: share of `base` that a step costs more as soon as anything is drafted (a jagged curve).
        draft: seconds of a draft.
        free_tokens: so many tokens cost nothing (a machine that is not full).
    """

    def __init__(self, base=0.05, per_token=0.001, per_row=0.0, jump=0.0, draft=0.005, free_tokens=0):
        self.base, self.per_token, self.per_row, self.jump = base, per_token, per_row, jump
        self.draft, self.free_tokens = draft, free_tokens

    def seconds(self, tokens: int, rows: int) -> float:
        paid = max(0, tokens - self.free_tokens)
        return self.base * (1 + self.jump * (tokens > rows)) + self.per_row * rows + self.per_token * paid

    def cost_table(self, max_tokens: int, rows: int = 1, context: int = 0) -> torch.Tensor:
        return torch.tensor([self.seconds(tokens, rows) for tokens in range(max_tokens + 1)], dtype=torch.float64)

    def plain_seconds(self, rows: int = 1, context: int = 0) -> float:
        return self.seconds(rows, rows)

    def draft_seconds(self, rows: int = 1, tokens: int = 0) -> float:
        return self.draft


def use_cost(monkeypatch, cost) -> None:
    """Gives the "throughput" schedule this cost in place of one measured on this machine."""
    monkeypatch.setattr("dspark_hf.generation.hook.profile_for", lambda *args, **kwargs: cost)


def use_schedule(draft, schedule: str, threshold: float = 0.0, copies: bool = True):
    """Sets the schedule of a draft and returns it; without `copies` it never copies from the text."""
    draft.generation_config.prompt_lookup_num_tokens = None if copies else 0
    draft.generation_config.num_assistant_tokens_schedule = schedule
    draft.generation_config.assistant_confidence_threshold = threshold
    return draft
