"""Logits processors on block-shaped scores.

A processor is written for one position of the whole batch: `(input_ids [batch, length], scores [batch, V])`.
Verification has several positions of several rows, each behind its own prefix. Warpers that look at nothing but the
scores run once on all of them. Every other processor is called as plain `generate()` would: once per distinct prefix
length, with the true prefixes of the full batch (some size themselves to the batch, some read the length).
"""

from collections.abc import Callable

import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from ..ops import on_device

# Matched by exact type: a user's subclass may look at the prefix.
_POSITION_WISE = {
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    SuppressTokensLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
}
# The warpers that mean the same on a reduced draft vocabulary; the draft samples through them too.
_DRAFT_WARPERS = {TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper}
# They carry a state from one call to the next (a cache of their own, a hash of what was sampled).
_SEQUENTIAL = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


def sequential_processors(processors: LogitsProcessorList) -> list[str]:
    """Names of processors that can only follow one token at a time."""
    return [type(processor).__name__ for processor in processors if isinstance(processor, _SEQUENTIAL)]


def draft_warper(processors: LogitsProcessorList) -> Callable[[torch.Tensor], torch.Tensor]:
    """The position-wise warpers, as one function of draft logits `[R, V_draft]`."""
    warpers = [processor for processor in processors if type(processor) in _DRAFT_WARPERS]

    def warp(scores: torch.Tensor) -> torch.Tensor:
        for warper in warpers:
            scores = warper(None, scores)
        return scores

    return warp


class BlockProcessors:
    """
    Applies a processor list to scores of many positions.

    Args:
        processors (`LogitsProcessorList`): What `generate()` built, in its order.
    """

    def __init__(self, processors: LogitsProcessorList):
        self.segments: list[tuple[bool, list]] = []  # runs of (position-wise?, processors), order kept
        for processor in processors:
            position_wise = type(processor) in _POSITION_WISE
            if not self.segments or self.segments[-1][0] != position_wise:
                self.segments.append((position_wise, []))
            self.segments[-1][1].append(processor)

    def __bool__(self) -> bool:
        return bool(self.segments)

    @property
    def needs_prefixes(self) -> bool:
        return any(not position_wise for position_wise, _ in self.segments)

    def __call__(self, ids: torch.Tensor | None, rows: list[int], prefixes: list[int], scores: torch.Tensor):
        """
        Args:
            ids (`torch.LongTensor` of shape `(batch, capacity)`):
                Padded prompts, generated and drafted tokens of every row of the call, finished ones included. May be
                None when `needs_prefixes` is False.
            rows (`list[int]` of length N): Row of each position.
            prefixes (`list[int]` of length N): Length of the prefix (padding included) that each position follows.
            scores (`torch.Tensor` of shape `(N, V)`): float32 logits. Not modified.

        Returns:
            `torch.Tensor` of shape `(N, V)`.
        """
        for position_wise, processors in self.segments:
            if position_wise:
                for processor in processors:
                    scores = processor(None, scores)
            else:
                scores = self._by_length(processors, ids, rows, prefixes, scores)
        return scores

    @staticmethod
    def _by_length(processors, ids, rows, prefixes, scores):
        out = torch.empty_like(scores)
        by_length: dict[int, list[int]] = {}
        for position, length in enumerate(prefixes):
            by_length.setdefault(length, []).append(position)
        for length, positions in by_length.items():
            where = on_device(positions, scores.device)
            batch_rows = on_device([rows[position] for position in positions], scores.device)
            # rows without a position at this length are fillers; their scores are computed and dropped
            full = scores.new_zeros(ids.shape[0], scores.shape[1])
            full[batch_rows] = scores[where]
            for processor in processors:
                full = processor(ids[:, :length], full)
            out[where] = full[batch_rows].to(out.dtype)
        return out
