"""Drawing: plain data in, HTML and SVG out. Knows no model and no Gradio.

Everything that a model or a visitor wrote passes through `html.escape`. Nothing depends on colour alone: origins differ
by line, weight, frame and sign, outcomes by sign and strike-through. Colours are variables of `style.css`, so that
light and dark pages look right.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from transcript import Token

_NAMES = {
    "accepted": "accepted draft",
    "copied": "accepted copy",
    "bonus": "bonus token",
    "correction": "correction",
    "plain": "plain token",
}
_MEANINGS = {
    "accepted": "drafted by the small model, and the target agreed",
    "copied": "taken from earlier in the text, and the target agreed",
    "bonus": "the target's own next token after a block it agreed with",
    "correction": "the target's own token where it disagreed with the draft",
    "plain": "the target alone: nothing was drafted or checked for it",
}

# ---------------------------------------------------------------------------------------------------------- sentences


def problem(sentence: str) -> str:
    """An error, as a sentence."""
    return f'<p class="ds-problem" role="alert"><b aria-hidden="true">!</b> {escape(sentence)}</p>'


def note(sentence: str) -> str:
    return f'<p class="ds-note">{escape(sentence)}</p>'


def legend(compact: bool = False) -> str:
    """What the marks of an answer mean; `compact` leaves the explanations to the pointer."""
    entries = ""
    for kind, meaning in _MEANINGS.items():
        said = "" if compact else f' <span class="ds-dim">{escape(meaning)}</span>'
        entries += f'<li title="{escape(meaning)}">{_token(Token(_NAMES[kind], kind), titled=False)}{said}</li>'
    return f'<ul class="ds-legend{" ds-compact" if compact else ""}">{entries}</ul>'


# ------------------------------------------------------------------------------------------------------------- answer


def answer(tokens: Sequence[Token], running: bool = False, marked: bool = True) -> str:
    """An answer with every token marked by its origin; `marked=False` leaves plain text."""
    if marked:
        body = "".join(_token(token) for token in tokens)
    else:
        body = escape("".join(token.text for token in tokens))
    caret = '<span class="ds-caret" aria-hidden="true">▍</span>' if running else ""
    return f'<div class="ds-answer" dir="auto">{body}{caret}</div>'


def _token(token: Token, titled: bool = True) -> str:
    sure = "" if token.confidence is None else f", confidence {token.confidence:.2f}"
    title = f' title="{_NAMES[token.kind]}{sure}"' if titled else ""
    return f'<span class="ds-{token.kind}"{title}>{escape(token.text)}</span>'


def figures(
    new_tokens: int,
    seconds: float,
    rounds: Sequence[dict] = (),
    drawing: float = 0.0,
    prefill: float | None = None,
) -> str:
    """
    The run in numbers: τ, tokens per second, verify length, and where the time went.

    Args:
        new_tokens (`int`): Over all rows.
        seconds (`float`): Since the run began.
        rounds: "round" records so far.
        drawing (`float`): Share of the time that updating the page took.
        prefill (`float`, *optional*): Seconds spent on the prompt, where known.
    """
    row_rounds = sum(len(record["rows"]) for record in rounds)
    committed = sum(len(tokens) for record in rounds for tokens in record["committed"])
    lengths = [length for record in rounds for length in record["verify_lengths"]]
    draft = sum(record["draft_seconds"] for record in rounds)
    verify = sum(record["verify_seconds"] for record in rounds)
    cells = [
        ("τ", f"{committed / row_rounds:.2f}" if row_rounds else "–", "tokens a round, the target's own included"),
        ("tokens / s", f"{new_tokens / seconds:.1f}" if seconds else "–", f"{new_tokens} tokens in {seconds:.1f} s"),
        ("verify length", f"{sum(lengths) / len(lengths):.1f}" if lengths else "–", "drafted tokens checked a round"),
        ("rounds", str(len(rounds)), "forwards of the target"),
    ]
    numbers = "".join(
        f'<div title="{escape(title)}"><dt>{escape(name)}</dt><dd>{value}</dd></div>' for name, value, title in cells
    )
    shares = [("draft", draft), ("verify", verify)] + ([("prompt", prefill)] if prefill is not None else [])
    rest = max(0.0, seconds - sum(part for _, part in shares))
    bar = share_bar([*shares, ("other", rest)]) if rounds and seconds else ""
    drawn = f'<p class="ds-dim ds-small">Drawing this page: {drawing:.1%} of the time.</p>' if rounds else ""
    return f'<dl class="ds-figures">{numbers}</dl>{bar}{drawn}'


def share_bar(parts: Sequence[tuple[str, float]]) -> str:
    """Shares of a whole as a bar; each part is named with its percentage below."""
    total = sum(value for _, value in parts) or 1.0
    pieces = "".join(
        f'<i class="ds-part-{index}" style="flex-grow:{max(value, 0) / total:.4f}"></i>'
        for index, (_, value) in enumerate(parts)
    )
    names = "".join(
        f'<li><i class="ds-part-{index}"></i>{escape(name)} {value / total:.0%}</li>'
        for index, (name, value) in enumerate(parts)
    )
    return f'<div class="ds-bar" aria-hidden="true">{pieces}</div><ul class="ds-keys">{names}</ul>'


# -------------------------------------------------------------------------------------------------------------- round


def round_panel(record: dict | None) -> str:
    """
    The latest round of a row, slot by slot.

    Args:
        record (`dict`, *optional*): As `transcript.one_row` makes it.
    """
    if record is None:
        return note("The rounds appear here: what was drafted, how far it was trusted, and what the target kept.")
    drafted, verified, accepted = record["drafted"], record["verified"], record["accepted"]
    own = record["committed"][accepted] if len(record["committed"]) > accepted else None
    how = "copied" if record.get("copied") else "drafted"
    head = f"<h4>Round {record['index'] + 1}: {len(drafted)} {how}, {verified} checked, {accepted} accepted</h4>"
    if not drafted:
        said = "Nothing was drafted: it was not expected to pay, or there was room for one more token only."
        return f'{head}{note(said)}<ol class="ds-slots">{_own_card("plain", own)}</ol>'
    cards = []
    for slot, text in enumerate(drafted):
        if slot == verified:
            cards.append(_cut(verified))
        fate = "accepted" if slot < accepted else "rejected" if slot < verified else "unchecked"
        cards.append(_card(slot, text, fate, slot == accepted and slot < verified, record))
        if slot == accepted and slot < verified:
            cards.append(_own_card("correction", own))
        if verified and slot == verified - 1 and accepted == verified:
            cards.append(_own_card("bonus", own))
    if verified == len(drafted):
        cards.append(_cut(verified))
    elif not verified:
        cards.insert(0, _own_card("plain", own))
    return f'{head}<ol class="ds-slots">{"".join(cards)}</ol>'


def _card(slot: int, text: str, fate: str, is_first_rejected: bool, record: dict) -> str:
    sign, said = {
        "accepted": ("✓", "accepted"),
        "rejected": ("✗", "rejected" if is_first_rejected else "dropped"),
        "unchecked": ("–", "not checked"),
    }[fate]
    shown = f"<s>{_visible(text)}</s>" if fate == "rejected" else f"<span>{_visible(text)}</span>"
    meters = "".join(
        f"<dt>{name}</dt><dd>{_meter(values[slot])}</dd>"
        for name, values in (("confidence", record["confidence"]), ("survival", record["survival"]))
        if slot < len(values)
    )
    return (
        f'<li class="ds-slot ds-{fate}-slot"><b class="ds-number">{slot + 1}</b><code>{shown}</code>'
        f'<dl>{meters}</dl><em><b aria-hidden="true">{sign}</b> {said}</em></li>'
    )


def _own_card(kind: str, text: str | None) -> str:
    if text is None:  # the answer ended inside the block
        return ""
    said = {"correction": "replacement", "bonus": "bonus", "plain": "target's own"}[kind]
    return (
        f'<li class="ds-slot ds-own-slot"><b class="ds-number" aria-hidden="true">→</b>'
        f'<code><span class="ds-{kind}">{_visible(text)}</span></code><em>{said}</em></li>'
    )


def _cut(verified: int) -> str:
    return f'<li class="ds-cut" title="The first {verified} drafted tokens are checked."><span>cut</span></li>'


def _meter(value: float) -> str:
    return f'<i class="ds-meter" style="--value:{min(max(value, 0.0), 1.0):.3f}"></i>{value:.2f}'


def _visible(text: str) -> str:
    """A token's text with its white space shown."""
    shown = escape(text).replace("\n", "↵").replace("\t", "⇥")
    return shown.replace(" ", '<span class="ds-dim">·</span>') or '<span class="ds-dim">(part of a character)</span>'


# --------------------------------------------------------------------------------------------------------------- race


def race(plain: tuple[int, float] | None, dspark: tuple[int, float] | None) -> str:
    """
    Speeds as two bars, and the speedup once both are in.

    Args:
        plain, dspark (`tuple[int, float]`, *optional*): Tokens and seconds so far.
    """
    entries = {"plain generate()": plain, "DSpark": dspark}
    speeds = {name: run[0] / run[1] if run and run[1] else 0.0 for name, run in entries.items()}
    fastest = max(speeds.values()) or 1.0
    rows = "".join(
        f'<div class="ds-lane"><span>{escape(name)}</span>'
        f'<i class="ds-meter" style="--value:{speed / fastest:.3f}"></i>'
        f"<b>{f'{speed:.1f} tokens/s' if speed else '–'}</b></div>"
        for name, speed in speeds.items()
    )
    return f'<div class="ds-race">{rows}</div>'


def verdict(speedup: float, sentence: str, identical: bool | None) -> str:
    """The speedup and what became of the outputs; `identical=None` where they need not be."""
    sign = {True: "✓", False: "≠", None: "∼"}[identical]
    return (
        f'<div class="ds-verdict" role="status"><b class="ds-big">{speedup:.2f}×</b>'
        f"<span>{'as fast as' if speedup >= 1 else 'the speed of'} plain generate()</span>"
        f'<p><b aria-hidden="true">{sign}</b> {escape(sentence)}</p></div>'
    )


# --------------------------------------------------------------------------------------------------------------- load


def lanes(rows: Sequence[dict], slots: int) -> str:
    """
    The rows of a batch, each with its latest verify length.

    Args:
        rows: By row "verified", "accepted", "tokens" (so far), "text" (its end) and "is_done".
        slots (`int`): Most tokens drafted a round.
    """
    drawn = []
    for number, row in enumerate(rows, start=1):
        cells = "".join(
            f'<i class="{"ds-kept" if slot < row["accepted"] else "ds-sent" if slot < row["verified"] else "ds-idle"}">'
            f"{'✓' if slot < row['accepted'] else '✗' if slot < row['verified'] else ''}</i>"
            for slot in range(slots)
        )
        state = "done" if row["is_done"] else f"checks {row['verified']}"
        drawn.append(
            f'<li class="{"ds-done" if row["is_done"] else ""}"><b>{number}</b><span class="ds-cells">{cells}</span>'
            f'<span class="ds-state">{state}, {row["tokens"]} tokens</span><code>{_visible(row["text"])}</code></li>'
        )
    return f'<ol class="ds-lanes">{"".join(drawn)}</ol>'


# ------------------------------------------------------------------------------------------------------------- charts

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 360, 210, 40, 10, 12, 36


class _Axes:
    """A frame with two axes; `x` and `y` map data to the picture."""

    def __init__(self, xs: Sequence[float], y_max: float, x_label: str, y_label: str, x_ticks=None):
        self.low, self.high = min(xs), max(xs)
        self.top = _nice(y_max)
        self.parts = []
        for share in (0, 0.25, 0.5, 0.75, 1):
            y = self.y(share * self.top)
            self.parts.append(f'<line class="ds-grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self._text(_LEFT - 5, y + 3.5, f"{share * self.top:.4g}", "end")
        for tick in xs if x_ticks is None else x_ticks:
            self._text(self.x(tick), _HEIGHT - _BOTTOM + 14, f"{tick:g}")
        self._text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, x_label)
        self.label = y_label

    def x(self, value: float) -> float:
        span = self.high - self.low or 1
        return _LEFT + 14 + (value - self.low) / span * (_WIDTH - _RIGHT - _LEFT - 28)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self.top * (_HEIGHT - _BOTTOM - _TOP)

    def _text(self, x: float, y: float, text: str, anchor: str = "middle") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def svg(self, said: str) -> str:
        """The picture; `said` describes it to those who do not see it."""
        return (
            f'<figure class="ds-chart"><figcaption>{escape(self.label)}</figcaption>'
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(said)}">{"".join(self.parts)}</svg>'
            "</figure>"
        )


def _nice(value: float) -> float:
    """The next round number."""
    if value <= 0:
        return 1.0
    scale = 10.0 ** (len(f"{int(value)}") - 1) if value >= 1 else 0.1
    return next(step * scale for step in (1, 2, 3, 4, 5, 8, 10, 20) if step * scale >= value * 0.999)


def bars(values: Sequence[float], first: int, x_label: str, y_label: str, y_max: float | None = None) -> str:
    """A bar for each of `first`, `first + 1`, ..."""
    if not values:
        return note(f"{y_label}: nothing to show yet.")
    xs = [first + index for index in range(len(values))]
    axes = _Axes(xs, max(values) if y_max is None else y_max, x_label, y_label)
    width = min(30.0, 0.7 * (_WIDTH - _LEFT - _RIGHT - 28) / max(1, len(xs) - 1))
    for x, value in zip(xs, values):
        top = axes.y(value)
        axes.parts.append(
            f'<rect class="ds-fill" x="{axes.x(x) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{axes.y(0) - top:.1f}"><title>{x}: {value:.3g}</title></rect>'
        )
        axes._text(axes.x(x), top - 3, f"{value:.2g}" if isinstance(value, float) else str(value))
    return axes.svg(f"{y_label} by {x_label}: " + ", ".join(f"{x}: {value:.3g}" for x, value in zip(xs, values)))


def lines(
    series: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    dots: Sequence[tuple[float, float]],
    marker: float | None,
    x_label: str,
    y_label: str,
) -> str:
    """
    Curves over a common axis.

    Args:
        series: Name, x values and y values of each curve; the first is solid, the others are dashed.
        dots: Measured points.
        marker (`float`, *optional*): x value to point out.
    """
    xs = sorted({x for _, along, _ in series for x in along} | {x for x, _ in dots})
    heights = [y for _, _, along in series for y in along] + [y for _, y in dots]
    axes = _Axes(xs, max(heights), x_label, y_label)
    if marker is not None:
        x = axes.x(marker)
        axes.parts.append(f'<line class="ds-marker" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
    for index, (_, along, values) in enumerate(series):
        points = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in zip(along, values))
        axes.parts.append(f'<polyline class="ds-line-{index}" points="{points}"/>')
    for x, y in dots:
        axes.parts.append(
            f'<circle class="ds-dot" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="4"><title>{y:.3g}</title></circle>'
        )
    swatch = '<svg viewBox="0 0 20 6"><line class="ds-line-{}" x1="0" x2="20" y1="3" y2="3"/></svg>'
    keys = [f"<li>{swatch.format(index)}{escape(name)}</li>" for index, (name, _, _) in enumerate(series)]
    if dots:
        keys.append('<li><svg viewBox="0 0 20 8"><circle class="ds-dot" cx="10" cy="4" r="4"/></svg>your runs</li>')
    said = "; ".join(f"{name}: " + ", ".join(f"{y:.3g} at {x:g}" for x, y in zip(a, b)) for name, a, b in series)
    return axes.svg(f"{y_label} by {x_label}. {said}") + f'<ul class="ds-keys">{"".join(keys)}</ul>'


def reliability(bins: Sequence[tuple[float, float, float]], error: float) -> str:
    """
    Promised against realised acceptance; a calibrated head lies on the diagonal.

    Args:
        bins: Mean prediction, mean outcome and weight of each bin.
        error (`float`): Expected calibration error.
    """
    label = f"Survival: promised and realised (ECE {error:.3f})"
    if not bins:
        return note("Confidence reliability: no rounds with confidences yet.")
    axes = _Axes([0, 1], 1.0, "promised", label, x_ticks=(0, 0.25, 0.5, 0.75, 1))
    axes.parts.append(
        f'<line class="ds-line-1" x1="{axes.x(0):.1f}" y1="{axes.y(0):.1f}" x2="{axes.x(1):.1f}" y2="{axes.y(1):.1f}"/>'
    )
    heaviest = max(weight for _, _, weight in bins)
    for predicted, outcome, weight in bins:
        axes.parts.append(
            f'<circle class="ds-dot" cx="{axes.x(predicted):.1f}" cy="{axes.y(outcome):.1f}" '
            f'r="{3 + 7 * (weight / heaviest) ** 0.5:.1f}"><title>promised {predicted:.2f}, realised {outcome:.2f}, '
            f"{weight:.0f} slots</title></circle>"
        )
    return axes.svg(label + ": " + ", ".join(f"{p:.2f} gave {o:.2f}" for p, o, _ in bins))


def load_charts(curve: Sequence[dict], points: Sequence, load: int) -> str:
    """
    Mean verify length and tokens per second against load.

    Args:
        curve: As `sessions.forecast` makes it.
        points: Finished batches with `rows`, `verify_length` and `speed`.
        load (`int`): The load to point out.
    """
    at, here = [entry["rows"] for entry in curve], curve[min(load, len(curve)) - 1]
    lengths = [("throughput policy", at, [entry["verify_length"] for entry in curve])]
    speeds = [
        ("throughput policy", at, [entry["speed"] for entry in curve]),
        ("plain generate()", at, [entry["plain_speed"] for entry in curve]),
    ]
    left = lines(lengths, [(p.rows, p.verify_length) for p in points], load, "rows at once", "Mean verify length")
    right = lines(speeds, [(p.rows, p.speed) for p in points], load, "rows at once", "Tokens per second, all rows")
    said = (
        f"At load {load}, by this machine's measured costs: {here['verify_length']:.1f} drafted tokens checked a row, "
        f"{here['speed']:.0f} tokens per second against {here['plain_speed']:.0f} without a draft. "
        "Where drafting would not pay, the policy drafts nothing."
    )
    return f'{note(said)}<div class="ds-charts"><div>{left}</div><div>{right}</div></div>'


def history(by_position: Sequence[float], accepted: Sequence[int], bins: Sequence[tuple], error: float) -> str:
    """The session's charts: acceptance by position, accepted lengths, reliability of the confidences."""
    if not accepted:
        return note("Nothing has been drafted in this session yet. Run something first.")
    charts = (
        bars(list(by_position), 1, "position in the block", "Acceptance by position", y_max=1.0),
        bars(list(accepted), 0, "drafted tokens accepted", "Accepted lengths, rounds"),
        reliability(bins, error),
    )
    said = (
        f"{sum(accepted)} checked blocks in this session. Reliability reads best under the policy constant: a cut "
        "chooses which slots are seen."
    )
    return f'{note(said)}<div class="ds-charts">{"".join(f"<div>{chart}</div>" for chart in charts)}</div>'
