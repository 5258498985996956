"""Reading and writing checkpoints: every packaging, every way a folder can be wrong, and what loading costs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY_GOLDEN
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.checkpoints import deepspec_config, load_checkpoint_config, write_deepspec
from dspark_hf.checkpoints.detect import detect_reader
from dspark_hf.checkpoints.files import CheckpointFiles, TensorInfo

DEEPSPEC = TINY_GOLDEN / "qwen3_rnn" / "draft"
GEMMA = TINY_GOLDEN / "gemma4" / "draft"


@pytest.fixture
def folder(tmp_path):
    """A writable copy of an official-format checkpoint."""
    copied = tmp_path / "draft"
    copied.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(DEEPSPEC / name, copied / name)
    return copied


def edit_config(folder: Path, drop=(), **changes):
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in {**config, **changes}.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change):
    """Rewrites the weights; `change(tensors)` edits the dictionary in place."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def same_weights(first, second) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def speculators_files(nested=None, drop=(), heads=True, rows=None, **changes) -> CheckpointFiles:
    """A speculators checkpoint of which only configuration and headers exist: V 60, V_draft 30."""
    config = {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "block_size": 8,
        "mask_token_id": 59,
        "sample_from_anchor": True,
        "aux_hidden_state_layer_ids": [2, 9],
        "draft_vocab_size": 30,
        "target_hidden_size": 16,
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": heads,
        "confidence_head_with_markov": True,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "vocab_size": 60,
            **(nested or {}),
        },
        **changes,
    }
    shapes = {
        "embed_tokens.weight": (60, 16),
        "lm_head.weight": (30, 16),
        "d2t": (30,),
        "t2d": (60,),
        "fc.weight": (16, 32),
        "markov_head.markov_w1.weight": (60, 4),
        "markov_head.markov_w2.weight": (30, 4),
        "layers.0.self_attn.q_norm.weight": (8,),
        "layers.0.self_attn.q_proj.weight": (16, 16),
        **({"confidence_head.proj.weight": (1, 20), "confidence_head.proj.bias": (1,)} if heads else {}),
        **(rows or {}),
    }
    tensors = {name: TensorInfo(shape, "BF16", "none") for name, shape in shapes.items() if shape is not None}
    return CheckpointFiles("made up", {k: v for k, v in config.items() if k not in drop}, tensors, None)


def read(files: CheckpointFiles, **options) -> DSparkConfig:
    return detect_reader(files).read_config(files.config, files.tensors, options.get("sample_from_anchor"))


# Packagings -------------------------------------------------------------------------------------------------


def test_deepspec_qwen3():
    config, reader = load_checkpoint_config(DEEPSPEC)
    assert reader.name == "deepspec" and config.backbone == "qwen3"
    assert (config.target_layer_ids, config.block_size, config.mask_token_id) == ([1, 2, 4], 7, 190)
    assert (config.markov_head_type, config.markov_rank, config.num_draft_tokens) == ("rnn", 16, 7)
    assert config.stores_embedding and config.stores_head and config.qk_norm and config.enable_confidence_head
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1000000.0}


def test_deepspec_gemma4_uses_the_global_head_shape():
    config, reader = load_checkpoint_config(GEMMA)
    assert reader.name == "deepspec" and config.backbone == "gemma4"
    assert (config.head_dim, config.num_key_value_heads, config.k_eq_v, config.v_norm) == (32, 1, True, True)
    assert (config.embedding_scale, config.final_logit_softcapping) == (8.0, 30.0)
    assert config.rope_parameters["rope_type"] == "proportional" and config.target_layer_ids == [-1, 2, 4]


def test_deepspec_without_heads(folder):
    """The DFlash releases: same format, rank 0, anchor-first, head keys absent."""
    absent = ("markov_head_type", "confidence_head_with_markov")
    edit_config(folder, drop=absent, markov_rank=0, enable_confidence_head=False)
    heads = ("markov_head", "confidence_head")
    edit_tensors(folder, lambda t: [t.pop(name) for name in list(t) if name.startswith(heads)])
    draft = DSparkDraftModel.from_pretrained(folder)
    assert draft.markov_head is None and draft.confidence_head is None and draft.config.num_draft_tokens == 7
    assert draft.generation_config.num_assistant_tokens_schedule == "constant"


def test_deepspec_with_borrowed_embedding_and_biases(folder):
    def change(tensors):
        del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
        for layer in range(2):
            for part in "qkv":
                weight = tensors[f"layers.{layer}.self_attn.{part}_proj.weight"]
                tensors[f"layers.{layer}.self_attn.{part}_proj.bias"] = torch.ones(len(weight))
            del tensors[f"layers.{layer}.self_attn.q_norm.weight"], tensors[f"layers.{layer}.self_attn.k_norm.weight"]

    edit_tensors(folder, change)
    draft = DSparkDraftModel.from_pretrained(folder)
    assert draft.embed_tokens is None and draft.lm_head is None
    attention = draft.layers[1].self_attn
    assert attention.q_norm is None and attention.v_proj.bias is not None and attention.o_proj.bias is None


def test_speculators_reduced_vocabulary():
    config = read(speculators_files())
    assert (config.vocab_size, config.draft_vocab_size, config.has_reduced_vocabulary) == (60, 30, True)
    assert config.target_layer_ids == [1, 8], "hidden-state indices are one more than layer ids"
    assert (config.target_hidden_size, config.num_target_layers, config.qk_norm) == (16, None, True)
    assert config.sample_from_anchor and config.num_draft_tokens == 8


def test_speculators_defaults_of_the_nested_class():
    """`transformer_layer_config` leaves out what equals the default of its class."""
    config = read(speculators_files(nested={"model_type": "llama", "rms_norm_eps": 1e-5, "head_dim": None}))
    assert (config.head_dim, config.rms_norm_eps, config.hidden_act) == (8, 1e-5, "silu")
    assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    assert config.qk_norm, "the tensors decide, not the model type"


def test_speculators_sliding_layers_without_use_sliding_window():
    nested = {"layer_types": ["sliding_attention"], "sliding_window": 2048}
    config = read(speculators_files(nested=nested, sliding_window_non_causal=True))
    assert (config.sliding_window, config.layer_types) == (2048, ["sliding_attention"])
    assert config.sliding_window_non_causal
    assert read(speculators_files(nested={"sliding_window": 2048})).sliding_window is None


@pytest.mark.parametrize(
    ("tokens", "changes", "anchor_first"),
    [
        (7, {}, False),
        (8, {}, True),
        (7, {"sample_from_anchor": True}, True),
        (8, {"sample_from_anchor": False}, False),
        (None, {"speculators_model_type": "dflash"}, False),
    ],
)
def test_speculators_block_layout(tokens, changes, anchor_first):
    proposals = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}]}
    drop = () if "sample_from_anchor" in changes else ("sample_from_anchor",)
    files = speculators_files(drop=drop, speculators_config=proposals if tokens else {}, **changes)
    config = read(files)
    assert config.sample_from_anchor is anchor_first and config.num_draft_tokens == (8 if anchor_first else 7)
    assert read(files, sample_from_anchor=not anchor_first).sample_from_anchor is not anchor_first


def test_speculators_unknown_layout_is_asked_for():
    with pytest.raises(ValueError, match="`sample_from_anchor=False` to `from_pretrained`"):
        read(speculators_files(drop=("sample_from_anchor",)))


def test_speculators_full_vocabulary_with_everything_borrowed():
    rows = {"embed_tokens.weight": None, "lm_head.weight": None, "d2t": None, "t2d": None}
    rows["markov_head.markov_w2.weight"] = (60, 4)
    config = read(speculators_files(rows=rows, draft_vocab_size=60))
    assert not config.has_reduced_vocabulary and not config.stores_embedding and not config.stores_head
    with pytest.raises(ValueError, match="no `d2t` and `lm_head`"):
        read(speculators_files(rows=rows))


def test_speculators_confidence_goes_by_the_file():
    with pytest.warns(UserWarning, match="the file has no confidence head"):
        assert not read(speculators_files(heads=False, enable_confidence_head=True)).enable_confidence_head


def test_speculators_weights_load(tmp_path):
    """Written with this package's names, read through the packaging: t2d is dropped, d2t kept."""
    torch.manual_seed(0)
    files = speculators_files()
    draft = DSparkDraftModel(read(files))
    draft.d2t.copy_(torch.arange(30))
    t2d = torch.zeros(60, dtype=torch.bool)
    t2d[draft.draft_to_target] = True
    save_file({**draft.state_dict(), "t2d": t2d}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(files.config))
    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    assert same_weights(draft, loaded) and loaded.draft_to_target.tolist() == list(range(0, 60, 2))
    save_file({**draft.state_dict(), "d2t": torch.arange(30) * 2, "t2d": t2d}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="`d2t` must hold offsets"):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_scout_draft(scout_folder):
    config, reader = load_checkpoint_config(scout_folder)
    assert reader.name == "speculators" and config.target_layer_ids == [1, 8, 15, 22, 28]
    draft = DSparkDraftModel.from_pretrained(scout_folder)
    assert draft.dtype == torch.bfloat16 and draft.embed_tokens is None
    assert draft.lm_head.weight.shape == (12288, 576) and not draft.config.qk_norm
    stored = load_file(scout_folder / "model.safetensors")
    assert torch.equal(draft.draft_to_target, stored["t2d"].nonzero().squeeze(-1))


@pytest.mark.smollm2
@pytest.mark.slow
def test_scout_draft_drafts_what_it_was_recorded_to_draft(scout_folder, smollm2_path):
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    draft = DSparkDraftModel.from_pretrained(scout_folder, dtype=torch.float32)
    draft.validate_target(target)
    # It was recorded with the target's float32 rows as head; the file holds them in bfloat16.
    draft.lm_head.weight.data = target.lm_head.weight.data[draft.draft_to_target]
    shared = draft.shared_weights(target)
    for recorded in json.loads((scout_folder / "golden.json").read_text()):
        ids, expected = torch.tensor([recorded["prompt_ids"]]), recorded["first_round"]
        with torch.no_grad():
            output = target(input_ids=ids, output_hidden_states=True)
            taps = torch.cat([output.hidden_states[tap + 1] for tap in draft.config.target_layer_ids], dim=-1)
            anchor, positions = output.logits[:, -1].argmax(-1), torch.arange(ids.shape[1] + 7)[None]
            block = draft.draft_block(taps, anchor, positions, shared=shared)
            block_ids = torch.tensor([[anchor.item()] + [draft.config.mask_token_id] * 6])
            base_logits = draft(block_ids, taps, positions, shared=shared).base_logits
        assert anchor.tolist() == [expected["anchor"]] and block.tokens[0].tolist() == expected["drafted"]
        for actual, wanted, tolerance in (
            (block.confidence_logits[0], expected["confidence_logits"], 1e-4),
            (block.logits[0].amax(-1), expected["top_corrected_logit"], 1e-3),
            (base_logits[0].sum(-1), expected["base_logits_row_sums"], 1.0),  # sums of 12,288 logits
        ):
            torch.testing.assert_close(actual, torch.tensor(wanted), atol=tolerance, rtol=0)


# Own saves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [DEEPSPEC, GEMMA], ids=["qwen3", "gemma4"])
def test_round_trip(source, tmp_path):
    draft = DSparkDraftModel.from_pretrained(source)
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.num_assistant_tokens_schedule = "confidence"
    draft.generation_config.assistant_confidence_threshold = 0.25
    draft.config.confidence_calibration = {"temperature": [1.5] * 7, "shift": [0.1] * 7}
    draft.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors", "generation_config.json"}
    for loaded in (DSparkDraftModel.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert type(loaded) is DSparkDraftModel and same_weights(draft, loaded) and not loaded.training
        assert loaded.generation_config.to_dict() == draft.generation_config.to_dict()
        ours, theirs = draft.config.to_dict(), loaded.config.to_dict()
        assert {k: v for k, v in ours.items() if k != "_name_or_path"} == {
            k: v for k, v in theirs.items() if k != "_name_or_path"
        }
    assert type(AutoConfig.from_pretrained(tmp_path)) is DSparkConfig
    assert load_checkpoint_config(tmp_path)[1].name == "native"


def test_saving_over_the_folder_it_was_loaded_from(tmp_path):
    """Weights are mapped from the file that is being replaced."""
    DSparkDraftModel.from_pretrained(DEEPSPEC).save_pretrained(tmp_path)
    draft = DSparkDraftModel.from_pretrained(tmp_path)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    with torch.no_grad():
        draft.fc.weight += 1.0
    draft.save_pretrained(tmp_path)
    again = DSparkDraftModel.from_pretrained(tmp_path)
    assert torch.equal(again.fc.weight, before["fc.weight"] + 1.0)
    assert torch.equal(again.norm.weight, before["norm.weight"])


def test_auto_model_arguments(tmp_path):
    DSparkDraftModel.from_pretrained(DEEPSPEC).save_pretrained(tmp_path / "inner")
    draft = AutoModel.from_pretrained(tmp_path, subfolder="inner", dtype=torch.bfloat16, device_map="cpu")
    assert draft.dtype == torch.bfloat16
    assert DSparkDraftModel.from_pretrained(tmp_path, subfolder="inner", dtype="float16").dtype == torch.float16


def test_own_configuration_can_be_replaced_but_not_written_to(folder, tmp_path):
    DSparkDraftModel.from_pretrained(DEEPSPEC).save_pretrained(tmp_path / "own")
    config = DSparkConfig.from_pretrained(tmp_path / "own")
    config.max_position_embeddings = 999
    before = config.to_dict()
    draft = DSparkDraftModel.from_pretrained(tmp_path / "own", config=config, dtype="bfloat16")
    assert draft.config.max_position_embeddings == 999 and config.to_dict() == before
    with pytest.raises(ValueError, match="`config` can only replace that of this package's own saves"):
        DSparkDraftModel.from_pretrained(folder, config=config)


def test_state_dict_and_other_processes(tmp_path):
    draft = DSparkDraftModel.from_pretrained(DEEPSPEC)
    draft.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other").exists()
    state = {name: torch.zeros_like(tensor) for name, tensor in draft.state_dict().items()}
    draft.save_pretrained(tmp_path / "zeros", state_dict=state)
    assert not DSparkDraftModel.from_pretrained(tmp_path / "zeros").fc.weight.any()


def test_bad_settings_are_not_saved(tmp_path):
    draft = DSparkDraftModel.from_pretrained(DEEPSPEC)
    draft.generation_config.assistant_confidence_threshold = 2.0
    with pytest.raises(ValueError, match="assistant_confidence_threshold"):
        draft.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", [DEEPSPEC, GEMMA], ids=["qwen3", "gemma4"])
def test_deepspec_layout_round_trip(source, tmp_path):
    draft = DSparkDraftModel.from_pretrained(source)
    draft.config.confidence_calibration = {"temperature": [1.5] * 7, "shift": [0.1] * 7}
    write_deepspec(draft, tmp_path)
    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    assert load_checkpoint_config(tmp_path)[1].name == "deepspec" and same_weights(draft, loaded)
    written, official = (json.loads((path / "config.json").read_text()) for path in (tmp_path, source))
    for key in ("architectures", "block_size", "mask_token_id", "target_layer_ids", "markov_rank", "layer_types"):
        assert written[key] == official[key]
    assert loaded.config.to_diff_dict() == draft.config.to_diff_dict()


def test_what_the_deepspec_layout_cannot_express_is_named():
    config = read(speculators_files())
    with pytest.raises(ValueError, match="cannot express: a reduced `draft_vocab_size`"):
        deepspec_config(config)


def test_sharded_checkpoint(folder):
    tensors = load_file(folder / "model.safetensors")
    shards = {name: f"model-0000{1 + (number % 2)}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    (folder / "model.safetensors").unlink()
    assert same_weights(DSparkDraftModel.from_pretrained(folder), DSparkDraftModel.from_pretrained(DEEPSPEC))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks a file that its model.safetensors.index.json names"):
        DSparkDraftModel.from_pretrained(folder)


# What is wrong, and said so ---------------------------------------------------------------------------------


def refused(folder, message):
    with pytest.raises(ValueError, match=message):
        DSparkDraftModel.from_pretrained(folder)


def test_missing_folder(tmp_path):
    refused(tmp_path / "nowhere", "There is no folder")
    refused("./nowhere", "There is no folder")


def test_unreachable_repository():
    with pytest.raises(ValueError, match="'nobody/nothing' has no config.json that can be read"):
        DSparkDraftModel.from_pretrained("nobody/nothing", local_files_only=True)


def test_missing_config(folder):
    (folder / "config.json").unlink()
    refused(folder, "has no config.json")


def test_missing_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "has no model.safetensors")


def test_pickled_weights_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"has pickled weights only \(pytorch_model.bin\)")


def test_missing_and_misnamed_tensors_are_all_listed(folder):
    def change(tensors):
        tensors["layers.0.mlp.gate.weight"] = tensors.pop("layers.0.mlp.gate_proj.weight")
        del tensors["hidden_norm.weight"]

    edit_tensors(folder, change)
    missing = "missing tensors: hidden_norm.weight, layers.0.mlp.gate_proj.weight"
    refused(folder, f"{missing}; unexpected tensors: layers.0.mlp.gate.weight")


def test_extra_tensor(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"layers.2.extra": torch.ones(3)}))
    refused(folder, r"unexpected tensors: layers.2.extra\.")


def test_wrong_shape(folder):
    edit_tensors(folder, lambda t: t.update({"markov_head.markov_w2.weight": torch.ones(192, 15)}))
    refused(folder, r"wrong shapes: markov_head.markov_w2.weight is \[192, 15\], expected \[192, 16\]")


def test_wrong_number_of_taps(folder):
    edit_config(folder, target_layer_ids=[1, 2, 3, 4, 5])
    refused(folder, "`fc.weight`.*does not divide into the 5 taps")


def test_missing_mask_token(folder):
    edit_config(folder, drop=("mask_token_id",))
    refused(folder, "config.json lacks `mask_token_id`")


def test_several_missing_keys(folder):
    edit_config(folder, drop=("mask_token_id", "block_size"))
    refused(folder, "lacks `block_size`, `mask_token_id`")


def test_taps_outside_the_target(folder):
    edit_config(folder, target_layer_ids=[1, 2, 6])
    refused(folder, r"`target_layer_ids` \[1, 2, 6\] reach outside the target's `num_target_layers` 6")


def test_confidence_fed_by_a_markov_head_that_is_not_there(folder):
    edit_config(folder, markov_rank=0)
    refused(folder, "`confidence_head_with_markov` needs a Markov head")


def test_dflash_of_unknown_layout_is_asked_for(folder):
    edit_config(
        folder,
        drop=("markov_head_type", "confidence_head_with_markov"),
        architectures=["DFlashDraftModel"],
        markov_rank=0,
        enable_confidence_head=False,
    )
    heads = ("markov_head", "confidence_head")
    edit_tensors(folder, lambda t: [t.pop(name) for name in list(t) if name.startswith(heads)])
    refused(folder, "nothing says whether its anchor slot drafts")
    assert DSparkDraftModel.from_pretrained(folder, sample_from_anchor=False).config.num_draft_tokens == 6


@pytest.mark.parametrize(
    ("changes", "tensor", "message"),
    [
        ({"architectures": ["Qwen3Eagle3Model"], "ttt_length": 7}, None, "Eagle-3 draft"),
        ({"speculators_model_type": "eagle3"}, None, "speculators 'eagle3' draft"),
        ({"dspark_block_size": 5, "model_type": "deepseek_v4"}, None, "DeepSeek-V4"),
        ({}, "candidate_selector.predecessor_codebook", "DFlash2"),
        ({}, "prefix_gru.weight", "Domino"),
        ({}, "layers.0.self_attn.kv_a_proj_with_mqa.weight", "latent-attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fc.weight_scale_inv", "quantised"),
        ({"is_causal": True}, None, "causal inside its block in full-attention layers"),
        ({"attention_sink_bias": True}, None, "`attention_sink_bias` True, which is not supported"),
    ],
)
def test_packagings_that_are_recognised_but_not_read(folder, changes, tensor, message):
    edit_config(folder, **changes)
    if tensor is not None:
        edit_tensors(folder, lambda tensors: tensors.update({tensor: torch.ones(1)}))
    refused(folder, message)


def test_a_copy_of_the_settings_in_dflash_config_does_no_harm(folder):
    edit_config(folder, dflash_config={"projector_type": "dspark", "target_layer_ids": [1, 2, 4]})
    assert same_weights(DSparkDraftModel.from_pretrained(folder), DSparkDraftModel.from_pretrained(DEEPSPEC))


def test_an_ordinary_model_is_not_a_draft(tmp_path, tiny_pair):
    refused(tiny_pair[0], r"in no packaging this package knows \(model_type 'qwen3'")


def test_unknown_arguments_and_devices():
    with pytest.raises(TypeError, match="unexpected arguments: revison"):
        DSparkDraftModel.from_pretrained(DEEPSPEC, revison="main")
    with pytest.raises(ValueError, match="safetensors only"):
        DSparkDraftModel.from_pretrained(DEEPSPEC, use_safetensors=False)
    with pytest.raises(ValueError, match="lives on one device"):
        DSparkDraftModel.from_pretrained(DEEPSPEC, device_map={"layers.0": 0, "layers.1": 1})
    assert DSparkDraftModel.from_pretrained(DEEPSPEC, device_map={"": "cpu"}).device.type == "cpu"


# Memory -----------------------------------------------------------------------------------------------------

MEASURE = """
import resource, sys, threading
import psutil, torch
from dspark_hf import DSparkDraftModel

def resident():  # of this process: Linux counts the mapped file once its pages are touched
    return psutil.Process().memory_info().rss

tiny = DSparkDraftModel.from_pretrained(sys.argv[2])  # everything imported and warmed up
tiny.draft_block(None, torch.tensor([3]), torch.arange(7)[None])
before, peak, done = resident(), [0], threading.Event()

def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], resident())

watcher = threading.Thread(target=watch)
watcher.start()
draft = DSparkDraftModel.from_pretrained(sys.argv[1], dtype=sys.argv[3])
total = sum(p.float().sum().item() if p.numel() < 1e6 else sum(r.float().sum().item() for r in p.chunk(64))
            for p in draft.parameters())
done.set()
watcher.join()
weights = sum(p.numel() * p.element_size() for p in draft.parameters())
print((max(peak[0], resident()) - before) / weights)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_loading_needs_the_weights_once(stored, tmp_path):
    """About 300 MB of weights, every one of them read: the process grows by their size, not by twice that."""
    config = DSparkConfig(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=40000 if stored == "bfloat16" else 15000,
        mask_token_id=3,
        target_layer_ids=[0, 1],
        markov_rank=64,
    )
    (tmp_path / "config.json").write_text(json.dumps(deepspec_config(config)))
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in DSparkDraftModel(config).state_dict().items()}
    save_file(
        {name: torch.randn(shape, dtype=torch.float32).to(getattr(torch, stored)) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    assert (tmp_path / "model.safetensors").stat().st_size > 250e6
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), str(DEEPSPEC), "auto"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 1.15, "copies of the weights held at the peak"
