"""The same weights in every packaging, written from the formats' description and without this package's writers.

Each function takes a draft in the official naming and returns `config.json` and tensors as that exporter writes them.
Small dimensions, true names.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.sharing import SharedWeights

HIDDEN, VOCAB, LAYERS, DEPTH, TAPS, MASK = 32, 60, 2, 6, [0, 2, 4], 59
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}

Tensors = dict[str, torch.Tensor]


def base_config(**changes) -> DSparkConfig:
    """A draft that every packaging of its layout can hold: embedding and head are those of the target."""
    fields = dict(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        vocab_size=VOCAB,
        block_size=5,
        mask_token_id=MASK,
        target_layer_ids=TAPS,
        num_target_layers=DEPTH,
        markov_rank=4,
    )
    return DSparkConfig(**{**fields, **changes})


def base_draft(seed: int = 0, **changes) -> DSparkDraftModel:
    """`base_config` with random weights, none of them at a value that would hide a mistake."""
    torch.manual_seed(seed)
    draft = DSparkDraftModel(base_config(**changes)).eval().requires_grad_(False)
    for name, parameter in draft.named_parameters():
        noise = torch.randn_like(parameter)
        parameter.data = 1.0 + 0.2 * noise if "norm" in name else 0.25 * noise
    return draft


def dflash_draft(seed: int = 0, **changes) -> DSparkDraftModel:
    """A DFlash draft: 1+N blocks, no heads."""
    fields = dict(sample_from_anchor=False, markov_rank=0, enable_confidence_head=False)
    return base_draft(seed, **{**fields, "confidence_head_with_markov": False, **changes})


def sliding_draft(seed: int = 0, **changes) -> DSparkDraftModel:
    """One layer with a window of 6, one without."""
    fields = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=6)
    return base_draft(seed, **{**fields, **changes})


def vocabulary(draft: DSparkDraftModel) -> SharedWeights:
    """Embedding and head of a target whose weights the draft copied."""
    head = nn.Linear(HIDDEN, VOCAB, bias=False)
    head.weight.data = draft.lm_head.weight.data
    return SharedWeights(embedding=draft.embed_tokens.weight, head=head)


def block(draft: DSparkDraftModel, shared: SharedWeights | None = None, context: int = 9):
    """Logits, tokens and confidences of two rows' blocks on a fixed context."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(2, context, len(draft.config.target_layer_ids) * HIDDEN, generator=generator)
    positions = torch.arange(context + draft.config.block_size).expand(2, -1)
    if draft.embed_tokens is not None and draft.lm_head is not None:
        shared = None
    elif draft.lm_head is not None:
        shared = SharedWeights(embedding=shared.embedding, head=draft.lm_head)
    elif draft.embed_tokens is not None:
        shared = SharedWeights(embedding=draft.embed_tokens.weight, head=shared.head)
    return draft.draft_block(states, torch.tensor([7, 11]), positions, shared=shared)


def checksum(draft: DSparkDraftModel) -> float:
    """Sum of all weights: tells copies apart across processes."""
    return sum(parameter.double().sum().item() for parameter in draft.parameters())


def write(folder: Path, config: dict, tensors: Tensors) -> Path:
    """Writes a checkpoint folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


# The exporters ----------------------------------------------------------------------------------------------


def _body(draft: DSparkDraftModel) -> Tensors:
    """Everything but the vocabulary weights."""
    return {name: t for name, t in draft.state_dict().items() if name not in ("embed_tokens.weight", "lm_head.weight")}


def _qwen3(draft: DSparkDraftModel) -> dict:
    """What every copy of a Qwen 3 configuration has; rotary parameters in the schema of Transformers 4."""
    config, rope = draft.config, dict(draft.config.rope_parameters)
    theta, scaling = rope.pop("rope_theta"), rope if rope["rope_type"] != "default" else None
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": False,
    }


def _heads(draft: DSparkDraftModel) -> dict:
    config = draft.config
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
    }


def deepspec(draft: DSparkDraftModel) -> tuple[dict, Tensors]:
    config = _qwen3(draft)
    rope = {"rope_theta": config.pop("rope_theta"), "rope_type": "default", **(config.pop("rope_scaling") or {})}
    config |= {
        "architectures": ["Qwen3DSparkModel"],
        "rope_parameters": rope,
        "block_size": draft.config.block_size,
        "mask_token_id": MASK,
        "target_layer_ids": TAPS,
        "num_target_layers": DEPTH,
        "num_anchors": 512,
        "enable_confidence_head": draft.config.enable_confidence_head,
        "markov_rank": draft.config.markov_rank,
    }
    if draft.config.markov_rank:
        config["markov_head_type"] = draft.config.markov_head_type
    if draft.config.enable_confidence_head:
        config["confidence_head_with_markov"] = draft.config.confidence_head_with_markov
    return config, dict(draft.state_dict())


def minicpm5(draft: DSparkDraftModel) -> tuple[dict, Tensors]:
    """DeepSpec's keys, no vocabulary weights, custom code, and nothing about the confidence head it has."""
    config, _ = deepspec(draft)
    dropped = ("architectures", "model_type", "enable_confidence_head", "confidence_head_with_markov", "layer_types")
    config = {key: value for key, value in config.items() if key not in dropped}
    config["rope_parameters"] = {"rope_theta": config["rope_parameters"]["rope_theta"]}
    return config | {"auto_map": {"AutoModel": "modeling_dspark.MiniCPM5DSparkModel"}}, _body(draft)


def specforge(draft: DSparkDraftModel) -> tuple[dict, Tensors]:
    nested = {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "mask_token_id": MASK,
        "target_layer_ids": TAPS,
        "confidence_head_alpha": 1.0,
        **_heads(draft),
    }
    config = _qwen3(draft) | {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "block_size": draft.config.block_size,
        "num_target_layers": DEPTH,
        "dflash_config": nested,
    }
    return config, _body(draft)


def specforge_early(draft: DSparkDraftModel) -> tuple[dict, Tensors]:
    config, tensors = specforge(draft)
    heads = ("markov_head.", "confidence_head.")
    return config, {f"logit_head.{n}" if n.startswith(heads) else n: tensor for n, tensor in tensors.items()}


def specforge_normalised(draft: DSparkDraftModel) -> tuple[dict, Tensors]:
    """What its export script makes: head fields at top level as well, the DeepSpec architecture, no custom code."""
    config, tensors = specforge(draft)
    del config["auto_map"]
    return config | _heads(draft) | {"architectures": ["Qwen3DSparkModel"]}, tensors


def prefixed(draft: DSparkDraftModel) -> tuple[dict, Tensors]:
    config, tensors = specforge(draft)
    return config, {f"model.{name}": tensor for name, tensor in tensors.items()}


def lfm2(draft: DSparkDraftModel) -> tuple[dict, Tensors]:
    """Interleaved rotary embedding: the rows of every query and key head are in pairs, not in halves."""
    config, tensors = specforge(draft)
    nested = config.pop("dflash_config")
    config |= _heads(draft) | {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False}
    keys = ("mask_token_id", "target_layer_ids")
    config["dflash_config"] = {key: nested[key] for key in keys} | {
        "num_target_layers": config.pop("num_target_layers")
    }
    size = draft.config.head_dim
    pairs = torch.arange(size).view(2, size // 2).T.reshape(-1)  # 0, D/2, 1, D/2 + 1, ...

    def interleave(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return tensor[pairs]
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            return tensor.view(-1, size, tensor.shape[-1])[:, pairs].reshape(tensor.shape)
        return tensor

    del config["auto_map"]
    return config, {name: interleave(name, tensor) for name, tensor in tensors.items()}


def modelopt(draft: DSparkDraftModel) -> tuple[dict, Tensors]:
    nested = {
        "mask_token_id": MASK,
        "target_layer_ids": TAPS,
        "causal": False,
        "projector_type": "dspark",
        "shift_label": True,
        "markov_rank": draft.config.markov_rank,
        "markov_head_type": draft.config.markov_head_type,
        "use_confidence_head": draft.config.enable_confidence_head,
    }
    config = _qwen3(draft) | {
        "architectures": ["DFlashDraftModel"],
        "torch_dtype": "float32",
        "block_size": draft.config.block_size,
        "num_target_layers": DEPTH,
        "dflash_config": nested,
    }
    bare = {
        name.replace("confidence_head.proj", "confidence_proj").removeprefix("markov_head."): tensor
        for name, tensor in _body(draft).items()
    }
    return config, bare


def _torchspec_names(tensors: Tensors) -> Tensors:
    modules = {"fc.weight": "context_proj.weight", "hidden_norm.weight": "context_norm.weight"}
    modules["norm.weight"] = "final_norm.weight"
    return {modules.get(name, name): tensor for name, tensor in tensors.items()}


def torchspec(draft: DSparkDraftModel) -> tuple[dict, Tensors]:
    """Its trainer's own names; the embedding is stored, the number of taps is called `num_target_layers`."""
    config = {
        key: value
        for key, value in _qwen3(draft).items()
        if key not in ("head_dim", "layer_types", "sliding_window", "use_sliding_window", "hidden_act", "rope_scaling")
    }
    dspark = draft.config.markov_rank > 0
    config |= {
        "architectures": ["Qwen3DSparkModel" if dspark else "DFlashDraftModel"],
        "model_type": "qwen3_dspark" if dspark else "dflash",
        "mask_token_id": MASK,
        "num_target_layers": len(TAPS),
        "target_num_hidden_layers": DEPTH,
        "target_hidden_size": HIDDEN,
        "target_layer_ids": TAPS,
        "block_size": draft.config.block_size,
        **(_heads(draft) if dspark else {}),
    }
    embedding = {"embed_tokens.weight": draft.embed_tokens.weight.data}
    return config, _torchspec_names(embedding | _body(draft))


def speculators(draft: DSparkDraftModel) -> tuple[dict, Tensors]:
    """Vocabulary weights stored, as files before version 0.9 have them."""
    decoder = _qwen3(draft)
    rope = {"rope_theta": decoder.pop("rope_theta"), "rope_type": "default", **(decoder.pop("rope_scaling") or {})}
    for key in ("attention_bias", "tie_word_embeddings", "hidden_act"):  # equal to the class default
        del decoder[key]
    dspark = draft.config.markov_rank > 0
    name = "dspark" if dspark else "dflash"
    config = {
        "architectures": ["DSparkSpeculator" if dspark else "DFlashSpeculator"],
        "auto_map": {"": "config.DSparkSpeculatorConfig"},
        "speculators_model_type": name,
        "speculators_version": "0.8.0",
        "speculators_config": {
            "algorithm": name,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft.config.num_draft_tokens}],
            "verifier": {"name_or_path": "nobody/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": decoder | {"rope_parameters": rope},
        "draft_vocab_size": draft.config.draft_vocab_size,
        "block_size": draft.config.block_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
        "mask_token_id": MASK,
        "sample_from_anchor": draft.config.sample_from_anchor,
        "sliding_window_non_causal": draft.config.sliding_window_non_causal,
        **(_heads(draft) if dspark else {}),
    }
    tensors = dict(draft.state_dict())
    if "d2t" in tensors:
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, draft.draft_to_target, True)
    return config, tensors


def speculators_today(draft: DSparkDraftModel) -> tuple[dict, Tensors]:
    """Version 0.9: vocabulary weights are the target's."""
    config, _ = speculators(draft)
    return config | {"speculators_version": "0.9.0"}, _body(draft)


def zlab(draft: DSparkDraftModel) -> tuple[dict, Tensors]:
    config = _qwen3(draft) | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": draft.config.block_size,
        "num_target_layers": DEPTH,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS},
        "tie_word_embeddings": True,
    }
    return config, _body(draft)


def zlab_newer(draft: DSparkDraftModel) -> tuple[dict, Tensors]:
    """Block size inside `dflash_config`, rotary parameters in the schema of Transformers 5."""
    config, tensors = zlab(draft)
    config["dflash_config"] |= {"block_size": config.pop("block_size")}
    del config["rope_scaling"]
    config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
    return config, tensors


def encoder_names(draft: DSparkDraftModel) -> tuple[dict, Tensors]:
    """The context projection inside an `encoder`, as Transformers' own DFlash draft has it."""
    config, tensors = zlab(draft)
    inside = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return config, {inside.get(name, name): tensor for name, tensor in tensors.items()}


# Exporter -> the reader that must be chosen.
DSPARK = {
    deepspec: "deepspec",
    minicpm5: "deepspec",
    specforge: "specforge",
    specforge_early: "specforge",
    specforge_normalised: "specforge",
    prefixed: "specforge",
    lfm2: "specforge",
    modelopt: "modelopt",
    torchspec: "torchspec",
    speculators: "speculators",
    speculators_today: "speculators",
}
DFLASH = {
    zlab: "dflash",
    zlab_newer: "dflash",
    encoder_names: "dflash",
    torchspec: "torchspec",
    speculators: "speculators",
    speculators_today: "speculators",
}
