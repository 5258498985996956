"""Every published configuration that is known: built with exactly its tensors, or refused with the right reason."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from published import EXPECTED, PUBLISHED, completed, opened, shapes

from dspark_hf import DSparkDraftModel
from dspark_hf.checkpoints import detect_reader, tensor_problems

ROOT = Path(__file__).resolve().parent.parent
READ = [name for name, expected in EXPECTED.items() if expected.style]
REFUSED = [name for name, expected in EXPECTED.items() if not expected.style]


def test_every_known_configuration_has_an_expectation():
    assert EXPECTED.keys() == PUBLISHED.keys() and len(READ) + len(REFUSED) == len(PUBLISHED) > 40


@pytest.mark.parametrize("name", READ)
def test_published_draft_is_read(name):
    expected, files = EXPECTED[name], opened(name)
    reader = detect_reader(files)
    assert reader.name == expected.outcome
    config = reader.read_config(files.config, files.tensors)
    assert config.sample_from_anchor is expected.anchor_first
    with torch.device("meta"):
        draft = DSparkDraftModel(config)
    built = {tensor: tuple(value.shape) for tensor, value in draft.state_dict().items()}
    assert tensor_problems(files, reader.rename(files.tensors), built) == {}
    if expected.refusal:
        with pytest.raises(ValueError, match=re.escape(expected.refusal)):
            bare = opened(name, with_overrides=False)
            detect_reader(bare).read_config(bare.config, bare.tensors)


@pytest.mark.parametrize("name", REFUSED)
def test_published_draft_is_refused(name):
    with pytest.raises(ValueError, match=re.escape(EXPECTED[name].outcome)) as error:
        detect_reader(opened(name))
    assert name.replace("__", "/") in str(error.value)


def read(name):
    files = opened(name)
    return detect_reader(files).read_config(files.config, files.tensors)


def test_facts_of_single_drafts():
    gemma = read("deepseek-ai__dspark_gemma4_12b_block7")
    assert (gemma.head_dim, gemma.num_key_value_heads, gemma.final_logit_softcapping) == (512, 1, 30.0)
    lfm2 = read("LiquidAI__LFM2.5-2.6B-DSpark")
    assert lfm2.rope_interleaved and (lfm2.block_size, lfm2.num_target_layers) == (9, 30)
    assert read("LiquidAI__LFM2.5-1.2B-Instruct-DSpark").rope_parameters["rope_theta"] == 1000000
    yarn = read("RadixArk__Qwen3.8-27B-DSpark").rope_parameters
    assert (yarn["rope_type"], yarn["factor"], yarn["original_max_position_embeddings"]) == ("yarn", 32, 8192)
    glm = read("RedHatAI__GLM-5.2-speculator.dspark")
    assert (glm.target_layer_ids, glm.num_draft_tokens) == ([7, 22, 38, 54, 69], 7)
    reduced = read("RedHatAI__Qwen3.6-35B-A3B-speculator.dspark")
    assert (reduced.draft_vocab_size, reduced.sliding_window, reduced.sliding_window_per_slot) == (32000, 2048, False)
    sliding = read("z-lab__Qwen3.6-27B-DFlash")
    assert sliding.sliding_window_per_slot and not sliding.sliding_window_non_causal
    assert (sliding.block_size, sliding.target_layer_ids) == (16, [1, 16, 31, 46, 61])
    assert read("torchspec_dflash_template").num_target_layers == 36
    qwen2 = read("TIE-Pilot__dspark-block8-qwen25-7b")
    assert qwen2.attention_bias and not qwen2.attention_output_bias and not qwen2.qk_norm


def test_parameter_count_of_a_listed_draft():
    """The one count that its page gives."""
    count = sum(torch.Size(shape).numel() for shape in shapes("openbmb__MiniCPM5-2B-DSpark").values())
    assert count == 323_776_001


def test_partial_configurations_keep_what_was_seen():
    for name, entry in PUBLISHED.items():
        for key, value in entry["config"].items():
            if key != "dflash_config":
                assert completed(name)[key] == value


def test_compatibility_page_is_up_to_date():
    path = ROOT / "docs" / "make_compatibility.py"
    specification = importlib.util.spec_from_file_location(path.stem, path)
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run python docs/make_compatibility.py"
