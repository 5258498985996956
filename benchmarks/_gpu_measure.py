"""What `gpu.py` times on a pair: rounds of `generate()`, the bare forwards inside them, syncs, the scheduler.

A GPU runs behind the host, so the clock of a piece of host code says little there. Every figure here is therefore
either the time between two points at which the host waits for the device anyway (a round: the loop reads its tokens
once per round), or that of a call repeated between two explicit waits.

*Bare forwards* are what a round cannot do without: the draft's backbone over its block, the same with the sequential
head, the target over the tokens to verify, packed as the decoding loop packs them, and for comparison the target over
one token a row on Transformers' `StaticCache`. All inputs are made beforehand, so that each can also be captured as a
CUDA graph, which takes the host out: what is left is the device's own time.
"""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _gpu_pair import ForcedDraft, check_predictable
from transformers import PreTrainedModel, StaticCache

from dspark_hf import DSparkDraftModel, record_generation
from dspark_hf._compat import CACHE_KEY
from dspark_hf.benchmarking.machine import peak_memory, reset_peak_memory, timed
from dspark_hf.generation.capability import verification_path
from dspark_hf.generation.capture import decoder_layers
from dspark_hf.generation.masks import current_step, swapped_attention, verifying
from dspark_hf.generation.policy import ThroughputPolicy
from dspark_hf.generation.ragged_cache import RaggedCache, new_dynamic_cache
from dspark_hf.generation.settings import Settings
from dspark_hf.generation.verifier import PACKED, Verifier
from dspark_hf.stats import GenerationStats
from dspark_hf.throughput import DraftPoint, ThroughputProfile, VerifyPoint

_INNER = 4  # calls between two waits
_SYNC_WARNING = "called a synchronizing CUDA operation"
_SCHEDULED_ROUNDS = 64


@dataclass
class Call:
    """A bare forward: `prepare` puts its cache back and is not timed, `run` is."""

    run: Callable[[], Any]
    prepare: Callable[[], Any] = lambda: None


class PairBench:
    """Measurements of one pair.

    Args:
        target (`PreTrainedModel`): from `build_pair`.
        draft (`ForcedDraft`): from `build_pair`.
        profile (`list[float]`): forced acceptance of each slot, given that those before it were accepted.
        context (`int`): prompt tokens per row.
        new_tokens (`int`): tokens per row of a `generate()` call.
        samples (`int`): timed repetitions; medians count.
        seed (`int`): of prompts and forced acceptance.
    """

    def __init__(self, target: PreTrainedModel, draft: ForcedDraft, profile: list[float], *, context: int,
                 new_tokens: int, samples: int, seed: int):  # fmt: skip
        self.target, self.draft, self.profile = target, draft, profile
        self.context, self.new_tokens, self.samples, self.seed = context, new_tokens, samples, seed
        self.device, self.slots = target.device, draft.config.num_draft_tokens

    # Rounds -------------------------------------------------------------------------------------------------------

    def rounds(self, rows: int) -> dict[str, Any]:
        """Plain and forced `generate()` in turns, and the parts of a round. Seconds, except where the name says."""
        reset_peak_memory(self.device)
        prompt = self._prompt(rows)
        self.draft.force(self.profile, rows, self.seed)
        check_predictable(self.target, prompt, self._generate(prompt, 4))
        check_predictable(self.target, prompt, self._generate(prompt, 2 * self.slots, draft=True))
        whole, first, forced, gaps = [], [], [], []
        stats = GenerationStats()
        for _ in range(self.samples):
            whole.append(timed(lambda: self._generate(prompt, self.new_tokens), self.device)[1])
            first.append(timed(lambda: self._generate(prompt, 1), self.device)[1])
            start = len(self.draft.marks)
            with record_generation() as run:
                answer, seconds = timed(lambda: self._generate(prompt, self.new_tokens, draft=True), self.device)
            forced.append((seconds, seconds - run.prefill_seconds))
            gaps += round_gaps(self.draft.marks[start:], rows)
            stats.add(run)
        check_predictable(self.target, prompt, answer)
        if not gaps:
            raise ValueError("--new-tokens: too few for two rounds of all rows")
        plain_decode = [total - prefill for total, prefill in zip(whole, first)]
        parts = self.bare(rows)
        step, wall = median(plain_decode) / (self.new_tokens - 1), median(gaps)
        draft, head, verify = parts["backbone"], parts["block"] - parts["backbone"], parts["verify"]
        return {
            "round": wall,
            "draft": draft,
            "head": head,
            "verify": verify,
            "rest": wall - draft - head - verify,
            "head_percent": 100 * head / wall,
            "plain_step": step,
            "bare_plain_step": parts["plain_step"],
            "rounds_timed": len(gaps),
            "forced_tau": stats.tau,
            "forced_acceptance": conditional_acceptance(stats, self.slots),
            "forced_speed": median(whole) / median(total for total, _ in forced),
            "forced_decode_speed": median(plain_decode) / median(decode for _, decode in forced),
            "plain_tokens_per_second": rows * self.new_tokens / median(whole),
            "peak_memory_mib": peak_memory(self.device),
        }

    def _prompt(self, rows: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        vocabulary = self.draft.config.mask_token_id  # ordinary tokens lie below it
        return torch.randint(vocabulary, (rows, self.context), generator=generator).to(self.device)

    def _generate(self, prompt: torch.Tensor, new_tokens: int, *, draft: bool = False) -> torch.Tensor:
        assistant = {"assistant_model": self.draft} if draft else {}
        mask = torch.ones_like(prompt)
        return self.target.generate(
            prompt, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0, **assistant
        )

    # Bare forwards ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def bare(self, rows: int) -> dict[str, float]:
        """Seconds of each bare forward, launched one by one."""
        calls = self._calls(rows)
        for call in calls.values():
            seconds_of(call, self.device)
        times = [[seconds_of(call, self.device) for call in calls.values()] for _ in range(self.samples)]
        return {name: median(column) for name, column in zip(calls, zip(*times))}

    @torch.no_grad()
    def graphs(self, rows: int) -> dict[str, Any]:
        """Seconds of each bare forward replayed as a CUDA graph, or the reason why it cannot be one."""
        return self._transformed(rows, lambda run: captured(run, self.device))

    @torch.no_grad()
    def compiled(self, rows: int, backend: str, has_time: Callable[[], bool]) -> dict[str, Any]:
        """Seconds of each bare forward under `torch.compile`, or the reason why it was not compiled.

        Args:
            rows (`int`): R.
            backend (`str`): of the compiler.
            has_time (callable): asked before each compilation.
        """

        def compile_one(run: Callable[[], Any]) -> Callable[[], Any]:
            if not has_time():
                raise TimeoutError("no time left in the budget")
            mode = {"mode": "reduce-overhead"} if backend == "inductor" and self.device.type == "cuda" else {}
            return torch.compile(run, backend=backend, dynamic=False, **mode)

        try:
            return self._transformed(rows, compile_one)
        finally:
            torch._dynamo.reset()

    def _transformed(self, rows: int, transform: Callable[[Callable], Callable]) -> dict[str, Any]:
        result: dict[str, Any] = {"reasons": {}}
        for name, call in self._calls(rows).items():
            began = time.perf_counter()
            try:
                call.prepare()
                faster = Call(transform(call.run), call.prepare)
                seconds_of(faster, self.device)  # compiles, and what comes with the first calls
                ready = time.perf_counter() - began
                result[name] = median(seconds_of(faster, self.device) for _ in range(self.samples))
                result[f"{name}_preparation"] = ready
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever forbids it, the reason is the result
                result[name], result["reasons"][name] = None, reason_of(error)
        return result

    def _calls(self, rows: int) -> dict[str, Call]:
        """The bare forwards for `rows` rows, on caches that hold one token and zeros: only shapes count."""
        tokens = self._prompt(rows)[:, : 1 + self.slots].contiguous()
        return {
            "plain_step": self._plain_step(tokens[:, :1]),
            "verify": self._verification(tokens),
            **self._drafting(tokens[:, 0]),
        }

    def _plain_step(self, tokens: torch.Tensor) -> Call:
        cache = StaticCache(config=self.target.config, max_cache_len=self.context + 2 * _INNER)
        positions = torch.full_like(tokens, self.context)
        inputs = {"input_ids": tokens, "position_ids": positions, "use_cache": True, CACHE_KEY: cache}
        self.target(**inputs | {"position_ids": torch.zeros_like(tokens)})  # allocates

        def prepare() -> None:
            for layer in cache.layers:
                layer.cumulative_length.fill_(self.context)

        return Call(lambda: self.target(**inputs).logits, prepare)

    def _verification(self, tokens: torch.Tensor) -> Call:
        """The target's forward over the whole block of every row, with the inputs that the loop's verifier makes."""
        path, reason = verification_path(self.target)
        if path != PACKED:
            raise RuntimeError(f"{type(self.target).__name__} is verified on the path {path!r}: {reason}")
        rows, width = tokens.shape
        source, layers = new_dynamic_cache(self.target.config), decoder_layers(self.target)
        first = tokens[:, :1]  # allocates
        self.target(input_ids=first, position_ids=torch.zeros_like(first), use_cache=True, **{CACHE_KEY: source})
        cache = RaggedCache(source, [1] * rows, self.context + width)
        cache.lengths = [self.context] * rows
        verifier = Verifier(self.target, layers, cache, path, None)
        recorder = verifier.model = _Recorder(self.target)
        verifier(tokens, [width] * rows, torch.full((rows,), self.context, device=self.device), None)

        def run() -> torch.Tensor:
            with swapped_attention(verifier.configs), verifying(recorder.step):
                return self.target(**recorder.inputs).logits

        return Call(run)

    def _drafting(self, anchors: torch.Tensor) -> dict[str, Call]:
        draft, rows, block = self.draft, anchors.shape[0], self.draft.config.block_size
        shared, end = draft.shared_weights(self.target), self.context + block
        # as in the loop: only there, where drafting ahead is off, is a row's length known exactly
        cache = draft.new_cache(rows, slots=end, uniform=rows == 1 and self.device.type == "cpu")
        cache.lengths = torch.full_like(cache.lengths, self.context)
        positions = torch.arange(self.context, end, device=self.device).expand(rows, -1)
        slots = anchors[:, None].expand(-1, block).contiguous()
        common = {"cache": cache, "shared": shared, "kv_length": end}
        # ForcedDraft's own method would count these drafts as rounds
        block_of = DSparkDraftModel.draft_block
        return {
            "backbone": Call(lambda: draft(slots, None, positions, **common).base_logits),
            "block": Call(lambda: block_of(draft, None, anchors, positions, **common).tokens),
        }

    # Host ---------------------------------------------------------------------------------------------------------

    def syncs(self, rows: int) -> dict[str, Any]:
        """Waits of the host for the device, per round and per plain step; `None` where there is nothing to wait for."""
        if self.device.type != "cuda":
            return {"per_round": None, "per_plain_step": None, "places": None}
        return self.count_syncs(rows)

    def count_syncs(self, rows: int) -> dict[str, Any]:
        """The same, on any device that warns of waits."""
        prompt, short, long = self._prompt(rows), 2 * self.slots, 6 * self.slots
        self.draft.force(self.profile, rows, self.seed)
        found: dict[bool, tuple[Counter, int]] = {}
        for draft in (False, True):
            counts = []
            for new_tokens in (short, long):
                with record_generation() as stats, synchronizing_places() as places:
                    self._generate(prompt, new_tokens, draft=draft)
                counts.append((places, stats.rounds if draft else new_tokens))
            # What both calls do once falls out: the prompt, what is prepared, what is handed back.
            (less, fewer), (more, further) = counts
            more.subtract(less)
            found[draft] = more, further - fewer
        (plain, steps), (ours, rounds) = found[False], found[True]
        return {
            "per_round": ours.total() / rounds,
            "per_plain_step": plain.total() / steps,
            "places": {place: count / rounds for place, count in ours.most_common() if count},
        }

    def scheduler(self, rows: int, measured: dict[str, Any]) -> dict[str, Any]:
        """What the schedule "throughput" adds to a round: the host's decisions, on the costs just measured.

        Args:
            rows (`int`): R.
            measured (`dict`): what [`rounds`] gave for as many rows.
        """
        points = [VerifyPoint(rows, rows, self.context, measured["plain_step"])]
        points.append(VerifyPoint(rows, rows * (1 + self.slots), self.context, measured["verify"]))
        profile = ThroughputProfile({}, points, [DraftPoint(rows, measured["draft"] + measured["head"])])
        policy = ThroughputPolicy(Settings(self.slots, 0.0, "throughput"), profile, self.slots, rows)
        draws, running, times, lengths = random.Random(self.seed), list(range(rows)), [], []
        for _ in range(_SCHEDULED_ROUNDS):
            confidence = [[min(1.0, share * draws.uniform(0.8, 1.2)) for share in self.profile] for _ in running]
            began = time.perf_counter()
            policy.wants_draft(running, self.context, 0)
            plan = policy.plan(running, confidence, self.slots, [self.new_tokens] * rows, self.context, 0)
            planned = time.perf_counter() - began
            accepted = [accepted_of(row, length, draws) for row, length in zip(confidence, plan.lengths)]
            began = time.perf_counter()
            policy.observe(running, plan, accepted, sum(accepted) + rows, True)
            times.append(planned + time.perf_counter() - began)
            lengths.append(sum(plan.lengths) / rows)
        seconds = median(times)
        return {
            "seconds": seconds,
            "percent": 100 * seconds / measured["round"],
            "mean_length": sum(lengths) / len(lengths),
        }


class _Recorder:
    """Stands in for a model and keeps what it was called with."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.config = model, model.config
        self.inputs: dict[str, Any] = {}
        self.step = None

    def __call__(self, **inputs):
        self.inputs, self.step = inputs, current_step()
        return self.model(**inputs)


def seconds_of(call: Call, device: torch.device) -> float:
    """Seconds of one run, as the mean of a few between two waits for the device."""

    def repeat() -> None:
        for _ in range(_INNER):
            call.run()

    call.prepare()
    return timed(repeat, device)[1] / _INNER


def captured(run: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    """`run` as a CUDA graph; calling the result replays it.

    Raises:
        RuntimeError: there is no CUDA device, or `run` does something that a graph cannot hold.
    """
    if device.type != "cuda":
        raise RuntimeError("CUDA graphs need a CUDA device")
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # libraries set themselves up outside the capture
        for _ in range(2):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def round_gaps(marks: list[tuple[float, int]], rows: int) -> list[float]:
    """Seconds between neighbouring drafts of `rows` rows each: a round from draft to draft."""
    return [later - sooner for (sooner, before), (later, now) in zip(marks, marks[1:]) if before == now == rows]


def conditional_acceptance(stats: GenerationStats, slots: int) -> list[float | None]:
    """Share of slot k accepted among the blocks accepted up to k and verified that far; `None` where there is none."""
    tried, kept = [0] * slots, [0] * slots
    for lengths, accepted in zip(stats.verify_lengths, stats.accepted_lengths):
        for length, count in zip(lengths, accepted):
            for slot in range(min(length, count + 1)):
                tried[slot] += 1
                kept[slot] += slot < count
    return [k / t if t else None for k, t in zip(kept, tried)]


def accepted_of(shares: list[float], length: int, draws: random.Random) -> int:
    """Slots accepted of the first `length`, each with its share given that those before it were."""
    for slot, share in enumerate(shares[:length]):
        if draws.random() >= share:
            return slot
    return length


@contextmanager
def synchronizing_places() -> Iterator[Counter]:
    """Counts the operations inside that make the host wait, by the Python line that called them (CUDA only)."""
    places: Counter = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if _SYNC_WARNING in str(warning.message):
            places[f"{'/'.join(Path(warning.filename).parts[-2:])}:{warning.lineno}"] += 1


def reason_of(error: BaseException) -> str:
    """An exception in one line of at most 200 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
