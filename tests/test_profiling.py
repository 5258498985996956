"""The cost table is measured with the loop's own calls, once, quickly, and without leaving a trace."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref

import pytest
import torch
from planted import random_draft
from running import Messages, assisted
from schedules import use_schedule
from targets import build, clear_prompts, plain_greedy

from dspark_hf.fingerprints import fingerprint
from dspark_hf.generation import profiling
from dspark_hf.generation.capability import verification_path
from dspark_hf.generation.capture import decoder_layers
from dspark_hf.generation.masks import swapped_attention
from dspark_hf.generation.profiling import measure_profile, profile_fields, profile_for, save_profile
from dspark_hf.generation.ragged_cache import RaggedCache, new_dynamic_cache
from dspark_hf.generation.verifier import Verifier, attention_configs
from dspark_hf.throughput import ThroughputProfile


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty Hugging Face home, and nothing in memory."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    forget(monkeypatch)
    return tmp_path


def forget(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(profiling, "_IN_USE", weakref.WeakKeyDictionary())


def pair(name="qwen3", attn="sdpa"):
    target = build(name, attn)
    return target, random_draft(target)


def files(home):
    return list(home.rglob("*.json"))


def spoil(monkeypatch):
    """Measuring fails the test from now on."""

    def fail(*args, **kwargs):
        raise AssertionError("measured again")

    monkeypatch.setattr(profiling, "measure_profile", fail)


def test_first_use_measures_saves_and_says_so_in_one_line(home, monkeypatch):
    target, draft = pair()
    (row,) = clear_prompts(target, (7,), 24)
    use_schedule(draft, "throughput")
    with Messages() as messages:
        began = time.perf_counter()
        first = assisted(target, draft, [row], max_new_tokens=24)
        took = time.perf_counter() - began
    assert first.sequences[0, 7:].tolist() == plain_greedy(target, [row], 24)[0]
    assert took < 10  # the measurement itself stops after 2.5 s
    assert len(messages.matching("Measured the cost")) == 1 and len(files(home)) == 1
    content = json.loads(files(home)[0].read_text())
    assert content["fields"]["path"] == "packed" and content["measured_seconds"] < 3.5
    spoil(monkeypatch)
    with Messages() as messages:
        assisted(target, draft, [row], max_new_tokens=24)
        forget(monkeypatch)
        assisted(target, draft, [row], max_new_tokens=24)
    assert not messages.matching("Measured", "measure it again")


def test_a_damaged_file_is_measured_again(home, monkeypatch):
    target, draft = pair()
    profile_for(target, draft, "packed", 1, 100)
    (path,) = files(home)
    for damage in (lambda text: text[: len(text) // 2], lambda text: text.replace('"seconds": ', '"seconds": -')):
        good = path.read_text()
        path.write_text(damage(good))
        forget(monkeypatch)
        with Messages() as messages:
            profile = profile_for(target, draft, "packed", 1, 100)
        assert messages.matching("not a usable throughput profile") and messages.matching("Measured the cost")
        assert profile.plain_seconds(1) > 0 and ThroughputProfile.load(path) == profile


def test_what_the_numbers_depend_on_has_its_own_file(home):
    target, draft = pair()
    profile_for(target, draft, "packed", 1, 100)
    profile_for(target, draft, "rectangular", 1, 100)
    profile_for(*pair(attn="eager"), "packed", 1, 100)
    profile_for(*pair("llama"), "packed", 1, 100)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        profile_for(target, draft, "packed", 1, 100)
    finally:
        torch.set_num_threads(threads)
    assert len(files(home)) == 5


def test_more_rows_and_longer_contexts_extend_the_table(home, monkeypatch):
    monkeypatch.setattr(profiling, "_SECONDS", 1.0)
    target, draft = pair()
    profile = profile_for(target, draft, "packed", 1, 100)
    assert {point.rows for point in profile.verify_points} == {1}
    profile = profile_for(target, draft, "packed", 6, 100)
    assert {point.rows for point in profile.verify_points} == {1, 6}
    assert {point.rows for point in profile.draft_points} == {1, 6}
    profile = profile_for(target, draft, "packed", 6, 2000)
    assert {point.context for point in profile.verify_points} == {256, 2000}
    assert profile.covers(6, 2000) and profile.covers(8, 3000) and len(files(home)) == 1
    spoil(monkeypatch)
    for rows, context in ((1, 50), (2, 700), (6, 4000), (8, 256)):
        assert profile_for(target, draft, "packed", rows, context) is profile
    forget(monkeypatch)
    assert profile_for(target, draft, "packed", 6, 2000) == profile


def test_a_home_that_cannot_be_written_stops_nothing(home, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError("read-only")

    monkeypatch.setattr(ThroughputProfile, "save", refuse)
    target, draft = pair()
    with Messages() as messages:
        assert profile_for(target, draft, "packed", 1, 100).plain_seconds() > 0
        assert profile_for(target, draft, "packed", 4, 100).covers(4, 100)
    assert messages.matching("not saved: read-only")
    assert save_profile(profile_for(target, draft, "packed", 4, 100)) is None


@pytest.mark.parametrize("path", ["packed", "rectangular"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma4", "gemma4_kv_shared", "qwen3_moe", "deepseek_v3"])
def test_targets_are_measured_and_left_as_they_were(name, path):
    """No random number is drawn; hooks, attention and settings are those from before, and so is the output."""
    target, draft = pair(name, "eager")
    (row,) = clear_prompts(target, (7,), 16)
    expected = plain_greedy(target, [row], 16)[0]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules()]
    config, state = target.config.to_dict(), torch.get_rng_state()
    profile = measure_profile(target, draft, path, rows=(3, 1), contexts=(16,), time_budget=0.5)
    assert torch.equal(torch.get_rng_state(), state)
    assert target.config.to_dict() == config and target.config._attn_implementation == "eager"
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules()] == hooks
    assert all(parameter.grad is None for parameter in target.parameters())
    points = {(point.rows, point.tokens // point.rows) for point in profile.verify_points}
    assert {(3, 1), (3, 8)} <= points and profile.draft_seconds(3) > 0
    ids = torch.tensor([row])
    assert target.generate(ids, max_new_tokens=16)[0, 7:].tolist() == expected


def test_measuring_draws_the_same_tokens_as_a_forward_would(home):
    """What is timed is a real verification: the loop's forward shapes, over a filled cache."""
    target, draft = pair()
    shapes = []

    def record(module, args, kwargs):
        shapes.append((tuple(kwargs["input_ids"].shape), kwargs["input_ids"].unique().numel()))

    handle = target.register_forward_pre_hook(record, with_kwargs=True)
    measure_profile(target, draft, "packed", rows=(4,), contexts=(64,), time_budget=0.5)
    handle.remove()
    assert {shape for shape, _ in shapes[1:]} == {(1, 4), (1, 8), (1, 16), (1, 32)}
    # different tokens, which a mixture of experts sends different ways
    assert min(distinct for shape, distinct in shapes if shape == (1, 32)) > 20


def test_two_threads_measure_once(home, monkeypatch):
    calls = []
    measure = profiling.measure_profile
    monkeypatch.setattr(
        profiling, "measure_profile", lambda *args, **kwargs: calls.append(1) or measure(*args, **kwargs)
    )
    target, draft = pair()
    found = []
    threads = [threading.Thread(target=lambda: found.append(profile_for(target, draft, "packed", 1, 9))) for _ in "123"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and found[0] is found[1] is found[2]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_another_threads_verification_is_not_taken_for_a_setting(home, attention):
    """While one thread verifies, the target's attention is swapped; another one's call must not see that."""
    target, draft = build("qwen3", attention), pair()[1]
    wanted = verification_path(target), profile_for(target, draft, "packed", 1, 9)
    fields = profile_fields(target, draft, "packed")
    cache = RaggedCache(new_dynamic_cache(target.config), [0], 8)
    with swapped_attention(attention_configs(decoder_layers(target))):
        assert target.config._attn_implementation != attention
        found = verification_path(target), profile_for(target, draft, "packed", 1, 9)
        assert found[0] == wanted[0] and found[1] is wanted[1]
        assert profile_fields(target, draft, "packed") == fields
        verifier = Verifier(target, decoder_layers(target), cache, "rectangular", None)
    assert verifier.delegate == attention and not verifier.swaps


def test_profiles_keep_no_model_alive(home):
    target = build("qwen3", "sdpa", seed=77)
    build.cache_clear()
    draft = random_draft(target)
    profile_for(target, draft, "packed", 1, 100)
    gone = weakref.ref(target), weakref.ref(draft)
    del target, draft
    gc.collect()
    assert gone[0]() is None and gone[1]() is None


def test_targets_that_are_not_verified_in_blocks_are_refused():
    target = build("mamba")
    with pytest.raises(ValueError, match="not verified in batched blocks"):
        measure_profile(target, random_draft(build("qwen3")))


def test_the_profile_is_filed_under_what_generate_looks_for(home):
    target, draft = pair()
    profile = measure_profile(target, draft, time_budget=0.3)
    path = save_profile(profile)
    assert path.stem == fingerprint(profile_fields(target, draft, "packed"))
    assert profile_for(target, draft, "packed", 1, 100) == profile


@pytest.mark.smollm2
@pytest.mark.slow
def test_first_use_on_smollm2_takes_three_seconds_at_most(home, smollm2_path, scout_folder):
    from transformers import AutoModelForCausalLM

    from dspark_hf import DSparkDraftModel

    target = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.bfloat16).eval()
    draft = DSparkDraftModel.from_pretrained(scout_folder).eval()
    began = time.perf_counter()
    profile = profile_for(target, draft, "packed", 1, 300)
    assert time.perf_counter() - began <= 3.0
    assert profile.plain_seconds() > profile.draft_seconds() > 0
