"""What a generation did: one event per round, and figures derived from them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from transformers.generation import GenerateDecoderOnlyOutput


@dataclass
class RoundEvent:
    """
    One round: a drafted block per running row and what became of it.

    Attributes:
        index (`int`): Round number within the call, from 0.
        rows (`list[int]`): Rows that took part, by their number in the batch. The lists below follow this order.
        drafted (`list[list[int]]`): Proposed token ids, drafted or copied; empty for rows without a proposal.
        confidence (`list[list[float]]`, *optional*): Conditional acceptance probability of each slot (eq. 7).
        survival (`list[list[float]]`, *optional*): Running product of the confidences.
        verify_lengths (`list[int]`): Drafted tokens submitted to the target.
        accepted (`list[int]`): Drafted tokens kept.
        committed (`list[list[int]]`): Token ids added to each row, the target's own last token included.
        draft_seconds, verify_seconds (`float`): Wall time of the draft and of the target's forward.
        copied (`list[bool]`): Rows whose tokens were copied from their own text instead; empty where none was.
        load (`int`): Rows that other calls were decoding on the same target.
        expected_tokens (`float`, *optional*): Tokens the confidences promised for the round, over all rows.
        expected_seconds (`float`, *optional*): What the cost table predicted for the round.
        plain_seconds (`float`, *optional*): What it says of one step of plain decoding.
    """

    index: int
    rows: list[int]
    drafted: list[list[int]]
    confidence: list[list[float]] | None
    survival: list[list[float]] | None
    verify_lengths: list[int]
    accepted: list[int]
    committed: list[list[int]]
    draft_seconds: float
    verify_seconds: float
    copied: list[bool] = field(default_factory=list)
    load: int = 0
    expected_tokens: float | None = None
    expected_seconds: float | None = None
    plain_seconds: float | None = None

    @property
    def draft_rows(self) -> list[int]:
        """Places in the lists of the rows that did not copy."""
        return [place for place in range(len(self.rows)) if not self.copied or not self.copied[place]]

    @property
    def draft_width(self) -> int:
        """Tokens drafted for each row that did not copy; 0 where nothing was drafted."""
        return max((len(self.drafted[place]) for place in self.draft_rows), default=0)

    @property
    def time_saved(self) -> float | None:
        """Seconds that plain decoding would have needed beyond those spent; None without a cost table."""
        if self.plain_seconds is None:
            return None
        steps = sum(map(len, self.committed)) / len(self.rows)
        return steps * self.plain_seconds - self.draft_seconds - self.verify_seconds


@dataclass
class GenerationStats:
    """
    Figures of one `generate()` call, or of all calls inside [`record_generation`].

    Attributes:
        path (`str`): How the target was verified: "packed", "rectangular", "sequential", or "plain" for no speculation.
        calls (`int`): `generate()` calls counted here.
        new_tokens (`int`): Tokens generated, over all rows.
        seconds (`float`): Wall time, prompt processing included.
        prefill_seconds (`float`): Of which the prompt took this much.
        round_events (`list[RoundEvent]`): The rounds in order.
    """

    path: str = ""
    calls: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    round_events: list[RoundEvent] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Verification forwards of the target."""
        return len(self.round_events)

    @property
    def verify_lengths(self) -> list[list[int]]:
        """Per round, the drafted tokens submitted for each running row."""
        return [event.verify_lengths for event in self.round_events]

    @property
    def accepted_lengths(self) -> list[list[int]]:
        """Per round, the drafted tokens kept for each running row."""
        return [event.accepted for event in self.round_events]

    @property
    def verified(self) -> int:
        """Drafted tokens submitted to the target."""
        return sum(sum(lengths) for lengths in self.verify_lengths)

    @property
    def drafted(self) -> int:
        """Drafted or copied tokens, verified or not."""
        return sum(len(tokens) for event in self.round_events for tokens in event.drafted)

    @property
    def accepted(self) -> int:
        """Drafted tokens kept."""
        return sum(sum(lengths) for lengths in self.accepted_lengths)

    @property
    def tau(self) -> float:
        """Accepted length τ: tokens per row and round, the target's own token included; 0 without a round."""
        row_rounds = sum(len(event.rows) for event in self.round_events)
        committed = sum(len(tokens) for event in self.round_events for tokens in event.committed)
        return committed / row_rounds if row_rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Per slot, the share of drafted blocks verified that far whose slot was accepted; copies do not count."""
        width = max((max(lengths, default=0) for lengths in self.verify_lengths), default=0)
        tried, kept = [0] * width, [0] * width
        for event in self.round_events:
            for place in event.draft_rows:
                for slot in range(event.verify_lengths[place]):
                    tried[slot] += 1
                    kept[slot] += slot < event.accepted[place]
        width = tried.index(0) if 0 in tried else width
        return [k / t for k, t in zip(kept[:width], tried)]

    @property
    def share_without_draft(self) -> float:
        """Share of rounds in which nothing was drafted, copies or not."""
        return sum(not event.draft_width for event in self.round_events) / self.rounds if self.rounds else 0.0

    @property
    def copied(self) -> int:
        """Tokens kept that were copied from the text."""
        return sum(
            kept for event in self.round_events for kept, copy in zip(event.accepted, event.copied) if copy
        )

    @property
    def expected_tau(self) -> float | None:
        """The τ that the confidences promised; None where some round had none."""
        expected = [event.expected_tokens for event in self.round_events]
        if not expected or None in expected:
            return None
        return sum(expected) / sum(len(event.rows) for event in self.round_events)

    @property
    def time_saved(self) -> float | None:
        """Seconds saved against plain decoding by the cost table's reckoning; None without one."""
        saved = [event.time_saved for event in self.round_events]
        return None if not saved or None in saved else sum(saved)

    @property
    def draft_seconds(self) -> float:
        return sum(event.draft_seconds for event in self.round_events)

    @property
    def verify_seconds(self) -> float:
        return sum(event.verify_seconds for event in self.round_events)

    @property
    def other_seconds(self) -> float:
        """Wall time outside prompt processing, draft and verification."""
        return self.seconds - self.prefill_seconds - self.draft_seconds - self.verify_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def add(self, other: "GenerationStats") -> None:
        """Adds the figures of another call."""
        self.path = other.path if self.path in ("", other.path) else "mixed"
        self.calls += other.calls
        self.new_tokens += other.new_tokens
        self.seconds += other.seconds
        self.prefill_seconds += other.prefill_seconds
        self.round_events.extend(other.round_events)

    def to_dict(self) -> dict:
        """Everything as plain data, ready for JSON."""
        names = (
            "rounds", "drafted", "verified", "accepted", "copied", "tau", "acceptance_by_position", "draft_seconds",
            "verify_seconds", "other_seconds", "tokens_per_second", "share_without_draft", "expected_tau", "time_saved",
        )  # fmt: skip
        return asdict(self) | {name: getattr(self, name) for name in names}


@dataclass
class GenerateDSparkOutput(GenerateDecoderOnlyOutput):
    """[`~transformers.generation.GenerateDecoderOnlyOutput`] with `dspark_stats` ([`GenerationStats`])."""

    dspark_stats: GenerationStats | None = None


_RECORDERS: list[GenerationStats] = []
_RECORDERS_LOCK = threading.Lock()


@contextmanager
def record_generation() -> Iterator[GenerationStats]:
    """
    Collects the statistics of every `generate()` call with a DSpark draft that ends inside the context, in any thread.

    For callers that do not see the output of `generate()`: pipelines, trainers, servers.
    """
    stats = GenerationStats()
    with _RECORDERS_LOCK:
        _RECORDERS.append(stats)
    try:
        yield stats
    finally:
        with _RECORDERS_LOCK:
            _RECORDERS[:] = [recorder for recorder in _RECORDERS if recorder is not stats]


def publish(stats: GenerationStats) -> None:
    """Hands a finished call to the open recorders."""
    with _RECORDERS_LOCK:
        for recorder in _RECORDERS:
            recorder.add(stats)
