"""M2: what a recipe's author trips over is answered in the author's words, with what to do."""

import codecs
from collections.abc import Callable
from pathlib import Path

import pytest

from core import sample
from core.test_layers import faults, load, write

__all__ = ["write"]  # the fixture

Write = Callable[..., Path]


def test_m2_a_byte_order_mark_changes_nothing(write: Write) -> None:
    write("").write_bytes(codecs.BOM_UTF8 + b"[train]\nsteps = 7\n")
    outcome = load("r.toml")
    assert outcome.value.train.steps == 7


@pytest.mark.parametrize("mark", [codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
def test_m2_utf_16_is_named(write: Write, mark: bytes) -> None:
    write("").write_bytes(mark + b"[\0t\0]\0")
    found = faults("r.toml")["r.toml"]
    assert "UTF-16" in found.message and "UTF-8" in found.hint


def test_m2_a_key_that_belongs_under_a_table(write: Write) -> None:
    write("steps = 3\n")
    assert faults("r.toml")["steps"].hint == "did you mean 'train.steps'?"


def test_m2_a_key_of_another_table(write: Write) -> None:
    write("[train]\nlr = 3\n[optimizer]\nsteps = 4\n")
    found = faults("r.toml")
    assert found["train.lr"].hint == "did you mean 'optimizer.lr'?"
    assert found["optimizer.steps"].hint == "did you mean 'train.steps'?"


def test_m2_a_near_key_of_the_same_table_goes_first(write: Write) -> None:
    write("[train]\nstepz = 3\n")
    assert faults("r.toml")["train.stepz"].hint == "did you mean 'steps'?"


def test_m2_base_below_a_table(write: Write) -> None:
    write("[train]\nbase = 'other.toml'\n")
    assert faults("r.toml")["train.base"].hint == "base belongs at the top of the file, above the first [table]"


@pytest.mark.parametrize("given", ["recipes", "recipes/", "./recipes", "here.toml", "."])
def test_m2_a_directory_where_a_file_is_meant(write: Write, given: str) -> None:
    write("", "recipes/small.toml"), write("", "here.toml/small.toml"), write("", "small.toml")
    found = faults(given)["RECIPE"]
    assert "is a directory" in found.message and "small.toml" in found.hint


def test_m2_a_directory_without_recipes(write: Write) -> None:
    write("", "empty/readme.md")
    found = faults("empty/")["RECIPE"]
    assert "is a directory" in found.message and "TOML file" in found.hint


def test_a_preset_goes_before_a_directory_of_its_name(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("[train]\nsteps = 9\n", "preset.toml")
    write("", "tiny/other.toml")
    monkeypatch.setattr(sample, "tiny", tmp_path / "preset.toml", raising=False)
    assert load("tiny", extra=(sample.entry("presets", "tiny", "tiny"),)).value.train.steps == 9


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("[train]\nsteps = 1\n\n[optimizer]\n[train]\nclip = 1\n", "[train] is given twice, first on line 1", 5),
        ("train.steps = 1\n[train]\nclip = 1\n", "[train] is given twice, first on line 1", 2),
        ("[train]\nsteps = 1\nsteps = 2\n", "train.steps is given twice, first on line 2", 3),
        ("job = 1\njob = 2\n", "job is given twice, first on line 1", 2),
        ("[a]\n[[b]]\nc = 1\n[[b]]\nc = 1\nc = 2\n", "b.1.c is given twice, first on line 5", 6),
        ("train = {steps = 1}\n[train]\nclip = 1\n", "[train] is given twice, first on line 1", 2),
        ("[train]\nsteps = 1\n[train.steps]\nx = 1\n", "[train.steps] is given twice, first on line 2", 3),
    ],
)
def test_m2_what_is_given_twice_is_said_plainly(write: Write, text: str, message: str, line: int) -> None:
    write(text)
    found = faults("r.toml")["r.toml"]
    assert found.message == message
    assert found.origin == f"r.toml:{line}"
    assert "overwrite" not in str(found) and "Cannot" not in str(found)


def test_m2_the_path_of_a_plugin_appears_once(write: Write) -> None:
    write("import nothing_of_this_name\n", "mine.py")
    write('[optimizer]\nname = "./mine.py:Thing"\n')
    assert str(faults("r.toml")["optimizer.name"]).count("mine.py") == 1
    write('[optimizer]\nname = "./absent.py:Thing"\n')
    assert str(faults("r.toml")["optimizer.name"]).count("absent.py") == 1
    write("class Other: ...\n", "mine2.py")
    write('[optimizer]\nname = "./mine2.py:Thing"\n')
    assert str(faults("r.toml")["optimizer.name"]).count("mine2.py") == 1
