"""One page of several runs: which ones, under which names, and what differs between them."""

import json
import re
from pathlib import Path

import pytest

from forge_core.errors import DataError
from forge_train.report.page import report, runs_in
from train.report.conftest import metrics
from train.report.test_page import Page


def rows(text: str, first: str) -> list[list[str]]:
    return [row for row in Page(text).rows if row and row[0] == first]


def config(**values: object) -> list[dict]:
    return [{"key": key.replace("__", "."), "value": value, "origin": "a.toml:1"} for key, value in values.items()]


def test_only_keys_that_differ_are_listed(made, tmp_path) -> None:
    one = config(job__name="a", job__dir="x", optimizer__lr=1e-3, model__dim=64, model__window=None, data__keys=["x", "y"])
    other = config(job__name="b", job__dir="y", optimizer__lr=3e-4, model__dim=64, model__moe__experts=8, data__keys=["x", "y"])
    a = made("a", [2.0], name="a", config=one, machine={"Memory": "1 GiB"}, versions={"torch": "2.12", "numpy": "2"})
    b = made("b", [1.0], name="b", config=other, machine={"Memory": "1 GiB"}, versions={"torch": "2.13", "numpy": "2"})
    text = report([a, b], tmp_path / "both.html").read_text()
    table = text[text.index("<h2>What differs") : text.index('<div class="board">')]
    assert Page(table).rows == [
        ["key", "a", "b"],
        ["optimizer.lr", "0.001", "0.0003"],
        ["versions: torch", "2.12", "2.13"],
        ["model.moe.experts", "-", "8"],
    ]


def test_tables_of_an_array_are_compared_by_their_names(made, tmp_path) -> None:
    """A hook in the middle is one hook more; sources of one kind have no names to tell them apart."""
    hooks = [{"name": "log", "every": 10}, {"name": "save"}, {"name": "routing", "every": 5}]
    sources = [{"name": "text", "path": path} for path in ("a", "b")]

    def flat(**arrays: list[dict]) -> list[dict]:
        return [
            {"key": f"{array}.{number}.{key}", "value": value}
            for array, tables in arrays.items()
            for number, table in enumerate(tables)
            for key, value in table.items()
        ]

    one = flat(hooks=[hooks[0], hooks[1]], data__sources=sources)
    other = flat(hooks=[hooks[0] | {"every": 20}, hooks[2], hooks[1]], data__sources=[sources[1], sources[0]])
    a, b = made("a", [1.0], name="a", config=one), made("b", [1.0], name="b", config=other)
    text = report([a, b], tmp_path / "out.html").read_text()
    assert Page(text[text.index("<h2>What differs") : text.index('<div class="board">')]).rows[1:] == [
        ["hooks", '["log", "save"]', '["log", "routing", "save"]'],
        ["hooks.log.every", "10", "20"],
        ["data__sources.0.path", '"a"', '"b"'],
        ["data__sources.1.path", '"b"', '"a"'],
        ["hooks.routing.every", "-", "5"],
    ]


def test_many_differences_are_folded(made, tmp_path) -> None:
    a, b = (made(name, [1.0], name=name, config=config(**{f"k{i}": f"{name}{i}" for i in range(15)})) for name in "ab")
    text = report([a, b], tmp_path / "out.html").read_text()
    assert "<summary>3 more</summary>" in text and ["k14", '"a14"', '"b14"'] in Page(text).rows


def test_equal_runs_differ_in_nothing_and_unknown_ones_are_not_compared(made, tmp_path) -> None:
    a, b = (made(name, [2.0], name=name, config=config(model__dim=64), versions={"torch": "2"}) for name in "ab")
    silent = made("c", [1.0])
    assert "Nothing but the name." in report([a, b], tmp_path / "out.html").read_text()
    text = report([a, b, silent], tmp_path / "out.html").read_text()
    assert "Nothing but the name." in text and "not compared by its keys: c." in text


def test_recipes_of_runs_that_go_on_are_compared_with_those_of_ended_ones(made, tmp_path) -> None:
    a = made("a", [2.0], name="a", config=[*config(model__dim=64), {"key": "data.sources.0.name", "value": "text"}])
    b = made("b", [1.0])
    (b / "config.toml").write_text('[model]\ndim = 128\n[[data.sources]]\nname = "text"\n')
    text = report([a, b], tmp_path / "out.html").read_text()
    assert rows(text, "model.dim")[0] == ["model.dim", "64", "128"]
    assert ["data.sources.0.name", "text", "text"] not in Page(text).rows


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

    a, b, out = made("a", [1.0]), made("b", [2.0]), tmp_path / "page.html"
    with pytest.raises(SystemExit) as ended:
        main(["report", str(a), str(b), "--out", str(out), "--json"])
    assert not ended.value.code and json.loads(capsys.readouterr().out)["report"] == str(out)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "absent")])
    assert ended.value.code == 2 and "absent is not a directory" in capsys.readouterr().err
