"""Line charts as SVG text for pages: no library and no script, a few kilobytes each, colored by the page's style."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 38, 44

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One named curve of finite points, in the order of x."""

    name: str
    points: Sequence[Point]


def chart(title: str, lines: Sequence[Line], *, x: str) -> str:
    """SVG of `lines` over a common pair of linear axes; the vertical one begins at 0 or lower."""
    points = [point for line in lines for point in line.points]
    xs = ticks(min(p[0] for p in points), max(p[0] for p in points), 7)
    ys = ticks(min(0.0, *(p[1] for p in points)), max(p[1] for p in points), 6)
    frame = _Frame(xs[0], max(p[0] for p in points), ys[0], ys[-1])
    inner = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>',
        *(_y_tick(frame, value, ys) for value in ys),
        *(_x_tick(frame, value) for value in xs if value <= frame.high_x),
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>',
        *(_curve(frame, line, number) for number, line in enumerate(lines)),
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


def _y_tick(frame: _Frame, value: float, ys: Sequence[float]) -> str:
    at, decimals = frame.y(value), max(0, -math.floor(math.log10(ys[1] - ys[0])))
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:.{decimals}f}</text>'
    )


def _x_tick(frame: _Frame, value: float) -> str:
    return f'<text class="tick" x="{frame.x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>'


def _curve(frame: _Frame, line: Line, number: int) -> str:
    points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line.points)
    return f'<polyline class="line c{number}" points="{points}"/>'


def _legend(lines: Sequence[Line]) -> str:
    """Names in the top right corner, right to left; a character is taken as 7 units wide."""
    parts, right = [], float(WIDTH - RIGHT)
    for number, line in reversed(list(enumerate(lines))):
        right -= len(line.name) * 7
        parts.append(f'<text class="axis" x="{right:.0f}" y="18">{escape(line.name)}</text>')
        parts.append(f'<line class="line c{number}" x1="{right - 24:.0f}" x2="{right - 6:.0f}" y1="14" y2="14"/>')
        right -= 40
    return "".join(parts)
