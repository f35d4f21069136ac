"""Picture of a run's report for the landing page: its facts and two of its charts as one SVG, without a script.

`python docs/_ext/report_picture.py RUN` writes `docs/report.svg`. The picture of the repository is that of

    forge-train run debug --train.max_steps=300 --optimizer.lr=1e-2 --hooks.0.every=2 --hooks.1.every=25
"""

import re
import sys
from collections.abc import Sequence
from html import escape, unescape
from pathlib import Path

from line_chart import HEIGHT, WIDTH, Line, chart

from forge_train.report.charts import Chart, charts
from forge_train.report.record import RunRecord, read_record
from forge_train.report.results import overview

PICTURE = Path(__file__).parents[1] / "report.svg"
SHOWN = {"Loss": "loss in nats per token", "Gradient norm": "gradient norm before clipping"}
"""Titles of the charts, and what the picture writes above them."""
GAP, TOP = 24, 150
COLORS = ("#2563eb", "#d9480f", "#15803d")
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1c2330}.name{font-size:26px;font-weight:700}.dim,.tick,.axis{fill:#5d6675}"
    ".fact{font-size:19px;font-weight:600}.title{font-size:14px;font-weight:600}.grid{stroke:#dfe4ea}"
    ".line{fill:none;stroke-width:2}" + "".join(f".c{number}{{stroke:{color}}}" for number, color in enumerate(COLORS))
)


def picture(run: RunRecord) -> str:
    """SVG with the name, the facts and the charts of `SHOWN` of a run that has them."""
    width, height = 2 * WIDTH + 3 * GAP, TOP + HEIGHT + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="Report of a run">',
        f'<style>{STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text class="name" x="{GAP}" y="44">{escape(run.label)}</text>',
        f'<text class="dim" x="{GAP}" y="68">{escape(run.status)}</text>',
    ]
    left = float(GAP)
    for name, value in facts_of(run):
        parts.append(f'<text class="dim" x="{left:.0f}" y="106">{escape(name)}</text>')
        parts.append(f'<text class="fact" x="{left:.0f}" y="130">{escape(value)}</text>')
        left += 11 * max(len(name), len(value)) + 36
    drawn = {one.title: one for one in charts([run])}
    for number, (title, heading) in enumerate(SHOWN.items()):
        place = f'<svg x="{GAP + number * (WIDTH + GAP)}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" '
        inner = chart(heading, lines_of(drawn[title]), x="step")
        parts += [
            f'<rect x="{GAP + number * (WIDTH + GAP)}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#f6f8fa"/>',
            inner.replace("<svg ", place, 1),
        ]
    return "\n".join([*parts, "</svg>\n"])


def facts_of(run: RunRecord) -> list[tuple[str, str]]:
    """(name, value) of the facts at the top of the report."""
    return [(unescape(name), unescape(value)) for name, value in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", overview([run]))]


def lines_of(one: Chart) -> Sequence[Line]:
    return [
        Line(one.labels[label], list(zip(map(float, series.steps), series.values, strict=True)))
        for _, label, series, _ in one.curves
    ]


if __name__ == "__main__":
    PICTURE.write_text(picture(read_record(Path(sys.argv[1]))), encoding="utf-8")
