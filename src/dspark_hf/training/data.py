"""Training rows from JSONL files of the target's own responses.

A draft learns what *its target* would say next, so the text must be the target's (arXiv 2607.05147, section 3.3):
`dspark-hf prepare` writes such files. Every line is an object with `prompt_ids` and `response_ids`, token ids of the
target; other keys are ignored. Only response tokens are supervised.

Sequences differ in length, and a batch of few long and many short ones is mostly padding. Packing puts several
sequences into one row; positions start again at 0 in each, which is how target and draft tell them apart.
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

_OPEN_BINS = 64


class ResponseRows(Dataset):
    """Rows of one or several sequences, in memory as 32-bit ids.

    Args:
        files (`list` of `str` or `Path`): JSONL files.
        vocab_size (`int`): ids must lie below it.
        max_length (`int`): tokens per row; longer sequences are cut at the end.
        packing (`bool`): put several sequences into a row.
        seed (`int`): which sequences share a row.

    Attributes:
        dropped (`int`): sequences without two response tokens inside `max_length`, which hold no anchor.
        num_sequences, num_tokens, num_response_tokens (`int`): what is there, after cutting.

    Raises:
        ValueError: naming file and line, when a file is damaged or holds something else.
        OSError: when a file cannot be read.
    """

    def __init__(
        self,
        files: Iterable[str | Path],
        *,
        vocab_size: int,
        max_length: int = 2048,
        packing: bool = False,
        seed: int = 0,
    ):
        if max_length < 8:
            raise ValueError(f"`max_length` must be at least 8 tokens, got {max_length}.")
        tokens, starts, prompts, self.dropped = [], [0], [], 0
        for file in files:
            for prompt_ids, response_ids in read_responses(file, vocab_size):
                sequence = (prompt_ids + response_ids)[:max_length]
                if len(sequence) < len(prompt_ids) + 2:
                    self.dropped += 1
                    continue
                tokens.append(np.asarray(sequence, dtype=np.int32))
                starts.append(starts[-1] + len(sequence))
                prompts.append(len(prompt_ids))
        if not tokens:
            raise ValueError(f"There is no sequence with a response in {', '.join(map(str, files))}.")
        self._tokens = np.concatenate(tokens)
        self._starts, self._prompts = np.asarray(starts), np.asarray(prompts)
        lengths = np.diff(self._starts)
        self.num_sequences, self.num_tokens = len(prompts), len(self._tokens)
        self.num_response_tokens = int(self.num_tokens - self._prompts.sum())
        self._rows = pack(lengths, max_length, seed) if packing else [[number] for number in range(len(prompts))]
        self.packing = packing

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict:
        """Row number and its sequences, each a pair of ids [T] and length of the prompt."""
        sequences = [
            (self._tokens[self._starts[number] : self._starts[number + 1]], int(self._prompts[number]))
            for number in self._rows[index]
        ]
        return {"row": index, "sequences": sequences, "packed": self.packing}

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """How often each token occurs [V], prompts included (float64)."""
        return torch.from_numpy(np.bincount(self._tokens, minlength=vocab_size)).double()


def read_responses(file: str | Path, vocab_size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Pairs of prompt ids and response ids, one a line.

    Raises:
        ValueError: naming file and line.
    """
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{where} is not valid JSON ({error}). If writing it was interrupted, run the same "
                    "`dspark-hf prepare` again: it repairs and completes the file."
                ) from None
            if not isinstance(row, dict) or "prompt_ids" not in row or "response_ids" not in row:
                raise ValueError(f"{where} has no `prompt_ids` and `response_ids`; `dspark-hf prepare` makes them.")
            for name in ("prompt_ids", "response_ids"):
                ids = row[name]
                if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < vocab_size for id in ids):
                    raise ValueError(f"{where}: `{name}` must be a list of token ids from 0 to {vocab_size - 1}.")
            yield row["prompt_ids"], row["response_ids"]


def pack(lengths: Sequence[int], max_length: int, seed: int = 0) -> list[list[int]]:
    """Sequences sharing rows of at most `max_length` tokens: first fit, in shuffled order.

    Args:
        lengths (sequence of `int`): tokens of each sequence, at most `max_length`.
        max_length (`int`): tokens per row.
        seed (`int`): of the order.

    Returns:
        Sequence numbers of each row.
    """
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    rows, open_rows = [], []  # open rows: [free tokens, members]
    for number in order:
        length = int(lengths[number])
        row = next((row for row in open_rows if row[0] >= length), None)
        if row is None:
            row = [max_length, []]
            rows.append(row[1])
            open_rows.append(row)
            if len(open_rows) > _OPEN_BINS:
                open_rows.remove(min(open_rows, key=lambda row: row[0]))
        row[0] -= length
        row[1].append(number)
    return rows


def collate(items: list[dict]) -> dict[str, torch.Tensor]:
    """A batch, padded on the right.

    Returns:
        `input_ids` [R, T], `loss_mask` [R, T] (bool), `rows` [R] (row numbers), `lengths` [R] (tokens of
        each row before its padding), and for packed rows `position_ids`
        and `segment_ids` [R, T]. Padding continues the last sequence, where causal attention makes it harmless.
    """
    lengths = [sum(len(ids) for ids, _ in item["sequences"]) for item in items]
    width = max(lengths)
    shape = (len(items), width)
    input_ids, loss_mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    position_ids, segment_ids = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for row, item in enumerate(items):
        start = 0
        for segment, (ids, prompt_length) in enumerate(item["sequences"]):
            end = start + len(ids)
            input_ids[row, start:end] = torch.from_numpy(ids.astype(np.int64))
            loss_mask[row, start + prompt_length : end] = True
            position_ids[row, start:] = torch.arange(width - start)
            segment_ids[row, start:] = segment
            start = end
    batch = {
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "rows": torch.tensor([item["row"] for item in items]),
        "lengths": torch.tensor(lengths),
    }
    if any(item["packed"] for item in items):
        batch |= {"position_ids": position_ids, "segment_ids": segment_ids}
    return batch


def row_uniforms(rows: torch.Tensor, length: int, *, seed: int, step: int) -> torch.Tensor:
    """Random numbers [R, length] that depend on seed, step and row number only.

    The anchors of a row are then the same whatever batch or process the row is in, and after a resume.
    """
    drawn = []
    for row in rows.tolist():
        generator = torch.Generator().manual_seed(((seed * 1_000_003 + step) * 1_000_003 + row) % 2**63)
        drawn.append(torch.rand(length, generator=generator))
    return torch.stack(drawn)


__all__ = ["ResponseRows", "collate", "pack", "read_responses", "row_uniforms"]
