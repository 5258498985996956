"""What a checkpoint is, before any of its weights is read: shapes, layout, what it fits, who would serve it.

`inspect_checkpoint` never raises for a checkpoint that cannot be loaded: the reason is its answer.
"""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import torch
from transformers import AutoConfig

from ..configuration_dspark import DSparkConfig
from ..sharing import target_problem
from .detect import detect_reader
from .engines import Verdict, verdicts
from .files import CheckpointFiles, open_checkpoint
from .loading import tensor_problems
from .refusals import quantisation

BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "BOOL": 1, "I8": 1, "U8": 1}

# Public models by hidden size, layers and vocabulary, to name what a draft fits when its file does not.
KNOWN_TARGETS = {
    "google/gemma-4-12B-it": (3840, 48, 262144),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (576, 30, 49152),
    "LiquidAI/LFM2.5-1.2B-Instruct": (2048, 16, 65536),
    "LiquidAI/LFM2.5-2.6B": (2048, 30, 128000),
    "LiquidAI/LFM2.5-8B-A1B": (2048, 24, 128000),
    "openbmb/MiniCPM5-2B": (2048, 42, 130560),
    "Qwen/Qwen2.5-0.5B-Instruct": (896, 24, 151936),
    "Qwen/Qwen2.5-7B-Instruct": (3584, 28, 152064),
    "Qwen/Qwen3-0.6B": (1024, 28, 151936),
    "Qwen/Qwen3-4B": (2560, 36, 151936),
    "Qwen/Qwen3-8B": (4096, 36, 151936),
    "Qwen/Qwen3-14B": (5120, 40, 151936),
    "Qwen/Qwen3.5-4B": (2560, 32, 248320),
    "Qwen/Qwen3.6-27B": (5120, 64, 248320),
    "Qwen/Qwen3.6-35B-A3B": (2048, 40, 248320),
    "zai-org/GLM-5.2": (6144, 78, 154880),
}


@dataclass
class Inspection:
    """What was found; `to_dict` is what the command prints as JSON.

    Attributes:
        location (`str`): what was asked for.
        revision (`str`, *optional*): commit, for a Hub repository.
        packaging (`str`, *optional*): `None` when it was not recognised.
        problem (`str`, *optional*): why it cannot be loaded; `None` if it can.
        draft (`dict`): facts about the draft: shapes, layout, heads, taps, vocabulary, storage.
        parameters (`int`): number of stored parameters.
        bytes (`int`): size of the stored tensors.
        targets (`dict`): what it needs of a target, which it names, and how a given one fits.
        engines (`dict[str, Verdict]`): whether vLLM and SGLang would serve it as it is.
        assumed (`list[str]`): what the file does not say and how it was taken.
    """

    location: str
    revision: str | None = None
    packaging: str | None = None
    problem: str | None = None
    draft: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0
    bytes: int = 0
    targets: dict[str, Any] = field(default_factory=dict)
    engines: dict[str, Verdict] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        data = asdict(self)
        for engine, verdict in self.engines.items():
            data["engines"][engine]["serves"] = verdict.serves
        return data


def inspect_checkpoint(
    folder_or_repo: str | os.PathLike,
    *,
    target: str | None = None,
    sample_from_anchor: bool | None = None,
    token: str | bool | None = None,
    **options: Any,
) -> Inspection:
    """Looks at a folder or repository without reading weights; of a repository only headers are fetched.

    Args:
        folder_or_repo (`str` or `os.PathLike`): folder or Hub repository.
        target (`str`, *optional*): folder or repository of a target to compare with, by its configuration.
        sample_from_anchor (`bool`, *optional*): overrides the block layout.
        token (`str` or `bool`, *optional*): for both repositories.
        options: further ones of `open_checkpoint`.
    """
    found = Inspection(location=os.fspath(folder_or_repo))
    try:
        files = open_checkpoint(folder_or_repo, token=token, headers_only=True, **options)
        found.revision = files.revision
        _count(found, files)
        reader = detect_reader(files)
        found.packaging = reader.name
        config, found.assumed = reader.resolve(files.config, files.tensors, sample_from_anchor)
    except ValueError as error:
        found.problem = str(error)
        return found
    found.draft = describe(config, files)
    found.targets = _targets(config, files.config, target, token)
    found.engines = verdicts(files, reader, config)
    if quantisation(files.config):
        found.assumed.append(f"the declared quantisation ({quantisation(files.config)}) is the target's")
    if files.config.get("auto_map"):
        found.assumed.append("code in the repository (`auto_map`) is not run")
    problems = tensor_problems(files, reader.rename(files.tensors), expected_shapes(config))
    if problems:
        listing = "; ".join(f"{what}: {', '.join(which)}" for what, which in problems.items())
        found.problem = f"The weights do not fit the configuration: {listing}."
    return found


def expected_shapes(config: DSparkConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a draft with this configuration."""
    from ..modeling_dspark import DSparkDraftModel  # that module imports this package

    with torch.device("meta"):
        draft = DSparkDraftModel(config)
    return {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}


def _count(found: Inspection, files: CheckpointFiles) -> None:
    sizes = {name: prod(info.shape) for name, info in files.tensors.items()}
    found.parameters = sum(size for name, size in sizes.items() if name not in ("d2t", "t2d"))
    found.bytes = sum(size * BYTES.get(files.tensors[name].dtype, 1) for name, size in sizes.items())


def describe(config: DSparkConfig, files: CheckpointFiles) -> dict[str, Any]:
    """Facts about a draft."""
    window = None
    if "sliding_attention" in config.layer_types:
        inside = "bidirectional" if config.sliding_window_non_causal else "causal"
        start = "each slot" if config.sliding_window_per_slot else "the anchor"
        window = f"{config.sliding_window} tokens back from {start}, {inside} in the block"
    return {
        "layout": "anchor-first" if config.sample_from_anchor else "1+N",
        "block_size": config.block_size,
        "drafted_tokens": config.num_draft_tokens,
        "backbone": config.backbone,
        "layers": config.num_hidden_layers,
        "layer_types": dict(Counter(config.layer_types)),
        "sliding_window": window,
        "hidden_size": config.hidden_size,
        "attention_heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rotary": {**config.rope_parameters, "interleaved": config.rope_interleaved},
        "markov": None if not config.markov_rank else f"{config.markov_head_type}, rank {config.markov_rank}",
        "confidence": config.enable_confidence_head,
        "confidence_reads_markov": config.enable_confidence_head and config.confidence_head_with_markov,
        "calibrated": config.confidence_calibration is not None,
        "target_layer_ids": config.target_layer_ids,
        "mask_token_id": config.mask_token_id,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "stores_embedding": config.stores_embedding,
        "stores_head": config.stores_head,
        "dtypes": dict(Counter(info.dtype for info in files.tensors.values())),
    }


def named_targets(raw: Mapping[str, Any]) -> list[str]:
    """Targets a configuration names."""
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    names = (verifier.get("name_or_path"), raw.get("target_model_name_or_path"))
    return [name for name in names if name]


def _targets(
    config: DSparkConfig, raw: Mapping[str, Any], target: str | None, token: str | bool | None
) -> dict[str, Any]:
    shape = (config.target_hidden_size, config.num_target_layers, config.vocab_size)
    known = [
        name
        for name, (hidden, layers, vocabulary) in KNOWN_TARGETS.items()
        if (hidden, vocabulary) == (shape[0], shape[2])
        and (layers == shape[1] or (shape[1] is None and layers > config.target_layer_ids[-1]))
    ]
    result: dict[str, Any] = {
        "hidden_size": shape[0],
        "layers": shape[1],
        "layers_at_least": config.target_layer_ids[-1] + 1,
        "vocab_size": shape[2],
        "borrows": [
            part for part, own in (("embedding", config.stores_embedding), ("head", config.stores_head)) if not own
        ],
        "named": named_targets(raw),
        "known_to_fit": known,
    }
    if target is not None:
        target_config = AutoConfig.from_pretrained(target, token=token)
        problem = target_problem(config, target_config)
        result["given"] = {"name": target, "fits": problem is None, "problem": problem}
    return result


__all__ = ["Inspection", "describe", "expected_shapes", "inspect_checkpoint", "named_targets"]
