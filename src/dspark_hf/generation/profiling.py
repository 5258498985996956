"""Measures what a round costs for a target and a draft, with the calls that the decoding loop makes."""

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from .._compat import CACHE_KEY
from ..fingerprints import fingerprint_fields
from ..ops import first_argmax
from ..throughput import ThroughputProfile
from .capability import verification_path
from .capture import TapCapture, decoder_layers
from .drafter import Drafter
from .masks import original_attention
from .ragged_cache import RaggedCache, new_dynamic_cache
from .verifier import PACKED, RECTANGULAR, Verifier

logger = logging.getLogger(__name__)

# Held while measuring: two measurements at once would time each other.
_MEASURING = threading.RLock()
# Profiles in use, by draft and target. Weak: a profile must not keep a model alive.
_IN_USE: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()
_FIRST_CONTEXT = 256  # tokens
_SECONDS = 2.5  # for a measurement that nobody asked for
_UNCALIBRATED = (
    "The draft's confidences are not calibrated; what is verified will be less well chosen than it could be. "
    "`dspark-hf calibrate` fits them once and keeps the result with the draft."
)


def profile_for(model, draft, path: str, rows: int, context: int) -> ThroughputProfile:
    """
    The cost table of this pair, from memory, from disk, or measured now and saved.

    Args:
        model: The target.
        draft (`DSparkDraftModel`): The draft.
        path (`str`): "packed" or "rectangular".
        rows (`int`): Rows that the call decodes at once.
        context (`int`): Tokens that it has cached by then.
    """
    attention = original_attention(model.config.get_text_config(decoder=True))
    key = (path, attention, torch.get_num_threads(), model.dtype)
    profile = _IN_USE.get(draft, {}).get(model, {}).get(key)
    if profile is not None and profile.covers(rows, context):
        return profile
    with _MEASURING:
        known = _IN_USE.setdefault(draft, weakref.WeakKeyDictionary()).setdefault(model, {})
        profile = known.get(key)
        if profile is None:
            if draft.config.enable_confidence_head and draft.config.confidence_calibration is None:
                logger.warning(_UNCALIBRATED)
            contexts = (_FIRST_CONTEXT,) if context <= 3 * _FIRST_CONTEXT else (_FIRST_CONTEXT, context)
            profile = ThroughputProfile.load_or_measure(
                profile_fields(model, draft, path), lambda: _measure_for_call(model, draft, path, rows, contexts)
            )
        if not profile.covers(rows, context):
            # one measurement a call: what does not fit into its time is left to the next one
            contexts = dict.fromkeys([*profile.missing(rows, context), *profile.missing(rows)])
            profile = _measure_for_call(model, draft, path, rows, tuple(contexts), profile)
            save_profile(profile)
        known[key] = profile
        return profile


def throughput_profile(model, draft, rows: int = 1, context: int = _FIRST_CONTEXT) -> ThroughputProfile:
    """
    The cost table that `generate()` uses for this pair: from memory, from disk, or measured now and saved.

    Args:
        model: The target.
        draft (`DSparkDraftModel`): The draft.
        rows (`int`): Most rows of a batch.
        context (`int`): Tokens cached per row.

    Raises:
        ValueError: the target cannot be verified in blocks.
    """
    return profile_for(model, draft, _batched_path(model), rows, context)


def _batched_path(model) -> str:
    path, reason = verification_path(model)
    if path not in (PACKED, RECTANGULAR):
        raise ValueError(f"{type(model).__name__} is not verified in batched blocks: {reason}.")
    return path


def profile_fields(model, draft, path: str) -> dict:
    """What a pair's cost table is filed under."""
    # another thread may be verifying, its attention swapped
    return fingerprint_fields(model, draft) | {"path": path, "attention": original_attention(model.config)}


def save_profile(profile: ThroughputProfile) -> Path | None:
    """Saves where [`profile_for`] looks; None where that cannot be written, which must not stop a generation."""
    try:
        return profile.save()
    except OSError:
        return None


def _measure_for_call(model, draft, path: str, rows: int, contexts, profile=None) -> ThroughputProfile:
    """The rows of the call with most of the time; then a single row, which is what is left of a batch at its end."""
    share = 1.0 if rows == 1 else 0.75
    profile = measure_profile(model, draft, path, (rows,), contexts, share * _SECONDS, profile=profile)
    if rows > 1 and not profile.covers(1, max(contexts)):
        profile = measure_profile(model, draft, path, (1,), contexts[:1], (1 - share) * _SECONDS, profile=profile)
    return profile


def measure_profile(
    model,
    draft,
    path: str | None = None,
    rows: Sequence[int] = (1,),
    contexts: Sequence[int] = (_FIRST_CONTEXT,),
    time_budget: float = _SECONDS,
    profile: ThroughputProfile | None = None,
    max_samples: int = 5,
) -> ThroughputProfile:
    """
    Times verification and drafting with the calls that the decoding loop makes.

    Args:
        model: The target.
        draft (`DSparkDraftModel`): The draft.
        path (`str`, *optional*): "packed" or "rectangular"; by default what the target is verified with.
        rows, contexts (`Sequence[int]`): The grid; see [`ThroughputProfile.measure`].
        time_budget (`float`): Seconds to spend.
        profile (`ThroughputProfile`, *optional*): A profile to extend.
        max_samples (`int`): Most samples of a point.

    Raises:
        ValueError: the target cannot be verified in blocks.
    """
    began = time.perf_counter()
    path = path or _batched_path(model)
    block = draft.config.num_draft_tokens + 1
    widths = sorted({1, 2, min(4, block), block})
    with _MEASURING, torch.no_grad():
        bench = _Bench(model, draft, path, max(rows), max(contexts))
        with bench.capture.installed():
            measured = ThroughputProfile.measure(
                bench.verify,
                bench.draft_once,
                fields=profile_fields(model, draft, path),
                rows=rows,
                tokens_per_row=widths,
                draft_tokens=list(dict.fromkeys((block - 1, min(2, block - 1)))),
                contexts=contexts,
                time_budget=time_budget - (time.perf_counter() - began),
                profile=profile,
                max_samples=max_samples,
            )
    measured.measured_seconds = time.perf_counter() - began + (profile.measured_seconds if profile is not None else 0)
    return measured


class _Bench:
    """The calls to time, on one cache of zeros for all shapes: fewer rows use its first ones."""

    def __init__(self, model, draft, path: str, rows: int, context: int):
        self.model, self.draft, self.path = model, draft, path
        layers = decoder_layers(model)
        weight = draft.fc.weight
        self.capture = TapCapture(layers, draft.config.target_layer_ids, weight.device, weight.dtype)
        self.shared = draft.shared_weights(model)
        self.device = model.get_input_embeddings().weight.device
        self.width = draft.config.num_draft_tokens + 1
        source = new_dynamic_cache(model.config)
        ids = torch.full((1, 1), 10, device=self.device)
        model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=True, **{CACHE_KEY: source})
        source.batch_repeat_interleave(rows)
        self.cache = RaggedCache(source, [1] * rows, context + self.width)
        self.verifier = Verifier(model, layers, self.cache, path, None)
        # Different ids: a mixture of experts must not send them all the same way.
        vocabulary = min(draft.config.vocab_size, model.get_input_embeddings().weight.shape[0])
        self.tokens = (7 + 37 * torch.arange(rows * self.width)).remainder(vocabulary).view(rows, self.width)
        self.tokens = self.tokens.to(self.device)
        self.context = context
        self._drafters: dict[int, Drafter] = {}

    def verify(self, rows: int, tokens_per_row: int, context: int) -> None:
        """One verification step and what it adds to the draft's context."""
        self.context = context
        self.cache.lengths = [context] * rows
        positions = torch.full((rows,), context, device=self.device)
        counts = [tokens_per_row] * rows
        drafter = self._drafter(rows) if tokens_per_row > 1 else None
        logits, states, index, offsets = self.verifier(self.tokens[:rows], counts, positions, self.capture)
        following = first_argmax(logits)
        if drafter is not None:
            drafter.extend(states, index, offsets, torch.zeros_like(positions), tokens_per_row)
        following.tolist()

    def draft_once(self, rows: int, num_tokens: int) -> None:
        """One draft behind the context of the last verification."""
        self._drafter(rows).draft_round(self.tokens[:rows, 0], num_tokens).tokens.tolist()

    def _drafter(self, rows: int) -> Drafter:
        """The draft's side for `rows` rows, at the present context."""
        if rows not in self._drafters:
            capacity = self.context + self.width + self.draft.config.block_size
            self._drafters[rows] = Drafter(self.draft, self.shared, rows, capacity, None)
        drafter = self._drafters[rows]
        drafter.cache.lengths.fill_(self.context)
        drafter.longest = self.context
        drafter.cache.reserve(self.context + self.width + self.draft.config.block_size)
        return drafter
