"""Python files that stored data name do not run unasked; those that a user names do. What runs are the bytes that were read."""

import importlib.util
import os
import py_compile
import sys
from dataclasses import field, make_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import pytest

from core.sample import Job, registry
from forge_core import trust
from forge_core.component import Component, Slot
from forge_core.config.layers import load_layers
from forge_core.config.toml import read_toml
from forge_core.config.tree import Table, build, plain
from forge_core.config.validation import walk
from forge_core.errors import BrokenPlugin, ForgeError, UntrustedCode
from forge_core.plugins import find_everywhere
from forge_core.registry import Registry

OPTIMIZER = """
from dataclasses import dataclass
from pathlib import Path
from forge_core.component import Component

Path({mark!r}).touch()


@dataclass(frozen=True, kw_only=True)
class Mine(Component):
    def build(self, model):
        return None
"""


@pytest.fixture(autouse=True)
def without_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_files", set())
    monkeypatch.setenv(trust.GRANTED, "")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(OPTIMIZER.format(mark=str(tmp_path / "ran")))
    return path


def ran(file: Path) -> bool:
    return file.with_name("ran").exists()


def test_trials_f4_a_tree_of_stored_data_runs_no_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an absolute name, by one that is relative to the working directory, and in a key of a table."""
    monkeypatch.chdir(file.parent)
    for name in (f"{file}:Mine", "./mine.py:Mine"):
        stored = {"optimizer": {"name": name}, "transforms": {name: {}}}
        tree = build(stored, (), lambda _: "checkpoint", Path.cwd())
        assert isinstance(tree, Table)
        for found in (walk(Job, tree, registry()), walk(Job, load_layers(tree, (), Job, registry()).tree, registry())):
            keyed, fault = sorted(found.faults, key=lambda fault: "optimizer" in fault.key)
            assert "transforms" in keyed.key and "does not run unasked" in keyed.message and fault.key == "optimizer.name"
            digest = sha256(file.read_bytes()).hexdigest()
            assert str(file) in fault.message and f"--trust-code {digest}" in fault.message and fault.origin == "checkpoint"
    assert not ran(file)


def test_trials_f4_a_recipe_and_a_command_line_run_the_files_that_they_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file.parent / "r.toml").write_text('[optimizer]\nname = "./mine.py:Mine"\n')
    with pytest.raises(UntrustedCode):
        Registry([]).load("forge.optimizers", f"{file}:Mine")
    load_layers(read_toml(file.parent / "r.toml"), (), Job, registry())
    with pytest.raises(UntrustedCode):  # reading it as stored data grants nothing
        Registry([]).load("forge.optimizers", f"{file}:Mine")
    load_layers(file.parent / "r.toml", (), Job, registry())
    assert Registry([]).load("forge.optimizers", f"{file}:Mine").__name__ == "Mine" and ran(file)

    monkeypatch.setattr(trust, "_files", set())
    other = file.with_name("other.py")
    other.write_text(file.read_text())
    load_layers(build({}, (), lambda _: "checkpoint", Path()), [f"--optimizer.name={other}:Mine"], Job, registry())  # type: ignore[arg-type]
    assert Registry([]).load("forge.optimizers", f"{other}:Mine").__name__ == "Mine"


def test_trials_f4_a_sha256_grants_content_and_nothing_else(file: Path) -> None:
    trust.trust_digest(sha256(file.read_bytes()).hexdigest().upper())
    changed = file.with_name("changed.py")
    changed.write_text(file.read_text() + "\n")
    with pytest.raises(UntrustedCode, match="was given for other content"):
        Registry([]).load("forge.optimizers", f"{changed}:Mine")
    assert not ran(file)
    assert Registry([]).load("forge.optimizers", f"{file}:Mine").__name__ == "Mine" and ran(file)
    for short in ("", "ab12", "g" * 64, sha256(b"").hexdigest() + " "):
        with pytest.raises(ForgeError, match="expected a complete sha256"):
            trust.trust_digest(short)
    assert len(os.environ[trust.GRANTED].split()) == 1


def test_trials_f4_a_copy_of_a_file_of_the_user_may_run(file: Path) -> None:
    """A project that was copied: the checkpoint names the file at its old place."""
    copy = file.with_name("copy.py")
    copy.write_text(file.read_text())
    trust.trust_file(copy)
    assert Registry([]).load("forge.optimizers", f"{file}:Mine").__name__ == "Mine"
    other = file.with_name("same_size.py")
    other.write_text(file.read_text().replace("None", "NONE"))
    with pytest.raises(UntrustedCode):
        Registry([]).load("forge.optimizers", f"{other}:Mine")
    copy.unlink()
    with pytest.raises(UntrustedCode):
        Registry([]).load("forge.optimizers", f"{other}:Mine")


def test_trials_f4_compiled_code_next_to_a_file_is_not_run(file: Path) -> None:
    """Python itself takes unchecked code of `__pycache__` for the file's, whatever the file says."""
    evil = file.with_name("evil.py")
    evil.write_text("raise SystemExit('compiled code ran')\n")
    cache = Path(importlib.util.cache_from_source(str(file)))
    cache.parent.mkdir()
    py_compile.compile(str(evil), cfile=str(cache), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    trust.trust_digest(sha256(file.read_bytes()).hexdigest())
    loaded = Registry([]).load("forge.optimizers", f"{file}:Mine")
    module = sys.modules[loaded.__module__]
    assert module.__file__ == str(file) and loaded.__module__.startswith("forge_file_") and ran(file)


def test_a_component_of_a_file_is_described_by_its_file(file: Path) -> None:
    """As commands on stored weights do, whose recipe has the component itself as a default."""
    trust.trust_file(file)
    component = Registry([]).load("forge.optimizers", f"{file}:Mine")()
    slot = Annotated[Component, Slot("forge.optimizers")]
    schema = make_dataclass("Recipe", [("optimizer", slot, field(default=component))], frozen=True)
    found = walk(schema, Table({}, "default"), registry())
    assert not found.faults and plain(found.tree) == {"optimizer": {"name": f"{file}:Mine"}}


def test_a_name_on_the_command_line_of_plugins_is_the_users(file: Path) -> None:
    (entry,) = find_everywhere(registry(), f"{file}:Mine", "optimizers")
    assert Registry([]).load_entry(entry).__name__ == "Mine"
    broken = file.with_name("broken.py")
    broken.write_text("raise SystemExit(3)")
    trust.trust_file(broken)
    with pytest.raises(BrokenPlugin):
        Registry([]).load("forge.optimizers", f"{broken}:Mine")
