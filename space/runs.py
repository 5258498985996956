"""One generation as a stream of small updates that a page can draw while it runs.

`generate()` runs in a thread of its own and tells a recorder of every token and, with a draft, of every round. `stream`
hands over what has gathered, at most eight times a second and never so often that drawing takes more than a small share
of the time. Updates and stop flags are plain data: on ZeroGPU all of this runs in another process than the page.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pairs import Pair
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from dspark_hf import GenerationStats, RoundEvent, record_generation, throughput_profile
from dspark_hf.demo import Difference, first_difference

# The policies of a run, with a threshold to start from.
THRESHOLDS = {"throughput": 0.0, "confidence": 0.5, "survival": 0.3, "constant": 0.0}
LEAST_INTERVAL = 0.125  # seconds between two updates
DRAWING_SHARE = 0.03  # of the run's time, at most, spent on whoever reads the updates
MAX_SECONDS = 120.0  # a run ends after this, whatever else happens


@dataclass(frozen=True)
class Knobs:
    """
    What a visitor may set.

    Attributes:
        policy (`str`): One of `THRESHOLDS`.
        threshold (`float`): Confidence or survival below which a block is cut; 0 cuts nothing.
        num_tokens (`int`): Most tokens drafted a round.
        max_new_tokens (`int`): Length of the answer.
        temperature (`float`): 0 is greedy.
        seed (`int`): For sampling.
    """

    policy: str = "throughput"
    threshold: float = 0.0
    num_tokens: int = 7
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0


@dataclass
class Update:
    """
    What has happened since the last update.

    Attributes:
        tokens (`list[list[int]]`): Tokens that no round explains, one list of row tokens per step: the first token, and
            all tokens without a draft.
        rounds (`list[RoundEvent]`): Finished rounds.
        seconds (`float`): Since the generation began.
        drawing (`float`): Share of the time so far that went to the reader of the updates.
        stats (`GenerationStats`, *optional*): In the last update of a run with a draft.
        stopped (`bool`): Whether the run was ended early, in the last update.
    """

    tokens: list[list[int]] = field(default_factory=list)
    rounds: list[RoundEvent] = field(default_factory=list)
    seconds: float = 0.0
    drawing: float = 0.0
    stats: GenerationStats | None = None
    stopped: bool = False

    @property
    def is_last(self) -> bool:
        return self.stats is not None


class StopFlag:
    """A flag that every process of this machine sees: it is set when its file is there."""

    folder: tempfile.TemporaryDirectory | None = None  # goes with this process

    def __init__(self):
        if StopFlag.folder is None:
            StopFlag.folder = tempfile.TemporaryDirectory(prefix="dspark-stop-")
        self.path = os.path.join(StopFlag.folder.name, uuid.uuid4().hex)

    def set(self) -> None:
        Path(self.path).touch()

    def is_set(self) -> bool:
        return os.path.exists(self.path)

    def clear(self) -> None:
        Path(self.path).unlink(missing_ok=True)


class StopWhenAsked(StoppingCriteria):
    """Ends all rows when the flag is set or the time is up."""

    def __init__(self, flag: StopFlag, seconds: float = MAX_SECONDS):
        self.flag, self.deadline, self.has_stopped = flag, time.monotonic() + seconds, False

    def __call__(self, input_ids, scores, **kwargs) -> torch.BoolTensor:
        self.has_stopped = self.has_stopped or self.flag.is_set() or time.monotonic() > self.deadline
        return torch.full((input_ids.shape[0],), self.has_stopped, device=input_ids.device, dtype=torch.bool)


class Recorder(BaseStreamer):
    """
    Gathers what a running `generate()` says until somebody takes it.

    Args:
        has_rounds (`bool`): Whether rounds will be reported. They hold every token but the first.
    """

    def __init__(self, has_rounds: bool):
        self.has_rounds, self.steps = has_rounds, 0
        self.changed = threading.Condition()
        self.tokens: list[list[int]] = []
        self.rounds: list[RoundEvent] = []
        self.outcome: Update | Exception | None = None
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the generation began."""
        return time.monotonic() - self.began

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then a token of every row a step; a block of one row where the target is verified stepwise."""
        self.steps += 1
        if self.steps == 1 or (self.has_rounds and self.steps > 2):
            return
        with self.changed:
            self.tokens.extend([[token] for token in value[0].tolist()] if value.dim() == 2 else [value.tolist()])
            self.changed.notify()

    def on_round(self, event: RoundEvent) -> None:
        with self.changed:
            self.rounds.append(event)
            self.changed.notify()

    def end(self) -> None:
        pass

    def close(self, outcome: Update | Exception) -> None:
        """Ends the record with the last update, or with the error that ended the run."""
        with self.changed:
            self.outcome = outcome
            self.changed.notify()

    def take(self, not_before: float) -> Update:
        """Waits for news, and unless the run ends until the monotonic time `not_before`; raises the run's error."""
        with self.changed:
            self.changed.wait_for(lambda: self.outcome or self.tokens or self.rounds)
            self.changed.wait_for(lambda: self.outcome, timeout=max(0.0, not_before - time.monotonic()))
            if isinstance(self.outcome, Exception):
                raise self.outcome
            update = self.outcome or Update(seconds=self.seconds)
            update.tokens, update.rounds = self.tokens, self.rounds
            self.tokens, self.rounds = [], []
            return update


def stream(pair: Pair, prompts: list[str], knobs: Knobs, flag: StopFlag, drafted: bool = True) -> Iterator[Update]:
    """
    Generates answers to `prompts` as one batch.

    Args:
        pair (`Pair`): Its lock is held until the generation has ended.
        prompts (`list[str]`): One row each.
        knobs (`Knobs`): The visitor's settings.
        flag (`StopFlag`): Ends the run when set; set here when the reader goes away.
        drafted (`bool`): False for plain `generate()`.

    Yields:
        [`Update`]; the last one has `stats`.
    """
    recorder = Recorder(has_rounds=drafted and pair.has_rounds)
    run = threading.Thread(target=_generate, args=(pair, prompts, knobs, flag, drafted, recorder))
    run.start()
    try:
        not_before, reading = 0.0, 0.0
        while not (update := recorder.take(not_before)).is_last:
            update.drawing = reading / update.seconds
            sent = time.monotonic()
            yield update
            took = time.monotonic() - sent
            reading += took
            not_before = time.monotonic() + max(LEAST_INTERVAL, took / DRAWING_SHARE)
        update.drawing = reading / update.seconds
        yield update
    finally:
        if recorder.outcome is None:  # the reader has gone
            flag.set()
        run.join()


def _generate(pair: Pair, prompts, knobs: Knobs, flag: StopFlag, drafted: bool, recorder: Recorder) -> None:
    """The thread's work."""
    try:
        with pair.lock, _policy(pair.draft, knobs), record_generation() as stats:
            stop = StopWhenAsked(flag)
            inputs = encode(pair, prompts)
            torch.manual_seed(knobs.seed)
            recorder.began = time.monotonic()
            pair.model.generate(
                **inputs,
                **({"assistant_model": pair.draft} if drafted else {}),
                **({"temperature": knobs.temperature, "top_k": 0} if knobs.temperature > 0 else {}),
                do_sample=knobs.temperature > 0,
                max_new_tokens=knobs.max_new_tokens,
                stopping_criteria=StoppingCriteriaList([stop]),
                pad_token_id=pair.tokenizer.pad_token_id,
                streamer=recorder,
            )
            recorder.close(Update(seconds=recorder.seconds, stats=stats, stopped=stop.has_stopped))
    except Exception as error:  # whatever it is, it belongs to the one who waits for the answer
        recorder.close(error)


class _policy:
    """Sets the knobs on the draft for one run: given to `generate()`, some values look like its own defaults."""

    def __init__(self, draft, knobs: Knobs):
        self.config = draft.generation_config
        self.wanted = {
            "num_assistant_tokens": knobs.num_tokens,
            "num_assistant_tokens_schedule": knobs.policy,
            "assistant_confidence_threshold": knobs.threshold,
        }
        if not draft.config.enable_confidence_head:
            self.wanted["num_assistant_tokens_schedule"] = "constant"

    def __enter__(self):
        self.before = {name: getattr(self.config, name) for name in self.wanted}
        for name, value in self.wanted.items():
            setattr(self.config, name, value)

    def __exit__(self, *exception):
        for name, value in self.before.items():
            setattr(self.config, name, value)


def encode(pair: Pair, prompts: list[str]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of the prompts, each a user's message where there is a chat template."""
    tokenizer = pair.tokenizer
    if tokenizer.chat_template:
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        prompts = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        batch = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    else:
        batch = tokenizer(prompts, padding=True, return_tensors="pt")
    return {name: batch[name].to(pair.model.device) for name in ("input_ids", "attention_mask")}


def warm_up(pair: Pair, rows: int) -> tuple[bool, list[list[float]]]:
    """
    A short run, so that nobody's first one pays for set-up: targets are checked and costs measured at first use.

    Args:
        rows (`int`): Most rows of a batch that the page will run.

    Returns:
        `tuple[bool, list[list[float]]]`: `has_rounds` and `survival` of the pair, which are set here too.
    """
    knobs = Knobs(policy="constant", num_tokens=pair.block, max_new_tokens=24)
    for update in stream(pair, ["Tell me about the sea."], knobs, StopFlag()):
        for event in update.rounds:
            pair.survival.extend(event.survival or [])
    pair.has_rounds = update.stats.path in ("packed", "rectangular")
    costs(pair, rows)
    return pair.has_rounds, pair.survival


def costs(pair: Pair, rows: int) -> dict[str, list[float]] | None:
    """
    Seconds by load from the measured profile, as plain data; None where the pair has none.

    Returns:
        `dict`: "draft", "plain" by rows 0..`rows`, and "verify", a table by rows of tables by tokens.
    """
    if not (pair.has_rounds and pair.draft.config.enable_confidence_head):
        return None
    with pair.lock:
        profile = throughput_profile(pair.model, pair.draft, rows=rows)
    counts = range(1, rows + 1)
    return {
        "draft": [0.0, *(profile.draft_seconds(count) for count in counts)],
        "plain": [0.0, *(profile.plain_seconds(count, 256) for count in counts)],
        "verify": [[], *(profile.cost_table(count * (1 + pair.block), count, 256).tolist() for count in counts)],
    }


def difference(pair: Pair, prompt: str, plain: list[int], dspark: list[int]) -> Difference | None:
    """Where two answers to `prompt` part, and how close the target's call was there."""
    with pair.lock:
        return first_difference(pair.model, encode(pair, [prompt])["input_ids"], plain, dspark)
