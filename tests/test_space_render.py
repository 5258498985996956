"""What the page draws, from the record of a real run: marks, the round panel, figures, charts. No model, no server."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import render
from transcript import KINDS, Token, kinds, one_row

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "<img src=x onerror=alert(1)><script>alert(2)</script>${alert(3)}"
VOID = {"br", "img", "input", "meta", "link", "hr"}


@pytest.fixture(scope="module")
def trace() -> list[list[dict]]:
    """Two recorded runs: one prompt under "survival", two under "throughput"."""
    lines = (ROOT / "tests" / "data" / "space_trace.jsonl").read_text(encoding="utf-8").splitlines()
    runs: list[list[dict]] = []
    for record in map(json.loads, lines):
        if record["type"] == "run":
            runs.append([])
        runs[-1].append(record)
    return runs


@pytest.fixture(scope="module")
def rounds(trace) -> list[dict]:
    """The rounds of the single prompt."""
    return [record for record in trace[0] if record["type"] == "round"]


def tokens_of(run: list[dict], row: int = 0) -> list[Token]:
    """A row's answer, rebuilt from the record."""
    tokens = [Token(record["text"][row], "plain") for record in run if record["type"] == "tokens"]
    for record in run:
        if record["type"] == "round" and row in record["rows"]:
            share = one_row(record, row)
            how = kinds(share["verified"], share["accepted"], len(share["committed"]))
            tokens += [Token(text, kind) for text, kind in zip(share["committed"], how, strict=True)]
    return tokens


class Page(HTMLParser):
    """Checks that tags close in order; keeps elements by class, and the text."""

    def __init__(self, html: str):
        super().__init__()
        self.open, self.elements, self.text = [], [], ""
        self.feed(html)
        self.close()
        assert self.open == [], html

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def count(self, name: str) -> int:
        """Elements with this class."""
        return sum(name in (attributes.get("class") or "").split() for _, attributes in self.elements)


def test_kinds():
    assert kinds(verified=7, accepted=2, committed=3) == ["accepted", "accepted", "correction"]
    assert kinds(verified=2, accepted=2, committed=3) == ["accepted", "accepted", "bonus"]
    assert kinds(verified=0, accepted=0, committed=1) == ["plain"]
    assert kinds(verified=7, accepted=2, committed=2) == ["accepted", "accepted"], "the answer ended with a draft"
    assert kinds(verified=4, accepted=2, committed=3, copied=True) == ["copied", "copied", "correction"]


def test_every_token_is_marked_by_its_origin(trace, rounds):
    tokens = tokens_of(trace[0])
    page = Page(render.answer(tokens))
    assert page.count("ds-accepted") == sum(record["accepted"][0] for record in rounds) > 0
    corrected = [
        r for r in rounds if r["accepted"][0] < r["verify_lengths"][0] and len(r["committed"][0]) > r["accepted"][0]
    ]
    assert page.count("ds-correction") == len(corrected) > 0
    complete = [r for r in rounds if r["accepted"][0] == r["verify_lengths"][0] > 0]
    assert page.count("ds-bonus") == sum(len(r["committed"][0]) > r["accepted"][0] for r in complete) > 0
    assert page.text == "".join(token.text for token in tokens)
    assert "def" in page.text, "the recorded answer is a Python function"


def test_an_unmarked_answer_is_the_same_text(trace):
    tokens = tokens_of(trace[0])
    page = Page(render.answer(tokens, marked=False))
    assert page.text == Page(render.answer(tokens)).text
    assert not any(page.count(f"ds-{kind}") for kind in KINDS)


def test_the_round_panel_says_what_became_of_each_slot(rounds):
    cut_short = replaced = 0
    for record in rounds:
        share = one_row(record, 0)
        drafted, verified, accepted = share["drafted"], share["verified"], share["accepted"]
        html = render.round_panel(share)
        page = Page(html)
        assert page.count("ds-accepted-slot") == accepted
        assert page.count("ds-rejected-slot") == html.count("<s>") == verified - accepted
        assert page.count("ds-unchecked-slot") == len(drafted) - verified
        assert page.count("ds-cut") == (1 if drafted else 0)
        before_cut = html.split("ds-cut")[0]
        assert len(re.findall(r"ds-(?:accepted|rejected)-slot", before_cut)) == verified
        for value in share["confidence"] + share["survival"]:
            assert f"{value:.2f}" in page.text
        own = len(share["committed"]) > accepted
        assert page.count("ds-own-slot") == own
        assert ("replacement" in page.text) == (own and accepted < verified)
        cut_short += 0 < verified < len(drafted)
        replaced += "replacement" in page.text
    assert cut_short and replaced, "the trace shows a cut and a replacement"


def test_a_copied_block_is_called_so(rounds):
    record = next(record for record in rounds if record["accepted"][0])
    assert "drafted," in render.round_panel(one_row(record, 0))
    assert "copied," in render.round_panel(one_row(record | {"copied": [True]}, 0))


def test_a_round_without_a_draft(trace):
    empty = [record for record in trace[1] if record["type"] == "round" and not any(record["drafted"])]
    page = Page(render.round_panel(one_row(empty[0], empty[0]["rows"][0])))
    assert "Nothing was drafted" in page.text and page.count("ds-slot") == 1


def test_marks_need_no_colour():
    """Each origin and outcome has a line, a weight, a frame or a sign of its own."""
    css = (ROOT / "space" / "style.css").read_text(encoding="utf-8")
    rule = {name: "".join(re.findall(rf"\.ds-{name}(?:::after)? {{([^}}]*)}}", css)) for name in KINDS}
    assert "underline" in rule["accepted"] and "underline dotted" in rule["copied"]
    assert "font-weight: 700" in rule["bonus"] and 'content: "+"' in rule["bonus"]
    assert "border:" in rule["correction"]
    assert rule["plain"] == ""
    share = {"index": 0, "drafted": ["a", "b", "c"], "confidence": [], "survival": [], "verified": 2, "accepted": 1}
    page = Page(render.round_panel(share | {"committed": ["a", "x"]}))
    assert all(sign in page.text for sign in ("✓ accepted", "✗ rejected", "– not checked"))


def test_figures_are_those_of_the_record(trace, rounds):
    end = trace[0][-1]
    page = Page(render.figures(end["new_tokens"], end["seconds"], rounds, 0.02, end["prefill_seconds"]))
    committed = sum(len(record["committed"][0]) for record in rounds)
    assert f"{committed / len(rounds):.2f}" in page.text
    assert f"{end['new_tokens'] / end['seconds']:.1f}" in page.text
    shares = {name: int(value) for name, value in re.findall(r"(draft|verify|prompt|other) (\d+)%", page.text)}
    assert set(shares) == {"draft", "verify", "prompt", "other"} and 98 <= sum(shares.values()) <= 102
    assert abs(shares["verify"] - 100 * end["verify_seconds"] / end["seconds"]) < 1
    assert "2.0% of the time" in page.text
    Page(render.figures(0, 0.0))


def test_whatever_a_model_writes_is_shown_and_not_executed():
    share = {"index": 0, "drafted": [SCRIPT] * 3, "confidence": [0.5] * 3, "survival": [0.5] * 3}
    share |= {"verified": 2, "accepted": 1, "committed": [SCRIPT, SCRIPT]}
    row = {"verified": 2, "accepted": 1, "tokens": 3, "text": SCRIPT, "is_done": False}
    drawn = [
        render.answer([Token(SCRIPT, kind, 0.5) for kind in KINDS]),
        render.answer([Token(SCRIPT, "plain")], marked=False),
    ]
    drawn += [render.round_panel(share), render.round_panel(share | {"drafted": [], "verified": 0, "accepted": 0})]
    drawn += [render.lanes([row], 7), render.problem(SCRIPT), render.note(SCRIPT), render.verdict(1.5, SCRIPT, False)]
    for html in drawn:
        page = Page(html)
        assert not {"img", "script"} & {tag for tag, _ in page.elements}
        assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
        assert "onerror=alert(1)" in page.text.replace("·", " "), "it is shown"


def test_lanes_show_each_row(trace):
    run = trace[1]
    last = [record for record in run if record["type"] == "round"][-1]
    rows = [
        {"verified": one_row(last, row)["verified"], "accepted": one_row(last, row)["accepted"], "tokens": 5}
        | {"text": "".join(token.text for token in tokens_of(run, row)), "is_done": False}
        for row in last["rows"]
    ]
    page = Page(render.lanes([*rows, {"verified": 5, "accepted": 3, "tokens": 9, "text": "x", "is_done": False}], 7))
    assert page.count("ds-kept") == 3 + sum(row["accepted"] for row in rows)
    assert page.count("ds-sent") == 2 + sum(row["verified"] - row["accepted"] for row in rows)
    assert page.count("ds-idle") == 7 * (len(rows) + 1) - page.count("ds-kept") - page.count("ds-sent")
    assert "checks 5, 9 tokens" in page.text


def curve(count: int = 8) -> list[dict]:
    return [
        {"rows": n, "verify_length": 7 / n, "speed": 20.0 + n, "plain_speed": 10.0 + 2 * n} for n in range(1, count + 1)
    ]


class Point:
    rows, verify_length, speed = 4, 2.0, 30.0


@pytest.mark.parametrize(
    "html",
    [
        render.bars([0.9, 0.5, 0.0], 1, "position", "Acceptance", y_max=1.0),
        render.bars([7], 0, "accepted", "Rounds"),
        render.load_charts(curve(), [Point()], 3),
        render.load_charts(curve(1), [], 1),
        render.reliability([(0.1, 0.2, 5.0), (0.9, 0.8, 20.0)], 0.1),
        render.history([0.8, 0.4], [3, 2, 1], [(0.5, 0.5, 4.0)], 0.0),
    ],
    ids=["bars", "one bar", "load", "one load", "reliability", "history"],
)
def test_charts_are_pictures_that_say_what_they_show(html):
    Page(html)
    drawings = re.findall(r"<svg viewBox=\"0 0 360.*?</svg>", html, re.DOTALL)
    assert drawings and "nan" not in html and "inf" not in html
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        assert root.get("role") == "img" and len(root.get("aria-label")) > 20
        for element in root.iter():
            for name in ("x", "cx", "x1", "x2"):
                assert 0 <= float(element.get(name, 0)) <= 360
            for name in ("y", "cy", "y1", "y2"):
                assert 0 <= float(element.get(name, 0)) <= 210


def test_bars_are_as_high_as_their_values():
    html = render.bars([0.5, 1.0], 1, "position", "Acceptance", y_max=1.0)
    heights = [float(value) for value in re.findall(r'<rect[^>]* height="([\d.]+)"', html)]
    assert heights[0] == pytest.approx(heights[1] / 2, abs=0.1) and heights[1] > 50


def test_nothing_is_drawn_from_nothing():
    assert "svg" not in render.bars([], 1, "x", "y") + render.reliability([], float("nan")) + render.history(
        [], [], [], 0
    )
    assert "rounds appear here" in render.round_panel(None)


def test_drawing_costs_little_of_a_run(trace, rounds):
    """All that a live run draws, after every round, against the time the recorded run took."""
    run, spent = trace[0], time.process_time()
    for count in range(1, len(rounds) + 1):
        done = [record for record in run if record["type"] != "round"][:2] + rounds[:count]
        render.answer(tokens_of(done), running=True)
        render.round_panel(one_row(rounds[count - 1], 0))
        render.figures(count, float(count), rounds[:count], 0.01)
    assert time.process_time() - spent < 0.05 * run[-1]["seconds"]


def test_the_page_names_no_other_server():
    for path in (ROOT / "space").glob("*"):
        if path.suffix in (".py", ".css"):
            assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", path.read_text(encoding="utf-8")), path
