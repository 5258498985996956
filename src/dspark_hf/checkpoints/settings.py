"""The draft's own settings, wherever a packaging keeps them.

DeepSpec writes them at the top of `config.json`, the DFlash family into a nested `dflash_config`, and files made for
several engines into both. Spellings differ too. Everything here is a function of the configuration: what it says, by
which key, and what has to be assumed where it says nothing.
"""

from collections.abc import Mapping
from typing import Any

NESTED = ("dflash_config", "dspark_config")
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "ptd_token_id", "pard_token")
# Multi-axis rotary of a vision-language target, copied along: a draft's positions have one axis, where it is the same.
TARGET_ROPE_KEYS = ("mrope_section", "mrope_interleaved", "partial_rotary_factor", "rope_dim")


def setting(config: Mapping[str, Any], *names: str) -> Any:
    """The value of a setting under any of its names, nested or at the top; `None` when it is not there.

    Raises:
        ValueError: when two places give different values.
    """
    found: dict[str, Any] = {}
    for place in (*NESTED, None):
        source = config if place is None else (config.get(place) or {})
        for name in names:
            if source.get(name) is not None:
                found[name if place is None else f"{place}.{name}"] = source[name]
    values = list(found.values())
    if any(value != values[0] for value in values[1:]):
        listing = ", ".join(f"`{key}` {value!r}" for key, value in found.items())
        raise ValueError(f"The config.json contradicts itself: {listing}.")
    return values[0] if values else None


def required(config: Mapping[str, Any], packaging: str, **names: tuple[str, ...]) -> dict[str, Any]:
    """Several settings at once, by the name to return and the names to look under.

    Raises:
        ValueError: naming all that are missing.
    """
    values = {key: setting(config, *keys) for key, keys in names.items()}
    require_keys(values, tuple(values), packaging)
    return values


def require_keys(config: Mapping[str, Any], keys: tuple[str, ...], packaging: str) -> None:
    """Raises `ValueError` naming all of `keys` that are absent from or null in `config`."""
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise ValueError(
            f"The {packaging} config.json lacks {', '.join(f'`{key}`' for key in missing)}. If you know the value, "
            f"pass `config_overrides={{{missing[0]!r}: ...}}` to `from_pretrained`."
        )


def declared_layout(config: Mapping[str, Any]) -> tuple[bool, str] | None:
    """Whether the anchor slot drafts, and by which key, if the configuration says so."""
    anchor = setting(config, "sample_from_anchor")
    if anchor is not None:
        return bool(anchor), "`sample_from_anchor`"
    bonus = setting(config, "dspark_bonus_anchor")
    if bonus is not None:
        return not bonus, "`dspark_bonus_anchor`"
    shifted = setting(config, "shift_label")
    if shifted is not None:
        return bool(shifted), "`shift_label`"
    return None


def rope_fields(config: Mapping[str, Any], packaging: str) -> tuple[dict[str, Any], list[str]]:
    """`rope_parameters`, `rope_interleaved` and `max_position_embeddings`, from either of Transformers' two schemas.

    Raises:
        ValueError: when the configuration says nothing about the rotary embedding.
    """
    notes: list[str] = []
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if not rope.get("rope_theta"):
        require_keys(config, ("rope_theta",), packaging)
        rope["rope_theta"] = config["rope_theta"]
    elif config.get("rope_theta") not in (None, rope["rope_theta"]):
        notes.append(f"rotary base {rope['rope_theta']} of `rope_parameters`, not `rope_theta` {config['rope_theta']}")
    rope_type = rope.pop("type", None) or "default"
    rope["rope_type"] = rope.get("rope_type") or ("default" if rope_type == "mrope" else rope_type)
    rope = {key: value for key, value in rope.items() if value is not None}
    if rope.get("rope_dim") not in (None, config.get("head_dim")):
        raise ValueError(f"This draft rotates {rope['rope_dim']} dimensions of a head, which is not supported.")
    # "proportional" is defined by its factor; every other kind turns the whole head in these drafts.
    kept = ("partial_rotary_factor",) if rope["rope_type"] == "proportional" else ()
    ignored = [key for key in TARGET_ROPE_KEYS if key not in kept and rope.pop(key, None) not in (None, 1.0)]
    ignored = [key for key in ignored if key != "rope_dim"]
    if config.get("partial_rotary_factor") not in (None, 1.0):
        ignored.append("partial_rotary_factor")
    if ignored:
        notes.append(f"rotary embedding over the whole head: {', '.join(sorted(set(ignored)))} is the target's")
    flags = [config.get(key) for key in ("rope_is_neox_style", "is_neox_style") if config.get(key) is not None]
    if len(set(flags)) > 1:
        raise ValueError("The config.json contradicts itself: `rope_is_neox_style` and `is_neox_style` differ.")
    fields = dict(
        rope_parameters=rope,
        rope_interleaved=bool(flags) and not flags[0],
        max_position_embeddings=config.get("max_position_embeddings", 40960),
    )
    return fields, notes


def attention_fields(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Layer types and window, with the rule of the DFlash family: sliding layers are causal unless told otherwise."""
    nested = config.get("dflash_config") or {}
    types = list(config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"])
    if nested.get("use_swa") and "sliding_attention" not in types:
        types = ["sliding_attention"] * len(types)
    if "sliding_attention" not in types:
        return dict(layer_types=types), []
    window = nested.get("swa_window_size") or config.get("sliding_window")
    causal = config.get("is_causal")
    causal = nested.get("causal") if causal is None else causal
    notes = []
    if causal is None:
        notes.append("sliding layers are causal inside the block: no `is_causal` says otherwise")
    fields = dict(
        layer_types=types,
        sliding_window=window,
        sliding_window_per_slot=True,
        sliding_window_non_causal=causal is False,
    )
    return fields, notes


def evenly_spread_taps(target_layers: int, taps: int) -> list[int]:
    """The DFlash family's default taps: from layer 1 to the fourth from the end."""
    if taps == 1:
        return [target_layers // 2]
    return [round(1 + step * (target_layers - 4) / (taps - 1)) for step in range(taps)]


__all__ = [
    "MASK_KEYS",
    "TARGET_ROPE_KEYS",
    "attention_fields",
    "declared_layout",
    "evenly_spread_taps",
    "require_keys",
    "required",
    "rope_fields",
    "setting",
]
