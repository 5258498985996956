"""Blocks copied from a row's own text, for where the text repeats itself.

A draft is weak where a sequence repeats: it would have to look up what followed last time, which takes a target's many
layers. A search does it for nothing: where the last tokens of a row stood before, what followed them then is proposed
again (prompt lookup; in DSpark's terms a draft with q = 1 at the copied token). Copies are verified like drafts, and as
they depend on nothing but the committed text, whatever is decided about them leaves the output's distribution alone.

How likely a copied token is to be accepted follows from the length of the match before it, which grows with every token
of the copy that was right. `CopyRecord` starts from what answers of a small chat model showed and learns the rest.
`net_gain` says what verifying a copy is worth in time, so that it can be weighed against a draft.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

_SHORTEST, _LONGEST = 2, 32  # tokens of a match
_PLACES = 8  # latest places of a pair of tokens that are looked at
# Matches of a class share what is learnt about them: the shortest match of each.
_CLASSES = (2, 3, 4, 5, 6, 8, 11, 16, 32)
# A match of m tokens goes on with chance m / (m + doubt). Over 724 answers of SmolLM2-135M-Instruct, m = 2, 4, 8, 16
# gave 0.55, 0.7, 0.8, 0.96 decoded greedily and 0.35, 0.53, 0.6, 0.9 at temperature 1.
_DOUBT = {False: 2.0, True: 4.0}


@dataclass(frozen=True)
class Copy:
    """Tokens that followed when a row's last `match` tokens stood in its text before."""

    tokens: list[int]
    match: int


class RowText:
    """The committed tokens of a row, and where each pair of them stood.

    Args:
        tokens (`Sequence[int]`): The text so far.
    """

    def __init__(self, tokens: Sequence[int] = ()):
        self.tokens: list[int] = []
        self._places: dict[tuple[int, int], list[int]] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        text, places = self.tokens, self._places
        for token in tokens:
            # the last pair is filed once something follows it
            if len(text) >= _SHORTEST:
                places.setdefault((text[-2], text[-1]), []).append(len(text))
            text.append(token)

    def find(self, most: int) -> Copy | None:
        """What followed the longest match among the latest places; a copy that reaches the end repeats itself.

        Args:
            most (`int`): Tokens to copy at most.
        """
        text = self.tokens
        places = self._places.get(tuple(text[-2:])) if most > 0 else None
        if not places:
            return None
        best, start = 0, 0
        for place in places[: -_PLACES - 1 : -1]:
            match = self._match(place)
            if match > best:
                best, start = match, place
            if match >= _LONGEST:
                break
        period = len(text) - start
        return Copy([text[start + offset % period] for offset in range(most)], best)

    def _match(self, place: int) -> int:
        """How many tokens before `place` are also the last ones of the text."""
        text, match = self.tokens, _SHORTEST
        while match < min(place, _LONGEST) and text[place - 1 - match] == text[-1 - match]:
            match += 1
        return match


class CopyRecord:
    """How often copied tokens were right, by the length of the match before them.

    Args:
        sampled (`bool`): Whether tokens are sampled.
        prior_weight (`float`): Tries that the first guess is worth; it fades like old rounds do.
        decay (`float`): Weight that older tries keep, per try.
    """

    def __init__(self, sampled: bool, prior_weight: float = 4.0, decay: float = 0.97):
        self.decay = decay
        self._tries = [prior_weight] * len(_CLASSES)
        self._hits = [prior_weight * match / (match + _DOUBT[sampled]) for match in _CLASSES]

    def confidence(self, copy: Copy) -> list[float]:
        """Chance of each copied token to be accepted, given that those before it were."""
        classes = [self._class(copy.match + slot) for slot in range(len(copy.tokens))]
        return [self._hits[number] / self._tries[number] for number in classes]

    def update(self, copy: Copy, verified: int, accepted: int) -> None:
        """Takes in that the first `accepted` of `verified` copied tokens were right."""
        for slot in range(min(verified, accepted + 1)):
            number = self._class(copy.match + slot)
            self._tries[number] = self.decay * self._tries[number] + 1.0
            self._hits[number] = self.decay * self._hits[number] + (slot < accepted)

    @staticmethod
    def _class(match: int) -> int:
        return bisect_right(_CLASSES, match) - 1


class DraftRecord:
    """Drafted tokens that a row verified and kept in a round, averaged over the rows of past rounds."""

    def __init__(self, decay: float = 0.9):
        # a draft in good faith, worth two rounds
        self.decay, self._rounds, self._verified, self._kept = decay, 2.0, 6.0, 3.0

    @property
    def verified(self) -> float:
        return self._verified / self._rounds

    @property
    def kept(self) -> float:
        return self._kept / self._rounds

    def update(self, verified: float, kept: float) -> None:
        """Takes in a round: means over its rows."""
        self._rounds = self.decay * self._rounds + 1.0
        self._verified = self.decay * self._verified + verified
        self._kept = self.decay * self._kept + kept


def net_gain(confidence: Sequence[float], token_seconds: float, slot_seconds: float) -> float:
    """Seconds that verifying the best prefix of a proposal saves; 0 or more.

    Args:
        confidence ([K]): Chance of each slot, given the ones before it.
        token_seconds (`float`): What a token takes at the present pace.
        slot_seconds (`float`): What it costs to verify one more.
    """
    best = gain = 0.0
    alive = 1.0
    for chance in confidence:
        alive *= chance
        gain += token_seconds * alive - slot_seconds
        best = max(best, gain)
    return best


__all__ = ["Copy", "CopyRecord", "DraftRecord", "RowText", "net_gain"]
