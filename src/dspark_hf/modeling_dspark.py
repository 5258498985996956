"""The DSpark draft model: backbone, sequential head and confidence head.

One round of drafting (arXiv 2607.05147, section 3):

1. The target's tapped hidden states of newly committed tokens are projected by `fc` and `hidden_norm` and become
   context keys and values in every draft layer (eq. 2, 3): `extend_context`, or the context of `forward`.
2. One forward over the block [anchor, mask, mask, ...], bidirectional inside the block, gives a hidden state h_k and
   base logits U_k for all K slots at once: `forward`. The anchor slot predicts as well, so K slots give K drafts.
3. Left to right, slot k draws its token from softmax(U_k + B(x_{k-1}, ·)) (eq. 4): `draft_block`.
4. The confidence head estimates how likely each draft is to be accepted (eq. 7), from h_k and x_{k-1} but never x_k.

The anchor is the last token the target committed. Its own hidden state does not exist yet when the block is drafted:
it is computed by the verification that follows, and enters the context in the next round.

Axes: R rows, K slots, C context tokens, H hidden, T taps, V vocabulary of the target, V_draft of the draft.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from . import checkpoints
from .configuration_dspark import DSparkConfig, default_generation_config
from .draft_cache import DraftCache
from .heads import ConfidenceHead, MarkovHead
from .layers import (
    DRAFT_LAYERS,
    DSparkRMSNorm,
    DSparkRotaryEmbedding,
    cached_context_masks,
    given_context_masks,
)
from .ops import dense, first_argmax
from .sharing import SharedWeights, resolve_shared_weights, validate_target

Sampler = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass
class DSparkOutput(ModelOutput):
    """What the backbone says about a block.

    Attributes:
        last_hidden_state (`torch.Tensor` [R, K, H]): after the final norm.
        base_logits (`torch.Tensor` [R, K, V_draft]): head of it, soft-capped where the family does; no Markov bias.
    """

    last_hidden_state: torch.Tensor | None = None
    base_logits: torch.Tensor | None = None


@dataclass
class DraftBlock:
    """Drafted tokens of one round, k = tokens drafted per row.

    Attributes:
        tokens (`torch.Tensor` [R, k], int64): target ids.
        logits (`torch.Tensor` [R, k, V_draft]): what each token was drawn from, Markov bias included.
        confidence_logits (`torch.Tensor` [R, k], *optional*): raw, uncalibrated; `None` without the head.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    confidence_logits: torch.Tensor | None


class DSparkDraftModel(PreTrainedModel):
    """A DSpark draft. Load with `from_pretrained`; use through `model.generate(..., assistant_model=draft)`.

    Args:
        config (`DSparkConfig`): see there.
    """

    config_class = DSparkConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_sdpa = True
    _no_split_modules = ["Qwen3DraftLayer", "Gemma4DraftLayer"]

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if config.stores_embedding else None
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, hidden, bias=False)
        self.hidden_norm = DSparkRMSNorm(hidden, config)
        self.layers = nn.ModuleList([DRAFT_LAYERS[config.backbone](config) for _ in range(config.num_hidden_layers)])
        self.norm = DSparkRMSNorm(hidden, config)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False) if config.stores_head else None
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.rotary = DSparkRotaryEmbedding(config)
        # Offsets: draft id i is target id i + d2t[i].
        offsets = torch.zeros(config.draft_vocab_size, dtype=torch.long) if config.has_reduced_vocabulary else None
        self.register_buffer("d2t", offsets)
        self.post_init()
        self.generation_config = default_generation_config(config)

    # Vocabulary -----------------------------------------------------------------------------------------------------

    @property
    def draft_to_target(self) -> torch.Tensor | None:
        """Target id of every draft id [V_draft], or `None` when both vocabularies are the same."""
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Maps draft-vocabulary ids [...] to target ids [...]."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    # Target ---------------------------------------------------------------------------------------------------------

    def shared_weights(self, target: nn.Module) -> SharedWeights:
        """Embedding and head to use with `target`; see `sharing.resolve_shared_weights`."""
        return resolve_shared_weights(self, target)

    def validate_target(self, target: nn.Module) -> None:
        """Raises `ValueError` unless this draft can draft for `target`; see `sharing.validate_target`."""
        validate_target(self, target)

    # Context --------------------------------------------------------------------------------------------------------

    def new_cache(self, rows: int, *, slots: int = 0, uniform: bool | None = None) -> DraftCache:
        """An empty `DraftCache` for `rows` rows on this draft's device and in its dtype."""
        return DraftCache(self.config, rows, slots=slots, device=self.device, dtype=self.dtype, uniform=uniform)

    def project_context(self, context_hidden: torch.Tensor) -> torch.Tensor:
        """Taps [..., T·H_target] to the draft's context stream [..., H]: `fc`, then `hidden_norm`."""
        context_hidden = context_hidden.to(device=self.fc.weight.device, dtype=self.fc.weight.dtype)
        return self.hidden_norm(self.fc(context_hidden))

    @torch.no_grad()
    def extend_context(
        self,
        context_hidden: torch.Tensor,
        position_ids: torch.Tensor,
        cache: DraftCache,
        rows: torch.Tensor,
        slots: torch.Tensor,
        *,
        lengths: torch.Tensor | None = None,
    ) -> None:
        """Writes context tokens of any rows, packed, into the cache. No block is involved.

        Args:
            context_hidden (`torch.Tensor` [N, T·H_target]): taps of all new tokens, all rows together.
            position_ids (`torch.Tensor` [N]): their positions, for the rotary embedding.
            cache (`DraftCache`): must have room: call `cache.reserve` first.
            rows (`torch.Tensor` [N]): cache row of each token.
            slots (`torch.Tensor` [N]): slot of each token, that is, its index within its row's context.
            lengths (`torch.Tensor` [R], *optional*): context lengths afterwards. If unset, `cache.lengths` is left
                alone: what to count is the caller's decision, who may write more than is kept.
        """
        device = self.fc.weight.device
        rows, slots = rows.to(device), slots.to(device)
        self._write_context(self.project_context(context_hidden), position_ids.to(device), cache, rows, slots)
        if lengths is not None:
            cache.lengths = lengths.to(device)

    def _write_context(self, context, position_ids, cache, rows, slots) -> None:
        cos, sin = self.rotary(position_ids, context.dtype)
        for index, layer in enumerate(self.layers):
            keys, values = layer.self_attn.project_kv(context, cos, sin)
            cache.write(index, rows, slots, keys, values)

    # Block ----------------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: torch.Tensor,
        context_hidden: torch.Tensor | None,
        position_ids: torch.Tensor,
        cache: DraftCache | None = None,
        attention_mask: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        shared: SharedWeights | None = None,
        *,
        kv_length: int | None = None,
        return_logits: bool = True,
    ) -> DSparkOutput:
        """Hidden states and base logits of a block, given its context.

        Args:
            input_ids (`torch.Tensor` [R, K]): anchor, then mask tokens.
            context_hidden (`torch.Tensor` [R, C, T·H_target], *optional*): taps of the context tokens. With a cache,
                they are appended to it first and stay there; `None` when `extend_context` has put them there.
            position_ids (`torch.Tensor` [R, C + K]): positions of context and block.
            cache (`DraftCache`, *optional*): earlier context. Block keys and values are not kept.
            attention_mask (`torch.Tensor`, *optional*): bool, False hides a key: [R, S] with S = C + K (with a cache:
                its slots up to `kv_length`). Training may pass one mask per query, [R, K, S] or [R, 1, K, S], or a
                dict of them by layer type; those are used as they are.
            shared (`SharedWeights`, *optional*): from `shared_weights(target)`; unset for the stored ones.
            kv_length (`int`, *optional*): longest context over rows (appended tokens included) plus K. Saves reading
                the lengths back from the device. Must be exact where `cache.uniform`, else may be an upper bound.
            return_logits (`bool`): False leaves `base_logits` out.

        Returns:
            `DSparkOutput`.

        Raises:
            ValueError: for shapes that disagree, or when embedding or head are neither stored nor given.
        """
        hidden = self._backbone(input_ids, context_hidden, position_ids, cache, attention_mask, shared, kv_length)
        logits = self.compute_base_logits(hidden, shared) if return_logits else None
        return DSparkOutput(last_hidden_state=hidden, base_logits=logits)

    def _backbone(self, input_ids, context_hidden, position_ids, cache, attention_mask, shared, kv_length):
        rows, slots = input_ids.shape
        context_length = 0 if context_hidden is None else context_hidden.shape[1]
        if position_ids.shape != (rows, context_length + slots):
            raise ValueError(
                f"`position_ids` must be [{rows}, {context_length + slots}] for {context_length} context tokens and "
                f"{slots} slots, got {list(position_ids.shape)}."
            )
        hidden = self._embed(input_ids, shared)
        position_ids = position_ids.to(hidden.device)
        cos, sin = self.rotary(position_ids[:, context_length:], hidden.dtype)
        if cache is None:
            join = self._join_given_context(context_hidden, position_ids[:, :context_length])
            masks = given_context_masks(self.config, position_ids, context_length, attention_mask)
        else:
            if kv_length is None:
                kv_length = int(cache.lengths.max()) + context_length + slots  # host sync; pass kv_length to avoid it
            cache.reserve(kv_length)
            if context_length:
                self._append_context(context_hidden, position_ids[:, :context_length], cache)
            join = cache.block_writer(slots, kv_length)
            masks = cached_context_masks(self.config, cache, slots, kv_length, attention_mask)
        for index, (layer, layer_type) in enumerate(zip(self.layers, self.config.layer_types, strict=True)):
            hidden = layer(hidden, cos, sin, masks[layer_type], lambda keys, values, i=index: join(i, keys, values))
        return self.norm(hidden)

    def _embed(self, input_ids: torch.Tensor, shared: SharedWeights | None) -> torch.Tensor:
        if shared is None and self.embed_tokens is None:
            raise ValueError("This draft stores no embedding; pass `shared=draft.shared_weights(target)`.")
        weight = self.embed_tokens.weight if shared is None else shared.embedding
        # A target may have added tokens that the draft's own table does not know; any row will do for those.
        embedded = F.embedding(input_ids.to(weight.device).clamp(max=weight.shape[0] - 1), weight)
        embedded = embedded.to(device=self.fc.weight.device, dtype=self.fc.weight.dtype)
        if self.config.embedding_scale == 1.0:
            return embedded
        # Gemma rounds the factor to the weights' dtype first; a Python float needs no copy to the device.
        return embedded * float(torch.tensor(self.config.embedding_scale, dtype=embedded.dtype, device="cpu"))

    def compute_base_logits(self, hidden: torch.Tensor, shared: SharedWeights | None = None) -> torch.Tensor:
        """Base logits U [..., V_draft] of hidden states [..., H], soft-capped where the family does.

        Raises:
            ValueError: when the head is neither stored nor given.
        """
        head = self.lm_head if shared is None else shared.head
        if head is None:
            raise ValueError("This draft stores no head; pass `shared=draft.shared_weights(target)`.")
        weight = getattr(head, "weight", None)
        states = hidden
        if isinstance(weight, torch.Tensor):
            if not weight.is_meta:  # else a hook moves the input
                states = states.to(weight.device)
            if weight.is_floating_point() and weight.dtype.itemsize > 1:
                states = states.to(weight.dtype)
        # A borrowed head may have padding columns behind the vocabulary.
        logits = head(states)[..., : self.config.draft_vocab_size].to(hidden.device)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _append_context(self, context_hidden, position_ids, cache) -> None:
        rows, length = position_ids.shape
        slots = cache.lengths[:, None] + torch.arange(length, device=cache.lengths.device)
        row_ids = torch.arange(rows, device=slots.device)[:, None].expand_as(slots)
        self._write_context(self.project_context(context_hidden), position_ids, cache, row_ids, slots)
        cache.lengths = cache.lengths + length

    def _join_given_context(self, context_hidden, position_ids):
        if context_hidden is None:
            return lambda index, keys, values: (keys, values)
        context = self.project_context(context_hidden)
        cos, sin = self.rotary(position_ids, context.dtype)

        def join(index, keys, values):
            context_keys, context_values = self.layers[index].self_attn.project_kv(context, cos, sin)
            return torch.cat([context_keys, keys], dim=1), torch.cat([context_values, values], dim=1)

        return join

    # Drafting -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def draft_block(
        self,
        context_hidden: torch.Tensor | None,
        anchor_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cache: DraftCache | None = None,
        sampler: Sampler | None = None,
        shared: SharedWeights | None = None,
        num_tokens: int | None = None,
        attention_mask: torch.Tensor | None = None,
        kv_length: int | None = None,
    ) -> DraftBlock:
        """Drafts one block per row: backbone once, then the sequential head slot by slot.

        Args:
            context_hidden (`torch.Tensor` [R, C, T·H_target], *optional*): as in `forward`.
            anchor_ids (`torch.Tensor` [R]): the last committed token of each row, target ids.
            position_ids (`torch.Tensor` [R, C + K]): K = `config.block_size`.
            cache (`DraftCache`, *optional*): as in `forward`.
            sampler (callable, *optional*): `sampler(logits [R, V_draft], slot) -> ids [R]` in the draft's vocabulary;
                slot counts drafted tokens from 0. Greedy if unset.
            shared (`SharedWeights`, *optional*): as in `forward`.
            num_tokens (`int`, *optional*): how many tokens to draft; at most `config.num_draft_tokens`, the default.
                The backbone runs on the whole block all the same, since its slots see each other.
            attention_mask, kv_length: as in `forward`.

        Returns:
            `DraftBlock` with k = `num_tokens`.

        Raises:
            ValueError: for `num_tokens` below 1, and as `forward` does.
        """
        config = self.config
        count = config.num_draft_tokens if num_tokens is None else min(num_tokens, config.num_draft_tokens)
        if count < 1:
            raise ValueError(f"`num_tokens` must be at least 1, got {num_tokens}.")
        anchor_ids = anchor_ids.to(self.device)
        input_ids = anchor_ids.new_full((anchor_ids.shape[0], config.block_size), config.mask_token_id)
        input_ids[:, 0] = anchor_ids
        hidden = self._backbone(input_ids, context_hidden, position_ids, cache, attention_mask, shared, kv_length)
        first = 0 if config.sample_from_anchor else 1
        drafted = dense(hidden[:, first : first + count])
        logits = self.compute_base_logits(drafted, shared)
        prev_ids = anchor_ids.clamp(max=config.vocab_size - 1)
        tokens, embeddings, state = [], [], None
        if self.markov_head is not None:
            state = self.markov_head.initial_state(hidden)
            if first and state is not None:  # 1+N: the state has passed over slot 0, which drafts nothing
                state = self.markov_head.advance(prev_ids, hidden[:, 0], state)
        for slot in range(count):
            if self.markov_head is not None:
                bias, embedding, state = self.markov_head.step(prev_ids, drafted[:, slot], state)
                logits[:, slot] += bias
                embeddings.append(embedding)
            draft_ids = first_argmax(logits[:, slot]) if sampler is None else sampler(logits[:, slot], slot)
            prev_ids = self.to_target_ids(draft_ids)
            tokens.append(prev_ids)
        confidence = None
        if self.confidence_head is not None:
            confidence = self.confidence_head(drafted, torch.stack(embeddings, dim=1) if embeddings else None)
        return DraftBlock(torch.stack(tokens, dim=1), logits, confidence)

    # Files ----------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        *,
        config: DSparkConfig | None = None,
        dtype: str | torch.dtype = "auto",
        device_map: str | int | torch.device | dict | None = None,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        cache_dir: str | None = None,
        force_download: bool = False,
        sample_from_anchor: bool | None = None,
        config_overrides: Mapping[str, Any] | None = None,
        **auto_kwargs,
    ) -> "DSparkDraftModel":
        """Loads a draft from a folder or Hub repository in any packaging the `checkpoints` package reads.

        Weights are memory-mapped and assigned: one copy is held at most, and nothing is initialised at random.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): folder or repository.
            config (`DSparkConfig`, *optional*): replaces the file's; only for this package's own saves.
            dtype (`str` or `torch.dtype`): `"auto"` keeps the stored one.
            device_map (`str`, `int`, `torch.device` or `dict`, *optional*): one device, or `"auto"`. CPU if unset.
            revision, subfolder, token, local_files_only, cache_dir, force_download: as in Transformers.
            sample_from_anchor (`bool`, *optional*): overrides the block layout the checkpoint declares.
            config_overrides (`dict`, *optional*): keys to put into the checkpoint's `config.json` before it is read,
                where it lacks one or is wrong; `None` removes a key.
            auto_kwargs: what Transformers' Auto classes add on their own; `low_cpu_mem_usage` changes nothing here.

        Raises:
            ValueError: when files, keys or tensors are missing, unexpected or of the wrong shape, listing them, or
                when the packaging is not one this package reads.
        """
        checkpoints.check_auto_kwargs(auto_kwargs)
        files = checkpoints.open_checkpoint(
            pretrained_model_name_or_path,
            revision=revision,
            subfolder=subfolder,
            token=token,
            local_files_only=local_files_only,
            cache_dir=cache_dir,
            force_download=force_download,
            config_overrides=config_overrides,
        )
        file_config, reader = checkpoints.read_config(files, sample_from_anchor=sample_from_anchor)
        if config is not None and reader.name != "native":
            raise ValueError(f"`config` can only replace that of this package's own saves, not of {reader.name!r}.")
        config = file_config if config is None else copy.deepcopy(config)
        dtype = auto_kwargs.get("torch_dtype") or dtype
        return cls._from_files(files, reader, config, dtype, checkpoints.single_device(device_map))

    @classmethod
    def _from_files(cls, files: checkpoints.CheckpointFiles, reader, config, dtype, device) -> "DSparkDraftModel":
        with torch.device("meta"):
            draft = cls(config)
        checkpoints.fill_draft(draft, files, reader, dtype, device)
        return draft.eval()

    def save_pretrained(
        self,
        save_directory,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        **hub_kwargs,
    ) -> None:
        """Writes `config.json`, `model.safetensors` and `generation_config.json`.

        Args:
            save_directory (`str` or `os.PathLike`): folder, created if needed. May be the one it was loaded from.
            is_main_process (`bool`): False writes nothing (distributed training).
            state_dict (`dict`, *optional*): tensors to write in place of this model's own.
            push_to_hub (`bool`): upload the folder afterwards, to `repo_id` or a repository of the folder's name.
            hub_kwargs: `repo_id`, `token`, `private`, `revision`, `commit_message` and `create_pr` of the upload. What
                Transformers passes beside them has no use here: a draft is always one file.
        """
        if not is_main_process:
            return
        checkpoints.write_native(self, save_directory, state_dict=state_dict)
        if push_to_hub:
            checkpoints.push_native(save_directory, **hub_kwargs)


__all__ = ["DSparkDraftModel", "DSparkOutput", "DraftBlock", "SharedWeights"]
