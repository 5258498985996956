"""Records how confidences fare in live decoding, fits their calibration, and keeps it with the draft.

Calibration needs rounds as they come in use (DSpark, arXiv 2607.05147, section 3.2): anchors that follow a rejection
are harder than the random anchors of training. It also needs every slot verified, since a cut by confidence would
select what is seen. So the target decodes real prompts with the schedule "constant", and each round of each row says
what the head promised, raw, and how much the target took.
"""

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from transformers.generation.streamers import BaseStreamer

from .calibration import Calibration, fit_calibration
from .confidence_metrics import ConfidenceRecord
from .configuration_dspark import DSparkConfig
from .modeling_dspark import DSparkDraftModel
from .stats import RoundEvent


class RoundRecorder(BaseStreamer):
    """Takes the rounds of `generate()` calls, given to them as `streamer`, and nothing else.

    Args:
        groups (`list[int]`, *optional*): Prompt that each row of the coming call belongs to; by default the row.
    """

    def __init__(self, groups: list[int] | None = None):
        self.groups = groups
        self.confidence: list[list[float]] = []
        self.accepted: list[int] = []
        self.lengths: list[int] = []
        self.group_of_round: list[int] = []

    def put(self, value):
        pass

    def end(self):
        pass

    def on_round(self, event: RoundEvent) -> None:
        """Adds one entry per row that verified something."""
        if event.confidence is None:
            return
        rows = zip(event.rows, event.confidence, event.verify_lengths, event.accepted, event.committed)
        for row, scores, length, accepted, committed in rows:
            if len(committed) == accepted:
                length = accepted  # stopped inside the block: nobody knows the fate of what came after
            if length:
                self.confidence.append(scores)
                self.accepted.append(accepted)
                self.lengths.append(length)
                self.group_of_round.append(row if self.groups is None else self.groups[row])

    def record(self) -> ConfidenceRecord:
        """Everything recorded so far."""
        return ConfidenceRecord.from_rounds(self.confidence, self.accepted, self.lengths, self.group_of_round)


def record_confidence(
    model,
    draft: DSparkDraftModel,
    batches: Iterable[Mapping[str, torch.Tensor]],
    *,
    progress: Callable[[int], object] | None = None,
    **generate_kwargs,
) -> ConfidenceRecord:
    """
    Decodes prompts with everything verified and records raw confidences against acceptance.

    Args:
        model: The target.
        draft (`DSparkDraftModel`): A draft with a confidence head. Not changed; a calibration it has is left out.
        batches: `input_ids` and `attention_mask`, each `(R, P)`, of different prompts; every row is a group.
        progress (`Callable`, *optional*): Called with the number of rows after each batch.
        generate_kwargs: For `generate()`, e.g. `max_new_tokens`, `do_sample`.

    Returns:
        `ConfidenceRecord` with one entry per row and round, and one group per prompt.

    Raises:
        ValueError: no confidence head, or a target that is not verified in batched blocks.
    """
    if not draft.config.enable_confidence_head:
        raise ValueError("the draft has no confidence head: there is nothing to calibrate.")
    raw = copy.copy(draft)  # shares the weights
    raw.config = copy.deepcopy(draft.config)
    raw.config.confidence_calibration = None
    raw.generation_config = copy.deepcopy(draft.generation_config)
    raw.generation_config.num_assistant_tokens = draft.config.num_draft_tokens
    raw.generation_config.num_assistant_tokens_schedule = "constant"
    recorder, seen = RoundRecorder(), 0
    for batch in batches:
        rows = batch["input_ids"].shape[0]
        recorder.groups = list(range(seen, seen + rows))
        model.generate(**batch, assistant_model=raw, streamer=recorder, **generate_kwargs)
        seen += rows
        if progress is not None:
            progress(rows)
    if not recorder.lengths:
        raise ValueError(
            f"no drafted round was seen in {seen} prompts: answers are too short (raise max_new_tokens), or "
            f"{type(model).__name__} is not verified in batched blocks."
        )
    return recorder.record()


def calibrate(record: ConfidenceRecord, num_slots: int, *, held_out: float = 0.5, seed: int = 0) -> Calibration:
    """
    Fits on one part of the prompts and reports on the other.

    Args:
        record (`ConfidenceRecord`): From [`record_confidence`].
        num_slots (`int`): Slots K of the draft; those that no round reached keep the raw score.
        held_out (`float`): Share of the prompts to report on.
        seed (`int`): Decides which.

    Raises:
        ValueError: fewer than three prompts with rounds.
    """
    prompts = len(record.groups.unique())
    if prompts < 3:
        raise ValueError(f"calibration needs rounds of at least three prompts, got {prompts}: give more prompts.")
    fit, judged = record.split(1.0 - held_out, seed)
    if len(fit.groups.unique()) < 2:
        fit, judged = judged, fit
    result = fit_calibration(fit, judged)
    missing = num_slots - len(result.temperature)
    result.temperature += [1.0] * missing
    result.shift += [0.0] * missing
    result.forms += ["identity"] * missing
    return result


def save_calibration(draft: DSparkDraftModel, result: Calibration, folder: str | Path) -> Path:
    """
    Puts the temperatures and shifts into the draft's configuration and saves it.

    Args:
        draft (`DSparkDraftModel`): Its `config.confidence_calibration` is set.
        result (`Calibration`): What to save.
        folder (`str`): Where to. A folder that holds this package's layout gets a new `config.json`, its weights stay
            as they are; an empty or new one gets the whole draft.

    Raises:
        ValueError: the folder holds a draft in another packaging.
    """
    folder = Path(folder)
    if (folder / "config.json").exists() and not is_native(folder):
        raise ValueError(
            f"{folder} holds a draft in another packaging, which has no place for a calibration: "
            "name another folder to save to."
        )
    draft.config.confidence_calibration = result.to_config()
    if is_native(folder):
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["confidence_calibration"] = result.to_config()
        partial = path.with_name(".config.json.partial")
        partial.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        partial.replace(path)
    else:
        draft.save_pretrained(folder)
    return folder


def is_native(folder: str | Path) -> bool:
    """Whether a folder holds a draft in this package's own layout."""
    path = Path(folder) / "config.json"
    if not path.exists():
        return False
    config = json.loads(path.read_text(encoding="utf-8"))
    return config.get("model_type") == DSparkConfig.model_type and "speculators_model_type" not in config


def describe(result: Calibration) -> str:
    """The result as a table, a line per slot: acceptance, then ECE, AUC and Brier score of the running product."""
    lines = [
        "                       ECE                    AUC            Brier",
        "slot   accepted   raw    STS   saved      raw   saved    raw   saved   form",
    ]

    def row(name: str, share: float, numbers: list[float], form: str) -> str:
        ece, auc, brier = numbers[:3], numbers[3:5], numbers[5:]
        cells = " ".join(f"{value:6.3f}" for value in ece) + "   " + " ".join(f"{value:6.3f}" for value in auc)
        return f"{name:>4} {share:10.3f} {cells}   {' '.join(f'{value:6.3f}' for value in brier)}   {form}".rstrip()

    for k, form in enumerate(result.forms[: len(result.after.per_position)]):
        raw, sts, after = (part.per_position[k] for part in (result.before, result.sts, result.after))
        numbers = [raw.ece, sts.ece, after.ece, raw.auc, after.auc, raw.brier, after.brier]
        lines.append(row(str(k + 1), raw.target_mean, numbers, f"{form} {_parameters(result, k)}"))
    raw, sts, after = result.before, result.sts, result.after
    numbers = [raw.ece_mean, sts.ece_mean, after.ece_mean, raw.auc_mean, after.auc_mean]
    lines.append(row("mean", raw.target_mean, [*numbers, raw.brier_mean, after.brier_mean], ""))
    lines.append(
        f"fitted on {result.num_fit} rounds, judged on {result.num_held_out} of other prompts, where a perfect head "
        f"would show an ECE of {result.noise_floor:.3f}"
    )
    return "\n".join(lines)


def _parameters(result: Calibration, slot: int) -> str:
    return f"({result.temperature[slot]:.2f}, {result.shift[slot]:+.2f})"


__all__ = [
    "RoundRecorder",
    "calibrate",
    "describe",
    "is_native",
    "record_confidence",
    "save_calibration",
]
