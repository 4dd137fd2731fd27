"""Drawing in SVG: scales, axes and marks. Colours are CSS variables, resolved for pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

FONT = "system-ui, 'DejaVu Sans', 'Liberation Sans', Arial, sans-serif"
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 58, 18, 40, 40

COLOURS = {
    "--page": "#ffffff",
    "--text": "#1d2329",
    "--muted": "#66717d",
    "--grid": "#e4e8ec",
    "--main": "#1f6fbf",
    "--other": "#9aa5b1",
    "--bad": "#c8372d",
    "--target": "#b7791f",
    "--soft": "#1f6fbf22",
}
"""The light palette; a page may define other values for the dark one."""


def nice_ticks(high: float, count: int = 5) -> list[float]:
    """About `count` round values from 0 to at least `high`."""
    if not (high > 0 and math.isfinite(high)):
        return [0.0, 1.0]
    rough = high / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    return [number * step for number in range(math.ceil(high / step - 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten (powers alone if they are many) around [low, high]."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    values = [s * 10.0**power for power in range(first, last + 1) for s in steps]
    below = max((value for value in values if value <= low), default=values[0])
    above = min((value for value in values if value >= high), default=values[-1])
    return [value for value in values if below <= value <= above]


def short_number(value: float) -> str:
    """As short as a tick label should be."""
    if value >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to pixels, with its ticks."""

    ticks: list[float]
    start: float
    end: float
    is_log: bool = False

    @classmethod
    def linear(cls, high: float, start: float, end: float, count: int = 5) -> Axis:
        """From 0 to a round value above `high`."""
        return cls(nice_ticks(high, count), start, end)

    @classmethod
    def for_latencies(cls, values: Sequence[float], start: float, end: float) -> Axis:
        """Logarithmic where the largest is more than 30 times what is usual."""
        present = sorted(value for value in values if value > 0)
        if present and present[-1] > 30 * present[len(present) // 2]:
            return cls(log_ticks(present[0], present[-1]), start, end, is_log=True)
        return cls.linear(1.08 * max(present, default=1.0), start, end, 4)

    def at(self, value: float) -> float:
        """The pixel of `value`, within the axis."""
        low, high = self.ticks[0], self.ticks[-1]
        value = min(max(value, low), high)
        if self.is_log:
            share = math.log(value / low) / math.log(high / low)
        else:
            share = (value - low) / (high - low)
        return self.start + share * (self.end - self.start)


@dataclass(slots=True)
class Panel:
    """One chart under construction; marks are added in the order of drawing."""

    title: str
    x_label: str
    width: int
    height: int
    marks: list[str] = field(default_factory=list)
    _boxes: list[tuple[float, float, float, float]] = field(default_factory=list)

    @property
    def x_range(self) -> tuple[float, float]:
        """Left and right pixel of the plot."""
        return MARGIN_LEFT, self.width - MARGIN_RIGHT

    @property
    def y_range(self) -> tuple[float, float]:
        """Bottom and top pixel of the plot, as an axis wants them."""
        return self.height - MARGIN_BOTTOM, MARGIN_TOP

    def frame(self, x: Axis, y: Axis) -> None:
        """Grid, tick labels and titles."""
        (left, right), (bottom, _) = self.x_range, self.y_range
        suffix = " (log)" if y.is_log else ""
        self.heading(self.title + suffix)
        for tick in y.ticks:
            self.line(left, y.at(tick), right, y.at(tick), "--grid")
            self.text(left - 7, y.at(tick) + 4, short_number(tick), "--muted", anchor="end")
        for tick in x.ticks:
            self.text(x.at(tick), bottom + 16, short_number(tick), "--muted", anchor="middle")
        self.line(left, bottom, right, bottom, "--other")
        middle = (left + right) / 2
        self.text(middle, self.height - 6, self.x_label, "--muted", anchor="middle")

    def legend(self, entries: Iterable[tuple[str, str]]) -> None:
        """(name, colour) from the right end of the title line."""
        at = float(self.width - MARGIN_RIGHT)
        for name, colour in reversed(list(entries)):
            self.text(at, 18, name, "--muted", anchor="end")
            at -= 6.4 * len(name) + 12
            self.marks.append(f'<circle cx="{at:.1f}" cy="14" r="4" fill="var({colour})"/>')
            at -= 14

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str) -> None:
        """A thin straight line."""
        self.marks.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="var({colour})" stroke-width="1"/>'
        )

    def target(self, y: Axis, value: float, name: str) -> None:
        """A dashed line at a limit, unless it lies outside."""
        if not y.ticks[0] <= value <= y.ticks[-1]:
            return
        (left, right), at = self.x_range, y.at(value)
        self.marks.append(
            f'<line x1="{left}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" '
            'stroke="var(--target)" stroke-width="1.5" stroke-dasharray="5 4"/>'
        )
        self.text(right, at - 5, name, "--target", anchor="end")

    def path(self, points: Sequence[tuple[float, float]], colour: str, width: float = 2) -> None:
        """A polyline through pixels."""
        if len(points) < 2:
            return
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.marks.append(
            f'<polyline points="{joined}" fill="none" stroke="var({colour})" '
            f'stroke-width="{width}" stroke-linejoin="round"/>'
        )

    def area(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """A filled shape through pixels, closed along the bottom."""
        if len(points) < 2:
            return
        bottom = self.y_range[0]
        closed = [(points[0][0], bottom), *points, (points[-1][0], bottom)]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in closed)
        self.marks.append(f'<polygon points="{joined}" fill="var({colour})"/>')

    def dot(self, x: float, y: float, colour: str, hint: str = "", radius: float = 4) -> None:
        """A point with a tooltip."""
        title = f"<title>{escape(hint)}</title>" if hint else ""
        self.marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="var({colour})">{title}'
            "</circle>"
        )

    def cross(self, x: float, y: float, hint: str) -> None:
        """A failure."""
        self.marks.append(
            f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" stroke="var(--bad)" '
            f'stroke-width="2" fill="none"><title>{escape(hint)}</title></path>'
        )

    def bar(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A filled rectangle."""
        self.marks.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:.1f}" '
            f'rx="2" fill="var({colour})"/>'
        )

    def text(self, x: float, y: float, words: str, colour: str, anchor: str = "start") -> None:
        """Words whose baseline is at `y`."""
        self.marks.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="11" '
            f'fill="var({colour})">{escape(words)}</text>'
        )

    def heading(self, words: str) -> None:
        """The panel's title."""
        self.marks.append(
            '<text x="8" y="18" font-size="13" font-weight="600" '
            f'fill="var(--text)">{escape(words)}</text>'
        )

    def label(self, x: float, y: float, words: str) -> None:
        """A name above a point, left out where it would cover another one."""
        half = 3.3 * len(words)
        x = min(max(x, MARGIN_LEFT + half), self.width - MARGIN_RIGHT - half)
        box = (x - half, y - 20, x + half, y - 6)
        if any(
            box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
            for other in self._boxes
        ):
            return
        self._boxes.append(box)
        self.text(x, y - 9, words, "--text", anchor="middle")

    def svg(self, place: str = "") -> str:
        """The chart as an element; `place` is extra attributes."""
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="{escape(FONT)}" role="img" '
            f'aria-label="{escape(self.title)}" {place}>' + "".join(self.marks) + "</svg>"
        )


def resolve_colours(svg: str) -> str:
    """`svg` with the light palette's colours in place of variables."""
    for name, colour in COLOURS.items():
        svg = svg.replace(f"var({name})", colour)
    return svg


def spread(count: int, limit: int) -> Callable[[int], bool]:
    """Whether to draw the i-th of `count` marks so that about `limit` are drawn."""
    step = max(1, math.ceil(count / limit))
    return lambda index: index % step == 0
