"""`data diff` of two runs: the first row that differs, found by reading no more than what may differ."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import foreign
from data.steps import steps_of
from forge_core.errors import DataError
from forge_data.__main__ import main
from forge_data.commands.diff import compare_runs, is_run, runs_text
from forge_data.commands.mix import read_recipe
from forge_data.loading.rows import RowReader

RECIPE = """
[job]
seed = 5

[data]
sequence_length = 16

[[data.sources]]
name = "random"
vocab_size = 90
tokens = 2000
document = 21
label = "web"
weight = 0.75

[[data.sources]]
name = "random"
vocab_size = 90
tokens = 500
label = "code"
seed = 1
weight = 0.25

[[data.phases]]
start = 4
weights = { code = 0.75 }

[train]
max_steps = 8
global_batch = 8
"""

Recipe = Callable[..., Path]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """`recipe(name, old, new, ...)` writes the recipe with some texts replaced."""
    monkeypatch.chdir(tmp_path)

    def make(name: str, *changes: str, text: str = RECIPE) -> Path:
        for old, new in zip(changes[::2], changes[1::2], strict=True):
            assert old in text
            text = text.replace(old, new)
        (tmp_path / f"{name}.toml").write_text(text)
        return tmp_path / f"{name}.toml"

    return make


def compared(one: Path, other: Path, steps: int | None = None) -> dict[str, Any]:
    found = compare_runs(str(one), str(other), steps, lambda _: None)
    assert json.loads(json.dumps(found)) == found
    return found


def command(*arguments: str | Path) -> int:
    try:
        return main(["diff", *(str(argument) for argument in arguments)])
    except SystemExit as ended:
        return int(ended.code or 0)


def expected(one: Path, other: Path) -> tuple[int, int] | None:
    """(step, row) by making every row of both runs, as training does."""
    rows = []
    for path in (one, other):
        found = read_recipe(path)
        steps, _ = steps_of(found.data, found.train.max_steps, batch=found.train.global_batch, workspace=path.parent / "work")
        rows.append([[row[1:-1] for row in step] for step in steps])
    pairs = ((s, r) for s, step in enumerate(rows[0]) for r, row in enumerate(step) if row != rows[1][s][r])
    return next(pairs, None)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        (("weights = { code = 0.75 }", "weights = { code = 0.5 }"), "phases.4.weights"),
        (("weight = 0.25", "weight = 0.3"), "sources.code.share"),
        (("tokens = 500", "tokens = 700"), "sources.code.fingerprint"),
        (("sequence_length = 16", 'sequence_length = 16\nshuffle = "none"'), "shuffle"),
        (("sequence_length = 16", 'sequence_length = 16\npacking = "best_fit"'), "packing"),
        (("sequence_length = 16", "sequence_length = 16\nseed = 6"), "seed"),
    ],
)
def test_the_first_row_that_differs_is_found(recipe: Recipe, changes: tuple[str, ...], setting: str) -> None:
    one, other = recipe("one"), recipe("other", *changes)
    found = compared(one, other)
    place = expected(one, other)
    assert place is not None and (found["first"]["step"], found["first"]["row"]) == place
    assert not found["equal"] and any(line.startswith(setting) for line in found["settings"])
    assert found["first"]["sample"] == 8 * place[0] + place[1]
    assert f"step {place[0]}, row {place[1]}" in runs_text(found, ("one", "other"))


def test_what_is_the_same_by_arithmetic_is_not_read(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (
        recipe("one"),
        recipe("other", "max_steps = 8", "max_steps = 30", 'label = "web"', 'label = "web"\nmax_epochs = 50.0'),
    )
    assert expected(one, recipe("same")) is None
    monkeypatch.setattr(RowReader, "fill", lambda *_: pytest.fail("rows were read"))
    found = compared(one, other)
    assert found["equal"] and found["steps"] == 8 and found["samples"] == [64, 64]
    assert [run["steps"] for run in found["runs"]] == [8, 30] and sum(found["runs"][0]["tokens"].values()) == 64 * 16
    assert "would read 30 steps" in runs_text(found, ("one", "other"))
    assert compared(one, other, steps=20)["steps"] == 20


def test_a_corpus_in_another_format_is_the_same_and_a_changed_byte_has_a_place(recipe: Recipe, tmp_path: Path) -> None:
    documents = [[*range(3 * n, 3 * n + 9), 0] for n in range(1, 40)]
    foreign.datatrove(tmp_path / "a.ds", documents)
    foreign.megatron(tmp_path / "m", [[document] for document in documents], "int32")
    text = '[data]\nsequence_length = 8\nshuffle = "none"\n[[data.sources]]\nname = "datatrove"\npath = "a.ds"\nlabel = "s"\n'
    one = recipe("one", text=text + "[train]\nmax_steps = 12\nglobal_batch = 4\n")
    other = recipe("other", '"datatrove"', '"megatron"', '"a.ds"', '"m"', text=one.read_text())
    assert compared(one, other)["equal"]
    for token, field, row, column in ((77, "tokens", 9, 5), (88, "labels", 10, 7)):  # a row's last label begins the next row
        changed = np.fromfile(foreign.datatrove(tmp_path / "b.ds", documents), dtype="<u2")
        changed[token] += 1
        changed.tofile(tmp_path / "b.ds")
        first = compared(one, recipe("broken", '"a.ds"', '"b.ds"', text=one.read_text()))["first"]
        assert (4 * first["step"] + first["row"], first["column"], first["field"]) == (row, column, field)
        assert first["values"][1] == first["values"][0] + 1 and first["sources"] == ["s", "s"]
        assert first["places"] == [f"a.ds at byte {2 * token}", f"b.ds at byte {2 * token}"]


def test_streams_are_read_from_their_beginning(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "drip.py").write_text((Path(__file__).parents[1] / "steps.py").read_text())
    drip = 'name = "./drip.py:Drip"\nlabel = "web"\n'
    text = RECIPE.replace('name = "random"\nvocab_size = 90\ntokens = 2000\ndocument = 21\nlabel = "web"\n', drip)
    one, same = recipe("one", text=text), recipe("same", text=text)
    assert compared(one, same)["equal"]
    other = recipe("other", "sequence_length = 16", "sequence_length = 16\nshuffle_buffer = 3", text=text)
    first = compared(one, other)["first"]
    assert (first["step"], first["row"]) == expected(one, other) and first["places"] == ["drip", "drip"]


def test_steps_of_another_shape_are_the_difference(recipe: Recipe) -> None:
    one = recipe("one")
    found = compared(one, recipe("other", "weights = { code = 0.75 }", "weights = { code = 0.75 }\nglobal_batch = 16"))
    assert found["first"] == {"step": 4, "shapes": [[8, 16], [16, 16]]}
    assert "step 4 has 8 rows of 16 here, 16 of 16 there" in runs_text(found, ("one", "other"))


def test_data_that_end_are_compared_up_to_their_end(recipe: Recipe) -> None:
    one = recipe("one", "sequence_length = 16", "sequence_length = 16\nepochs = 1", "max_steps = 8", "max_steps = 800")
    found = compared(one, one)
    assert found["equal"] and 0 < found["steps"] < 20


def test_the_command(recipe: Recipe, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, other = recipe("one"), recipe("other", "sequence_length = 16", "sequence_length = 16\nseed = 6")
    assert command(one, one, "--steps", "3") == 0
    assert "equal: all rows of the first 3 steps" in capsys.readouterr().out
    assert command(one, other, "--json") == 1
    assert json.loads(capsys.readouterr().out)["first"]["step"] == 0
    assert is_run("debug") and is_run(str(one)) and not is_run(str(tmp_path)) and not is_run("nothing here")
    np.save(tmp_path / "ids.npy", np.arange(9, dtype=np.uint16))
    assert command(tmp_path / "ids.npy", tmp_path / "ids.npy", "--steps", "3") == 2
    assert "--steps applies only to runs" in capsys.readouterr().err


def test_what_is_no_run_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="nothing"):
        compared(recipe("one"), tmp_path / "nothing.toml")
    (tmp_path / "loader.py").write_text(
        "from dataclasses import dataclass\nfrom forge_core.protocols.data import SourceComponent\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(SourceComponent):\n"
        "    def build(self, context):\n        return self\n    def __iter__(self):\n        return iter(())\n"
        "    def state_dict(self):\n        return {}\n    def load_state_dict(self, state): ...\n"
    )
    text = '[[data.sources]]\nname = "./loader.py:Mine"\n'
    with pytest.raises(DataError, match="a foreign loader"):
        compared(recipe("foreign", text=text), recipe("foreign", text=text))
