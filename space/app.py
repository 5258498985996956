"""The page: DSpark's drafting, trust and acceptance, live (`make space`, or this folder as a Hugging Face Space).

Four tabs (live run, race, load, history) over one set of settings. This file only lays them out and starts the server;
`handlers.py` does the work. The page loads nothing from anywhere else: no fonts, no analytics.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from pathlib import Path

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before the import, which reports it

import gradio as gr  # noqa: E402
import render  # noqa: E402
import texts  # noqa: E402
from handlers import MAX_NEW_TOKENS, MAX_ROWS, OTHER_PAIR, Page  # noqa: E402
from pairs import PairError, Pairs, default_pair, hosted  # noqa: E402
from runs import THRESHOLDS  # noqa: E402

HERE = Path(__file__).resolve().parent
QUEUE = 20  # visitors who may wait
_GLANCE = 0.05  # seconds between two looks at the queue
_RUNS = {"concurrency_id": "models", "concurrency_limit": 1, "api_visibility": "private"}
_QUICK = {"queue": False, "api_visibility": "private", "show_progress": "hidden"}


def build(pairs: Pairs) -> gr.Blocks:
    """The page over these models; none is loaded yet."""
    page = Page(pairs)
    with gr.Blocks(title="DSpark, live", analytics_enabled=False, delete_cache=(3600, 3600)) as blocks:
        gr.HTML(texts.HEADER)
        with gr.Accordion("What is this? One minute", open=False):
            gr.HTML(texts.EXPLANATION + render.legend())
        settings = _settings(pairs)
        with gr.Tab("Live run", id="live"):
            live = _live(page, settings)
        with gr.Tab("Race", id="race"):
            race = _race(page, settings)
        with gr.Tab("Load", id="load"):
            load = _load(page, settings)
        with gr.Tab("History", id="history") as history:
            charts = gr.HTML(render.note("Nothing has run yet."), elem_id="history")
            download = gr.DownloadButton("Download the runs (JSON lines)", interactive=False, elem_id="download")
            for listen in (history.select, live.then, race.then, load.then):
                listen(page.history, None, [charts, download], **_QUICK)
        gr.HTML(texts.footer(QUEUE, MAX_NEW_TOKENS, MAX_ROWS))
        blocks.unload(page.forget)
    blocks.queue(max_size=QUEUE, default_concurrency_limit=4)
    # Gradio looks at its queues every millisecond, which takes more of a small machine than drawing does
    blocks._queue.sleep_when_free = blocks._queue.progress_update_sleep_when_free = _GLANCE
    blocks.page = page
    return blocks


def _settings(pairs: Pairs) -> list[gr.components.Component]:
    """The settings that all tabs share, in the order that the handlers take them."""
    with gr.Accordion("Settings", open=False, elem_id="settings"):
        with gr.Row():
            policy = gr.Radio(list(THRESHOLDS), value="throughput", label="Policy", info=texts.POLICY, elem_id="policy")
            threshold = gr.Slider(0, 1, 0.0, step=0.05, label="Threshold", info=texts.THRESHOLD, elem_id="threshold")
        # the threshold starts where each policy shows what it does; in the browser, so that it is there at once
        policy.input(None, policy, threshold, js=f"policy => ({json.dumps(THRESHOLDS)})[policy]", **_QUICK)
        with gr.Row():
            num_tokens = gr.Slider(1, 16, 7, step=1, label="Drafted tokens a round", info=texts.DRAFTED)
            length = gr.Slider(8, MAX_NEW_TOKENS, 128, step=8, label="Length of the answer, tokens", elem_id="length")
            temperature = gr.Slider(0, 1.5, 0.0, step=0.1, label="Temperature", info="0: greedy")
            seed = gr.Number(0, precision=0, label="Seed", info="for temperatures above 0")
        names = [str(name) for name in pairs.allowed]
        choices = names if hosted() else [*names, OTHER_PAIR]
        choice = gr.Dropdown(choices, value=names[0], label="Target and draft", info=texts.PAIR, elem_id="pair")
        with gr.Row(visible=False) as other:
            target = gr.Textbox(pairs.default.target, label="Target", info="owner/name or a folder", elem_id="target")
            draft = gr.Textbox(pairs.default.draft, label="Draft", info="owner/name or a folder", elem_id="draft")
        choice.change(lambda name: gr.Row(visible=name == OTHER_PAIR), choice, other, **_QUICK)
    return [choice, target, draft, policy, threshold, num_tokens, length, temperature, seed]


def _buttons(tab: str) -> tuple[gr.Button, gr.Button]:
    with gr.Row():
        run = gr.Button("Run", variant="primary", min_width=120, elem_id=f"{tab}-run")
        stop = gr.Button("Stop", variant="stop", min_width=120, interactive=False, elem_id=f"{tab}-stop")
    return run, stop


def _connect(page: Page, tab: str, triggers, run: gr.Button, stop: gr.Button, handler, inputs, outputs):
    """
    A press of Run takes a stop flag at once, even while it waits in the queue; then the run; then the buttons.

    Returns the last of these events.
    """

    def begin(request: gr.Request):
        page.begin(tab, request)
        return *buttons(request), render.note(texts.WAITING)

    def buttons(request: gr.Request):
        is_running = page.is_running(tab, request)  # also when the next run waits already
        label = "Running …" if is_running else "Run"
        return gr.Button(label, interactive=not is_running), gr.Button(interactive=is_running)

    began = gr.on(triggers, begin, None, [run, stop, outputs[0]], **_QUICK)
    ran = began.then(handler, inputs, outputs, show_progress="minimal", show_progress_on=[outputs[0]], **_RUNS)
    ended = ran.then(buttons, None, [run, stop], **_QUICK)

    def ask_to_stop(request: gr.Request):
        page.stop(tab, request)
        return gr.Button(interactive=False)

    stop.click(ask_to_stop, None, stop, **_QUICK)
    return ended


def _prompt(tab: str, example: int) -> gr.Textbox:
    prompt = gr.Textbox(texts.EXAMPLES[example], label="Prompt", lines=2, max_lines=6, elem_id=f"{tab}-prompt")
    with gr.Row(elem_classes="ds-examples"):
        for text in texts.EXAMPLES:
            button = gr.Button(text, size="sm", min_width=120)
            button.click(lambda text=text: text, None, prompt, **_QUICK)
    return prompt


def _live(page: Page, settings):
    prompt = _prompt("live", 0)
    run, stop = _buttons("live")
    answer = gr.HTML(render.note("Press Run."), elem_id="live-answer", min_height=110)
    gr.HTML(render.legend(compact=True))
    latest = gr.HTML(render.round_panel(None), elem_id="live-round")
    figures = gr.HTML(elem_id="live-figures", min_height=60)
    inputs = [prompt, *settings]
    return _connect(page, "live", [run.click, prompt.submit], run, stop, page.live, inputs, [answer, latest, figures])


def _race(page: Page, settings):
    prompt = _prompt("race", 1)
    run, stop = _buttons("race")
    verdict = gr.HTML(render.note(texts.RACE), elem_id="race-verdict")
    speeds = gr.HTML(elem_id="race-speeds", min_height=40)
    with gr.Row():
        with gr.Column(min_width=280):
            gr.HTML("<h4>Plain generate()</h4>")
            plain = gr.HTML(elem_id="race-plain")
        with gr.Column(min_width=280):
            gr.HTML("<h4>DSpark</h4>")
            dspark = gr.HTML(elem_id="race-dspark")
    outputs = [verdict, plain, dspark, speeds]
    return _connect(page, "race", [run.click, prompt.submit], run, stop, page.race, [prompt, *settings], outputs)


def _load(page: Page, settings):
    gr.HTML(render.note(texts.LOAD))
    load = gr.Slider(1, MAX_ROWS, 4, step=1, label="Load: rows at once", info=texts.SLIDER, elem_id="load-rows-slider")
    listed = gr.Textbox(
        "\n".join(texts.LOAD_EXAMPLES), label="Prompts, one a line", info=texts.LISTED, lines=4, elem_id="load-prompts"
    )
    run, stop = _buttons("load")
    rows = gr.HTML(elem_id="load-rows")
    figures = gr.HTML(elem_id="load-figures", min_height=60)
    charts = gr.HTML(elem_id="load-charts")
    inputs, outputs = [load, listed, *settings], [rows, figures, charts]
    load.change(page.moved, [load, *settings[:3]], charts, trigger_mode="always_last", **_QUICK)
    return _connect(page, "load", [run.click, load.release], run, stop, page.load_run, inputs, outputs)


def look() -> dict:
    """Arguments of `launch` that make the page's looks: system fonts, our style sheet, nothing but the page."""
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    return {
        "theme": gr.themes.Default(**fonts),
        "css_paths": HERE / "style.css",
        "ssr_mode": False,
        "footer_links": [],
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="DSpark's acceptance, live, in the browser.")
    parser.add_argument("--target", metavar="REPO|FOLDER", help="default: SmolLM2-135M-Instruct, fetched once")
    parser.add_argument("--draft", metavar="REPO|FOLDER", help="its DSpark draft; default: the one in checkpoints/")
    parser.add_argument("--port", type=int, help="default: 7860, or the next free one")
    args = parser.parse_args(argv)
    try:
        pairs = Pairs(default_pair(args.target, args.draft))
    except PairError as error:
        sys.exit(str(error))
    blocks = build(pairs)
    # the models load while the page already shows; whoever runs first waits for them
    threading.Thread(target=blocks.page.load_default, daemon=True).start()
    blocks.launch(server_port=args.port, **look())


if __name__ == "__main__":
    main()
