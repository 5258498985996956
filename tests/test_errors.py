"""Bad input through `generate()` and `from_pretrained`: each its own error that names the argument, before any forward.

The ways in which a checkpoint itself can be wrong are in `test_checkpoints.py`; here is one of each kind, as a user
meets it.
"""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from planted import ForwardCounter, draft_config, random_draft
from running import Messages, assisted, check_exact, new_tokens
from safetensors.torch import load_file, save_file
from targets import build, clear_prompts, left_pad, plain_greedy
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM, T5Config, T5ForConditionalGeneration

from dspark_hf import DSparkDraftModel

LENGTHS = (3, 7, 12)


def refused(target, draft, match: str, **kwargs) -> str:
    """The message of the ValueError that `generate()` raises before the target runs."""
    ids = torch.tensor([[5, 6, 7]])
    with ForwardCounter(target) as counter, pytest.raises(ValueError, match=match) as caught:
        target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, max_new_tokens=8, **kwargs)
    assert counter.shapes == []
    return str(caught.value)


def other_target(**changes) -> Qwen3ForCausalLM:
    fields = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**{**fields, **changes})).eval()


# Pairs that do not fit (case 17) ----------------------------------------------------------------------------------


def test_wrong_hidden_size():
    message = refused(other_target(hidden_size=32), random_draft(build("qwen3")), "hidden_size")
    assert "32" in message and "64" in message


def test_taps_outside_the_target():
    message = refused(other_target(num_hidden_layers=2), random_draft(build("qwen3")), "target_layer_ids")
    assert "3" in message and "2" in message


def test_wrong_depth():
    refused(other_target(num_hidden_layers=6), random_draft(build("qwen3")), "num_target_layers")


@pytest.mark.parametrize("size", [64, 5000])
def test_wrong_vocabulary(size):
    message = refused(other_target(vocab_size=size), random_draft(build("qwen3")), "vocab")
    assert str(size) in message and "96" in message


def test_draft_as_target():
    """A draft has no `generate()`; where something calls the loop with it, the mix-up is named."""
    draft = random_draft(build("qwen3"))
    with pytest.raises((ValueError, AttributeError, TypeError)) as caught:
        draft.generate(torch.tensor([[5, 6]]), assistant_model=draft, max_new_tokens=4)
    assert "draft" in str(caught.value).lower() or "generate" in str(caught.value)
    with pytest.raises(ValueError, match="draft"):
        draft.validate_target(draft)


def test_encoder_decoder_target():
    config = T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=64, num_layers=4, num_heads=4, decoder_start_token_id=0)
    refused(T5ForConditionalGeneration(config).eval(), random_draft(build("qwen3")), "encoder-decoder")


def test_target_without_a_head():
    """A base model has no `generate()` of its own to call; borrowing its head is refused by name."""
    target = build("qwen3")
    draft = random_draft(target)
    with pytest.raises(ValueError, match="head|output embedding"):
        draft.shared_weights(target.model)


# Knobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "match"),
    [
        ({"num_assistant_tokens_schedule": "fast"}, "num_assistant_tokens_schedule.*'fast'"),
        ({"assistant_confidence_threshold": 1.5}, r"assistant_confidence_threshold.*1\.5"),
        ({"assistant_confidence_threshold": -0.1}, r"assistant_confidence_threshold.*-0\.1"),
        ({"num_assistant_tokens": 0}, "num_assistant_tokens.*0"),
        ({"num_assistant_tokens": -3}, "num_assistant_tokens.*-3"),
    ],
)
@pytest.mark.parametrize("where", ["draft", "call"])
def test_bad_knobs(knobs, match, where):
    target = build("qwen3")
    draft = random_draft(target)
    if where == "call":
        refused(target, draft, match, **knobs)
        return
    for name, value in knobs.items():
        setattr(draft.generation_config, name, value)
    refused(target, draft, match)


@pytest.mark.parametrize("schedule", ["confidence", "throughput"])
def test_a_schedule_that_needs_confidences(schedule):
    target = build("qwen3")
    draft = random_draft(target, enable_confidence_head=False)
    message = refused(target, draft, "confidence head", num_assistant_tokens_schedule=schedule)
    assert "constant" in message


def test_a_schedule_of_transformers_own():
    """Transformers' schedules for assistant models mean nothing here."""
    target = build("qwen3")
    refused(target, random_draft(target), "heuristic", num_assistant_tokens_schedule="heuristic")


def test_a_draft_without_generation_config():
    """A config lost on the way is no reason to fail."""
    target = build("qwen3")
    rows = clear_prompts(target, LENGTHS, 64)
    draft = random_draft(target, enable_confidence_head=False)
    draft.generation_config = None
    assert new_tokens(assisted(target, draft, rows), rows) == plain_greedy(target, rows, 64)
    draft.generation_config = GenerationConfig()
    assert new_tokens(assisted(target, draft, rows), rows) == plain_greedy(target, rows, 64)


# Arguments of the call --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"num_beams": 3}, "num_beams"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"prompt_lookup_num_tokens": 4}, "prompt_lookup_num_tokens"),
        ({"penalty_alpha": 0.5, "top_k": 4}, "penalty_alpha|Contrastive"),
        ({"dola_layers": "high"}, "dola_layers"),
        ({"assistant_early_exit": 2}, "assistant_early_exit"),
    ],
)
def test_arguments_that_do_not_go_together(kwargs, match):
    target = build("qwen3")
    refused(target, random_draft(target), match, **kwargs)


def test_a_cache_of_the_wrong_kind():
    from transformers import StaticCache
    from transformers.cache_utils import Cache

    from dspark_hf._compat import CACHE_KEY

    target = build("qwen3")
    cache = StaticCache(config=target.config, max_cache_len=64)
    assert isinstance(cache, Cache)
    refused(target, random_draft(target), "StaticCache", **{CACHE_KEY: cache})


def test_an_unknown_argument():
    target = build("qwen3")
    refused(target, random_draft(target), "dspark_depth", dspark_depth=3)


# Devices and dtypes -----------------------------------------------------------------------------------------------


def test_draft_on_another_device():
    target = build("qwen3")
    draft = DSparkDraftModel(draft_config(target)).to("meta")
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    message = refused(target, draft, "meta")
    assert "cpu" in message and ".to(" in message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_draft_of_another_dtype(dtype):
    """The draft decides nothing, so its dtype is its own: states are cast on the way in, and the output is exact."""
    target = build("qwen3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    check_exact(target, random_draft(target).to(dtype), rows)
    stored = random_draft(target, stores_embedding=True, stores_head=True).to(dtype)
    check_exact(target, stored, rows)


def test_target_of_another_dtype():
    target = build("qwen3", "sdpa", seed=41).to(torch.bfloat16)
    try:
        draft = random_draft(build("qwen3", "sdpa"), seed=1)
        output = assisted(target, draft, [[5, 9, 30, 8]], max_new_tokens=12)
        assert output.sequences.shape == (1, 16)
    finally:
        target.to(torch.float32)


# Checkpoints, as a user meets them ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, tiny_pair):
    """A writable copy of an official-format draft."""
    return shutil.copytree(tiny_pair[1], tmp_path / "draft")


def edit_config(folder, drop=(), **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def loading(folder, match: str) -> str:
    with pytest.raises((ValueError, OSError), match=match) as caught:
        DSparkDraftModel.from_pretrained(folder)
    return str(caught.value)


def test_missing_file(folder):
    (folder / "model.safetensors").unlink()
    loading(folder, "safetensors")


def test_missing_folder(tmp_path):
    loading(tmp_path / "nowhere", re.escape(str(tmp_path / "nowhere")))


def test_wrong_tensor_name(folder):
    """Case 16: one renamed tensor raises, and both names are in the message."""
    edit_tensors(folder, lambda tensors: tensors.update({"norms.weight": tensors.pop("norm.weight")}))
    message = loading(folder, "norms.weight")
    assert re.search(r"\bnorm\.weight\b", message)


def test_wrong_shape(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, :-1].contiguous()}))
    loading(folder, "fc.weight")


def test_missing_mask_id(folder):
    edit_config(folder, drop=["mask_token_id"])
    loading(folder, "mask_token_id")


def test_mask_id_outside_the_vocabulary(folder):
    edit_config(folder, mask_token_id=100_000)
    loading(folder, "mask_token_id")


def test_confidence_fed_by_no_markov_head(folder):
    edit_config(folder, markov_rank=0)
    loading(folder, "markov|confidence")


def test_a_loaded_draft_for_the_wrong_target(tiny_pair):
    draft = DSparkDraftModel.from_pretrained(tiny_pair[1])
    refused(build("qwen3"), draft, "target_layer_ids|vocab|num_target_layers")


def test_errors_are_not_warnings():
    """Nothing else is said besides the error."""
    target = build("qwen3")
    with Messages() as messages:
        refused(target, random_draft(target), "num_beams", num_beams=2)
    assert messages.logged == []
    assert left_pad([[1, 2], [3]])["attention_mask"].tolist() == [[1, 1], [0, 1]]
