"""What the page does when a button is pressed: checks the input, runs the models, draws.

Every handler is a generator of component values. Wrong input ends it with a sentence in place of the answer. A run's
updates are plain data that come out of `run`, possibly from another process; memory and drawing stay in this one.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator

import gradio as gr
import render
from pairs import Pair, PairError, PairName, Pairs, check_name, hosted
from runs import THRESHOLDS, Knobs, StopFlag, Update, costs, difference, encode, stream, warm_up
from sessions import LoadPoint, Session, Sessions, forecast
from transcript import Transcript

try:
    import spaces
except ImportError:  # not on ZeroGPU
    spaces = None

logger = logging.getLogger(__name__)

MAX_ROWS = 8
MAX_NEW_TOKENS = 256
MAX_CHARACTERS = 2000  # of a prompt
MAX_PROMPT_TOKENS = 512
OTHER_PAIR = "another pair"


def on_gpu(work):
    """On ZeroGPU, borrows the GPU while `work` runs; elsewhere nothing."""
    return work if spaces is None else spaces.GPU(duration=120)(work)


def in_sentences(handler):
    """Shows what goes wrong in a generator handler as a sentence in its first output."""

    @functools.wraps(handler)
    def guarded(self, *arguments):
        try:
            yield from handler(self, *arguments)
        except (PairError, ValueError) as error:
            yield self.first_output(handler, render.problem(str(error)))
        except Exception as error:  # the visitor gets a sentence, the log the rest
            logger.exception("a run failed")
            sentence = f"Something went wrong here ({type(error).__name__}). The run has ended; please try again."
            yield self.first_output(handler, render.problem(sentence))

    return guarded


class Page:
    """
    The handlers of one page.

    Args:
        pairs (`Pairs`): The models.
    """

    outputs = {"live": 3, "race": 4, "load_run": 3}

    def __init__(self, pairs: Pairs):
        self.pairs, self.sessions = pairs, Sessions()

        # on ZeroGPU only plain data may go in and out, so pairs go by name
        def run(name: PairName, *arguments):
            yield from stream(pairs.get(name), *arguments)

        self.run = on_gpu(run)
        self.warm_up = on_gpu(lambda name: warm_up(pairs.get(name), MAX_ROWS))
        self.costs = on_gpu(lambda name: costs(pairs.get(name), MAX_ROWS))
        self.difference = on_gpu(lambda name, *arguments: difference(pairs.get(name), *arguments))

    def load_default(self) -> None:
        """Gets the default pair ready before anybody asks; what goes wrong is told to whoever runs it."""
        try:
            if spaces is not None:  # on ZeroGPU a GPU is lent to visitors only
                self.pairs.get(self.pairs.default)
            else:
                self.load(self.pairs.default)
        except Exception:
            logger.exception("the default pair could not be loaded")

    def first_output(self, handler, html: str) -> tuple:
        return html, *[gr.skip()] * (self.outputs[handler.__name__] - 1)

    def session(self, request: gr.Request) -> Session:
        return self.sessions.of(request.session_hash or "")

    # -------------------------------------------------------------------------------------------------------- input

    def load(self, name: PairName) -> Pair:
        """The pair, loaded and warmed up."""
        pair = self.pairs.get(name)
        with pair.warming:
            if not pair.is_warm:
                pair.has_rounds, pair.survival = self.warm_up(name)
                pair.is_warm = True
        return pair

    def chosen(self, choice: str, target: str, draft: str) -> PairName:
        """The pair that the settings name."""
        if choice == OTHER_PAIR and not hosted():
            return check_name(target, draft)
        names = {str(name): name for name in self.pairs.allowed}
        if choice not in names:
            raise PairError("Please choose a pair from the list.")
        return names[choice]

    def prepared(self, prompts: list[str], settings) -> Iterator[Pair | str]:
        """Checks everything; yields a sentence to show while models load, then the pair and the knobs."""
        choice, target, draft, policy, threshold, num_tokens, max_new_tokens, temperature, seed = settings
        for prompt in prompts:
            if not prompt.strip():
                raise ValueError("Please write a prompt first.")
            if len(prompt) > MAX_CHARACTERS:
                raise ValueError(f"The prompt has {len(prompt)} characters; this page takes up to {MAX_CHARACTERS}.")
        if policy not in THRESHOLDS:
            raise ValueError(f"The policy must be one of {', '.join(THRESHOLDS)}.")
        knobs = Knobs(
            policy,
            _number("threshold", threshold, 0, 1),
            int(_number("number of drafted tokens", num_tokens, 1, 64)),
            int(_number("length of the answer", max_new_tokens, 1, MAX_NEW_TOKENS)),
            _number("temperature", temperature, 0, 2),
            int(_number("seed", seed, 0, 2**31)),
        )
        name = self.chosen(choice, target, draft)
        if not self.pairs.is_warm(name):
            yield "Loading the models and measuring this machine; about half a minute, once."
        pair = self.load(name)
        longest = encode(pair, prompts)["input_ids"].shape[1]
        room = getattr(pair.model.config.get_text_config(decoder=True), "max_position_embeddings", 1 << 20)
        most = min(MAX_PROMPT_TOKENS, room - knobs.max_new_tokens)
        if longest > most:
            raise ValueError(f"The prompt has {longest} tokens; with these settings up to {most} are possible.")
        yield pair, Knobs(**{**vars(knobs), "num_tokens": min(knobs.num_tokens, pair.block)})

    # --------------------------------------------------------------------------------------------------------- runs

    def begin(self, tab: str, request: gr.Request) -> None:
        self.session(request).begin(tab)

    def is_running(self, tab: str, request: gr.Request) -> bool:
        """Whether a run of `tab` is going or waiting."""
        return tab in self.session(request).flags

    def stop(self, tab: str, request: gr.Request) -> None:
        self.session(request).stop(tab)

    def watched(
        self, tab: str, session: Session, flag: StopFlag, pair: Pair, prompts: list[str], knobs: Knobs, drafted=True
    ) -> Iterator[tuple[Transcript, Update]]:
        """A run's transcript so far with each update."""
        written = Transcript(pair.tokenizer, len(prompts))
        for update in self.run(pair.name, prompts, knobs, flag, drafted):
            written.add(update)
            if update.is_last:
                session.file(tab if drafted else f"{tab}, plain", pair, prompts, knobs, written, update)
            yield written, update

    @in_sentences
    def live(self, request: gr.Request, prompt: str, *settings):
        """The answer, the latest round, the figures."""
        session = self.session(request)
        flag = session.flags.get("live") or session.begin("live")
        try:
            yield render.answer([], running=True), render.round_panel(None), ""
            for ready in self.prepared([prompt], settings):
                if isinstance(ready, str):
                    yield render.note(ready), render.round_panel(None), ""
            for written, update in self.watched("live", session, flag, ready[0], [prompt], ready[1]):
                rounds = [record for record in written.records if record["type"] == "round"]
                prefill = update.stats.prefill_seconds if update.is_last and rounds else None
                end = render.note("Stopped.") if update.stopped else ""
                yield (
                    render.answer(written.rows[0], running=not update.is_last) + end,
                    render.round_panel(written.last_round()),
                    render.figures(len(written.rows[0]), update.seconds, rounds, update.drawing, prefill),
                )
        finally:
            session.end("live", flag)

    @in_sentences
    def race(self, request: gr.Request, prompt: str, *settings):
        """The verdict, the plain answer, DSpark's answer, the speeds."""
        session = self.session(request)
        flag = session.flags.get("race") or session.begin("race")
        try:
            yield "", "", "", render.race(None, None)
            for ready in self.prepared([prompt], settings):
                if isinstance(ready, str):
                    yield render.note(ready), "", "", ""
            pair, knobs = ready
            session.races += 1
            order = (False, True) if session.races % 2 else (True, False)
            shown, speeds, written = {False: "", True: ""}, {False: None, True: None}, {}
            for drafted in order:
                running = "DSpark" if drafted else "Plain generate()"
                for transcript, update in self.watched("race", session, flag, pair, [prompt], knobs, drafted):
                    tokens = transcript.rows[0]
                    shown[drafted] = render.answer(tokens, running=not update.is_last, marked=drafted)
                    speeds[drafted] = (len(tokens), update.seconds)
                    said = render.note(f"{running} is running; the two take turns so that neither slows the other.")
                    yield said, shown[False], shown[True], render.race(speeds[False], speeds[True])
                written[drafted] = transcript
                if update.stopped:
                    yield render.note("Stopped before both had finished."), *[gr.skip()] * 3
                    return
            verdict = self.verdict(pair, prompt, knobs, written, speeds)
            yield verdict, *[gr.skip()] * 3
        finally:
            session.end("race", flag)

    def verdict(self, pair: Pair, prompt: str, knobs: Knobs, written, speeds) -> str:
        """The speedup, and whether the outputs agree."""
        (plain_count, plain_seconds), (count, seconds) = speeds[False], speeds[True]
        speedup = (count / seconds) / (plain_count / plain_seconds)
        if knobs.temperature > 0:
            said = "Sampled answers come from the same distribution but differ in their draws; set temperature 0 for"
            return render.verdict(speedup, f"{said} a comparison token by token.", None)
        ids = {drafted: written[drafted].ids[0] for drafted in (False, True)}
        found = self.difference(pair.name, prompt, ids[False], ids[True])
        if found is None:
            return render.verdict(speedup, f"The outputs are identical, all {count} tokens.", True)
        if math.isnan(found.logit_gap):
            return render.verdict(speedup, f"One answer ends after {found.index} tokens, identical up to there.", False)
        left, right = (repr(written[True].label(token)) for token in (found.plain, found.dspark))
        said = (
            f"The outputs differ from token {found.index + 1} on: plain {left}, DSpark {right}. The target's logits "
            f"for the two are {found.logit_gap:+.4f} apart" + (", a near-tie." if abs(found.logit_gap) < 0.1 else ".")
        )
        return render.verdict(speedup, said, False)

    @in_sentences
    def load_run(self, request: gr.Request, rows: float, listed: str, *settings):
        """The rows of the batch, the figures, the charts."""
        session = self.session(request)
        flag = session.flags.get("load") or session.begin("load")
        try:
            yield "", "", gr.skip()
            prompts = batch(rows, listed)
            for ready in self.prepared(prompts, settings):
                if isinstance(ready, str):
                    yield render.note(ready), "", gr.skip()
            pair, knobs = ready
            yield gr.skip(), gr.skip(), self.charts(pair, session, len(prompts))
            for written, update in self.watched("load", session, flag, pair, prompts, knobs):
                rounds = [record for record in written.records if record["type"] == "round"]
                yield (
                    render.lanes(lane_rows(written, update.is_last), pair.block),
                    render.figures(sum(map(len, written.rows)), update.seconds, rounds, update.drawing),
                    gr.skip(),
                )
            if (point := load_point(len(prompts), update)) is not None:
                session.points.append(point)
            yield gr.skip(), gr.skip(), self.charts(pair, session, len(prompts))
        finally:
            session.end("load", flag)

    def moved(self, rows: float, choice: str, target: str, draft: str, request: gr.Request):
        """The charts with the slider's load marked, where the pair is at hand."""
        try:
            name = self.chosen(choice, target, draft)
        except PairError:
            return gr.skip()
        if not self.pairs.is_warm(name):
            return gr.skip()
        return self.charts(self.pairs.get(name), self.session(request), int(rows))

    def charts(self, pair: Pair, session: Session, load: int) -> str:
        """Verify length and speed against load, forecast from measured costs, with the visitor's own runs."""
        if session.pair != pair.name:
            session = Session()  # what was seen of another pair says nothing here
        survival = session.survival() or pair.survival
        measured = self.pairs.costs.get(pair.name)
        if measured is None:
            measured = self.pairs.costs[pair.name] = self.costs(pair.name) or {}
        if not measured or not survival:
            return render.note("This pair has no confidences or is verified step by step, so there is no forecast.")
        return render.load_charts(forecast(measured, survival, MAX_ROWS), session.points, load)

    # ------------------------------------------------------------------------------------------------------ history

    def history(self, request: gr.Request):
        """The session in charts, and its file."""
        session = self.session(request)
        path = session.save()
        charts = render.history(
            session.stats.acceptance_by_position, session.accepted_histogram(), *session.reliability()
        )
        return charts, gr.update(value=path, interactive=path is not None)

    def forget(self, request: gr.Request) -> None:
        self.sessions.forget(request.session_hash or "")


def batch(rows: float, listed: str) -> list[str]:
    """The prompts of a batch: the listed ones in turn, so that a single one is copied."""
    prompts = [line.strip() for line in listed.splitlines() if line.strip()]
    if not prompts:
        raise ValueError("Please write at least one prompt, one a line.")
    count = int(_number("load", rows, 1, MAX_ROWS))
    return [prompts[row % len(prompts)] for row in range(count)]


def lane_rows(written: Transcript, is_over: bool) -> list[dict]:
    """What `render.lanes` draws of each row."""
    running = next((r["rows"] for r in reversed(written.records) if r["type"] == "round"), [])
    rows = []
    for row, tokens in enumerate(written.rows):
        last = written.last_round(row) or {"verified": 0, "accepted": 0}
        rows.append(
            {
                "verified": last["verified"],
                "accepted": last["accepted"],
                "tokens": len(tokens),
                "text": "".join(token.text for token in tokens[-12:]),
                "is_done": is_over or (bool(running) and row not in running),
            }
        )
    return rows


def load_point(rows: int, last: Update) -> LoadPoint | None:
    """A finished batch as a point of the charts; None for one that was stopped or had no rounds."""
    stats = last.stats
    seconds = stats.seconds - stats.prefill_seconds
    if last.stopped or not stats.rounds or seconds <= 0:
        return None
    checked = sum(len(lengths) for lengths in stats.verify_lengths)
    return LoadPoint(rows, stats.verified / checked, stats.new_tokens / seconds)


def _number(name: str, value, low: float, high: float) -> float:
    """A number from the page, which may send anything."""
    if not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"The {name} must be a number from {low:g} to {high:g}.")
    return value
