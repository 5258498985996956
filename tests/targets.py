"""Tiny random float32 targets for the runtime tests, one per architecture the runtime must serve.

Every target has vocabulary 96, hidden size 64 and about four layers, is built from a fixed seed and cached per process.
The weights are drawn much wider than usual (standard deviation 0.3), so that attention matters and greedy output
neither repeats one token nor hangs on a near-tie: a wrong mask, position or cache slot then changes the output. Sliding
windows are 9 slots, so 64 new tokens leave them several times over.

`plain(target, prompt)` is the reference of every exactness test: one unpadded prompt, `generate()` without a draft.
"""

from __future__ import annotations

import copy
import functools

import torch
import transformers
from transformers import GenerationConfig

VOCAB_SIZE = 96
HIDDEN_SIZE = 64
PAD_TOKEN_ID = 0
NUM_LAYERS = 4
WINDOW = 9

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": PAD_TOKEN_ID,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SLIDING_FULL = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
_LINEAR = {
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * (NUM_LAYERS // 2),
}

# name -> (configuration class, model class, what differs from _COMMON)
BATCHED = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"head_dim": 16, "num_experts": 4, "decoder_sparse_step": 1, **_MOE},
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"head_dim": 16, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 10.0,
            "final_logit_softcapping": 30.0,
            "layer_types": _SLIDING_FULL,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "layer_types": _SLIDING_FULL},
    ),
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": WINDOW,
            "layer_types": _SLIDING_FULL,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4_kv_shared": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": WINDOW,
            "layer_types": _SLIDING_FULL,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": _SLIDING_FULL,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {"head_dim": 16}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": None}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", {"sliding_window": WINDOW, "layer_types": _SLIDING_FULL}),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            **_MOE,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"head_dim": 16, "sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {}),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 2.0,
            "logits_scaling": 1.5,
            "residual_multiplier": 0.8,
            "attention_multiplier": 0.25,
        },
    ),
    "cohere2": (
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {"sliding_window": WINDOW, "logit_scale": 1.0, "layer_types": _SLIDING_FULL},
    ),
}

# Their state cannot be lowered to a length, so they must take another route or refuse: never a wrong answer.
RECURRENT = {
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {"num_experts": 4, "shared_expert_intermediate_size": 32, **_LINEAR, **_MOE},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _LINEAR),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"] * (NUM_LAYERS // 2)},
    ),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"state_size": 8}),
    "deepseek_v4": (
        "DeepseekV4Config",
        "DeepseekV4ForCausalLM",
        {
            "num_key_value_heads": 1,
            "head_dim": 32,
            "partial_rotary_factor": 0.25,
            "q_lora_rank": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "hc_mult": 2,
            "sliding_window": WINDOW,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 4,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * (NUM_LAYERS // 2),
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "mlp_layer_types": ["moe"] * NUM_LAYERS,
        },
    ),
}

ALL = {**BATCHED, **RECURRENT}


@functools.cache
def build(name: str, attn: str = "eager", seed: int = 0, **changes) -> torch.nn.Module:
    """Returns the tiny target `name`. The same arguments return the same object, so treat it as read-only.

    Args:
        name: a key of `BATCHED` or `RECURRENT`.
        attn: attention implementation, `"eager"` or `"sdpa"`.
        seed: of the weights.
        changes: configuration fields that differ (hashable values only).
    """
    config_class, model_class, differences = ALL[name]
    fields = {**_COMMON, **copy.deepcopy(differences), **changes}
    config = getattr(transformers, config_class)(**fields)
    config._attn_implementation = attn
    torch.manual_seed(1000 + seed)
    model = getattr(transformers, model_class)(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Zero-initialised biases and all-one norms would hide mistakes that touch them.
            if parameter.dim() == 1 and ("bias" in parameter_name or "norm" in parameter_name):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config = GenerationConfig(pad_token_id=PAD_TOKEN_ID, eos_token_id=None, do_sample=False)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def attentions(name: str) -> tuple[str, ...]:
    """Attention implementations that the installed Transformers offers for this architecture on CPU."""
    model_class = getattr(transformers, ALL[name][1])
    return ("eager", "sdpa") if getattr(model_class, "_supports_sdpa", False) else ("eager",)


def prompts(lengths: tuple[int, ...], seed: int = 0, low: int = 5, high: int = 90) -> list[list[int]]:
    """Random prompts of the given lengths, token ids in [low, high)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(low, high, (length,), generator=generator).tolist() for length in lengths]


def left_pad(rows: list[list[int]], pad: int = PAD_TOKEN_ID) -> dict[str, torch.Tensor]:
    """Left-padded `input_ids` [R, P] and `attention_mask` [R, P]."""
    width = max(len(row) for row in rows)
    input_ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    attention_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def plain(target: torch.nn.Module, prompt: list[int], **kwargs) -> list[int]:
    """New tokens of plain `generate()` on one unpadded prompt: the reference of every exactness test."""
    input_ids = torch.tensor([prompt])
    output = target.generate(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **kwargs)
    return output[0, len(prompt) :].tolist()


@functools.cache
def _plain_greedy(target: torch.nn.Module, prompt: tuple[int, ...], max_new_tokens: int) -> tuple[int, ...]:
    return tuple(plain(target, list(prompt), max_new_tokens=max_new_tokens, do_sample=False))


def plain_greedy(target: torch.nn.Module, rows: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Cached greedy continuations of each prompt on its own, without end-of-sequence."""
    return [list(_plain_greedy(target, tuple(row), max_new_tokens)) for row in rows]


@torch.no_grad()
def min_top2_gap(target: torch.nn.Module, prompt: list[int], new_tokens: list[int]) -> float:
    """Smallest difference between the two largest logits along a greedy run: float noise must stay far below it."""
    input_ids = torch.tensor([prompt + new_tokens])
    logits = target(input_ids=input_ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    top = logits.topk(2, dim=-1).values
    return (top[:, 0] - top[:, 1]).min().item()


@functools.cache
def clear_prompts(
    target: torch.nn.Module, lengths: tuple[int, ...], max_new_tokens: int, seed: int = 0, gap: float = 1e-3
) -> list[list[int]]:
    """Prompts whose greedy runs are varied and keep every top-2 gap above `gap` (float32 noise is about 1e-5)."""
    chosen = []
    for number, length in enumerate(lengths):
        for attempt in range(50):
            (prompt,) = prompts((length,), seed=seed * 7919 + number * 101 + attempt)
            (continuation,) = plain_greedy(target, [prompt], max_new_tokens)
            varied = len(set(continuation)) >= min(max_new_tokens, 60) // 6
            if varied and min_top2_gap(target, prompt, continuation) > gap:
                chosen.append(prompt)
                break
        else:
            raise RuntimeError(f"no prompt of {length} tokens with clear margins in 50 attempts")
    return chosen
