"""The page in a real browser: headless Chromium, driven by Playwright, on a tiny pair whose target is slowed down.

Screenshots go to the folder in `DSPARK_ARTIFACTS`, or to pytest's own. Without Chromium or Playwright all of it is
skipped: the browser comes from the system (`apt-get install chromium`), Playwright from the extra `browser`. The
timings of the real pair are checked on request only (`DSPARK_TIMED=1`), since they need a machine without other work.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from bigram_pair import write_pair
from byte_tokenizer import byte_tokenizer

pytest.importorskip("gradio", reason="the page needs gradio: pip install 'dspark-hf[browser]'")
pytest.importorskip("playwright", reason="needs Playwright: pip install 'dspark-hf[browser]'")

import app
import pairs
import runs
from playwright import sync_api

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
STEP = {"seconds": 0.02}  # that the target takes at least for a forward
# Counts what the live view shows, whenever it changes.
WATCH = """
window.watched = {counts: [], slots: [], cuts: []};
new MutationObserver(() => {
    const count = selector => document.querySelectorAll(selector).length, tokens = count('#live-answer span[title]');
    if (tokens) watched.counts.push(tokens);
    watched.slots.push(count('#live-round .ds-slot'));
    watched.cuts.push(count('#live-round .ds-cut'));
}).observe(document.body, {childList: true, subtree: true});
"""
EVIL = b"<img src=x onerror=window.wasRun=1>${window.wasRun=2}"
DESKTOP, PHONE = {"width": 1200, "height": 1000}, {"width": 390, "height": 844}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]


def load(name: pairs.PairName) -> pairs.Pair:
    """The pair, with confidences that differ from slot to slot, and a target slow enough to watch."""
    pair = pairs.load_pair(name)
    with torch.no_grad():
        pair.draft.confidence_head.proj.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
    pair.model.register_forward_pre_hook(lambda module, args: time.sleep(STEP["seconds"]))
    return pair


@pytest.fixture(scope="module")
def name(tmp_path_factory) -> pairs.PairName:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    return pairs.PairName(str(target), str(draft))


@pytest.fixture(scope="module")
def served(name, _profile_home):
    """The running page, its models loaded; `.page` and `.url`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HOME", str(_profile_home))
        blocks = app.build(pairs.Pairs(name, load))
        blocks.page.load_default()
    _, blocks.url, _ = blocks.launch(prevent_thread_lock=True, quiet=True, **app.look())
    yield blocks
    blocks.close()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def shots(tmp_path_factory) -> Path:
    """Where screenshots go."""
    folder = Path(os.environ.get("DSPARK_ARTIFACTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture()
def visit(browser, served):
    """Opens the page as a new visitor; checks at the end that nothing failed in the browser."""
    contexts, complaints = [], []

    def open_page(viewport=DESKTOP, **options):
        context = browser.new_context(viewport=viewport, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(20000)
        tab.requested = []
        tab.on("request", lambda request: tab.requested.append(request.url))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        tab.goto(served.url)
        tab.wait_for_selector("#live-run")
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def set_up(tab, policy: str = "survival", threshold: float = 0.3, length: int = 128) -> None:
    """Sets the controls as a visitor does."""
    tab.click("#settings > button")
    tab.click(f"#policy label:has-text('{policy}')")
    tab.wait_for_function(
        "value => Number(document.querySelector('#threshold input[type=number]').value) === value",
        arg=runs.THRESHOLDS[policy],
    )
    for control, value in (("threshold", threshold), ("length", length)):
        tab.fill(f"#{control} input[type=number]", str(value))
        tab.press(f"#{control} input[type=number]", "Tab")
    tab.click("#settings > button")


def choose(tab, title: str) -> None:
    tab.get_by_role("tab", name=title).click()


def press_run(tab, kind: str = "live") -> None:
    """Presses Run and waits until the page says that it is running."""
    tab.click(f"#{kind}-run")
    tab.wait_for_function(f"document.querySelector('#{kind}-run').innerText !== 'Run'")


def wait_until_over(tab, kind: str = "live", seconds: float = 40) -> None:
    tab.wait_for_function(f"document.querySelector('#{kind}-run').innerText === 'Run'", timeout=1000 * seconds)


def first_token(tab) -> float:
    """Presses Run on a fresh page; seconds until the first token shows."""
    pressed = time.monotonic()
    tab.click("#live-run")
    tab.wait_for_function("document.querySelectorAll('#live-answer .ds-answer span[title]').length > 0")
    return time.monotonic() - pressed


def spans(tab) -> int:
    return tab.locator("#live-answer .ds-answer span[title]").count()


def answer_of(served, prompt: str, count: int) -> str:
    """What plain `generate()` answers."""
    pair = served.page.pairs.get(served.page.pairs.default)
    return pair.tokenizer.decode(ids_of(pair, prompt, count)[1])


def ids_of(pair: pairs.Pair, prompt: str, count: int) -> tuple[list[int], list[int]]:
    """Prompt and plain answer as token ids, at full speed."""
    with pair.lock, pytest.MonkeyPatch.context() as patch:
        patch.setitem(STEP, "seconds", 0)
        inputs = runs.encode(pair, [prompt])
        output = pair.model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)[0].tolist()
    length = inputs["input_ids"].shape[1]
    return output[:length], output[length:]


def text_of(tab, selector: str) -> str:
    return tab.eval_on_selector(selector, "element => element.textContent")


def test_nothing_is_loaded_from_outside(visit, served, shots):
    tab = visit()
    for title in ("Race", "Load", "History", "Live run"):
        choose(tab, title)
    tab.click("text=What is this?")
    tab.wait_for_timeout(1000)
    outside = [url for url in tab.requested if not url.startswith((served.url, "data:", "blob:"))]
    assert outside == [] and len(tab.requested) > 5
    fonts = tab.evaluate("getComputedStyle(document.querySelector('.ds-header h1')).fontFamily")
    assert "system-ui" in fonts
    assert "Speculative decoding" in tab.inner_text("body")
    tab.screenshot(path=shots / "start.png", full_page=True)


def test_tokens_appear_before_the_run_ends(visit, served, shots):
    tab = visit()
    set_up(tab, length=160)
    # The last round may have no draft, and a slow browser sees few rounds: the page itself remembers what it showed.
    tab.evaluate(WATCH)
    first = first_token(tab)
    wait_until_over(tab)
    counts, slots, cuts = tab.evaluate("[watched.counts, watched.slots, watched.cuts]")
    assert len(set(counts)) > 3 and 0 < counts[0] < 160, "the answer grows before the viewer's eyes"
    assert max(slots) >= 7 and max(cuts) == 1
    assert spans(tab) == 160
    assert text_of(tab, "#live-answer .ds-answer") == answer_of(served, app.texts.EXAMPLES[0], 160)
    for kind in ("accepted", "correction"):
        assert tab.locator(f"#live-answer .ds-{kind}").count() > 0
    figures = tab.inner_text("#live-figures")
    assert re.search(r"τ\s+[1-8]\.\d\d", figures) and "verify" in figures
    print(f"first token after {first:.2f} s; {figures.splitlines()[-1]}")
    tab.screenshot(path=shots / "live.png", full_page=True)


@pytest.mark.smollm2
@pytest.mark.skipif(not os.environ.get("DSPARK_TIMED"), reason="DSPARK_TIMED is unset: set it on a quiet machine")
def test_the_real_pair_is_quick_and_drawing_costs_little(browser, smollm2_path, scout_folder, monkeypatch):
    """The first token within 1.5 seconds of the press; all but the generation takes less than 5 % of the run."""
    generating = {}

    def timed(*arguments):
        before = time.thread_time()
        generate(*arguments)
        generating["seconds"] = time.thread_time() - before

    generate = runs._generate
    blocks = app.build(pairs.Pairs(pairs.PairName(str(smollm2_path), str(scout_folder))))
    blocks.page.load_default()
    monkeypatch.setattr(runs, "_generate", timed)
    _, url, _ = blocks.launch(prevent_thread_lock=True, quiet=True, **app.look())
    first = []
    for _ in range(3):
        tab = browser.new_page()
        tab.goto(url)
        tab.wait_for_selector("#live-run")
        set_up(tab, length=64)
        began, process, here = time.monotonic(), time.process_time(), time.thread_time()
        first.append(first_token(tab))
        wait_until_over(tab, seconds=90)
        seconds = time.monotonic() - began
        spent = time.process_time() - process - (time.thread_time() - here) - generating["seconds"]
        tab.close()
    blocks.close()
    print(f"first token after {first} s; server and drawing {spent / seconds:.1%} of the run")
    assert min(first) < 1.5
    assert spent < 0.05 * seconds


def test_stop_stops_the_generation(visit, served):
    tab = visit()
    set_up(tab, policy="constant", length=256)
    tab.fill("#live-prompt textarea", "Stop me")
    pair = served.page.pairs.get(served.page.pairs.default)
    press_run(tab)
    tab.wait_for_function("document.querySelectorAll('#live-answer .ds-answer span[title]').length > 3")
    assert pair.lock.locked()
    tab.click("#live-stop")
    wait_until_over(tab, seconds=10)
    assert not pair.lock.locked() and 3 < spans(tab) < 256
    assert "Stopped." in tab.inner_text("#live-answer")


def test_closing_the_tab_stops_the_generation(visit, served):
    tab = visit()
    set_up(tab, policy="constant", length=256)
    pair = served.page.pairs.get(served.page.pairs.default)
    press_run(tab)
    tab.wait_for_function("document.querySelectorAll('#live-answer .ds-answer span[title]').length > 3")
    tab.close()
    closed = time.monotonic()
    while pair.lock.locked() and time.monotonic() - closed < 10:
        time.sleep(0.05)
    assert not pair.lock.locked()
    assert not any(session.flags for session in served.page.sessions._sessions.values())


def test_the_race(visit, served, shots):
    tab = visit()
    set_up(tab, length=64)
    choose(tab, "Race")
    press_run(tab, "race")
    tab.wait_for_selector("#race-plain .ds-answer")
    assert tab.locator("#race-dspark .ds-answer").count() == 0, "one after the other"
    wait_until_over(tab, "race")
    verdict = tab.inner_text("#race-verdict")
    assert "The outputs are identical, all 64 tokens." in verdict
    speedup = float(re.search(r"([\d.]+)×", verdict).group(1))
    plain, dspark = (float(value) for value in re.findall(r"([\d.]+) tokens/s", tab.inner_text("#race-speeds")))
    assert speedup == pytest.approx(dspark / plain, rel=0.05) and speedup > 1, "the slowed target makes rounds pay"
    wanted = answer_of(served, app.texts.EXAMPLES[1], 64)
    assert [text_of(tab, f"#race-{side} .ds-answer") for side in ("plain", "dspark")] == [wanted, wanted]
    tab.screenshot(path=shots / "race.png", full_page=True)


def test_moving_the_load_slider_runs_a_batch(visit, shots):
    tab = visit()
    set_up(tab, length=96)
    choose(tab, "Load")
    slider = tab.locator("#load-rows-slider input[type=range]")
    box = slider.bounding_box()
    middle = box["y"] + box["height"] / 2
    tab.mouse.move(box["x"] + 0.45 * box["width"], middle)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 0.7 * box["width"], middle, steps=4)
    tab.mouse.up()
    rows = int(slider.input_value())
    assert rows > 4
    tab.wait_for_selector("#load-rows .ds-lanes")
    seen = set()
    while tab.inner_text("#load-run") != "Run":
        seen.add(tuple(re.findall(r"checks (\d)", tab.inner_text("#load-rows"))))
        tab.wait_for_timeout(50)
    lengths = {row: {lengths[row] for lengths in seen if len(lengths) == rows} for row in range(rows)}
    assert all(len(values) > 1 for values in lengths.values()), "each row's verify length changes while one looks on"
    assert tab.locator("#load-rows li").count() == rows
    assert f"At load {rows}" in tab.inner_text("#load-charts")
    assert tab.locator("#load-charts svg[role=img]").count() == 2 and tab.locator("#load-charts .ds-dot").count() >= 4
    tab.screenshot(path=shots / "load.png", full_page=True)
    tab.fill("#load-rows-slider input[type=number]", "2")
    tab.press("#load-rows-slider input[type=number]", "Tab")
    tab.wait_for_function("document.querySelector('#load-charts').innerText.includes('At load 2')")


def test_two_visitors_at_once(visit, served):
    tabs, prompts = [visit(), visit()], ["abc abc", "What is 2 + 2?"]
    for tab, prompt in zip(tabs, prompts, strict=True):
        set_up(tab, policy="constant", length=64)
        tab.fill("#live-prompt textarea", prompt)
    for tab in tabs:
        press_run(tab)
    for tab in tabs:
        wait_until_over(tab)
    shown = [text_of(tab, "#live-answer .ds-answer") for tab in tabs]
    assert shown == [answer_of(served, prompt, 64) for prompt in prompts] and shown[0] != shown[1]
    # stopping one leaves the other alone
    for tab in tabs:
        press_run(tab)
    tabs[1].click("#live-stop")
    for tab in tabs:
        wait_until_over(tab)
    assert [("Stopped." in tab.inner_text("#live-answer")) for tab in tabs] == [False, True]


def test_bad_input_is_answered_with_a_sentence(visit, shots):
    tab = visit()

    def complaint(prompt: str) -> str:
        tab.fill("#live-prompt textarea", prompt)
        tab.click("#live-run")
        tab.wait_for_selector("#live-answer .ds-problem")
        wait_until_over(tab)
        return tab.inner_text("#live-answer .ds-problem")

    assert "Please write a prompt first." in complaint("   ")
    tab.screenshot(path=shots / "problem.png", full_page=True)
    tab.reload()
    assert "takes up to 2000" in complaint("x" * 2500)
    tab.reload()
    tab.click("#settings > button")
    tab.click("#pair input")
    tab.get_by_role("option", name="another pair").click()
    tab.fill("#target textarea, #target input", "no such model")
    assert "neither a folder nor of the form owner/name" in complaint("Hello")


def test_html_of_a_model_is_shown_and_not_run(visit, served, name, tmp_path):
    """Another pair, named by the visitor, whose tokenizer turns an ordinary token into an image that runs a script."""
    pair = served.page.pairs.get(name)
    prompt = "Hello"
    asked, answered = ids_of(pair, prompt, 32)
    kept = {*asked, *(byte_tokenizer().encode(letter)[0] for letter in "abcdef")}
    written = [token for token in answered if token not in kept]
    shutil.copytree(name.target, tmp_path / "target")
    tokenizer = byte_tokenizer(special={written[0]: EVIL})
    tokenizer.chat_template = pair.tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path / "target")

    tab = visit()
    set_up(tab, length=32)
    tab.click("#settings > button")
    tab.click("#pair input")
    tab.get_by_role("option", name="another pair").click()
    tab.fill("#target textarea, #target input", str(tmp_path / "target"))
    tab.fill("#draft textarea, #draft input", name.draft)
    tab.fill("#live-prompt textarea", prompt)
    press_run(tab)
    tab.wait_for_selector("#live-answer .ds-answer", timeout=60000)
    wait_until_over(tab)
    assert EVIL.decode() in text_of(tab, "#live-answer .ds-answer")
    tab.wait_for_timeout(300)
    assert tab.evaluate("window.wasRun") is None
    assert tab.locator("#live-answer img, #live-round img").count() == 0


def test_history_and_its_download(visit, shots, tmp_path):
    tab = visit()
    set_up(tab, policy="constant", length=64)
    press_run(tab)
    wait_until_over(tab)
    choose(tab, "History")
    tab.wait_for_selector("#history svg[role=img]")
    assert tab.locator("#history svg[role=img]").count() == 3
    with tab.expect_download() as download:
        tab.click("#download")
    download.value.save_as(tmp_path / "runs.jsonl")
    records = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text(encoding="utf-8").splitlines()]
    assert records[0]["type"] == "run" and records[0]["prompts"] == [app.texts.EXAMPLES[0]]
    assert records[-1]["new_tokens"] == 64
    tab.screenshot(path=shots / "history.png", full_page=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone(visit, shots, scheme):
    tab = visit(viewport=PHONE, color_scheme=scheme, has_touch=True)
    set_up(tab, length=64)
    press_run(tab)
    tab.wait_for_selector("#live-round .ds-slot")
    wait_until_over(tab)
    for title in ("Live run", "Race", "Load", "History"):
        choose(tab, title)
        tab.wait_for_timeout(300)
        assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), title
        tab.screenshot(path=shots / f"phone-{scheme}-{title.lower().replace(' ', '-')}.png", full_page=True)
    background, colour = tab.evaluate(
        "(() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]; })()"
    )
    lightness = [sum(map(float, re.findall(r"[\d.]+", value)[:3])) for value in (background, colour)]
    assert (lightness[0] < lightness[1]) == (scheme == "dark")


def test_the_explanation_and_settings_open(visit, shots):
    tab = visit(color_scheme="dark")
    tab.click("text=What is this?")
    tab.click("#settings > button")
    tab.wait_for_timeout(400)
    assert tab.is_visible("#policy") and tab.is_visible(".ds-prose")
    words = len(tab.inner_text(".ds-prose").split())
    assert words < 220, "a minute's reading"
    tab.screenshot(path=shots / "explanation.png", full_page=True)
