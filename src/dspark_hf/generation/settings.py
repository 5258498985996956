"""The knobs of one call: the draft's generation config, overridden by what `generate()` was given."""

import logging
from dataclasses import dataclass

from transformers import GenerationConfig

from ..configuration_dspark import default_generation_config, validate_generation_config

logger = logging.getLogger(__name__)

# Transformers fills these in before our code runs, so a value equal to them cannot be told from "not given".
_GLOBAL_DEFAULTS = {
    "num_assistant_tokens": 20,
    "assistant_confidence_threshold": 0.4,
    "num_assistant_tokens_schedule": "constant",
}
_WARNED_CAPS: set[tuple[int, int]] = set()


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        num_tokens (`int`): Most tokens drafted per round, at most γ.
        threshold (`float`): Confidence below which a row's block is cut (schedule "confidence").
        schedule (`str`): "constant", "confidence" or "throughput".
        copy_tokens (`int`): Most tokens copied from a row's own text (schedule "throughput"); 0 copies nothing.
    """

    num_tokens: int
    threshold: float
    schedule: str
    copy_tokens: int = 0


def resolve_settings(draft, generation_config: GenerationConfig) -> Settings:
    """
    Settings of a call; neither config is changed.

    Args:
        draft (`DSparkDraftModel`): Its `generation_config` gives the defaults.
        generation_config (`GenerationConfig`): The call's.

    Raises:
        ValueError: an unknown schedule, a threshold outside [0, 1], fewer than one drafted token, or fewer than no
            copied ones.
    """
    base, fallback = draft.generation_config, default_generation_config(draft.config)
    values = {}
    for name, filled_in in _GLOBAL_DEFAULTS.items():
        given = getattr(generation_config, name, None)
        if given in (None, filled_in):
            given = getattr(base, name, None)
        values[name] = getattr(fallback, name) if given is None else given
    values["prompt_lookup_num_tokens"] = getattr(base, "prompt_lookup_num_tokens", None)
    merged = GenerationConfig(**values)
    validate_generation_config(merged, draft.config)
    block = draft.config.num_draft_tokens
    wanted = merged.num_assistant_tokens
    if wanted > block:
        if (wanted, block) not in _WARNED_CAPS:
            _WARNED_CAPS.add((wanted, block))
            logger.warning(
                "num_assistant_tokens=%d is more than this draft's block gives; %d tokens are drafted.", wanted, block
            )
        wanted = block
    copied = wanted if merged.prompt_lookup_num_tokens is None else merged.prompt_lookup_num_tokens
    return Settings(wanted, merged.assistant_confidence_threshold, merged.num_assistant_tokens_schedule, copied)
