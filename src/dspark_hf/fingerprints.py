"""What a measured cost table depends on: the name of a `ThroughputProfile` on disk.

Seconds per step are worth nothing on another machine, with another thread count or another attention implementation,
and nobody notices when they are used there. So a profile is filed under the hash of all of it: a change of any part
finds no file and measures anew.
"""

import hashlib
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from huggingface_hub import constants


def fingerprint_fields(target: torch.nn.Module, draft: torch.nn.Module | None = None) -> dict:
    """Everything the measured numbers depend on: model sizes, dtype, attention, device, threads and versions.

    Args:
        target, draft (`torch.nn.Module`): Transformers models; only their class, config and parameters are looked at.

    Returns:
        `dict` of plain values, see `fingerprint`.
    """
    weight = next(target.parameters())
    fields = {
        "target": type(target).__name__,
        "target_sizes": _sizes(target),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "attention": getattr(target.config, "_attn_implementation", None),
        "device": device_name(weight.device),
        "threads": torch.get_num_threads() if weight.device.type == "cpu" else None,
        "versions": {name: _version(name) for name in ("torch", "transformers")},
    }
    if draft is not None:
        fields["draft"] = type(draft).__name__
        fields["draft_sizes"] = _sizes(draft)
        fields["draft_dtype"] = str(next(draft.parameters()).dtype).removeprefix("torch.")
    return fields


def fingerprint(fields: dict) -> str:
    """Hash of the fields, 32 hexadecimal digits, the same in every process and whatever their order."""
    return hashlib.sha256(canonical(fields).encode()).hexdigest()[:32]


def profile_path(fields: dict, folder: str | os.PathLike | None = None) -> Path:
    """Where the profile of `fields` lives, by default under the Hugging Face home."""
    root = Path(folder) if folder is not None else Path(constants.HF_HOME) / "dspark_hf" / "profiles"
    return root / f"{fingerprint(fields)}.json"


def device_name(device: torch.device | str) -> str:
    """Name of the hardware behind a torch device."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        models = []
    # platform.processor() is empty or generic on Linux, which would share profiles between machines.
    return models[0] if models else platform.processor() or platform.machine()


def _sizes(model: torch.nn.Module) -> dict:
    config = model.config
    # Composite configs (vision and text) keep the decoder's sizes one level down.
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size"
        " sliding_window num_local_experts num_experts num_experts_per_tok draft_vocab_size block_size markov_rank"
        " markov_head_type"
    ).split()
    # Not by attribute: configs with sizes that differ by layer refuse to name one.
    values = text.to_dict() if hasattr(text, "to_dict") else vars(text)
    sizes = {name: value for name in names if (value := values.get(name)) is not None}
    sizes["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return sizes


def canonical(fields: dict) -> str:
    """The fields as JSON, the same whatever their order."""
    return json.dumps(fields, sort_keys=True, default=str)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
