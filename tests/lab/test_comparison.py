"""What differs between runs, and the command that writes a page about several."""

import json

import pytest

from forge_core.errors import DataError
from forge_lab.comparison import write_comparison as report
from train.report.conftest import made
from train.report.test_page import Page

__all__ = ["made"]


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
    assert "Only the names differ." in report([a, b], tmp_path / "out.html").read_text()
    text = report([a, b, silent], tmp_path / "out.html").read_text()
    assert "Only the names differ." in text and "so their keys are not compared: c." in text


def test_recipes_of_runs_that_go_on_are_compared_with_those_of_ended_ones(made, tmp_path) -> None:
    a = made("a", [2.0], name="a", config=[*config(model__dim=64), {"key": "data.sources.0.name", "value": "text"}])
    b = made("b", [1.0])
    (b / "config.toml").write_text('[model]\ndim = 128\n[[data.sources]]\nname = "text"\n')
    text = report([a, b], tmp_path / "out.html").read_text()
    assert rows(text, "model.dim")[0] == ["model.dim", "64", "128"]
    assert ["data.sources.0.name", "text", "text"] not in Page(text).rows


def test_one_run_differs_from_nothing(made, tmp_path) -> None:
    assert "What differs" not in report([made("a", [1.0], name="a")], tmp_path / "out.html").read_text()


@pytest.mark.parametrize("command", ["compare", "report"])
def test_the_commands_write_a_page_of_several_runs(command: str, made, tmp_path, capsys) -> None:
    """`report` of several runs is `compare`."""
    from forge_train.cli import main

    one, other = (config(model__dim=dim) for dim in (64, 128))
    a, b, out = made("a", [1.0], name="a", config=one), made("b", [2.0], name="b", config=other), tmp_path / "page.html"
    with pytest.raises(SystemExit) as ended:
        main([command, str(a), str(b), "--out", str(out), "--json"])
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out) == {"report": str(out), "bytes": out.stat().st_size}
    assert rows(out.read_text(), "model.dim")[0] == ["model.dim", "64", "128"]


def test_a_comparison_of_less_than_two_runs_is_refused(made, tmp_path, capsys) -> None:
    from forge_train.cli import main

    a = made("a", [1.0])
    for places, said in (([a, a], "a comparison needs two"), ([tmp_path / "absent"], "absent is not a directory")):
        with pytest.raises(SystemExit) as ended:
            main(["compare", *map(str, places)])
        assert ended.value.code == 2 and said in " ".join(capsys.readouterr().err.split())
    with pytest.raises(DataError, match="absent is not a directory"):
        report([tmp_path / "absent"])
