"""Charts as SVG text: lines over steps, and bars. Colours and fonts come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 30
# More points than this are no more to be seen: neighbours are drawn as their mean.
_MOST_POINTS = 300
# Told apart by most colour-blind people: Okabe and Ito's palette, without black and yellow.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True)
class Series:
    """One line: (step, value) in ascending steps; a value of None is left out. dots: every point is marked."""

    name: str
    points: Sequence[tuple[float, float | None]]
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """A vertical line at a step, with its reason."""

    step: float
    text: str


def line_chart(
    series: Sequence[Series],
    *,
    marks: Sequence[Mark] = (),
    ramp: bool = False,
    form: str = ",.4g",
    from_zero: bool = False,
) -> str:
    """The series over steps with their legend; "" when there is no point. ramp: their order is a matter of degree, and so are
    their colours. form: of the values in the tool tips. from_zero: the axis begins there however little the values differ."""
    drawn = [(s, points) for s in series if (points := thinned(s.points))]
    if not drawn:
        return ""
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    x_low, x_high = min(xs), max(xs)
    y_ticks = ticks(min(0.0, *ys) if from_zero or min(ys) <= 0.3 * max(ys) else min(ys), max(ys))
    y_low, y_high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def at(x: float, y: float) -> tuple[float, float]:
        part_x = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        part_y = (y - y_low) / (y_high - y_low) if y_high > y_low else 0.5
        return _LEFT + part_x * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - part_y * (HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for y in y_ticks:
        _, down = at(x_low, y)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{short(y)}</text>')
    for x in ticks(x_low, x_high, whole=True):
        if x_low <= x <= x_high:
            right, _ = at(x, y_low)
            parts.append(f'<text x="{right:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{short(x)}</text>')
    for mark in marks:
        if x_low <= mark.step <= x_high:
            right, _ = at(mark.step, y_low)
            parts.append(
                f'<line class="mark" x1="{right:.1f}" x2="{right:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}">'
                f"<title>{escape(mark.text)}</title></line>"
            )
    keys = []
    for index, (one, points) in enumerate(drawn):
        color = _color(index, len(drawn), ramp)
        placed = [(*at(x, y), x, y) for x, y in points]
        path = " ".join(f"{right:.1f},{down:.1f}" for right, down, _, _ in placed)
        parts.append(f'<polyline points="{path}" style="stroke:{color}"/>')
        shown = "dot" if one.dots or len(placed) == 1 else "hover"
        parts += [
            f'<circle class="{shown}" cx="{right:.1f}" cy="{down:.1f}" r="3.5" style="fill:{color}">'
            f"<title>{escape(one.name)}, step {x:,.0f}: {y:{form}}</title></circle>"
            for right, down, x, y in placed
        ]
        keys.append(f'<span class="key"><i style="background:{color}"></i>{escape(one.name)}</span>')
    return "".join([*parts, "</svg>", f'<p class="keys">{"".join(keys)}</p>'])


def bar_chart(rows: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars: label, value, and what is written behind the bar; "" without a row."""
    if not rows:
        return ""
    step, left, right = 24, 190, 150
    most = max(value for _, value, _ in rows) or 1.0
    parts = [f'<svg viewBox="0 0 {WIDTH} {step * len(rows) + 4}" role="img">']
    for index, (label, value, text) in enumerate(rows):
        top, length = index * step + 4, max(0.0, value) / most * (WIDTH - left - right)
        parts.append(f'<text x="{left - 8}" y="{top + 14}" text-anchor="end">{escape(label)}</text>')
        parts.append(f'<rect x="{left}" y="{top}" width="{length:.1f}" height="{step - 6}"/>')
        parts.append(f'<text x="{left + length + 6:.1f}" y="{top + 14}">{escape(text)}</text>')
    return "".join([*parts, "</svg>"])


def thinned(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """The points that have a value; where there are too many, the means of neighbours, each at the last one's step."""
    known = [(x, y) for x, y in points if y is not None]
    size = -(-len(known) // _MOST_POINTS)
    if size <= 1:
        return known
    groups = [known[first : first + size] for first in range(0, len(known), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Round numbers that enclose low and high (about five), ascending."""
    span = high - low or abs(high)
    span = span if span > 1e-290 else 1.0
    size = 10.0 ** math.floor(math.log10(span / 4))
    size *= next(factor for factor in (1, 2, 5, 10) if span / (size * factor) <= 5)
    if whole:
        size = max(1.0, size)
    first, last = math.floor(low / size), math.ceil(high / size)
    return [number * size for number in range(first, last + 1)]


def short(value: float) -> str:
    """A number for an axis."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (limit if letter != 'k' else 1e3):.3g}{letter}"
    return f"{value:.4g}"


def _color(index: int, count: int, ramp: bool) -> str:
    if ramp:  # hue and lightness: neighbours differ where either alone would not show it
        part = index / max(1, count - 1)
        return f"hsl({270 - 230 * part:.0f} 80% {26 + 30 * part:.0f}%)"
    return _COLORS[index % len(_COLORS)]
