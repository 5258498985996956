"""Key/value memory of a draft: the context of every row, ragged, with the current block behind it.

The draft reads the target's tapped hidden states as extra keys and values (arXiv 2607.05147, eq. 2 and 3). A context
token's keys and values never change once written, so they are kept between rounds; those of the block are valid for
one forward only. Rows accept different numbers of tokens, hence a length per row:

    row 0   c c c c c b b b . . .        c = context (lengths[0] = 5), b = block, . = free
    row 1   c c b b b . . . . . .

Slots are packed: slot s of a row holds its s-th context token, whatever its position id. The block lies at
`lengths[r] .. lengths[r] + K - 1` and is overwritten by the next context, so nothing has to be rolled back: a row
forgets tokens by lowering its length.
"""

from collections.abc import Callable

import torch

from .configuration_dspark import DSparkConfig

GROWTH = 256  # slots; growing reallocates, so do it rarely


class DraftCache:
    """Per-layer K/V buffers [R, capacity, H_kv, D] with a length per row.

    Attributes:
        keys, values (`list[torch.Tensor]`): one buffer [R, capacity, H_kv, D] per draft layer.
        lengths (`torch.Tensor` [R], int64): context tokens per row. May be assigned.
        rows (`torch.Tensor` [R], int64): the caller's original row numbers, kept by `keep`.
        uniform (`bool`): all rows have equal length *and* callers pass the exact `kv_length`; then no mask is needed.
            True from the start for a single row. Set it to False when `kv_length` is only an upper bound.

    Args:
        config (`DSparkConfig`): the draft's configuration.
        rows (`int`): number of rows R.
        slots (`int`): slots to reserve right away.
        device, dtype: of the buffers; those of the draft.
        uniform (`bool`, *optional*): see above.
    """

    def __init__(
        self,
        config: DSparkConfig,
        rows: int,
        *,
        slots: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        uniform: bool | None = None,
    ):
        # Zeros, not empty: a masked slot still multiplies its value by 0, and 0 times NaN is NaN.
        shape = (rows, 0, config.num_key_value_heads, config.head_dim)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_hidden_layers)]
        self.lengths = torch.zeros(rows, device=device, dtype=torch.long)
        self.rows = torch.arange(rows, device=device)
        self.uniform = rows == 1 if uniform is None else uniform
        self.reserve(slots)

    @property
    def num_rows(self) -> int:
        """Rows R held now."""
        return self.keys[0].shape[0]

    @property
    def capacity(self) -> int:
        """Slots per row, context and block together."""
        return self.keys[0].shape[1]

    def reserve(self, slots: int) -> None:
        """Makes room for at least `slots` slots per row (a host integer), growing in blocks of 256."""
        if slots <= self.capacity:
            return
        capacity = -(-slots // GROWTH) * GROWTH
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                new = old.new_zeros(old.shape[0], capacity, *old.shape[2:])
                new[:, : old.shape[1]] = old
                buffers[layer] = new

    def write(
        self, layer: int, rows: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Scatters keys and values [..., H_kv, D] of one layer to (rows, slots) [...]; `lengths` is left alone."""
        self.keys[layer][rows, slots] = keys.detach()
        self.values[layer][rows, slots] = values.detach()

    def block_writer(
        self, slots: int, kv_length: int
    ) -> Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """How a forward puts its block behind every row's context.

        Args:
            slots (`int`): slots K of the block.
            kv_length (`int`): context and block of the longest row; room for it must be reserved.

        Returns:
            `join(layer, keys [R, K, H_kv, D], values) -> (keys [R, kv_length, H_kv, D], values)`.
        """
        start = kv_length - slots
        if not self.uniform:
            block_slots = self.lengths[:, None] + torch.arange(slots, device=self.lengths.device)
            rows = torch.arange(self.num_rows, device=block_slots.device)[:, None].expand_as(block_slots)

        def join(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if self.uniform:
                self.keys[layer][:, start:kv_length] = keys.detach()
                self.values[layer][:, start:kv_length] = values.detach()
            else:
                self.write(layer, rows, block_slots, keys, values)
            return self.keys[layer][:, :kv_length], self.values[layer][:, :kv_length]

        return join

    def keep(self, index: torch.Tensor | list[int]) -> None:
        """Keeps only the rows in `index` [R'], in that order; repeated rows are copied."""
        index = torch.as_tensor(index, device=self.lengths.device, dtype=torch.long)
        self.keys = [keys.index_select(0, index) for keys in self.keys]
        self.values = [values.index_select(0, index) for values in self.values]
        self.lengths = self.lengths.index_select(0, index)
        self.rows = self.rows.index_select(0, index)


__all__ = ["DraftCache"]
