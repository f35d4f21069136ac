"""The picture of `docs/architecture.md`: packages by layers with their imports, and the path of a step.

`python docs/_ext/package_graph.py` writes it to `docs/architecture.svg`. A test compares the file with the sources' imports.
"""

import ast
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "architecture.svg"
LAYERS = (
    {
        "forge_lab": "sweeps, scaling laws, comparisons",
        "forge_interp": "inner values, similarity, brains",
        "forge_testing": "checks for plugins",
    },
    {"forge_train": "recipe, start, loop, hooks, report"},
    {"forge_vlm": "images, encoders, fusions"},
    {
        "forge_parallel": "transforms, step, optimizers",
        "forge_models": "decoder, experts, generation",
        "forge_data": "sources, order, packing, loader",
        "forge_ckpt": "verified checkpoints",
    },
    {"forge_core": "configuration, registry, protocols; no torch"},
)
"""Packages from top to bottom, each with its content."""
PATH = (
    ("recipe", "forge_train/recipe"),
    ("start", "run/start.py"),
    ("loader", "forge_data/loading"),
    ("Step", "forge_parallel/step"),
    ("reduce", "step/reduce.py"),
    ("fit", "run/loop.py"),
    ("hooks", "forge_train/hooks"),
)
"""What a step passes through, in order, each with its place."""
WIDTH, BOX, GAP = 1060, 52, 36
"""Pixels: width of the picture, height of a box, and space between layers."""
STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:12px;fill:#222;text-anchor:middle}.name{font-weight:600;font-size:14px}"
    ".small{font-size:11px;fill:#555}.package{fill:#f4f1ea;stroke:#8a8170}.stop{fill:#e8f0f4;stroke:#5f7f8f}"
    ".import{stroke:#8a5a2b;fill:none;opacity:.6;marker-end:url(#tip)}.flow{stroke:#2f6478;stroke-width:1.5;fill:none;marker-end:url(#tip)}"
)


def imports(package: str) -> set[str]:
    """Returns the other packages that a package imports, including lazy imports and those for type checkers."""
    packages = {name for layer in LAYERS for name in layer}
    sources = next(path for folder in ("packages", "apps") for path in (ROOT / folder).glob(f"*/src/{package}"))
    imported = set()
    for file in sources.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported |= {name.partition(".")[0] for name in names} & packages
    return imported - {package}


def picture() -> str:
    """Returns the picture as SVG. An import that others imply has no arrow."""
    boxes, parts = {}, []
    for number, layer in enumerate(LAYERS):
        top, width = 14 + number * (BOX + GAP), (WIDTH - 28 - 20 * (len(layer) - 1)) / len(layer)
        width = min(width, 290)
        left = (WIDTH - width * len(layer) - 20 * (len(layer) - 1)) / 2
        for package, content in layer.items():
            boxes[package] = (left, top, width)
            parts.append(_box("package", left, top, width, package, content))
            left += width + 20
    lower = {package: imports(package) for package in boxes}
    for upper, targets in lower.items():
        direct = sorted(target for target in targets if not any(target in lower[between] for between in targets))
        parts += [_arrow(boxes[upper], boxes[target]) for target in direct]
    top, width = 14 + len(LAYERS) * (BOX + GAP) + 26, (WIDTH - 28 - 22 * (len(PATH) - 1)) / len(PATH)
    caption = "The path of a step; fit repeats it from the loader on"
    parts.append(f'<text class="small" x="{WIDTH / 2:.0f}" y="{top - 22}">{caption}</text>')
    stops = [(14 + number * (width + 22), top) for number in range(len(PATH))]
    parts += [_box("stop", *stop, width, *names) for stop, names in zip(stops, PATH, strict=True)]
    middle = top + BOX / 2
    parts += [f'<path class="flow" d="M{left + width:.0f},{middle} H{left + width + 21:.0f}"/>' for left, _ in stops[:-1]]
    fit, loader = (stops[[name for name, _ in PATH].index(name)][0] + width / 2 for name in ("fit", "loader"))
    parts.append(f'<path class="flow" d="M{fit:.0f},{top + BOX} V{top + BOX + 16} H{loader:.0f} V{top + BOX + 1}"/>')
    height = top + BOX + 26
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="The packages of Forge">'
        f'<style>{STYLE}</style><defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _box(kind: str, left: float, top: float, width: float, name: str, content: str) -> str:
    middle = left + width / 2
    return (
        f'<rect class="{kind}" x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{BOX}" rx="5"/>'
        f'<text class="name" x="{middle:.0f}" y="{top + 22:.0f}">{escape(name)}</text>'
        f'<text class="small" x="{middle:.0f}" y="{top + 40:.0f}">{escape(content)}</text>'
    )


def _arrow(upper: tuple[float, float, float], lower: tuple[float, float, float]) -> str:
    start, end = upper[0] + upper[2] / 2, lower[0] + lower[2] / 2
    top, bottom = upper[1] + BOX, lower[1] - 1
    turn, end_turn = top + 0.9 * GAP, top + 0.5 * GAP  # turns between two layers, so that it crosses no box
    return f'<path class="import" d="M{start:.0f},{top} C{start:.0f},{turn:.0f} {end:.0f},{end_turn:.0f} {end:.0f},{bottom}"/>'


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
