"""What a call has produced so far: tokens per row, scores, the stream, and the final output."""

import torch
from transformers.generation.streamers import BaseStreamer

from ..ops import on_device


class Collector:
    """
    Args:
        prompt (`torch.LongTensor` of shape `(batch, P)`): Padded prompts.
        pad_token (`int`): Fills rows behind their end.
        streamer (`BaseStreamer`, *optional*): Gets exactly the calls that plain `generate()` makes.
        keep_scores, keep_logits (`bool`): Whether to collect processed scores and raw logits.
        capacity (`int`): Columns of the id buffer; 0 when no processor or criterion reads prefixes.
    """

    def __init__(self, prompt, pad_token: int, streamer: BaseStreamer | None, keep_scores, keep_logits, capacity: int):
        self.prompt, self.pad_token, self.streamer = prompt, pad_token, streamer
        self.tokens: list[list[int]] = [[] for _ in range(prompt.shape[0])]
        self.scores: list[torch.Tensor] | None = [] if keep_scores else None
        self.logits: list[torch.Tensor] | None = [] if keep_logits else None
        self.ids = None
        if capacity:
            self.ids = prompt.new_full((prompt.shape[0], capacity), pad_token)
            self.ids[:, : prompt.shape[1]] = prompt
        self._streamed = 0

    def write_ids(self, rows: list[int], tokens: torch.Tensor) -> None:
        """Writes `(R, K)` tokens behind what each row has, for processors and criteria that read prefixes."""
        if self.ids is None:
            return
        starts = on_device([self.prompt.shape[1] + len(self.tokens[row]) for row in rows], self.ids.device)
        columns = starts[:, None] + torch.arange(tokens.shape[1], device=self.ids.device)
        index = on_device(rows, self.ids.device)[:, None].expand_as(columns)
        self.ids[index, columns] = tokens.to(self.ids.device)

    def add_scores(self, rows: list[int], kept: list[int], starts: list[int], scores, logits) -> None:
        """
        Files the scores of committed tokens under their index; call before [`add_tokens`].

        Args:
            rows, kept (`list[int]`): Running rows and how many tokens each gets.
            starts (`list[int]`): Where each row's positions begin in the tensors below.
            scores, logits (`torch.Tensor` of shape `(N, V)`): Processed and raw.
        """
        for store, values in ((self.scores, scores), (self.logits, logits)):
            if store is None:
                continue
            for row, count, start in zip(rows, kept, starts):
                for offset in range(count):
                    index = len(self.tokens[row]) + offset
                    while len(store) <= index:
                        # rows that are already finished have no scores: zeros
                        store.append(values.new_zeros(self.prompt.shape[0], values.shape[1], dtype=torch.float32))
                    store[index][row] = values[start + offset]

    def add_tokens(self, rows: list[int], tokens: list[list[int]]) -> None:
        for row, new in zip(rows, tokens):
            self.tokens[row].extend(new)

    def stream(self, running: list[int]) -> None:
        """Streams every step that all running rows have reached, one `(batch,)` vector a step."""
        if self.streamer is None:
            return
        lengths = [len(self.tokens[row]) for row in running] or [max(map(len, self.tokens))]
        for index in range(self._streamed, min(lengths)):
            self.streamer.put(torch.tensor(self._column(index), dtype=self.prompt.dtype))
        self._streamed = max(self._streamed, min(lengths))

    def _column(self, index: int) -> list[int]:
        return [row[index] if index < len(row) else self.pad_token for row in self.tokens]

    def truncate(self, length: int) -> None:
        """Drops everything behind `length` generated tokens."""
        for row in self.tokens:
            del row[length:]
        for store in (self.scores, self.logits):
            if store is not None:
                del store[length:]

    def sequences(self) -> torch.Tensor:
        """`(batch, P + longest)`: prompts and generated tokens, padded on the right."""
        longest = max(map(len, self.tokens))
        rows = [row + [self.pad_token] * (longest - len(row)) for row in self.tokens]
        return torch.cat([self.prompt, torch.tensor(rows, dtype=self.prompt.dtype, device=self.prompt.device)], dim=1)
