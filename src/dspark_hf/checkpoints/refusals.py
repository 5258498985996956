"""What is recognised and not read, each with its reason.

A draft loaded under wrong assumptions does not fail, it only never gets a token accepted. So a model that computes
something else is refused by name: from its configuration alone where that tells (before anything large is downloaded),
else from its tensor names.
"""

from collections.abc import Iterable, Mapping
from typing import Any

# Keys that change the computation in a way the draft's layers do not have, with the only value that does not.
NEUTRAL = {
    "attention_sink_bias": False,
    "use_attention_sinks": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "logit_scale": 1.0,
    "output_multiplier": 1.0,
    "use_gemma_norm": False,
    "use_aux_hidden_state": True,
}

# Names of a speculators model type, and why it is another model.
SPECULATORS = {
    "dflash2": "it convolves along the block and walks a candidate selector; only DFlash and DSpark are read",
    "eagle3": "it drafts one token after another; only DFlash and DSpark are read",
    "peagle": "it drafts from several heads; only DFlash and DSpark are read",
    "mtp": "it is a multi-token-prediction layer of its target; only DFlash and DSpark are read",
    "xpress": "it refines a DFlash block in parallel passes; only DFlash and DSpark are read",
}

EMBEDDED = (
    "embeds its DSpark draft in a DeepSeek-V4 target (`mtp.*`), which is not supported. What is missing: mixture-of-"
    "experts draft stages over several residual streams, their FP8 and FP4 weights, attention with a compressed "
    "context, and a target whose cache can be rolled back"
)
DFLASH2 = "is a DFlash2 draft, which is not supported: it has convolutions along the block and a candidate selector"
DOMINO = "is a Domino draft, which is not supported: a GRU over the block's prefix corrects its logits"
EAGLE3 = "is an Eagle-3 draft, not a DSpark one: it drafts one token after another, from its own hidden state"
LATENT = "has latent-attention (MLA) draft layers, which are not supported"
EXPERTS = "has mixture-of-experts draft layers, which are not supported"
PLAIN_DTYPES = ("F64", "F32", "BF16", "F16", "I64", "I32", "BOOL")
QUANTISED = "has quantised weights ({}); only float32, bfloat16 and float16 drafts are read"
CAUSAL = "is causal inside its block in full-attention layers, which is not supported"

# Parts of tensor names, and what they give away.
TELLTALE_NAMES = {
    "mtp.": EMBEDDED,
    "candidate_selector.": DFLASH2,
    "_conv.base_kernel": DFLASH2,
    "prefix_gru.": DOMINO,
    "embed_proj.": DOMINO,
    "midlayer.": EAGLE3,
    "layers.0.hidden_norm.": EAGLE3,
    "kv_a_proj_with_mqa.": LATENT,
    "q_a_proj.": LATENT,
    "kv_b_proj.": LATENT,
    "wq_a.": LATENT,
    "mlp.experts.": EXPERTS,
    "lilicorr.": "is a LiLiCorr draft, which is not supported: a small transformer reranks the candidates of a block",
    "jacobi": "is an XPress draft, which is not supported: it refines its block in parallel passes",
    "attention_sink": "has learned attention sinks, which are not supported",
    "qkv_proj.": "has fused query, key and value projections (Laguna), which are not supported",
    "g_proj.": "has gated attention, which is not supported",
    "mask_embedding": "has a mask embedding of its own beside the vocabulary's, which is not supported",
    "weight_scale": QUANTISED.format("scales beside the weights"),
    "weight_packed": QUANTISED.format("packed weights"),
}

# Architectures of drafts that keep their target's layer type, by part of the name.
FOREIGN_LAYERS = {
    "K3DSpark": LATENT,
    "KimiK3DSpark": LATENT,
    "Glm5_2DSpark": LATENT,
    "DeepseekV4DSpark": LATENT,
    "MiniMaxM3DSpark": "has MiniMax-M3 layers (norms with weight 1 + w, a clamped MLP), which are not supported",
    "Qwen35DSpark": "has gated-attention (Qwen 3.5) layers, which are not supported",
    "MuseSparkDSpark": "has Muse Spark layers, which are not supported",
    "DFlash2": DFLASH2,
    "Domino": DOMINO,
    "Eagle3": EAGLE3,
    "LiLiCorr": TELLTALE_NAMES["lilicorr."],
    "XPress": TELLTALE_NAMES["jacobi"],
}

# Classes whose `auto_map` entry may be passed over, since what they compute is one of the packagings read here.
KNOWN_CODE = ("dspark", "dflash")


def refuse_by_config(config: Mapping[str, Any]) -> str | None:
    """Why a configuration's model is not read, to follow its name in a message; `None` if it may be."""
    architectures = " ".join(config.get("architectures") or [])
    speculator = config.get("speculators_model_type")
    if speculator is not None and speculator not in ("dspark", "dflash"):
        reason = SPECULATORS.get(speculator, "only DFlash and DSpark are read")
        return f"is a speculators {speculator!r} draft, not a DSpark one: {reason}"
    if any(config.get(key) is not None for key in ("dspark_block_size", "dspark_target_layer_ids")):
        return EMBEDDED
    for part, reason in FOREIGN_LAYERS.items():
        if part in architectures:
            return reason
    nested = config.get("dflash_config") or {}
    projector = nested.get("projector_type", config.get("projector_type"))
    if projector == "domino":
        return DOMINO
    if projector not in (None, "dspark", "dflash"):
        return f"has the projector {projector!r}, which is not supported; only DFlash and DSpark are read"
    if nested.get("conv_kernel_size") or nested.get("selector_rank") or config.get("selector_rank"):
        return DFLASH2
    if "ttt_length" in config:
        return EAGLE3
    if config.get("model_arch") == "dfly" or config.get("enable_hidden_correction"):
        return "is a DFly draft, which is not supported: it corrects hidden states along the block"
    modes = nested.get("attention_modes") or [nested.get("attention_mode", "gqa")]
    if "mla" in modes:
        return LATENT
    if not set(modes) <= {"gqa", "mha"}:
        return f"has draft layers with attention {', '.join(sorted(set(map(str, modes))))}, which is not supported"
    reasons = []
    causal = nested.get("causal") or config.get("is_causal") or config.get("dflash_query_causal")
    if causal and set(_layer_types(config, nested)) != {"sliding_attention"}:
        reasons.append(CAUSAL)
    reasons += _odd_keys(config, nested)
    method = quantisation(config)
    if reasons and method:
        reasons.append(QUANTISED.format(method))
    return "; it ".join(reasons) or None


def quantisation(config: Mapping[str, Any]) -> str | None:
    """Name of the quantisation a configuration declares. It may be the target's: the tensors have the last word."""
    declared = config.get("quantization_config") or config.get("compression_config")
    if not declared:
        return None
    named = declared.get("quant_algo") or declared.get("quant_method") if isinstance(declared, Mapping) else None
    return named or "`quantization_config`"


def _layer_types(config: Mapping[str, Any], nested: Mapping[str, Any]) -> list[str]:
    types = list(config.get("layer_types") or ["full_attention"])
    forced = nested.get("use_swa") and "sliding_attention" not in types
    return ["sliding_attention"] if forced else types


def _odd_keys(config: Mapping[str, Any], nested: Mapping[str, Any]) -> list[str]:
    found = {
        key: source[key]
        for source in (config, nested)
        for key, neutral in NEUTRAL.items()
        if source.get(key, neutral) not in (neutral, None)
    }
    return [f"has `{key}` {value!r}, which is not supported" for key, value in found.items()]


def refuse_by_names(names: Iterable[str]) -> str | None:
    """Why a model with these tensor names is not read; `None` when nothing speaks against it."""
    names = list(names)
    for part, reason in TELLTALE_NAMES.items():
        if any(name.startswith(part) if part == "mtp." else part in name for name in names):
            return reason
    return None


def refuse_by_dtypes(config: Mapping[str, Any], dtypes: Iterable[str]) -> str | None:
    """Why weights of a configuration that declares a quantisation are not read; `None` where they are plain."""
    odd = sorted(set(dtypes) - set(PLAIN_DTYPES))
    method = quantisation(config)
    return QUANTISED.format(f"{method}: {', '.join(odd)}") if method and odd else None


def foreign_code(config: Mapping[str, Any]) -> list[str]:
    """Classes a configuration wants run from its repository that are none of the packagings read here."""
    classes = [value for value in (config.get("auto_map") or {}).values() if value]
    flat = [name for value in classes for name in (value if isinstance(value, (list, tuple)) else [value]) if name]
    return [name for name in flat if not any(known in str(name).rsplit(".", 1)[-1].lower() for known in KNOWN_CODE)]


__all__ = ["foreign_code", "quantisation", "refuse_by_config", "refuse_by_dtypes", "refuse_by_names"]
