"""What a user would take instead: Transformers' own ways to decode, each as further arguments of `generate()`.

A way that cannot run here is left out with the reason, which belongs into the report: a baseline that is missing
without a word looks like one that was avoided.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import CompileConfig, PreTrainedModel

from ..modeling_dspark import DSparkDraftModel
from .dflash import DFlashAdapter, why_not

STATIC, COMPILED, LOOKUP, DFLASH, ASSISTANT = "static cache", "compiled", "prompt lookup", "DFlash", "assistant"
RANK_ZERO = "rank 0 here"
BASELINES = {
    STATIC: "plain generate() with a static cache",
    COMPILED: "plain generate() with a static cache and torch.compile",
    LOOKUP: "Transformers' prompt lookup, which copies from the text so far",
    DFLASH: "Transformers' own DFlash generator with a rank-0 draft",
    RANK_ZERO: "the same rank-0 draft in this package's loop",
    ASSISTANT: "Transformers' assisted generation with a small autoregressive model",
}
# Transformers assists one row at a time.
SINGLE_ROW = (LOOKUP, DFLASH, ASSISTANT)


@dataclass
class Baselines:
    """Those that can run, and why the others cannot.

    Attributes:
        arguments (`dict[str, dict]`): of `generate()`, by name.
        unavailable (`dict[str, str]`): reasons, by name.
    """

    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)

    def at(self, rows: int) -> list[str]:
        """Names of those that can decode `rows` rows."""
        return [name for name in self.arguments if rows == 1 or name not in SINGLE_ROW]


def build_baselines(
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    *,
    rank_zero: DSparkDraftModel | None = None,
    assistant: PreTrainedModel | None = None,
    lookup_tokens: int = 10,
    compile_anywhere: bool = False,
) -> Baselines:
    """
    Args:
        target (`PreTrainedModel`): the target.
        draft (`DSparkDraftModel`): the draft of the DSpark runs; drives the DFlash generator too if it has rank 0.
        rank_zero (`DSparkDraftModel`, *optional*): another draft for the DFlash generator.
        assistant (`PreTrainedModel`, *optional*): a small autoregressive model with the target's tokenizer.
        lookup_tokens (`int`): most tokens that prompt lookup proposes.
        compile_anywhere (`bool`): compile on a CPU too, which Transformers does not do by itself and takes minutes.
    """
    found = Baselines({STATIC: {"cache_implementation": "static"}})
    if target.device.type in ("cuda", "xpu"):
        # Transformers compiles a static cache's decoding there by itself
        found.arguments[COMPILED] = found.arguments[STATIC]
        found.arguments[STATIC] = found.arguments[STATIC] | {"disable_compile": True}
    elif compile_anywhere:
        config = CompileConfig(mode="default", fullgraph=False)
        config._compile_all_devices = True
        found.arguments[COMPILED] = found.arguments[STATIC] | {"compile_config": config}
    else:
        found.unavailable[COMPILED] = (
            f"on {target.device.type} generate() compiles nothing by itself; --compile has it do so, for minutes of "
            "compilation"
        )
    found.arguments[LOOKUP] = {"prompt_lookup_num_tokens": lookup_tokens}
    dflash = draft if rank_zero is None else rank_zero
    if reason := why_not(dflash, target):
        found.unavailable[DFLASH] = reason
    else:
        found.arguments[DFLASH] = {"assistant_model": DFlashAdapter(dflash, target), "speculation_type": "dflash"}
    if rank_zero is not None:
        rank_zero.generation_config.num_assistant_tokens_schedule = "constant"
        found.arguments[RANK_ZERO] = {"assistant_model": rank_zero}
    if assistant is None:
        found.unavailable[ASSISTANT] = "no small model was named (--assistant)"
    else:
        found.arguments[ASSISTANT] = {"assistant_model": assistant}
    return found


__all__ = [
    "ASSISTANT",
    "BASELINES",
    "COMPILED",
    "DFLASH",
    "LOOKUP",
    "RANK_ZERO",
    "SINGLE_ROW",
    "STATIC",
    "Baselines",
    "build_baselines",
]
