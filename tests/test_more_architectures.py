"""Targets beyond the list: whichever route the runtime takes for them, the output is plain `generate()`'s."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from planted import planted_draft
from running import assisted, new_tokens, plain_batch
from targets import HIDDEN_SIZE, NUM_LAYERS, PAD_TOKEN_ID, VOCAB_SIZE, WINDOW, left_pad, plain, prompts
from transformers import GenerationConfig

pytestmark = pytest.mark.exactness

LENGTHS = (3, 7, 12)
_GPT = {"n_embd": HIDDEN_SIZE, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 512}
_MODERN = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip

# name -> (configuration class, model class, fields)
MORE = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**_MODERN, "num_key_value_heads": None}),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {"hidden_size": HIDDEN_SIZE, "ffn_dim": 96, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4,
         "max_position_embeddings": 512, "word_embed_proj_dim": HIDDEN_SIZE},
    ),
    "phi": ("PhiConfig", "PhiForCausalLM", _MODERN),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", _MODERN),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {**_MODERN, "sliding_window": WINDOW}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_MODERN, "head_dim": 16}),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {"hidden_size": HIDDEN_SIZE, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4},
    ),
    "falcon_alibi": (
        "FalconConfig",
        "FalconForCausalLM",
        {"hidden_size": HIDDEN_SIZE, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4, "alibi": True},
    ),
    "mpt": ("MptConfig", "MptForCausalLM", {"d_model": HIDDEN_SIZE, "n_heads": 4, "n_layers": NUM_LAYERS}),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", {**_GPT, "rotary_dim": 8}),
    "qwen2_moe": (
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**_MODERN, **_MOE, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_sliding": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {**_MODERN, "head_dim": 16, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "exaone4": (
        "Exaone4Config",
        "Exaone4ForCausalLM",
        {**_MODERN, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**_MODERN, "intermediate_size_mlp": 96, "head_dim": 16, "attention_chunk_size": 10, "num_local_experts": 4,
         "num_experts_per_tok": 1, "no_rope_layers": [1, 1, 1, 0]},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**_MODERN, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**_MODERN, **_MLA}),
    "deepseek_v32": (
        "DeepseekV32Config", "DeepseekV32ForCausalLM",
        {**_MODERN, **_MLA, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2},
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM",
        {**_MODERN, **_MLA, "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2},
    ),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", _MODERN),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {**_MODERN, "num_experts": 4, "num_experts_per_tok": 2}),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", {**_MODERN, "head_dim": 16}),
    "hunyuan": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", {**_MODERN, "head_dim": 16}),
    "jamba": (
        "JambaConfig", "JambaForCausalLM",
        {**_MODERN, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "expert_layer_period": 2,
         "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    ),
    "falcon_h1": (
        "FalconH1Config", "FalconH1ForCausalLM",
        {**_MODERN, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig", "RecurrentGemmaForCausalLM",
        {**_MODERN, "attention_window_size": 16, "lru_width": HIDDEN_SIZE, "num_key_value_heads": 1},
    ),
    "rwkv": ("RwkvConfig", "RwkvForCausalLM", {"hidden_size": HIDDEN_SIZE, "num_hidden_layers": NUM_LAYERS}),
}  # fmt: skip


@functools.cache
def more(name: str, attn: str):
    config_class, model_class, fields = MORE[name]
    fields = {key: value for key, value in fields.items() if value is not None}
    special = {"pad_token_id": PAD_TOKEN_ID, "bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, config_class)(
        vocab_size=VOCAB_SIZE, initializer_range=0.2, tie_word_embeddings=False, **special, **fields
    )
    config._attn_implementation = attn
    torch.manual_seed(77)
    model = getattr(transformers, model_class)(config).float().eval()
    model.generation_config = GenerationConfig(pad_token_id=PAD_TOKEN_ID, eos_token_id=None, do_sample=False)
    return model


@pytest.mark.parametrize("name", MORE)
def test_never_a_wrong_answer(name):
    """Against plain batched and plain single generate; a refusal has to be a ValueError that says why."""
    if not hasattr(transformers, MORE[name][1]):
        pytest.skip(f"this version of Transformers has no {MORE[name][1]}")
    supported = getattr(getattr(transformers, MORE[name][1]), "_supports_sdpa", False)
    target = more(name, "sdpa" if supported else "eager")
    rows = prompts(LENGTHS, seed=12)
    expected = plain_batch(target, rows, max_new_tokens=32)
    references = [row + e[max(LENGTHS) :] for row, e in zip(rows, expected.tolist(), strict=True)]
    try:
        output = assisted(target, planted_draft(target).plan(references), rows, max_new_tokens=32)
    except ValueError as error:
        assert type(target).__name__ in str(error) or "cache" in str(error), error
        return
    assert torch.equal(output.sequences, expected), output.dspark_stats.path
    for row in rows[:2]:
        single = plain(target, row, max_new_tokens=32)
        draft = planted_draft(target).plan([row + single])
        alone = assisted(target, draft, [row], max_new_tokens=32)
        assert new_tokens(alone, [row])[0] == single, alone.dspark_stats.path
        if alone.dspark_stats.path != "plain":
            assert alone.dspark_stats.tau > 2


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama4", "glm_moe_dsa", "exaone4"])
def test_their_options(name):
    """End of sequence and a processor on architectures with other positions, masks and caches."""
    if not hasattr(transformers, MORE[name][1]):
        pytest.skip(f"this version of Transformers has no {MORE[name][1]}")
    target = more(name, "eager")
    rows = prompts(LENGTHS, seed=13)
    free = plain_batch(target, rows, max_new_tokens=32)[:, max(LENGTHS) :]
    kwargs = {"eos_token_id": [free[1, 6].item(), free[2, 13].item()], "max_new_tokens": 32, "no_repeat_ngram_size": 2}
    expected = target.generate(**left_pad(rows), **kwargs)
    references = [row + e[max(LENGTHS) :] for row, e in zip(rows, expected.tolist(), strict=True)]
    output = assisted(target, planted_draft(target).plan(references), rows, **kwargs)
    assert torch.equal(output.sequences, expected)
