"""The commands, and the recipe table."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckpt.ranks import sample, whole
from forge_ckpt.checkpoint.retention import RetentionPolicy
from forge_ckpt.checkpoint.save import save
from forge_ckpt.commands import app
from forge_ckpt.components import Checkpoint, Local
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.component import fields_of
from forge_core.config.tree import Table, build
from forge_core.config.validation import resolve
from forge_core.errors import ConfigError
from forge_core.registry import Registry


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(LocalStore(tmp_path / "c"), whole(sample(step)), {"cursor": 17}, step, SingleProcessWorld())
    return tmp_path / "c"


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_list_show_verify(root: Path) -> None:
    rows = json.loads(run("list", root, "--json").stdout)
    assert [(row["name"], row["state"]) for row in rows] == [("step-00000002", "complete"), ("step-00000001", "complete")]
    shown = json.loads(run("show", root, "1", "--json").stdout)
    assert shown["meta"] == {"cursor": 17} and shown["step"] == 1
    state = sample(1)
    assert {t["name"]: (t["shape"], t["bytes"]) for t in shown["tensors"]} == {
        name: (list(tensor.shape), tensor.numel() * tensor.element_size()) for name, tensor in state.items()
    }
    assert "model/head.weight" in run("show", root).stdout
    result = run("verify", root)
    assert result.exit_code == 0 and "step-00000002 is verified" in result.stdout


@pytest.mark.parametrize("wrong", ["manifest", "length", "content"])
def test_trials_f8_what_is_damaged_is_named(root: Path, wrong: str) -> None:
    """Also where no step was given, so that the newest was looked for."""
    folder = root / "step-00000002"
    file = next(path for path in folder.iterdir() if path.name != "manifest.json")
    if wrong == "manifest":
        (folder / "manifest.json").write_bytes(b"{}")
    else:
        content = file.read_bytes()
        file.write_bytes(content[:-1] if wrong == "length" else content[:-64] + bytes(64 * [7]))
    for arguments in ((root,), (root, "2"), (folder,)):
        result = run("verify", *arguments)
        assert result.exit_code == 1 and result.stderr.startswith(f"{folder} is damaged: ")
        assert json.loads(run("verify", *arguments, "--json").stdout)["name"] == "step-00000002"
        if wrong != "content":  # which `show` does not read
            result = run("show", *arguments)
            assert result.exit_code == 2 and f"{folder} is damaged: " in result.stderr


@pytest.mark.parametrize("form", ["run", "store", "checkpoint"])
def test_m8_a_run_its_checkpoints_or_one_of_them(root: Path, form: str) -> None:
    run_directory = root.parent / "run"
    run_directory.mkdir()
    root.rename(run_directory / "checkpoints")
    given = {"run": ".", "store": "checkpoints", "checkpoint": "checkpoints/step-00000001"}[form]
    result = run("verify", run_directory / given, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["name"] == ("step-00000001" if form == "checkpoint" else "step-00000002")
    assert json.loads(run("show", run_directory / given, "--json").stdout)["step"] == (1 if form == "checkpoint" else 2)
    assert len(json.loads(run("list", run_directory / given, "--json").stdout)) == 2
    assert json.loads(run("show", run_directory / given, "2", "--json").stdout)["step"] == 2


def test_m8_where_no_checkpoint_is_the_directory_is_named(tmp_path: Path) -> None:
    result = run("verify", tmp_path)
    assert result.exit_code == 2 and str(tmp_path) in result.output and "use a run's directory" in result.output


def test_damage_is_exit_code_1_and_nothing_is_moved(root: Path) -> None:
    file = root / "step-00000002/rank-00000.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"\7")
    result = run("verify", root, "2", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["verified"] is False
    file.unlink()
    assert run("verify", root, "2").exit_code == 1
    assert [row["state"] for row in json.loads(run("list", root, "--json").stdout)] == ["unusable", "complete"]
    assert sorted(path.name for path in root.glob("step*")) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(
    "arguments", [("list", "nowhere"), ("show", "nowhere"), ("verify", "{root}", "9"), ("show", "{root}", "../x")]
)
def test_bad_input_is_exit_code_2_with_one_message(root: Path, arguments: tuple[str, ...]) -> None:
    result = run(*(argument.format(root=root) for argument in arguments))
    assert result.exit_code == 2 and "error:" in result.output and "Traceback" not in result.output


def test_the_local_store_is_found_and_built_by_name(tmp_path: Path) -> None:
    store = Registry().load("forge.stores", "local")().build(tmp_path / "c")
    store.write("x", [b"y"])
    assert store.read("x") == b"y"


def test_the_section_describes_every_field_and_names_its_slot() -> None:
    fields = {field.name: field for field in fields_of(Checkpoint)}
    assert set(fields) >= {"every", "first", "keep", "mode", "saver", "busy", "store", "resume", "allow"}
    assert all(field.doc for field in fields.values())
    assert fields["store"].type.__metadata__[0].default == "local"


def resolved(values: dict) -> Checkpoint:
    tree = build(values, (), lambda keys: "recipe.toml", Path())
    assert isinstance(tree, Table)
    return resolve(Checkpoint, tree, Registry()).value


def test_the_section_is_read_with_its_store() -> None:
    section = resolved({"every": 10, "store": {"shared": True}})
    assert (section.every, section.keep, section.mode, section.resume) == (10, 3, "sync", "auto")
    assert section.store == Local(shared=True)


def test_the_section_gives_the_rules_of_retention() -> None:
    assert resolved({}).policy() == RetentionPolicy(last=3)
    keys = {"keep": 2, "keep_every": 1000, "keep_log_spaced": 10, "keep_hours": 6.0}
    assert resolved(keys).policy() == RetentionPolicy(last=2, every=1000, log_spaced=10, hours=6.0)


@pytest.mark.parametrize(
    "values",
    [
        *({"mode": "other"}, {"saver": "fork"}, {"busy": "drop"}),
        *({"every": -1}, {"keep": -1}, {"resume": "maybe"}, {"keep": 2.5}, {"store": {"name": "s3"}}),
        *({"keep_every": -1}, {"keep_log_spaced": -1}, {"keep_hours": -0.5}, {"keep_hours": float("inf")}, {"first": 1}),
    ],
)
def test_what_the_section_cannot_do_is_refused(values: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        resolved(values)


def test_torch_is_not_needed_to_describe() -> None:
    import subprocess
    import sys

    modules = "forge_ckpt.components, forge_ckpt.components, forge_ckpt.commands"
    code = f"import {modules}, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
