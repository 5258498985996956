"""From token ids to text and its origin: what each committed token is, and what a round says in words.

Every token of an answer came in one of five ways (`KINDS`):

* plain: the target's own, without a draft to help: the first token, and rounds that verified nothing;
* accepted: drafted, and the target agreed;
* copied: taken from earlier in the text instead, and the target agreed;
* correction: the target's own in place of the first proposed token it did not agree with;
* bonus: the target's own behind a block that it agreed with throughout.

The records made here are what the page draws and what a visitor can download, one JSON object a line.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

from runs import Update

KINDS = ("accepted", "copied", "bonus", "correction", "plain")
_PART = "\ufffd"  # what half a character decodes to


class Token(NamedTuple):
    """A token of an answer: its text, one of `KINDS`, and the draft's confidence in it where it was drafted."""

    text: str
    kind: str
    confidence: float | None = None


def kinds(verified: int, accepted: int, committed: int, copied: bool = False) -> list[str]:
    """The kinds of the tokens that one row committed in a round."""
    own = "plain" if not verified else "bonus" if accepted == verified else "correction"
    kept = "copied" if copied else "accepted"
    return [kept if slot < accepted else own for slot in range(committed)]


class Transcript:
    """
    The answers of one run, row by row.

    Attributes:
        rows (`list[list[Token]]`): The tokens of each row.
        ids (`list[list[int]]`): Their token ids.
        records (`list[dict]`): What happened, as plain data: "tokens" and "round" records.
    """

    def __init__(self, tokenizer, rows: int = 1):
        self.tokenizer = tokenizer
        self.rows: list[list[Token]] = [[] for _ in range(rows)]
        self.ids: list[list[int]] = [[] for _ in range(rows)]
        self.records: list[dict] = []
        self._pieces = [_Pieces(tokenizer) for _ in range(rows)]
        self._labels: dict[int, str] = {}

    def add(self, update: Update) -> None:
        """Takes in what has happened since the last update."""
        # the first token comes before the rounds; without rounds there is nothing else
        for step in update.tokens:
            texts = [self._append(row, [token], ["plain"]) for row, token in enumerate(step)]
            self.records.append({"type": "tokens", "tokens": step, "text": [text[0] for text in texts]})
        for event in update.rounds:
            texts = []
            for slot, row in enumerate(event.rows):
                committed = event.committed[slot]
                copied = bool(event.copied) and event.copied[slot]
                how = kinds(event.verify_lengths[slot], event.accepted[slot], len(committed), copied)
                confidence = event.confidence[slot] if event.confidence else []
                texts.append(self._append(row, committed, how, confidence))
            drafted = [[self.label(token) for token in tokens] for tokens in event.drafted]
            record = {"type": "round", **asdict(event), "drafted_text": drafted, "committed_text": texts}
            self.records.append(record)

    def _append(self, row: int, tokens: list[int], how: list[str], confidence=()) -> list[str]:
        texts = [self._pieces[row].add(token) for token in tokens]
        self.ids[row].extend(tokens)
        scores = [*confidence[: len(tokens)], *[None] * len(tokens)]
        self.rows[row].extend(
            Token(text, kind, score if kind in ("accepted", "copied") else None)
            for text, kind, score in zip(texts, how, scores)
        )
        return texts

    def label(self, token: int) -> str:
        """A single token in print: its text, or its name in the vocabulary where that is no whole character."""
        if token not in self._labels:
            text = self.tokenizer.decode([token])
            self._labels[token] = self.tokenizer.convert_ids_to_tokens(token) if _PART in text or not text else text
        return self._labels[token]

    def last_round(self, row: int = 0) -> dict | None:
        """The latest round in which `row` took part; see `one_row`."""
        for record in reversed(self.records):
            if record["type"] == "round" and row in record["rows"]:
                return one_row(record, row)
        return None


def one_row(record: dict, row: int) -> dict:
    """
    A row's share of a "round" record.

    Returns:
        `dict`: "index", "drafted", "confidence", "survival" by slot (the latter two may be empty), whether they were
        "copied", "verified" and "accepted" counts, "committed" texts.
    """
    at = record["rows"].index(row)
    return {
        "index": record["index"],
        "drafted": record["drafted_text"][at],
        "confidence": record["confidence"][at] if record["confidence"] else [],
        "survival": record["survival"][at] if record["survival"] else [],
        "copied": bool(record.get("copied")) and record["copied"][at],
        "verified": record["verify_lengths"][at],
        "accepted": record["accepted"][at],
        "committed": record["committed_text"][at],
    }


class _Pieces:
    """Decodes one row token by token. A character of several tokens belongs to the one that completes it."""

    def __init__(self, tokenizer):
        self.tokenizer, self.ids, self.start, self.shown = tokenizer, [], 0, 0

    def add(self, token: int) -> str:
        self.ids.append(token)
        before = self.tokenizer.decode(self.ids[self.start : self.shown])
        text = self.tokenizer.decode(self.ids[self.start :])
        if text.endswith(_PART) and len(self.ids) - self.shown < 4:
            return ""
        # from the last shown piece on, since some tokenizers drop the space before the very first word
        self.start, self.shown = self.shown, len(self.ids)
        return text[len(before) :]
