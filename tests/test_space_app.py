"""The page without a browser: what it imports, which pairs it takes, how runs stream, stop and stay apart."""

from __future__ import annotations

import ast
import importlib
import json
import pickle
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from bigram_pair import write_pair

pytest.importorskip("gradio", reason="the page needs gradio: pip install 'dspark-hf[demo]'")

import app
import handlers
import pairs
import runs
import sessions
from transcript import Transcript

import dspark_hf
import dspark_hf.demo

SPACE = Path(__file__).resolve().parent.parent / "space"
PROMPT = "Tell me about the sea."


@pytest.fixture(scope="module")
def name(tmp_path_factory) -> pairs.PairName:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    return pairs.PairName(str(target), str(draft))


@pytest.fixture(scope="module")
def pair(name) -> pairs.Pair:
    pair = pairs.load_pair(name)
    with torch.no_grad():  # confidences that differ from slot to slot
        pair.draft.confidence_head.proj.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
    return pair


@pytest.fixture()
def page(pair) -> handlers.Page:
    return handlers.Page(pairs.Pairs(pair.name, load=lambda _: pair))


class Request:
    """What a handler needs of Gradio's request."""

    def __init__(self, session_hash: str):
        self.session_hash = session_hash


def settings(pair, **changes) -> list:
    values = {"choice": str(pair.name), "target": "", "draft": "", "policy": "survival", "threshold": 0.3}
    values |= {"num_tokens": 7, "max_new_tokens": 48, "temperature": 0, "seed": 0}
    return list((values | changes).values())


def plain_ids(pair, prompt: str, count: int) -> list[int]:
    inputs = runs.encode(pair, [prompt])
    output = pair.model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def collect(pair, prompts, knobs=None, flag=None, drafted=True):
    written = Transcript(pair.tokenizer, len(prompts))
    updates = []
    for update in runs.stream(
        pair, prompts, knobs or runs.Knobs("survival", 0.3, 7, 48), flag or runs.StopFlag(), drafted
    ):
        written.add(update)
        updates.append(update)
    return written, updates


# ---------------------------------------------------------------------------------------------------------- manners


@pytest.mark.parametrize("path", sorted(SPACE.glob("*.py")), ids=lambda path: path.name)
def test_only_the_public_api_is_imported(path):
    public = {"dspark_hf": set(dspark_hf.__all__), "dspark_hf.demo": set(dspark_hf.demo.__all__)}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dspark_hf"):
            assert {alias.name for alias in node.names} <= public.get(node.module, set()), ast.unparse(node)
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("dspark_hf") for alias in node.names), ast.unparse(node)


def test_building_the_page_loads_nothing(name):
    loads = []
    blocks = app.build(pairs.Pairs(name, load=loads.append))
    assert loads == [] and not blocks.page.pairs.is_warm(name)
    assert blocks.analytics_enabled is False


def test_runs_go_one_at_a_time_and_the_queue_is_limited(name):
    blocks = app.build(pairs.Pairs(name, load=lambda _: None))
    heavy = [fn for fn in blocks.fns.values() if fn.concurrency_id == "models"]
    assert len(heavy) == 3 and {fn.concurrency_limit for fn in heavy} == {1}
    assert blocks._queue.max_size == app.QUEUE
    assert all(
        fn.api_visibility == "private" for fn in blocks.fns.values() if fn.fn is not None and fn.name != "forget"
    )


def test_a_pair_is_loaded_once_however_many_ask(name, pair):
    loads = []

    def load(wanted):
        loads.append(wanted)
        time.sleep(0.05)
        return pair

    shared = pairs.Pairs(name, load)
    threads = [threading.Thread(target=shared.get, args=(name,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == [name]


def test_two_pairs_at_most_stay_in_memory(monkeypatch):
    shared = pairs.Pairs(pairs.PairName("a/a", "a/b"), load=lambda name: object())
    names = [pairs.PairName(f"a/{n}", "a/b") for n in "xyz"]
    first = shared.get(names[0])
    assert shared.get(names[0]) is first
    shared.get(names[1])
    shared.get(names[2])
    assert shared.get(names[0]) is not first


def test_the_missing_draft_is_named(monkeypatch):
    monkeypatch.delenv("DSPARK_DRAFT", raising=False)
    monkeypatch.setattr(pairs, "DRAFT_FOLDER", "checkpoints/not-there")
    with pytest.raises(pairs.PairError, match="checkpoints/not-there is not there.*--draft"):
        pairs.default_pair()
    with pytest.raises(pairs.PairError, match="No draft for owner/model"):
        pairs.default_pair("owner/model")
    with pytest.raises(SystemExit, match="No draft"):
        app.main([])
    assert pairs.default_pair(draft="owner/draft") == pairs.PairName(pairs.SMOLLM2, "owner/draft")
    monkeypatch.setenv("DSPARK_DRAFT", "owner/other")
    assert pairs.default_pair().draft == "owner/other"


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        ("", "a/b", "name a target"),
        ("a/b", "  ", "name a draft"),
        ("../no/such/folder", "a/b", "neither a folder nor"),
        ("a/b/c", "a/b", "neither a folder nor"),
        ("https://example.org/a", "a/b", "neither a folder nor"),
        ("a/b", "a/b; rm", "neither a folder nor"),
        ("<script>", "a/b", "neither a folder nor"),
    ],
)
def test_names_are_checked_before_anything_is_looked_up(target, draft, message):
    with pytest.raises(pairs.PairError, match=message):
        pairs.check_name(target, draft)


def test_a_folder_without_a_model_is_no_model(tmp_path, name):
    with pytest.raises(pairs.PairError, match="no config.json"):
        pairs.check_name(str(tmp_path), name.draft)
    assert pairs.check_name(f" {name.target} ", name.draft) == name


def test_a_public_page_runs_only_its_list(monkeypatch, name, pair):
    other = pairs.PairName("owner/target", "owner/draft")
    shared = pairs.Pairs(name, load=lambda _: pair)
    assert shared.get(other) is pair
    monkeypatch.setenv("SPACE_ID", "owner/space")
    shared = pairs.Pairs(name, load=lambda _: pair)
    with pytest.raises(pairs.PairError, match="only runs the pairs in its list"):
        shared.get(other)
    page = handlers.Page(shared)
    with pytest.raises(pairs.PairError, match="from the list"):
        page.chosen(handlers.OTHER_PAIR, other.target, other.draft)
    monkeypatch.setenv("DSPARK_PAIRS", "owner/target|owner/draft")
    assert pairs.Pairs(name, load=lambda _: pair).get(other) is pair
    monkeypatch.setenv("DSPARK_PAIRS", "owner/target")
    with pytest.raises(pairs.PairError, match="target|draft"):
        pairs.Pairs(name)


def test_pairs_that_do_not_fit_are_refused_before_the_target_is_loaded(monkeypatch, tmp_path, name):
    config = json.loads((Path(name.target) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    monkeypatch.setattr(pairs.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(pairs.PairError, match="width 64, but .* has width 32"):
        pairs.load_pair(pairs.PairName(str(tmp_path), name.draft))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(pairs.PairError, match="encoder-decoder"):
        pairs.load_pair(pairs.PairName(str(tmp_path), name.draft))
    with pytest.raises(pairs.PairError, match="The draft .* cannot be read"):
        pairs.load_pair(pairs.PairName(name.target, name.target))


def test_no_code_of_a_repository_is_run(tmp_path, name):
    config = json.loads((Path(name.target) / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "theirs.py").write_text("raise SystemExit('their code ran')")
    with pytest.raises(pairs.PairError, match="cannot be read"):
        pairs.load_pair(pairs.PairName(str(tmp_path), name.draft))


# ------------------------------------------------------------------------------------------------------------- runs


def test_a_run_streams_the_plain_answer_with_its_origins(pair):
    written, updates = collect(pair, [PROMPT])
    assert written.ids[0] == plain_ids(pair, PROMPT, 48)
    assert "".join(token.text for token in written.rows[0]) == pair.tokenizer.decode(written.ids[0])
    events = updates[-1].stats.round_events
    assert [event for update in updates for event in update.rounds] == events
    how = [token.kind for token in written.rows[0]]
    kept = how.count("accepted") + how.count("copied")
    assert how[0] == "plain" and kept == sum(event.accepted[0] for event in events) > 0
    assert "correction" in how or "bonus" in how
    assert [update.is_last for update in updates] == [False] * (len(updates) - 1) + [True]


def test_a_plain_run_streams_too(pair):
    written, updates = collect(pair, [PROMPT], drafted=False)
    assert written.ids[0] == plain_ids(pair, PROMPT, 48)
    assert {token.kind for token in written.rows[0]} == {"plain"} and updates[-1].stats.rounds == 0


def test_a_target_without_rounds_streams_its_tokens(pair, monkeypatch):
    """Targets that are verified step by step report no rounds; their tokens come one by one."""
    monkeypatch.setattr(pair, "has_rounds", False)
    monkeypatch.delattr(runs.Recorder, "on_round")
    written, _ = collect(pair, [PROMPT])
    assert written.ids[0] == plain_ids(pair, PROMPT, 48) and {token.kind for token in written.rows[0]} == {"plain"}


def test_a_batch_keeps_rows_apart(pair):
    prompts = [PROMPT, "Hello", "What is 2 + 2?"]
    written, _ = collect(pair, prompts)
    assert written.ids == [plain_ids(pair, prompt, 48) for prompt in prompts]


def test_sampled_runs_repeat_with_their_seed(pair):
    knobs = runs.Knobs("constant", 0.0, 7, 32, temperature=1.0, seed=3)
    first, second = (collect(pair, [PROMPT], knobs)[0].ids for _ in range(2))
    other = collect(pair, [PROMPT], runs.Knobs("constant", 0.0, 7, 32, temperature=1.0, seed=4))[0].ids
    assert first == second != other


@pytest.mark.parametrize("policy", runs.THRESHOLDS)
def test_policies_reach_the_draft_and_leave_no_trace(pair, policy):
    config = pair.draft.generation_config
    before = dict(vars(config))
    _, updates = collect(pair, [PROMPT], runs.Knobs(policy, 0.4, 20 if policy == "constant" else 5, 32))
    lengths = [length for lengths in updates[-1].stats.verify_lengths for length in lengths]
    if policy == "constant":
        assert max(lengths) == 7 and lengths.count(7) >= len(lengths) - 2
    elif policy in ("confidence", "survival"):
        assert max(lengths) <= 5 and len(set(lengths)) > 1
    assert dict(vars(config)) == before


def test_updates_are_plain_data(pair):
    _, updates = collect(pair, [PROMPT])
    assert pickle.loads(pickle.dumps(updates[-1])).stats.new_tokens == 48
    flag = pickle.loads(pickle.dumps(first := runs.StopFlag()))
    first.set()
    assert flag.is_set(), "it is seen in another process"
    flag.clear()
    assert not first.is_set()


class Slowed:
    """The target takes at least `seconds` a forward inside the block."""

    def __init__(self, pair, seconds: float):
        self.model, self.seconds = pair.model, seconds

    def __enter__(self):
        self.handle = self.model.register_forward_pre_hook(lambda module, args: time.sleep(self.seconds))

    def __exit__(self, *exception):
        self.handle.remove()


def test_stop_ends_the_generation(pair):
    flag = runs.StopFlag()
    with Slowed(pair, 0.02):
        stream = runs.stream(pair, [PROMPT], runs.Knobs("constant", 0.0, 1, 256), flag)
        seen = len(next(stream).tokens)
        flag.set()
        last = [update for update in stream][-1]
    assert seen == 1 and last.stopped and last.stats.new_tokens < 256
    assert not pair.lock.locked()
    flag.clear()


def test_a_stop_pressed_while_waiting_counts(pair):
    flag = runs.StopFlag()
    flag.set()
    _, updates = collect(pair, [PROMPT], flag=flag)
    assert updates[-1].stopped and updates[-1].stats.new_tokens == 1, "generate() makes one token before it asks"
    flag.clear()


def test_time_ends_a_run(pair, monkeypatch):
    monkeypatch.setattr(runs.StopWhenAsked.__init__, "__defaults__", (0.0,))
    _, updates = collect(pair, [PROMPT])
    assert updates[-1].stopped


def test_a_reader_who_leaves_ends_the_generation(pair):
    flag = runs.StopFlag()
    with Slowed(pair, 0.02):
        stream = runs.stream(pair, [PROMPT], runs.Knobs("constant", 0.0, 1, 256), flag)
        next(stream)
        stream.close()
        assert not pair.lock.locked(), "closing waits for the end of the run"
    flag.clear()


def test_a_slow_reader_gets_fewer_updates(pair):
    """Whoever takes 30 ms to draw is asked to draw at most every 0.75 s."""
    count = 0
    with Slowed(pair, 0.02):
        for update in runs.stream(pair, [PROMPT], runs.Knobs("constant", 0.0, 1, 96), runs.StopFlag()):
            count, seconds = count + 1, update.seconds
            time.sleep(0.03)
    assert seconds > 0.75
    assert count <= 2 + seconds / (0.03 / runs.DRAWING_SHARE)


def test_errors_reach_the_reader(pair, monkeypatch):
    monkeypatch.setattr(pair.model, "generate", lambda **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(runs.stream(pair, [PROMPT], runs.Knobs(), runs.StopFlag()))
    assert not pair.lock.locked()


# --------------------------------------------------------------------------------------------------------- handlers


def live(page, prompt=PROMPT, session="one", **changes):
    return list(page.live(Request(session), prompt, *settings(page.pairs.get(page.pairs.default), **changes)))


def test_the_first_run_loads_and_says_so(page):
    drawn = live(page)
    assert "ds-caret" in drawn[0][0] and "Loading the models" in drawn[1][0]
    assert "ds-accepted" in drawn[-1][0] and "Round" in drawn[-1][1] and "τ" in drawn[-1][2]
    assert not any("Loading" in step[0] for step in live(page))


@pytest.mark.parametrize(
    ("prompt", "changes", "sentence"),
    [
        ("  ", {}, "Please write a prompt first."),
        ("x" * 2001, {}, "2001 characters; this page takes up to 2000"),
        ("word " * 300, {}, "tokens; with these settings up to"),
        (PROMPT, {"policy": "best"}, "policy must be one of"),
        (PROMPT, {"threshold": 2}, "threshold must be a number from 0 to 1"),
        (PROMPT, {"max_new_tokens": 100000}, "length of the answer must be a number from 1 to 256"),
        (PROMPT, {"temperature": None}, "temperature must be a number"),
        (PROMPT, {"seed": float("nan")}, "seed must be a number"),
        (PROMPT, {"choice": "no such pair"}, "choose a pair from the list"),
        (PROMPT, {"choice": handlers.OTHER_PAIR, "target": "nonsense", "draft": "a/b"}, "neither a folder nor"),
    ],
)
def test_bad_input_ends_in_a_sentence(page, prompt, changes, sentence):
    last = live(page, prompt, **changes)[-1]
    assert "ds-problem" in last[0] and sentence in last[0]
    assert not page.sessions.of("one").flags, "nothing is left to stop"


def test_unexpected_errors_are_sentences_without_details(page, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("secret detail")
        yield

    live(page)
    monkeypatch.setattr(page, "run", fails)
    last = live(page)[-1]
    assert "Something went wrong here (RuntimeError)" in last[0] and "secret" not in last[0]


def test_the_race_takes_turns_and_gives_its_verdict(page, pair):
    def race(**changes):
        return list(page.race(Request("one"), PROMPT, *settings(pair, **changes)))

    first, second = race(), race()
    assert "The outputs are identical, all 48 tokens." in first[-1][0] and "×" in first[-1][0]
    started = [next(text for step in drawn if "is running" in (text := str(step[0]))) for drawn in (first, second)]
    assert "Plain generate()" in started[0] and "DSpark" in started[1]
    assert "different" in race(temperature=1.0)[-1][0] or "differ in their draws" in race(temperature=1.0)[-1][0]


def test_a_difference_is_told_with_its_gap(page, pair):
    live(page)
    written = {drafted: collect(pair, [PROMPT], drafted=drafted)[0] for drafted in (False, True)}
    changed = written[True].ids[0][5] = (written[True].ids[0][5] + 1) % 96
    said = page.verdict(pair, PROMPT, runs.Knobs(), written, {False: (48, 2.0), True: (48, 1.0)})
    prompt = runs.encode(pair, [PROMPT])["input_ids"]
    before = torch.cat([prompt, torch.tensor([written[False].ids[0][:5]])], dim=1)
    logits = pair.model(before).logits[0, -1].detach()
    gap = float(logits[written[False].ids[0][5]] - logits[changed])
    assert "differ from token 6 on" in said and f"{gap:+.4f}" in said and "2.00×" in said


def test_a_batch_runs_in_lanes_and_is_charted(page, pair):
    def load(rows, listed, session="one"):
        return list(page.load_run(Request(session), rows, listed, *settings(pair, policy="throughput", threshold=0)))

    drawn = load(3, "Hello\n\nWhat is 2 + 2?\n")
    lanes = [step[0] for step in drawn if "ds-lanes" in str(step[0])]
    assert lanes[-1].count("<li") == 3 and lanes[-1].count("done, 48 tokens") == 3
    assert "At load 3" in drawn[-1][2] and drawn[-1][2].count("<circle") >= 4, "the run is in both charts"
    assert "At load 5" in page.moved(5, *settings(pair)[:3], Request("one"))
    assert "ds-problem" in load(3, " \n")[-1][0] and "ds-problem" in load(99, "Hello")[-1][0]
    point = page.sessions.of("one").points[0]
    assert point.rows == 3 and 0 <= point.verify_length <= 7 and point.speed > 0


def test_history_and_download(page, pair):
    assert "Nothing has been drafted" in page.history(Request("one"))[0]
    live(page)
    charts, button = page.history(Request("one"))
    assert charts.count("<figure") == 3 and "1 checked blocks" not in charts
    assert button["interactive"]
    lines = [json.loads(line) for line in Path(button["value"]).read_text(encoding="utf-8").splitlines()]
    assert [lines[0]["type"], lines[1]["type"], lines[-1]["type"]] == ["run", "tokens", "end"]
    assert lines[0]["prompts"] == [PROMPT] and lines[-1]["new_tokens"] == 48
    committed = [token for line in lines if line["type"] == "round" for token in line["committed"][0]]
    assert lines[1]["tokens"] + committed == plain_ids(pair, PROMPT, 48)


def test_visitors_do_not_see_each_other(page):
    live(page, session="one")
    assert page.sessions.of("one").runs and not page.sessions.of("two").runs
    flags = [page.sessions.of(session).begin("live") for session in ("one", "two")]
    page.stop("live", Request("two"))
    assert [flag.is_set() for flag in flags] == [False, True]
    path = Path(page.sessions.of("one").save())
    page.forget(Request("one"))
    assert flags[0].is_set() and not path.exists(), "a closed tab stops its run and leaves no file"
    assert not page.sessions.of("one").runs
    for flag in flags:
        flag.clear()


def test_memory_is_bounded(page, monkeypatch):
    monkeypatch.setattr(sessions, "_SESSIONS", 2)
    monkeypatch.setattr(sessions, "_RUNS", 1)
    for session in ("one", "one", "two", "three"):
        live(page, session=session)
    assert list(page.sessions._sessions) == ["two", "three"]
    live(page, session="three")
    assert len(page.sessions.of("three").runs) == 1


def test_the_forecast_checks_less_under_load():
    """Steps that cost by the token leave less to speculate with, the more rows share them."""
    rows, slots = 8, 7
    costs = {
        "draft": [0.0] + [0.001 * n for n in range(1, rows + 1)],
        "plain": [0.0] + [max(0.05, 0.002 * n) for n in range(1, rows + 1)],
        "verify": [[]] + [[max(0.05, 0.002 * t) for t in range(n * (1 + slots) + 1)] for n in range(1, rows + 1)],
    }
    seen = [[0.9**k for k in range(1, slots + 1)], [0.5**k for k in range(1, slots + 1)]]
    curve = sessions.forecast(costs, seen, rows)
    lengths = [entry["verify_length"] for entry in curve]
    assert lengths[0] == 7 and lengths == sorted(lengths, reverse=True) and lengths[-1] < 5
    assert all(entry["speed"] >= entry["plain_speed"] for entry in curve)
    dear = costs | {"draft": [0.0] + [9.0] * rows}
    assert {entry["verify_length"] for entry in sessions.forecast(dear, seen, rows)} == {0.0}, "drafting would not pay"


def test_reliability_is_that_of_the_rounds(pair):
    session = sessions.Session()
    for prompt in (PROMPT, "Hello"):
        written, updates = collect(pair, [prompt], runs.Knobs("constant", 0.0, 7, 48))
        session.file("live", pair, [prompt], runs.Knobs(), written, updates[-1])
    bins, error = session.reliability()
    checked = sum(sum(lengths) for lengths in session.stats.verify_lengths)
    assert sum(weight for _, _, weight in bins) == checked
    kept = sum(sum(event.accepted) for event in session.stats.round_events)
    assert sum(outcome * weight for _, outcome, weight in bins) == pytest.approx(kept)
    assert 0 <= error <= 1
    assert sum(session.accepted_histogram()) == session.stats.rounds - sum(
        not any(lengths) for lengths in session.stats.verify_lengths
    )


def test_another_pair_begins_the_figures_anew(pair):
    session = sessions.Session()
    written, updates = collect(pair, [PROMPT])
    session.file("live", pair, [PROMPT], runs.Knobs(), written, updates[-1])
    rounds = session.stats.rounds
    other = pairs.Pair(pairs.PairName("owner/target", "owner/draft"), pair.model, pair.draft, pair.tokenizer)
    session.file("live", other, [PROMPT], runs.Knobs(), written, updates[-1])
    assert session.stats.rounds == rounds and len(session.runs) == 2


def test_the_front_matter_fits_the_page():
    front = (SPACE / "README.md").read_text(encoding="utf-8").split("---")[1]
    fields = dict(line.split(": ", 1) for line in front.strip().splitlines())
    assert fields["sdk"] == "gradio" and fields["sdk_version"].startswith("6.")
    assert (SPACE / fields["app_file"]).is_file() and fields["license"] == "apache-2.0"
    assert len(fields["short_description"]) <= 60, "the Hub refuses longer ones"
    needed = (SPACE / "requirements.txt").read_text(encoding="utf-8").split()
    assert any(line.startswith("dspark-hf[demo]") for line in needed)


def test_the_command_line_starts_the_page(monkeypatch, capsys, tmp_path):
    from dspark_hf.cli import demo, main

    called = []
    monkeypatch.setattr(demo.subprocess, "call", lambda command: called.append(command) or 0)
    assert main(["demo", "--space", "--model", "owner/target", "--draft", "owner/draft"]) == 0
    assert called[0][1:] == [str(SPACE / "app.py"), "--target", "owner/target", "--draft", "owner/draft"]
    monkeypatch.setattr(demo, "PAGE", tmp_path / "app.py")
    assert main(["demo", "--space"]) != 0
    assert main(["demo"]) != 0
    said = capsys.readouterr().err
    assert "make space" in said and "--draft: name a DSpark draft" in said


def test_zerogpu_lends_the_gpu_to_every_model_call(monkeypatch, pair):
    lent = []

    class Spaces:
        @staticmethod
        def GPU(duration):
            return lambda work: lent.append(duration) or work

    monkeypatch.setitem(sys.modules, "spaces", Spaces)
    try:
        fresh = importlib.reload(handlers)
        fresh.Page(pairs.Pairs(pair.name, load=lambda _: pair))
        assert lent == [120] * 4
    finally:
        monkeypatch.delitem(sys.modules, "spaces")
        importlib.reload(handlers)
