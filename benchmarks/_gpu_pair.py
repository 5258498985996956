"""Random pairs of true shapes, and acceptance forced by a profile: nothing is downloaded, every kernel is the real one.

Speed depends on shapes, not on values, except through how many drafted tokens are accepted. So the weights are random,
the draft runs its real forward with its real heads, and only its tokens are then replaced by right and wrong ones in
the proportion of a given profile. To know what is right without asking the target, the random target is made
predictable: its layers add little to the residual stream and its head is its embedding, so the greedy continuation of
any text is its last token, again and again, by a margin that no rounding touches.

Forced acceptance says nothing about real drafts. It says what a round costs, and what a draft of that acceptance gives.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.modeling_dspark import DraftBlock

_RESIDUAL_SCALE = 0.02  # of what layers add, against embeddings of size 1
_PLANNED_ROUNDS = 512  # drawn right and wrong slots; they start over after so many rounds

_QWEN3 = {
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
_DRAFT = {"num_hidden_layers": 5, "block_size": 7, "markov_rank": 256, "target_layer_ids": [1, 9, 17, 25, 33]}


@dataclass(frozen=True)
class Shape:
    """Sizes of a pair.

    Attributes:
        name (`str`): what the report calls it.
        target (`dict`): fields of its `Qwen3Config`.
        draft (`dict`): fields of its `DSparkConfig` that do not follow from the target's.
    """

    name: str
    target: dict[str, Any]
    draft: dict[str, Any]


# Qwen3-4B and 8B with the published five-layer drafts (block 7, Markov rank 256, confidence head); and one for tests.
SHAPES = {
    "4b": Shape(
        "Qwen3-4B",
        {**_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
        {**_DRAFT, "mask_token_id": 151669},
    ),
    "8b": Shape(
        "Qwen3-8B",
        {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
        {**_DRAFT, "mask_token_id": 151669},
    ),
    "tiny": Shape(
        "tiny",
        {
            **_QWEN3,
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": False,
        },
        {"num_hidden_layers": 2, "block_size": 7, "markov_rank": 8, "target_layer_ids": [0, 3], "mask_token_id": 511},
    ),
}


class ForcedDraft(DSparkDraftModel):
    """Drafts with all its layers and heads, then proposes what the profile wants. One `generate()` call at a time.

    Attributes:
        marks (`list[tuple[float, int]]`): clock reading and rows of every draft since [`force`]; two neighbours of the
            same rows lie one round apart.
    """

    def force(self, profile: list[float], rows: int, seed: int) -> ForcedDraft:
        """Draw which slots of the coming rounds are right.

        Args:
            profile (`list[float]`): probability that slot k is right, given that all before it were.
            rows (`int`): most rows R of a call.
            seed (`int`): of the draws.
        """
        slots = self.config.num_draft_tokens
        if len(profile) != slots or not all(0.0 <= share <= 1.0 for share in profile):
            raise ValueError(f"--profile: {slots} probabilities are needed, one for each drafted slot, got {profile}")
        generator = torch.Generator().manual_seed(seed)
        shares = torch.tensor(profile)
        wrong = torch.rand(_PLANNED_ROUNDS, rows, slots, generator=generator) >= shares
        self.wrong = wrong.long().to(self.device)
        self.forced_confidence = torch.logit(shares, eps=1e-4).to(self.device)
        self.marks: list[tuple[float, int]] = []
        return self

    def draft_block(self, context_hidden, anchor_ids, position_ids, *args, **kwargs) -> DraftBlock:
        block = super().draft_block(context_hidden, anchor_ids, position_ids, *args, **kwargs)
        rows, width = block.tokens.shape
        wrong = self.wrong[len(self.marks) % _PLANNED_ROUNDS, :rows, :width]
        self.marks.append((time.perf_counter(), rows))
        # Right is the anchor again; the token behind it is wrong.
        tokens = (anchor_ids.to(wrong.device)[:, None] + wrong).remainder(self.config.vocab_size)
        return DraftBlock(tokens, block.logits, self.forced_confidence[:width].expand(rows, width))


def expected_tau(profile: list[float]) -> float:
    """Tokens per row and round that a profile gives when every slot is verified, the target's own included."""
    total, alive = 1.0, 1.0
    for share in profile:
        alive *= share
        total += alive
    return total


def build_pair(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> tuple[PreTrainedModel, Any]:
    """Target and [`ForcedDraft`] of a shape, created on `device` in `dtype`, with random weights."""
    torch.manual_seed(seed)
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(Qwen3Config(**shape.target, **special), dtype=dtype)
        draft = ForcedDraft._from_config(draft_config(shape), dtype=dtype)
    make_predictable(target)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    for model in (target, draft):
        model.eval().requires_grad_(False)
    return target, draft


def draft_config(shape: Shape) -> DSparkConfig:
    """Configuration of the draft of a shape: the target's own layers, fewer of them, with both heads."""
    target = shape.target
    copied = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    copied += ("vocab_size", "max_position_embeddings", "rope_parameters")
    return DSparkConfig(
        **{name: target[name] for name in copied},
        **shape.draft,
        num_target_layers=target["num_hidden_layers"],
        stores_embedding=False,
        stores_head=False,
    )


@torch.no_grad()
def make_predictable(target: PreTrainedModel) -> None:
    """Turn a random target into one that repeats its last token; shapes and kernels stay what they were."""
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.mul_(_RESIDUAL_SCALE)
        layer.mlp.down_proj.weight.mul_(_RESIDUAL_SCALE)
    embedding = target.get_input_embeddings().weight
    embedding.normal_()
    head = target.get_output_embeddings().weight
    if head is not embedding:
        head.copy_(embedding)


def check_predictable(target: PreTrainedModel, prompt: torch.Tensor, answer: torch.Tensor) -> None:
    """Raises `RuntimeError` unless `answer` [R, P + N] continues `prompt` [R, P] with each row's last token."""
    if not bool((answer[:, prompt.shape[1] :] == prompt[:, -1:]).all()):
        raise RuntimeError(
            f"the random {type(target).__name__} does not repeat its last token, so acceptance cannot be forced: is "
            "its head its embedding, and is what its layers add small?"
        )
