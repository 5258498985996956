"""Batches answered in one setting after another, the seconds and statistics of each kept.

All ways to generate run in one process on the same prompts, in the same dtype, with the same stopping. They take turns
in an order that rotates with each batch and repeat, so that a machine that warms up or slows down is unfair to nobody.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..modeling_dspark import DSparkDraftModel
from ..stats import GenerationStats, record_generation
from .bare import RoundCost
from .machine import peak_memory, reset_peak_memory, timed
from .prompts import Batch


@dataclass(frozen=True)
class Setting:
    """One way to generate. Without a schedule it is plain generation, or the `baseline` named.

    The schedule "throughput" copies where the text repeats itself, unless `copies` says no.
    """

    schedule: str | None = None
    draft_length: int = 0
    threshold: float = 0.0
    baseline: str | None = None
    copies: bool = True

    @property
    def name(self) -> str:
        if self.schedule is None:
            return self.baseline or "plain"
        name = f"{self.draft_length} drafted" if self.schedule == "constant" else self.schedule
        return name if self.copies else f"{name}, no copies"


class TokenWatch(BaseStreamer):
    """A streamer that notes when tokens come, and how many at once.

    Attributes:
        first_token_seconds (`float`, *optional*): from its making to the first new token.
        pieces (`list[int]`): new tokens a row that came at once, the first token's included.
    """

    def __init__(self):
        self.began = time.perf_counter()
        self.first_token_seconds: float | None = None
        self.pieces: list[int] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:  # generate() sends the prompt first
            self._prompt_seen = True
            return
        if self.first_token_seconds is None:
            self.first_token_seconds = time.perf_counter() - self.began
        self.pieces.append(value.shape[1] if value.dim() == 2 else 1)

    def end(self) -> None:
        pass


@dataclass
class Measurement:
    """What one batch in one setting gave.

    Attributes:
        source (`str`): of the prompts.
        answers (`list[list[int]]`): new tokens of each row, up to and with the end-of-sequence token.
        seconds (`list[float]`): wall-clock seconds of each repeat, prefill included.
        stats (`GenerationStats`, *optional*): of all repeats together; `None` without a DSpark draft.
        costs (`list[RoundCost]`): of each repeat, where they were asked for.
        first_token_seconds, peak_mib (`list[float]`): of each repeat that was watched.
        pieces (`list[list[int]]`): tokens that came at once, of each repeat that was watched.
        parts (`Counter`): seconds by part of the decoding loop, of all repeats that were asked to tell.
    """

    source: str
    answers: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stats: GenerationStats | None = None
    costs: list[RoundCost] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    peak_mib: list[float] = field(default_factory=list)
    pieces: list[list[int]] = field(default_factory=list)
    parts: Counter[str] = field(default_factory=Counter)


class Runner:
    """Answers batches with one pair in any setting.

    Args:
        args: has `max_new_tokens`, `seed`, and of the sampling settings `temperature`, `top_k`, `top_p` those that are
            not None; greedy when all are.
        target (`PreTrainedModel`), draft (`DSparkDraftModel`): the pair.
        baselines (`Mapping[str, dict]`, *optional*): further arguments of `generate()` for each baseline by its name.
    """

    def __init__(
        self,
        args: Any,
        target: PreTrainedModel,
        draft: DSparkDraftModel,
        baselines: Mapping[str, dict[str, Any]] | None = None,
    ):
        self.target, self.draft, self.seed, self.baselines = target, draft, args.seed, baselines or {}
        sampling = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
        sampling = {name: value for name, value in sampling.items() if value is not None}
        self.options = {"max_new_tokens": args.max_new_tokens, "do_sample": bool(sampling), **sampling}
        ends = target.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])

    def run(
        self, setting: Setting, batch: Batch, into: Measurement, *, watch: bool = False, **overrides: Any
    ) -> GenerationStats:
        """Answer `batch` once, add the result to `into`, and return this run's statistics.

        Args:
            setting (`Setting`), batch (`Batch`): what to do.
            into (`Measurement`): where the result goes.
            watch (`bool`): also note first token, pieces and peak memory.
            overrides: other arguments of `generate()`.
        """
        torch.manual_seed(self.seed)
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, **self.options}
        if setting.schedule is not None:
            config = self.draft.generation_config
            config.num_assistant_tokens = setting.draft_length
            config.num_assistant_tokens_schedule = setting.schedule
            config.assistant_confidence_threshold = setting.threshold
            config.prompt_lookup_num_tokens = None if setting.copies else 0
            inputs["assistant_model"] = self.draft
        elif setting.baseline is not None:
            inputs |= self.baselines[setting.baseline]
        inputs |= overrides
        if watch:
            reset_peak_memory(self.target.device)
            inputs["streamer"] = watcher = TokenWatch()
        with record_generation() as stats:
            output, seconds = timed(lambda: self.target.generate(**inputs), self.target.device)
        answers = output[:, batch.input_ids.shape[1] :].tolist()
        into.answers = [self.until_end(answer) for answer in answers]
        into.seconds.append(seconds)
        if stats.calls:
            into.stats = into.stats or GenerationStats()
            into.stats.add(stats)
        if watch:
            into.first_token_seconds.append(watcher.first_token_seconds)
            into.pieces.append(watcher.pieces)
            if (peak := peak_memory(self.target.device)) is not None:
                into.peak_mib.append(peak)
        return stats

    def until_end(self, answer: list[int]) -> list[int]:
        """`answer` without the padding behind its end-of-sequence token."""
        end = next((place for place, token in enumerate(answer) if token in self.ends), len(answer))
        return answer[: end + 1]


def total_stats(measurements: list[Measurement]) -> GenerationStats:
    """The statistics of several batches together."""
    stats = GenerationStats()
    for measurement in measurements:
        stats.add(measurement.stats)
    return stats


def speed(measurements: list[Measurement], plain: list[Measurement]) -> dict[str, Any]:
    """Speed of a setting beside plain generation's, on the same batches; with a DSpark draft also what it achieved."""

    def tokens_per_second(chosen: list[Measurement]) -> float:
        tokens = sum(len(answer) for measurement in chosen for answer in measurement.answers)
        return tokens / sum(median(measurement.seconds) for measurement in chosen)

    rate = tokens_per_second(measurements)
    result: dict[str, Any] = {"tokens_per_second": rate, "speedup": rate / tokens_per_second(plain)}
    result["seconds"] = [measurement.seconds for measurement in measurements]
    result["tokens"] = [[len(answer) for answer in measurement.answers] for measurement in measurements]
    if measurements[0].stats is not None:
        total = total_stats(measurements)
        same, compared = identical_rows(measurements, plain)
        result |= {
            "path": total.path,
            "tau": total.tau,
            "copied_share": total.copied / max(1, total.new_tokens),
            "acceptance_by_position": total.acceptance_by_position,
            "mean_verify_length": total.verified / max(1, sum(len(event.rows) for event in total.round_events)),
            "identical_rows": same,
            "compared_rows": compared,
            "draft_seconds": total.draft_seconds,
            "verify_seconds": total.verify_seconds,
            "other_seconds": total.other_seconds,
            "prefill_seconds": total.prefill_seconds,
            "rounds": total.rounds,
        }
    return result


def decoding_speedup(measurements: list[Measurement], plain: list[Measurement]) -> float:
    """Speed beside plain generation's from the first token on: prompts, which both process alike, are left out."""

    def rate(chosen: list[Measurement]) -> float:
        tokens = sum(len(answer) - 1 for measurement in chosen for answer in measurement.answers)
        spent = [median(run.seconds) - median(run.first_token_seconds) for run in chosen]
        return tokens / sum(spent)

    return rate(measurements) / rate(plain)


def identical_rows(measurements: list[Measurement], plain: list[Measurement]) -> tuple[int, int]:
    """Rows whose answer is plain generation's, token for token, and all rows."""
    same = [
        ours == theirs
        for mine, reference in zip(measurements, plain, strict=True)
        for ours, theirs in zip(mine.answers, reference.answers, strict=True)
    ]
    return sum(same), len(same)


def speedup_quartiles(measurements: list[Measurement], plain: list[Measurement]) -> list[float]:
    """Quartiles of the speed-up, run by run beside plain generation's run of the same turn; one value thrice if alone.

    Tokens a second are compared, since answers in half precision or of a sampled run may differ in length.
    """

    def rates(measurement: Measurement) -> list[float]:
        tokens = sum(map(len, measurement.answers))
        return [tokens / seconds for seconds in measurement.seconds]

    ratios = [
        ours / theirs
        for mine, reference in zip(measurements, plain, strict=True)
        for ours, theirs in zip(rates(mine), rates(reference), strict=True)
    ]
    return quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3


def overhead(costs: list[RoundCost]) -> dict[str, Any]:
    """Medians over runs: a round's wall time, its bare forwards, their ratio, the speed-up without overhead."""

    def per_round(name: str) -> float:
        return median(getattr(cost, name) / cost.rounds for cost in costs)

    return {
        "round_seconds": per_round("wall"),
        "bare_draft_seconds": per_round("draft"),
        "bare_verify_seconds": per_round("verify"),
        "bare_step_seconds": per_round("step"),
        "overhead": median(cost.overhead for cost in costs),
        "ideal_speedup": median(cost.ideal_speedup for cost in costs),
    }


__all__ = [
    "Measurement",
    "Runner",
    "Setting",
    "TokenWatch",
    "decoding_speedup",
    "identical_rows",
    "overhead",
    "speed",
    "speedup_quartiles",
    "total_stats",
]
