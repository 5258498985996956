"""Writing drafts: this package's own layout, and the DeepSpec layout that other engines serve.

Own saves keep DeepSpec's tensor names, with a `config.json` of `model_type` "dspark" in which every field is explicit.
Where a draft can be expressed in it, `write_deepspec` writes DeepSpec's `config.json`, `write_speculators` that of the
speculators packaging, and `write_serving` one that vLLM and SGLang both load.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from huggingface_hub import HfApi
from safetensors.torch import save_file

from ..configuration_dspark import DSparkConfig, validate_generation_config
from .files import CONFIG_FILE, SINGLE_FILE

if TYPE_CHECKING:
    from ..modeling_dspark import DSparkDraftModel


class Vocabulary(NamedTuple):
    """A target's embedding and head, both [V, H], for packagings that store them."""

    embedding: torch.Tensor
    head: torch.Tensor


def write_native(
    draft: "DSparkDraftModel", folder: str | os.PathLike, *, state_dict: dict[str, torch.Tensor] | None = None
) -> None:
    """Writes `config.json`, `generation_config.json` and `model.safetensors`.

    Args:
        draft (`DSparkDraftModel`): the draft.
        folder (`str` or `os.PathLike`): created if needed; may be the one the draft was loaded from.
        state_dict (`dict`, *optional*): tensors to write in place of the draft's own.

    Raises:
        ValueError: when the draft's generation settings are invalid.
    """
    validate_generation_config(draft.generation_config, draft.config)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    draft.config.architectures = [type(draft).__name__]
    draft.config.dtype = draft.dtype
    draft.config.save_pretrained(folder)
    draft.generation_config.save_pretrained(folder)
    write_weights(draft.state_dict() if state_dict is None else state_dict, folder)


def push_native(
    folder: str | os.PathLike,
    *,
    repo_id: str | None = None,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    **unused: Any,
) -> None:
    """Uploads what `write_native` wrote, and nothing else that may lie in the folder, to a Hub repository.

    Args:
        folder (`str` or `os.PathLike`): the folder.
        repo_id (`str`, *optional*): repository, created if needed; the folder's name if unset.
        token, private, revision, commit_message, create_pr: as in `huggingface_hub`.
        unused: arguments of Transformers' `save_pretrained` that do not apply.
    """
    api = HfApi(token=token)
    repo = api.create_repo(repo_id or Path(folder).name, private=private, exist_ok=True).repo_id
    api.upload_folder(
        repo_id=repo,
        folder_path=folder,
        allow_patterns=[CONFIG_FILE, "generation_config.json", SINGLE_FILE],
        revision=revision,
        commit_message=commit_message or "Upload draft",
        create_pr=create_pr,
    )


def write_deepspec(
    draft: "DSparkDraftModel", folder: str | os.PathLike, *, vocabulary: Vocabulary | None = None
) -> None:
    """Writes a draft in the official DeepSpec layout.

    Args:
        draft (`DSparkDraftModel`): the draft.
        folder (`str` or `os.PathLike`): created if needed.
        vocabulary (`Vocabulary`, *optional*): the target's, for a draft that does not store its own.

    Raises:
        ValueError: when the draft has something that layout cannot express.
    """
    config = deepspec_config(draft.config, borrowed=vocabulary is not None)
    config["dtype"] = str(draft.dtype).removeprefix("torch.")
    state = half_split_state(draft)
    if vocabulary is not None:
        state = with_vocabulary(state, draft, vocabulary)
    write_json(config, Path(folder))
    write_weights(state, Path(folder))


def deepspec_config(config: DSparkConfig, *, borrowed: bool = False) -> dict[str, Any]:
    """`config.json` of the DeepSpec layout.

    Args:
        config (`DSparkConfig`): the draft's.
        borrowed (`bool`): embedding and head will be taken from the target and stored.

    Raises:
        ValueError: naming the fields the layout cannot express.
    """
    qwen3 = config.backbone == "qwen3"
    refuse(
        "The DeepSpec layout",
        {
            "a reduced `draft_vocab_size`": config.has_reduced_vocabulary,
            "`sample_from_anchor` false": not config.sample_from_anchor,
            "sliding layers": "sliding_attention" in config.layer_types,
            "no stored embedding or head": not (borrowed or (config.stores_embedding and config.stores_head)),
            "scaled embeddings": qwen3 and config.embedding_scale != 1.0,
            "soft-capped logits": qwen3 and config.final_logit_softcapping is not None,
            **layer_obstacles(config),
        },
    )
    fields: dict[str, Any] = {
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "bos_token_id": config.bos_token_id,
        "enable_confidence_head": config.enable_confidence_head,
        "eos_token_id": config.eos_token_id,
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "markov_rank": config.markov_rank,
        "mask_token_id": config.mask_token_id,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_target_layers": config.num_target_layers,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        # Two spellings of the block layout: without them, engines differ in what they assume.
        "sample_from_anchor": True,
        "dspark_bonus_anchor": False,
        "target_layer_ids": list(config.target_layer_ids),
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    if config.markov_rank:
        fields["markov_head_type"] = config.markov_head_type
    if config.enable_confidence_head:
        fields["confidence_head_with_markov"] = config.confidence_head_with_markov
    if config.confidence_calibration is not None:
        fields["confidence_calibration"] = config.confidence_calibration  # ours; other readers pass over it
    return fields | (qwen3_keys(config) if qwen3 else _gemma4_keys(config))


def refuse(layout: str, obstacles: dict[str, bool]) -> None:
    """Raises `ValueError` naming the obstacles that are there."""
    if any(obstacles.values()):
        listing = ", ".join(name for name, present in obstacles.items() if present)
        raise ValueError(f"{layout} cannot express: {listing}.")


def layer_obstacles(config: DSparkConfig) -> dict[str, bool]:
    """What no other packaging's layers have, with whether this draft has it."""
    return {
        "no query/key norms": not config.qk_norm,
        "biases on part of the projections": config.mlp_bias or config.attention_output_bias != config.attention_bias,
        "taps of another width than the draft": config.target_hidden_size != config.hidden_size,
    }


def qwen3_keys(config: DSparkConfig) -> dict[str, Any]:
    """Keys of a Qwen 3 style draft, rotary parameters in both of Transformers' schemas."""
    rope = dict(config.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "num_key_value_heads": config.num_key_value_heads,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],  # the older spelling, for engines on Transformers 4
        "rope_scaling": scaling if rope.get("rope_type", "default") != "default" else None,
        "sliding_window": None,
        "use_sliding_window": False,
    }


def _gemma4_keys(config: DSparkConfig) -> dict[str, Any]:
    return {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "attention_k_eq_v": config.k_eq_v,
        "enable_moe_block": False,
        "final_logit_softcapping": config.final_logit_softcapping,
        "global_head_dim": config.head_dim,
        "head_dim": config.head_dim,
        "hidden_activation": config.hidden_act,
        "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": config.num_key_value_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_kv_shared_layers": 0,
        "rope_parameters": {"full_attention": dict(config.rope_parameters)},
    }


def half_split_state(draft: "DSparkDraftModel") -> dict[str, torch.Tensor]:
    """The draft's tensors for a rotary embedding that turns the halves of a head against each other.

    A draft that turns neighbouring pairs computes the same with the rows of its query and key heads reordered, pairs
    taken apart into halves; the norms in between weigh each row on its own and are reordered alike.
    """
    state = draft.state_dict()
    if not draft.config.rope_interleaved:
        return state
    size = draft.config.head_dim
    halves = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
    for name, tensor in state.items():
        module = name.rpartition(".")[0]
        if module.endswith(("self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "self_attn.k_norm")):
            heads = tensor.unflatten(0, (-1, size))
            state[name] = heads[:, halves.to(tensor.device)].flatten(0, 1)
    return state


def with_vocabulary(
    state: dict[str, torch.Tensor], draft: "DSparkDraftModel", vocabulary: Vocabulary
) -> dict[str, torch.Tensor]:
    """`state` with the target's embedding and head where the draft stores none, cut to its vocabulary.

    Raises:
        ValueError: when they do not fit the draft.
    """
    wanted = {"embed_tokens.weight": vocabulary.embedding, "lm_head.weight": vocabulary.head}
    for name, tensor in wanted.items():
        if name in state:
            continue
        if tensor.shape[0] < draft.config.vocab_size or tensor.shape[1] != draft.config.hidden_size:
            raise ValueError(
                f"The target's {name} is {list(tensor.shape)}; the draft needs [{draft.config.vocab_size}, "
                f"{draft.config.hidden_size}]."
            )
        state = state | {name: tensor[: draft.config.vocab_size].to(draft.dtype)}
    return state


def write_json(config: dict[str, Any], folder: Path, name: str = "config.json") -> None:
    """Writes a JSON file into `folder`, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2, sort_keys=True)
        file.write("\n")


def write_weights(state_dict: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes `model.safetensors`."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state_dict.items():
        tensor = tensor.detach().contiguous()
        # Embedding and head may both point to a tied target's tensor; the format wants separate ones.
        address = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    # The draft may be memory-mapped from the very file that is replaced: write beside it, then rename.
    temporary = folder / f".{SINGLE_FILE}.{os.getpid()}"
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        os.replace(temporary, folder / SINGLE_FILE)
    finally:
        temporary.unlink(missing_ok=True)


__all__ = ["Vocabulary", "deepspec_config", "half_split_state", "push_native", "write_deepspec", "write_native"]
