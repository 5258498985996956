"""Every packaging: recognised, read, and computing the same; what is another model, refused by name."""

import packagings
import pytest
import torch
import transformers
from packagings import (
    DFLASH,
    DSPARK,
    MASK,
    TAPS,
    YARN,
    base_draft,
    block,
    dflash_draft,
    sliding_draft,
    vocabulary,
    write,
)
from running import check_exact
from targets import build

from dspark_hf import DSparkDraftModel
from dspark_hf._compat import CACHE_KEY
from dspark_hf.checkpoints import load_checkpoint_config


def names(table):
    return [exporter.__name__ for exporter in table]


def check_same(folder, draft, reader):
    """What is loaded from `folder` drafts what `draft` does."""
    config, found = load_checkpoint_config(folder)
    assert found.name == reader
    loaded = DSparkDraftModel.from_pretrained(folder)
    expected, actual = block(draft), block(loaded, vocabulary(draft))
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-5, rtol=0)
    assert torch.equal(actual.tokens, expected.tokens)
    if expected.confidence_logits is None:
        assert actual.confidence_logits is None
    else:
        torch.testing.assert_close(actual.confidence_logits, expected.confidence_logits, atol=1e-5, rtol=0)
    assert loaded.config.num_draft_tokens == draft.config.num_draft_tokens
    assert loaded.config.target_layer_ids == TAPS and loaded.config.mask_token_id == MASK
    return loaded


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("exporter", DSPARK, ids=names(DSPARK))
def test_same_weights_in_every_packaging_draft_the_same(exporter, head, tmp_path):
    draft = base_draft(markov_head_type=head)
    loaded = check_same(write(tmp_path, *exporter(draft)), draft, DSPARK[exporter])
    assert loaded.config.sample_from_anchor and loaded.config.enable_confidence_head


@pytest.mark.parametrize("exporter", DFLASH, ids=names(DFLASH))
def test_same_dflash_weights_in_every_packaging_draft_the_same(exporter, tmp_path):
    draft = dflash_draft()
    loaded = check_same(write(tmp_path, *exporter(draft)), draft, DFLASH[exporter])
    assert not loaded.config.sample_from_anchor and loaded.markov_head is None


def test_deepspec_dflash_drafts_from_the_anchor(tmp_path):
    draft = dflash_draft(sample_from_anchor=True)
    assert check_same(write(tmp_path, *packagings.deepspec(draft)), draft, "deepspec").config.num_draft_tokens == 5


@pytest.mark.parametrize("exporter", [e for e in DSPARK if e not in (packagings.minicpm5, packagings.torchspec)])
def test_yarn(exporter, tmp_path):
    """Rotary scaling in either of Transformers' schemas."""
    draft = base_draft(rope_parameters=YARN)
    check_same(write(tmp_path, *exporter(draft)), draft, DSPARK[exporter])


@pytest.mark.parametrize("non_causal", [False, True])
@pytest.mark.parametrize("exporter", [packagings.specforge, packagings.lfm2, packagings.speculators])
def test_sliding_layers(exporter, non_causal, tmp_path):
    """DFlash's relatives count the window from each slot, speculators from the anchor."""
    per_slot = exporter is not packagings.speculators
    draft = sliding_draft(sliding_window_non_causal=non_causal, sliding_window_per_slot=per_slot)
    config, tensors = exporter(draft)
    if non_causal and per_slot:
        config["is_causal"] = False
    loaded = check_same(write(tmp_path, config, tensors), draft, DSPARK[exporter])
    assert loaded.config.sliding_window_per_slot is per_slot
    other = sliding_draft(sliding_window_non_causal=non_causal, sliding_window_per_slot=not per_slot)
    assert not torch.allclose(block(other).logits, block(draft).logits), "the window reaches into this context"


def test_modelopt_slides_every_layer_by_a_flag(tmp_path):
    every = dict(layer_types=["sliding_attention"] * 2, sliding_window_per_slot=True)
    draft = sliding_draft(sliding_window_non_causal=True, **every)
    config, tensors = packagings.modelopt(draft)
    config |= {"layer_types": ["full_attention"] * 2}
    config["dflash_config"] |= {"use_swa": True, "swa_window_size": 6}
    check_same(write(tmp_path, config, tensors), draft, "modelopt")
    config["dflash_config"] |= {"causal": True}
    draft = sliding_draft(**every)
    check_same(write(tmp_path, config, tensors), draft, "modelopt")


def test_reduced_vocabulary(tmp_path):
    draft = base_draft(draft_vocab_size=20)
    draft.d2t.copy_(torch.arange(20) * 2)
    config, tensors = packagings.speculators(draft)
    check_same(write(tmp_path / "stored", config, tensors), draft, "speculators")
    del tensors["embed_tokens.weight"]  # version 0.9 leaves it to the target
    loaded = DSparkDraftModel.from_pretrained(write(tmp_path / "today", config, tensors))
    expected = block(draft).logits
    embedding = packagings.SharedWeights(embedding=draft.embed_tokens.weight, head=None)
    torch.testing.assert_close(block(loaded, embedding).logits, expected, atol=1e-5, rtol=0)
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match="no `lm_head.weight`"):
        DSparkDraftModel.from_pretrained(write(tmp_path / "headless", config, tensors))


@pytest.mark.parametrize("context", [4, 9, 20])
def test_transformers_own_dflash_draft(context, tmp_path):
    """Against the model in Transformers itself, with a window that reaches into the context."""
    classes = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    config = classes.MuseGlimmerAssistantConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        block_size=5,
        mask_token_id=MASK,
        target_layer_ids=TAPS,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = classes.MuseGlimmerAssistantModel(config).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        parameter.data = 1.0 + 0.2 * noise if "norm" in name else 0.25 * noise
    model.save_pretrained(tmp_path)
    draft = DSparkDraftModel.from_pretrained(tmp_path, config_overrides={"vocab_size": 60})
    assert load_checkpoint_config(tmp_path)[1].name == "transformers-dflash"
    assert load_checkpoint_config(tmp_path)[0].vocab_size == 202048 and draft.config.num_draft_tokens == 4
    embedding = torch.randn(60, 32)
    ids = torch.tensor([[7, MASK, MASK, MASK, MASK]])
    states, positions = torch.randn(1, context, 3 * 32), torch.arange(context + 5)[None]
    shared = packagings.SharedWeights(embedding=embedding, head=None)
    ours = draft(ids, states, positions, shared=shared, return_logits=False).last_hidden_state
    cache = transformers.cache_utils.DFlashCache(config=config)
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(context)
    with torch.no_grad():
        theirs = model(embedding[ids], states, position_ids=positions, use_cache=True, **{CACHE_KEY: cache})
    torch.testing.assert_close(ours, theirs.last_hidden_state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["lfm2", "modelopt", "speculators_today", "zlab"])
def test_what_is_loaded_drafts_in_generate(name, tmp_path):
    exporter = getattr(packagings, name)
    target = build("qwen3", hidden_size=32, vocab_size=60, num_hidden_layers=6, max_position_embeddings=256)
    make = dflash_draft if exporter is packagings.zlab else base_draft
    draft = DSparkDraftModel.from_pretrained(write(tmp_path, *exporter(make())))
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    output = check_exact(target, draft, [[5, 6, 7], [8, 9, 10, 11, 12]], max_new_tokens=12)
    assert output.dspark_stats.drafted > 0


# Layout and taps --------------------------------------------------------------------------------------------


def changed(exporter, draft, nested=None, drop=(), **top):
    config, tensors = exporter(draft)
    config = {key: value for key, value in (config | top).items() if key not in drop}
    config["dflash_config"] = {**config.get("dflash_config", {}), **(nested or {})}
    return config, tensors


@pytest.mark.parametrize(
    ("nested", "top", "anchor_first"),
    [
        ({}, {}, True),
        ({"sample_from_anchor": False}, {}, False),
        ({}, {"sample_from_anchor": False}, False),
        ({}, {"dspark_bonus_anchor": True}, False),
        ({}, {"dspark_bonus_anchor": True, "sample_from_anchor": True}, True),
        ({"shift_label": False}, {}, False),
        ({"shift_label": False}, {"dspark_bonus_anchor": False}, True),
    ],
)
def test_layout_rules_in_order(nested, top, anchor_first, tmp_path):
    folder = write(tmp_path, *changed(packagings.specforge, base_draft(), nested, **top))
    for override, expected in ((None, anchor_first), (True, True), (False, False)):
        draft = DSparkDraftModel.from_pretrained(folder, sample_from_anchor=override)
        assert draft.config.sample_from_anchor is expected


def test_plain_dflash_may_say_that_its_anchor_drafts(tmp_path):
    draft = dflash_draft(sample_from_anchor=True)
    config, tensors = changed(packagings.zlab, draft, {"sample_from_anchor": True})
    check_same(write(tmp_path, config, tensors), draft, "dflash")


@pytest.mark.parametrize(("tokens", "anchor_first"), [(5, True), (4, False)])
def test_speculators_files_older_than_the_layout_key(tokens, anchor_first, tmp_path):
    config, tensors = packagings.speculators(base_draft(sample_from_anchor=anchor_first))
    del config["sample_from_anchor"]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == tokens
    loaded, reader = load_checkpoint_config(write(tmp_path, config, tensors))
    assert loaded.sample_from_anchor is anchor_first


def test_defaults_of_the_reference_implementation(tmp_path):
    draft = dflash_draft(block_size=16)
    config, tensors = packagings.zlab(draft)
    del config["block_size"], config["dflash_config"]["target_layer_ids"]
    config["num_target_layers"] = 7
    loaded, _ = load_checkpoint_config(write(tmp_path, config, tensors))
    assert (loaded.block_size, loaded.target_layer_ids) == (16, [1, 2, 4])
    del config["num_target_layers"]
    with pytest.raises(ValueError, match="DFlash config.json lacks `num_target_layers`"):
        load_checkpoint_config(write(tmp_path / "b", config, tensors))


def test_torchspec_calls_the_number_of_taps_its_target_layers(tmp_path):
    config, tensors = packagings.torchspec(base_draft())
    assert config["num_target_layers"] == 3
    loaded, _ = load_checkpoint_config(write(tmp_path / "a", config, tensors))
    assert loaded.num_target_layers == 6
    del config["block_size"]
    folder = write(tmp_path / "b", config, tensors)
    with pytest.raises(ValueError, match=r"lacks `block_size`.*`config_overrides=\{'block_size': ...\}`"):
        DSparkDraftModel.from_pretrained(folder)
    assert DSparkDraftModel.from_pretrained(folder, config_overrides={"block_size": 5}).config.block_size == 5


def test_zlab_scales_and_caps(tmp_path):
    draft = dflash_draft(embedding_scale=3.0, final_logit_softcapping=5.0)
    config, tensors = packagings.zlab(draft)
    config["dflash_config"] |= {"input_embedding_scale": 3.0, "final_logit_softcapping": 5.0}
    check_same(write(tmp_path, config, tensors), draft, "dflash")


def test_rotary_keys_of_the_target_are_passed_over(tmp_path):
    draft = base_draft()
    config, tensors = packagings.deepspec(draft)
    config["rope_parameters"] |= {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 2], "mrope_interleaved": True}
    folder = write(tmp_path, config | {"model_type": "qwen3_5_text", "partial_rotary_factor": 0.25}, tensors)
    check_same(folder, draft, "deepspec")


def test_both_rotary_schemas_with_different_bases(tmp_path):
    """One exporter leaves a class default in `rope_theta` beside the true `rope_parameters`."""
    draft = base_draft(rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
    config, tensors = packagings.modelopt(draft)
    folder = write(tmp_path, config | {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500.0}}, tensors)
    check_same(folder, draft, "modelopt")


@pytest.mark.parametrize("exporter", [packagings.specforge, packagings.modelopt])
def test_confidence_goes_by_the_file(exporter, tmp_path):
    draft = base_draft(enable_confidence_head=False)
    config, tensors = exporter(draft)
    config["dflash_config"] |= {"enable_confidence_head": True, "use_confidence_head": True}
    folder = write(tmp_path, config, tensors)
    with pytest.warns(UserWarning, match="the file has no confidence head"):
        assert DSparkDraftModel.from_pretrained(folder).confidence_head is None


def test_last_layer_tap_is_noted(tmp_path):
    config, tensors = packagings.deepspec(base_draft())
    files = packagings.write(tmp_path, config | {"target_layer_ids": [0, 2, 5]}, tensors)
    from dspark_hf.checkpoints import detect_reader, open_checkpoint

    opened = open_checkpoint(files)
    _, notes = detect_reader(opened).resolve(opened.config, opened.tensors, None)
    assert any("the target's last, is tapped before the final norm" in note for note in notes)


# What is wrong, and said so ---------------------------------------------------------------------------------


def refused(folder, message, **options):
    with pytest.raises(ValueError, match=message):
        DSparkDraftModel.from_pretrained(folder, **options)


@pytest.mark.parametrize("exporter", DSPARK, ids=names(DSPARK))
def test_renamed_and_extra_tensors_are_listed_in_the_files_own_names(exporter, tmp_path):
    config, tensors = exporter(base_draft())
    stored = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    wrong = stored.replace("up_proj", "upper_proj")
    tensors[wrong] = tensors.pop(stored)
    missing = "missing tensors: layers.1.mlp.up_proj.weight"
    refused(write(tmp_path, config, tensors), f"{missing}; unexpected tensors: {wrong}")


@pytest.mark.parametrize("exporter", DSPARK, ids=names(DSPARK))
def test_missing_mask_token(exporter, tmp_path):
    config, tensors = exporter(base_draft())
    config.pop("mask_token_id", None)
    config.get("dflash_config", {}).pop("mask_token_id", None)
    refused(write(tmp_path, config, tensors), "config.json lacks `mask_token_id`")


def test_wrong_dtypes_are_listed(tmp_path):
    config, tensors = packagings.specforge(base_draft())
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.float8_e4m3fn)
    expected = "wrong dtypes: fc.weight is I8, expected F32 or BF16 or F16, norm.weight is F8_E4M3, expected F32"
    refused(write(tmp_path, config, tensors), expected)


def test_quantised_weights_are_told_by_their_dtypes(tmp_path):
    """A configuration copied from a quantised target declares what only the target has."""
    draft = base_draft()
    config, tensors = packagings.deepspec(draft)
    config |= {"quantization_config": {"quant_method": "fp8"}, "kv_lora_rank": 512, "num_experts": 8}
    check_same(write(tmp_path / "a", config, tensors), draft, "deepspec")
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)
    refused(write(tmp_path / "b", config, tensors), r"has quantised weights \(fp8: F8_E4M3\)")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays(dtype, tmp_path):
    config, tensors = packagings.specforge(base_draft())
    tensors = {name: tensor.to(torch.float32 if "confidence" in name else dtype) for name, tensor in tensors.items()}
    draft = DSparkDraftModel.from_pretrained(write(tmp_path, config, tensors))
    assert {parameter.dtype for parameter in draft.parameters()} == {dtype}, "one dtype, that of `fc`"


def test_contradicting_keys(tmp_path):
    config, tensors = packagings.specforge(base_draft())
    folder = write(tmp_path, config | {"mask_token_id": 3}, tensors)
    refused(folder, r"contradicts itself: `dflash_config.mask_token_id` 59, `mask_token_id` 3")


def test_custom_code_is_never_run(tmp_path):
    config, tensors = packagings.deepspec(base_draft())
    code = tmp_path / "modeling_fancy.py"
    folder = write(tmp_path, config | {"auto_map": {"AutoModel": "modeling_fancy.FancyDrafter"}}, tensors)
    code.write_text("raise SystemExit('run')")
    for options in ({}, {"trust_remote_code": True}):
        refused(folder, r"asks for code from its repository \(`auto_map`: modeling_fancy.FancyDrafter\)", **options)
    assert DSparkDraftModel.from_pretrained(folder, config_overrides={"auto_map": None}).config.block_size == 5


def test_a_model_type_that_another_trainer_uses_too(tmp_path):
    """An early SpecForge configuration class is called "dspark", as ours is."""
    draft = base_draft()
    config, tensors = packagings.specforge(draft)
    check_same(write(tmp_path, config | {"model_type": "dspark"}, tensors), draft, "specforge")


@pytest.mark.parametrize(
    ("changes", "tensor", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, None, "DFlash2 draft.*convolutions along the block"),
        ({}, "layers.0.attention_conv.base_kernel", "DFlash2 draft"),
        ({"dflash_config": {"selector_rank": 256}}, None, "DFlash2 draft"),
        ({"architectures": ["DominoDraftModel"]}, None, "Domino draft.*GRU"),
        ({"dflash_config": {"projector_type": "domino"}}, None, "Domino draft"),
        ({"dflash_config": {"projector_type": "lilicorr"}}, None, "projector 'lilicorr'"),
        ({"dflash_config": {"attention_mode": "mla"}}, None, "latent-attention"),
        ({"dflash_config": {"attention_modes": ["gqa", "kda"]}}, None, "attention gqa, kda"),
        ({"architectures": ["K3DSparkModel"]}, None, "latent-attention"),
        ({}, "layers.0.self_attn.kv_a_proj_with_mqa.weight", "latent-attention"),
        ({"architectures": ["Qwen3Eagle3Model"]}, None, "Eagle-3 draft"),
        ({"architectures": ["Qwen35DSparkModel"]}, None, "gated-attention"),
        ({"architectures": ["MiniMaxM3DSparkModel"]}, None, "MiniMax-M3 layers"),
        ({"model_arch": "dfly"}, None, "DFly draft"),
        ({"dspark_block_size": 5, "model_type": "deepseek_v4"}, None, "DeepSeek-V4 target.*What is missing: mixture"),
        ({}, "mtp.0.main_proj.weight", "DeepSeek-V4 target"),
        (
            {"quantization_config": {"quant_algo": "W4A16_NVFP4"}, "is_causal": True},
            None,
            "causal inside its block.*W4A16_NVFP4",
        ),
        ({"dflash_config": {"causal": True}}, None, "causal inside its block"),
        ({"dflash_config": {"attention_sink_bias": True}}, None, "`attention_sink_bias`"),
        ({"dflash_config": {"attention_value_scale": 0.612}}, None, "`attention_value_scale` 0.612"),
        ({}, "layers.0.mlp.experts.0.up_proj.weight", "mixture-of-experts"),
        ({}, "layers.0.self_attn.qkv_proj.weight", "fused query"),
        ({}, "mask_embedding", "mask embedding of its own"),
        ({"speculators_model_type": "xpress"}, None, "speculators 'xpress' draft"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "rope_dim": 4}}, None, "rotates 4 dimensions"),
    ],
)
def test_other_models_are_refused_by_name_and_reason(changes, tensor, message, tmp_path):
    config, tensors = packagings.specforge(base_draft())
    nested = config["dflash_config"] | changes.get("dflash_config", {})
    if "attention_modes" in nested:
        del nested["attention_mode"]
    if tensor is not None:
        tensors[tensor] = torch.ones(1)
    refused(write(tmp_path, config | changes | {"dflash_config": nested}, tensors), message)


def test_gated_queries_are_told_by_their_shape(tmp_path):
    config, tensors = packagings.deepspec(base_draft())
    tensors["layers.0.self_attn.q_proj.weight"] = tensors["layers.0.self_attn.q_proj.weight"].repeat(2, 1)
    refused(write(tmp_path, config, tensors), "gated-attention layers")


def test_weights_that_are_no_safetensors(tmp_path):
    config, tensors = packagings.deepspec(base_draft())
    folder = write(tmp_path, config, tensors)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    refused(folder, "model.safetensors is truncated or damaged")
    weights.write_bytes(content[:100])
    refused(folder, "model.safetensors is truncated or damaged")
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    refused(folder, "model.safetensors is a Git LFS pointer")
    weights.rename(folder / "draft.gguf")
    refused(folder, "GGUF weights only")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json is not valid JSON")


def test_prefixes_that_collide_are_reported(tmp_path):
    config, tensors = packagings.deepspec(base_draft())
    tensors["model.norm.weight"] = torch.ones(32)
    refused(write(tmp_path, config, tensors), "unexpected tensors: model.norm.weight")
