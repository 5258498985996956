"""Target features of rows seen before, in memory.

A small target on a CPU spends a quarter of a training step on features that were the same the epoch before. Up to a
limit in bytes they are kept here: taps, final states, and the logsumexp of the target's logits where a response token
follows. The last is what a draft with a reduced vocabulary needs to learn from its own columns of the head alone; the
other columns only ever enter through that sum.

With several processes each keeps the rows that it saw, and rows move between them from epoch to epoch.
"""

import torch

from .features import TargetFeatures, TargetHead

_CHUNK_ELEMENTS = 2**24


class FeatureCache:
    """`TargetFeatures` that remembers.

    Args:
        features (`TargetFeatures`): what computes them.
        max_bytes (`int`): how much to keep; rows beyond it are computed anew each time.
        normalisers (`bool`): also compute and keep the logsumexp of the target's logits.

    Attributes:
        bytes (`int`): kept so far.
    """

    def __init__(self, features: TargetFeatures, max_bytes: int, normalisers: bool):
        self.features, self.max_bytes, self.normalisers = features, max_bytes, normalisers
        self.bytes = 0
        self._rows: dict[object, tuple[torch.Tensor, ...]] = {}

    @torch.no_grad()
    def __call__(
        self,
        keys: list,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        lengths: list[int],
        position_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Features of a batch; the target runs on those rows only that are not there yet.

        Args:
            keys (`list`): one hashable name per row, the same whenever the row comes.
            input_ids, loss_mask (`torch.Tensor` [R, T]): the rows.
            lengths (`list[int]`): tokens of each row before its padding.
            position_ids (`torch.Tensor` [R, T], *optional*): for packed rows.

        Returns:
            Taps [R, T, taps·H_target] and final states [R, T, H_target], 0 behind the rows' ends, and with
            `normalisers` the logsumexp [R, T] (float32), 0 where no response token follows.
        """
        kept = [self._rows.get(key) for key in keys]
        missing = [row for row, found in enumerate(kept) if found is None]
        if missing:
            width = max(lengths[row] for row in missing)
            ids, mask = input_ids[missing, :width], loss_mask[missing, :width]
            computed = self.features(ids, None if position_ids is None else position_ids[missing, :width])
            if self.normalisers:
                computed = (*computed, normalisers(self.features.head, computed[1], mask))
            for place, row in enumerate(missing):
                kept[row] = self._keep(keys[row], [part[place, : lengths[row]] for part in computed])
        return tuple(
            torch.stack([_padded(part, input_ids.shape[1], input_ids.device) for part in parts])
            for parts in zip(*kept)
        )

    def _keep(self, key, parts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        size = sum(part.numel() * part.element_size() for part in parts)
        if self.bytes + size > self.max_bytes:
            return tuple(parts)
        self.bytes += size
        # Copies: a slice would keep the whole batch alive.
        self._rows[key] = tuple(part.to("cpu", copy=True) for part in parts)
        return self._rows[key]


@torch.no_grad()
def normalisers(head: TargetHead, hidden: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """logsumexp [R, T] of the target's logits after each token that a response token follows; 0 elsewhere.

    Args:
        head (`TargetHead`): the target's head.
        hidden (`torch.Tensor` [R, T, H_target]): final states.
        loss_mask (`torch.Tensor` [R, T]): which tokens the target wrote.
    """
    predicts = torch.nn.functional.pad(loss_mask[:, 1:], (0, 1)).bool()
    sums = torch.zeros(loss_mask.shape, device=hidden.device)
    chunk = max(1, _CHUNK_ELEMENTS // head.vocab_size)
    states = hidden[predicts].split(chunk)
    if states[0].shape[0]:
        sums[predicts] = torch.cat([head(part).logsumexp(-1) for part in states])
    return sums


def _padded(part: torch.Tensor, length: int, device: torch.device) -> torch.Tensor:
    """`part` [t, ...] with zeros up to [length, ...], on `device`."""
    padded = torch.zeros(length, *part.shape[1:], dtype=part.dtype, device=device)
    padded[: part.shape[0]] = part
    return padded


__all__ = ["FeatureCache", "normalisers"]
