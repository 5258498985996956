"""Attention masks for rows of different lengths, drawn by the model's own mask code.

The model decides what a query may see (causal, window, chunk, padding) through a function of a query and a key index.
One mask function, registered under a private name, hands it the query indices of every row instead of one shared range,
so every rule of every model is kept without being known here.

Nothing is global to a call: the step being verified travels in a context variable, so the registered functions behave
like the original ones in any other thread.
"""

import copy
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_masks_for_generate

ATTENTION_NAME = "dspark"


@dataclass
class VerifyStep:
    """
    Layout of one verification forward over R rows, Q tokens in the widest row, N tokens in all.

    Args:
        counts (`list[int]`): Tokens per row, 1 + verify length.
        lengths (`torch.LongTensor` of shape `(R,)`): Slots in use per row before this forward.
        packed (`bool`): Tokens lie behind one another in one row, `[1, N]`; otherwise `[R, Q]`.
        flat (`torch.LongTensor` of shape `(N,)`): Index of each packed token in the `[R * Q]` rectangle. The last may
            come again, to fill up a step.
        delegate (`str`): The attention implementation that does the computing.
    """

    counts: list[int]
    lengths: torch.Tensor
    packed: bool
    flat: torch.Tensor
    delegate: str
    grouped_masks: dict = field(default_factory=dict)  # masks repeated for folded query heads, by id
    open_masks: dict = field(default_factory=dict)  # masks looked through for anything hidden, by id

    @property
    def rows(self) -> int:
        return len(self.counts)

    @property
    def width(self) -> int:
        return max(self.counts)

    @property
    def is_uniform(self) -> bool:
        return min(self.counts) == max(self.counts)

    def hides_nothing(self, mask: torch.Tensor) -> bool:
        """
        Whether an additive mask is all zeros, as for one token of rows of the same length: kernels are faster without.

        Asked on a CPU only; an accelerator would have to be waited for.
        """
        if self.width > 1 or mask.device.type != "cpu":
            return False
        known = self.open_masks.get(id(mask))
        if known is None:
            # the mask itself is kept too: an id is unique only while its object lives
            known = self.open_masks[id(mask)] = (not mask.any(), mask)
        return known[0]


_STEP: ContextVar[VerifyStep | None] = ContextVar("dspark_verify_step", default=None)


def current_step() -> VerifyStep | None:
    return _STEP.get()


@contextmanager
def verifying(step: VerifyStep):
    """Makes `step` the one that the registered functions see in this thread."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


# Attention implementation that a config had before it was swapped, with the number of calls that hold the swap.
_SWAPPED: dict[int, list] = {}
_SWAP_LOCK = threading.Lock()


def original_attention(config) -> str:
    """The attention implementation of `config` as the user set it, while another thread may hold it swapped."""
    with _SWAP_LOCK:
        entry = _SWAPPED.get(id(config))
        return entry[1] if entry is not None else config._attn_implementation


@contextmanager
def swapped_attention(configs: list):
    """
    Routes the attention of the modules that hold one of `configs` through ours, and puts it back afterwards.

    The swap is visible to other threads, for which the registered functions delegate to the original; calls that
    overlap share one swap, and the last one out restores it.
    """
    with _SWAP_LOCK:
        for config in configs:
            entry = _SWAPPED.setdefault(id(config), [0, config._attn_implementation, config])
            entry[0] += 1
            config._attn_implementation_internal = ATTENTION_NAME
    try:
        yield
    finally:
        with _SWAP_LOCK:
            for config in configs:
                entry = _SWAPPED[id(config)]
                entry[0] -= 1
                if entry[0] == 0:
                    config._attn_implementation_internal = entry[1]
                    del _SWAPPED[id(config)]


def ragged_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function=None,
    attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    config=None,
    **kwargs,
) -> torch.Tensor:
    """Additive mask `[R, 1, Q, S]` of the current step; the original mask function's answer when there is none."""
    step = current_step()
    if step is None:
        original = ALL_MASK_ATTENTION_FUNCTIONS[original_attention(config)]
        return original(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, dtype=dtype, device=device, config=config,
            **kwargs,
        )  # fmt: skip
    lengths = step.lengths.to(device)
    rows = torch.arange(batch_size, device=device).view(-1, 1, 1, 1)
    heads = rows.new_zeros(1, 1, 1, 1)
    queries = (lengths[:, None] + torch.arange(q_length, device=device)).view(batch_size, 1, q_length, 1)
    keys = torch.arange(kv_length, device=device).view(1, 1, 1, kv_length)
    allowed = mask_function(rows, heads, queries, keys)
    if attention_mask is not None:
        allowed = allowed & attention_mask[:, None, None, :kv_length].to(device=device, dtype=torch.bool)
    allowed = allowed.expand(batch_size, 1, q_length, kv_length)
    # additive for every implementation: eager needs it, and sdpa would convert a boolean one in every layer
    return torch.zeros((), dtype=dtype, device=device).where(allowed, torch.finfo(dtype).min)


class MaskBuilder:
    """
    Builds the masks of a verification step with the model's own code.

    Args:
        model: The target.
        padding (`torch.BoolTensor` of shape `(R, P)`, *optional*):
            False where the prompt is padded; None when no row is.
    """

    def __init__(self, model, padding: torch.Tensor | None):
        self.model = model
        # a copy, so that a rectangular forward does not touch the user's config
        self.config = copy.deepcopy(model.config)
        for config in {id(c): c for c in (self.config, self.config.get_text_config(decoder=True))}.values():
            config._attn_implementation_internal = ATTENTION_NAME
        self.padding = padding
        self.create = getattr(model, "create_masks_for_generate", create_masks_for_generate)

    def select_rows(self, rows: torch.Tensor) -> None:
        if self.padding is not None:
            self.padding = self.padding.index_select(0, rows)

    def build(self, step: VerifyStep, cache, cache_key: str, position_ids: torch.Tensor, device: torch.device):
        """Mask `[R, 1, Q, S]`, or one per layer type in a dict, for the coming forward."""
        padding = self.padding
        if padding is not None:
            padding = torch.nn.functional.pad(padding, (0, max(0, cache.kv_length - padding.shape[1])), value=True)
        embeds = torch.empty(step.rows, step.width, 0, dtype=self.model.dtype, device=device)
        with verifying(step):
            return self.create(
                config=self.config,
                inputs_embeds=embeds,
                attention_mask=padding,
                position_ids=position_ids,
                **{cache_key: cache},
            )
