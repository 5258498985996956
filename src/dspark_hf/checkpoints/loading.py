"""From an opened checkpoint to a draft's weights.

Exactly the tensors a draft expects are read, each once: memory-mapped, so that a tensor that keeps its dtype and stays
on the CPU is backed by the file itself. Anything missing, superfluous, misshapen or of a strange dtype is an error
that lists it all.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from .detect import Reader
from .files import CheckpointFiles

if TYPE_CHECKING:
    from ..modeling_dspark import DSparkDraftModel

FLOATS = ("F32", "BF16", "F16")
INTEGERS = ("I64", "I32")
AUTO_KWARGS = frozenset(
    "_from_auto adapter_kwargs trust_remote_code proxies use_safetensors low_cpu_mem_usage torch_dtype".split()
)


def tensor_problems(
    files: CheckpointFiles, names: Mapping[str, str], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, list[str]]:
    """What keeps a checkpoint's tensors from being a draft's, by kind; empty when nothing does.

    Args:
        files (`CheckpointFiles`): the opened checkpoint.
        names (`dict[str, str]`): the draft's tensor name to the checkpoint's.
        expected (`dict[str, tuple]`): the draft's tensor names and shapes.
    """
    found = {name: files.tensors[names[name]] for name in expected if name in names}

    def stored(name: str) -> str:
        return files.tensors[names[name]].stored_name or names[name]

    problems = {
        "missing tensors": sorted(set(expected) - set(names)),
        "unexpected tensors": sorted(stored(name) for name in set(names) - set(expected)),
        "wrong shapes": [
            f"{stored(name)} is {list(info.shape)}, expected {list(expected[name])}"
            for name, info in sorted(found.items())
            if info.shape != expected[name]
        ],
        "wrong dtypes": [
            f"{stored(name)} is {info.dtype}, expected {' or '.join(allowed)}"
            for name, info in sorted(found.items())
            if info.dtype not in (allowed := INTEGERS if name == "d2t" else FLOATS)
        ],
    }
    return {kind: which for kind, which in problems.items() if which}


def load_draft_weights(
    files: CheckpointFiles,
    names: Mapping[str, str],
    expected: Mapping[str, tuple[int, ...]],
    dtype: str | torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Reads exactly the tensors a draft expects.

    Args:
        files, names, expected: as in `tensor_problems`.
        dtype (`str` or `torch.dtype`): of floating-point tensors; `"auto"` for that of the stored `fc.weight`.
        device (`torch.device`): where they go.

    Returns:
        A state dict with the draft's names.

    Raises:
        ValueError: listing every missing, unexpected and misshapen tensor at once.
    """
    problems = tensor_problems(files, names, expected)
    if problems:
        listing = "; ".join(f"{what}: {', '.join(which)}" for what, which in problems.items())
        raise ValueError(f"The weights of {files.location!r} do not fit its configuration: {listing}.")
    dtype = resolve_dtype(dtype)
    state: dict[str, torch.Tensor] = {}
    by_file: dict[str, list[str]] = {}
    for name in sorted(expected, key=lambda name: name != "fc.weight"):  # fc first: it decides "auto"
        by_file.setdefault(files.tensors[names[name]].file, []).append(name)
    for file, wanted in by_file.items():
        with safe_open(file, framework="pt") as reader:
            for name in wanted:
                info = files.tensors[names[name]]
                tensor = reader.get_tensor(info.stored_name or names[name])
                if not tensor.is_floating_point():
                    state[name] = tensor.to(device=device, dtype=torch.long)
                    continue
                if dtype == "auto":
                    dtype = tensor.dtype
                state[name] = tensor.to(device=device, dtype=dtype)
    return state


def fill_draft(
    draft: "DSparkDraftModel", files: CheckpointFiles, reader: Reader, dtype: str | torch.dtype, device: torch.device
) -> None:
    """Gives a draft made on the meta device its weights and, from our own saves, its generation settings.

    Raises:
        ValueError: as `load_draft_weights` and `check_vocabulary_map`.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
    state = load_draft_weights(files, reader.rename(files.tensors), expected, dtype, device)
    draft.load_state_dict(state, strict=True, assign=True)
    for copied in (draft.embed_tokens, draft.lm_head):
        if copied is not None:
            copied.requires_grad_(False)  # frozen in training; makes them shareable with the target
    draft.config.dtype = draft.dtype
    if draft.d2t is not None:
        check_vocabulary_map(draft.draft_to_target, draft.config.vocab_size)
    if files.generation_config is not None and reader.name == "native":
        draft.generation_config = type(draft.generation_config).from_dict(files.generation_config)
    draft.name_or_path = draft.config.name_or_path = files.location


def resolve_dtype(dtype: str | torch.dtype | None) -> str | torch.dtype:
    """`"auto"`, or a floating-point `torch.dtype` from its name.

    Raises:
        ValueError: for a name that is none.
    """
    if dtype is None or dtype == "auto":
        return "auto"
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise ValueError(f"`dtype` must be 'auto' or a floating-point dtype such as 'bfloat16', got {dtype!r}.")
    return named


def single_device(device_map: str | int | torch.device | dict | None) -> torch.device:
    """The one device a `device_map` names: CPU for `None`, the accelerator (if any) for `"auto"`.

    Raises:
        ValueError: for a map that splits the model, or names no place that can compute.
    """
    if isinstance(device_map, dict):
        if set(device_map) != {""}:
            raise ValueError("`device_map`: a draft lives on one device; pass a device, or {'': device}.")
        device_map = device_map[""]
    if device_map is None:
        return torch.device("cpu")
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    if device_map in ("disk", "meta"):
        raise ValueError(
            f"`device_map` {device_map!r}: a draft runs every round and cannot be offloaded; pass a device."
        )
    return torch.device(device_map)


def check_auto_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Lets through what Transformers' Auto classes add on their own, and what changes nothing here (weights are always
    loaded with little memory); anything else is a mistake of the caller.

    Raises:
        TypeError: for an unknown argument.
        ValueError: when asked not to use safetensors.
    """
    unknown = sorted(set(kwargs) - AUTO_KWARGS)
    if unknown:
        raise TypeError(f"`DSparkDraftModel.from_pretrained` got unexpected arguments: {', '.join(unknown)}.")
    if kwargs.get("use_safetensors") is False:
        raise ValueError("`use_safetensors=False`: drafts are loaded from safetensors only.")


def check_vocabulary_map(target_ids: torch.Tensor, vocab_size: int) -> None:
    """Checks the target ids [V_draft] of a reduced vocabulary.

    Raises:
        ValueError: when they leave the vocabulary or repeat, as absolute ids read as offsets would.
    """
    inside = bool((target_ids >= 0).all()) and bool((target_ids < vocab_size).all())
    if not inside or target_ids.unique().numel() != target_ids.numel():
        raise ValueError(
            "`d2t` must hold offsets (target id minus draft id) that lead to distinct tokens of the target's "
            f"vocabulary of {vocab_size}."
        )


__all__ = [
    "check_auto_kwargs",
    "check_vocabulary_map",
    "fill_draft",
    "load_draft_weights",
    "resolve_dtype",
    "single_device",
    "tensor_problems",
]
