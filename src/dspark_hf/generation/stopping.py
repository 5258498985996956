"""Stopping, token by token inside a block.

Plain `generate()` asks its criteria after every token. A round commits several, so each newly committed prefix is asked
in order and the row is cut at the first hit. End-of-sequence ids and the length limit are checked on host integers; any
other criterion is called with the true prefixes of the full batch.
"""

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria


class StopRules:
    """
    Args:
        criteria (`StoppingCriteriaList`): What `generate()` built.
        prompt_length (`int`): Padded prompt length, with which `max_length` is counted.
        max_length (`int`): The limit of the generation config, used when no criterion carries one.
    """

    def __init__(self, criteria: StoppingCriteriaList, prompt_length: int, max_length: int):
        self.prompt_length = prompt_length
        self.eos: set[int] = set()
        limits = [max_length]
        self.others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos.update(torch.as_tensor(criterion.eos_token_id).flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:
                limits.append(criterion.max_length)
            else:
                self.others.append(criterion)
        # plain generate() always makes one token before it asks
        self.max_new = max(1, min(limits) - prompt_length)

    @property
    def needs_prefixes(self) -> bool:
        return len(self.others) > 0

    def budget(self, generated: int) -> int:
        """Tokens that a row with `generated` tokens may still get."""
        return self.max_new - generated

    def cut(
        self,
        tokens: list[list[int]],
        generated: list[int],
        rows: list[int],
        ids: torch.Tensor | None,
        scores: tuple | None,
    ) -> tuple[list[int], list[bool]]:
        """
        How many of the new tokens each row keeps, and whether it is finished.

        Args:
            tokens (`list[list[int]]`): New tokens of each running row.
            generated (`list[int]`): Tokens that the row had before.
            rows (`list[int]`): Row numbers in the call's batch.
            ids (`torch.LongTensor` of shape `(batch, capacity)`): Holds the new tokens already; read only when other
                criteria exist.
            scores (`tuple`, *optional*): Collected scores, handed to the criteria as plain `generate()` does.
        """
        kept, finished = [], []
        for new, count in zip(tokens, generated):
            keep, done = min(len(new), self.budget(count)), False
            for index in range(keep):
                if new[index] in self.eos:
                    keep, done = index + 1, True
                    break
            kept.append(keep)
            finished.append(done or count + keep >= self.max_new)
        if self.others:
            self._ask_others(kept, finished, generated, rows, ids, scores)
        return kept, finished

    def _ask_others(self, kept, finished, generated, rows, ids, scores) -> None:
        """Lowers `kept` to the first prefix that a criterion stops; one call per distinct length."""
        pending: dict[int, list[int]] = {}
        for slot, (keep, count) in enumerate(zip(kept, generated)):
            for index in range(keep):
                pending.setdefault(count + index + 1, []).append(slot)
        stopped: set[int] = set()
        for count in sorted(pending):
            slots = [slot for slot in pending[count] if slot not in stopped]
            if not slots:
                continue
            seen = scores[:count] if scores is not None else None
            done = self.others(ids[:, : self.prompt_length + count], seen).tolist()
            for slot in slots:
                if done[rows[slot]]:
                    stopped.add(slot)
                    kept[slot] = count - generated[slot]
                    finished[slot] = True
