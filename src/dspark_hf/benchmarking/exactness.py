"""How far greedy answers are from the target's best choice, token by token.

In half precision a target disagrees with itself: where two tokens are nearly tied, a forward of another width rounds
the other way. So "identical or not" says little. A deficit says how wrong a token is: the target reads prompt and
answer in one forward (teacher-forced), and the token's logit is compared with the largest one at its place. Tokens
that are the best choice have deficit 0, flipped near-ties a few units in the last place, and a wrong token a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

_CHUNK = 64  # positions whose logits are held in float32 at once


@torch.no_grad()
def deficits(target: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Largest logit minus the committed token's, at every token of a greedy answer.

    Args:
        target (`PreTrainedModel`): the model that is to have chosen them.
        prompt (`Sequence[int]`): the prompt's token ids, without padding.
        answer (`Sequence[int]`): the answer's.

    Returns:
        `torch.Tensor` [len(answer)], float32: 0 where the token is the target's best choice, never negative.

    Raises:
        `ValueError`: prompt or answer is empty.
    """
    if not len(prompt) or not len(answer):
        raise ValueError("`prompt` and `answer` must hold at least one token each.")
    ids = torch.tensor([[*prompt, *answer]], device=target.device)
    logits = target(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    tokens = ids[0, len(prompt) :].to(logits.device)
    found = []
    for start in range(0, len(tokens), _CHUNK):
        part = logits[start : start + _CHUNK].float()
        found.append(part.max(-1).values - part.gather(-1, tokens[start : start + _CHUNK, None])[:, 0])
    return torch.cat(found).cpu()


class DeficitTable:
    """Deficits of many answers; equal answers to equal prompts are looked at once.

    Args:
        target (`PreTrainedModel`): see [`deficits`].
    """

    def __init__(self, target: PreTrainedModel):
        self.target = target
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}

    def statistics(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, Any]:
        """What the deficits of (prompt, answer) pairs amount to.

        Returns:
            `dict`: `tokens`, the share that is `not_best`, and of all tokens the `mean`, `p99` and `max` deficit.
        """
        found = []
        for prompt, answer in pairs:
            key = (tuple(prompt), tuple(answer))
            if key not in self._known:
                self._known[key] = deficits(self.target, prompt, answer)
            found.append(self._known[key])
        values = torch.cat(found)
        return {
            "tokens": len(values),
            "not_best": float((values > 0).float().mean()),
            "mean": float(values.mean()),
            "p99": float(values.quantile(0.99)),
            "max": float(values.max()),
        }


__all__ = ["DeficitTable", "deficits"]
