"""Small charts as SVG text: bars in groups, and lines. Same data, same bytes, so that a stored chart can be checked."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Column = Sequence[float | None]
COLORS = ("#2463eb", "#e07a1f", "#2a9d5c", "#8b5cf6", "#c0392b", "#0f9fb5", "#b8860b", "#e05fa0", "#6b7280")
INK, GRID = "#57606a", "#d0d7de"  # readable on white and on dark grey
WIDTH, HEIGHT = 760, 300
LEFT, TOP, BOTTOM, LEGEND = 48, 34, 34, 150


def bars(title: str, groups: Sequence[str], series: dict[str, Column], line: float | None = None) -> str:
    """Bars side by side in groups.

    Args:
        title (`str`): above the chart.
        groups (`Sequence[str]`): names along the axis.
        series (`dict[str, Sequence]`): a value per group; None leaves a gap.
        line (`float`, *optional*): a value to draw a line at.
    """
    values = [value for column in series.values() for value in column if value is not None]
    frame = _Frame(max([*values, line or 0.0]))
    parts = frame.start(title)
    step = frame.width / len(groups)
    width = step * 0.84 / len(series)
    for number, (name, column) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        for place, value in enumerate(column):
            if value is None:
                continue
            x = LEFT + place * step + step * 0.08 + number * width
            top = frame.y(value)
            parts.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{width * 0.9:.1f}" height="{frame.y(0) - top:.1f}" '
                f'fill="{color}"><title>{escape(name)}, {escape(groups[place])}: {value:.2f}</title></rect>'
            )
            if width >= 15:
                parts.append(_text(x + width * 0.45, top - 3, f"{value:.2f}", 8, "middle"))
    for place, name in enumerate(groups):
        parts.append(_text(LEFT + (place + 0.5) * step, HEIGHT - BOTTOM + 16, name, 11, "middle"))
    if line is not None:
        y = frame.y(line)
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + frame.width}" y1="{y:.1f}" y2="{y:.1f}" stroke="{INK}" '
            'stroke-dasharray="4 3"/>'
        )
    return "\n".join([*parts, *_legend(list(series)), "</svg>"]) + "\n"


def lines(title: str, series: dict[str, Sequence[tuple[float, float]]], x_label: str, top: float | None = None) -> str:
    """Lines through points; the places on the axis are evenly spaced, as the values often are powers of two.

    Args:
        title (`str`), x_label (`str`): above and below the chart.
        series (`dict[str, Sequence]`): points (x, y).
        top (`float`, *optional*): the largest value of the axis.
    """
    places = sorted({x for points in series.values() for x, _ in points})
    frame = _Frame(max(y for points in series.values() for _, y in points) if top is None else top)
    parts = frame.start(title)
    step = frame.width / max(1, len(places))
    at = {place: LEFT + (number + 0.5) * step for number, place in enumerate(places)}
    for number, (name, points) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{at[x]:.1f},{frame.y(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for x, y in points:
            parts.append(
                f'<circle cx="{at[x]:.1f}" cy="{frame.y(y):.1f}" r="3" fill="{color}">'
                f"<title>{escape(name)}, {x:g}: {y:.2f}</title></circle>"
            )
    for place, x in at.items():
        parts.append(_text(x, HEIGHT - BOTTOM + 14, f"{place:.6g}", 10, "middle"))
    parts.append(_text(LEFT + frame.width / 2, HEIGHT - 4, x_label, 10, "middle"))
    return "\n".join([*parts, *_legend(list(series)), "</svg>"]) + "\n"


class _Frame:
    """The axis of values, from 0 to a round number above the largest."""

    def __init__(self, largest: float):
        self.tick = next(step for step in _steps() if largest <= 5 * step)
        self.top = self.tick * max(1, -int(-largest // self.tick))
        self.width = WIDTH - LEFT - LEGEND

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / self.top

    def start(self, title: str) -> list[str]:
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" font-family="sans-serif">',
            _text(LEFT, 18, title, 13, "start"),
        ]
        for number in range(round(self.top / self.tick) + 1):
            value = number * self.tick
            y = self.y(value)
            parts.append(f'<line x1="{LEFT}" x2="{LEFT + self.width}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
            parts.append(_text(LEFT - 6, y + 3, f"{value:g}", 10, "end"))
        return parts


def _steps():
    unit = 0.01
    while True:
        yield from (unit, 2 * unit, 5 * unit)
        unit = round(10 * unit, 6)


def _legend(names: list[str]) -> list[str]:
    parts = []
    for number, name in enumerate(names):
        y = TOP + 16 * number
        color = COLORS[number % len(COLORS)]
        parts.append(f'<rect x="{WIDTH - LEGEND + 12}" y="{y}" width="10" height="10" fill="{color}"/>')
        parts.append(_text(WIDTH - LEGEND + 27, y + 9, name, 10, "start"))
    return parts


def _text(x: float, y: float, text: str, size: int, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{INK}" text-anchor="{anchor}">{escape(text)}</text>'
