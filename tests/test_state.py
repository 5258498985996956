"""Nothing stays behind: after exceptions, in threads, and once the hook is taken away again."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from planted import planted_draft, planted_for, random_draft
from running import assisted, check_exact, new_tokens, plain_batch
from targets import build, clear_prompts, left_pad, plain_greedy
from transformers import GenerationMixin, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import dspark_hf
from dspark_hf import record_generation

LENGTHS = (3, 7, 12)


def snapshot(target) -> dict:
    """Everything about a target that a call could leave changed."""
    hooks = {
        name: [len(module._forward_hooks), len(module._forward_pre_hooks)] for name, module in target.named_modules()
    }
    configs = {
        id(module.config): module.config._attn_implementation
        for module in target.modules()
        if hasattr(module, "config")
    }
    return {
        "hooks": hooks,
        "attention": configs,
        "config": target.config.to_dict(),
        "generation_config": target.generation_config.to_dict(),
        "training": target.training,
        "attributes": sorted(vars(target)),
        "forward": type(target).forward,
    }


class Boom(Exception):
    """What the test throws."""


class ThrowingStreamer(BaseStreamer):
    def __init__(self, after: int, error: type[BaseException]):
        self.left, self.error = after, error

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise self.error("stop here")

    def end(self):
        pass


class ThrowingCriterion(StoppingCriteria):
    def __init__(self, length: int, error: type[BaseException]):
        self.length, self.error = length, error

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= self.length:
            raise self.error("stop here")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("where", ["streamer", "criterion", "target"])
def test_after_an_exception(where, attn, error):
    """The target is as before, and the next call is exact."""
    target = build("qwen3", attn)
    rows = clear_prompts(target, LENGTHS, 64)
    check_exact(target, planted_for(target, rows), rows)
    before = snapshot(target)
    kwargs = {}
    handle = None
    if where == "streamer":
        kwargs["streamer"] = ThrowingStreamer(9, error)
    elif where == "criterion":
        kwargs["stopping_criteria"] = StoppingCriteriaList([ThrowingCriterion(20, error)])
    else:
        calls = []

        def fail(module, args):
            calls.append(1)
            if len(calls) > 3:
                raise error("stop here")

        handle = target.model.layers[2].self_attn.o_proj.register_forward_pre_hook(fail)
    with pytest.raises(error):
        assisted(target, planted_for(target, rows), rows, **kwargs)
    if handle is not None:
        handle.remove()
    assert snapshot(target) == before
    check_exact(target, planted_for(target, rows), rows)


def test_after_a_call():
    target = build("gemma3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    before = snapshot(target)
    draft = planted_for(target, rows)
    tensors = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    attributes = {name for name in vars(draft)}
    check_exact(target, draft, rows)
    assert snapshot(target) == before
    assert {name for name in vars(draft)} == attributes
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in draft.state_dict().items())


def test_gradients_and_modes():
    """A target in the middle of training: weights that want gradients get none, and the mode is the caller's."""
    target = build("qwen3", "sdpa", seed=31)
    rows = clear_prompts(target, LENGTHS, 64)
    for parameter in target.parameters():
        parameter.requires_grad_(True)
    try:
        output = check_exact(target, planted_for(target, rows), rows)
        assert not output.sequences.requires_grad
        assert all(parameter.grad is None for parameter in target.parameters())
    finally:
        for parameter in target.parameters():
            parameter.requires_grad_(False)


def in_threads(jobs) -> list:
    """Runs the functions at once and returns their results; the first exception is raised here."""
    results: list = [None] * len(jobs)
    start = threading.Barrier(len(jobs))

    def run(index):
        try:
            start.wait()
            results[index] = jobs[index]()
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_two_threads_share_target_and_draft(attn):
    """One real draft and one target in four calls at once, with plain generate() beside them."""
    target = build("qwen3", attn)
    draft = random_draft(target)
    batches = [clear_prompts(target, LENGTHS, 64, seed=seed) for seed in (0, 1, 2)]
    expected = [plain_greedy(target, rows, 64) for rows in batches]
    before = snapshot(target)

    def with_draft(rows):
        return lambda: [new_tokens(assisted(target, draft, rows), rows) for _ in range(2)]

    def without(rows):
        return lambda: [new_tokens(plain_batch(target, rows), rows) for _ in range(2)]

    jobs = [with_draft(rows) for rows in batches] + [without(batches[0])]
    for result, want in zip(in_threads(jobs), [*expected, expected[0]], strict=True):
        assert result == [want] * 2
    assert snapshot(target) == before


def test_two_threads_two_drafts_one_target():
    """Planted drafts of their own: both threads accept what was planted, so hidden states do not cross over."""
    target = build("llama", "sdpa")
    batches = [clear_prompts(target, LENGTHS, 64, seed=seed) for seed in (0, 1)]
    drafts = [planted_for(target, rows) for rows in batches]
    alone = [
        check_exact(target, draft, rows).dspark_stats.accepted for draft, rows in zip(drafts, batches, strict=True)
    ]
    drafts = [planted_for(target, rows) for rows in batches]
    jobs = [lambda d=d, r=r: check_exact(target, d, r) for d, r in zip(drafts, batches, strict=True)]
    assert [output.dspark_stats.accepted for output in in_threads(jobs)] == alone


def test_one_draft_two_targets_in_threads():
    """What is borrowed from a target is never kept on the draft."""
    targets = [build("qwen3", "sdpa"), build("qwen3", "sdpa", seed=3)]
    draft = random_draft(targets[0])
    rows = [clear_prompts(target, LENGTHS, 64) for target in targets]
    jobs = [
        lambda t=t, r=r: [new_tokens(assisted(t, draft, r), r) for _ in range(2)]
        for t, r in zip(targets, rows, strict=True)
    ]
    for result, target, batch in zip(in_threads(jobs), targets, rows, strict=True):
        assert result == [plain_greedy(target, batch, 64)] * 2


def test_recording_sees_other_threads_and_nests():
    target = build("llama", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    with record_generation() as outer:
        assisted(target, random_draft(target), rows, max_new_tokens=8)
        with record_generation() as inner:
            in_threads([lambda: assisted(target, random_draft(target), rows, max_new_tokens=8)] * 2)
    assert (inner.calls, outer.calls) == (2, 3)
    assisted(target, random_draft(target), rows, max_new_tokens=8)
    assert outer.calls == 3


def test_nothing_keeps_models_alive():
    """Caches of the package hold neither targets nor drafts."""
    target = copy.deepcopy(build("llama", "sdpa"))
    rows = clear_prompts(build("llama", "sdpa"), LENGTHS, 64)
    draft = random_draft(target)
    assisted(target, draft, rows, max_new_tokens=8)
    watched = [weakref.ref(target), weakref.ref(draft)]
    del target, draft
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def test_a_draft_can_be_copied_after_use():
    target = build("llama", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    draft = random_draft(target)
    assisted(target, draft, rows, max_new_tokens=8)
    copied = copy.deepcopy(draft)
    assert copied.generation_config.to_dict() == draft.generation_config.to_dict()
    assert new_tokens(assisted(target, copied, rows), rows) == plain_greedy(target, rows, 64)


def test_uninstall_and_install():
    """Un-installed, Transformers' methods are its own again; installing twice wraps once."""
    methods = ("_assisted_decoding", "_validate_generation_mode")
    wrapped = {name: getattr(GenerationMixin, name) for name in methods}
    target = build("llama", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    try:
        dspark_hf.install()
        assert {name: getattr(GenerationMixin, name) for name in methods} == wrapped
        dspark_hf.uninstall()
        for name in methods:
            assert getattr(GenerationMixin, name).__module__ == "transformers.generation.utils"
            assert "dspark" not in getattr(GenerationMixin, name).__code__.co_filename
        dspark_hf.uninstall()
        with pytest.raises(Exception):  # noqa: B017 - whatever Transformers says of a batch or of the class
            target.generate(**left_pad(rows), assistant_model=planted_for(target, rows), max_new_tokens=4)
    finally:
        dspark_hf.install()
    check_exact(target, planted_for(target, rows), rows)


def test_other_assistants_are_transformers_own():
    """A draft model of another kind, and prompt look-up, run as without the package."""
    target = build("llama", "sdpa")
    (row,) = clear_prompts(target, (12,), 64)
    expected = plain_greedy(target, [row], 64)[0]
    ids = torch.tensor([row])
    small = build("llama", "sdpa", seed=4)
    for kwargs in ({"assistant_model": small}, {"prompt_lookup_num_tokens": 3}):
        output = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, **kwargs)
        assert output[0, len(row) :].tolist() == expected


def test_draft_ahead_gives_the_same_output(monkeypatch):
    """Drafting before the host knows this round's tokens, as on accelerators."""
    import dspark_hf.generation.hook as hook

    loop = hook.DecodingLoop
    monkeypatch.setattr(hook, "DecodingLoop", lambda *args, **kwargs: loop(*args, **{**kwargs, "draft_ahead": True}))
    target = build("gemma3", "sdpa")
    rows = clear_prompts(target, LENGTHS, 64)
    check_exact(target, planted_for(target, rows), rows)
    continuations = plain_greedy(target, rows, 64)
    eos = [continuations[2][5], continuations[0][17], continuations[1][30]]
    output = assisted(target, planted_for(target, rows), rows, eos_token_id=eos)
    assert torch.equal(output.sequences, plain_batch(target, rows, eos_token_id=eos))
    kwargs = {"repetition_penalty": 1.3, "max_new_tokens": 40}
    expected = plain_batch(target, rows, **kwargs)
    references = [row + e[max(LENGTHS) :] for row, e in zip(rows, expected.tolist(), strict=True)]
    output = assisted(target, planted_draft(target).plan(references), rows, **kwargs)
    assert torch.equal(output.sequences, expected)
    assert output.dspark_stats.tau > 2


@pytest.mark.parametrize("path", ["packed", "rectangular"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt_oss", "deepseek_v3"])
def test_both_ways_of_verifying(name, path, monkeypatch):
    """The rectangle is what a target gets whose layers need the row axis; it must be as exact as the packed form."""
    monkeypatch.setattr("dspark_hf.generation.hook.verification_path", lambda model: (path, ""))
    target = build(name, "eager")
    rows = clear_prompts(target, LENGTHS, 64)
    output = check_exact(target, planted_for(target, rows), rows)
    assert output.dspark_stats.path == path
