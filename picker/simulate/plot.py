"""Line charts as inline SVG, in colours of the page's style sheet. No scripts, no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, isfinite, log10

from msgspec import Struct

WIDTH, HEIGHT = 560, 320
LINES = 8
"""Colours; further lines begin anew, with dashes."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 12, 44


class Axis(Struct, frozen=True):
    """One axis: its label, how values are written, and whether equal steps are equal factors."""

    label: str
    write: Callable[[float], str]
    logarithmic: bool = False


class Line(Struct, frozen=True):
    """One line of a chart. `number` decides its colour; points that are not finite are left out."""

    name: str
    number: int
    points: Sequence[tuple[float, float]]


def chart(title: str, across: Axis, up: Axis, lines: Sequence[Line]) -> str:
    """Draw lines; `title` is what screen readers say. Empty when no point can be drawn."""
    drawn = [Line(line.name, line.number, _finite(line.points, across, up)) for line in lines]
    points = [point for line in drawn for point in line.points]
    if not points:
        return ""
    horizontal = _Scale(across, [x for x, _ in points], _LEFT, WIDTH - _RIGHT)
    vertical = _Scale(up, [y for _, y in points], HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        *_grid(horizontal, vertical),
        *(_path(line, horizontal, vertical) for line in drawn if line.points),
        "</svg>",
    ]
    return "\n".join(parts)


def line_class(number: int) -> str:
    """The style of a line, and of its mark in a legend."""
    return f"line l{number % LINES}{' dashed' if number // LINES % 2 else ''}"


class _Scale:
    """From values to pixels, with round values for ticks."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        self.axis = axis
        self._start, self._end = start, end
        if axis.logarithmic:
            self._low, self._high = log10(min(values)), log10(max(values))
            self._low, self._high = _round_down(self._low), _round_up(self._high)
            self.ticks = _decades(self._low, self._high)
        else:
            low, high = min(0.0, *values), max(values)
            step = _step(high - low)
            self._low, self._high = low, max(ceil(high / step - 1e-9) * step, low + step)
            self.ticks = [self._low + step * number for number in range(round((self._high - self._low) / step) + 1)]

    def at(self, value: float) -> float:
        """The pixel of a value."""
        place = log10(value) if self.axis.logarithmic else value
        share = (place - self._low) / (self._high - self._low)
        return round(self._start + share * (self._end - self._start), 1)


_STEPS = (1.0, 2.0, 5.0, 10.0)


def _round_down(exponent: float) -> float:
    decade = floor(exponent + 1e-9)
    return decade + max(log10(step) for step in _STEPS if log10(step) <= exponent - decade + 1e-9)


def _round_up(exponent: float) -> float:
    decade = floor(exponent)
    up = decade + min(log10(step) for step in _STEPS if log10(step) >= exponent - decade - 1e-9)
    return up if up > _round_down(exponent) else up + log10(2)


def _decades(low: float, high: float) -> list[float]:
    steps = (1.0, 2.0, 5.0) if high - low <= 2.5 else (1.0,)
    found = [step * 10.0**decade for decade in range(floor(low), ceil(high) + 1) for step in steps]
    return [value for value in found if low - 1e-9 <= log10(value) <= high + 1e-9]


def _step(extent: float) -> float:
    if extent <= 0:
        return 1.0
    unit = 10.0 ** floor(log10(extent / 4))
    return next(unit * step for step in _STEPS if unit * step * 5 >= extent - 1e-9)


def _finite(points: Sequence[tuple[float, float]], across: Axis, up: Axis) -> list[tuple[float, float]]:
    def usable(value: float, axis: Axis) -> bool:
        return isfinite(value) and (value > 0 or not axis.logarithmic)

    return [(x, y) for x, y in points if usable(x, across) and usable(y, up)]


def _grid(horizontal: _Scale, vertical: _Scale) -> list[str]:
    parts = []
    for value in horizontal.ticks:
        x = horizontal.at(value)
        parts.append(f'<path class="grid" d="M{x} {_TOP}V{HEIGHT - _BOTTOM}"/>')
        label = escape(horizontal.axis.write(value))
        parts.append(f'<text x="{x}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{label}</text>')
    for value in vertical.ticks:
        y = vertical.at(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y}H{WIDTH - _RIGHT}"/>')
        label = escape(vertical.axis.write(value))
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{label}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(
        f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(horizontal.axis.label)}</text>'
    )
    height = (_TOP + HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text class="label" transform="translate(14 {height}) rotate(-90)" text-anchor="middle">'
        f"{escape(vertical.axis.label)}</text>"
    )
    return parts


def _path(line: Line, horizontal: _Scale, vertical: _Scale) -> str:
    places = [(horizontal.at(x), vertical.at(y)) for x, y in line.points]
    style = line_class(line.number)
    dots = ""
    if len(places) <= 12:
        dots = "".join(f'<circle class="{style}" cx="{x}" cy="{y}" r="3"/>' for x, y in places)
    path = "M" + "L".join(f"{x} {y}" for x, y in places)
    return f'<g><title>{escape(line.name)}</title><path class="{style}" d="{path}"/>{dots}</g>'
