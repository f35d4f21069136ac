"""The command line as a user meets it: in processes of its own, without torch."""

import inspect
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from core.judge import accepts
from forge_core.config.descriptions import json_schema
from forge_core.registry import Entry, Registry, installed
from forge_train import cli
from forge_train.recipe.load import load_recipe
from forge_train.recipe.schema import Job
from harness import commands

Result = subprocess.CompletedProcess[str]
PRESETS = [entry.name for entry in installed() if entry.group == "forge.presets"]
SHARED = {"8x7b": ("8", "dp8ep8"), "30b-a3b-8xh100": ("8", "dp8ep8")}
"""Presets whose experts do not fit on one process: the smallest world, and its layout."""

PROBE = """
import sys
sys.argv = ["forge-train", *sys.argv[1:]]
from forge_train.cli import main
try:
    main()
finally:
    heavy = sorted(set(sys.modules) & {"torch", "numpy", "transformers", "tokenizers", "matplotlib"})
    print("heavy:", *heavy, file=sys.stderr)
"""


@pytest.fixture
def forge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs forge-train in an empty directory; its last line on standard error names the heavy modules it imported."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, path: Path | None = None) -> Result:
        environment = {**os.environ, "COLUMNS": "200"} | ({"PYTHONPATH": str(path)} if path else {})
        return commands.run("-c", PROBE, *arguments, env=environment, timeout=60, torch=False)

    return run


def heavy(result: Result) -> list[str]:
    return result.stderr.strip().splitlines()[-1].split()[1:]


def test_help_lists_every_command_and_imports_none(forge: Callable[..., Result]) -> None:
    result = forge("--help")
    assert result.returncode == 0
    for entry in installed():
        if entry.group == "forge.commands":
            (line,) = [line for line in result.stdout.splitlines() if line.split()[:1] == [entry.name]]
            assert len(line.split()) > 3, f"{entry.name} has no summary"
    assert heavy(result) == []


def test_an_unknown_command_gets_the_closest_one(forge: Callable[..., Result]) -> None:
    result = forge("chekc", "debug")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "unknown command 'chekc'; did you mean 'check'?" in result.stderr
    assert heavy(result) == []


def test_a_command_of_a_package_that_is_not_installed_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("forge_core.registry.installed", lambda: (e for e in installed() if e.distribution != "forge-interp"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["probe", "debug", "--list"])
    assert ended.value.code == 2
    assert "'probe' is part of forge-interp, which is not installed: pip install forge-interp" in " ".join(
        capsys.readouterr().err.split()
    )


def test_the_module_is_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "forge_train", "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "check" in result.stdout
    script = Path(sys.executable).with_name("forge-train")
    assert subprocess.run([script, "plugins", "--help"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("preset", PRESETS)
def test_check_passes_presets_without_torch(preset: str, forge: Callable[..., Result]) -> None:
    world, layout = SHARED.get(preset, ("1", "1"))
    result = forge("check", preset, "--world", world, "--json")
    document = json.loads(result.stdout)
    assert (result.returncode, document["ok"], document["layout"]) == (0, True, layout), result.stdout
    models = {(part["name"], part["distribution"]) for part in document["used"] if part["group"] == "forge.models"}
    assert models in ({("decoder", "forge-models")}, {("vlm", "forge-vlm")})
    assert heavy(result) == []


def test_check_reports_every_fault_at_once(forge: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(
        'base = "debug"\n[train]\nmax_steps = 2.7\nmicro_bach = 2\n[optimizer]\nname = "adamv"\n[parallel]\ntp = 3\n'
        '[data]\nshuffle = "ture"\n[modle]\ndim = 3\n'
    )
    result = forge("check", "bad.toml", "--world", "4", "--checkpoint.every=often", "stray")
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for words in (
        "8 faults",
        "train.max_steps: expected an integer greater than 0, not 2.7 [bad.toml:3]",
        "train.micro_bach: unknown key; did you mean 'micro_batch'? [bad.toml:4]",
        "optimizer.name: unknown optimizer 'adamv'; did you mean 'adamw'? [bad.toml:6]",
        "parallel: the world size 4 is not a multiple of tp 3 = 3; use a multiple of 3 [bad.toml:8]",
        "data.shuffle: expected one of 'permute', 'block', 'none', not 'ture' [bad.toml:10]",
        "modle: unknown key; did you mean 'model'? [bad.toml:11]",
        "checkpoint.every: expected an integer at least 0, not 'often' [--checkpoint.every]",
        "stray: is a bare argument; overrides are written --section.key=value [command line]",
    ):
        assert words in result.stderr
    as_json = forge("check", "bad.toml", "--world", "4", "--checkpoint.every=often", "stray", "--json")
    assert as_json.returncode == 2
    assert len(json.loads(as_json.stdout)["faults"]) == 8
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bad.toml"]  # nothing was written


MODEL_WITHOUT_SHAPE = """
from dataclasses import dataclass

from forge_core.component import Component


@dataclass(frozen=True, kw_only=True)
class Mine(Component):
    vocab_size: int = 300
    max_length: int = 2048

    def build(self):
        raise AssertionError("not by check")
"""


def test_check_names_what_it_leaves_to_the_start(forge: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL_WITHOUT_SHAPE)
    keys = ["--model.name=./mine.py:Mine", "--data.sources=[{name='random', vocab_size=61}]"]
    note = "note: the start of a run checks whether the model fits transforms.float8, when it has built the model"
    result = forge("check", "debug", *keys, "--transforms.float8.recipe=tensorwise")
    assert result.returncode == 0 and note in result.stderr
    assert heavy(result) == []
    assert "note:" not in forge("check", "debug", *keys).stderr
    assert "note:" not in forge("check", "debug", "--transforms.float8.recipe=tensorwise").stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "nowhere.toml"], "file nowhere.toml does not exist"),
        (["check", "dbug"], "did you mean 'debug'"),
        (["check", "--train.max_steps=3", "debug"], "overrides come after the recipe"),
        (["check", "debug", "--train.max_steps", "3"], "write --train.max_steps=3"),
        (["check", "debug", "--world", "0"], "at least 1 process"),
        (["check", "debug", "--world", "x"], "--world"),
        (["chek", "debug"], "check"),
        (["plugins", "list", "optimisers"], "forge.optimizers"),
        (["plugins", "show", "adamv"], "did you mean 'adamw'?"),
        (["config", "explain", "debug", "train.max_step"], "train.max_steps"),
        (["config", "schema", "--output", "no/such/folder.json"], "cannot be written"),
        (["run", "debug", "--train.max_steps=0"], "train.max_steps: expected an integer greater than 0, not 0"),
    ],
)
def test_bad_input_is_one_clear_message_and_exit_code_2(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    said = capsys.readouterr()
    assert caught.value.code == 2
    assert words in said.err
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_show_gives_a_recipe_that_loads_to_the_same_job(forge: Callable[..., Result], tmp_path: Path) -> None:
    result = forge("config", "show", "debug", "--optimizer.lr=0.125")
    assert result.returncode == 0
    (tmp_path / "again.toml").write_text(result.stdout)
    registry = Registry()
    assert load_recipe("again.toml", [], None, registry).job == load_recipe("debug", ["--optimizer.lr=0.125"], None, registry).job
    noted = forge("config", "show", "debug", "--optimizer.lr=0.125", "--origins").stdout
    assert "lr = 0.125  # --optimizer.lr\n" in noted
    assert tomllib.loads(noted) == tomllib.loads(result.stdout)
    document = json.loads(forge("config", "show", "debug", "--optimizer.lr=0.125", "--origins", "--json").stdout)
    assert document["recipe"] == tomllib.loads(result.stdout)
    assert {"key": "optimizer.lr", "value": 0.125, "origin": "--optimizer.lr"} in document["origins"]


def test_explain_answers_for_keys_sections_and_overrides(forge: Callable[..., Result]) -> None:
    result = forge("config", "explain", "debug", "train.max_steps", "--train.max_steps=7", "--json")
    (found,) = json.loads(result.stdout)
    assert (found["value"], found["origin"], found["default"]) == (7, "--train.max_steps", 1000)
    text = forge("config", "explain", "debug", "train").stdout
    assert "train.max_steps = 30" in text and "an integer greater than 0; default 1000" in text
    assert "optimizer.lr = 0.5" in forge("config", "explain", "debug", "--optimizer.lr=0.5").stdout


def test_schema_is_torch_free_and_accepts_every_preset(forge: Callable[..., Result], tmp_path: Path) -> None:
    result = forge("config", "schema", "--output", "schema.json")
    assert heavy(result) == []
    schema = json.loads((tmp_path / "schema.json").read_text())
    assert schema == json_schema(Job, Registry())
    for preset in PRESETS:
        resolved = load_recipe(preset)
        assert accepts(schema, tomllib.loads(resolved.as_toml()))
        for file in resolved.files:
            assert accepts(schema, tomllib.loads(file.read_text()))
    assert not accepts(schema, {"optimizer": {"name": "adamw", "lr": -1.0}})
    assert not accepts(schema, {"model": {"name": "decoder", "dimm": 3}})


def test_doctor_finds_every_installed_plugin_sound_and_light(forge: Callable[..., Result]) -> None:
    result = forge("plugins", "doctor", "--json")
    document = json.loads(result.stdout)
    assert [plugin for plugin in document["plugins"] if plugin["problems"]] == []
    assert (result.returncode, document["ok"]) == (0, True)
    assert heavy(result) == []


def test_list_imports_no_plugin(forge: Callable[..., Result]) -> None:
    result = forge("plugins", "list", "--json")
    assert {entry["target"] for entry in json.loads(result.stdout)} == {entry.target for entry in installed()}
    rows = forge("plugins", "list", "optimizers").stdout.splitlines()
    assert rows[0].split("\t") == ["group", "name", "distribution", "target"]
    assert any(row.startswith("forge.optimizers\tadamw\tforge-parallel") for row in rows)
    shown = forge("plugins", "show", "decoder").stdout.splitlines()
    rope = shown.index("    rope: a table")
    assert shown[rope + 2] == "        theta: a number greater than 0; default 10000.0"
    assert not any("Rope(" in row for row in shown)


COMMANDS = [entry for entry in installed() if entry.group == "forge.commands"]


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_a_summary_is_what_the_imported_command_says(entry: Entry) -> None:
    loaded = Registry().load_entry(entry)
    said = loaded.info.help if isinstance(loaded, typer.Typer) else inspect.getdoc(loaded)
    assert cli.summary(entry).lower() == (said or "").strip().partition("\n")[0].lower() != ""


SOURCE = """'''The module.'''
import typer
from elsewhere import bare
def first(
    text: str = "def second(): '''not this'''",
    number: int = 1,
) -> None:
    '''The first one.

at the margin
'''
def second() -> None: "The second one."
third = typer.Typer(
    no_args_is_help=True,
    help="The third one.",
)
fourth = typer.Typer(help=str(5))
def fifth(): pass
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("first", "The first one."), ("second", "The second one."), ("third", "The third one."), ("fourth", "The module.")),
        *(("fifth", "The module."), ("bare", "The module."), ("fir", "The module.")),
    ],
)
def test_a_summary_is_found_in_any_form_of_a_module(
    name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stranger_forms.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.summary(Entry("forge.commands", "x", "x", "1", f"stranger_forms:{name}")) == expected
    (tmp_path / "stranger_forms.py").write_text(SOURCE + "def (")
    assert cli.summary(Entry("forge.commands", "x", "x", "1", "stranger_forms:fifth")) == "from x 1"
    assert cli.summary(Entry("forge.commands", "x", "x", "1", "stranger_absent:first")) == "from x 1"


@pytest.fixture
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed distribution whose commands are one good, one broken, and one with a name of Forge's."""
    folder = tmp_path_factory.mktemp("stranger")
    commands = (
        "good = stranger_good:good\nbroken = stranger_broken:broken\nreport = stranger_good:good\nodd = stranger_good:odd\n"
    )
    points = f"[forge.commands]\n{commands}[forge.checks]\nbad = stranger_broken:check\n"
    info = folder / "stranger-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 3.1\n")
    (info / "entry_points.txt").write_text(points)
    (folder / "stranger_good.py").write_text(
        "import typer\n"
        "def good(context: typer.Context, word: str = 'x') -> None:\n"
        "    '''Say a word.'''\n"
        "    print(word, context.args)\n"
        "def odd(x: list[list[int]]) -> None: ...\n"
    )
    (folder / "stranger_broken.py").write_text("'''A command that cannot be imported.'''\nraise RuntimeError('lost')\n")
    return folder


def test_a_broken_command_hurts_only_who_calls_it(stranger: Path, forge: Callable[..., Result]) -> None:
    listing = forge("--help", path=stranger)
    assert listing.returncode == 0
    assert "Say a word." in listing.stdout and "A command that cannot be imported." in listing.stdout
    assert forge("good", "--word", "hi", "--a.b=1", path=stranger).stdout == "hi ['--a.b=1']\n"
    broken = forge("broken", path=stranger)
    assert broken.returncode == 2
    assert "stranger 3.1" in broken.stderr and "RuntimeError: lost" in broken.stderr and "Traceback" not in broken.stderr
    odd = forge("odd", path=stranger)
    assert (odd.returncode, "stranger 3.1" in odd.stderr) == (2, True)
    own = forge("report", "--help", path=stranger)
    assert own.returncode == 0 and "Say a word." not in own.stdout, "the name stays Forge's"
    assert "hi []" in forge("stranger:report", "--word", "hi", path=stranger).stdout
    checked = forge("check", "debug", path=stranger)
    assert checked.returncode == 0
    assert "warning: check 'bad' of stranger 3.1" in checked.stderr


def test_summaries_are_read_from_source_only() -> None:
    from forge_core.registry import Entry

    def entry(target: str) -> Any:
        return Entry("forge.commands", "x", "dist", "1", target)

    assert cli.summary(entry("no_such_package_at_all.cli:main")) == "from dist 1"
    assert (
        cli.summary(entry("core.sample:entry"))
        == "A small recipe of our own and the plugins that it may hold, so that these tests depend on no other package."
    )
    assert cli.summary(entry("core.sample:registry")) == "The plugins above, and `extra` ones."
