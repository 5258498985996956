"""The GPU benchmark on tiny shapes: what it reports, that acceptance is what was asked for, that it stops in time."""

import contextlib
import functools
import json
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from dspark_hf import DSparkDraftModel, record_generation
from dspark_hf.generation import hook

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import _gpu_measure as measuring  # noqa: E402
import _gpu_pair as pairs  # noqa: E402
import gpu  # noqa: E402

PROFILE = [0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair():
    return pairs.build_pair(pairs.SHAPES["tiny"], CPU, torch.float32, 0)


@pytest.fixture
def run(tmp_path):
    """Runs the benchmark on tiny shapes; gives exit status and report."""

    def run_benchmark(*argv: str) -> tuple[int, dict]:
        output = tmp_path / "out" / "gpu.json"
        options = ["--context", "8", "--new-tokens", "20", "--samples", "1", "--output", str(output)]
        status = gpu.main(["--shapes", "tiny", "--device", "cpu", *options, *argv])
        text = output.read_text(encoding="utf-8")
        assert str(tmp_path) not in text
        return status, json.loads(text)

    return run_benchmark


def test_report(run, capsys):
    status, report = run("--rows", "1", "3", "--sync-rows", "1", "--profile", *map(str, PROFILE))
    assert status == 0 and report["not_measured"] == []
    assert report["forced"] is True and report["profile"] == PROFILE
    assert {"cpu", "gpu", "torch", "transformers", "commit"} <= set(report["environment"])
    found = {(result["section"], result["rows"]): result for result in report["results"]}
    assert set(found) == {(s, r) for s in ("rounds", "graphs", "scheduler") for r in (1, 3)} | {("syncs", 1)}
    for rows in (1, 3):
        result, graphs = found[("rounds", rows)], found[("graphs", rows)]
        for name in ("round", "draft", "verify", "plain_step", "bare_plain_step", "forced_speed"):
            assert result[name] > 0
        parts = sum(result[name] for name in ("draft", "head", "verify", "rest"))
        assert parts == pytest.approx(result["round"], rel=1e-3, abs=1e-5)
        assert result["head_percent"] == pytest.approx(100 * result["head"] / result["round"], rel=1e-3, abs=1e-3)
        assert len(result["forced_acceptance"]) == 7 and 1 < result["forced_tau"] <= 8
        assert set(graphs["reasons"]) == {"plain_step", "verify", "backbone", "block"}
        assert graphs["verify"] is None and "need a CUDA device" in graphs["reasons"]["verify"]
        assert found[("scheduler", rows)]["seconds"] > 0
    assert found[("syncs", 1)]["per_round"] is None
    assert report["models"][0]["target_parameters"] > report["models"][0]["draft_parameters"] > 0
    out = capsys.readouterr().out
    assert "Forced acceptance 0.90 0.80" in out and "scheduler %" in out
    assert "Not measured, graphs: backbone: RuntimeError: CUDA graphs need a CUDA device; block" in out


def test_acceptance_follows_the_profile(pair):
    target, draft = pair
    draft.force(PROFILE, 8, seed=3)
    prompt = torch.randint(500, (8, 6), generator=torch.Generator().manual_seed(0))
    with record_generation() as stats:
        answer = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=160, assistant_model=draft
        )
    pairs.check_predictable(target, prompt, answer)
    realised = measuring.conditional_acceptance(stats, 7)
    tried = sum(len(event.rows) for event in stats.round_events)
    for share, got in zip(PROFILE, realised):
        assert abs(got - share) < 4 * (share * (1 - share) / tried) ** 0.5
        tried = int(tried * got)
    assert abs(stats.tau - pairs.expected_tau(PROFILE)) < 0.3
    assert len(draft.marks) == stats.rounds  # real drafts, one a round
    gaps = measuring.round_gaps(draft.marks, 8)
    assert 0 < len(gaps) < stats.rounds and min(gaps) > 0


def test_drafting_ahead_and_a_tied_head(monkeypatch):
    """As on a GPU: the next block is drafted before this round's tokens are known; and Qwen3-4B ties its head."""
    tiny = pairs.SHAPES["tiny"]
    shape = pairs.Shape("tied", {**tiny.target, "tie_word_embeddings": True}, tiny.draft)
    target, draft = pairs.build_pair(shape, CPU, torch.bfloat16, 0)
    assert target.get_output_embeddings().weight is target.get_input_embeddings().weight
    monkeypatch.setattr(hook, "DecodingLoop", functools.partial(hook.DecodingLoop, draft_ahead=True))
    bench = measuring.PairBench(target, draft, [0.5] * 7, context=8, new_tokens=40, samples=1, seed=0)
    result = bench.rounds(4)
    assert 1.6 < result["forced_tau"] < 2.4 and result["rounds_timed"] >= 5
    assert result["round"] > 0 and abs(result["forced_acceptance"][0] - 0.5) < 0.25


def test_the_extremes_of_a_profile(pair):
    target, draft = pair
    prompt = torch.randint(500, (2, 6), generator=torch.Generator().manual_seed(1))
    for share, tau in ((0.0, 1.0), (1.0, 8.0)):
        draft.force([share] * 7, 2, seed=0)
        with record_generation() as stats:
            mask = torch.ones_like(prompt)
            target.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=17, assistant_model=draft)
        assert stats.tau == tau == pairs.expected_tau([share] * 7)
    with pytest.raises(ValueError, match="--profile: 7 probabilities"):
        draft.force([0.5] * 6, 2, seed=0)
    with pytest.raises(ValueError, match="--profile: 7 probabilities"):
        draft.force([1.5] * 7, 2, seed=0)


def test_forced_acceptance_needs_a_predictable_target():
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(Qwen3Config(**pairs.SHAPES["tiny"].target, eos_token_id=None)).eval()
    prompt = torch.randint(500, (2, 6))
    answer = target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8)
    with pytest.raises(RuntimeError, match="does not repeat its last token"):
        pairs.check_predictable(target, prompt, answer)
    pairs.make_predictable(target)
    answer = target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8)
    pairs.check_predictable(target, prompt, answer)


@pytest.mark.parametrize(("name", "parameters"), [("4b", 4_022_468_096), ("8b", 8_190_735_360)])
def test_shapes_are_true(name, parameters):
    shape = pairs.SHAPES[name]
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(Qwen3Config(**shape.target))
        draft = DSparkDraftModel(pairs.draft_config(shape))
    assert sum(parameter.numel() for parameter in target.parameters()) == parameters
    draft.validate_target(target)
    config = draft.config
    assert (config.num_hidden_layers, config.block_size, config.markov_rank) == (5, 7, 256)
    assert config.enable_confidence_head and config.num_draft_tokens == 7


def test_bare_forwards_compute_what_the_loop_computes(pair):
    """A bare verification and a bare step see the same context, so their first logits agree."""
    target, draft = pair
    bench = measuring.PairBench(target, draft, PROFILE, context=8, new_tokens=20, samples=1, seed=0)
    with torch.no_grad():
        calls = bench._calls(3)
        for _ in range(2):  # a repeated call starts from the same caches
            for call in calls.values():
                call.prepare()
            verified, step = calls["verify"].run(), calls["plain_step"].run()
            assert verified.shape == (1, 3 * 8, 512) and step.shape == (3, 1, 512)
            torch.testing.assert_close(verified.view(3, 8, 512)[:, 0], step[:, 0], atol=1e-4, rtol=1e-4)
    assert calls["backbone"].run().shape == (3, 7, 512)
    marks = len(draft.force(PROFILE, 3, 0).marks)
    assert calls["block"].run().shape == (3, 7) and len(draft.marks) == marks == 0


def test_forwards_that_can_be_captured_or_compiled_are_timed(pair, monkeypatch):
    bench = measuring.PairBench(*pair, PROFILE, context=8, new_tokens=20, samples=1, seed=0)

    def only_the_target(run, *args, **kwargs):
        if run.__name__ == "run":
            raise RuntimeError("\nnot this one\nat all")
        return run

    monkeypatch.setattr(measuring, "captured", only_the_target)
    monkeypatch.setattr(torch, "compile", only_the_target)
    for result in (bench.graphs(2), bench.compiled(2, "eager", lambda: True)):
        assert result["plain_step"] > 0 and result["block"] > 0 and result["plain_step_preparation"] > 0
        assert result["verify"] is None and result["reasons"] == {"verify": "RuntimeError: not this one"}
    left_out = bench.compiled(2, "eager", lambda: False)
    assert set(left_out["reasons"].values()) == {"TimeoutError: no time left in the budget"}


def test_a_graph_is_captured_after_a_warm_up_aside(monkeypatch):
    """What a GPU is asked for, in order; the names are those that PyTorch has."""
    events = []

    class Stream:
        def __init__(self, device):
            events.append(f"stream on {device}")

        def wait_stream(self, other):
            events.append("wait")

    class Graph:
        def replay(self):
            events.append("replay")

    @contextlib.contextmanager
    def inside(thing):
        events.append(f"enter {type(thing).__name__}")
        yield
        events.append("leave")

    stand_ins = {"Stream": Stream, "CUDAGraph": Graph, "stream": inside, "graph": inside}
    stand_ins |= {"current_stream": Stream, "synchronize": lambda device: events.append("synchronize")}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    replay = measuring.captured(lambda: events.append("run"), torch.device("cuda"))
    aside = ["stream on cuda", "stream on cuda", "wait", "enter Stream", "run", "run", "leave"]
    assert events == [*aside, "stream on cuda", "wait", "synchronize", "enter Graph", "run", "leave"]
    replay()
    assert events[-1] == "replay" and events.count("run") == 3


def test_waits_are_counted_by_place():
    with measuring.synchronizing_places() as places:
        for message in ("called a synchronizing CUDA operation", "something else"):
            for line in (3, 3, 8):
                warnings.warn_explicit(message, UserWarning, "/somewhere/generation/loop.py", line)
    assert places == {"generation/loop.py:3": 2, "generation/loop.py:8": 1}


def test_waits_of_prompt_and_end_do_not_count(pair, monkeypatch):
    """A call that waits 5 times, and 3 times a round or twice a plain step besides."""
    target, draft = pair
    bench = measuring.PairBench(target, draft, PROFILE, context=8, new_tokens=20, samples=1, seed=0)
    made, generate = [], bench._generate

    def counted(prompt, new_tokens, *, draft=False):
        before = len(bench.draft.marks)
        answer = generate(prompt, new_tokens, draft=draft)
        made.append(5 + (3 * (len(bench.draft.marks) - before) if draft else 2 * new_tokens))
        return answer

    @contextlib.contextmanager
    def places():
        found = Counter()
        yield found
        found["loop.py:1"] += made[-1] - 5
        found["once.py:1"] += 5

    monkeypatch.setattr(bench, "_generate", counted)
    monkeypatch.setattr(measuring, "synchronizing_places", places)
    assert bench.count_syncs(2) == {"per_round": 3.0, "per_plain_step": 2.0, "places": {"loop.py:1": 3.0}}
    assert len(made) == 4 and bench.syncs(2)["per_round"] is None  # this is no GPU


def test_nothing_is_begun_without_time(run):
    status, report = run("--budget-seconds", "0")
    assert status == 0 and report["results"] == []
    assert report["not_measured"] == [
        {"shape": "tiny", "section": "build", "rows": None, "reason": "no time left in the budget"}
    ]


def test_budget_leaves_out_what_would_not_fit(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    budget = gpu.Budget(100.0, parts=2)
    budget.next_part()
    assert budget.allows("rounds") and budget.allows("compile", expected=39.0)
    assert not budget.allows("compile", expected=41.0)  # a quarter more than expected has to fit
    budget.took("rounds", 30.0, rows=8)
    now[0] += 5.0
    assert budget.allows("rounds", 8) and not budget.allows("rounds", 32)  # more rows may take twice as long
    budget.took("rounds", 2.0, rows=2)
    now[0] += 10.0
    assert not budget.allows("rounds", 8) and not budget.allows("rounds", 4)
    assert budget.allows("rounds", 2) and budget.allows("rounds", 1) and budget.allows("syncs")
    budget.next_part()  # what the first part did not use is the second one's
    now[0] += 45.0
    assert budget.allows("rounds", 8)
    now[0] += 10.0
    assert not budget.allows("rounds", 8) and budget.used == 70.0


def test_a_failing_measurement_leaves_the_others(run, monkeypatch):
    original = measuring.PairBench.rounds

    def rounds(self, rows):
        if rows == 2:
            raise RuntimeError("broken")
        if rows > 2:
            raise torch.OutOfMemoryError("too much")
        return original(self, rows)

    monkeypatch.setattr(measuring.PairBench, "rounds", rounds)
    status, report = run("--rows", "2", "3", "4", "1", "--sections", "rounds", "scheduler")
    assert status == 1
    assert {(result["section"], result["rows"]) for result in report["results"]} == {("rounds", 1), ("scheduler", 1)}
    reasons = {(entry["section"], entry["rows"]): entry["reason"] for entry in report["not_measured"]}
    assert reasons[("rounds", 2)] == "RuntimeError: broken" and reasons[("rounds", 3)] == "out of memory"
    assert reasons[("rounds", 4)] == "out of memory with fewer rows"
    assert reasons[("scheduler", 4)] == "rounds of 4 rows were not measured"
