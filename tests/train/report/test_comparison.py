"""One page of several runs: which ones, and under which names."""

import json
import re
from pathlib import Path

import pytest

from forge_core.errors import DataError
from forge_train.report.page import report, runs_in
from train.report.conftest import metrics
from train.report.test_page import Page


def test_every_run_is_a_row_and_a_color(made, tmp_path) -> None:
    a, b = made("a", [3.0, 2.0, 2.5]), made("b", [1.5], name="b", status="finished")
    text = report([a, b], tmp_path / "out.html").read_text()
    data = Page(text).data
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert [(curve["run"], curve["x"], curve["y"]) for curve in data["charts"][0]["curves"]] == [
        (0, [1, 2, 3], [3, 2, 2.5]),
        (1, [1], [1.5]),
    ]
    assert [row[1:] for row in Page(text).rows if row[1:2] == ["training"]] == [
        ["training", "3", "2.5000", "12.18", "-", "-", "2.0000 (2)"],
        ["training", "1", "1.5000", "4.48", "-", "-", "1.5000 (1)"],
    ]
    assert text.count('class="swatch s0"') == text.count('class="swatch s1"') >= 3


def test_runs_of_different_metrics_share_the_charts_that_both_have(tmp_path) -> None:
    metrics(tmp_path / "a", {1: {"loss": 1.0, "mfu": 0.4}})
    metrics(tmp_path / "b", {1: {"loss": 2.0, "routing/blocks.1/load_max": 1.5}})
    text = report([tmp_path]).read_text()
    titles = re.findall(r"<figcaption><b>(.*?)</b>", text)
    assert titles == ["Loss", "MFU", "Most loaded expert"]
    assert [[curve["run"] for curve in chart["curves"]] for chart in Page(text).data["charts"]] == [[0, 1], [0], [1]]


def test_a_folder_stands_for_the_runs_in_it(made, tmp_path) -> None:
    for name in ("b", "a"):
        made(f"runs/{name}", [1.0])
    made("runs/previous-1", [1.0])
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "text").write_text("")
    assert [path.name for path in runs_in(tmp_path / "runs")] == ["a", "b"]
    assert report([tmp_path / "runs"]) == tmp_path / "runs" / "report.html"
    assert runs_in(tmp_path / "runs" / "a") == [tmp_path / "runs" / "a"]


def test_what_a_fresh_start_moved_aside_is_a_run_when_it_is_named(made, tmp_path) -> None:
    made("a", [1.0])
    aside = made("a/previous-1", [9.0])
    text = report([tmp_path / "a", aside], tmp_path / "out.html").read_text()
    assert [run["name"] for run in Page(text).data["runs"]] == ["a", "previous-1"]


def test_names_tell_runs_apart(made, tmp_path) -> None:
    """By name; else by as much of the paths as is needed."""
    places = [made(f"{folder}/deep/run", [1.0], name="same") for folder in ("x", "y")]
    text = report(places, tmp_path / "out.html").read_text()
    assert [run["name"] for run in Page(text).data["runs"]] == ["x/deep/run", "y/deep/run"]
    text = report([*places[:1], made("z", [1.0])], tmp_path / "out.html").read_text()
    assert [run["name"] for run in Page(text).data["runs"]] == ["same", "z"]


def test_a_run_that_is_given_twice_counts_once(made, monkeypatch, tmp_path) -> None:
    a = made("a", [1.0])
    monkeypatch.chdir(tmp_path)
    text = report([a, Path("a"), tmp_path]).read_text()
    assert len(Page(text).data["runs"]) == 1
    assert (tmp_path / "report.html").is_file(), "several places: the page is in the working directory"


def test_one_run_has_its_page_in_its_directory_or_where_it_is_wanted(made, tmp_path) -> None:
    a = made("a", [1.0])
    assert report([a]) == a / "report.html"
    assert report([a], tmp_path / "x.html") == tmp_path / "x.html"
    with pytest.raises(DataError, match="--out"):
        report([a], tmp_path / "absent" / "x.html")


def test_the_command_takes_runs_and_refuses_in_words(made, tmp_path, capsys) -> None:
    from forge_train.cli import main

    a, out = made("a", [1.0]), tmp_path / "page.html"
    with pytest.raises(SystemExit) as ended:
        main(["report", str(a), "--out", str(out), "--json"])
    assert not ended.value.code and json.loads(capsys.readouterr().out)["report"] == str(out)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "absent")])
    assert ended.value.code == 2 and "absent is not a directory" in capsys.readouterr().err


def test_several_runs_without_the_command_that_compares_name_its_package(made, tmp_path, capsys, monkeypatch) -> None:
    from forge_core.registry import installed
    from forge_train.cli import main

    monkeypatch.setattr("forge_core.registry.installed", lambda: (e for e in installed() if e.distribution != "forge-lab"))
    places = [str(made(name, [1.0])) for name in "ab"]
    with pytest.raises(SystemExit) as ended:
        main(["report", *places, "--out", str(tmp_path / "page.html")])
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and not (tmp_path / "page.html").exists()
    assert "a page about 2 runs needs the command compare" in said and "pip install forge-lab" in said


def test_further_sections_of_a_page_stand_behind_the_results_unless_they_are_empty(made, tmp_path) -> None:
    places = [made(name, [1.0], name=name) for name in "ab"]
    text = report(places, tmp_path / "x.html", lambda runs: {"Own": ", ".join(run.label for run in runs), "None": ""}).read_text()
    assert text.index("<h2>Results") < text.index("<h2>Own") < text.index("a, b") < text.index('<div class="board">')
    assert "<h2>None" not in text
