"""Plots points and lines over linear or logarithmic axes, as SVG text in the colors of the report's pages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 38, 48
COLORS = 4
"""Number of color classes `c0`, `c1`, ... of the page's style; further series reuse them."""

Point = tuple[float, float]


@dataclass(frozen=True)
class FigureSeries:
    """Points of one color, drawn as dots or joined by a line. A series without a name belongs to the named one of its color."""

    name: str
    points: Sequence[Point]
    line: bool = False
    color: int | None = None


def plot(title: str, series: Sequence[FigureSeries], *, x: str, y: str, log_x: bool = True, log_y: bool = True) -> str:
    """Returns the SVG of all series over common axes, or "" if no point can be drawn. Logarithmic axes skip values <= 0."""

    def drawn(point: Point) -> bool:
        px, py = point
        return math.isfinite(px) and math.isfinite(py) and not (log_x and px <= 0) and not (log_y and py <= 0)

    kept = [
        FigureSeries(
            one.name, [point for point in one.points if drawn(point)], one.line, index if one.color is None else one.color
        )
        for index, one in enumerate(series)
    ]
    points = [point for one in kept for point in one.points]
    if not points:
        return ""
    across, up = _Scale.over([p[0] for p in points], log_x), _Scale.over([p[1] for p in points], log_y)

    def at(point: Point) -> str:
        right = LEFT + across.part(point[0]) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - up.part(point[1]) * (HEIGHT - TOP - BOTTOM)
        return f"{right:.1f},{down:.1f}"

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{LEFT}" y="18">{escape(title)}<tspan class="axis" dx="8">{escape(y)}</tspan></text>',
    ]
    for value in up.ticks():
        height = at((across.low, value)).split(",")[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height}" y2="{height}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{float(height) + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for value in across.ticks():
        right = at((value, up.low)).split(",")[0]
        parts.append(f'<text class="tick" x="{right}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{number(value)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>')
    for one in kept:
        color, hint = _class(one), f"<title>{escape(one.name)}</title>"
        if one.line:
            parts.append(f'<polyline class="line {color}" points="{" ".join(map(at, one.points))}">{hint}</polyline>')
        for point in () if one.line else one.points:
            cx, cy = at(point).split(",")
            parts.append(f'<circle class="dot {color}" cx="{cx}" cy="{cy}" r="4">{hint}</circle>')
    return "\n".join([*parts, _legend(kept), "</svg>"])


def number(value: float) -> str:
    """Formats a number with four digits: `3e9` as `3G`, `0.002` unchanged, larger numbers with an exponent."""
    if value == 0:
        return "0"
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit <= abs(value) < 1000 * unit:
            return f"{value / unit:.4g}{suffix}"
    return f"{value:.4g}".replace("e+", "e")


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float], log: bool) -> "_Scale":
        """Returns a scale around the values, with a margin."""
        low, high = min(values), max(values)
        if log:
            room = (high / low) ** 0.04 if high > low else 1.1
            return cls(low / room, high * room, True)
        room = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
        return cls(low - room, high + room, False)

    def part(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Returns round values within the scale: powers of ten (also 2 and 5 times them if few), or steps of 1, 2 or 5."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            many = last - first > 4
            steps = (1,) if many else (1, 2, 5)
            stride = math.ceil((last - first) / 8)
            found = [step * 10.0**power for power in range(first, last + 1, stride) for step in steps]
            inside = [value for value in found if self.low <= value <= self.high]
            if len(inside) > 1:
                return inside
        raw = (self.high - self.low) / 6
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
        begin, end = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(index * step, 12) for index in range(begin, end + 1)]


def _class(one: FigureSeries) -> str:
    return f"c{(one.color or 0) % COLORS}"


def _legend(series: Sequence[FigureSeries]) -> str:
    """Returns a legend in the top right corner, right to left, assuming 7 units per character; empty for more than `COLORS`
    names, which the tooltips show."""
    parts, right = [], float(WIDTH - RIGHT)
    named = [one for one in series if one.name]
    for one in reversed(named if len(named) <= COLORS else []):
        right -= len(one.name) * 7
        parts.append(f'<text class="axis" x="{right:.0f}" y="18">{escape(one.name)}</text>')
        parts.append(f'<circle class="dot {_class(one)}" cx="{right - 10:.0f}" cy="14" r="4"/>')
        right -= 30
    return "".join(parts)
