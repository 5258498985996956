"""Measures what a round costs for a target and a draft, with the calls that the decoding loop makes."""

import threading
import weakref
from collections.abc import Sequence

import torch

from .._compat import CACHE_KEY
from ..fingerprints import fingerprint_fields
from ..ops import first_argmax
from ..throughput import ThroughputProfile
from .capture import TapCapture, decoder_layers
from .drafter import Drafter
from .ragged_cache import RaggedCache, new_dynamic_cache
from .verifier import Verifier

_LOCK = threading.Lock()
# Profiles in use, by draft and target. Weak: a profile must not keep a model alive.
_IN_USE: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()
_FIRST_CONTEXT = 256  # tokens


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
    key = (path, model.config.get_text_config(decoder=True)._attn_implementation, torch.get_num_threads(), model.dtype)
    with _LOCK:
        known = _IN_USE.setdefault(draft, weakref.WeakKeyDictionary()).setdefault(model, {})
        profile = known.get(key)
        if profile is None:
            fields = fingerprint_fields(model, draft) | {"path": path}
            profile = ThroughputProfile.load_or_measure(
                fields, lambda: measure_profile(model, draft, path, rows=_bracketing(rows), fields=fields)
            )
        if not profile.covers(rows, context):
            contexts = (_FIRST_CONTEXT,) if profile.covers(rows) and context <= _FIRST_CONTEXT else (context,)
            profile = measure_profile(model, draft, path, rows=_bracketing(rows), contexts=contexts, profile=profile)
            try:
                profile.save()
            except OSError:  # a read-only home must not stop a generation
                pass
        known[key] = profile
        return profile


def _bracketing(rows: int) -> tuple[int, ...]:
    """Row counts to measure for a call with `rows` rows, the most important first."""
    return (rows,) if rows == 1 else (rows, 1)


def measure_profile(
    model,
    draft,
    path: str,
    rows: Sequence[int] = (1,),
    contexts: Sequence[int] = (_FIRST_CONTEXT,),
    time_budget: float = 2.5,
    fields: dict | None = None,
    profile: ThroughputProfile | None = None,
) -> ThroughputProfile:
    """
    Times verification and drafting on caches of the given shapes, filled with zeros.

    Args:
        rows, contexts (`Sequence[int]`): The grid; see [`ThroughputProfile.measure`].
        time_budget (`float`): Seconds to spend.
        fields (`dict`, *optional*): What the profile is filed under.
        profile (`ThroughputProfile`, *optional*): A profile to extend.
    """
    block = draft.config.num_draft_tokens + 1
    widths = sorted({1, 2, min(4, block), block})
    bench = _Bench(model, draft, path)
    with torch.no_grad(), bench.capture.installed():
        return ThroughputProfile.measure(
            bench.verify,
            bench.draft_once,
            fields=fields,
            rows=rows,
            tokens_per_row=widths,
            contexts=contexts,
            time_budget=time_budget,
            profile=profile,
        )


class _Bench:
    """The calls to time; caches are made once per shape."""

    def __init__(self, model, draft, path: str):
        self.model, self.draft, self.path = model, draft, path
        self.layers = decoder_layers(model)
        weight = draft.fc.weight
        self.capture = TapCapture(self.layers, draft.config.target_layer_ids, weight.device, weight.dtype)
        self.shared = draft.shared_weights(model)
        self.device = model.get_input_embeddings().weight.device
        self.width = draft.config.num_draft_tokens + 1
        self._verifiers: dict[tuple[int, int], Verifier] = {}
        self._drafters: dict[tuple[int, int], Drafter] = {}
        self._context = _FIRST_CONTEXT

    def verify(self, rows: int, tokens_per_row: int, context: int) -> None:
        """One verification step and the context it adds to the draft."""
        self._context = context
        if (rows, context) not in self._verifiers:
            self._verifiers[rows, context] = self._new_verifier(rows, context)
        verifier, drafter = self._verifiers[rows, context], self._drafter(rows, context)
        tokens = torch.full((rows, tokens_per_row), 10, device=self.device)
        positions = torch.full((rows,), context, device=self.device)
        logits, states, index, offsets = verifier(tokens, [tokens_per_row] * rows, positions, self.capture)
        first_argmax(logits).tolist()
        if tokens_per_row > 1:
            drafter.cache.lengths.fill_(context)
            drafter.longest = context
            drafter.extend(states, index, offsets, torch.zeros(rows, dtype=torch.long), tokens_per_row)

    def draft_once(self, rows: int) -> None:
        drafter = self._drafter(rows, self._context)
        drafter.cache.lengths.fill_(self._context)
        drafter.longest = self._context
        drafter.draft_round(torch.full((rows,), 10, device=self.device), self.width - 1).tokens.tolist()

    def _new_verifier(self, rows: int, context: int) -> Verifier:
        source = new_dynamic_cache(self.model.config)
        ids = torch.full((rows, 1), 10, device=self.device)
        position_ids = torch.zeros_like(ids)
        self.model(input_ids=ids, position_ids=position_ids, use_cache=True, **{CACHE_KEY: source})
        self.capture.take()
        cache = RaggedCache(source, [1] * rows, context + self.width)
        cache.lengths = [context] * rows
        return Verifier(self.model, self.layers, cache, self.path, None)

    def _drafter(self, rows: int, context: int) -> Drafter:
        if (rows, context) not in self._drafters:
            capacity = context + self.width + self.draft.config.block_size
            self._drafters[rows, context] = Drafter(self.draft, self.shared, rows, capacity, None)
        return self._drafters[rows, context]
