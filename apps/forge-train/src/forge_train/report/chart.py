"""Line charts as SVG text: no library, a few kilobytes each, colored by the page's light or dark style."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 38, 44
POINTS = 400
"""Points drawn per line; more are thinned to the lowest and highest of each stretch, so spikes stay visible."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One named curve; points with a value that is not finite leave a gap."""

    name: str
    points: Sequence[Point]
    dots: bool = False


@dataclass(frozen=True)
class Reference:
    """A labeled horizontal line."""

    label: str
    value: float


def chart(
    title: str, lines: Sequence[Line], *, x: str, y: str, references: Sequence[Reference] = (), from_zero: bool = False
) -> str:
    """SVG of `lines` over a common pair of linear axes; "" when no line has a finite point."""
    finite = [point for line in lines for point in line.points if math.isfinite(point[0]) and math.isfinite(point[1])]
    if not finite:
        return ""
    references = [item for item in references if math.isfinite(item.value)]
    xs = ticks(min(p[0] for p in finite), max(p[0] for p in finite), 7)
    values = [p[1] for p in finite] + [item.value for item in references] + ([0.0] if from_zero else [])
    ys = ticks(min(values), max(values), 6)
    frame = _Frame(min(xs[0], min(p[0] for p in finite)), max(p[0] for p in finite), ys[0], ys[-1])
    inner = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{LEFT}" y="18">{escape(title)}<tspan class="axis" dx="8">{escape(y)}</tspan></text>',
        *(_y_tick(frame, value, ys) for value in ys),
        *(_x_tick(frame, value, xs) for value in xs if frame.low_x <= value <= frame.high_x),
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>',
        *(_curve(frame, line, number) for number, line in enumerate(lines)),
        *(_reference(frame, item) for item in references),
        _legend(lines) if len(lines) > 1 else "",
        "</svg>",
    ]
    return "\n".join(part for part in inner if part)


@dataclass(frozen=True)
class _Frame:
    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.low_x) / ((self.high_x - self.low_x) or 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low_y) / ((self.high_y - self.low_y) or 1.0) * (HEIGHT - TOP - BOTTOM)


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round values, 1, 2 or 5 times a power of ten apart, that enclose [low, high]."""
    if high <= low:
        high = low + (abs(low) * 0.1 or 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def thin(points: Sequence[Point], limit: int = POINTS) -> list[Point]:
    """At most about `limit` points: the lowest and highest of each stretch, in order, and always both ends."""
    if len(points) <= limit:
        return list(points)
    stretches = max(1, limit // 2)
    kept = {0, len(points) - 1}
    for number in range(stretches):
        start, stop = number * len(points) // stretches, (number + 1) * len(points) // stretches
        finite = [i for i in range(start, stop) if math.isfinite(points[i][1])]
        if len(finite) < stop - start:
            kept.update(i for i in range(start, stop) if not math.isfinite(points[i][1]))
        if finite:
            kept.update((min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])))
    return [points[i] for i in sorted(kept)]


def label(value: float, step: float = 0.0) -> str:
    """A tick's text: 1500000 -> 1.5M, 0.0003 -> 3e-4, with as many decimals as the distance `step` needs."""
    size = abs(value)
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:g}{suffix}"
    if 0 < size < 1e-2 or 0 < step < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}" if value else "0"
    return f"{value:.{max(0, -math.floor(math.log10(step)))}f}" if 0 < step < 1 else f"{value:g}"


def _y_tick(frame: _Frame, value: float, ys: Sequence[float]) -> str:
    at = frame.y(value)
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label(value, ys[1] - ys[0])}</text>'
    )


def _x_tick(frame: _Frame, value: float, xs: Sequence[float]) -> str:
    text = label(value, xs[1] - xs[0])
    return f'<text class="tick" x="{frame.x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{text}</text>'


def _curve(frame: _Frame, line: Line, number: int) -> str:
    runs: list[list[str]] = [[]]
    for px, py in thin(line.points):
        if math.isfinite(px) and math.isfinite(py):
            runs[-1].append(f"{frame.x(px):.1f},{frame.y(py):.1f}")
        elif runs[-1]:
            runs.append([])
    drawn = [f'<polyline class="line c{number}" points="{" ".join(run)}"/>' for run in runs if len(run) > 1]
    for run in runs:
        if line.dots or len(run) == 1:
            drawn += [f'<circle class="dot c{number}" cx="{at.split(",")[0]}" cy="{at.split(",")[1]}" r="3"/>' for at in run]
    return "".join(drawn)


def _reference(frame: _Frame, item: Reference) -> str:
    at = frame.y(item.value)
    return (
        f'<line class="reference" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text class="reference-label" x="{WIDTH - RIGHT - 4}" y="{at - 6:.1f}" text-anchor="end">{escape(item.label)}</text>'
    )


def _legend(lines: Sequence[Line]) -> str:
    """Names in the top right corner, right to left; a character is taken as 7 units wide."""
    parts, right = [], float(WIDTH - RIGHT)
    for number, line in reversed(list(enumerate(lines))):
        right -= len(line.name) * 7
        parts.append(f'<text class="axis" x="{right:.0f}" y="18">{escape(line.name)}</text>')
        parts.append(f'<line class="line c{number}" x1="{right - 24:.0f}" x2="{right - 6:.0f}" y1="14" y2="14"/>')
        right -= 40
    return "".join(parts)
