"""The report as HTML: curves, final numbers, samples, checkpoints, machine and recipe in one file."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from forge_core.terminal.quantities import duration, size
from forge_train.report.chart import Line, Reference, chart
from forge_train.report.heat import heat
from forge_train.report.tables import fields, rows

Entries = Sequence[Mapping[str, Any]]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The browser itself then refuses to fetch anything or run scripts."""


def page(summary: Mapping[str, Any], entries: Entries) -> str:
    """The whole page; a part without data is left out.

    Args:
        summary: as `forge_train.report.write` describes it, already without secrets.
        entries: metrics in the order of the steps, as `forge_train.trackers.jsonl.read` gives them.
    """
    name = str(summary.get("name", "run"))
    parts = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="dim">{escape(_headline(summary, entries))}</p>',
        _warnings(summary.get("warnings", ())),
        _section("Result", results(summary, entries)),
        _section("Curves", _charts(summary, entries)),
        _section("Experts", _experts(summary.get("routing"))),
        _section("Generated text", "".join(_sample(item) for item in summary.get("samples", ()))),
        _section("Checkpoints", _checkpoints(summary.get("checkpoints", ()))),
        _section("Model, machine and versions", _tables(summary)),
        _section("Recipe", _recipe(summary.get("config"))),
    ]
    return document(name, parts)


def document(title: str, parts: Iterable[str]) -> str:
    """A page of HTML parts that fetches nothing; empty parts are left out."""
    style = files("forge_train.report").joinpath("style.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>",
            *(part for part in parts if part),
            "</body>\n</html>\n",
        ]
    )


def results(summary: Mapping[str, Any], entries: Entries) -> str:
    """The final table: loss in nats per token, perplexity, bits per byte where it is known, the entropy next to it."""
    entropy = summary.get("unigram_entropy")
    per_token = summary.get("bytes_per_token", {})
    table: list[list[Any]] = []
    for label, key, name in [("training, last logged step", "loss", ""), *_evaluated(entries)]:
        last = next((entry for entry in reversed(entries) if key in entry), None)
        if last is None:
            continue
        loss = last[key]
        known = name in per_token and math.isfinite(loss)
        bits = f"{loss / math.log(2) / per_token[name]:.4f}" if known else "unknown"
        below = f"{entropy - loss:+.4f}" if entropy is not None else "unknown"
        table.append([label, last["step"], f"{loss:.4f}", _perplexity(loss), bits, below])
    if not table:
        return ""
    if entropy is not None:
        table.append(["unigram entropy of the corpus", "", f"{entropy:.4f}", _perplexity(entropy), "", ""])
    head = ["", "step", "loss (nats/token)", "perplexity", "bits per byte", "below the entropy by"]
    note = (
        '<p class="dim">The unigram entropy is the loss of a model that knows only how often each token occurs in the '
        "training corpus: a model below it has learned from context.</p>"
    )
    return rows(head, table, numbers=range(1, 6)) + (note if entropy is not None else "")


def _evaluated(entries: Entries) -> list[tuple[str, str, str]]:
    """(label, key, set) of every evaluation set's loss, in the order of appearance."""
    keys = {key: None for entry in entries for key in entry if key.startswith("evaluation/") and key.endswith("/loss")}
    return [(_set_of(key), key, _set_of(key)) for key in keys]


def _set_of(key: str) -> str:
    return key.removeprefix("evaluation/").removesuffix("/loss")


def _sparse(key: str) -> bool:
    return key.startswith("evaluation/")


def _sources(entries: Entries) -> list[tuple[str, str, str]]:
    """(label, key, "") of the training loss of every source of a mixture, in the order of appearance."""
    keys = {key: None for entry in entries for key in entry if key.startswith("source/") and key.endswith("/loss")}
    return [(key.removeprefix("source/").removesuffix("/loss"), key, "") for key in keys]


def _charts(summary: Mapping[str, Any], entries: Entries) -> str:
    losses = [("training", "loss", ""), *_evaluated(entries)]
    entropy = summary.get("unigram_entropy")
    references = [] if entropy is None else [Reference(f"unigram entropy {entropy:.3f}", entropy)]

    def drawn(title: str, y: str, curves: Sequence[tuple[str, str, str]], x: str = "step", **more: Any) -> str:
        lines = [Line(name, _points(entries, x, key), dots=_sparse(key) and len(curves) > 1) for name, key, _ in curves]
        return chart(title, [line for line in lines if line.points], x=x, y=y, **more)

    charts = [
        drawn("Loss against step", "nats per token", losses, references=references),
        drawn("Loss against tokens seen", "nats per token", losses, x="tokens", references=references),
        drawn("Loss by source", "nats per token", _sources(entries)),
        drawn("Learning rate", "rate", [("rate", "lr", "")], from_zero=True),
        drawn("Gradient norm before clipping", "norm", [("norm", "grad_norm", "")], from_zero=True),
        drawn("Throughput", "tokens per second", [("rate", "tokens_per_second", "")], from_zero=True),
    ]
    shown = "\n".join(one for one in charts if one)
    return f'<div class="charts">{shown}</div>' if shown else ""


def _experts(routing: Any) -> str:
    if not routing:
        return ""
    note = f"step {routing['step']}; load of each expert, 0 white, 1 the mean, 2 and more full"
    drawn = heat("Load of experts", note, routing["layers"])
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _points(entries: Entries, x: str, y: str) -> list[tuple[float, float]]:
    return [(float(entry[x]), float(entry[y])) for entry in entries if x in entry and y in entry]


def _perplexity(loss: float) -> str:
    try:
        return f"{math.exp(loss):,.2f}"
    except OverflowError:
        return "inf"


def _headline(summary: Mapping[str, Any], entries: Entries) -> str:
    parts = [str(summary["status"])] if "status" in summary else []
    if entries:
        parts.append(f"step {max(entry['step'] for entry in entries)}")
    tokens = [entry["tokens"] for entry in entries if "tokens" in entry]
    if tokens:
        parts.append(f"{int(tokens[-1]):,} tokens")
    if "started" in summary:
        parts.append(f"started {summary['started']}")
    if "seconds" in summary:
        parts.append(duration(summary["seconds"]))
    return " · ".join(parts)


def _warnings(warnings: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(str(text))}</li>" for text in warnings)
    return f'<div class="warnings"><strong>Warnings</strong><ul>{items}</ul></div>' if items else ""


def _section(title: str, inner: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{inner}" if inner else ""


def _sample(item: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{key} {value}" for key, value in item.items() if key not in ("prompt", "text"))
    text = f"<pre><b>{escape(str(item.get('prompt', '')))}</b>{escape(str(item.get('text', '')))}</pre>"
    return (f'<p class="dim">{escape(settings)}</p>' if settings else "") + text


def _checkpoints(items: Sequence[Mapping[str, Any]]) -> str:
    table = [[item.get("path", ""), item.get("step", ""), size(item["bytes"]) if "bytes" in item else ""] for item in items]
    return rows(["path", "step", "size"], table, numbers=(1, 2)) if table else ""


def _tables(summary: Mapping[str, Any]) -> str:
    inner = "".join(
        fields(caption, summary[key])
        for caption, key in (("Model", "model"), ("Machine", "machine"), ("Versions", "versions"))
        if summary.get(key)
    )
    return f'<div class="tables">{inner}</div>' if inner else ""


def _recipe(config: Any) -> str:
    if not config:
        return ""
    if isinstance(config, str):
        inner = f"<pre>{escape(config)}</pre>"
    else:
        inner = rows(["key", "value", "origin"], [[row["key"], row["value"], row["origin"]] for row in config], code=(0, 1, 2))
    return f"<details><summary>The resolved recipe, with the origin of every value</summary>{inner}</details>"
