"""Picture of the learning-rate schedules for their page, drawn by the schedules themselves.

`python docs/_ext/forge_curves.py` writes `docs/concepts/schedules.svg`: a chart for every installed schedule with the factor
over a run of 1000 steps, a line for each of the settings that the schedule gives as its examples. A test compares the file.
"""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

from line_chart import HEIGHT, WIDTH, Line, chart

from forge_core.component import Component
from forge_core.registry import Registry

PICTURE = Path(__file__).parents[1] / "concepts" / "schedules.svg"
STEPS, SHOWN = 1000, 4
"""Steps of the run, and how far apart the drawn ones are."""
COLUMNS, GAP = 2, 24
COLORS = ("#2563eb", "#c2410c", "#15803d", "#7c3aed")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1c2330}.tick,.axis{fill:#5d6675}.title{font-size:14px;font-weight:600}"
    ".grid{stroke:#dfe4ea}.line{fill:none;stroke-width:1.8}"
    + "".join(f".c{number}{{stroke:{color}}}" for number, color in enumerate(COLORS))
)


def picture() -> str:
    """SVG with the charts of all schedules, two in a row."""
    drawn = list(charts())
    rows = -(-len(drawn) // COLUMNS)
    width, height = COLUMNS * (WIDTH + GAP) + GAP, rows * (HEIGHT + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="Schedules">',
        f'<style>{STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, (_, svg) in enumerate(drawn):
        x, y = GAP + number % COLUMNS * (WIDTH + GAP), GAP + number // COLUMNS * (HEIGHT + GAP)
        parts.append(svg.replace("<svg ", f'<svg x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" ', 1))
    return "\n".join([*parts, "</svg>\n"])


def charts() -> Iterator[tuple[str, str]]:
    """Yields (name, SVG) of every schedule of the registry, by name."""
    registry = Registry()
    for entry in registry.of("forge.schedules"):
        with TemporaryDirectory() as folder:
            examples = list(registry.load_entry(entry).examples(Path(folder)))[: len(COLORS)]
        lines = [Line(settings(example), curve(example)) for example in examples]
        yield entry.name, chart(entry.name, lines, x=f"step of {STEPS}")


def curve(schedule: Component) -> list[tuple[float, float]]:
    """Returns (step, factor) of every step that is drawn; the last one is the last step of the run."""
    factor = schedule.build(STEPS)
    return [(float(step), factor(step)) for step in (*range(0, STEPS, SHOWN), STEPS - 1)]


def settings(schedule: Component) -> str:
    """Returns what differs from the defaults, except for the warm-up: `shape = cosine`; `by default` where nothing does."""
    changed = [item.name for item in fields(schedule) if getattr(schedule, item.name) != item.default and item.name != "warmup"]
    return ", ".join(f"{name} = {getattr(schedule, name)}" for name in changed) or "by default"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
