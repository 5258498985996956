"""From packaging to packaging: what is written reads back as the same draft, and what cannot be written is named."""

import json
import warnings

import packagings
import pytest
import torch
from conftest import TINY_GOLDEN
from packagings import HIDDEN, base_draft, block, dflash_draft, sliding_draft, vocabulary, write
from safetensors.torch import load_file, save_file
from targets import build

from dspark_hf import DSparkDraftModel
from dspark_hf.checkpoints import (
    Vocabulary,
    convert_checkpoint,
    load_checkpoint_config,
    write_deepspec,
    write_native,
    write_serving,
    write_speculators,
)
from dspark_hf.checkpoints.convert import target_vocabulary
from dspark_hf.cli import main


def check(folder, draft, reader, shared=None):
    """What was written to `folder` is read by `reader` and drafts what `draft` does."""
    assert load_checkpoint_config(folder)[1].name == reader
    loaded = DSparkDraftModel.from_pretrained(folder)
    expected, actual = block(draft, shared), block(loaded, shared)
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-5, rtol=0)
    if draft.confidence_head is not None:
        torch.testing.assert_close(actual.confidence_logits, expected.confidence_logits, atol=1e-5, rtol=0)
    return loaded


# Round trips ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
@pytest.mark.parametrize("anchor_first", [True, False])
def test_every_head_and_layout_in_every_packaging_that_holds_it(head, anchor_first, tmp_path):
    fields = dict(markov_head_type=head) if head else dict(markov_rank=0, confidence_head_with_markov=False)
    draft = base_draft(sample_from_anchor=anchor_first, **fields)
    draft.config.confidence_calibration = {"temperature": [1.5] * draft.config.num_draft_tokens}
    writers = {"native": write_native, "deepspec": write_deepspec, "speculators": write_speculators}
    for name, writer in writers.items():
        if name == "deepspec" and not anchor_first:
            with pytest.raises(ValueError, match="cannot express: `sample_from_anchor` false"):
                writer(draft, tmp_path / name)
            assert not (tmp_path / name).exists()
            continue
        writer(draft, tmp_path / name)
        loaded = check(tmp_path / name, draft, name)
        assert loaded.config.confidence_calibration == draft.config.confidence_calibration
        assert loaded.config.sample_from_anchor is anchor_first
        state = loaded.state_dict()
        assert all(torch.equal(tensor, state[key]) for key, tensor in draft.state_dict().items())


def test_reduced_vocabulary_and_sliding_layers_in_the_speculators_packaging(tmp_path):
    draft = sliding_draft(draft_vocab_size=20, sliding_window_non_causal=True)
    draft.d2t.copy_(torch.arange(20) * 2)
    write_speculators(draft, tmp_path, verifier="nobody/target")
    check(tmp_path, draft, "speculators")
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["t2d"].dtype == torch.bool and stored["t2d"].nonzero().squeeze(1).tolist() == list(range(0, 60, 3))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "nobody/target"
    with pytest.raises(ValueError, match="cannot express: a sliding window counted from each slot"):
        write_speculators(sliding_draft(sliding_window_per_slot=True), tmp_path / "other")
    with pytest.raises(ValueError, match="cannot express: a reduced `draft_vocab_size` without a stored head"):
        write_speculators(sliding_draft(draft_vocab_size=20, stores_head=False), tmp_path / "other")


def test_borrowed_vocabulary_stays_borrowed_or_is_taken_from_the_target(tmp_path):
    full = base_draft()
    shared = vocabulary(full)
    config, tensors = packagings.specforge(full)
    draft = DSparkDraftModel.from_pretrained(write(tmp_path / "source", config, tensors))
    write_speculators(draft, tmp_path / "speculators")
    check(tmp_path / "speculators", draft, "speculators", shared)
    with pytest.raises(ValueError, match="no stored embedding or head"):
        write_deepspec(draft, tmp_path / "deepspec")
    theirs = Vocabulary(torch.cat([shared.embedding, torch.ones(4, HIDDEN)]), shared.head.weight.data)
    write_deepspec(draft, tmp_path / "deepspec", vocabulary=theirs)
    check(tmp_path / "deepspec", full, "deepspec")
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \[3, 3\]; the draft needs \[60, 32\]"):
        write_deepspec(draft, tmp_path / "no", vocabulary=Vocabulary(torch.ones(3, 3), torch.ones(3, 3)))


@pytest.mark.parametrize("to", ["deepspec", "speculators", "serving"])
def test_interleaved_rotary_embedding_is_turned_into_a_half_split_one(to, tmp_path):
    full = base_draft()
    source = write(tmp_path / "lfm2", *packagings.lfm2(full))
    interleaved = DSparkDraftModel.from_pretrained(source)
    assert interleaved.config.rope_interleaved
    theirs = Vocabulary(full.embed_tokens.weight, full.lm_head.weight)
    if to == "speculators":
        write_speculators(interleaved, tmp_path / "out")
    else:
        writer = write_deepspec if to == "deepspec" else write_serving
        writer(interleaved, tmp_path / "out", vocabulary=theirs)
    loaded = check(
        tmp_path / "out", interleaved, "speculators" if to == "speculators" else "deepspec", vocabulary(full)
    )
    assert not loaded.config.rope_interleaved
    assert torch.equal(loaded.layers[1].self_attn.k_proj.weight, full.layers[1].self_attn.k_proj.weight)


# One file for vLLM and SGLang -------------------------------------------------------------------------------


def test_serving_file_leaves_the_vocabulary_to_the_target(tmp_path):
    draft = base_draft(rope_parameters=packagings.YARN)
    theirs = Vocabulary(draft.embed_tokens.weight, draft.lm_head.weight)
    write_serving(draft, tmp_path / "dspark", vocabulary=theirs)
    loaded = check(tmp_path / "dspark", draft, "deepspec", vocabulary(draft))
    assert loaded.embed_tokens is None and loaded.lm_head is None
    config = json.loads((tmp_path / "dspark" / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["Qwen3DSparkModel"], "qwen3")
    assert (config["sample_from_anchor"], config["dspark_bonus_anchor"]) == (True, False)
    assert config["rope_scaling"]["factor"] == config["rope_parameters"]["factor"] == 4.0
    assert "sample_from_anchor" not in config["dflash_config"] and config["torch_dtype"] == "float32"
    other = Vocabulary(draft.embed_tokens.weight, draft.lm_head.weight + 1)
    with pytest.raises(ValueError, match="lm_head.weight that differs from the target's"):
        write_serving(draft, tmp_path / "other", vocabulary=other)
    with pytest.warns(UserWarning, match="embed_tokens.weight and lm_head.weight are written unchecked"):
        write_serving(draft, tmp_path / "unchecked")
    check(tmp_path / "unchecked", draft, "deepspec")


@pytest.mark.parametrize("non_causal", [False, True])
def test_serving_file_with_sliding_layers(non_causal, tmp_path):
    draft = sliding_draft(
        sliding_window_per_slot=True, sliding_window_non_causal=non_causal, stores_embedding=False, stores_head=False
    )
    write_serving(draft, tmp_path / "dspark")
    check(tmp_path / "dspark", draft, "deepspec", vocabulary(base_draft()))


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        (dict(draft_vocab_size=20), "a reduced `draft_vocab_size`"),
        (dict(markov_head_type="gated"), "Markov head 'gated'"),
        (dict(markov_rank=0, enable_confidence_head=False), "no Markov head"),
        (dict(sample_from_anchor=False), "`sample_from_anchor` false"),
        (dict(target_layer_ids=[-1, 2, 4]), "taps before the first target layer or after the last"),
        (dict(target_layer_ids=[0, 2, 5]), "taps before the first target layer or after the last"),
        (dict(final_logit_softcapping=30.0), "soft-capped logits"),
        (dict(embedding_scale=2.0), "scaled embeddings"),
        (dict(backbone="gemma4", head_dim=16), "Gemma 4 layers"),
        (dict(qk_norm=False), "no query/key norms"),
        (dict(attention_bias=True, attention_output_bias=False), "biases on part of the projections"),
        (dict(layer_types=["sliding_attention"] * 2, sliding_window=6), "a sliding window counted from the anchor"),
    ],
)
def test_what_no_serving_file_can_express(changes, obstacle, tmp_path):
    with pytest.raises(ValueError, match=f"A file for vLLM and SGLang cannot express: .*{obstacle}"):
        write_serving(base_draft(**changes), tmp_path / "dspark")
    assert not (tmp_path / "dspark").exists()


def test_folder_names_that_mislead_vllm(tmp_path):
    with pytest.raises(ValueError, match="vLLM takes a folder called 'my-dflash-draft' for another kind of draft"):
        write_serving(base_draft(), tmp_path / "my-dflash-draft")


# The converter ----------------------------------------------------------------------------------------------


@pytest.fixture
def target(tmp_path):
    """A tiny target, sharded, whose vocabulary weights the drafts copied."""
    model = build("qwen3")
    draft = base_draft(
        vocab_size=96, hidden_size=64, target_hidden_size=64, num_target_layers=4, target_layer_ids=[0, 2]
    )
    draft.embed_tokens.weight.data = model.get_input_embeddings().weight.data
    draft.lm_head.weight.data = model.lm_head.weight.data
    model.save_pretrained(tmp_path / "target", max_shard_size="100KB")
    return tmp_path / "target", draft


def test_conversion_keeps_a_record(target, tmp_path, capsys):
    folder, draft = target
    write_deepspec(draft, tmp_path / "source")
    record = convert_checkpoint(
        tmp_path / "source", tmp_path / "out", "serving", target=str(folder), dtype="bfloat16", command="by a test"
    )
    written = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert written == record and record["command"] == "by a test" and record["target"] == str(folder)
    assert record["source"]["packaging"] == "deepspec" and record["source"]["revision"] is None
    assert record["source"]["assumed"][0] == "block layout: anchor-first, by `sample_from_anchor`"
    assert record["source"]["sha256"].keys() == {"config.json", "model.safetensors"}
    assert record["written"]["changes"] == ["weights written as bfloat16"]
    assert record["versions"].keys() == {"dspark-hf", "transformers", "torch", "safetensors", "python"}
    loaded = DSparkDraftModel.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16 and loaded.embed_tokens is None
    convert_checkpoint(tmp_path / "out", tmp_path / "back", "deepspec", target=str(folder))
    back = DSparkDraftModel.from_pretrained(tmp_path / "back")
    assert torch.equal(back.lm_head.weight, draft.lm_head.weight.to(torch.bfloat16))
    record = convert_checkpoint(tmp_path / "source", tmp_path / "spec", "speculators", target=str(folder))
    config = json.loads((tmp_path / "spec" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(folder)
    convert_checkpoint(tmp_path / "spec", tmp_path / "own", "native")
    assert load_checkpoint_config(tmp_path / "own")[1].name == "native"


def test_target_vocabulary(target, tmp_path):
    folder, draft = target
    assert (folder / "model.safetensors.index.json").exists()
    embedding, head = target_vocabulary(str(folder))
    assert torch.equal(embedding, draft.embed_tokens.weight) and torch.equal(head, draft.lm_head.weight)
    tied = tmp_path / "tied"
    write(
        tied,
        {"model_type": "llama"},
        {"model.embed_tokens.weight": torch.ones(3, 2), "model.norm.weight": torch.ones(2)},
    )
    assert torch.equal(*target_vocabulary(str(tied)))
    save_file({"model.norm.weight": torch.ones(2)}, tied / "model.safetensors")
    with pytest.raises(ValueError, match="has no embed_tokens.weight"):
        target_vocabulary(str(tied))
    with pytest.raises(ValueError, match="has no config.json"):
        target_vocabulary(str(tmp_path / "nowhere"))


def test_conversion_refuses_what_it_must(tmp_path):
    draft = dflash_draft()
    source = write(tmp_path / "source", *packagings.zlab(draft))
    with pytest.raises(ValueError, match="there already and not an empty folder"):
        convert_checkpoint(source, source, "native")
    with pytest.raises(ValueError, match="Unknown packaging 'gguf'"):
        convert_checkpoint(source, tmp_path / "out", "gguf")
    with pytest.raises(ValueError, match="cannot express: `sample_from_anchor` false, no Markov head"):
        convert_checkpoint(source, tmp_path / "out", "serving")
    assert not (tmp_path / "out").exists()


# Commands ---------------------------------------------------------------------------------------------------


def run(capsys, *argv):
    status = main([str(argument) for argument in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_convert_command(tmp_path, capsys):
    source = write(tmp_path / "source", *packagings.torchspec(base_draft()))
    status, out, err = run(
        capsys,
        "convert",
        source,
        tmp_path / "out",
        "--to",
        "speculators",
        "--set",
        "block_size=4",
        "--token",
        "secret",
    )
    assert status == 0 and "torchspec to speculators, recorded in provenance.json" in out and "reading" in err
    record = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert (
        "--set block_size=4" in record["command"]
        and "secret" not in (tmp_path / "out" / "provenance.json").read_text()
    )
    assert load_checkpoint_config(tmp_path / "out")[0].block_size == 4
    status, out, err = run(capsys, "convert", source, tmp_path / "no", "--to", "serving", "--layout", "1+N")
    assert status == 1 and "cannot express: `sample_from_anchor` false" in err
    assert run(capsys, "convert", source, tmp_path / "no", "--to", "native", "--set", "block")[0] == 1


def test_inspect_command(tmp_path, capsys):
    folder = write(tmp_path / "draft", *packagings.lfm2(base_draft()))
    status, out, _ = run(capsys, "inspect", folder)
    assert status == 0
    for fact in (
        "packaging     specforge",
        "anchor-first: blocks of 5 draft 5 tokens",
        "2 qwen3 (2 full), hidden size 32",
        "4 heads of 8, 2 for keys and values",
        "default, base 10000, neighbouring pairs",
        "Markov head   vanilla, rank 4",
        "confidence    yes, fed by the Markov head, not calibrated",
        "outputs of target layers 0, 2, 4",
        "neither embedding nor head",
        "hidden size 32, 6 layers, vocabulary 60",
        "sglang 0.5.23 serves it as it is",
        "vllm 0.33.0   no: architecture Lfm2DSparkDraftModel",
        "assumed       block layout: anchor-first, by SpecForge's training",
        "loads         yes",
    ):
        assert fact in out, fact
    status, out, _ = run(capsys, "inspect", folder, "--json")
    found = json.loads(out)
    assert found["draft"]["rotary"]["interleaved"] and found["engines"]["sglang"]["serves"]
    assert found["parameters"] == sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    assert found["bytes"] == 4 * found["parameters"]


def test_inspect_says_why_a_draft_does_not_load(tmp_path, capsys):
    config, tensors = packagings.specforge(base_draft())
    folder = write(tmp_path / "a", config | {"architectures": ["DFlash2DraftModel"]}, tensors)
    status, out, _ = run(capsys, "inspect", folder)
    assert status == 1 and "packaging     none that is read" in out and "is a DFlash2 draft" in out
    del tensors["norm.weight"]
    status, out, _ = run(capsys, "inspect", write(tmp_path / "b", config, tensors), "--json")
    found = json.loads(out)
    assert status == 1 and "missing tensors: norm.weight" in found["problem"] and found["packaging"] == "specforge"
    assert run(capsys, "inspect", tmp_path / "nowhere")[0] == 1


def test_inspect_compares_with_a_target(target, tmp_path, capsys):
    folder, draft = target
    write_deepspec(draft, tmp_path / "draft")
    status, out, _ = run(capsys, "inspect", tmp_path / "draft", "--target", folder)
    assert status == 0 and f"{folder}: fits" in out
    status, out, _ = run(capsys, "inspect", tmp_path / "draft", "--target", TINY_GOLDEN / "qwen3_target")
    assert status == 1 and "6 layers, but the draft was made for `num_target_layers` 4" in out


def test_inspect_names_public_targets_of_the_shape():
    from published import opened

    from dspark_hf.checkpoints.detect import detect_reader
    from dspark_hf.checkpoints.inspection import _targets

    for name, expected in {
        "deepseek-ai__dspark_qwen3_4b_block7": ["Qwen/Qwen3-4B"],
        "deepseek-ai__dspark_gemma4_12b_block7": ["google/gemma-4-12B-it"],
        "RedHatAI__GLM-5.2-speculator.dspark": ["zai-org/GLM-5.2"],
        "LiquidAI__LFM2.5-2.6B-DSpark": ["LiquidAI/LFM2.5-2.6B"],
    }.items():
        files = opened(name)
        config = detect_reader(files).read_config(files.config, files.tensors)
        assert _targets(config, files.config, None, None)["known_to_fit"] == expected


def test_serve_command(target, tmp_path, capsys):
    folder, draft = target
    write_deepspec(draft, tmp_path / "draft")
    place = tmp_path / "draft"
    status, out, _ = run(capsys, "serve-command", place, "--engine", "vllm", "--target", "org/target")
    config = f'{{"method": "dspark", "model": "{place}", "num_speculative_tokens": 5}}'
    assert (status, out.strip()) == (0, f"vllm serve org/target --speculative-config '{config}'")
    status, out, _ = run(
        capsys, "serve-command", place, "--engine", "sglang", "--target", "org/target", "--revision", "v1"
    )
    expected = f"--speculative-draft-model-path {place} --speculative-draft-model-revision v1"
    assert status == 0 and f"{expected} --speculative-dspark-block-size 5" in out
    status, _, err = run(capsys, "serve-command", place, "--engine", "vllm")
    assert status == 1 and "pass --target" in err
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_speculators(draft, tmp_path / "spec", verifier="org/other")
    status, out, _ = run(capsys, "serve-command", tmp_path / "spec", "--engine", "vllm")
    assert status == 0 and out.startswith("vllm serve org/other ")
    status, _, err = run(capsys, "serve-command", tmp_path / "spec", "--engine", "sglang")
    assert status == 1 and "Convert it first: dspark-hf convert" in err and "--to serving" in err
    dflash = write(tmp_path / "z", *packagings.zlab(dflash_draft()))
    status, out, _ = run(capsys, "serve-command", dflash, "--engine", "sglang", "--target", "t")
    assert status == 0 and "--speculative-algorithm DFLASH" in out and "--speculative-dflash-block-size 5" in out
    status, out, _ = run(capsys, "serve-command", dflash, "--engine", "vllm", "--target", "t")
    assert '"method": "dflash"' in out and '"num_speculative_tokens": 4' in out
    rnn = write(tmp_path / "rnn", *packagings.deepspec(base_draft(markov_head_type="rnn")))
    status, _, err = run(capsys, "serve-command", rnn, "--engine", "vllm", "--target", "t")
    assert status == 1 and "Converting does not help" in err
