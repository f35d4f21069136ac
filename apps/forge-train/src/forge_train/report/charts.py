"""Assigns metrics to charts, and returns their points as plain data for `static/report.js`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_train.report.curves import Series, finite, limit, means, short, thin
from forge_train.report.record import RunRecord


@dataclass(frozen=True)
class ChartFamily:
    """Metrics of one chart: those that `pattern` matches completely. Its group, or `label`, names the curve. `exact` metrics,
    which are set or counted and have no noise, are never smoothed."""

    section: str
    title: str
    unit: str
    pattern: str
    label: str = ""
    from_zero: bool = False
    exact: bool = False
    bytes: bool = False


def _memory(title: str, unit: str, metric: str, label: str) -> ChartFamily:
    return ChartFamily("Speed and memory", title, unit, metric, label, from_zero=True, exact=True, bytes=True)


FAMILIES = (
    ChartFamily("Loss and gradient", "Loss", "nats per token", "loss", "training"),
    ChartFamily("Loss and gradient", "Loss", "nats per token", "evaluation/(.+)/loss"),
    ChartFamily("Loss and gradient", "Gradient norm", "before clipping", "grad_norm", "norm", from_zero=True),
    ChartFamily("Loss and gradient", "Learning rate", "", "lr", "rate", from_zero=True, exact=True),
    ChartFamily("Loss and gradient", "Skipped steps", "so far", "skipped_steps", "steps", from_zero=True, exact=True),
    ChartFamily("Speed and memory", "Throughput", "tokens per second", "tokens_per_second", "all ranks", from_zero=True),
    ChartFamily("Speed and memory", "Time of a step", "seconds", "step_seconds", "step", from_zero=True),
    ChartFamily("Speed and memory", "Parts of a step", "seconds on rank 0", "time/(.+)", from_zero=True),
    ChartFamily("Speed and memory", "A step under the profiler", "seconds on rank 0", "split/(.+)", from_zero=True),
    ChartFamily(
        "Speed and memory", "Classes of a profile", "share of its window", "profile/(?!step_seconds)(.+)", from_zero=True
    ),
    ChartFamily("Speed and memory", "MFU", "share of the device's peak", "mfu", "MFU", from_zero=True),
    _memory("Memory of the process", "rank 0, peak so far", "peak_memory", "resident"),
    _memory("Memory of the device", "rank 0, peak since the line before", "device_memory", "in tensors"),
    _memory("Memory of the device", "rank 0, peak since the line before", "device_memory_reserved", "held"),
    ChartFamily(
        "Speed and memory", "Allocator retries", "so far", "device_memory_retries", "retries", from_zero=True, exact=True
    ),
    ChartFamily("Data", "Loss by source", "nats per token", "source/(.+)/loss"),
    ChartFamily("Data", "Tokens by source", "share since the line before", "share/(.+)", from_zero=True, exact=True),
    ChartFamily("Modalities", "Loss by modality", "nats per token", "modality/(.+)/loss"),
    ChartFamily("Modalities", "Accuracy by modality", "share of tokens", "modality/(.+)/accuracy"),
    ChartFamily("Modalities", "Image gain", "nats per token", "modality/(.+)/image_gain"),
    ChartFamily("Modalities", "Tokens by modality", "share of the step", "modality/(.+)/share", from_zero=True, exact=True),
    ChartFamily("Modalities", "Gates of cross blocks", "tanh", "gate/(.+)", exact=True),
    ChartFamily("Experts", "Most loaded expert", "of the mean load", "routing/(.+)/load_max", from_zero=True),
    ChartFamily("Experts", "Least loaded expert", "of the mean load", "routing/(.+)/load_min", from_zero=True),
    ChartFamily("Experts", "Entropy of the router", "nats per token", "routing/(.+)/entropy", from_zero=True),
    ChartFamily("Experts", "Dropped slots", "share", "routing/(.+)/dropped", from_zero=True),
    ChartFamily("Experts", "Loss of the router", "per token", "routing/(.+)/loss"),
    ChartFamily("Experts", "Largest bias", "", "routing/(.+)/bias_max"),
    ChartFamily("Experts", "Smallest bias", "", "routing/(.+)/bias_min"),
    ChartFamily("Indexer", "Divergence from attention", "nats per token", "routing/(.+)/kl", from_zero=True),
    ChartFamily("Inside", "Likeness to the first weights", "CKA", "inside/(.+)/cka_first"),
    ChartFamily("Inside", "Likeness to the last time", "CKA", "inside/(.+)/cka_previous"),
    ChartFamily("Inside", "Effective rank", "dimensions", "inside/(.+)/effective_rank", from_zero=True),
    ChartFamily("Inside", "Entropy of attention", "nats", "inside/(.+)/attention_entropy", from_zero=True),
    ChartFamily("Inside", "Largest attention score", "before the softmax", "inside/(.+)/max_score"),
    ChartFamily("Inside", "Loss of the logit lens", "nats per token", "inside/(.+)/lens_loss"),
    ChartFamily("Inside", "Agreement of routers with the last time", "share", "inside/(.+)/router_agreement", from_zero=True),
    ChartFamily("Inside", "Time of a look inside", "seconds", "inside/seconds", "rank 0", from_zero=True),
)
SHOWN_ELSEWHERE = re.compile(
    r"tokens|skipped|profile/step_seconds|evaluation/.+/perplexity|source/.+/tokens|data/.+/(planned_)?tokens"
)
"""Metrics without a chart, since another chart or a table shows them."""
OTHER = "Other numbers"
MOST_OTHER = 60
"""Maximum number of charts of metrics without a family; the names of further metrics are only listed."""


@dataclass
class Chart:
    """One pair of axes.

    Attributes:
        labels: names of the curves, shared by all runs.
        curves: (index of the run, index of the label, curve, whether to draw dots).
        references: (value, text) of horizontal lines.
    """

    section: str
    title: str
    unit: str
    from_zero: bool = False
    exact: bool = False
    bytes: bool = False
    labels: list[str] = field(default_factory=list)
    curves: list[tuple[int, int, Series, bool]] = field(default_factory=list)
    references: list[tuple[float, str]] = field(default_factory=list)

    def add(self, run: int, label: str, series: Series, dots: bool) -> None:
        """Adds a curve of run number `run`; `dots` draws its points, for sparse curves."""
        if label not in self.labels:
            self.labels.append(label)
        self.curves.append((run, self.labels.index(label), series, dots))


def charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Returns the charts in order of their sections; a metric without a family has a chart of its own."""
    made: dict[tuple[str, str], Chart] = {(one.section, one.title): _empty(one) for one in FAMILIES}
    for number, run in enumerate(runs):
        for name, series in (*run.history.series.items(), *shares(run.history.series)):
            if not finite(series.values) or SHOWN_ELSEWHERE.fullmatch(name):
                continue
            family, label = _family(name)
            made.setdefault((family.section, family.title), _empty(family)).add(number, label, series, "evaluation/" in name)
    loss = made[FAMILIES[0].section, FAMILIES[0].title]
    entropies = {run.summary["unigram_entropy"] for run in runs if "unigram_entropy" in run.summary}
    loss.references = [(value, f"unigram entropy {value:.3f}") for value in sorted(entropies)]
    return [chart for chart in made.values() if chart.curves and not _says_nothing(chart)]


def shares(series: Mapping[str, Series]) -> Iterator[tuple[str, Series]]:
    """Yields `share/LABEL` of every source of a mixture: its share of the tokens read since the previous line."""
    read = {match[1]: found for name, found in series.items() if (match := re.fullmatch(r"data/(.+)/tokens", name))}
    before: dict[str, float] = {}
    made = {label: Series() for label in read}
    by_step: dict[int, dict[str, float]] = {}
    for label, found in read.items():
        for step, value in zip(found.steps, found.values, strict=True):
            by_step.setdefault(step, {})[label] = value
    for step in sorted(by_step):
        now = by_step[step]
        new = {label: value - before.get(label, 0.0) for label, value in now.items()}
        whole, before = sum(new.values()), before | now
        for label, value in new.items():
            if whole > 0:
                made[label].add(step, value / whole)
    yield from ((f"share/{label}", found) for label, found in made.items())


def drawn(runs: Sequence[RunRecord], chosen: Sequence[Chart]) -> dict[str, Any]:
    """Returns the data that the page's script draws, as JSON without NaN and infinities."""
    most = limit(sum(len(chart.curves) for chart in chosen))
    return {
        "runs": [{"name": run.label, "clock": _clock(run, most), **_marks(run)} for run in runs],
        "charts": [
            {
                "bytes": chart.bytes,
                "exact": chart.exact,
                "zero": chart.from_zero,
                "labels": chart.labels,
                "references": [{"value": value, "text": text} for value, text in chart.references],
                "curves": [_curve(most, *curve) for curve in chart.curves],
            }
            for chart in chosen
        ],
    }


def _family(name: str) -> tuple[ChartFamily, str]:
    for family in FAMILIES:
        if match := re.fullmatch(family.pattern, name):
            return family, match[1] if match.groups() else family.label
    first, *between, last = name.split("/") if name.count("/") > 1 else (name, name)
    return (
        (ChartFamily(OTHER, f"{first}, {last}", "", ""), "/".join(between))
        if between
        else (ChartFamily(OTHER, name, "", ""), name)
    )


def _says_nothing(chart: Chart) -> bool:
    """Returns True for a chart of counts that are all zero."""
    return chart.from_zero and not any(value for *_, series, _ in chart.curves for value in series.values)


def _empty(family: ChartFamily) -> Chart:
    return Chart(family.section, family.title, family.unit, family.from_zero, family.exact, family.bytes)


def _curve(most: int, run: int, label: int, series: Series, dots: bool) -> dict[str, Any]:
    kept = thin(series.values, most)
    found: dict[str, Any] = {"run": run, "label": label, "dots": dots}
    found |= {"x": [series.steps[at] for at in kept], "y": [short(series.values[at]) for at in kept]}
    if len(kept) < len(series.values):
        steps, values = means(series, most)
        found |= {"mx": [round(step, 1) for step in steps], "my": [short(value) for value in values]}
    return found


def _clock(run: RunRecord, most: int) -> dict[str, list[Any]]:
    """Returns tokens and hours at some steps, between which the page interpolates."""
    clock = run.history.clock
    every = max(1, -(-len(clock.steps) // most))
    kept = sorted({*range(0, len(clock.steps), every), len(clock.steps) - 1} - {-1})
    return {
        "step": [clock.steps[at] for at in kept],
        "tokens": [short(clock.tokens[at]) for at in kept],
        "hours": [short(clock.seconds[at] / 3600) for at in kept],
    }


def _marks(run: RunRecord) -> dict[str, list[int]]:
    """Returns the steps of restarts and of other faults."""
    faulty = {fault.step for fault in run.faults if fault.kind != "restart" and fault.step is not None}
    return {"restarts": sorted({restart.after for restart in run.history.restarts}), "faults": sorted(faulty)}
