"""Writers for other projects' engines: the speculators packaging, and one file for vLLM and SGLang both.

The keys and tensor names written here are those the engines' own readers look for (versions in `engines.CHECKED`; a
test compares). What a packaging cannot express is refused by name, since an engine would run it wrongly in silence.
"""

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..configuration_dspark import DSparkConfig
from .engines import CHECKED
from .writer import (
    Vocabulary,
    deepspec_config,
    half_split_state,
    layer_obstacles,
    qwen3_keys,
    refuse,
    write_json,
    write_weights,
)

if TYPE_CHECKING:
    from ..modeling_dspark import DSparkDraftModel

VOCABULARY_NAMES = ("embed_tokens.weight", "lm_head.weight")


def write_speculators(draft: "DSparkDraftModel", folder: str | os.PathLike, *, verifier: str | None = None) -> None:
    """Writes a draft in the speculators packaging, "dspark" with heads and "dflash" without.

    Args:
        draft (`DSparkDraftModel`): the draft.
        folder (`str` or `os.PathLike`): created if needed.
        verifier (`str`, *optional*): name of the target, written down for vLLM to load.

    Raises:
        ValueError: when the draft has something that packaging cannot express.
    """
    config = speculators_config(draft.config, verifier=verifier)
    config["dtype"] = str(draft.dtype).removeprefix("torch.")
    state = half_split_state(draft)
    targets = draft.draft_to_target
    if targets is not None:
        chosen = torch.zeros(draft.config.vocab_size, dtype=torch.bool, device=targets.device)
        state = state | {"t2d": chosen.index_fill(0, targets, True)}
    write_json(config, Path(folder))
    write_weights(state, Path(folder))


def speculators_config(config: DSparkConfig, *, verifier: str | None = None) -> dict[str, Any]:
    """`config.json` of the speculators packaging.

    Raises:
        ValueError: naming the fields the packaging cannot express.
    """
    sliding = "sliding_attention" in config.layer_types
    refuse(
        "The speculators packaging",
        {
            "Gemma 4 layers": config.backbone != "qwen3",
            "a sliding window counted from each slot": sliding and config.sliding_window_per_slot,
            "scaled embeddings": config.embedding_scale != 1.0,
            "soft-capped logits": config.final_logit_softcapping is not None,
            "a reduced `draft_vocab_size` without a stored head": config.has_reduced_vocabulary
            and not config.stores_head,
            **layer_obstacles(config),
        },
    )
    dspark = config.markov_rank > 0 or config.enable_confidence_head
    name = "dspark" if dspark else "dflash"
    decoder = qwen3_keys(config)
    for key in ("architectures", "rope_theta", "rope_scaling"):
        del decoder[key]
    decoder |= {
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "sliding_window": config.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "vocab_size": config.vocab_size,
    }
    fields: dict[str, Any] = {
        "architectures": ["DSparkSpeculator" if dspark else "DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],  # indices of hidden states
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": config.sliding_window_non_causal,
        "speculators_config": {
            "algorithm": name,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_draft_tokens}],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "speculators_model_type": name,
        "speculators_version": CHECKED["speculators"],
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": decoder,
    }
    if dspark:
        fields |= {
            "confidence_head_with_markov": config.confidence_head_with_markov,
            "enable_confidence_head": config.enable_confidence_head,
            "markov_head_type": config.markov_head_type,
            "markov_rank": config.markov_rank,
        }
    if config.confidence_calibration is not None:
        fields["confidence_calibration"] = config.confidence_calibration  # ours; other readers pass over it
    return fields


def write_serving(
    draft: "DSparkDraftModel", folder: str | os.PathLike, *, vocabulary: Vocabulary | None = None
) -> None:
    """Writes a draft that vLLM and SGLang both load; embedding and head are left to the target.

    Args:
        draft (`DSparkDraftModel`): the draft.
        folder (`str` or `os.PathLike`): created if needed. Names with "dflash" or "eagle" mislead vLLM.
        vocabulary (`Vocabulary`, *optional*): the target's, to compare a draft's stored copies with. Without it they
            are written down unchecked, with a warning.

    Raises:
        ValueError: when the draft has something that one of the engines does not, or when its stored vocabulary
            weights are not the target's.
    """
    config = serving_config(draft.config)
    config["dtype"] = config["torch_dtype"] = str(draft.dtype).removeprefix("torch.")
    folder = Path(folder)
    misleading = [word for word in ("dflash", "eagle") if word in folder.name.lower()]
    if misleading:
        raise ValueError(f"vLLM takes a folder called {folder.name!r} for another kind of draft: choose another name.")
    state = _without_vocabulary(half_split_state(draft), draft, vocabulary)
    write_json(config, folder)
    write_weights(state, folder)


def serving_config(config: DSparkConfig) -> dict[str, Any]:
    """`config.json` that both engines read alike.

    Raises:
        ValueError: naming what one of them does not have.
    """
    sliding = "sliding_attention" in config.layer_types
    last = None if config.num_target_layers is None else config.num_target_layers - 1
    refuse(
        "A file for vLLM and SGLang",
        {
            "Gemma 4 layers": config.backbone != "qwen3",
            "a reduced `draft_vocab_size`": config.has_reduced_vocabulary,
            "`sample_from_anchor` false": not config.sample_from_anchor,
            "no Markov head": config.markov_rank == 0,
            f"Markov head {config.markov_head_type!r}": config.markov_head_type != "vanilla",
            "a sliding window counted from the anchor": sliding and not config.sliding_window_per_slot,
            "taps before the first target layer or after the last": config.target_layer_ids[0] < 0
            or config.target_layer_ids[-1] == last,
            "scaled embeddings": config.embedding_scale != 1.0,
            "soft-capped logits": config.final_logit_softcapping is not None,
            f"activation {config.hidden_act!r}": config.hidden_act not in ("silu", "swish"),
            **layer_obstacles(config),
        },
    )
    plain = DSparkConfig.from_dict({**config.to_dict(), "layer_types": None, "sliding_window": None})
    fields = deepspec_config(plain, borrowed=True) | {
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window if sliding else None,
        "use_sliding_window": sliding,
    }
    if sliding and config.sliding_window_non_causal:
        fields["is_causal"] = False
    # Where the DFlash relatives keep their settings. The layout key is left out: vLLM's DFlash route rejects it.
    keys = ("block_size", "mask_token_id", "target_layer_ids")
    return fields | {"dflash_config": {"projector_type": "dspark", **{key: fields[key] for key in keys}}}


def _without_vocabulary(
    state: dict[str, torch.Tensor], draft: "DSparkDraftModel", vocabulary: Vocabulary | None
) -> dict[str, torch.Tensor]:
    stored = [name for name in VOCABULARY_NAMES if name in state]
    if not stored:
        return state
    if vocabulary is None:
        warnings.warn(
            f"The draft's own {' and '.join(stored)} are written unchecked: SGLang uses the target's in their place. "
            "Name the target to compare them.",
            stacklevel=3,
        )
        return state
    for name, theirs in zip(VOCABULARY_NAMES, vocabulary, strict=True):
        own = state.get(name)
        if own is None:
            continue
        theirs = theirs[: own.shape[0]].to(device=own.device, dtype=own.dtype)
        if own.shape != theirs.shape or not torch.equal(own, theirs):
            raise ValueError(f"A file for vLLM and SGLang cannot express: {name} that differs from the target's.")
    return {name: tensor for name, tensor in state.items() if name not in VOCABULARY_NAMES}


__all__ = ["serving_config", "speculators_config", "write_serving", "write_speculators"]
