"""The parts of the side-by-side benchmark: baselines, Transformers' DFlash generator, deficits, shares, domains."""

import copy
from collections import Counter

import pytest
import torch
from golden_set import golden
from planted import random_draft
from targets import PAD_TOKEN_ID, build, clear_prompts, plain_greedy, prompts
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDraftModel, record_generation
from dspark_hf._compat import HAS_DFLASH_GENERATOR
from dspark_hf.benchmarking import (
    Benchmark,
    DeficitTable,
    DFlashAdapter,
    Measurement,
    Plan,
    Runner,
    Setting,
    build_baselines,
    deficits,
)
from dspark_hf.benchmarking.bare import RoundCost
from dspark_hf.benchmarking.baselines import BASELINES, COMPILED, DFLASH, RANK_ZERO
from dspark_hf.benchmarking.bench import limits
from dspark_hf.benchmarking.dflash import why_not
from dspark_hf.benchmarking.machine import rounded
from dspark_hf.benchmarking.prompts import Batch, group_by_domain, take_turns
from dspark_hf.benchmarking.runner import TokenWatch, decoding_speedup, speedup_quartiles
from dspark_hf.benchmarking.shares import PARTS, shares, timed_parts
from dspark_hf.benchmarking.tables import breakdown

needs_dflash = pytest.mark.skipif(not HAS_DFLASH_GENERATOR, reason="this Transformers has no DFlash generator")


@pytest.fixture(scope="module")
def pair(tiny_pair):
    """The trained tiny target and its draft, in float32."""
    target = AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.float32).eval()
    return target, DSparkDraftModel.from_pretrained(tiny_pair[1], dtype=torch.float32)


@pytest.fixture(scope="module")
def rank_zero(pair):
    """The tiny draft without its heads: what its backbone alone proposes, which is right often enough."""
    return without_heads(pair[1])


@pytest.fixture(scope="module")
def rows():
    samples = golden("qwen3_rnn").runs["greedy_thr0.0"]["samples"]
    return [sample["output_ids"][: sample["num_input_tokens"]] for sample in samples]


def without_heads(draft: DSparkDraftModel, **changes) -> DSparkDraftModel:
    config = copy.deepcopy(draft.config)
    config.markov_rank, config.enable_confidence_head = 0, False
    for name, value in changes.items():
        setattr(config, name, value)
    bare = DSparkDraftModel(config)
    weights = {name: w for name, w in draft.state_dict().items() if not name.startswith(("markov", "confidence"))}
    bare.load_state_dict(weights)
    bare.generation_config.num_assistant_tokens_schedule = "constant"
    return bare.eval()


# ------------------------------------------------------------------------------------- Transformers' DFlash generator


@needs_dflash
@pytest.mark.parametrize("anchor_first", [True, False])
def test_dflash_generator_drafts_round_for_round_what_this_loop_drafts(pair, rows, anchor_first):
    target, draft = pair
    bare = without_heads(draft, sample_from_anchor=anchor_first)
    accepted = 0
    for row in rows:
        ids = torch.tensor([row])
        kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 48, "do_sample": False}
        watch = TokenWatch()
        adapter = DFlashAdapter(bare, target)
        theirs = target.generate(**kwargs, assistant_model=adapter, speculation_type="dflash", streamer=watch)
        assert theirs.tolist() == target.generate(**kwargs).tolist()
        with record_generation() as stats:
            target.generate(**kwargs, assistant_model=bare)
        # one token of the prompt's own, then as many a round as this package's loop commits with the same draft
        assert watch.pieces == [1] + [len(event.committed[0]) for event in stats.round_events]
        accepted += stats.accepted
    assert accepted >= (20 if anchor_first else 1)


@needs_dflash
def test_dflash_adapter_serves_one_call_after_another(pair, rank_zero, rows):
    target, _ = pair
    adapter = DFlashAdapter(rank_zero, target)
    for row in (rows[0], rows[2], rows[0]):
        ids = torch.tensor([row])
        out = target.generate(ids, assistant_model=adapter, speculation_type="dflash", max_new_tokens=24)
        assert out[0, len(row) :].tolist() == target.generate(ids, max_new_tokens=24)[0, len(row) :].tolist()


@needs_dflash
def test_dflash_generator_is_not_given_drafts_it_would_wrong(pair, rank_zero):
    target, draft = pair
    assert why_not(rank_zero, target) is None
    assert "Markov head" in why_not(draft, target)
    other = copy.deepcopy(rank_zero)
    with torch.no_grad():
        other.lm_head.weight.mul_(2.0)
    assert "head of its own" in why_not(other, target)
    tiny = build("qwen3")
    assert "last layer" in why_not(random_draft(tiny, head=None), tiny)
    with pytest.raises(ValueError, match="rank-0 draft"):
        DFlashAdapter(draft, target)


# ---------------------------------------------------------------------------------------------------- baselines


@needs_dflash
def test_every_method_gives_plain_greedy_answers_in_float32(pair, rank_zero, rows):
    target, draft = pair
    # the target assists itself: always right, and of its vocabulary
    baselines = build_baselines(target, draft, rank_zero=rank_zero, assistant=copy.deepcopy(target))
    plan = Plan(rows=(1, 3), repeats=1, draft_lengths=(3,), max_new_tokens=16, bare=False)
    report = Benchmark(target, draft, baselines, plan).run({"math": rows})
    assert set(report["unavailable"]) == {COMPILED}
    methods = {result["method"] for result in report["results"] if result["rows"] == 1}
    ours = {"3 drafted", "confidence", "throughput", "throughput, no copies"}
    assert methods == {"plain", *ours, *BASELINES} - {COMPILED}
    batched = {result["method"] for result in report["results"] if result["rows"] == 3}
    assert methods - batched == {"prompt lookup", "DFlash", "assistant"}
    for result in report["results"]:
        assert result["identical_rows"] == result["compared_rows"] > 0, result["method"]
        assert result["deficits"]["max"] < 1e-4
        assert 0 < result["first_token_seconds"] < max(map(max, result["seconds"]))
        assert result["method"] in ("plain", "static cache") or result["tau"] >= 1
    tau = {result["method"]: result["tau"] for result in report["results"] if "tau" in result and result["rows"] == 1}
    # a copy of the target is right until the budget ends; both loops accept the same of the rank-0 draft
    assert tau["assistant"] > 3
    assert tau[DFLASH] == pytest.approx(tau[RANK_ZERO])
    assert rounded(report)["results"]  # no NaN stays


def test_a_baseline_that_fails_is_left_out_with_its_reason(pair, rows):
    target, draft = pair
    baselines = build_baselines(target, draft)
    baselines.arguments["broken"] = {"cache_implementation": "no such cache"}
    plan = Plan(rows=(1,), repeats=1, schedules=(), max_new_tokens=4, bare=False, exactness=False)
    said = []
    report = Benchmark(target, draft, baselines, plan, said.append).run({"a": rows[:1]})
    assert "no such cache" in report["unavailable"]["broken"] and "broken" in said[0]
    assert "broken" not in {result["method"] for result in report["results"]}


def test_runs_take_turns(pair, rows, monkeypatch):
    target, draft = pair
    order = []
    original = Runner.run

    def run(self, setting, batch, into, **kwargs):
        if into.source != "warm-up":
            order.append(setting.name)
        return original(self, setting, batch, into, **kwargs)

    monkeypatch.setattr(Runner, "run", run)
    plan = Plan(rows=(1,), repeats=3, schedules=(), draft_lengths=(3,), max_new_tokens=4, bare=False, exactness=False)
    Benchmark(target, draft, build_baselines(target, draft), plan).run({"a": rows[:1]})
    width = len(set(order))
    turns = [order[start : start + width] for start in range(0, len(order), width)]
    assert len(turns) == 3 and len({turn[0] for turn in turns}) == 3
    assert all(sorted(turn) == sorted(turns[0]) for turn in turns)


# ---------------------------------------------------------------------------------------------------- exactness


def test_deficits_are_zero_on_greedy_answers_and_find_a_planted_token():
    target = build("qwen3")
    (prompt,) = clear_prompts(target, (6,), 12)
    (answer,) = plain_greedy(target, [prompt], 12)
    assert deficits(target, prompt, answer).max() < 1e-4
    wrong = list(answer)
    wrong[5] = (wrong[5] + 1) % 90
    found = deficits(target, prompt, wrong)
    logits = target(torch.tensor([prompt + answer[:5]])).logits[0, -1]
    assert found[5].item() == pytest.approx((logits.max() - logits[wrong[5]]).item(), abs=1e-4)
    assert found[5] > 0.01 and found[:5].max() < 1e-4
    statistics = DeficitTable(target).statistics([(prompt, answer), (prompt, wrong)])
    assert statistics["tokens"] == 24 and statistics["max"] == pytest.approx(found.max().item())
    assert statistics["not_best"] >= 1 / 24
    with pytest.raises(ValueError, match="at least one token"):
        deficits(target, prompt, [])


def test_a_draft_loop_that_commits_wrong_tokens_shows_in_the_report(pair, rows, monkeypatch):
    target, draft = pair
    original = Runner.until_end

    def planted(self, answer):
        answer = original(self, answer)
        return [*answer[:3], (answer[3] + 1) % 190, *answer[4:]] if planted.on else answer

    monkeypatch.setattr(Runner, "until_end", planted)
    planted.on = False
    plan = Plan(rows=(1,), repeats=1, schedules=(), draft_lengths=(7,), max_new_tokens=8, bare=False)
    run = Runner.run

    def only_drafted(self, setting, batch, into, **kwargs):
        planted.on = setting.schedule is not None
        return run(self, setting, batch, into, **kwargs)

    monkeypatch.setattr(Runner, "run", only_drafted)
    baselines = build_baselines(target, draft)
    baselines.arguments.clear()
    plain, ours = Benchmark(target, draft, baselines, plan).run({"a": rows[:2]})["results"]
    assert plain["identical_rows"] == 2 and plain["deficits"]["not_best"] == 0
    assert ours["identical_rows"] == 0 and ours["deficits"]["max"] > 0.01


# ---------------------------------------------------------------------------------------------------- time


def test_parts_cover_the_loop_once(pair, rows):
    target, draft = pair
    methods = {part: [vars(owner)[name] for owner, name in found] for part, found in PARTS.items()}
    ids = torch.tensor([rows[0]])
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    with record_generation() as stats, timed_parts(ids.device) as parts:
        target.generate(ids, assistant_model=draft, max_new_tokens=40, repetition_penalty=1.2)
    assert methods == {part: [vars(owner)[name] for owner, name in found] for part, found in PARTS.items()}
    assert set(parts) == set(PARTS)
    assert sum(parts.values()) == pytest.approx(stats.seconds, rel=0.3)
    assert parts["verify"] == pytest.approx(stats.verify_seconds, rel=0.3)
    assert sum(shares(parts).values()) == pytest.approx(1.0)


def test_limit_and_breakdown():
    costs = [RoundCost(10, 2.0, wall=1.2, draft=0.2, verify=0.8, step=0.9) for _ in range(2)]
    found = limits(costs, decoding_speedup=1.5)
    assert found["ideal_speedup"] == pytest.approx(1.8) and found["reached"] == pytest.approx(1 / 1.2)
    assert found["reached_of_plain"] == pytest.approx(1.5 / 1.8)
    parts = {"draft": 0.03, "verify": 0.08, "rest": 0.01}
    rest = breakdown(found | {"part_seconds_per_round": parts})
    assert rest == pytest.approx({"draft": 0.01 / 0.12, "verify": 0.0, "rest": 0.01 / 0.12})


def test_speeds_of_known_times():
    def measured(seconds, first, tokens):
        return Measurement("a", [[0] * tokens], seconds, first_token_seconds=first)

    plain, ours = [measured([2.0, 4.0], [1.0, 1.0], 11)], [measured([1.0, 1.0], [0.5, 0.5], 11)]
    assert decoding_speedup(ours, plain) == pytest.approx(2.0 / 0.5)
    assert speedup_quartiles(ours, plain) == pytest.approx([2.5, 3.0, 3.5])
    assert speedup_quartiles(ours[:1], ours[:1]) == pytest.approx([1.0] * 3)


def test_bare_forwards_of_rounds_with_other_lengths(pair):
    from dspark_hf.benchmarking.bare import BareForwards
    from dspark_hf.stats import GenerationStats, RoundEvent

    target, draft = pair
    bare = BareForwards(target, draft, context=20)
    asked = []

    def medians(shapes, repeats):
        asked.append((shapes, repeats))
        return {shape: 1.0 if shape[0] == "draft" else float(shape[2]) for shape in shapes}

    bare._medians = medians

    def event(rows, lengths):
        drafted = [[1] * 7 if any(lengths) else []] * len(rows)
        return RoundEvent(0, rows, drafted, None, None, lengths, lengths, [[1]] * len(rows), 0.0, 0.0)

    stats = GenerationStats(seconds=9.0, prefill_seconds=1.0)
    stats.round_events = [event([0, 1], [2, 4]), event([0], [5]), event([0], [0])]
    cost = bare.compare(stats, 7, constant=False)
    # widths 4, 6 and 1; two drafts, for the third round had none
    assert (cost.verify, cost.draft, cost.step, cost.wall) == (11.0, 2.0, 3.0, 8.0)
    drafts = {("draft", rows, 7) for rows in (1, 2)}
    targets = {("target", *shape) for shape in ((1, 1), (1, 6), (2, 1), (2, 4))}
    assert set(asked[0][0]) == drafts | targets and asked[0][1] == 1
    # a constant length is timed as it is set, and rounds that fell short of it count by what they verified
    assert bare.compare(stats, 7).verify == pytest.approx(4.0 + 6.0 + 1.0)
    assert asked[1][0][2:4] == [("target", 1, 8), ("target", 2, 8)] and asked[1][1] == 3


# ---------------------------------------------------------------------------------------------------- prompts


def test_sources_become_domains():
    by_source = {"gsm8k": [[1], [2]], "poems": [[3]], "mbpp": [[4]], "math500": [[5], [6]], "mt-bench": [[7]]}
    found = group_by_domain(by_source)
    assert list(found) == ["math", "code", "chat", "poems"]
    assert found["math"] == [[1], [5], [2], [6]] and found["poems"] == [[3]]
    assert list(group_by_domain(by_source, ["poems", "math"])) == ["poems", "math"]
    assert Counter(map(tuple, group_by_domain(by_source, ["all"])["all"])) == Counter((n,) for n in range(1, 8))
    assert group_by_domain(by_source, ["math500", "code"]) == {"math500": [[5], [6]], "code": [[4]]}
    with pytest.raises(ValueError, match="no prompts of prose: there are math, code, chat, poems"):
        group_by_domain(by_source, ["math", "prose"])


def test_prompts_of_a_domain_take_turns():
    assert take_turns([[[1], [2], [3], [4]], [[10], [20]]]) == [[1], [10], [2], [3], [20], [4]]


def test_a_batch_knows_its_prompts():
    first, second = prompts((3, 5))
    ids = torch.tensor([[PAD_TOKEN_ID] * 2 + first, second])
    batch = Batch("a", ids, torch.tensor([[0, 0, 1, 1, 1], [1] * 5]))
    assert [batch.prompt(0), batch.prompt(1)] == [first, second]


def test_limits_are_whole_batches(pair, rows):
    target, draft = pair
    plan = Plan(limit=4)
    benchmark = Benchmark(target, draft, build_baselines(target, draft), plan)
    many = {"a": rows * 4, "b": rows[:2]}  # 12 and 2 prompts
    counts = {n: Counter(batch.source for batch in benchmark._batches(n, many)) for n in (1, 3, 8)}
    assert counts == {1: {"a": 4, "b": 2}, 3: {"a": 2, "b": 1}, 8: {"a": 1, "b": 1}}


def test_settings_follow_the_draft(pair, rank_zero):
    plan = Plan(draft_lengths=(3,))
    assert [s.name for s in plan.settings(pair[1], 4, ["static cache"])] == [
        *("plain", "static cache", "3 drafted", "confidence", "throughput", "throughput, no copies")
    ]
    thin = Plan(draft_lengths=(3,), thin_batches=True)
    assert [s.name for s in thin.settings(pair[1], 4, ["static cache"])] == ["plain", "3 drafted", "throughput"]
    assert len(thin.settings(pair[1], 1, ["static cache"])) == 6
    assert [s.name for s in plan.settings(rank_zero)] == ["plain", "3 drafted"]
    assert Setting(baseline="prompt lookup").name == "prompt lookup"
