"""The two heads that turn a parallel draft into a coherent one: Markov head and confidence head.

The backbone predicts all slots of a block at once, so slot k cannot know which token slot k-1 will take, and proposals
drift apart along the block. The *Markov head* (arXiv 2607.05147, section 3.2) repairs that sequentially and cheaply:
token x_k is drawn from softmax(U_k + B(x_{k-1}, ·)) (eq. 4), where the bias B has low rank r:

- vanilla: B = W2 · W1[x_{k-1}] (eq. 5);
- gated: the embedding e = W1[x_{k-1}] is first multiplied by sigmoid(G · [h_k; e]);
- rnn: a state s, zero at the start of a block, is carried along (eq. 6): with (g, c, o) = J · [s; e; h_k], the bias is
  W2 · tanh(o) and the next state is sigmoid(g) · s + (1 - sigmoid(g)) · tanh(c).

The *confidence head* (eq. 7) estimates c_k = sigmoid(w · [h_k; e] + b), the probability that slot k is accepted given
that all slots before it were. It reads x_{k-1} but never x_k, which is what keeps scheduling by it lossless.

W1 is indexed by *target* token ids; W2 gives *draft* vocabulary logits. Tensor names follow the official checkpoints.
"""

import torch
from torch import nn

from .configuration_dspark import DSparkConfig


class MarkovHead(nn.Module):
    """Low-rank bias on a slot's logits, given the token before it.

    Args:
        config (`DSparkConfig`): `markov_rank` r must be positive.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.head_type = config.markov_head_type
        self.rank = rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.head_type == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.head_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def initial_state(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """State before the first slot of a block.

        Args:
            hidden (`torch.Tensor` [..., K, H]): draft hidden states, for shape, device and dtype.

        Returns:
            Zeros [..., r] for the rnn head, `None` for the others.
        """
        if self.head_type != "rnn":
            return None
        return hidden.new_zeros(*hidden.shape[:-2], self.rank)

    def step(
        self, prev_ids: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Bias for one slot.

        Args:
            prev_ids (`torch.Tensor` [R]): target ids of the tokens before the slot.
            hidden (`torch.Tensor` [R, H]): the slot's draft hidden states h_k.
            state (`torch.Tensor` [R, r], *optional*): what the previous step returned, or `initial_state`.

        Returns:
            The bias [R, V_draft], the raw embedding W1[x_{k-1}] [R, r] (input of the confidence head), the next state.
        """
        embedding = self.markov_w1(prev_ids)
        latent, state = self._latent(embedding, hidden, state)
        return self.markov_w2(latent), embedding, state

    def advance(self, prev_ids: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Next state [R, r] after a slot that needs no bias; arguments as in `step`."""
        return self._latent(self.markov_w1(prev_ids), hidden, state)[1]

    def bias_teacher_forced(self, prev_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Biases of whole blocks when all tokens are known, as in training.

        Args:
            prev_ids (`torch.Tensor` [..., K]): target ids of the token before each slot.
            hidden (`torch.Tensor` [..., K, H]): draft hidden states.

        Returns:
            Biases [..., K, V_draft].
        """
        embeddings = self.markov_w1(prev_ids)
        if self.head_type != "rnn":
            latent, _ = self._latent(embeddings, hidden, None)
            return self.markov_w2(latent)
        state, latents = self.initial_state(hidden), []
        for embedding, slot_hidden in zip(embeddings.unbind(-2), hidden.unbind(-2), strict=True):
            latent, state = self._latent(embedding, slot_hidden, state)
            latents.append(latent)
        return self.markov_w2(torch.stack(latents, dim=-2))

    def _latent(
        self, embedding: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rank-r vector that W2 projects, and the next state."""
        if self.head_type == "vanilla":
            return embedding, None
        if self.head_type == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1)))
            return gate * embedding, None
        joint = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        # The output chunk was computed from the old state; the new one first counts at the next slot.
        return torch.tanh(output), gate * state + (1.0 - gate) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    """Log-odds that a slot's proposal is accepted, given that the slots before it were.

    Args:
        config (`DSparkConfig`): `confidence_head_with_markov` decides whether the Markov embedding is an input.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: torch.Tensor, markov_embedding: torch.Tensor | None) -> torch.Tensor:
        """Raw confidence logits; their sigmoid is c_k, before calibration.

        Args:
            hidden (`torch.Tensor` [..., H]): draft hidden states after the final norm.
            markov_embedding (`torch.Tensor` [..., r], *optional*): W1[x_{k-1}]; not read by a head without Markov.

        Returns:
            Logits [...].
        """
        features = torch.cat([hidden, markov_embedding], dim=-1) if self.with_markov else hidden
        return self.proj(features).squeeze(-1)


__all__ = ["MarkovHead", "ConfidenceHead"]
