"""Tables of a page: progress, results, speed, data sources and environment of runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from forge_core.terminal import count, duration, size
from forge_train.hooks.evaluation import bits_per_byte
from forge_train.report.curves import Series, finite
from forge_train.report.html import facts, fields, rows
from forge_train.report.record import RunRecord

ABSENT = "-"
"""Text in a table for a value that a run does not have."""
_EVALUATED = ("evaluation/", "/loss")
_PARTS = (("Model", "model"), ("Machine", "machine"), ("Versions", "versions"))


def overview(runs: Sequence[RunRecord]) -> str:
    """Returns the facts of one run as a row, of several runs as a table with a row for each."""
    told = [_facts(run) for run in runs]
    if len(runs) == 1:
        return facts({name: value for name, value in told[0].items() if value and name != "status"})
    names = [name for name in told[0] if any(one[name] for one in told)]
    body = [[run.label, *(one[name] or "-" for name in names)] for run, one in zip(runs, told, strict=True)]
    numbers = range(2, len(names) + 1)
    return rows(["run", *names], body, numbers=numbers, runs=range(len(runs)))


def _facts(run: RunRecord) -> dict[str, str]:
    history = run.history
    speed, used = (finite(_series(run, name).values) for name in ("tokens_per_second", "mfu"))
    memory = finite(_series(run, "device_memory").values) or finite(_series(run, "peak_memory").values)
    parameters, layout = run.summary.get("model", {}).get("parameters"), run.summary.get("model", {}).get("layout")
    return {
        "status": run.status,
        "steps": f"{history.step:,}" if history.step is not None else "0",
        "tokens": count(history.tokens) if history.tokens is not None else "",
        "loss": _loss(_series(run, "loss").last),
        "tokens/s": count(median(speed)) if speed else "",
        "MFU": f"{median(used):.1%}" if used else "",
        "time": duration(history.seconds) if history.seconds else "",
        "memory": size(int(max(memory))) if memory else "",
        "parameters": count(parameters) if isinstance(parameters, (int, float)) else "",
        "layout": str(layout or ""),
        "restarts": str(len(history.restarts)) if history.restarts else "",
        "skipped steps": f"{skipped:.0f}" if (skipped := _series(run, "skipped_steps").last) > 0 else "",
    }


def results(runs: Sequence[RunRecord]) -> str:
    """Returns a table of losses: nats per token, perplexity, bits per byte if known, and the distance to the unigram entropy.
    Runs whose objective has metrics of its own, such as the accuracy, have these instead of what only nats per token have."""
    own = list(dict.fromkeys(metric for run in runs for metric in run.summary.get("metrics", ())))
    found = [(number, line) for number, run in enumerate(runs) for line in _lines(run, own)]
    order = list(dict.fromkeys(line[0] for _, line in found))
    found.sort(key=lambda pair: order.index(pair[1][0]))  # runs next to each other, set by set
    if not found:
        return ""
    several = len(runs) > 1
    table = [[runs[number].label, *line] if several else line for number, line in found]
    has_tokens = any("metrics" not in run.summary for run in runs)
    of_tokens = ["perplexity", "bits per byte", "below the entropy by"] if has_tokens else []
    head = ["loss on", "step", "loss" if own else "nats per token", *of_tokens, *own, "lowest (step)"]
    note = (
        '<p class="dim">The unigram entropy is the loss of a model that predicts each token by its frequency in the training '
        "corpus; a model with a lower loss has learned from context.</p>"
    )
    if not has_tokens:
        table = [[*line[: 3 + several], *line[6 + several :]] for line in table]
    made = rows(
        ["run", *head] if several else head,
        table,
        numbers=range(1 + several, len(head) + several),
        runs=[number for number, _ in found] if several else (),
    )
    return made + (note if any("unigram_entropy" in run.summary for run in runs) else "")


def _lines(run: RunRecord, metrics: Sequence[str]) -> list[list[Any]]:
    entropy = run.summary.get("unigram_entropy")
    lines = [
        line for what, key in [("training", "loss"), *_evaluated(run)] if (line := _result(run, what, key, entropy, metrics))
    ]
    if lines and entropy is not None:
        empty = [""] * (3 + len(metrics))
        lines.append(["unigram entropy of the corpus", "", _loss(entropy), _perplexity(entropy), *empty])
    return lines


def _result(run: RunRecord, what: str, key: str, entropy: float | None, metrics: Sequence[str]) -> list[Any]:
    series = _series(run, key)
    if not series.steps:
        return []
    loss, per_token = series.last, run.summary.get("bytes_per_token", {}).get(what, 0)
    shown = ABSENT if "metrics" in run.summary else _perplexity(loss)
    bits = f"{bits_per_byte(loss, 1, per_token):.4f}" if per_token > 0 and math.isfinite(loss) else ABSENT
    below = f"{entropy - loss:+.4f}" if entropy is not None else ABSENT
    own = [_loss(_series(run, f"{key.removesuffix('loss')}{metric}").last) or ABSENT for metric in metrics]
    finite = [(value, step) for step, value in zip(series.steps, series.values, strict=True) if math.isfinite(value)]
    lowest = "{:.4f} ({:,})".format(*min(finite)) if finite else ABSENT
    return [what, series.steps[-1], _loss(loss), shown, bits, below, *own, lowest]


def mixture(runs: Sequence[RunRecord]) -> str:
    """Returns a table of the tokens read from every source, next to the share that the mixture's weights plan."""
    table: list[list[Any]] = []
    marked: list[int] = []
    for number, run in enumerate(runs):
        labels = [key[len("data/") : -len("/tokens")] for key in run.history.series if _is_read(key)]
        read = {label: _series(run, f"data/{label}/tokens").last for label in labels}
        planned = {label: _series(run, f"data/{label}/planned_tokens").last for label in labels}
        for label in labels:
            loss = _loss(_series(run, f"source/{label}/loss").last)
            line = [label, count(read[label]), _share(read, label), _share(planned, label), loss]
            table.append([run.label, *line] if len(runs) > 1 else line)
            marked.append(number)
    several = len(runs) > 1
    head = ["source", "tokens read", "share", "planned share", "last loss"]
    return (
        rows(["run", *head] if several else head, table, numbers=range(1 + several, 5 + several), runs=marked if several else ())
        if table
        else ""
    )


def _is_read(key: str) -> bool:
    return key.startswith("data/") and key.endswith("/tokens")


def _share(of: dict[str, float], label: str) -> str:
    whole = math.fsum(of.values())
    return f"{of[label] / whole:.2%}" if whole > 0 else "-"


def _evaluated(run: RunRecord) -> list[tuple[str, str]]:
    """Returns (set, metric) of the loss of every held-out set, in order of appearance."""
    start, end = _EVALUATED
    return [(key[len(start) : -len(end)], key) for key in run.history.series if key.startswith(start) and key.endswith(end)]


def _series(run: RunRecord, name: str) -> Series:
    return run.history.series.get(name, Series())


def _loss(value: float) -> str:
    return f"{value:.4f}" if not math.isnan(value) else ""


def _perplexity(loss: float) -> str:
    try:
        return f"{math.exp(loss):,.2f}"
    except OverflowError:
        return "inf"


def environment(runs: Sequence[RunRecord]) -> str:
    """Returns tables of model, machine and versions, with a column for each of several runs."""
    if len(runs) == 1:
        summary = runs[0].summary
        return _grid(fields(caption, summary[key]) for caption, key in _PARTS if summary.get(key))
    return _grid(
        rows([caption, *(run.label for run in runs)], [[name, *cells] for name, cells in values_by_name(found, _plain)])
        for caption, key in _PARTS
        if any(found := [run.summary.get(key, {}) for run in runs])
    )


def values_by_name(tables: Sequence[Mapping[str, Any]], text: Callable[[Any], str]) -> list[tuple[str, list[str]]]:
    """Returns every name with its values in all tables, formatted by `text`; `ABSENT` where a table lacks the name."""
    names = dict.fromkeys(name for table in tables for name in table)
    return [(name, [text(table[name]) if name in table else ABSENT for table in tables]) for name in names]


def _grid(parts: Any) -> str:
    inner = "".join(parts)
    return f'<div class="tables">{inner}</div>' if inner else ""


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
