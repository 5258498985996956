"""A tiny target with a tokenizer and a draft that is good on any prompt, as folders: for documentation and examples.

The target's next token depends almost only on the one before it: embedding and head are those of the random targets,
and what its layers add is scaled down. The draft's Markov head holds just that dependence (W1 the normed embedding, W2
the head), and its base logits are zero. So it is accepted most of the time without any training, wherever a program
takes the prompts from, and both load with `from_pretrained` like any other pair.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from byte_tokenizer import byte_tokenizer
from planted import random_draft
from targets import HIDDEN_SIZE, build

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}: {{ message['content'] }}; {% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
LAYERS_ADD = 0.003
CONFIDENCE = 0.85


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Writes `target` and `draft` into `folder` and returns their paths."""
    target = copy.deepcopy(build("qwen3", "sdpa"))
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.mul_(LAYERS_ADD)
            layer.mlp.down_proj.weight.mul_(LAYERS_ADD)
        # Taps in the middle, the whole vocabulary, query and key norms: what both serving engines can run.
        draft = random_draft(target, markov_rank=HIDDEN_SIZE, target_layer_ids=[0, 2])
        draft.norm.weight.zero_()
        draft.markov_head.markov_w1.weight.copy_(target.model.norm(target.get_input_embeddings().weight))
        draft.markov_head.markov_w2.weight.copy_(target.get_output_embeddings().weight)
        draft.confidence_head.proj.weight.zero_()
        draft.confidence_head.proj.bias.fill_(torch.logit(torch.tensor(CONFIDENCE)).item())
    target.save_pretrained(folder / "target")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"
