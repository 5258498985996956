"""Reader for Transformers' own DFlash draft, `MuseGlimmerAssistantModel`.

Settings are at top level, the context projection is in an `encoder`, blocks are 1+N. Embedding and head are the
target's, and so is the vocabulary: the file does not say how large it is. Sliding layers are bidirectional, and their
window does not count the slot itself.
"""

from typing import Any

from ..configuration_dspark import DSparkConfig
from .detect import Reader
from .flat import Tensors, qwen3_config

MODEL_TYPE = "muse_glimmer_assistant"
TARGET_VOCABULARY = 202048


def _matches(config: dict[str, Any], tensors: Tensors) -> bool:
    return config.get("model_type") == MODEL_TYPE


def _resolve(
    config: dict[str, Any], tensors: Tensors, sample_from_anchor: bool | None
) -> tuple[DSparkConfig, list[str]]:
    notes = ["sliding layers are bidirectional inside the block, as Transformers runs them"]
    if config.get("vocab_size") is None:
        config = config | {"vocab_size": TARGET_VOCABULARY}
        notes.append(f"vocabulary {TARGET_VOCABULARY}, that of Muse Glimmer: the configuration has none")
    if config.get("sliding_window"):
        config = config | {"sliding_window": config["sliding_window"] + 1}
    return qwen3_config(
        config | {"is_causal": False},
        tensors,
        "Transformers DFlash",
        anchor_first=sample_from_anchor,
        default_layout=(False, "the DFlash packaging"),
        notes=tuple(notes),
    )


def _rename(tensors: Tensors) -> dict[str, str]:
    return {name: name for name in tensors}


READER = Reader("transformers-dflash", _matches, _resolve, _rename)

__all__ = ["READER"]
