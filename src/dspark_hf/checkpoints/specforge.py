"""Reader for SpecForge's DSpark exports, and for LFM2 drafts, which are packaged alike.

Settings are in `dflash_config`, some repeated at top level; embedding and head are the target's. Early runs wrapped
the heads in a `logit_head`. LFM2 drafts turn neighbouring pairs in their rotary embedding (`rope_is_neox_style`
false).

Blocks are anchor-first: all slots are trained on the token after theirs, and vLLM and SGLang run them so. The bundled
generator of SpecForge leaves the first slot out, and some ports follow it; `sample_from_anchor=False` reads them so.
"""

from typing import Any

from ..configuration_dspark import DSparkConfig
from .detect import Reader
from .flat import Tensors, qwen3_config, renamed
from .settings import setting

OLD_HEADS = "logit_head."


def _matches(config: dict[str, Any], tensors: Tensors) -> bool:
    if any(name.startswith(OLD_HEADS) for name in tensors):
        return True
    # With the settings at top level as well, the file is in the DeepSpec layout.
    nested = bool(config.get("dflash_config")) and "target_layer_ids" not in config
    return nested and any(name.startswith("markov_head.") for name in tensors)


def _resolve(
    config: dict[str, Any], tensors: Tensors, sample_from_anchor: bool | None
) -> tuple[DSparkConfig, list[str]]:
    return qwen3_config(
        config,
        renamed(tensors, _rename(tensors)),
        "SpecForge",
        anchor_first=sample_from_anchor,
        default_layout=(True, "SpecForge's training (its bundled generator would say 1+N)"),
        depth=setting(config, "num_target_layers"),
    )


def _rename(tensors: Tensors) -> dict[str, str]:
    return {name.removeprefix(OLD_HEADS): name for name in tensors}


READER = Reader("specforge", _matches, _resolve, _rename)

__all__ = ["READER"]
