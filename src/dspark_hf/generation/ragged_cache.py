"""A key/value cache in which every row has its own length.

Rows of a batch accept different numbers of drafted tokens, so they drift apart after the first round. Each layer keeps
one pre-allocated buffer `[R, H_kv, capacity, D]`; a row's length says how much of it is real. Rolling back rejected
tokens lowers that length and nothing else: stale slots are masked until they are overwritten. Heads come before slots
because attention reads a head's slots one after the other, a quarter faster on CPUs than with interleaved heads.

Left padding of the prompt stays where it was, so slot numbers are the padded positions that plain `generate()` uses and
the model's own window and chunk rules keep their meaning.
"""

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

_GROWTH = 256  # slots: buffers grow in steps of this many at least


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, `[R, H_kv, capacity, D]` each. Written by [`RaggedCache.update`] only."""

    is_sliding = False  # a window is a matter of the mask here: every position is kept

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, owner: "RaggedCache"):
        super().__init__()
        self.keys, self.values, self.owner = keys, values, owner
        self.is_initialized = True

    def lazy_initialization(self, key_states, value_states):
        pass

    def update(self, key_states, value_states, *args, **kwargs):
        raise RuntimeError("a ragged layer is written through RaggedCache.update")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.kv_length, 0

    def get_seq_length(self) -> int:
        return max(self.owner.lengths, default=0)

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class _EmptyLayer(RaggedLayer):
    """Stands in for a layer that stores nothing of its own (its keys come from another layer)."""

    def __init__(self, owner: "RaggedCache"):
        CacheLayerMixin.__init__(self)
        self.owner = owner


class RaggedCache(Cache):
    """
    Cache of R rows of different lengths; made from the cache that the prefill filled.

    Args:
        source (`Cache`):
            The cache after prefill. Its tensors are copied; sliding layers may have dropped what left their window.
        lengths (`list[int]`):
            Slots in use per row (prompt with padding).
        capacity (`int`):
            Slots to allocate per row at first; grows on demand.
    """

    def __init__(self, source: Cache, lengths: list[int], capacity: int):
        self.lengths = list(lengths)
        self.kv_length = max(lengths)  # slots that the coming forward may look at
        self.capacity = capacity
        self._places: dict[tuple, torch.Tensor] = {}
        super().__init__(layers=[self._import(layer) for layer in source.layers])

    def _import(self, layer: CacheLayerMixin) -> RaggedLayer:
        if getattr(layer, "keys", None) is None or layer.keys.numel() == 0:
            return _EmptyLayer(self)
        seen = layer.get_seq_length()
        start = seen - layer.keys.shape[2]  # a sliding layer kept only the end

        def buffer(states: torch.Tensor) -> torch.Tensor:
            rows, heads, _, dim = states.shape
            # zeros, not empty: a masked slot still multiplies into the output, and 0 * nan is nan
            out = states.new_zeros(rows, heads, self.capacity, dim)
            out[:, :, start:seen] = states
            return out

        return RaggedLayer(buffer(layer.keys), buffer(layer.values), self)

    @classmethod
    def from_rows(cls, rows: list[list[tuple[torch.Tensor, torch.Tensor] | None]], spare: int) -> "RaggedCache":
        """A cache of rows as [`row_states`] gave them, with `spare` free slots behind the longest."""
        cache = cls.__new__(cls)
        cache.lengths = [next(state for state in row if state is not None)[0].shape[1] for row in rows]
        cache.kv_length = max(cache.lengths)
        cache.capacity = cache.kv_length + spare
        cache._places = {}
        layers: list[RaggedLayer] = []
        for states in zip(*rows):
            if states[0] is None:
                layers.append(_EmptyLayer(cache))
                continue
            buffers = [
                part.new_zeros(len(rows), part.shape[0], cache.capacity, part.shape[2]) for part in states[0]
            ]
            for row, state in enumerate(states):
                for buffer, part in zip(buffers, state):
                    buffer[row, :, : part.shape[1]] = part
            layers.append(RaggedLayer(*buffers, cache))
        Cache.__init__(cache, layers=layers)
        return cache

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def is_initialized(self) -> bool:
        return True

    def plan(self, counts: list[int], slots: torch.Tensor, rows: torch.Tensor) -> None:
        """
        Announces the coming forward: where its tokens go.

        Args:
            counts (`list[int]`): New tokens per row.
            slots (`torch.LongTensor` of shape `(N,)`): Slot of each token in the order in which the model sees them.
            rows (`torch.LongTensor` of shape `(N,)`): Row of each token.
        """
        self.kv_length = max(length + count for length, count in zip(self.lengths, counts))
        # rectangular rows write up to the width of the widest one
        self.reserve(max(self.lengths) + max(counts))
        self._rows, self._slots, self._places = rows, slots, {}

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        """Writes `[1, H_kv, N, D]` (packed) or `[R, H_kv, Q, D]` and returns views `[R, H_kv, kv_length, D]`."""
        layer = self.layers[layer_idx]
        views = []
        for buffer, states in ((layer.keys, key_states), (layer.values, value_states)):
            if self.rows == 1:  # a single row's tokens lie behind one another
                start = self.lengths[0]
                buffer[0, :, start : start + states.shape[2]] = states[0]
                views.append(buffer[:1, :, : self.kv_length])
                continue
            heads, dim = buffer.shape[1], buffer.shape[3]
            flat = states.transpose(1, 2).reshape(-1, dim)
            buffer.view(-1, dim).index_copy_(0, self._place(heads, states.device), flat)
            views.append(buffer[: self.rows, :, : self.kv_length])
        return views[0], views[1]

    def _place(self, heads: int, device: torch.device) -> torch.Tensor:
        """Where the coming tokens' heads go in a layer with `heads` of them, seen as a list of slots `(N * heads,)`."""
        place = self._places.get((heads, device))
        if place is None:
            rows, slots = self._rows.to(device), self._slots.to(device)
            first = rows[:, None] * heads + torch.arange(heads, device=device)
            place = self._places[heads, device] = (first * self.capacity + slots[:, None]).flatten()
        return place

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return max(self.lengths)  # each row's own offset is known to the mask function

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.kv_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def reserve(self, slots: int) -> None:
        """Makes room for `slots` slots per row."""
        if slots <= self.capacity:
            return
        capacity = max(slots + _GROWTH, self.capacity + self.capacity // 2)
        for layer in self.layers:
            for name in ("keys", "values"):
                old = getattr(layer, name)
                if old is not None:
                    new = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
                    new[:, :, : self.capacity] = old
                    setattr(layer, name, new)
        self.capacity = capacity

    def move_row(self, source: int, target: int) -> None:
        """Copies row `source` over row `target`."""
        length = self.lengths[source]
        self.lengths[target] = length
        for layer in self.layers:
            if layer.keys is not None:
                layer.keys[target, :, :length] = layer.keys[source, :, :length]
                layer.values[target, :, :length] = layer.values[source, :, :length]

    def drop_rows(self, rows: int) -> None:
        """Keeps the first `rows` rows."""
        del self.lengths[rows:]

    def row_states(self, row: int) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """Keys and values of one row per layer, `[H_kv, length, D]`, copied; None for layers that store nothing."""
        length = self.lengths[row]
        return [
            None if layer.keys is None else (layer.keys[row, :, :length].clone(), layer.values[row, :, :length].clone())
            for layer in self.layers
        ]


def export_rows(target: Cache, rows: list[list[tuple[torch.Tensor, torch.Tensor] | None]], length: int) -> None:
    """
    Writes rows back into the cache that `generate()` was handed, as plain `generate()` leaves it.

    Args:
        target (`Cache`): A dynamic cache; its layers are replaced in place.
        rows (`list`): Per row what [`RaggedCache.row_states`] gave. Shorter rows are filled with zeros on the right,
            where plain `generate()` has the keys of padding tokens.
        length (`int`): Slots to export.
    """
    for index, layer in enumerate(target.layers):
        states = [row[index] for row in rows]
        if states[0] is None:
            continue
        for name, part in (("keys", 0), ("values", 1)):
            first = states[0][part]
            out = first.new_zeros(len(rows), first.shape[0], length, first.shape[2])
            for row, state in enumerate(states):
                kept = state[part][:, :length]
                out[row, :, : kept.shape[1]] = kept
            window = getattr(layer, "sliding_window", None) if layer.is_sliding else None
            setattr(layer, name, out if window is None else out[:, :, -window + 1 :])
        if layer.is_sliding:
            layer.cumulative_length = length


def new_dynamic_cache(config) -> DynamicCache:
    """An empty dynamic cache with the layer types of `config`'s text decoder."""
    return DynamicCache(config=config.get_text_config(decoder=True))
