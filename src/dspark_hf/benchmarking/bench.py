"""The side-by-side benchmark: every way to decode on the same prompts, and the physical limit beside them.

For each number of rows and each domain, every method gets the same batches. Beside DSpark's speed stands what the
machine would allow (*ideal*): tau tokens for one bare forward of the draft and one of the target, against bare steps of
plain decoding. *Reached* is the share of a round that those two forwards take; what eats the rest is told by part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from transformers import PreTrainedModel

from ..calibration_run import RoundRecorder
from ..confidence_metrics import ece_floor, measure_confidence
from ..modeling_dspark import DSparkDraftModel
from .bare import BareForwards, RoundCost
from .baselines import COMPILED, DFLASH, SINGLE_ROW, Baselines
from .exactness import DeficitTable
from .machine import environment
from .prompts import ALL, Batch, make_batches
from .runner import (
    Measurement,
    Runner,
    Setting,
    decoding_speedup,
    identical_rows,
    speed,
    speedup_quartiles,
    total_stats,
)
from .shares import PREFILL, shares, timed_parts

PLAIN = Setting()
_COSTS = ("wall", "draft", "verify", "step")
SCHEDULES = ("constant", "confidence", "throughput")


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        rows (`Sequence[int]`): batch sizes.
        limit (`int`, *optional*): prompts of each domain; rounded up to a whole batch. None: all.
        repeats (`int`): runs of each batch in each setting.
        draft_lengths (`Sequence[int]`): of the constant schedule; none leaves it out.
        schedules (`Sequence[str]`): the others.
        threshold (`float`): of the confidence schedule.
        thin_batches (`bool`): above one row only plain generate(), the constant lengths and "throughput".
        bare (`bool`): measure bare forwards.
        exactness (`bool`): teacher-forced deficits of greedy answers.
        max_new_tokens, seed, temperature, top_k, top_p: as `generate()` has them; greedy without a sampling setting.
    """

    rows: Sequence[int] = (1, 4, 8)
    limit: int | None = None
    repeats: int = 3
    draft_lengths: Sequence[int] = ()
    schedules: Sequence[str] = ("confidence", "throughput")
    threshold: float = 0.5
    thin_batches: bool = False
    bare: bool = True
    exactness: bool = True
    max_new_tokens: int = 128
    seed: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def settings(self, draft: DSparkDraftModel, rows: int = 1, baselines: Sequence[str] = ()) -> list[Setting]:
        """What runs at a number of rows: plain generation first, then the baselines that can, then DSpark."""
        block = draft.config.num_draft_tokens
        thresholds = {"confidence": self.threshold, "throughput": 0.0}
        # without a confidence head there is nothing to schedule by
        schedules = self.schedules if draft.config.enable_confidence_head else ()
        # what the drafts do alone
        alone = [Setting("throughput", block, copies=False)] if "throughput" in schedules else []
        if self.thin_batches and rows > 1:
            baselines, schedules, alone = (), [name for name in schedules if name == "throughput"], []
        return [
            PLAIN,
            *(Setting(baseline=name) for name in baselines),
            *(Setting("constant", length) for length in self.draft_lengths),
            *(Setting(name, block, thresholds[name]) for name in schedules),
            *alone,
        ]


class Benchmark:
    """One target with its draft and the baselines.

    Args:
        target (`PreTrainedModel`), draft (`DSparkDraftModel`): the pair.
        baselines (`Baselines`): from [`build_baselines`].
        plan (`Plan`): what to measure.
        say (`Callable[[str], object]`, *optional*): told of progress, a line at a time.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DSparkDraftModel,
        baselines: Baselines,
        plan: Plan,
        say: Callable[[str], object] = lambda text: None,
    ):
        self.target, self.draft, self.baselines, self.plan, self.say = target, draft, baselines, plan, say
        self.runner = Runner(plan, target, draft, baselines.arguments)
        self.deficits = DeficitTable(target)
        self.greedy = not self.runner.options["do_sample"]

    def run(self, prompts: dict[str, list[list[int]]]) -> dict[str, Any]:
        """Measure everything.

        Args:
            prompts (`dict[str, list[list[int]]]`): token ids by domain.

        Returns:
            `dict`: the report, ready for JSON once its maker has added names and arguments.
        """
        machine = environment()
        results = []
        for rows in self.plan.rows:
            results += self._at(rows, prompts)
        return {
            "benchmark": "bench",
            "environment": machine,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "device": self.target.device.type,
            "draft_shape": describe_draft(self.draft),
            "prompts_by_domain": {domain: len(ids) for domain, ids in prompts.items()},
            "unavailable": self.baselines.unavailable,
            "results": results,
        }

    def _batches(self, rows: int, prompts: dict[str, list[list[int]]]) -> list[Batch]:
        pad = self.target.generation_config.pad_token_id
        limit = self.plan.limit
        if limit is not None:
            prompts = {domain: ids[: -(-limit // rows) * rows] for domain, ids in prompts.items()}
        batches = make_batches(prompts, rows, pad if pad is not None else 0)
        return [batch.to(self.target.device) for batch in batches]

    def _at(self, rows: int, prompts: dict[str, list[list[int]]]) -> list[dict[str, Any]]:
        plan, batches = self.plan, self._batches(rows, prompts)
        longest = max(batches, key=lambda batch: batch.input_ids.shape[1])
        settings = self._working(plan.settings(self.draft, rows, self.baselines.at(rows)), longest)
        context = median(int(row) for batch in batches for row in batch.attention_mask.sum(1))
        # Contexts grow during a run; the middle of the answer stands for all of it.
        bare = BareForwards(self.target, self.draft, int(context) + plan.max_new_tokens // 2) if plan.bare else None
        measured = {setting: [Measurement(batch.source) for batch in batches] for setting in settings}
        for number, batch in enumerate(batches):
            for repeat in range(plan.repeats):
                turn = (number + repeat) % len(settings)
                for setting in settings[turn:] + settings[:turn]:
                    self._measure(setting, batch, measured[setting][number], bare)
            self.say(f"batch {number + 1} of {len(batches)} with {rows} {'row' if rows == 1 else 'rows'}")
        return [
            {"rows": rows, "domain": domain or ALL, "method": setting.name, **asdict(setting), **result}
            for domain in self._domains(batches)
            for setting, result in self._results(domain, settings, batches, measured)
        ]

    def _working(self, settings: list[Setting], batch: Batch) -> list[Setting]:
        """Runs every setting twice, so that nobody pays for first use; a baseline that cannot run is left out."""
        working = []
        for setting in settings:
            try:
                for tokens in self._warm_up(setting):
                    self.runner.run(setting, batch, Measurement("warm-up"), max_new_tokens=tokens)
            except Exception as error:  # whatever a baseline fails with is the reason to report
                if setting.baseline is None:
                    raise
                self.baselines.unavailable[setting.baseline] = f"{type(error).__name__}: {first_line(error)}"
                self.baselines.arguments.pop(setting.baseline)
                self.say(f"{setting.name} cannot run here: {first_line(error)}")
                continue
            working.append(setting)
        return working

    def _warm_up(self, setting: Setting) -> tuple[int, int]:
        """New tokens of the two calls before anything is timed."""
        whole = self.plan.max_new_tokens
        short = min(8, whole)
        if setting.baseline == COMPILED:
            return whole, whole  # a static cache that has to grow later would be compiled for once more
        # "throughput" measures the machine for the contexts that a call may reach
        return short, whole if setting.schedule == "throughput" else short

    def _measure(self, setting: Setting, batch: Batch, into: Measurement, bare: BareForwards | None) -> None:
        device = self.target.device
        if setting.schedule is None:
            self.runner.run(setting, batch, into, watch=True)
            return
        if device.type == "cpu":
            with timed_parts(device) as parts:
                stats = self.runner.run(setting, batch, into, watch=True)
        else:
            stats = self.runner.run(setting, batch, into, watch=True)
            with timed_parts(device) as parts:  # waits for the device at every part, so it is a run of its own
                self.runner.run(setting, batch, Measurement(batch.source))
        into.parts.update(parts)
        constant = setting.schedule == "constant"
        if bare is not None and stats.round_events:
            into.costs.append(bare.compare(stats, setting.draft_length, constant=constant))

    def _domains(self, batches: list[Batch]) -> list[str | None]:
        domains = list(dict.fromkeys(batch.source for batch in batches))
        return [None, *domains] if len(domains) > 1 else domains

    def _results(self, domain: str | None, settings: list[Setting], batches: list[Batch], measured: dict):
        numbers = [number for number, batch in enumerate(batches) if domain in (None, batch.source)]
        chosen = {setting: [measured[setting][number] for number in numbers] for setting in settings}
        for setting in settings:
            runs, plain = chosen[setting], chosen[PLAIN]
            result = speed(runs, plain) | {"speedup_quartiles": speedup_quartiles(runs, plain)}
            result["identical_rows"], result["compared_rows"] = identical_rows(runs, plain)
            result["first_token_seconds"] = median(time for run in runs for time in run.first_token_seconds)
            if peaks := [peak for run in runs for peak in run.peak_mib]:
                result["peak_mib"] = max(peaks)
            if self.greedy and self.plan.exactness:
                result["deficits"] = self.deficits.statistics(
                    [
                        (batches[number].prompt(row), answer)
                        for number, run in zip(numbers, runs, strict=True)
                        for row, answer in enumerate(run.answers)
                    ]
                )
            if runs[0].stats is not None:
                result["decoding_speedup"] = decoding_speedup(runs, plain)
                result |= draft_figures(runs, whole_blocks=setting.schedule in (None, "constant"))
            elif setting.baseline in SINGLE_ROW:
                result["tau"] = pieces_tau(setting.baseline, runs)
            if costs := [cost for run in runs for cost in run.costs]:
                result |= limits(costs, result["decoding_speedup"])
            yield setting, result


def pieces_tau(baseline: str, runs: list[Measurement]) -> float:
    """Tokens that one forward of the target gave in Transformers' assisted loop, which streams what a round commits.

    That loop drafts before it reads the prompt, so the first round counts like any other. The DFlash generator cannot,
    as it needs the prompt's hidden states.
    """
    pieces = [size for run in runs for answer in run.pieces for size in answer[baseline == DFLASH :]]
    return sum(pieces) / len(pieces) if pieces else 1.0


def draft_figures(runs: list[Measurement], whole_blocks: bool) -> dict[str, Any]:
    """What a draft achieved in some runs: shares of the time and, where whole blocks were verified, how well its
    confidences fared (a cut by confidence would select what is seen)."""
    stats, parts = total_stats(runs), Counter()
    for run in runs:
        parts.update(run.parts)
    rounds = Counter({part: seconds for part, seconds in parts.items() if part != PREFILL})
    figures: dict[str, Any] = {
        "share_without_draft": stats.share_without_draft,
        "expected_tau": stats.expected_tau,
    }
    if parts:
        figures["shares"] = shares(parts)
        figures["part_seconds_per_round"] = {part: spent / max(1, stats.rounds) for part, spent in rounds.items()}
    if not whole_blocks:
        return figures
    recorder = RoundRecorder()
    for event in stats.round_events:
        recorder.on_round(event)
    if recorder.lengths:
        record = recorder.record()
        metrics = measure_confidence(record)
        figures["confidence"] = {
            "ece": metrics.ece_mean,
            "auc": metrics.auc_mean,
            "floor": ece_floor(record),
            "rounds": len(record),
        }
    return figures


def limits(costs: list[RoundCost], decoding_speedup: float) -> dict[str, Any]:
    """The physical limit beside some runs.

    Args:
        costs (`list[RoundCost]`): their rounds beside bare forwards.
        decoding_speedup (`float`): speed beside plain generate(), without prompts.

    Returns:
        `dict`: seconds of a round and of its bare forwards; `ideal_speedup`: tokens for nothing but those forwards,
        over plain decoding's bare steps; `reached`: the share of a round that its bare forwards take;
        `reached_of_plain`: the measured speed-up over the ideal one.
    """
    rounds = sum(cost.rounds for cost in costs)
    wall, draft, verify, step = (sum(getattr(cost, name) for cost in costs) for name in _COSTS)
    ideal = sum(cost.tau * cost.step for cost in costs) / (draft + verify)
    return {
        "round_seconds": wall / rounds,
        "bare_draft_seconds": draft / rounds,
        "bare_verify_seconds": verify / rounds,
        "bare_step_seconds": step / rounds,
        "ideal_speedup": ideal,
        "reached": (draft + verify) / wall,
        "reached_of_plain": decoding_speedup / ideal,
    }


def describe_draft(draft: DSparkDraftModel) -> dict[str, Any]:
    """The draft's shape, for the report."""
    config = draft.config
    return {
        "layers": config.num_hidden_layers,
        "block": config.num_draft_tokens,
        "head": config.markov_head_type if config.markov_rank else None,
        "rank": config.markov_rank,
        "confidence": config.enable_confidence_head,
        "calibrated": config.confidence_calibration is not None,
        "draft_vocabulary": config.draft_vocab_size,
        "vocabulary": config.vocab_size,
        "parameters": sum(parameter.numel() for parameter in draft.parameters()),
    }


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.split("\n")[0] if text else "no message"


__all__ = ["PLAIN", "SCHEDULES", "Benchmark", "Plan", "describe_draft", "draft_figures", "limits"]
