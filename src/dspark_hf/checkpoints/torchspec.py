"""Reader for TorchSpec's own exports, DFlash (`model_type` "dflash") and DSpark ("qwen3_dspark").

Settings are at top level under DeepSpec's names, with one trap: `num_target_layers` is the *number of taps*, and the
target's depth is `target_num_hidden_layers`. The context projection, its norm and the final norm have names of their
own. The embedding may be stored (a copy of the target's), the head never is. The block size is a training argument and
not in the file; without it loading fails and says how to pass it.
"""

from typing import Any

from ..configuration_dspark import DSparkConfig
from .detect import Reader
from .flat import Tensors, qwen3_config, renamed
from .settings import evenly_spread_taps, require_keys

MODEL_TYPES = ("dflash", "qwen3_dspark")
MODULES = {"context_proj": "fc", "context_norm": "hidden_norm", "final_norm": "norm"}


def _matches(config: dict[str, Any], tensors: Tensors) -> bool:
    own_names = "context_proj.weight" in tensors
    return own_names or (config.get("model_type") in MODEL_TYPES and "target_num_hidden_layers" in config)


def _resolve(
    config: dict[str, Any], tensors: Tensors, sample_from_anchor: bool | None
) -> tuple[DSparkConfig, list[str]]:
    tensors = renamed(tensors, _rename(tensors))
    require_keys(config, ("target_num_hidden_layers",), "TorchSpec")
    depth, known = config["target_num_hidden_layers"], {}
    notes = [f"`num_target_layers` {config.get('num_target_layers')} is the number of taps; the target has {depth}"]
    if config.get("target_layer_ids") is None:
        require_keys(config, ("num_target_layers",), "TorchSpec")
        known["target_layer_ids"] = evenly_spread_taps(depth, config["num_target_layers"])
        notes.append(f"taps {known['target_layer_ids']}, spread as TorchSpec does: the configuration has none")
    dspark = any(name.startswith("markov_head.") for name in tensors)
    return qwen3_config(
        config,
        tensors,
        "TorchSpec",
        anchor_first=sample_from_anchor,
        default_layout=(True, "the Markov head") if dspark else (False, "the DFlash packaging"),
        depth=depth,
        notes=tuple(notes),
        **known,
    )


def _rename(tensors: Tensors) -> dict[str, str]:
    def ours(name: str) -> str:
        module, _, parameter = name.rpartition(".")
        return f"{MODULES.get(module, module)}.{parameter}" if module else name

    return {ours(name): name for name in tensors}


READER = Reader("torchspec", _matches, _resolve, _rename)

__all__ = ["READER"]
