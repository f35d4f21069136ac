"""Pictures of learning-rate schedules, drawn by the schedules themselves when the pages are built.

In a page, `curves` draws one chart for every schedule that is installed: the factor of each step of a run of 1000, a line
for each of the settings that the schedule gives as its examples. `python docs/_ext/forge_curves.py NAME FILE.svg` writes one
to a file.
"""

import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

from line_chart import Line, chart

from forge_core.component import Component
from forge_core.registry import Registry

STEPS = 1000
COLORS = ("#2563eb", "#c2410c", "#15803d", "#7c3aed")
"""Read well on a light and on a dark page."""


def pictures() -> Iterator[tuple[str, str]]:
    """(name, SVG) of every schedule of the registry, by name."""
    registry = Registry()
    for entry in registry.of("forge.schedules"):
        yield entry.name, picture(entry.name, registry.load_entry(entry))


def picture(name: str, schedule: type[Component]) -> str:
    """SVG with the curves of a schedule's examples over a run of `STEPS` steps."""
    with TemporaryDirectory() as folder:
        examples = list(schedule.examples(Path(folder)))[: len(COLORS)]
    lines = [Line(settings(example), curve(example)) for example in examples]
    drawn = chart(name, lines, x=f"step of {STEPS}")
    return drawn.replace("<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" class="curves {name}" ', 1).replace(
        ">", f">{style()}", 1
    )


def curve(schedule: Component) -> list[tuple[float, float]]:
    """(step, factor) of every step of the run."""
    factor = schedule.build(STEPS)
    return [(float(step), factor(step)) for step in range(STEPS)]


def settings(schedule: Component) -> str:
    """What differs from the defaults, but the warm-up: `shape = "cosine"`; `by default` where nothing does."""
    changed = [item.name for item in fields(schedule) if getattr(schedule, item.name) != item.default and item.name != "warmup"]
    return ", ".join(f"{name} = {getattr(schedule, name)}" for name in changed) or "by default"


def style() -> str:
    """Colors of the lines; text takes the page's color."""
    colors = "".join(f".curves .c{number}{{stroke:{color}}}" for number, color in enumerate(COLORS))
    return (
        "<style>.curves{max-width:720px;font-family:system-ui,sans-serif}.curves text{fill:currentColor;font-size:12px}"
        ".curves .title{font-weight:600;font-size:14px}.curves .axis{font-weight:400}"
        f".curves .grid{{stroke:currentColor;opacity:.15}}.curves .line{{fill:none;stroke-width:1.8}}{colors}</style>"
    )


def setup(app: object) -> dict[str, bool]:
    """Registers the directive `curves`."""
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    class Curves(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            return [nodes.raw("", svg, format="html") for _, svg in pictures()]

    app.add_directive("curves", Curves)  # type: ignore[attr-defined]
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(dict(pictures())[sys.argv[1]], encoding="utf-8")
