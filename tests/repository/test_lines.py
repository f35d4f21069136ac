"""Text of users is cut into lines by one function: `str.splitlines` cuts at ten characters that such text holds."""

import ast
from pathlib import Path

import pytest

from forge_core.files import lines_of

ROOT = Path(__file__).parents[2]
MACHINES = {
    "an error's own message": ("unpickle.py", "micro_batch.py", "accelerator.py", "text_and_vision.py", "records.py"),
    "files of the system, and an error of a device": ("machine.py",),
    "what programs print": ("runner.py", "gpus.py", "training.py"),
    "a docstring": ("descriptions.py",),
    "what a template asks for, as str does it": ("traced.py",),
    "bytes, which are cut at ends of lines only": ("tiktoken.py",),
    "keeps every end of a line": ("redaction.py",),
    "the method of strings that a chat template calls": ("traced.py",),
}
"""Files that cut other text, by what they cut."""


def test_trials_a7_a_line_ends_with_a_line_feed() -> None:
    inside = "one\u2028still\x0cone\x85and\x1cone\x1d\x1e\x0b\u2029\rone"
    assert lines_of(f"{inside}\ntwo\r\n\nfour\r\n") == [inside, "two", "", "four"]
    assert lines_of(inside) == [inside] and lines_of("") == [] and lines_of("\n") == [""] and lines_of("a\nb") == ["a", "b"]


def test_trials_a7_no_other_function_cuts_text_of_users() -> None:
    known = {name for names in MACHINES.values() for name in names}
    found = set()
    for path in (*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("apps/*/src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "splitlines":
                found.add(path.name)
    assert found <= known, f"{sorted(found - known)}: use forge_core.files.lines_of"
    assert known <= found, f"{sorted(known - found)} cut nothing any more"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_trials_a7_a_fault_of_a_recipe_shows_its_own_line(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_core.config.toml import read_toml
    from forge_core.errors import ConfigError

    monkeypatch.chdir(tmp_path)
    Path("r.toml").write_bytes(end.join(["# a comment\u2028 of one line", "[job]", "name = yes please", ""]).encode())
    with pytest.raises(ConfigError, match=r"`name = yes please`.*r\.toml:3"):
        read_toml(Path("r.toml"))
