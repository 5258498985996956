"""What a round costs on this machine (DSpark, arXiv 2607.05147, section 3.2: the profiled SPS(B) of Algorithm 1).

The scheduler needs the seconds of a verification step as a function of the tokens in it, and the seconds of a draft.
Neither follows from the model alone: kernels, threads, dtype and attention implementation decide. So both are measured
here, in a couple of seconds, on the calls that the runtime really makes, and kept as a `ThroughputProfile`:

* verify seconds at a few (rows, tokens per row, context) points, drawn towards a plane in rows and tokens as far as
  noise may have moved them, made monotone in the tokens by isotonic regression, and read by linear interpolation in
  tokens per row, rows and context, which is exact for a cost that is affine in rows and tokens; beyond the points the
  last slope continues;
* draft seconds by rows and drafted tokens, treated alike.

A profile is a JSON file under the Hugging Face home, named by a fingerprint of everything that the numbers depend on.
Measuring takes callables, so nothing here knows a model.
"""

import json
import logging
import math
import os
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .cost_curves import Curve, at_rows, bracket, flattened
from .fingerprints import canonical, fingerprint, profile_path

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
# Tables are built for multiples of this context, so that a growing sequence does not rebuild them every round.
CONTEXT_STEP = 128


@dataclass(frozen=True)
class VerifyPoint:
    """Measured: `seconds` of a step with `tokens` tokens over `rows` rows, each with `context` cached positions."""

    rows: int
    tokens: int
    context: int
    seconds: float
    samples: int = 1


@dataclass(frozen=True)
class DraftPoint:
    """Measured: `seconds` of one draft of `tokens` tokens (0: a whole block, however long) for `rows` rows."""

    rows: int
    seconds: float
    samples: int = 1
    tokens: int = 0


@dataclass
class ThroughputProfile:
    """Cost table of one target and draft on one machine.

    Attributes:
        fields (`dict`): what the numbers depend on, see `fingerprint_fields`; their hash names the file.
        verify_points (`list[VerifyPoint]`), draft_points (`list[DraftPoint]`): the measurements.
        measured_seconds (`float`): time that measuring took.
    """

    fields: dict
    verify_points: list[VerifyPoint]
    draft_points: list[DraftPoint] = field(default_factory=list)
    measured_seconds: float = 0.0

    def __post_init__(self):
        if not self.verify_points:
            raise ValueError("a ThroughputProfile needs verify_points: measure at least the plain step.")
        for point in (*self.verify_points, *self.draft_points):
            if not (math.isfinite(point.seconds) and point.seconds > 0 and point.rows >= 1):
                raise ValueError(f"{point} is no measurement: seconds must be positive and finite, rows at least 1.")
        for point in self.verify_points:
            if point.tokens < point.rows or point.context < 0:
                raise ValueError(f"{point} is no measurement: every row verifies at least one token.")
        self._build()

    def _build(self) -> None:
        self._curves = {}
        for context in sorted({point.context for point in self.verify_points}):
            points = [point for point in self.verify_points if point.context == context]
            seconds = flattened([(1, point.rows, point.tokens) for point in points], *_measured(points))
            curves: dict[int, dict[int, float]] = {}
            for point, value in zip(points, seconds):
                curves.setdefault(point.rows, {})[point.tokens] = value
            self._curves[context] = {rows: Curve.fit(curve) for rows, curve in sorted(curves.items())}
        self._drafts = {}
        for tokens in sorted({point.tokens for point in self.draft_points}):
            points = [point for point in self.draft_points if point.tokens == tokens]
            seconds = flattened([(1, point.rows) for point in points], *_measured(points))
            self._drafts[tokens] = Curve.fit({point.rows: value for point, value in zip(points, seconds)})
        self._tables: dict[tuple[int, int], Tensor] = {}

    # ---------------------------------------------------------------------------------------------------- reading

    def verify_seconds(self, tokens: float, rows: int = 1, context: int = 0) -> float:
        """Seconds of a step with `tokens` tokens in all over `rows` rows at `context` cached positions."""
        contexts = list(self._curves)
        low, high, weight = bracket(contexts, context)
        cheap = at_rows(self._curves[low], tokens, rows)
        if low == high:
            return cheap
        dear = at_rows(self._curves[high], tokens, rows)
        # Beyond the longest context the slope goes on, but noise must not make long contexts cheap.
        return cheap + weight * (dear - cheap) if weight <= 1 else dear + (weight - 1) * max(0.0, dear - cheap)

    def draft_seconds(self, rows: int = 1, tokens: int = 0) -> float:
        """Seconds of one draft of `tokens` tokens (0: a whole block) for `rows` rows; 0 where none was measured."""
        if not self._drafts:
            return 0.0
        known = list(self._drafts)
        whole = self._drafts[known[-1]](rows)
        if len(known) == 1 or not 0 < tokens < known[-1]:
            return whole
        at = max(bisect_right(known, tokens) - 1, 0)
        many = self._drafts[known[at + 1]](rows)
        few = min(many, self._drafts[known[at]](rows))  # noise must not make fewer tokens dearer
        slope = (many - few) / (known[at + 1] - known[at])
        return max(0.0, few + slope * (tokens - known[at]))

    def plain_seconds(self, rows: int = 1, context: int = 0) -> float:
        """Seconds of one plain decoding step of `rows` rows."""
        return self.verify_seconds(rows, rows, context)

    def seconds(self, tokens: float, rows: int = 1, context: int = 0) -> float:
        """Seconds of a whole drafted round: the draft for `rows` rows and a step with `tokens` tokens."""
        return self.draft_seconds(rows) + self.verify_seconds(tokens, rows, context)

    def cost_table(self, max_tokens: int, rows: int = 1, context: int = 0) -> Tensor:
        """Verify seconds by number of tokens, for `dspark_hf.scheduling`.

        Args:
            max_tokens (`int`): last entry wanted, usually rows * (1 + K).
            rows (`int`): rows in the step, those of other calls included.
            context (`int`): longest cached context, read in steps of 128.

        Returns:
            `Tensor` [max_tokens + 1 or more], float64, never falling. Entry b is the cost of b tokens; entries below
            `rows` are extrapolated and not read. Tables are kept, so asking every round costs next to nothing.
        """
        key = (rows, round(context / CONTEXT_STEP))
        table = self._tables.get(key)
        if table is None or table.shape[0] <= max_tokens:
            at = key[1] * CONTEXT_STEP
            values = [self.verify_seconds(tokens, rows, at) for tokens in range(max_tokens + 1)]
            table = torch.tensor(values, dtype=torch.float64).cummax(0).values
            self._tables[key] = table
        return table

    def covers(self, rows: int, context: int = 0) -> bool:
        """Whether `rows` and `context` lie between measured ones, or close enough to trust the extrapolation.

        Where they do not, `measure(..., profile=self)` adds points, see `missing`.
        """
        return not self.missing(rows, context)

    def missing(self, rows: int, context: int = 0) -> list[int]:
        """Contexts at which `rows` rows must be measured before the table can be trusted at `context`.

        Close enough is: at most 1.5 times the rows and twice the context (plus 256) of the largest measured, and no
        fewer rows than half the smallest. The contexts around `context` are what the table is read from, so each of
        them needs the rows.
        """
        known = list(self._curves)
        if context > 2 * known[-1] + 256:
            return [context]
        around = sorted(set(bracket(known, context)[:2]))
        return [at for at in around if not (min(self._curves[at]) <= 2 * rows and rows <= 1.5 * max(self._curves[at]))]

    # -------------------------------------------------------------------------------------------------- measuring

    @classmethod
    def measure(
        cls,
        verify_fn: Callable[[int, int, int], object],
        draft_fn: Callable[..., object] | None = None,
        *,
        fields: dict | None = None,
        rows: Sequence[int] = (1,),
        tokens_per_row: Sequence[int] = (1, 2, 4, 8),
        draft_tokens: Sequence[int] = (),
        contexts: Sequence[int] = (256,),
        time_budget: float = 2.5,
        max_samples: int = 5,
        clock: Callable[[], float] = time.perf_counter,
        profile: "ThroughputProfile | None" = None,
    ) -> "ThroughputProfile":
        """Time the runtime's own calls.

        Every call must return only when the device has finished. The points are visited in rounds, the widest step
        right after the plain one, so that drift and a short budget hit all alike. The first sample of a point warms
        it up and is dropped once two more are there; of the rest the median counts.

        Args:
            verify_fn (`Callable`): `verify_fn(num_rows, tokens_per_row, context)` runs one verification step.
            draft_fn (`Callable`, *optional*): `draft_fn(num_rows)` runs one draft of a whole block, or
                `draft_fn(num_rows, num_tokens)` one of so many tokens where `draft_tokens` are given.
            fields (`dict`, *optional*): see `fingerprint_fields`.
            rows, tokens_per_row, contexts (`Sequence[int]`): the grid. The first of `rows` and `contexts` matter most.
            draft_tokens (`Sequence[int]`): lengths of drafts to time, the whole block first.
            time_budget (`float`): seconds. The plain step, the widest step and the draft of the first row count are
                timed once in any case; after that no call starts that would not fit.
            max_samples (`int`): most samples of a point.
            clock (`Callable`): seconds, for tests.
            profile (`ThroughputProfile`, *optional*): its points are kept where the grid does not replace them.

        Returns:
            `ThroughputProfile`: new, with `measured_seconds` set.
        """
        if not rows or not tokens_per_row or not contexts:
            raise ValueError("rows, tokens_per_row and contexts must each name at least one value.")
        if min(*rows, *tokens_per_row) < 1 or min(contexts) < 0:
            raise ValueError("rows and tokens_per_row must be at least 1, contexts at least 0.")
        calls = _plan(rows, tokens_per_row, contexts, verify_fn, draft_fn, draft_tokens)
        samples: dict[tuple, list[float]] = {key: [] for key in calls}
        needed = {("verify", rows[0], width, contexts[0]) for width in (min(tokens_per_row), max(tokens_per_row))}
        needed.add(("draft", rows[0], *draft_tokens[:1]))
        begin = clock()
        next(iter(calls.values()))()  # the first call of all pays for set-up that no later one repeats
        for sweep in range(max_samples + 1):
            started = 0
            for key, call in calls.items():
                # A point not visited yet costs what the dearest call so far did, for all anyone knows.
                guess = min(
                    samples[key], default=max((min(taken) for taken in samples.values() if taken), default=0.0)
                )
                forced = sweep == 0 and key in needed
                if not forced and clock() - begin + guess > time_budget:
                    continue
                before = clock()
                call()
                samples[key].append(max(clock() - before, 1e-9))
                started += 1
            if not started:
                break
        verify, draft = {}, {}
        if profile is not None:
            verify = {(point.rows, point.tokens, point.context): point for point in profile.verify_points}
            draft = {(point.rows, point.tokens): point for point in profile.draft_points}
        for (kind, count, *rest), taken in samples.items():
            if not taken:
                continue
            kept = taken[1:] if len(taken) > 2 else [min(taken)]
            if kind == "draft":
                tokens = rest[0] if rest else 0
                draft[count, tokens] = DraftPoint(count, statistics.median(kept), len(kept), tokens)
            else:
                width, context = rest
                point = VerifyPoint(count, count * width, context, statistics.median(kept), len(kept))
                verify[count, count * width, context] = point
        fields = fields if fields is not None else (profile.fields if profile is not None else {})
        spent = clock() - begin + (profile.measured_seconds if profile is not None else 0.0)
        return cls(dict(fields), list(verify.values()), list(draft.values()), spent)

    # --------------------------------------------------------------------------------------------------- on disk

    def save(self, path: str | os.PathLike | None = None) -> Path:
        """Write the profile as JSON, whole or not at all.

        Args:
            path (`str`, *optional*): file to write; by default `profile_path(self.fields)`.

        Raises:
            OSError: where the folder cannot be written.
        """
        path = Path(path) if path is not None else profile_path(self.fields)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT_VERSION, "fingerprint": fingerprint(self.fields), **asdict(self)}
        # Several processes may measure at once: each writes its own file, and the last one stays.
        partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(partial, path)
        return path

    @classmethod
    def load(cls, path: str | os.PathLike) -> "ThroughputProfile":
        """Read a profile.

        Raises:
            FileNotFoundError: no such file.
            ValueError: damaged, of another format, or edited so that its fields no longer match its fingerprint.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format"] != FORMAT_VERSION:
                raise ValueError(f"format {content['format']}, this version reads {FORMAT_VERSION}")
            if content["fingerprint"] != fingerprint(content["fields"]):
                raise ValueError("its fields do not match its fingerprint")
            return cls(
                dict(content["fields"]),
                [VerifyPoint(**point) for point in content["verify_points"]],
                [DraftPoint(**point) for point in content["draft_points"]],
                float(content["measured_seconds"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} is not a usable throughput profile ({reason}); measure it again.") from error

    @classmethod
    def find(cls, fields: dict, folder: str | os.PathLike | None = None) -> "ThroughputProfile | None":
        """The saved profile for `fields`, or `None` where there is none or its file is damaged (logged)."""
        path = profile_path(fields, folder)
        try:
            profile = cls.load(path)
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            logger.warning("%s", error)
            return None
        if profile.fields != json.loads(canonical(fields)):
            logger.warning("%s belongs to another target or machine; measure it again.", path)
            return None
        return profile

    @classmethod
    def load_or_measure(
        cls,
        fields: dict,
        measure: Callable[[], "ThroughputProfile"],
        folder: str | os.PathLike | None = None,
    ) -> "ThroughputProfile":
        """The saved profile for `fields`, else a measured one, saved for the next time and announced in one line.

        Args:
            fields (`dict`): see `fingerprint_fields`.
            measure (`Callable`): measures and returns a profile, e.g. a closure over `ThroughputProfile.measure`.
            folder (`str`, *optional*): in place of the Hugging Face home's.
        """
        profile = cls.find(fields, folder)
        if profile is not None:
            return profile
        profile = measure()
        profile.fields = dict(fields)
        try:
            where = f"saved as {profile.save(profile_path(fields, folder))}"
        except OSError as error:
            # A read-only home must not stop a generation; the next process measures again.
            where = f"not saved: {error}"
        logger.warning(
            "Measured the cost of verification and drafting in %.1f s, %s.", profile.measured_seconds, where
        )
        return profile


def _measured(points: Sequence[VerifyPoint | DraftPoint]) -> tuple[list[float], list[int]]:
    """Seconds and samples of the points."""
    return [point.seconds for point in points], [point.samples for point in points]


def _plan(rows, tokens_per_row, contexts, verify_fn, draft_fn, draft_tokens) -> dict[tuple, Callable[[], object]]:
    """The calls to time by key, in the order of a sweep: ends of the curve first, then its middle."""
    widths = sorted(set(tokens_per_row))
    widths = [widths[0], *widths[:0:-1]]
    calls: dict[tuple, Callable[[], object]] = {}
    for context in dict.fromkeys(contexts):
        for count in dict.fromkeys(rows):
            for width in widths:
                calls["verify", count, width, context] = lambda c=count, w=width, at=context: verify_fn(c, w, at)
                for key in [(count, tokens) for tokens in draft_tokens] or [(count,)] if draft_fn is not None else ():
                    calls.setdefault(("draft", *key), lambda key=key: draft_fn(*key))
    return calls
