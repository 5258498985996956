"""What the two forwards of a round cost on their own, outside any generation loop.

A round cannot be cheaper than one forward of the draft over its block plus one forward of the target over the tokens
to verify. Both are measured at the shapes of the real run: the draft through `draft_block` with its cache already
filled, the target through its plain `forward` on a filled `DynamicCache`. Everything a real round costs beyond that
(extending the draft's context, masks, capture, acceptance, stopping) is overhead.

Machines change speed from minute to minute, so the bare forwards are timed right after each run they are compared with,
and the ratio is taken run by run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from .._compat import CACHE_KEY
from ..modeling_dspark import DSparkDraftModel
from ..stats import GenerationStats
from .machine import timed

Shape = tuple[str, int, int]  # whose forward, rows, and tokens of a row


@dataclass(frozen=True)
class RoundCost:
    """One run's rounds beside the bare forwards they consist of. Seconds, summed over the run's rounds.

    Attributes:
        rounds (`int`): rounds of the run.
        tau (`float`): tokens a row and round.
        wall (`float`): the run's wall-clock time without prefill.
        draft (`float`): bare forwards of the draft over its block.
        verify (`float`): bare forwards of the target over 1 + l tokens a row.
        step (`float`): bare forwards of the target over 1 token a row: as many steps of plain decoding.
    """

    rounds: int
    tau: float
    wall: float
    draft: float
    verify: float
    step: float

    @property
    def overhead(self) -> float:
        """Wall time over the bare forwards' time."""
        return self.wall / (self.draft + self.verify)

    @property
    def ideal_speedup(self) -> float:
        """Speed-up over plain decoding's bare steps if the overhead were 1."""
        return self.tau * self.step / (self.draft + self.verify)


class BareForwards:
    """Times bare forwards of a pair at a fixed context length.

    Args:
        target (`PreTrainedModel`), draft (`DSparkDraftModel`): the pair, on one device, in one dtype.
        context (`int`): tokens already in both caches, per row.
        repeats (`int`, *optional*, defaults to 3): timed forwards for each figure; their median counts.
    """

    def __init__(self, target: PreTrainedModel, draft: DSparkDraftModel, context: int, *, repeats: int = 3):
        self.target, self.draft, self.context, self.repeats = target, draft, context, repeats
        self.shared = draft.shared_weights(target)
        self._filled: dict[int, tuple[Any, Any, torch.Tensor]] = {}
        self._forwards = {"draft": self._draft_block, "target": self._target_forward}
        self._warm: set[Shape] = set()

    def compare(self, stats: GenerationStats, draft_length: int, *, constant: bool = True) -> RoundCost:
        """Time the bare forwards of a run that has just ended, for every number of rows and width it ran at.

        Args:
            stats (`GenerationStats`): of that run alone.
            draft_length (`int`): drafted tokens of a round, at most.
            constant (`bool`, *optional*, defaults to `True`): rounds draft and verify all of them, but for the last
                ones before the length limit, whose verification is interpolated. Otherwise a round counts with the
                length of its own draft, or none, and its own verify length, the mean over its rows; a width is timed
                once, as there are many.
        """
        rounds: Counter[tuple[int, int, int]] = Counter()
        for event in stats.round_events:
            length = round(sum(event.verify_lengths) / len(event.rows))
            drafted = event.draft_width
            rounds[len(event.rows), length, draft_length if drafted and constant else drafted] += 1
        shapes = dict.fromkeys(("draft", rows, drafted) for rows, _, drafted in sorted(rounds) if drafted)
        widths = {(rows, draft_length if constant else length) for rows, length, _ in rounds}
        shapes |= dict.fromkeys(("target", rows, 1 + length) for rows, length in sorted(widths))
        shapes |= dict.fromkeys(("target", rows, 1) for rows, _, _ in sorted(rounds))
        cost = self._medians(list(shapes), self.repeats if constant else 1)

        def verify(rows: int, length: int) -> float:
            if not constant:
                return cost["target", rows, 1 + length]
            whole, step = cost["target", rows, 1 + draft_length], cost["target", rows, 1]
            return step + (whole - step) * length / draft_length

        return RoundCost(
            stats.rounds,
            stats.tau,
            wall=stats.seconds - stats.prefill_seconds,
            draft=sum(n * cost["draft", rows, drafted] for (rows, _, drafted), n in rounds.items() if drafted),
            verify=sum(n * verify(rows, length) for (rows, length, _), n in rounds.items()),
            step=sum(n * cost["target", rows, 1] for (rows, _, _), n in rounds.items()),
        )

    def seconds(self, rows: int, draft_length: int) -> tuple[float, float, float]:
        """Median seconds of the draft's block, of a verification, and of a plain step, for `rows` rows."""
        shapes = [("draft", rows, draft_length), ("target", rows, 1 + draft_length), ("target", rows, 1)]
        draft, verify, step = self._medians(shapes, self.repeats).values()
        return draft, verify, step

    @torch.no_grad()
    def _medians(self, shapes: list[Shape], repeats: int) -> dict[Shape, float]:
        """Median seconds of every forward. They take turns, as in a round: neither finds its own weights in a cache."""
        runs = {shape: partial(self._forwards[shape[0]], *shape[1:]) for shape in shapes}
        for shape, run in runs.items():
            if shape not in self._warm:
                run()
                self._warm.add(shape)
        times = [{shape: timed(run, self.target.device)[1] for shape, run in runs.items()} for _ in range(repeats)]
        return {shape: median(found[shape] for found in times) for shape in shapes}

    def _caches(self, rows: int) -> tuple[Any, Any, torch.Tensor]:
        """Filled caches of target and draft for `rows` rows, and token ids (rows, context)."""
        if rows not in self._filled:
            device = self.target.device
            tokens = torch.randint(self.target.get_input_embeddings().num_embeddings, (rows, self.context))
            tokens = tokens.to(device)
            cache = DynamicCache()
            self.target(input_ids=tokens, use_cache=True, logits_to_keep=1, **{CACHE_KEY: cache})
            memory = self.draft.new_cache(rows, slots=self.context + self.draft.config.block_size, uniform=True)
            memory.lengths = torch.full_like(memory.lengths, self.context)
            self._filled[rows] = (cache, memory, tokens)
        return self._filled[rows]

    def _target_forward(self, rows: int, width: int) -> None:
        cache, _, tokens = self._caches(rows)
        positions = torch.arange(self.context, self.context + width, device=tokens.device).expand(rows, -1)
        self.target(input_ids=tokens[:, :width], position_ids=positions, use_cache=True, **{CACHE_KEY: cache})
        cache.crop(-width)

    def _draft_block(self, rows: int, draft_length: int) -> None:
        _, memory, tokens = self._caches(rows)
        end = self.context + self.draft.config.block_size
        positions = torch.arange(self.context, end, device=self.draft.device).expand(rows, -1)
        self.draft.draft_block(
            None,
            tokens[:, 0],
            positions,
            cache=memory,
            shared=self.shared,
            num_tokens=draft_length,
            kv_length=end,
        )


__all__ = ["BareForwards", "RoundCost"]
