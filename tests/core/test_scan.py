"""Line numbers of keys: against documents numbered by hand, and against the text of generated ones."""

import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forge_core.config.toml import key_lines, to_toml

DOCUMENT = '''# 1: a comment with [brackets] and key = "value"
title = "a # no comment"
"quoted key" = 'C:\\path\\'
a.b.c = 1 # dotted
a.b.d = [ 1, # first
  2, # ] not the end

  "]", [3,
  4]]
text = """one \\"""
two = 3 # inside a string
[not.a.table]
"""""
raw = \'\'\'
''quotes'' = 1\'\'\'
point = {x = 1, "y.z" = {deep = [true]}}
date = 1979-05-27 07:32:00
[table]
key = -1.5e3

[[data.sources]] # 21
path = "x"
[data.sources.options]
depth = 1
[[data.sources]]
path = """
"""
after = 2
[ data . "odd key" ]
last = 'x\''''

LINES: dict[tuple[str | int, ...], int] = {
    ("title",): 2,
    ("quoted key",): 3,
    ("a",): 4,
    ("a", "b", "c"): 4,
    ("a", "b", "d"): 5,
    ("a", "b", "d", 0): 5,
    ("a", "b", "d", 1): 6,
    ("a", "b", "d", 2): 8,
    ("a", "b", "d", 3): 8,
    ("a", "b", "d", 3, 1): 9,
    ("text",): 10,
    ("raw",): 14,
    ("point",): 16,
    ("point", "x"): 16,
    ("point", "y.z", "deep", 0): 16,
    ("date",): 17,
    ("table",): 18,
    ("table", "key"): 19,
    ("data",): 21,
    ("data", "sources", 0): 21,
    ("data", "sources", 0, "path"): 22,
    ("data", "sources", 0, "options"): 23,
    ("data", "sources", 0, "options", "depth"): 24,
    ("data", "sources", 1): 25,
    ("data", "sources", 1, "path"): 26,
    ("data", "sources", 1, "after"): 28,
    ("data", "odd key"): 29,
    ("data", "odd key", "last"): 30,
}


def test_lines_of_a_document_numbered_by_hand() -> None:
    lines = key_lines(DOCUMENT)
    assert {path: lines.get(path) for path in LINES} == LINES


def test_every_value_has_a_line() -> None:
    lines = key_lines(DOCUMENT)
    assert paths(tomllib.loads(DOCUMENT)) <= set(lines)


def test_a_table_below_its_inner_table_has_the_line_of_its_own_header() -> None:
    lines = key_lines("[a.b]\nx = 1\n[a]\ny = 2\n")
    assert (lines[("a",)], lines[("a", "b")], lines[("a", "y")]) == (3, 1, 4)


def test_line_ends_of_windows() -> None:
    assert key_lines(DOCUMENT.replace("\n", "\r\n")) == key_lines(DOCUMENT)


def paths(value: Any, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path} - {()} | {deeper for key, item in items for deeper in paths(item, (*path, key))}


texts = st.text(st.characters(codec="utf-8"), max_size=8)
values = st.recursive(
    st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(texts, values, max_size=4))
def test_written_toml_parses_back_and_every_key_is_on_its_line(tree: dict[str, Any]) -> None:
    document = to_toml(tree)
    assert tomllib.loads(document) == tree
    lines = key_lines(document)
    assert paths(tree) <= set(lines)
    # One value per line in what we write, so line N alone must parse to the value (or be the header of its table).
    physical = document.split("\n")
    for path, number in lines.items():
        line = physical[number - 1]
        assert line.startswith("[") or len(paths(tomllib.loads(line))) > 0
        if isinstance(path[-1], str) and not line.startswith("["):
            found = tomllib.loads(line)
            (name,) = found
            assert name in path
            at: Any = tree
            for part in path[: path.index(name) + 1] if path.count(name) == 1 else ():
                at = at[part]
            assert path.count(name) != 1 or at == found[name]
