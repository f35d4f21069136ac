"""Which metrics are drawn where, and how large a page may become."""

import math
import re
from pathlib import Path

import pytest

from forge_train.report.charts import FAMILIES, MOST_OTHER, OTHER, Chart, charts, drawn, shares
from forge_train.report.curves import POINTS, History, Series
from forge_train.report.page import page
from forge_train.report.record import RunRecord
from train.report.conftest import time_of


def run(*lines: dict, label: str = "run") -> RunRecord:
    return RunRecord(
        label, history=History.of({"step": step, "time": time_of(step), **line} for step, line in enumerate(lines, 1))
    )


def titles(found: list[Chart]) -> list[tuple[str, list[str]]]:
    return [(chart.title, chart.labels) for chart in found]


def test_every_family_takes_the_metrics_that_it_is_for() -> None:
    names = [re.sub(r"\(.+?\)", "a/b", family.pattern) for family in FAMILIES if not family.pattern.startswith("share")]
    made = charts([run(dict.fromkeys(names, 1.0))])
    assert OTHER not in {chart.section for chart in made}
    assert sum(len(chart.curves) for chart in made) == len(names)
    assert [chart.labels for chart in made if chart.title == "Loss"] == [["training", "a/b"]]


def test_the_log_of_a_run_leaves_nothing_for_other_numbers_but_what_no_family_knows() -> None:
    line = {
        "loss": 1.0,
        "tokens": 5,
        "skipped": 0.0,
        "evaluation/a/perplexity": 2.0,
        "data/x/tokens": 1,
        "data/x/planned_tokens": 1,
    }
    made = charts(
        [run({**line, "source/x/tokens": 4, "mine": 3.0, "grads/layer.1/norm": 1.0, "grads/layer.2/norm": 2.0, "a/b": 1.0})]
    )
    assert titles([chart for chart in made if chart.section == OTHER]) == [
        ("mine", ["mine"]),
        ("grads, norm", ["layer.1", "layer.2"]),
        ("a/b", ["a/b"]),
    ]


def test_what_has_never_happened_is_not_drawn() -> None:
    assert titles(charts([run({"skipped_steps": 0, "device_memory_retries": 0, "mine": 0.0, "loss": 0.0})])) == [
        ("Loss", ["training"]),
        ("mine", ["mine"]),
    ]
    assert titles(charts([run({"device_memory_retries": 0}, {"device_memory_retries": 2})])) == [
        ("Allocator retries", ["retries"])
    ]


def test_shares_are_those_between_two_lines() -> None:
    """3 of 4 tokens are of a in the first line, then 1 of 8; b's line of step 3 brings nothing new."""
    history = run(
        {"data/a/tokens": 3.0, "data/b/tokens": 1.0}, {"data/a/tokens": 4.0, "data/b/tokens": 8.0}, {"data/b/tokens": 8.0}
    ).history
    found = dict(shares(history.series))
    assert {name: list(series.values) for name, series in found.items()} == {"share/a": [0.75, 0.125], "share/b": [0.25, 0.875]}
    assert list(shares({"loss": Series()})) == []


def test_a_page_of_many_unknown_metrics_draws_some_and_names_the_rest() -> None:
    names = [f"metric-{number:03d}" for number in range(MOST_OTHER + 3)]
    text = page([run(dict.fromkeys(names, 1.0))])
    assert text.count("<figure") == MOST_OTHER
    assert "Not drawn: metric-060, metric-061, metric-062." in text


def test_restarts_and_faults_are_marked_at_their_steps() -> None:
    from forge_train.report.record import RunFault

    found = run({"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0})
    found.faults = [
        RunFault("warning", 2, "", ""),
        RunFault("error", None, "", ""),
        RunFault("restart", 1, "", ""),
        RunFault("skipped", 3, "", ""),
    ]
    found.history._rewind(2, time_of(9))
    marks = drawn([found], charts([found]))["runs"][0]
    assert (marks["restarts"], marks["faults"]) == ([2], [2, 3])


def test_the_clock_has_both_ends_of_a_long_run() -> None:
    found = run(*({"loss": 1.0, "tokens": 64 * step} for step in range(1, 4503)))
    clock = drawn([found], charts([found]))["runs"][0]["clock"]
    assert len(clock["step"]) <= POINTS + 1
    assert (clock["step"][0], clock["step"][-1]) == (1, 4502)
    assert clock["tokens"][-1] == 64 * 4502
    assert clock["hours"] == pytest.approx([(step - 1) / 3600 for step in clock["step"]], rel=1e-5)


def test_a_long_run_is_a_page_of_a_few_megabytes_that_keeps_its_spikes() -> None:
    names = ["loss", "grad_norm", "source/web/loss"]

    def lines():
        for step in range(1, 30_001):
            value = 77.125 if step == 13_210 else 2.0 + math.sin(step)
            yield {"step": step, "time": time_of(step), "tokens": step, **dict.fromkeys(names, value)}

    found = RunRecord("long", history=History.of(lines()))
    data = drawn([found], charts([found]))
    for chart in data["charts"]:
        for curve in chart["curves"]:
            assert (13_210, 77.125) in zip(curve["x"], curve["y"], strict=True)
            assert len(curve["x"]) <= POINTS + 2 and len(curve["mx"]) == len(curve["my"]) == POINTS // 2
    assert len(page([found])) < 300_000


@pytest.mark.slow
def test_a_million_lines_are_a_page_of_a_few_megabytes(tmp_path: Path) -> None:
    import json

    from forge_train.report.page import report

    names = ["loss", "grad_norm", "lr", "tokens_per_second", *(f"routing/blocks.{n}/load_max" for n in range(32))]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 1_000_001):
            values = dict.fromkeys(names[: 4 if step % 10 else None], 2.0 + math.sin(step))
            file.write(json.dumps({"step": step, "time": time_of(step), "tokens": step, **values}) + "\n")
    assert report([tmp_path]).stat().st_size < 5_000_000
