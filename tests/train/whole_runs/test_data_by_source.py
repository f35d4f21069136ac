"""What a run of several sources logs about each: tokens against the plan, and the loss."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from forge_train.report.page import report
from harness.pool import World
from train.report.test_page import Page
from train.runs import TINY, train

SOURCES = """
[[data.sources]]
name = "random"
label = "few"
vocab_size = 9
tokens = 3000
document = 31
weight = 0.25

[[data.sources]]
name = "random"
label = "later"
vocab_size = 61
tokens = 3000
weight = 0

[[data.phases]]
start = 4
weights = { later = 1.0 }
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    head, rest = TINY.split("[train]")
    path = tmp_path / "mixed.toml"
    path.write_text(head + SOURCES + "\n[train]" + rest + '\n[[hooks]]\nname = "log"\nevery = 1\n')
    return path


def logged(recipe: Path, directory: Path, *more: str) -> list[dict[str, Any]]:
    train(recipe, [f"--job.dir={directory}", *more])
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def of(entry: dict[str, Any], start: str, end: str) -> dict[str, float]:
    return {key[len(start) : -len(end)]: value for key, value in entry.items() if key.startswith(start) and key.endswith(end)}


def test_every_line_accounts_for_the_whole_loss(recipe: Path, tmp_path: Path) -> None:
    entries = [entry for entry in logged(recipe, tmp_path / "run") if "loss" in entry]
    assert len(entries) == 8
    for entry in entries:
        losses, tokens = of(entry, "source/", "/loss"), of(entry, "source/", "/tokens")
        assert list(losses) == ["random", "few", *(["later"] if entry["step"] > 4 else [])]
        assert sum(tokens.values()) == entry["step_tokens"]
        weighted = sum(losses[label] * tokens[label] for label in losses) / entry["step_tokens"]
        assert weighted == pytest.approx(entry["loss"], rel=1e-6)
        read, planned = of(entry, "data/", "/tokens"), of(entry, "data/", "/planned_tokens")
        assert sum(read.values()) == entry["tokens"] == pytest.approx(sum(planned.values()))
        assert all(abs(read[label] - planned[label]) < 16 for label in read), "less than one sample off, at every step"
    last = of(entries[-1], "source/", "/loss")
    assert last["few"] < last["random"] - 0.05, "nine ids are learned sooner than sixty-one"


def test_ranks_and_micro_batches_change_nothing(world: World, recipe: Path, tmp_path: Path) -> None:
    alone = logged(recipe, tmp_path / "alone")
    world.run(train, 2, recipe, [f"--job.dir={tmp_path / 'two'}", "--train.micro_batch=4"])
    two = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    for mine, theirs in zip(alone, two, strict=True):
        by_source = {key: value for key, value in mine.items() if key.startswith(("source/", "data/"))}
        assert {key: theirs[key] for key in by_source} == pytest.approx(by_source, rel=1e-5)


def test_one_source_is_the_loss_itself(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(recipe.read_text().replace(SOURCES, ""))
    entries = logged(recipe, tmp_path / "run", "--train.max_steps=3")
    assert not [key for entry in entries for key in entry if key.startswith(("source/", "data/"))]


def test_the_report_shows_each_source(recipe: Path, tmp_path: Path) -> None:
    """Shares of the tokens between two lines, which follow the phases at once; the table has those of the whole run."""
    entries = [entry for entry in logged(recipe, tmp_path / "run") if "loss" in entry]
    text = report([tmp_path / "run"]).read_text()
    drawn = {chart["title"]: chart for chart in titled(text)}
    assert drawn["Loss by source"]["labels"] == drawn["Tokens by source"]["labels"] == ["random", "few", "later"]
    for number, label in enumerate(("random", "few")):
        (curve,) = [curve for curve in drawn["Tokens by source"]["curves"] if curve["label"] == number]
        read = [0.0, *(entry[f"data/{label}/tokens"] for entry in entries)]
        seen = [0, *(entry["tokens"] for entry in entries)]
        steps = range(len(entries))
        assert curve["y"] == pytest.approx([(read[at + 1] - read[at]) / (seen[at + 1] - seen[at]) for at in steps], rel=1e-5)
    last = entries[-1]
    share, planned = (last[f"data/few/{what}"] / last["tokens"] for what in ("tokens", "planned_tokens"))
    (row,) = [row for row in Page(text).rows if row[0] == "few"]
    assert row[2:] == [f"{share:.2%}", f"{planned:.2%}", f"{last['source/few/loss']:.4f}"]


def titled(text: str) -> list[dict[str, Any]]:
    titles = re.findall(r"<figcaption><b>(.*?)</b>", text)
    return [{"title": title, **chart} for title, chart in zip(titles, Page(text).data["charts"], strict=True)]


def test_a_run_of_one_source_has_no_charts_of_sources(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(recipe.read_text().replace(SOURCES, ""))
    logged(recipe, tmp_path / "run", "--train.max_steps=3")
    assert "by source" not in report([tmp_path / "run"]).read_text()
