"""What a draft borrows from its target, and whether the two fit together.

A draft is trained with the target's token embedding and output head frozen (arXiv 2607.05147, section 3.3), so a
checkpoint may leave both out, or store copies of them. Borrowed weights are handed to each call and never kept on the
draft: one draft may serve two targets in two threads. Stored copies that turn out to be equal to the target's are
re-pointed to the target's memory, so a large vocabulary is not held twice; not while they are being trained, since
that would train the target too. A target may be spread over devices or offloaded by Accelerate: its head is called as
a module, through its hooks, and of its embedding the weight is taken from where Accelerate keeps it.
"""

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedConfig

from .configuration_dspark import DSparkConfig

if TYPE_CHECKING:
    from .modeling_dspark import DSparkDraftModel

# Vocabularies are padded to round sizes; a larger surplus means another tokenizer.
MAX_VOCABULARY_PADDING = 1024

# Which targets a draft's stored copies were already compared with. Outside the modules, so that neither deepcopy nor
# pickle of a draft reaches a target through it.
_compared: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# Rows of targets' heads that drafts with a reduced vocabulary borrow, copied once: by draft, then by target.
_rows: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class SharedWeights:
    """Embedding and head a draft uses for one call.

    Attributes:
        embedding (`torch.Tensor` [V, H]): raw (unscaled) token embeddings; may have padding rows behind V.
        head (`nn.Module`, *optional*): maps [..., H] to logits [..., V_draft or more].
    """

    embedding: torch.Tensor
    head: nn.Module | None


def resolve_shared_weights(draft: "DSparkDraftModel", target: nn.Module) -> SharedWeights:
    """The draft's own embedding and head where its checkpoint stores them, the target's otherwise.

    Raises:
        ValueError: when something has to be borrowed and the target has none that fits.
    """
    config = draft.config
    embedding_module, head = target.get_input_embeddings(), target.get_output_embeddings()
    if draft.embed_tokens is not None:
        _share_storage(draft, target, "embed_tokens", getattr(embedding_module, "weight", None))
        embedding = draft.embed_tokens.weight
    else:
        embedding = _resident_weight(embedding_module)
        _check_borrowed("input embedding", embedding, config)
    if draft.lm_head is not None:
        _share_storage(draft, target, "lm_head", getattr(head, "weight", None))
        head = draft.lm_head
    else:
        if head is None:
            raise ValueError(
                f"The draft stores no `lm_head` and {type(target).__name__} has no output embedding to borrow; load "
                "the target with its language-model head (AutoModelForCausalLM)."
            )
        # Quantised heads pack their weight; only a plain one can be checked.
        weight = getattr(head, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.is_meta and getattr(head, "_hf_hook", None) is None:
            _refuse_meta("output head")
        if isinstance(weight, torch.Tensor) and weight.is_floating_point():
            _check_borrowed("output head", weight, config)
        if config.has_reduced_vocabulary:
            head = _head_rows(draft, target, head)
    return SharedWeights(embedding=embedding, head=head)


def _head_rows(draft: "DSparkDraftModel", target: nn.Module, head: nn.Module) -> nn.Linear:
    """The target's head for the draft's tokens alone: a copy, made again when the target's weight has changed."""
    weight = _resident_weight(head)
    _check_borrowed("output head", weight, draft.config)
    state = tuple(
        (part.data_ptr(), None if part.is_inference() else part._version, part.dtype, part.device)
        for part in (weight, draft.d2t)
    )
    known = _rows.setdefault(draft, weakref.WeakKeyDictionary())
    if target not in known or known[target][0] != state:
        known[target] = (state, linear_rows(weight, getattr(head, "bias", None), draft.draft_to_target))
    return known[target][1]


def linear_rows(weight: torch.Tensor, bias: torch.Tensor | None, token_ids: torch.Tensor) -> nn.Linear:
    """A copy of these rows [V_draft] of a linear layer, without gradients."""
    return frozen_linear(*(part if part is None else part[token_ids.to(part.device)] for part in (weight, bias)))


def frozen_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A linear layer of these tensors, without gradients."""
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def _resident_weight(module: nn.Module) -> torch.Tensor | None:
    """The weight of `module`, out of Accelerate's keeping where it is offloaded to CPU memory or disk."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_meta:
        return weight
    from accelerate.utils import align_module_device, has_offloaded_params

    if not has_offloaded_params(module):
        _refuse_meta("input embedding")
    with align_module_device(module, execution_device=torch.device("cpu")):
        return module.weight.detach()


def _refuse_meta(what: str) -> None:
    raise ValueError(
        f"The draft has to borrow the target's {what}, but that is on the meta device and not offloaded by Accelerate: "
        "load its weights."
    )


def target_devices(target: nn.Module) -> set[torch.device]:
    """Devices a target computes on: those of its parameters, and of Accelerate's hooks where they are offloaded."""
    devices = {parameter.device for parameter in target.parameters() if not parameter.is_meta}
    for module in target.modules():
        hook = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):  # several hooks may be chained into one
            place = getattr(part, "execution_device", None)
            if place is not None:
                devices.add(torch.device(place))
    return devices


def _check_borrowed(what: str, weight: torch.Tensor | None, config: DSparkConfig) -> None:
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"The draft has to borrow the target's {what}, but that has no plain [V, H] weight.")
    if weight.shape[1] != config.hidden_size:
        raise ValueError(
            f"The draft has to borrow the target's {what}, but its width {weight.shape[1]} differs from the draft's "
            f"`hidden_size` {config.hidden_size}."
        )
    if weight.shape[0] < config.vocab_size:
        raise ValueError(
            f"The draft has to borrow the target's {what}, but its {weight.shape[0]} rows are fewer than the draft's "
            f"`vocab_size` {config.vocab_size}."
        )


def _share_storage(draft: "DSparkDraftModel", target: nn.Module, name: str, weight: torch.Tensor | None) -> None:
    """Re-points the draft's stored copy to the target's memory when both are equal; compares once per target."""
    own = getattr(draft, name).weight
    if draft.training or own.requires_grad or not isinstance(weight, torch.Tensor):
        return
    if own.data_ptr() == weight.data_ptr():
        return
    if own.shape != weight.shape or own.dtype != weight.dtype or own.device != weight.device:
        return
    seen = _compared.setdefault(draft, {}).setdefault(name, weakref.WeakSet())
    if target in seen:
        return
    seen.add(target)
    if torch.equal(own, weight):
        own.data = weight.data


def validate_target(draft: "DSparkDraftModel", target: nn.Module) -> None:
    """Checks that `target` is a model this draft can draft for.

    Raises:
        ValueError: naming the fields that disagree.
    """
    name, rows = type(target).__name__, draft.config.vocab_size
    problem = target_problem(draft.config, target.config, rows=rows, name=name)
    if problem is None:
        embedding = getattr(target.get_input_embeddings(), "weight", None)
        rows = embedding.shape[0] if isinstance(embedding, torch.Tensor) and embedding.dim() == 2 else None
        problem = target_problem(draft.config, target.config, rows=rows, name=name)
    if problem is not None:
        raise ValueError(problem)


def target_problem(
    config: DSparkConfig, target_config: PreTrainedConfig, *, rows: int | None = None, name: str | None = None
) -> str | None:
    """Why a draft cannot draft for a target with this configuration, or `None` if it can.

    Args:
        config (`DSparkConfig`): the draft's.
        target_config (`PreTrainedConfig`): the target's.
        rows (`int`, *optional*): rows of the target's embedding; its configured vocabulary if unset.
        name (`str`, *optional*): how to call the target; its model type if unset.
    """
    if target_config.model_type == config.model_type:
        return (
            "The target is itself a DSpark draft; call `generate` on the target model and pass the draft as "
            "`assistant_model`."
        )
    if getattr(target_config, "is_encoder_decoder", False):
        return (
            f"{name or target_config.model_type} is an encoder-decoder model; DSpark drafts for decoder-only targets."
        )
    text_config = target_config.get_text_config(decoder=True)
    if text_config.hidden_size != config.target_hidden_size:
        return (
            f"The target's `hidden_size` is {text_config.hidden_size}, but the draft was made for "
            f"`target_hidden_size` {config.target_hidden_size}."
        )
    depth, taps = text_config.num_hidden_layers, config.target_layer_ids
    if taps[-1] >= depth:
        return f"The draft's `target_layer_ids` {taps} reach outside the target's {depth} layers."
    if config.num_target_layers is not None and config.num_target_layers != depth:
        return (
            f"The target has {depth} layers, but the draft was made for `num_target_layers` "
            f"{config.num_target_layers}."
        )
    rows = text_config.vocab_size if rows is None else rows
    if not config.vocab_size <= rows <= config.vocab_size + MAX_VOCABULARY_PADDING:
        return f"The target's vocabulary has {rows} rows, but the draft was made for `vocab_size` {config.vocab_size}."
    return None


__all__ = [
    "SharedWeights",
    "frozen_linear",
    "linear_rows",
    "resolve_shared_weights",
    "target_devices",
    "target_problem",
    "validate_target",
]
