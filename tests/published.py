"""What is known of published drafts, and what this package has to make of each.

`data/published_configs.json` holds their configurations as far as they were seen. A key that was not seen is unknown,
not absent, so partial ones are completed here, from a sibling or the target's configuration, or with a stand-in.
Tensor names and shapes are derived from each exporter's rules, not from this package's model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from dspark_hf.checkpoints import CheckpointFiles, TensorInfo

DATA = Path(__file__).parent / "data" / "published_configs.json"
PUBLISHED: dict[str, dict] = json.loads(DATA.read_text(encoding="utf-8"))

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Expectation:
    """What loading must make of one published draft.

    Attributes:
        outcome: name of the reader, or for a refused one a phrase of the message.
        style: whose tensor names and shapes the checkpoint has.
        completion: keys put in where the published file was not seen in full.
        origin: where those keys are from, for the reader of the table.
        anchor_first: the block layout.
        overrides: `config_overrides` that the file needs; without them loading is refused with `refusal`.
        refusal: phrase of that message.
    """

    outcome: str
    style: str = ""
    completion: dict = field(default_factory=dict)
    origin: str = ""
    anchor_first: bool = True
    overrides: dict = field(default_factory=dict)
    refusal: str = ""


def _sibling(name: str, *drop: str) -> dict:
    return {key: value for key, value in PUBLISHED[name]["config"].items() if key not in drop}


_LFM2 = _sibling("LiquidAI__LFM2.5-2.6B-DSpark")
_DFLASH_27B = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6}
_SPECFORGE = Expectation("specforge", "borrowed")
_DFLASH = Expectation("dflash", "borrowed", anchor_first=False)
_DEEPSPEC = Expectation("deepspec", "stored")
_DOMINO, _DFLASH2 = Expectation("is a Domino draft"), Expectation("is a DFlash2 draft")

EXPECTED: dict[str, Expectation] = {
    "Inferact__Kimi-K3-DSpark": Expectation("latent-attention (MLA)"),
    "LiquidAI__LFM2.5-1.2B-Instruct-DSpark": Expectation("specforge", "borrowed", _LFM2, "the 2.6B draft"),
    "LiquidAI__LFM2.5-2.6B-DSpark": _SPECFORGE,
    "LiquidAI__LFM2.5-8B-A1B-DSpark": Expectation("specforge", "borrowed", _LFM2, "the 2.6B draft"),
    "RadixArk__Qwen3.8-27B-DSpark": _SPECFORGE,
    "RedHatAI__GLM-5.2-speculator.dspark": Expectation("speculators", "stored", anchor_first=False),
    "RedHatAI__Qwen3-4B-speculator.dspark": Expectation("speculators", "stored"),
    "RedHatAI__Qwen3.6-35B-A3B-speculator.dspark": Expectation("speculators", "reduced"),
    "TIE-Pilot__dspark-block8-qwen25-7b": Expectation(
        "deepspec",
        "qwen2",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 5,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "vocab_size": 152064,
            "num_target_layers": 28,
            "markov_rank": 256,
        },
        "the target's configuration; layers and rank are stand-ins",
    ),
    "XiaomiMiMo__MiMo-V2.5-Pro-FP4-DFlash": Expectation("has `attention_sink_bias` True"),
    "deepseek-ai__DeepSeek-V4-Flash-DSpark": Expectation("embeds its DSpark draft in a DeepSeek-V4 target"),
    "deepseek-ai__DeepSeek-V4-Pro-DSpark": Expectation("embeds its DSpark draft in a DeepSeek-V4 target"),
    "deepseek-ai__dflash_qwen3_4b_block7": _DEEPSPEC,
    "deepseek-ai__dflash_qwen3_8b_block7": _DEEPSPEC,
    "deepseek-ai__dspark_gemma4_12b_block7": Expectation("deepspec", "gemma4"),
    "deepseek-ai__dspark_qwen3_14b_block7": Expectation(
        "deepspec", "stored", {"vocab_size": 151936}, "the target's configuration"
    ),
    "deepseek-ai__dspark_qwen3_4b_block7": _DEEPSPEC,
    "deepseek-ai__dspark_qwen3_8b_block7": _DEEPSPEC,
    "deepseek-ai__eagle3_qwen3_8b_ttt7": Expectation("is an Eagle-3 draft"),
    "nvidia__Nemotron-3.5-Lightning-DSpark": Expectation(
        "has `attention_sink_bias` True, which is not supported; it has quantised weights (W4A16_NVFP4)",
        completion={"quantization_config": {"quant_algo": "W4A16_NVFP4"}},
        origin="the repository's page",
    ),
    "openbmb__MiniCPM5-2B-DSpark": Expectation(
        "deepspec", "borrowed", {"rms_norm_eps": 1e-6, "enable_confidence_head": True}, "a port; epsilon is a stand-in"
    ),
    "satgeze__Qwen3.5-0.8B-DSpark": Expectation(
        "deepspec",
        "stored",
        _sibling("deepseek-ai__dspark_qwen3_4b_block7", "architectures", "model_type"),
        "stand-in: an official draft",
    ),
    "specforge_training_glm-5.2-dspark": _SPECFORGE,
    "specforge_training_inkling-dspark": _SPECFORGE,
    "specforge_training_kimi-k3-dspark": _SPECFORGE,
    "specforge_training_lfm2.5-1.2b-instruct-dflash": _DFLASH,
    "specforge_training_longcat-flash-dflash": _DFLASH,
    "specforge_training_qwen2.5-0.5b-dflash": _DFLASH,
    "specforge_training_qwen3-4b-dflash": _DFLASH,
    "specforge_training_qwen3-4b-dspark": _SPECFORGE,
    "specforge_training_qwen3-8b-dflash": _DFLASH,
    "specforge_training_qwen3-8b-domino": _DOMINO,
    "specforge_training_qwen3-8b-dspark": _SPECFORGE,
    "specforge_training_qwen3.5-35b-a3b-dflash": _DFLASH,
    "specforge_training_qwen3.5-4b-dflash": _DFLASH,
    "specforge_training_qwen3.5-4b-domino": _DOMINO,
    "specforge_training_qwen3.6-27b-dflash": _DFLASH,
    "specforge_training_qwen3.6-27b-domino-full-attention": _DOMINO,
    "specforge_training_qwen3.6-27b-dspark": _SPECFORGE,
    "torchspec_dflash_template": Expectation(
        "torchspec", "torchspec", anchor_first=False, overrides={"block_size": 16}, refusal="lacks `block_size`"
    ),
    "z-lab__Muse-Glimmer-30B-DFlash2": _DFLASH2,
    "z-lab__Qwen3-4B-DFlash-b16": _DFLASH,
    "z-lab__Qwen3-8B-DFlash-b16": _DFLASH,
    "z-lab__Qwen3.5-27B-DFlash": Expectation(
        "dflash",
        "borrowed",
        _DFLASH_27B | {"intermediate_size": 17408, "num_hidden_layers": 5, "rope_theta": 10000000},
        "the Qwen3.6-27B draft",
        anchor_first=False,
    ),
    "z-lab__Qwen3.6-27B-DFlash": Expectation(
        "dflash",
        "borrowed",
        _DFLASH_27B | {"num_target_layers": 64},
        "its SpecForge configuration",
        anchor_first=False,
    ),
    "z-lab__Qwen3.8-27B-DFlash2": _DFLASH2,
}


def completed(name: str) -> dict:
    """A published configuration with what was not seen put in; what was seen wins."""
    expected, config = EXPECTED[name], PUBLISHED[name]["config"]
    merged = {**expected.completion, **config}
    for nested in ("dflash_config",):
        if nested in merged:
            merged[nested] = {**expected.completion.get(nested, {}), **config.get(nested, {})}
    return merged


def shapes(name: str) -> Shapes:
    """Tensor names and shapes the exporter writes for a published configuration, from its rules."""
    style, config = EXPECTED[name].style, completed(name)
    nested = config.get("dflash_config", {})
    layer = config.get("transformer_layer_config", config)
    taps = config.get("aux_hidden_state_layer_ids") or config.get("target_layer_ids") or nested.get("target_layer_ids")
    hidden, vocabulary = layer["hidden_size"], layer["vocab_size"]
    result = {
        "fc.weight": (hidden, (5 if taps is None else len(taps)) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for number in range(layer["num_hidden_layers"]):
        part = _gemma4_layer(layer) if style == "gemma4" else _qwen3_layer(layer, style)
        result |= {f"layers.{number}.{tensor}": shape for tensor, shape in part.items()}
    drafted = config["draft_vocab_size"] if style == "reduced" else vocabulary
    if style == "reduced":
        result |= {"d2t": (drafted,), "t2d": (vocabulary,)}
    if style in ("stored", "reduced", "gemma4", "qwen2", "torchspec"):
        result["embed_tokens.weight"] = (vocabulary, hidden)
    if style in ("stored", "reduced", "gemma4", "qwen2"):
        result["lm_head.weight"] = (drafted, hidden)
    result |= _heads({**config, **nested}, hidden, vocabulary, drafted)
    if style == "torchspec":
        own = {"fc.weight": "context_proj.weight", "hidden_norm.weight": "context_norm.weight"}
        own["norm.weight"] = "final_norm.weight"
        result = {own.get(tensor, tensor): shape for tensor, shape in result.items()}
    return result


def _heads(config: dict, hidden: int, vocabulary: int, drafted: int) -> Shapes:
    rank = config.get("markov_rank", 0)
    if not rank:
        return {}
    heads = {"markov_head.markov_w1.weight": (vocabulary, rank), "markov_head.markov_w2.weight": (drafted, rank)}
    if config.get("enable_confidence_head"):
        heads |= {"confidence_head.proj.weight": (1, hidden + rank), "confidence_head.proj.bias": (1,)}
    return heads


def _qwen3_layer(config: dict, style: str) -> Shapes:
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    queries, keys = heads * size, config["num_key_value_heads"] * size
    shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if style == "qwen2":
        biases = {"q": queries, "k": keys, "v": keys}
        return shapes | {f"self_attn.{part}_proj.bias": (width,) for part, width in biases.items()}
    return shapes | {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}


def _gemma4_layer(config: dict) -> Shapes:
    size, keys = config["global_head_dim"], config["num_global_key_value_heads"] * config["global_head_dim"]
    hidden, queries = config["hidden_size"], config["num_attention_heads"] * size
    shapes = _qwen3_layer(config | {"head_dim": size}, "gemma4")
    shapes |= {"self_attn.q_proj.weight": (queries, hidden), "self_attn.k_proj.weight": (keys, hidden)}
    del shapes["self_attn.v_proj.weight"]  # values are the key projection's output
    norms = ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")
    return shapes | {name: (hidden,) for name in norms} | {"layer_scalar": (1,)}


def opened(name: str, with_overrides: bool = True) -> CheckpointFiles:
    """A published draft as `open_checkpoint` gives it, headers only."""
    expected = EXPECTED[name]
    config = completed(name) | (expected.overrides if with_overrides else {})
    found = shapes(name) if expected.style else {}
    tensors = {tensor: TensorInfo(shape, "I64" if tensor == "d2t" else "BF16", "") for tensor, shape in found.items()}
    return CheckpointFiles(name.replace("__", "/"), config, tensors, None)
