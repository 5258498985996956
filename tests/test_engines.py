"""What other engines' readers look for, against what is written for them and what is said about them.

`data/engine_readers.json` holds facts parsed from the wheels of vLLM, SGLang and speculators. With the wheels at hand
(`DSPARK_ENGINE_WHEELS` names their folder) they are parsed again and compared.
"""

import json
import os
import sys
from pathlib import Path

import packagings
import pytest
from packagings import base_config, base_draft, dflash_draft, sliding_draft

from dspark_hf.checkpoints import (
    CHECKED,
    deepspec_config,
    detect_reader,
    launch_line,
    open_checkpoint,
    serving_config,
    speculators_config,
    verdicts,
    write_serving,
    write_speculators,
)
from dspark_hf.checkpoints.engines import DFLASH_ARCHITECTURE, SGLANG_ARCHITECTURES, VLLM_ARCHITECTURES
from dspark_hf.checkpoints.refusals import SPECULATORS

DATA = Path(__file__).parent / "data"
READERS = json.loads((DATA / "engine_readers.json").read_text(encoding="utf-8"))

# Keys of a Qwen 3 configuration, which engines hand to Transformers' own class (rotary schemas, ids, window switch).
QWEN3 = set(
    "architectures attention_bias attention_dropout bos_token_id dtype eos_token_id head_dim hidden_act hidden_size "
    "initializer_range intermediate_size layer_types max_position_embeddings model_type num_attention_heads "
    "num_hidden_layers num_key_value_heads pad_token_id rms_norm_eps rope_parameters rope_scaling rope_theta "
    "sliding_window tie_word_embeddings use_cache use_sliding_window vocab_size".split()
)


def known(engine: str, kind: str, *parts: str) -> set[str]:
    """Facts of one kind from all files of an engine, or from those whose path has one of `parts`."""
    files = READERS[engine]["files"]
    return {
        word for path, facts in files.items() if not parts or any(p in path for p in parts) for word in facts[kind]
    }


def test_versions():
    assert {engine: entry["version"] for engine, entry in READERS.items()} == CHECKED


def test_facts_are_those_of_the_wheels():
    folder = os.environ.get("DSPARK_ENGINE_WHEELS")
    if not folder:
        pytest.skip("DSPARK_ENGINE_WHEELS is unset: it names a folder with the wheels of vLLM, SGLang and speculators")
    sys.path.insert(0, str(DATA))
    from make_engine_readers import read_wheels

    assert read_wheels(Path(folder)) == READERS


# Keys that are written and read ----------------------------------------------------------------------------


def test_both_engines_read_the_keys_of_a_serving_file():
    keys = serving_config(base_config()).keys() - QWEN3
    nested = serving_config(base_config())["dflash_config"].keys()
    unread = {
        # vLLM takes the depth from the target, and has the vanilla head only
        "vllm": {"num_target_layers", "projector_type"},
        # SGLang has one spelling of the layout key
        "sglang": {"dspark_bonus_anchor"},
    }
    for engine, missing in unread.items():
        assert keys - known(engine, "words") == missing & keys, engine
        assert nested - known(engine, "words") == missing & nested, engine


def test_speculators_and_vllm_read_the_keys_of_a_speculators_file():
    config = speculators_config(base_config(), verifier="nobody/target")
    declared = known("speculators", "fields")
    assert config.keys() - declared <= {"tie_word_embeddings", "dtype"}
    assert config["speculators_config"].keys() <= declared
    assert config["speculators_config"]["proposal_methods"][0].keys() <= declared
    assert config["speculators_config"]["verifier"].keys() <= declared
    assert config["transformer_layer_config"].keys() <= QWEN3
    vllm = known("vllm", "words", "speculators/")
    by_vllm = (
        "aux_hidden_state_layer_ids block_size confidence_head_with_markov draft_vocab_size enable_confidence_head"
    )
    by_vllm += " markov_head_type markov_rank mask_token_id sample_from_anchor speculators_config target_hidden_size"
    by_vllm += " speculators_model_type transformer_layer_config"
    assert set(by_vllm.split()) <= vllm & config.keys()


def test_vllm_needs_every_decoder_key_of_a_speculators_file():
    """It has no class defaults there: what its layers read has to be written."""
    read = known("vllm", "words", "qwen3_dflash", "qwen3_dspark") & QWEN3
    written = speculators_config(base_config())["transformer_layer_config"].keys()
    assert read - written == set() and {"hidden_act", "rope_parameters", "head_dim"} <= read


def test_deepspec_keys_of_gemma4_are_vllms():
    config = deepspec_config(base_config(backbone="gemma4", head_dim=16, final_logit_softcapping=30.0))
    gemma = known("vllm", "words", "gemma4_dspark")
    assert {
        "attention_k_eq_v",
        "target_layer_ids",
        "markov_rank",
        "confidence_head_with_markov",
    } <= gemma & config.keys()


# Names that are written and read ---------------------------------------------------------------------------

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
FUSED["up_proj"] = "gate_up_proj"
# Of ordinary modules outside the files that were parsed (the MLP is Qwen 2's, norms and linears are the engine's).
ELSEWHERE = {"weight", "bias", "down_proj", "gate_up_proj", "mlp"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_have_the_modules_of_a_serving_file(engine, tmp_path):
    write_serving(base_draft(stores_embedding=False, stores_head=False), tmp_path / "dspark")
    modules = known(engine, "assigned")
    for name in open_checkpoint(tmp_path / "dspark").tensors:
        parts = [FUSED.get(part, part) for part in name.split(".") if not part.isdecimal()]
        assert set(parts) - modules <= ELSEWHERE, name
    assert {"fc", "hidden_norm", "markov_head", "markov_w1", "markov_w2", "confidence_head", "qkv_proj"} <= modules


def test_speculators_has_the_modules_of_its_file(tmp_path):
    draft = base_draft(draft_vocab_size=20, markov_head_type="gated")
    write_speculators(draft, tmp_path)
    modules = known("speculators", "assigned") | known("speculators", "words") | {"weight", "bias", "mlp"}
    for name in open_checkpoint(tmp_path).tensors:
        parts = {part for part in name.split(".") if not part.isdecimal()}
        assert parts - modules <= {"down_proj", "up_proj"}, name
    assert {"t2d", "d2t"} <= open_checkpoint(tmp_path).tensors.keys() & modules


# What is said about engines --------------------------------------------------------------------------------


def test_architectures_are_registered():
    assert set(VLLM_ARCHITECTURES) | {DFLASH_ARCHITECTURE} <= known("vllm", "words", "registry")
    assert set(SGLANG_ARCHITECTURES) | {DFLASH_ARCHITECTURE} <= known("sglang", "classes")
    assert "Gemma4DSparkModel" not in known("sglang", "classes")


def test_heads_that_engines_have():
    assert not {"gate_proj", "joint_proj"} & known("vllm", "assigned", "qwen3_dspark")
    assert {"gate_proj", "joint_proj"} <= known("sglang", "assigned", "models/dspark")


def test_flags_of_the_launch_lines():
    flags = known("sglang", "words", "field_order")
    for method in ("dspark", "dflash"):
        line = launch_line("sglang", "d", "t", base_config(), method=method, revision="main")
        used = {word[2:].replace("-", "_") for word in line.split() if word.startswith("--")}
        assert used <= flags
    line = launch_line("vllm", "d", "t", base_config(), revision="main")
    used = json.loads(line.split("--speculative-config ", 1)[1].strip("'"))
    assert used.keys() <= known("vllm", "fields", "config/speculative")
    assert used == {"method": "dspark", "model": "d", "num_speculative_tokens": 5, "revision": "main"}


def test_other_speculators_are_all_refused_by_name():
    registered = {"dflash2", "eagle3", "peagle", "dspark", "dflash"}
    assert registered <= known("vllm", "words", "speculators/algos") | {"dspark", "dflash"}
    assert registered - {"dspark", "dflash"} <= SPECULATORS.keys()


def judged(exporter, draft, folder, **changes):
    config, tensors = exporter(draft)
    files = open_checkpoint(packagings.write(folder, config | changes, tensors))
    reader = detect_reader(files)
    found = verdicts(files, reader, reader.read_config(files.config, files.tensors))
    return found["vllm"].obstacles, found["sglang"].obstacles


def test_what_both_engines_serve_as_it_is(tmp_path):
    assert judged(packagings.deepspec, base_draft(), tmp_path / "a") == ([], [])
    assert judged(packagings.zlab, dflash_draft(), tmp_path / "b") == ([], [])
    assert judged(packagings.specforge_normalised, base_draft(), tmp_path / "c") == ([], [])


@pytest.mark.parametrize(
    ("exporter", "changes", "vllm", "sglang"),
    [
        (packagings.specforge, {}, "`markov_rank` is not at top level", "`markov_rank` is not at top level"),
        (packagings.lfm2, {}, "`is_neox_style` is missing", None),
        (packagings.modelopt, {}, "tensor names that are not DeepSpec's", "tensor names that are not DeepSpec's"),
        (packagings.prefixed, {}, "such as model.", "such as model."),
        (packagings.torchspec, {}, "such as context_", "such as context_"),
        (packagings.speculators, {}, None, "speculators packaging is not read"),
        (packagings.speculators, {"sample_from_anchor": None}, "would be taken for false", "not read"),
        (packagings.deepspec, {"model_type": "qwen3_5_text"}, "`model_type` 'qwen3_5_text'", None),
        (packagings.deepspec, {"partial_rotary_factor": 0.25}, None, "`partial_rotary_factor` of the target"),
        (packagings.deepspec, {"architectures": ["DSparkDraftModel"]}, None, None),
        (packagings.deepspec, {"architectures": ["Mine"]}, "architecture Mine", "architecture Mine"),
    ],
)
def test_obstacles_are_named(exporter, changes, vllm, sglang, tmp_path):
    for found, expected in zip(judged(exporter, base_draft(), tmp_path, **changes), (vllm, sglang), strict=True):
        assert (found == []) if expected is None else any(expected in line for line in found), found


def test_layouts_and_heads_an_engine_does_not_run(tmp_path):
    vllm, sglang = judged(packagings.deepspec, dflash_draft(sample_from_anchor=True), tmp_path / "a")
    assert "only 1+N is run" in " ".join(vllm) and "only 1+N is run" in " ".join(sglang)
    vllm, sglang = judged(packagings.deepspec, base_draft(markov_head_type="rnn"), tmp_path / "b")
    assert "only 'vanilla' is implemented" in " ".join(vllm) and sglang == []
    config, tensors = packagings.specforge_normalised(base_draft())
    vllm, sglang = judged(lambda draft: (config, tensors), None, tmp_path / "c", dspark_bonus_anchor=True)
    assert "would be taken for true" in " ".join(vllm) and "would be taken for true" in " ".join(sglang)
    draft = sliding_draft(sliding_window_non_causal=True)
    assert "sliding layers would be causal" in " ".join(judged(packagings.speculators, draft, tmp_path / "d")[0])
    assert "all layers would be causal" in " ".join(judged(packagings.speculators, dflash_draft(), tmp_path / "e")[0])
