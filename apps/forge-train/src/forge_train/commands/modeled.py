"""Shows modeled times: of a step by cause, of the best layouts, and of saves; as text, as JSON, and as a page with charts."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from rich.console import Console as Terminal
from rich.table import Table
from rich.text import Text

from forge_core.terminal import size

if TYPE_CHECKING:
    from forge_parallel.timing.failures import SavePlan
    from forge_parallel.timing.hardware import Hardware
    from forge_parallel.timing.step_time import Efficiency, StepTime
    from forge_train.plan import DryRun
    from forge_train.search import SearchResult

BAR = 32
"""Length of the longest bar in characters."""
COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")
REJECTED = 8
"""Number of rejected candidates that are listed as text; --json has all."""

MEANING: Mapping[str, str] = {
    "matrix products": "of blocks, forward and backward",
    "expert products": "of experts, the busiest rank",
    "attention": "scores and their backward",
    "element-wise": "norms, activations, residuals",
    "recomputation": "forwards done again in the backward",
    "head and loss": "logits are not kept",
    "tensor parallel": "exposed exchanges of the residual stream",
    "context parallel": "exposed exchanges of keys and values",
    "expert parallel": "exposed exchanges of tokens",
    "parameters of data ranks": "gathers that blocks do not hide, and what hiding costs",
    "gradients of data ranks": "reductions that blocks do not hide, and what hiding costs",
    "pipeline waits": "for other stages, by simulating the schedule",
    "optimizer": "update and clipping",
    "host": "queueing kernels takes longer than running them",
}
"""Part of a step -> what it counts."""


def caveat(efficiency: "Efficiency") -> str:
    """Returns what to think of modeled times."""
    fitted = f"constants of {efficiency.dated}" if efficiency.dated else "own constants"
    error = efficiency.error or "their error on other runs is not known"
    return f"Times are modeled, not measured ({fitted}): {error}."


def draw_time(time: "StepTime", hardware: "Hardware", efficiency: "Efficiency", out: Terminal) -> None:
    """Prints the modeled step by cause."""
    out.print(
        Text(
            f"A modeled step on {hardware.name}, {seconds(time.seconds)}: {time.tokens_per_second:,.0f} tokens/s of a GPU, "
            f"{time.utilization:.1%} MFU",
            style="bold",
        )
    )
    table = Table.grid(padding=(0, 2))
    longest = max(time.parts.values())
    for index, (name, spent) in enumerate(sorted(time.parts.items(), key=lambda item: -item[1])):
        if spent * 500 < time.seconds:
            continue
        bar = Text("█" * max(1, round(BAR * spent / longest)), style=COLORS[index % len(COLORS)])
        table.add_row(f"  {name}", Text(f"{spent / time.seconds:.1%}", justify="right"), bar, Text(MEANING[name], style="dim"))
    out.print(table)
    out.print(Text(caveat(efficiency), style="dim"))


def draw_saves(saves: "SavePlan", time: "StepTime", out: Terminal) -> None:
    """Prints how often to save."""
    steps = max(1, round(saves.interval / time.seconds))
    out.print(
        f"Saves: training stops for about {seconds(saves.stall)} at each, and a failure comes about every "
        f"{seconds(saves.between_failures)}. Save every {seconds(saves.interval)}, checkpoint.every = {steps:,}: "
        f"{saves.lost():.2%} of the time is lost (Daly, 2006)."
    )


def draw_search(
    found: "SearchResult", recipe: str, world: int, hardware: "Hardware", efficiency: "Efficiency", out: Terminal
) -> None:
    """Prints the best layouts, the lines of the best one, and why others are not among them."""
    best = found.best[0]
    out.print(
        Text(
            f"The fastest layouts of {recipe} on {world:,} {hardware.name}, within {size(found.memory)} for each rank",
            style="bold",
        )
    )
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("", "layout", "step", "tokens/s of a GPU", "MFU", "memory"):
        table.add_column(name, justify="left" if name in ("", "layout") else "right", no_wrap=name != "layout")
    for number, one in enumerate(found.best, 1):
        time = one.time
        held = size(one.memory) if one.counted else f"about {size(one.memory)}"
        row = str(one), seconds(time.seconds), f"{time.tokens_per_second:,.0f}", f"{time.utilization:.1%}", held
        table.add_row(str(number), *row)
    out.print(table)
    out.print()
    out.print(Text("Lines for the recipe:", style="bold"))
    for line in best.fragment().split("\n"):
        out.print(f"  {line}")
    for title, rows in _others(found):
        out.print()
        out.print(Text(title, style="bold"))
        for row in rows:
            out.print(f"  {row}")
    out.print()
    out.print(
        Text(
            f"{found.priced:,} candidates in {found.seconds:.0f} s. A dry run counted the memory of the first layout; that of "
            f"the others is an estimate from shapes: plan one to count it. {caveat(efficiency)}",
            style="dim",
        )
    )


def _others(found: "SearchResult") -> Iterator[tuple[str, list[str]]]:
    """Yields why other kinds of layouts are not among the best."""
    last = found.best[-1].time.seconds
    if found.rejected:
        rows = [f"{one.candidate} ({seconds(one.candidate.time.seconds)}): {one.reason}" for one in found.rejected[:REJECTED]]
        yield "Faster, but", rows + _more(len(found.rejected))
    if found.refused:
        yield "Refused by check", [f"{count} candidates: {reason}" for reason, count in list(found.refused.items())[:REJECTED]]
    if found.slower:
        rows = [
            f"{one}: {seconds(one.time.seconds)}, {one.time.seconds / last - 1:.1%} slower than the last" for one in found.slower
        ]
        yield "Slower, if they fit", rows[:REJECTED] + _more(len(rows))


def _more(count: int) -> list[str]:
    return [f"and {count - REJECTED} more kinds of layouts, with --json"] if count > REJECTED else []


def search_as_json(found: "SearchResult") -> dict[str, Any]:
    """Returns a search as plain data."""
    return {
        "memory": found.memory,
        "best": [one.as_json() for one in found.best],
        "rejected": [one.candidate.as_json() | {"reason": one.reason} for one in found.rejected],
        "slower": [one.as_json() for one in found.slower],
        "refused": found.refused,
        "too_large": found.too_large,
        "candidates": found.priced,
        "seconds": found.seconds,
    }


def seconds(value: float) -> str:
    """Returns a time with a unit: `350 ms`, `7.74 s`, `12 min`, `3.1 h`."""
    if value < 1:
        return f"{1000 * value:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.3g} h"


def page(plan: "DryRun", recipe: str, time: "StepTime | None", saves: "SavePlan | None", efficiency: "Efficiency") -> str:
    """Returns a page with charts of the modeled step, of the memory of the fullest rank, and of its traffic."""
    from forge_train.report.html import document, facts, rows, section

    fullest = max(plan.ranks, key=lambda estimate: sum(estimate.peak.values()))
    shown = {"GPUs": f"{plan.layout.world:,}", "layout": str(plan.layout), "peak of a rank": size(sum(fullest.peak.values()))}
    parts = []
    if time is not None:
        shown |= {"modeled step": seconds(time.seconds), "tokens/s of a GPU": f"{time.tokens_per_second:,.0f}"}
        shown |= {"MFU": f"{time.utilization:.1%}"}
        spent = {name: (value, f"{seconds(value)}, {value / time.seconds:.1%}") for name, value in time.parts.items()}
        parts.append(section("Where the time goes", bars(spent) + f'<p class="dim">{escape(caveat(efficiency))}</p>'))
    held = {name: (float(value), size(value)) for name, value in fullest.peak.items() if value}
    parts.append(section(f"Memory of rank {fullest.rank} at its peak", bars(held)))
    flows = [flow for flow in fullest.flows if flow.axis != "self"]
    sent = {f"{flow.axis}, {flow.kind.replace('_', '-')}": (float(flow.wire), size(flow.wire)) for flow in flows if flow.wire}
    parts.append(section(f"Bytes that rank {fullest.rank} sends in a step", bars(sent) if sent else ""))
    if saves is not None and time is not None:
        body = [
            ["a save stops training for", seconds(saves.stall)],
            ["time between failures", seconds(saves.between_failures)],
            ["best interval between saves", f"{seconds(saves.interval)}, {max(1, round(saves.interval / time.seconds)):,} steps"],
            ["time lost", f"{saves.lost():.2%}"],
        ]
        parts.append(section("Saves", rows(["", ""], body)))
    head = f"<h1>{escape(recipe)} on {plan.layout.world:,} GPUs</h1>"
    return document(f"Plan of {recipe}", [head, facts(shown), *parts, f'<p class="dim">{escape(plan.method)}</p>'])


def bars(values: Mapping[str, tuple[float, str]]) -> str:
    """Returns a bar chart as SVG: for each name a bar, and its value as text; the largest first."""
    ordered: Sequence[tuple[str, tuple[float, str]]] = sorted(values.items(), key=lambda item: -item[1][0])
    longest = max((value for value, _ in values.values()), default=0.0) or 1.0
    height, left, width = 26, 230, 560
    lines = []
    for index, (name, (value, told)) in enumerate(ordered):
        y = 8 + index * height
        length = max(1.0, width * value / longest)
        lines.append(
            f'<text x="{left - 10}" y="{y + 15}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{height - 6}" rx="3" style="fill: var(--c{index % 8})"/>'
            f'<text class="tick" x="{left + length + 8:.1f}" y="{y + 15}">{escape(told)}</text>'
        )
    total = 16 + len(ordered) * height
    return f'<svg viewBox="0 0 1000 {total}" role="img">{"".join(lines)}</svg>\n'
