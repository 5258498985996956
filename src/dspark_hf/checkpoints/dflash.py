"""Reader for z-lab's DFlash drafts (`z-lab/*-DFlash*`), and for what SpecForge and ModelOpt export in that layout.

Settings are in `dflash_config`; embedding and head are the target's. Blocks are 1+N: slot k predicts its own position,
slot 0 holds the anchor and drafts nothing, so a block of 16 drafts 15 tokens. Where the configuration leaves the block
size or the taps out, the defaults of the reference implementation hold.
"""

from typing import Any

from ..configuration_dspark import DSparkConfig
from .detect import Reader
from .flat import Tensors, qwen3_config
from .settings import evenly_spread_taps, require_keys, setting

REFERENCE_BLOCK = 16


def _matches(config: dict[str, Any], tensors: Tensors) -> bool:
    dspark = setting(config, "projector_type") == "dspark" or any(
        "DSpark" in a for a in config.get("architectures") or []
    )
    heads = any(name.startswith("markov_") for name in tensors)
    return "fc.weight" in tensors and bool(config.get("dflash_config")) and not heads and not dspark


def _resolve(
    config: dict[str, Any], tensors: Tensors, sample_from_anchor: bool | None
) -> tuple[DSparkConfig, list[str]]:
    notes, known = [], {}
    if setting(config, "block_size") is None:
        known["block_size"] = REFERENCE_BLOCK
        notes.append(f"block size {REFERENCE_BLOCK}, the reference implementation's: the configuration has none")
    depth = setting(config, "num_target_layers")
    if setting(config, "target_layer_ids") is None:
        require_keys({"num_target_layers": depth}, ("num_target_layers",), "DFlash")
        taps = tensors["fc.weight"].shape[1] // config["hidden_size"]
        known["target_layer_ids"] = evenly_spread_taps(depth, taps)
        notes.append(f"taps {known['target_layer_ids']}, spread as in the first release: the configuration has none")
    return qwen3_config(
        config,
        tensors,
        "DFlash",
        anchor_first=sample_from_anchor,
        default_layout=(False, "the DFlash packaging"),
        depth=depth,
        notes=tuple(notes),
        embedding_scale=setting(config, "input_embedding_scale"),
        final_logit_softcapping=setting(config, "final_logit_softcapping") or None,
        **known,
    )


def _rename(tensors: Tensors) -> dict[str, str]:
    return {name: name for name in tensors}


READER = Reader("dflash", _matches, _resolve, _rename)

__all__ = ["READER"]
