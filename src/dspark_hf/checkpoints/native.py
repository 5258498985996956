"""Reader for this package's own saves: `model_type` "dspark", every field explicit, tensors named as in the model."""

from typing import Any

from ..configuration_dspark import DSparkConfig
from .detect import Reader, Tensors


def _matches(config: dict[str, Any], tensors: Tensors) -> bool:
    return config.get("model_type") == DSparkConfig.model_type and config.get("speculators_model_type") is None


def _read_config(config: dict[str, Any], tensors: Tensors, sample_from_anchor: bool | None) -> DSparkConfig:
    config = dict(config)
    if sample_from_anchor is not None:
        config["sample_from_anchor"] = sample_from_anchor
    return DSparkConfig.from_dict(config)


def _rename(tensors: Tensors) -> dict[str, str]:
    return {name: name for name in tensors}


READER = Reader("native", _matches, _read_config, _rename)

__all__ = ["READER"]
