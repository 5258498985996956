"""Reader for this package's own saves: `model_type` "dspark", every field explicit, tensors named as in the model."""

import warnings
from typing import Any

from ..configuration_dspark import DSparkConfig
from .detect import Reader, Tensors


def _matches(config: dict[str, Any], tensors: Tensors) -> bool:
    # Another trainer uses the same model type; only our own saves name the layer family.
    return (
        config.get("model_type") == DSparkConfig.model_type
        and config.get("speculators_model_type") is None
        and "backbone" in config
    )


def _resolve(
    config: dict[str, Any], tensors: Tensors, sample_from_anchor: bool | None
) -> tuple[DSparkConfig, list[str]]:
    config = dict(config)
    if sample_from_anchor in (None, config.get("sample_from_anchor")):
        return DSparkConfig.from_dict(config), []
    config["sample_from_anchor"] = sample_from_anchor
    if config.get("confidence_calibration") is not None:
        warnings.warn("The confidence calibration was made for the other block layout and is dropped.", stacklevel=2)
        config["confidence_calibration"] = None
    layout = "anchor-first" if sample_from_anchor else "1+N"
    return DSparkConfig.from_dict(config), [f"block layout: {layout}, by override"]


def _rename(tensors: Tensors) -> dict[str, str]:
    return {name: name for name in tensors}


READER = Reader("native", _matches, _resolve, _rename)

__all__ = ["READER"]
