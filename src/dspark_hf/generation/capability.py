"""Which way of verifying is right for a target.

A target may take the packed path, the rectangular one, Transformers' own batch-1 loop, or none. Static rules look at
what its layers keep between steps. Then the first call on a kind of target compares one ragged forward of a few tokens
with plain full forwards: a multi-token cached forward that answers differently (it happens) is found there, not in a
user's text.
"""

import inspect
import json
import logging
import threading
import weakref

import torch
from transformers import DynamicCache

from .._compat import CACHE_KEY
from .capture import decoder_layers
from .masks import original_attention
from .ragged_cache import RaggedCache, new_dynamic_cache
from .verifier import PACKED, RECTANGULAR, Verifier

logger = logging.getLogger(__name__)

SEQUENTIAL, PLAIN = "sequential", "plain"
_LAYERS_WITH_ROWS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
_PROMPTS, _BLOCKS = (6, 4), (2, 4)  # tokens per row of the check: prompt, then verified
_MAX_ERROR = {torch.float32: 1e-3, torch.float64: 1e-3}  # relative; half precision below
_MAX_HALF_ERROR = 0.15

_DECIDED: dict[tuple, tuple[str, str]] = {}  # by class, config, attention and dtype
_KNOWN: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()  # the same by model, to look it up in no time
_LOCK = threading.Lock()


def verification_path(model) -> tuple[str, str]:
    """
    How to verify on this target.

    Returns:
        "packed", "rectangular", "sequential" or "plain", and the reason why it is not the one before.
    """
    text_config = model.config.get_text_config(decoder=True)
    setting = (original_attention(text_config), model.dtype, model.training)
    with _LOCK:
        known = _KNOWN.setdefault(model, {})
        if setting not in known:
            key = (type(model), json.dumps(model.config.to_dict(), sort_keys=True, default=str), *setting)
            if key not in _DECIDED:
                _DECIDED[key] = _decide(model, text_config)
            known[setting] = _DECIDED[key]
        return known[setting]


def _decide(model, text_config) -> tuple[str, str]:
    if getattr(model, "_is_stateful", False):
        return PLAIN, "it carries a recurrent state that cannot be rolled back"
    cache = new_dynamic_cache(model.config)
    kinds = {type(layer).__name__ for layer in cache.layers}
    if unknown := sorted(kinds - set(_LAYERS_WITH_ROWS)):
        return PLAIN, f"its cache has layers that cannot be rolled back ({', '.join(unknown)})"
    try:
        layers = decoder_layers(model)
    except (ValueError, AttributeError) as error:
        return PLAIN, str(error)
    reasons = []
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if not takes_positions:
        reasons.append("its forward takes no `position_ids`, so rows of different lengths cannot be told apart")
    for path in (PACKED, RECTANGULAR) if takes_positions else ():
        try:
            error = _ragged_error(model, layers, path)
        except Exception as exception:  # whatever a model raises on ragged input, the answer is the next path
            reasons.append(f"{path}: {type(exception).__name__}: {exception}")
            continue
        if error <= _MAX_ERROR.get(model.dtype, _MAX_HALF_ERROR):
            return path, "; ".join(reasons)
        reasons.append(f"{path}: logits differ by {error:.2g} from a plain forward")
    logger.debug("no ragged path for %s: %s", type(model).__name__, "; ".join(reasons))
    try:
        error = _cached_error(model)
    except Exception as exception:  # as above
        return PLAIN, "; ".join(reasons + [f"sequential: {type(exception).__name__}: {exception}"])
    if error <= _MAX_ERROR.get(model.dtype, _MAX_HALF_ERROR):
        return SEQUENTIAL, "; ".join(reasons)
    return PLAIN, "; ".join(reasons + [f"sequential: logits differ by {error:.2g}"])


@torch.no_grad()
def _ragged_error(model, layers, path: str) -> float:
    """Relative error of one ragged forward over two rows, against full forwards of the same tokens."""
    ids = _sample_ids(model, sum(max(pair) for pair in (_PROMPTS, _BLOCKS)) + 1)
    device, width = ids.device, max(_PROMPTS)
    rows = [ids[start : start + _PROMPTS[start] + _BLOCKS[start]] for start in (0, 1)]
    prompt = ids.new_full((2, width), int(ids[0]))
    padding = torch.zeros(2, width, dtype=torch.bool, device=device)
    for row, (tokens, length) in enumerate(zip(rows, _PROMPTS)):
        prompt[row, width - length :] = tokens[:length]
        padding[row, width - length :] = True
    cache = new_dynamic_cache(model.config)
    positions = (padding.long().cumsum(-1) - 1).clamp_min(0)
    model(input_ids=prompt, attention_mask=padding.long(), position_ids=positions, use_cache=True, **{CACHE_KEY: cache})
    ragged = RaggedCache(cache, [width, width], width + max(_BLOCKS))
    verifier = Verifier(model, layers, ragged, path, padding)
    blocks = ids.new_full((2, max(_BLOCKS)), int(ids[0]))
    for row, (tokens, length) in enumerate(zip(rows, _PROMPTS)):
        blocks[row, : _BLOCKS[row]] = tokens[length:]
    logits, _, index, _ = verifier(blocks, list(_BLOCKS), torch.tensor(_PROMPTS, device=device), None)
    wanted = [model(input_ids=tokens[None], use_cache=False).logits[0, -count:] for tokens, count in zip(rows, _BLOCKS)]
    return _relative_error(logits, torch.cat(wanted), model.dtype)


@torch.no_grad()
def _cached_error(model) -> float:
    """Relative error of a several-token forward on a stock cache, as Transformers' own loop makes it."""
    tokens = _sample_ids(model, _PROMPTS[0] + _BLOCKS[1])[None]
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    model(input_ids=tokens[:, : _PROMPTS[0]], use_cache=True, **{CACHE_KEY: cache})
    logits = model(input_ids=tokens[:, _PROMPTS[0] :], use_cache=True, **{CACHE_KEY: cache}).logits[0]
    wanted = model(input_ids=tokens, use_cache=False).logits[0, -_BLOCKS[1] :]
    return _relative_error(logits, wanted, model.dtype)


def _sample_ids(model, count: int) -> torch.Tensor:
    """Distinct ordinary token ids: low ones, where no tokenizer keeps image or control placeholders in number."""
    vocab = min(model.config.get_text_config(decoder=True).vocab_size, 1000)
    ids = [5 + (step * 37) % max(1, vocab - 6) for step in range(count)]
    return torch.tensor(ids, device=model.get_input_embeddings().weight.device)


def _relative_error(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> float:
    got, wanted = got.float(), wanted.float().to(got.device)
    scale = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-6)
    errors = (got - wanted).norm(dim=-1) / scale
    # in half precision a near-tie in a router may move one position; the median still tells right from wrong
    return (errors.max() if dtype in _MAX_ERROR else errors.median()).item()
