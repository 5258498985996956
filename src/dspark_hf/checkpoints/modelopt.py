"""Reader for NVIDIA ModelOpt's DSpark exports.

The architecture string says plain DFlash; what tells is the heads, whose tensors stand bare at the top: `markov_w1`,
`markov_w2`, `gate_proj`, `joint_proj`, `confidence_proj`. Settings are in `dflash_config`, embedding and head are the
target's, blocks are anchor-first (`shift_label`), and a confidence head always reads the Markov embedding.
"""

from typing import Any

from ..configuration_dspark import DSparkConfig
from .detect import Reader
from .flat import Tensors, qwen3_config, renamed
from .settings import setting

BARE_HEADS = {
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "gate_proj": "markov_head.gate_proj",
    "joint_proj": "markov_head.joint_proj",
    "confidence_proj": "confidence_head.proj",
}


def _matches(config: dict[str, Any], tensors: Tensors) -> bool:
    return "markov_w1.weight" in tensors and bool(config.get("dflash_config"))


def _resolve(
    config: dict[str, Any], tensors: Tensors, sample_from_anchor: bool | None
) -> tuple[DSparkConfig, list[str]]:
    return qwen3_config(
        config,
        renamed(tensors, _rename(tensors)),
        "ModelOpt",
        anchor_first=sample_from_anchor,
        default_layout=(True, "the Markov head"),
        depth=setting(config, "num_target_layers"),
    )


def _rename(tensors: Tensors) -> dict[str, str]:
    def ours(name: str) -> str:
        module, _, parameter = name.rpartition(".")
        return f"{BARE_HEADS[module]}.{parameter}" if module in BARE_HEADS else name

    return {ours(name): name for name in tensors}


READER = Reader("modelopt", _matches, _resolve, _rename)

__all__ = ["READER"]
