"""What the page remembers of each visitor: the runs of a browser tab, nothing of anybody else's.

A tab is known by Gradio's session hash. Its memory goes when the tab is closed, or when too many others came since.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import tempfile
import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from pairs import Pair, PairName
from runs import Knobs, StopFlag, Update
from transcript import Transcript

from dspark_hf import ConfidenceRecord, GenerationStats, measure_confidence, throughput_lengths

_SESSIONS, _RUNS, _ROUNDS = 200, 20, 4000  # most that are remembered
_BINS = 10
_SAMPLES = 12  # batches drawn for a forecast


@dataclass(frozen=True)
class LoadPoint:
    """A finished batch: rows, mean verify length, tokens per second over all rows."""

    rows: int
    verify_length: float
    speed: float


class Session:
    """
    One visitor's memory.

    Attributes:
        flags (`dict[str, StopFlag]`): The stop flag of the run that each tab of the page has going.
        runs (`list[list[dict]]`): Records of the last runs, ready for JSON lines.
        pair (`PairName`, *optional*): The pair that `stats` and `points` are about; another one begins them anew.
        stats (`GenerationStats`): Of all its runs with a draft.
        points (`list[LoadPoint]`): Of its batches.
        races (`int`): Races run; who starts takes turns.
    """

    def __init__(self):
        self.flags: dict[str, StopFlag] = {}
        self.runs: list[list[dict]] = []
        self.stats = GenerationStats()
        self.points: list[LoadPoint] = []
        self.pair: PairName | None = None
        self.races = 0
        self._saved: Path | None = None

    def begin(self, tab: str) -> StopFlag:
        """A new flag for a run in `tab`; one that is waiting or going there is stopped."""
        self.stop(tab)
        flag = self.flags[tab] = StopFlag()
        return flag

    def stop(self, tab: str) -> None:
        if tab in self.flags:
            self.flags[tab].set()

    def end(self, tab: str, flag: StopFlag) -> None:
        """The run with this flag is over."""
        flag.clear()
        if self.flags.get(tab) is flag:
            del self.flags[tab]

    def close(self) -> None:
        """Stops everything and leaves no file behind."""
        for tab in list(self.flags):
            self.stop(tab)
        if self._saved is not None:
            shutil.rmtree(self._saved, ignore_errors=True)

    def file(self, mode: str, pair: Pair, prompts: list[str], knobs: Knobs, written: Transcript, last: Update) -> None:
        """Keeps a finished run."""
        if self.pair != pair.name:
            self.pair, self.stats, self.points = pair.name, GenerationStats(), []
        header = {
            "type": "run",
            "mode": mode,
            "pair": str(pair.name),
            "prompts": prompts,
            "settings": asdict(knobs),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "device": torch.cuda.get_device_name() if pair.model.device.type == "cuda" else platform.machine(),
        }
        stats = last.stats
        end = {"type": "end", "seconds": last.seconds, "stopped": last.stopped, "drawing_share": last.drawing}
        end["new_tokens"] = sum(map(len, written.rows))
        if stats.rounds:
            end |= {key: value for key, value in stats.to_dict().items() if key not in ("round_events", "seconds")}
        self.runs = [*self.runs, [header, *written.records, end]][-_RUNS:]
        self.stats.add(stats)
        del self.stats.round_events[:-_ROUNDS]

    def json_lines(self) -> str:
        """All remembered runs."""
        return "".join(json.dumps(record, ensure_ascii=False) + "\n" for run in self.runs for record in run)

    def save(self) -> str | None:
        """Writes the runs to a file for download, in place of the last one; None without runs."""
        if not self.runs:
            return None
        if self._saved is not None:
            shutil.rmtree(self._saved, ignore_errors=True)
        self._saved = Path(tempfile.mkdtemp(prefix="dspark-runs-"))
        path = self._saved / "dspark-runs.jsonl"
        path.write_text(self.json_lines(), encoding="utf-8")
        return str(path)

    def accepted_histogram(self) -> list[int]:
        """How often 0, 1, 2 ... drafted tokens were accepted, over rounds that verified any."""
        events = self.stats.round_events
        counts = [kept for e in events for kept, length in zip(e.accepted, e.verify_lengths) if length]
        return [counts.count(kept) for kept in range(max(counts, default=-1) + 1)]

    def reliability(self) -> tuple[list[tuple[float, float, float]], float]:
        """Bins of survival over all slots (mean promised, mean realised, weight), and the calibration error."""
        scored = [
            (event.confidence[place], event.accepted[place], event.verify_lengths[place])
            for event in self.stats.round_events
            for place in (event.draft_rows if event.confidence else ())
            if event.verify_lengths[place]
        ]
        if not scored:
            return [], math.nan
        metrics = measure_confidence(ConfidenceRecord.from_rounds(*zip(*scored)), num_bins=_BINS)
        sums: dict[int, list[float]] = {}
        for entry in (entry for position in metrics.per_position for entry in position.reliability):
            bin_sums = sums.setdefault(entry["bin"], [0.0, 0.0, 0.0])
            weight = entry["weight"]
            for index, value in enumerate((entry["avg_pred"] * weight, entry["avg_target"] * weight, weight)):
                bin_sums[index] += value
        return [(p / weight, o / weight, weight) for _, (p, o, weight) in sorted(sums.items())], metrics.ece_mean

    def survival(self) -> list[list[float]]:
        """Survival by slot of the latest drafted rows."""
        events = [event for event in self.stats.round_events[-64:] if event.survival and event.draft_width]
        return [event.survival[place] for event in events for place in event.draft_rows]


class Sessions:
    """The visitors' memories by session hash."""

    def __init__(self):
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, session_hash: str) -> Session:
        with self._lock:
            session = self._sessions.setdefault(session_hash, Session())
            self._sessions.move_to_end(session_hash)
            while len(self._sessions) > _SESSIONS:
                self._sessions.popitem(last=False)[1].close()
            return session

    def forget(self, session_hash: str) -> None:
        """The tab was closed: whatever it had going ends."""
        with self._lock:
            session = self._sessions.pop(session_hash, None)
        if session is not None:
            session.close()


# ----------------------------------------------------------------------------------------------------------- forecast


def forecast(costs: dict, survival: list[list[float]], rows: int) -> list[dict]:
    """
    What Algorithm 1 would do at every load from 1 to `rows`, by the measured costs and survival seen so far.

    Args:
        costs (`dict`): See `runs.costs`.
        survival (`list[list[float]]`): Seen by slot; batches are drawn from it in turn.
        rows (`int`): Highest load.

    Returns:
        `list[dict]`: "rows", "verify_length" (mean per row), "speed" and "plain_speed" in tokens per second. Where
        drafting would not pay, the length is 0 and the speed that of plain decoding.
    """
    slots = max(map(len, survival))
    seen = torch.tensor([row for row in survival if len(row) == slots], dtype=torch.float64)
    curve = []
    for count in range(1, rows + 1):
        plain = count / costs["plain"][count]
        cost, draft = torch.tensor(costs["verify"][count], dtype=torch.float64), costs["draft"][count]
        tokens = seconds = verified = 0.0
        for sample in range(_SAMPLES):
            picked = (sample * count + torch.arange(count)) % seen.shape[0]
            result = throughput_lengths(seen[picked], cost, draft_seconds=draft)
            tokens, seconds = tokens + result.expected_tokens, seconds + result.seconds
            verified += float(result.lengths.sum())
        pays = tokens / seconds > plain
        length = verified / (_SAMPLES * count) if pays else 0.0
        speed = tokens / seconds if pays else plain
        curve.append({"rows": count, "verify_length": length, "speed": speed, "plain_speed": plain})
    return curve
