"""The Markov head as a `LogitsProcessor`, so that it can sit in any Transformers sampling loop."""

import torch
from transformers import LogitsProcessor

from ..modeling_dspark import DSparkDraftModel


class DSparkLogitsProcessor(LogitsProcessor):
    """
    Adds the sequential head's bias B(x_{k-1}, ·) to a slot's base logits (eq. 4, 5).

    With a vanilla head the bias depends on the last token alone. Gated and rnn heads also read the slot's hidden state:
    announce each block with [`begin_block`], after which the calls are its slots in order.

    Args:
        draft (`DSparkDraftModel`): A draft with a Markov head.

    Raises:
        ValueError: if the draft has no Markov head.
    """

    def __init__(self, draft: DSparkDraftModel):
        if draft.markov_head is None:
            raise ValueError("this draft has no Markov head (`markov_rank` is 0), so there is no bias to add")
        self.head = draft.markov_head
        self.target_ids = draft.draft_to_target
        self.needs_hidden = draft.config.markov_head_type != "vanilla"
        self._hidden: torch.Tensor | None = None
        self._state: torch.Tensor | None = None
        self._slot = 0

    def begin_block(self, hidden: torch.Tensor) -> None:
        """
        Starts a block.

        Args:
            hidden (`torch.Tensor` of shape `(R, K, H)`): The draft's hidden states of its slots.
        """
        self._hidden, self._state, self._slot = hidden, self.head.initial_state(hidden), 0

    @torch.no_grad()
    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(R, length)`): Target ids; the last one is x_{k-1}.
            scores (`torch.Tensor` of shape `(R, V_draft)` or `(R, V)`): Base logits. Over the target's vocabulary,
                tokens that a reduced draft vocabulary lacks become minus infinity.

        Returns:
            `torch.Tensor`, shaped as `scores`.
        """
        hidden = scores.new_zeros(scores.shape[0], 0)
        if self.needs_hidden:
            if self._hidden is None or self._slot >= self._hidden.shape[1]:
                raise ValueError("a gated or rnn head reads hidden states: call `begin_block(hidden)` for every block")
            hidden = self._hidden[:, self._slot]
            self._slot += 1
        bias, _, self._state = self.head.step(input_ids[:, -1], hidden, self._state)
        bias = bias.to(scores.dtype)
        if self.target_ids is None or scores.shape[-1] == bias.shape[-1]:
            return scores + torch.nn.functional.pad(bias, (0, scores.shape[-1] - bias.shape[-1]))
        allowed = torch.full_like(scores, float("-inf"))
        allowed[:, self.target_ids] = scores[:, self.target_ids] + bias
        return allowed
