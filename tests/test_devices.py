"""Targets spread and offloaded by Accelerate, and where and in which dtype a draft is loaded.

On a CPU there is one device that computes; the hooks that move and load weights are the same ones that serve several.
"""

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from packagings import base_draft, checksum
from planted import random_draft
from running import assisted, new_tokens
from targets import build, plain_greedy
from transformers import AutoModel, AutoModelForCausalLM

from dspark_hf import DSparkDraftModel
from dspark_hf.sharing import target_devices

ROWS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14]]
LAYERS = tuple(f"model.layers.{number}" for number in range(4))
EVERYTHING = ("model.embed_tokens", *LAYERS, "model.norm", "model.rotary_emb", "lm_head")
OFFLOADED = {
    "layers": ("model.layers.1", "model.layers.2"),
    "head": ("model.layers.2", "lm_head"),
    "embedding": ("model.embed_tokens", "model.layers.0"),
    "everything that weighs": ("model.embed_tokens", "lm_head", *LAYERS),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    build("qwen3").save_pretrained(folder)
    return folder


def dispatched(saved, tmp_path, parts, **options):
    """The target with some parts on disk, the rest in memory."""
    places = {name: "disk" if name in parts else "cpu" for name in EVERYTHING}
    options = {"dtype": torch.float32, **options}
    return AutoModelForCausalLM.from_pretrained(saved, device_map=places, offload_folder=tmp_path, **options)


def check(target, draft):
    output = assisted(target, draft, ROWS, max_new_tokens=8, do_sample=False)
    assert new_tokens(output, ROWS) == plain_greedy(build("qwen3"), ROWS, 8)
    return output.dspark_stats


@pytest.mark.parametrize(
    ("parts", "stored"),
    [*((parts, False) for parts in OFFLOADED.values()), (OFFLOADED["everything that weighs"], True)],
    ids=[*OFFLOADED, "everything, nothing borrowed"],
)
def test_target_dispatched_over_memory_and_disk(parts, stored, saved, tmp_path):
    target = dispatched(saved, tmp_path, parts)
    assert any(parameter.is_meta for parameter in target.parameters())
    draft = random_draft(target, stores_embedding=stored, stores_head=stored)
    assert check(target, draft).path == "packed"
    assert {parameter.device.type for parameter in draft.parameters()} == {"cpu"}
    assert any(parameter.is_meta for parameter in target.parameters()), "what was offloaded is offloaded again"


@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
def test_target_offloaded_as_a_whole(offload, saved, tmp_path):
    target = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    folder = {"offload_dir": tmp_path} if offload is disk_offload else {}
    target = offload(target, execution_device=torch.device("cpu"), **folder)
    assert all(parameter.is_meta for parameter in target.parameters())
    assert target_devices(target) == {torch.device("cpu")}
    check(target, random_draft(target))


def test_borrowed_weights_are_the_offloaded_ones(saved, tmp_path):
    target = dispatched(saved, tmp_path, OFFLOADED["everything that weighs"])
    shared = random_draft(target).shared_weights(target)
    assert torch.equal(shared.embedding, build("qwen3").get_input_embeddings().weight)
    assert shared.head is target.lm_head and target.get_input_embeddings().weight.is_meta


def test_a_target_without_weights_is_refused():
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(build("qwen3").config)
    for draft in (random_draft(target), random_draft(target, stores_embedding=True)):
        with pytest.raises(ValueError, match="on the meta device and not offloaded"):
            draft.shared_weights(target)


@pytest.mark.parametrize(("target_dtype", "draft_dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("parts", [(), OFFLOADED["head"]], ids=["resident", "offloaded head"])
def test_draft_in_another_dtype_than_its_target(target_dtype, draft_dtype, parts, saved, tmp_path):
    target = dispatched(saved, tmp_path, parts, dtype=getattr(torch, target_dtype))
    draft = random_draft(target).to(getattr(torch, draft_dtype))
    output = assisted(target, draft, ROWS, max_new_tokens=8, do_sample=False)
    assert output.dspark_stats.drafted > 0
    if target_dtype == "float32":
        assert new_tokens(output, ROWS) == plain_greedy(build("qwen3"), ROWS, 8)


# Where a draft goes -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    base_draft().to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("place", [None, "cpu", torch.device("cpu"), {"": "cpu"}])
def test_places_for_a_draft(place, draft_folder):
    assert DSparkDraftModel.from_pretrained(draft_folder, device_map=place).device.type == "cpu"


@pytest.mark.parametrize("place", ["auto", "balanced", "sequential"])
def test_automatic_places_are_the_accelerator_or_the_cpu(place, draft_folder):
    accelerator = torch.accelerator.current_accelerator() or torch.device("cpu")
    assert DSparkDraftModel.from_pretrained(draft_folder, device_map=place).device.type == accelerator.type


@pytest.mark.parametrize(
    ("place", "message"),
    [({"layers.0": 0, "layers.1": 1}, "lives on one device"), ("disk", "cannot be offloaded"), ("meta", "offloaded")],
)
def test_places_a_draft_cannot_go(place, message, draft_folder):
    with pytest.raises(ValueError, match=message):
        DSparkDraftModel.from_pretrained(draft_folder, device_map=place)


def test_meta_is_a_place_to_look_at_a_draft_only(draft_folder):
    with torch.device("meta"):
        draft = DSparkDraftModel.from_pretrained(draft_folder)
    assert draft.device.type == "cpu", "weights are where `device_map` says, whatever the default device"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, torch.bfloat16),
        ({"dtype": "auto"}, torch.bfloat16),
        ({"dtype": None}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": torch.float16}, torch.float16),
        ({"torch_dtype": "float32"}, torch.float32),
        ({"dtype": "float64"}, torch.float64),
    ],
)
def test_dtypes(options, expected, draft_folder):
    draft = DSparkDraftModel.from_pretrained(draft_folder, **options)
    assert {parameter.dtype for parameter in draft.parameters()} == {expected} and draft.config.dtype == expected


@pytest.mark.parametrize("dtype", ["int8", "bf16", torch.int32])
def test_dtypes_that_are_none(dtype, draft_folder):
    with pytest.raises(ValueError, match="`dtype` must be 'auto' or a floating-point dtype"):
        DSparkDraftModel.from_pretrained(draft_folder, dtype=dtype)


@pytest.mark.parametrize("low", [True, False])
def test_loading_always_uses_little_memory(low, draft_folder):
    own = DSparkDraftModel.from_pretrained(draft_folder, low_cpu_mem_usage=low)
    auto = AutoModel.from_pretrained(draft_folder, low_cpu_mem_usage=low, device_map="cpu", dtype="auto")
    assert type(auto) is DSparkDraftModel and checksum(own) == checksum(auto)
