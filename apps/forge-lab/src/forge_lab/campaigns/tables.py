"""Tables of a campaign: `results.csv`, `results.json`, `table.md`, `efficiency.svg` and `calibration.json`.

All of them are made from the raw records by `write_tables`; the same records give the same bytes.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from forge_core.config.toml import value_text
from forge_core.files import replace_file
from forge_lab.campaigns.campaign import WORLD, series_of
from forge_lab.campaigns.records import FORMAT, read_campaign_record, recorded_entry, writing
from forge_lab.campaigns.results import STATUSES, EntryResult, Quartiles, read_result
from forge_lab.figures import FigureSeries, plot

CSV, JSON, TABLE, PLOT, CALIBRATION = "results.csv", "results.json", "table.md", "efficiency.svg", "calibration.json"
DERIVED = (CSV, JSON, TABLE, PLOT, CALIBRATION)
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.title{font-size:14px;font-weight:600}.axis,.tick{fill:#555}"
    ".grid{stroke:#ddd}.line{fill:none;stroke-width:2}.c0{stroke:#2f6bb0}.c1{stroke:#c2562d}.c2{stroke:#3a8a4d}.c3{stroke:#7d4fa3}"
    ".dot{stroke:none}.dot.c0{fill:#2f6bb0}.dot.c1{fill:#c2562d}.dot.c2{fill:#3a8a4d}.dot.c3{fill:#7d4fa3}"
)


@dataclass(frozen=True)
class CampaignResults:
    """Parsed results of a campaign.

    Attributes:
        about: record of the campaign.
        results: results of all entries, in order.
        efficiency: tokens per second and rank, as a fraction of those of the smallest world of the series that has a result; of
            entries in a series with two results at least.
        base: name of the entry to which the efficiency of an entry is relative.
    """

    about: Mapping[str, Any]
    results: Sequence[EntryResult]
    efficiency: Mapping[str, float] = field(default_factory=dict)
    base: Mapping[str, str] = field(default_factory=dict)


def read_results(directory: Path) -> CampaignResults:
    """Parses the raw records of a campaign.

    Raises:
        ForgeError: the directory has no campaign, or its record is damaged.
    """
    about = read_campaign_record(directory)
    results = [
        replace(read_result(directory / "entries" / name, int(about["skip"])), values=entry["values"], world=entry["world"])
        for name, entry in about["entries"].items()
    ]
    curves: dict[str, list[tuple[float, EntryResult]]] = {}
    for result in results:
        if result.per_rank is not None:
            curves.setdefault(series_of(result.values, about["series"]), []).append((result.per_rank, result))
    efficiency: dict[str, float] = {}
    base: dict[str, str] = {}
    for items in curves.values():
        if len(items) < 2:
            continue
        smallest, first = min(items, key=lambda item: item[1].world)
        for rate, result in items:
            efficiency[result.name], base[result.name] = rate / smallest, first.name
    return CampaignResults(about, results, efficiency, base)


def write_tables(directory: Path) -> CampaignResults:
    """Writes all tables of a campaign from its raw records.

    Raises:
        ForgeError: the directory has no campaign, or cannot be written.
    """
    found = read_results(directory)
    texts = {
        CSV: csv_text(found),
        JSON: json.dumps(as_json(found), indent=1, default=str) + "\n",
        TABLE: table_text(found),
        PLOT: plot_text(found),
        CALIBRATION: json.dumps(calibration(directory, found), indent=1, default=str) + "\n",
    }
    with writing(directory):
        for name, text in texts.items():
            if text:
                replace_file(directory / name, text.encode())
            else:  # of an earlier state of the campaign
                (directory / name).unlink(missing_ok=True)
    return found


def as_json(found: CampaignResults) -> dict[str, Any]:
    """Returns the results as JSON."""
    entries = [
        result.as_json() | {"efficiency": found.efficiency.get(result.name), "efficiency_base": found.base.get(result.name)}
        for result in found.results
    ]
    return {**found.about, "entries": entries}


def _names(found: CampaignResults) -> list[str]:
    """Returns the names of the entries' values, without the number of ranks, which has a column of its own."""
    return [name for name in dict.fromkeys(name for result in found.results for name in result.values) if name != WORLD]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else value_text(value)


def _parts(found: CampaignResults) -> list[str]:
    return list(dict.fromkeys(part for result in found.results for part in result.split))


def csv_text(found: CampaignResults) -> str:
    """Returns one line per entry with unrounded numbers; what is not known is empty."""
    names, parts = _names(found), _parts(found)
    columns = [
        *(
            "entry",
            "status",
            *(f"values.{name}" for name in names),
            "ranks",
            "axes",
            "parameters",
            "micro_batch",
            "micro_batches",
            "length",
            "measured",
        ),
        *("step_seconds", "step_seconds_q1", "step_seconds_q3", "tokens_per_second", "tokens_per_second_per_rank", "mfu"),
        *("model_tflops", "peak_memory_bytes", "memory_of", "loss", "efficiency", "efficiency_base", "hardware", "torch"),
        *(f"seconds_{part}" for part in parts),
        *("seconds", "message"),
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for one in found.results:
        step = one.step_seconds or Quartiles(0.0, None, None)
        writer.writerow(
            [
                *(one.name, one.status, *(_shown(one.values[name]) if name in one.values else "" for name in names)),
                *(one.world, one.layout, one.parameters, one.micro_batch, one.micro_batches, one.length, one.measured or None),
                *(step.median if one.step_seconds else None, step.low, step.high),
                *(one.tokens_per_second.median if one.tokens_per_second else None, one.per_rank, one.mfu, one.model_tflops),
                *(one.memory, one.memory_of, one.loss, found.efficiency.get(one.name), found.base.get(one.name)),
                *(one.hardware, one.torch, *(one.split.get(part) for part in parts), one.seconds, one.message),
            ]
        )
    return text.getvalue()


def table_rows(found: CampaignResults) -> tuple[list[str], list[list[str]]]:
    """Returns the columns and rows for people. Columns without any value are left out."""
    names = _names(found)
    columns = [*names, "ranks", "axes", "micro-batch", "tokens/s", "per rank", "MFU", "step", "quartiles", "memory", "loss"]
    body = []
    for one in found.results:
        step, rate, share = one.step_seconds, one.tokens_per_second, found.efficiency.get(one.name)
        spread = f"{step.low:.4g} to {step.high:.4g} s" if step and step.low is not None and step.high is not None else ""
        batch = f"{one.micro_batch} x {one.micro_batches}" if one.micro_batch is not None else ""
        body.append(
            [
                *(_shown(one.values[name]) if name in one.values else "" for name in names),
                *(str(one.world), one.layout, batch, f"{rate.median:,.0f}" if rate else ""),
                *(f"{one.per_rank:,.0f}" if one.per_rank else "", f"{one.mfu:.1%}" if one.mfu is not None else ""),
                *(f"{step.median:.4g} s" if step else "", spread),
                f"{one.memory / 2**30:.2f} GiB" if one.memory is not None else "",
                f"{one.loss:.4f}" if one.loss is not None else "",
                f"{share:.1%}" if share is not None else "",
                one.status + (f": {_first(one.message)}" if one.message else ""),
            ]
        )
    columns += ["efficiency", "result"]
    kept = [index for index, name in enumerate(columns) if name == "result" or any(row[index] for row in body)]
    return [columns[index] for index in kept], [[row[index] for index in kept] for row in body]


def _first(message: str) -> str:
    """Returns a message on one line: the last line of several, which is the cause in a traceback, or the only one."""
    lines = [line.strip() for line in message.split("\n") if line.strip()]
    return (lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}")[:300] if lines else ""


def table_text(found: CampaignResults) -> str:
    """Returns the page of the tables in Markdown."""
    about = found.about
    lines = [f"# {about['title']}", ""]
    if about["description"]:
        lines += [about["description"].strip(), ""]
    lines += [*_markdown(*table_rows(found)), "", *_notes(found), ""]
    if found.efficiency:
        lines += [f"![Scaling efficiency]({PLOT})", ""]
    if parts := _parts(found):
        body = []
        for one in found.results:
            if one.split:
                total = sum(one.split.values())
                seconds = [one.split.get(part, 0.0) for part in parts]
                body.append([one.name, *(f"{value:.4g} s, {value / total:.1%}" if total else "" for value in seconds)])
        lines += ["## Where the time of a step goes", "", *_markdown(["entry", *parts], body), ""]
        lines += ["Of rank 0 in the profiled steps, which are not among the measured ones. The parts sum to the step.", ""]
    return "\n".join(lines)


def _markdown(columns: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("\\", "\\\\").replace("|", "\\|") for cell in cells) + " |"

    return [line(columns), "|" + "---|" * len(columns), *map(line, body)]


def _notes(found: CampaignResults) -> list[str]:
    """Returns what the numbers mean, and on what they were measured."""
    about = found.about
    counts = {status: sum(one.status == status for one in found.results) for status in STATUSES}
    machines = sorted({one.hardware for one in found.results if one.hardware})
    versions = sorted({one.torch for one in found.results if one.torch})
    every = "each step" if about["every"] == 1 else f"every {about['every']} steps"
    lines = [
        f"{len(found.results)} entries: " + ", ".join(f"{count} {status}" for status, count in counts.items() if count) + ".",
        f"Each entry ran {about['steps']} steps. Numbers are medians, and quartiles, of the measurements of {every} after the "
        f"first {about['skip']} steps.",
        "Memory is the peak of rank 0.",
    ]
    if found.efficiency:
        names = ", ".join(about["series"])
        lines.append(
            "Efficiency is tokens/s per rank relative to the smallest number of ranks with a result"
            + (f" and the same {names}." if names else ".")
        )
    if machines:
        lines.append(f"Measured on {'; '.join(machines)}" + (f", torch {', '.join(versions)}." if versions else "."))
    if any(one.memory_of == "host" for one in found.results):
        lines.append("Without an accelerator there is no MFU, and memory is the resident memory of the process.")
    return ["\n".join(lines)]


def plot_text(found: CampaignResults) -> str:
    """Returns the plot of the scaling efficiency as an SVG file; empty if no series has two results."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for one in found.results:
        if one.name in found.efficiency:
            curve = curves.setdefault(series_of(one.values, found.about["series"]), [])
            curve.append((float(one.world), 100 * found.efficiency[one.name]))
    series: list[FigureSeries] = []
    for color, (name, points) in enumerate(curves.items()):
        series += [FigureSeries("", sorted(points), line=True, color=color), FigureSeries(name, sorted(points), color=color)]
    title = f"Scaling efficiency: {found.about['title']}"
    drawn = plot(title, series, x="ranks", y="% of the smallest", log_y=False)
    if not drawn:
        return ""
    head, _, rest = drawn.partition(">")
    return (
        f'{head} xmlns="http://www.w3.org/2000/svg"><style>{escape(_STYLE)}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{rest}\n"
    )


def calibration(directory: Path, found: CampaignResults) -> dict[str, Any]:
    """Returns the measured entries for a planner; `docs/concepts/campaigns.md` describes every key."""
    rows = []
    for one in found.results:
        if one.status != "finished" or one.step_seconds is None or one.tokens_per_second is None:
            continue
        entry = recorded_entry(directory / "entries" / one.name) or {}
        rows.append(
            {
                "entry": one.name,
                "recipe": entry.get("recipe"),
                "hardware": one.hardware,
                "device": one.memory_of,
                "torch": one.torch,
                "world": one.world,
                "ranks_per_node": entry.get("ranks_per_node"),
                "layout": (entry.get("layout") or {}).get("sizes"),
                "transforms": list(one.transforms),
                "compute": entry.get("compute"),
                "state": entry.get("state"),
                "micro_batch": one.micro_batch,
                "micro_batches": one.micro_batches,
                "length": one.length,
                "parameters": one.parameters,
                "measured": one.measured,
                "step_seconds": {"median": one.step_seconds.median, "q1": one.step_seconds.low, "q3": one.step_seconds.high},
                "tokens_per_second_per_rank": one.per_rank,
                "model_tflops": one.model_tflops,
                "mfu": one.mfu,
                "peak_memory_bytes": one.memory,
            }
        )
    return {"format": FORMAT, "campaign": found.about["campaign"], "rows": rows}
