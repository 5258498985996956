"""One target forward that verifies the drafted tokens of all rows."""

from collections.abc import Callable

import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .._compat import CACHE_KEY
from ..ops import on_device
from .capture import TapCapture
from .masks import (
    ATTENTION_NAME,
    MaskBuilder,
    VerifyStep,
    original_attention,
    ragged_mask,
    swapped_attention,
    verifying,
)
from .packed_attention import packed_attention
from .ragged_cache import RaggedCache

PACKED, RECTANGULAR = "packed", "rectangular"
_OWN_KERNELS = ("eager", "sdpa")

ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, ragged_mask)


class Verifier:
    """
    Runs the target on [anchor, drafts] of every row, packed into one row or as a rectangle.

    Args:
        model: The target.
        layers (`nn.ModuleList`): Its decoder layers.
        cache (`RaggedCache`): The rows' keys and values.
        path (`str`): "packed" or "rectangular".
        padding (`torch.BoolTensor` of shape `(R, P)`, *optional*): False where the prompt is padded.
    """

    def __init__(self, model, layers, cache: RaggedCache, path: str, padding: torch.Tensor | None):
        self.model, self.cache, self.path = model, cache, path
        self.masks = MaskBuilder(model, padding)
        self.fill = step_filler(model, path)
        self.configs = attention_configs(layers)
        name = original_attention(model.config.get_text_config(decoder=True))
        # ragged rows need a mask that only these two read; both compute what other kernels compute
        self.delegate = name if name in _OWN_KERNELS else "sdpa"
        # Packed or not, attention goes through ours only where it has to: the rectangle keeps the user's kernel.
        self.swaps = path == PACKED or self.delegate != name

    def __call__(self, tokens: torch.Tensor, counts: list[int], positions: torch.Tensor, capture: TapCapture | None):
        """
        Args:
            tokens (`torch.LongTensor` of shape `(R, K + 1)`): Anchor and drafted tokens of each row.
            counts (`list[int]`): How many of them to verify per row, at least 1.
            positions (`torch.LongTensor` of shape `(R,)` or `(axes, R)`): Position id of each anchor.
            capture (`TapCapture`, *optional*): Reads the tapped states of this forward.

        Returns:
            Logits `(N, V)` of the N verified tokens; of the N' >= N tokens that were computed their tapped states
            `(N', T * H)` (None without capture), their rows `(N',)` and their offsets in the block `(N',)`. Those
            behind the first N repeat the last one.
        """
        cache, device = self.cache, tokens.device
        verified = sum(counts)
        computed = self.fill(verified) if min(counts) < max(counts) else verified
        rows, offsets = block_index(counts, device, computed)
        lengths = on_device(cache.lengths, device)
        width, packed = max(counts), self.path == PACKED
        flat = rows * width + offsets
        step = VerifyStep(counts, lengths, packed, flat, self.delegate)
        if packed:
            cache.plan(counts, (lengths[rows] + offsets), rows)
            input_ids = tokens[rows, offsets][None]
            position_ids = (positions[..., rows] + offsets).unsqueeze(-2)
        else:
            columns = torch.arange(width, device=device)
            slots = (lengths[:, None] + columns).flatten()
            cache.plan(counts, slots, torch.arange(len(counts), device=device).repeat_interleave(width))
            cache.kv_length = max(cache.lengths) + width
            input_ids = tokens[:, :width]
            position_ids = positions[..., None] + columns
        mask = self.masks.build(step, cache, CACHE_KEY, position_ids, device)
        inputs = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "attention_mask": mask,
            CACHE_KEY: cache,
            "use_cache": True,
            "return_dict": True,
        }
        if self.swaps:
            with swapped_attention(self.configs), verifying(step):
                logits = self.model(**inputs).logits
        else:
            logits = self.model(**inputs).logits
        states = capture.take() if capture is not None else None
        if packed:
            return logits[0, :verified], None if states is None else states[0], rows, offsets
        logits = logits.flatten(0, 1)[flat]
        return logits, None if states is None else states.flatten(0, 1)[flat.to(states.device)], rows, offsets


def step_filler(model, path: str) -> Callable[[int], int]:
    """
    How many tokens a step computes that verifies different numbers of rows' drafts, by how many it verifies.

    Half-precision kernels of CPUs are compiled for every number of tokens when it first occurs: 15 ms a step of 135
    million parameters, where one token more costs 0.6. So packed steps keep to few numbers there; elsewhere it is the
    number itself.
    """
    weight = model.get_input_embeddings().weight
    if path != PACKED or weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float16):
        return lambda tokens: tokens

    def fill(tokens: int) -> int:
        step = 1 if tokens <= 8 else 8 if tokens <= 64 else 16
        return -(-tokens // step) * step

    return fill


def block_index(counts: list[int], device: torch.device, computed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and offset of each token when rows lie behind one another; the last one again up to `computed` in all."""
    tokens_per_row = torch.tensor(counts)
    rows = torch.arange(len(counts)).repeat_interleave(tokens_per_row)
    starts = tokens_per_row.cumsum(0) - tokens_per_row
    offsets = torch.arange(rows.shape[0]) - starts[rows]
    if spare := computed - rows.shape[0]:
        # on the host, before the copy: an accelerator has nothing to do for it
        rows, offsets = (torch.cat([part, part[-1:].expand(spare)]) for part in (rows, offsets))
    return on_device(rows, device), on_device(offsets, device)


def attention_configs(layers) -> list[PreTrainedConfig]:
    """The distinct config objects that the attention modules of the decoder read their implementation from."""
    configs = {}
    for layer in layers:
        for module in layer.modules():
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                configs[id(config)] = config
    return list(configs.values())
