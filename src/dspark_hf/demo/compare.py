"""One prompt, answered twice: by plain `generate()` and by `generate()` with a DSpark draft.

In float32 both give the same tokens. In half precision a target is not even equal to itself from one batch size to the
next: where two tokens are nearly tied, the rounding of a wider forward may flip them. So the comparison does not stop
at "they differ": it finds the first differing token and asks the target for the distance between the two candidates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import DSparkDraftModel, record_generation
from ..stats import GenerationStats


@dataclass(frozen=True)
class Difference:
    """Where two greedy answers part, and how close the call was.

    Attributes:
        index (`int`): position of the token within the answer, counted from 0.
        plain (`int`): token id that plain generation chose there; -1 when its answer had ended.
        dspark (`int`): token id that DSpark chose there; -1 when its answer had ended.
        logit_gap (`float`): the target's logit of `plain` minus that of `dspark`, from one forward over the common
            prefix; `nan` when one answer is a prefix of the other.
    """

    index: int
    plain: int
    dspark: int
    logit_gap: float


@dataclass(frozen=True)
class Comparison:
    """Both answers to one prompt.

    Attributes:
        plain_ids, dspark_ids (`list[int]`): the answers' token ids, without the prompt.
        plain_seconds, dspark_seconds (`float`): wall-clock time of the faster of the timed runs, prefill included.
        stats (`GenerationStats`): what DSpark did in that run.
        difference (`Difference`, *optional*): first difference; `None` when the answers are equal.
    """

    plain_ids: list[int]
    dspark_ids: list[int]
    plain_seconds: float
    dspark_seconds: float
    stats: GenerationStats
    difference: Difference | None

    @property
    def plain_speed(self) -> float:
        """Plain generation's tokens per second."""
        return len(self.plain_ids) / self.plain_seconds

    @property
    def dspark_speed(self) -> float:
        """DSpark's tokens per second."""
        return len(self.dspark_ids) / self.dspark_seconds


def compare(
    model: PreTrainedModel,
    draft: DSparkDraftModel,
    inputs: Mapping[str, torch.Tensor],
    *,
    repeats: int = 2,
    seed: int = 0,
    **generate_kwargs: Any,
) -> Comparison:
    """Answer one prompt with and without the draft, taking turns, and compare.

    Args:
        model (`PreTrainedModel`): the target.
        draft (`DSparkDraftModel`): its draft.
        inputs (`Mapping[str, torch.Tensor]`): `input_ids` (1, prompt length) and whatever else `generate()` takes.
        repeats (`int`, *optional*, defaults to 2): timed runs of each, after one short run to warm up.
        seed (`int`, *optional*, defaults to 0): set before every run, for sampling.
        generate_kwargs: passed to `generate()`, e.g. `max_new_tokens`.

    Returns:
        [`Comparison`]

    Raises:
        `ValueError`: more than one prompt, or `repeats` below 1.
    """
    prompt = inputs["input_ids"]
    if prompt.shape[0] != 1:
        raise ValueError(f"inputs: one prompt is compared at a time, got input_ids of shape {tuple(prompt.shape)}")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")

    def plain(**overrides: Any) -> tuple[list[int], None]:
        torch.manual_seed(seed)
        output = model.generate(**inputs, **{**generate_kwargs, **overrides})
        return output[0, prompt.shape[1] :].tolist(), None

    def dspark(**overrides: Any) -> tuple[list[int], GenerationStats]:
        torch.manual_seed(seed)
        with record_generation() as stats:
            output = model.generate(**inputs, assistant_model=draft, **{**generate_kwargs, **overrides})
        return output[0, prompt.shape[1] :].tolist(), stats

    for run in (plain, dspark):
        run(max_new_tokens=8)
    results = [(_timed(plain), _timed(dspark)) for _ in range(repeats)]
    (plain_ids, _), plain_seconds = min((pair[0] for pair in results), key=lambda result: result[1])
    (dspark_ids, stats), dspark_seconds = min((pair[1] for pair in results), key=lambda result: result[1])
    return Comparison(
        plain_ids=plain_ids,
        dspark_ids=dspark_ids,
        plain_seconds=plain_seconds,
        dspark_seconds=dspark_seconds,
        stats=stats,
        difference=first_difference(model, prompt, plain_ids, dspark_ids),
    )


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Result and wall-clock seconds of `run()`. The ids come back to the host inside it, so a GPU has finished too."""
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


def first_difference(
    model: PreTrainedModel, prompt: torch.Tensor, plain: list[int], dspark: list[int]
) -> Difference | None:
    """Where two answers to `prompt` (1, prompt length) part, with the target's view of it; `None` if nowhere."""
    if plain == dspark:
        return None
    pairs = zip(plain, dspark, strict=False)
    shorter = min(len(plain), len(dspark))
    index = next((i for i, (left, right) in enumerate(pairs) if left != right), shorter)
    if index == shorter:
        tokens = (answer[index] if index < len(answer) else -1 for answer in (plain, dspark))
        return Difference(index, *tokens, logit_gap=float("nan"))
    common = torch.tensor([plain[:index]], dtype=prompt.dtype, device=prompt.device)
    with torch.no_grad():
        logits = model(torch.cat([prompt, common], dim=1), logits_to_keep=1).logits[0, -1].float()
    return Difference(index, plain[index], dspark[index], float(logits[plain[index]] - logits[dspark[index]]))


__all__ = ["Comparison", "Difference", "compare", "first_difference"]
