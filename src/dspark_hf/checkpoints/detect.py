"""Which packaging a checkpoint is in.

Several exporters write DSpark-like drafts, and their architecture strings overlap: `DSparkDraftModel`,
`Qwen3DSparkModel` and `DFlashDraftModel` each label at least two formats. So detection goes by configuration keys and
tensor names. What is recognised but not read is refused by name, and what is not recognised is refused too: a draft
loaded under wrong assumptions does not fail, it only never gets a token accepted.

A packaging is one module with a `READER`; to add one, write the module and put its reader into `READERS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..configuration_dspark import DSparkConfig
from .files import CheckpointFiles, TensorInfo

Tensors = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Reader:
    """One packaging, as pure functions of its configuration and tensor headers.

    Attributes:
        name (`str`): how messages call the packaging.
        matches (callable): `matches(config, tensors) -> bool`.
        read_config (callable): `read_config(config, tensors, sample_from_anchor) -> DSparkConfig`, where
            `sample_from_anchor` is the user's override or `None`.
        rename (callable): `rename(tensors) -> {draft tensor name: checkpoint tensor name}`; tensors left out of it
            carry nothing the draft needs.
    """

    name: str
    matches: Callable[[dict[str, Any], Tensors], bool]
    read_config: Callable[[dict[str, Any], Tensors, bool | None], DSparkConfig]
    rename: Callable[[Tensors], dict[str, str]]


# Keys that change the computation in a way the draft's layers do not have, with the only value that does not.
NEUTRAL = {
    "is_causal": False,
    "dflash_query_causal": False,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "attention_sink_bias": False,
    "use_attention_sinks": False,
    "logit_scale": 1.0,
    "output_multiplier": 1.0,
    "attention_value_scale": 1.0,
}


def detect_reader(files: CheckpointFiles) -> Reader:
    """The reader for an opened checkpoint.

    Raises:
        ValueError: for a packaging that is recognised but not supported, and for one that is not recognised.
    """
    from . import deepspec, native, speculators

    config, tensors = files.config, files.tensors
    if native.READER.matches(config, tensors):
        return native.READER
    reason = _refusal(config, tensors)
    if reason is not None:
        raise ValueError(f"{files.location!r} {reason}")
    for reader in (speculators.READER, deepspec.READER):
        if reader.matches(config, tensors):
            return reader
    raise ValueError(
        f"{files.location!r} is in no packaging this package knows (model_type {config.get('model_type')!r}, "
        f"architectures {config.get('architectures')}). It reads its own saves, DeepSpec and speculators checkpoints."
    )


def read_config(files: CheckpointFiles, *, sample_from_anchor: bool | None = None) -> tuple[DSparkConfig, Reader]:
    """Configuration of an opened checkpoint, and the reader that made it.

    Raises:
        ValueError: as `detect_reader`, and for keys that are missing or contradictory.
    """
    reader = detect_reader(files)
    return reader.read_config(files.config, files.tensors, sample_from_anchor), reader


def _refusal(config: dict[str, Any], tensors: Tensors) -> str | None:
    """Why a recognised packaging is not read, or `None`."""
    architectures = " ".join(config.get("architectures") or [])
    speculator = config.get("speculators_model_type")
    if speculator is not None and speculator not in ("dspark", "dflash"):
        return f"is a speculators {speculator!r} draft, not a DSpark one."
    if "Eagle3" in architectures or "ttt_length" in config or _any_name(tensors, "midlayer."):
        return "is an Eagle-3 draft, not a DSpark one."
    if "dspark_block_size" in config:
        return "embeds its DSpark draft in a DeepSeek-V4 target, which is not supported."
    if _any_name(tensors, "candidate_selector."):
        return "is a DFlash2 draft, which is not supported."
    if _any_name(tensors, "prefix_gru."):
        return "is a Domino draft, which is not supported."
    if any(part in name for name in tensors for part in ("context_proj.", "kv_a_proj_with_mqa.", "wq_a.")):
        return "has latent-attention (MLA) draft layers, which are not supported."
    if config.get("quantization_config"):
        return "has quantised weights; only float32, bfloat16 and float16 drafts are read."
    if _any_name(tensors, "markov_w1.") or _any_name(tensors, "logit_head."):
        return "names its heads as ModelOpt or an early SpecForge does, which is not read yet."
    for key, neutral in NEUTRAL.items():
        if config.get(key, neutral) not in (neutral, None):
            return f"has `{key}` {config[key]!r}, which is not supported."
    if "dflash_config" in config and "target_layer_ids" not in config and speculator is None:
        return (
            "keeps its draft settings in `dflash_config` (SpecForge, ModelOpt or z-lab packaging), which is not read "
            "yet; convert it to the DeepSpec layout."
        )
    return None


def _any_name(tensors: Tensors, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in tensors)


def require_keys(config: Mapping[str, Any], keys: tuple[str, ...], packaging: str) -> None:
    """Raises `ValueError` naming all of `keys` that are absent from or null in `config`."""
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise ValueError(f"The {packaging} config.json lacks {', '.join(f'`{key}`' for key in missing)}.")


def has_layer_tensor(tensors: Tensors, name: str) -> bool:
    """Whether draft layer 0 has tensor `name`; all layers are alike, so this decides optional parts."""
    return f"layers.0.{name}" in tensors


def tap_width(tensors: Tensors, taps: list[int], hidden_size: int) -> int:
    """Width of one tapped state, from the input width of `fc` (all taps concatenated)."""
    info = tensors.get("fc.weight")
    if info is None or len(info.shape) != 2:
        return hidden_size  # reported as a missing or misshapen tensor when the weights are checked
    width, rest = divmod(info.shape[1], max(len(taps), 1))
    if rest or width == 0:
        raise ValueError(
            f"`fc.weight` {list(info.shape)} does not divide into the {len(taps)} taps {taps}: the list of tapped "
            "layers is wrong."
        )
    return width


__all__ = ["Reader", "detect_reader", "has_layer_tensor", "read_config", "require_keys", "tap_width"]
