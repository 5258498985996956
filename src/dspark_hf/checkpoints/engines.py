"""Whether vLLM and SGLang would serve a checkpoint as it is, and the line that starts them.

Both engines choose a draft's class by its architecture string and read their settings from fixed places, so a file
that loads here may be refused there, or be run wrongly without a word: SGLang passes over tensors it does not know,
and a missing layout key means anchor-first to one engine and 1+N to another. The rules below were read from the
sources of the versions in `CHECKED`, and are compared with them by a test.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..configuration_dspark import DSparkConfig
from .detect import Reader
from .files import CheckpointFiles
from .settings import setting

CHECKED = {"vllm": "0.33.0", "sglang": "0.5.23", "speculators": "0.9.0"}
VLLM_ARCHITECTURES = ("Qwen3DSparkModel", "Gemma4DSparkModel")
SGLANG_ARCHITECTURES = ("Qwen3DSparkModel", "LingDSparkModel", "DSparkDraftModel", "Lfm2DSparkDraftModel")
DFLASH_ARCHITECTURE = "DFlashDraftModel"


@dataclass
class Verdict:
    """What an engine would make of a checkpoint.

    Attributes:
        engine (`str`): `"vllm"` or `"sglang"`.
        version (`str`): version of the engine whose source the rules were read from.
        obstacles (`list[str]`): why it would not serve it, or not rightly; empty if it would.
        caveats (`list[str]`): what else has to hold.
    """

    engine: str
    version: str
    obstacles: list[str] = field(default_factory=list)
    caveats: list[str] = field(default_factory=list)

    @property
    def serves(self) -> bool:
        """Nothing stands against it."""
        return not self.obstacles


def verdicts(files: CheckpointFiles, reader: Reader, config: DSparkConfig) -> dict[str, Verdict]:
    """By engine, whether it would serve an opened checkpoint as it is."""
    rules: dict[str, Callable] = {"vllm": _vllm, "sglang": _sglang}
    result = {}
    for engine, rule in rules.items():
        verdict = Verdict(engine, CHECKED[engine])
        if reader.name == "native":
            verdict.obstacles.append("`model_type` 'dspark' is this package's own")
        else:
            verdict.obstacles += _layers(config)
            rule(verdict, files, reader, config)
        result[engine] = verdict
    return result


def _layers(config: DSparkConfig) -> list[str]:
    """What neither engine's draft layers have."""
    qwen3 = config.backbone == "qwen3"
    obstacles = {
        "no query and key norms": not config.qk_norm,
        "biases in the MLP": config.mlp_bias,
        "biases on part of the attention projections": config.attention_output_bias != config.attention_bias,
        f"activation {config.hidden_act!r}": qwen3 and config.hidden_act not in ("silu", "swish"),
        "scaled embeddings": qwen3 and config.embedding_scale != 1.0,
        "soft-capped logits": qwen3 and config.final_logit_softcapping is not None,
    }
    return [name for name, present in obstacles.items() if present]


def _vllm(verdict: Verdict, files: CheckpointFiles, reader: Reader, config: DSparkConfig) -> None:
    raw, obstacles = files.config, verdict.obstacles
    if reader.name == "speculators":
        obstacles += _vllm_speculators(raw, config)
    else:
        obstacles += _names(files, reader)
        obstacles += _vllm_flat(raw, config) if config.markov_rank else _dflash(raw, config)
    if config.markov_rank and config.markov_head_type != "vanilla":
        obstacles.append(f"Markov head {config.markov_head_type!r}: only 'vanilla' is implemented")
    if config.backbone == "gemma4" and not (config.stores_embedding and config.stores_head):
        obstacles.append("a Gemma 4 draft needs its own embedding and head")


def _vllm_speculators(raw: Mapping[str, Any], config: DSparkConfig) -> list[str]:
    obstacles = []
    if bool(raw.get("sample_from_anchor", False)) != config.sample_from_anchor:
        obstacles.append("`sample_from_anchor` is missing and would be taken for false")
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    if raw["speculators_model_type"] == "dspark":
        if not config.markov_rank:
            obstacles.append("no Markov head: a DSpark draft needs one")
        if any(sliding) and config.sliding_window_non_causal:
            obstacles.append("`sliding_window_non_causal` is not passed on: sliding layers would be causal")
        return obstacles
    if config.sample_from_anchor:
        obstacles.append("a DFlash draft that drafts from its anchor: only 1+N is run")
    causal = not raw.get("sliding_window_non_causal", True)
    wanted = [slides and not config.sliding_window_non_causal for slides in sliding]
    if any(causal != want for want in wanted):
        obstacles.append(f"all layers would be {'causal' if causal else 'bidirectional'} inside the block")
    return obstacles


def _vllm_flat(raw: Mapping[str, Any], config: DSparkConfig) -> list[str]:
    architectures, obstacles = raw.get("architectures") or [], []
    own = any(name in VLLM_ARCHITECTURES for name in architectures)
    if not own and not ("DSparkDraftModel" in architectures and raw.get("model_type") == "qwen3"):
        obstacles.append(f"architecture {', '.join(architectures) or 'missing'} is no Qwen 3 DSpark draft to it")
    model_type = "gemma4_text" if config.backbone == "gemma4" else "qwen3"
    if raw.get("model_type") != model_type:
        obstacles.append(f"`model_type` {raw.get('model_type')!r} where {model_type!r} is needed")
    if not raw.get("markov_rank"):
        obstacles.append("`markov_rank` is not at top level")
    if bool(raw.get("sample_from_anchor", True)) != config.sample_from_anchor:
        obstacles.append("`sample_from_anchor` is not at top level and would be taken for true")
    enabled = raw.get("enable_confidence_head") and config.enable_confidence_head
    if enabled and bool(raw.get("confidence_head_with_markov", False)) != config.confidence_head_with_markov:
        obstacles.append("`confidence_head_with_markov` is not at top level and would be taken for false")
    if raw.get("is_neox_style", True) == config.rope_interleaved:
        obstacles.append("`is_neox_style` is missing: the rotary embedding is interleaved")
    return obstacles + _partial_rotary(raw, top_level=False)


def _dflash(raw: Mapping[str, Any], config: DSparkConfig) -> list[str]:
    """Both engines' DFlash route."""
    obstacles = []
    if config.sample_from_anchor:
        obstacles.append("a DFlash draft that drafts from its anchor: only 1+N is run")
    if DFLASH_ARCHITECTURE not in (raw.get("architectures") or []):
        obstacles.append(f"architecture is not {DFLASH_ARCHITECTURE}")
    if raw.get("model_type") != "qwen3":
        obstacles.append(f"`model_type` {raw.get('model_type')!r} where 'qwen3' is needed")
    if not all(key in (raw.get("dflash_config") or {}) for key in ("mask_token_id", "target_layer_ids")):
        obstacles.append("mask token and taps are not in `dflash_config`")
    return obstacles + _partial_rotary(raw, top_level=False)


def _sglang(verdict: Verdict, files: CheckpointFiles, reader: Reader, config: DSparkConfig) -> None:
    raw, obstacles = files.config, verdict.obstacles
    if reader.name == "speculators":
        obstacles.append("the speculators packaging is not read")
        return
    obstacles += _names(files, reader)
    if config.backbone == "gemma4":
        obstacles.append("no Gemma 4 draft layers")
    if config.has_reduced_vocabulary:
        obstacles.append("a reduced draft vocabulary")
    if config.target_layer_ids[0] < 0 or config.num_target_layers == config.target_layer_ids[-1] + 1:
        obstacles.append("taps before the first layer or after the last cannot be captured")
    if config.stores_embedding or config.stores_head:
        verdict.caveats.append("the target's embedding and head are used; the stored ones must equal them")
    obstacles += _partial_rotary(raw, top_level=True)
    if not config.markov_rank:
        obstacles += _dflash(raw, config)
        return
    architectures = raw.get("architectures") or []
    if not any(name in SGLANG_ARCHITECTURES for name in architectures):
        obstacles.append(f"architecture {', '.join(architectures) or 'missing'} is no DSpark draft to it")
    if not raw.get("markov_rank"):
        obstacles.append("`markov_rank` is not at top level")
    if setting(raw, "markov_head_type") is None:
        obstacles.append("`markov_head_type` is missing")
    if bool(raw.get("sample_from_anchor", True)) != config.sample_from_anchor:
        obstacles.append("`sample_from_anchor` is not at top level and would be taken for true")
    if raw.get("rope_is_neox_style", raw.get("is_neox_style", True)) == config.rope_interleaved:
        obstacles.append("`rope_is_neox_style` is missing: the rotary embedding is interleaved")


def _names(files: CheckpointFiles, reader: Reader) -> list[str]:
    renamed = [theirs for ours, theirs in reader.rename(files.tensors).items() if ours != theirs]
    prefixed = [info.stored_name for info in files.tensors.values() if info.stored_name is not None]
    found = renamed + prefixed
    return [f"tensor names that are not DeepSpec's, such as {found[0]}"] if found else []


def _partial_rotary(raw: Mapping[str, Any], top_level: bool) -> list[str]:
    places = [raw.get("rope_parameters") or raw.get("rope_scaling") or {}, *([raw] if top_level else [])]
    partial = any(place.get("partial_rotary_factor") not in (None, 1.0) for place in places)
    nested = any(isinstance(value, dict) for value in places[0].values())  # by layer type, as Gemma 4 has them
    return ["`partial_rotary_factor` of the target would be applied to the draft"] if partial and not nested else []


def launch_line(
    engine: str,
    draft: str,
    target: str,
    config: DSparkConfig,
    *,
    method: str | None = None,
    revision: str | None = None,
) -> str:
    """The command that serves `target` with a draft.

    Args:
        engine (`str`): `"vllm"` or `"sglang"`.
        draft, target (`str`): folders or repositories.
        config (`DSparkConfig`): the draft's.
        method (`str`, *optional*): `"dspark"` or `"dflash"`; by the Markov head if unset.
        revision (`str`, *optional*): of the draft's repository.

    Raises:
        ValueError: for an unknown engine.
    """
    method = method or ("dspark" if config.markov_rank else "dflash")
    if engine == "vllm":
        speculative = {"method": method, "model": draft, "num_speculative_tokens": config.num_draft_tokens}
        speculative |= {"revision": revision} if revision else {}
        return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(speculative))}"
    if engine == "sglang":
        # A DSpark block is counted in drafted tokens, a DFlash block in slots.
        size = config.num_draft_tokens if method == "dspark" else config.block_size
        words = ["python", "-m", "sglang.launch_server", "--model-path", target]
        words += ["--speculative-algorithm", method.upper(), "--speculative-draft-model-path", draft]
        words += ["--speculative-draft-model-revision", revision] if revision else []
        return shlex.join([*words, f"--speculative-{method}-block-size", str(size)])
    raise ValueError(f"Unknown engine {engine!r}; known are vllm and sglang.")


__all__ = ["CHECKED", "Verdict", "launch_line", "verdicts"]
