"""Classes in Python files that a recipe names: from layered recipes, through every command, edited, absent and wrong."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from forge_core import trust
from forge_core.errors import ConfigError
from forge_core.registry import Entry, Registry
from forge_train.cli import main
from forge_train.directory import PLUGIN_FILES
from forge_train.recipe.load import load_recipe
from train.runs import TINY, train

SCHEDULE = '''
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt
from forge_core import Component


@dataclass(frozen=True, kw_only=True)
class Constant(Component):
    """One factor for all steps."""

    factor: Annotated[float, Gt(0)] = 1.0
    """Factor on the learning rate."""

    def build(self, steps):
        return lambda step: self.factor * {scale}
'''
NORM = '''
from dataclasses import dataclass
from forge_core import Component


@dataclass(frozen=True, kw_only=True)
class Plain(Component):
    """No normalization."""

    def build(self, dim):
        from torch import nn
        return nn.Identity()
'''
HOOK = '''
from dataclasses import dataclass
from forge_core import Component
from forge_core.protocols import Hook


@dataclass(kw_only=True)
class Counted(Hook):
    """Nothing."""

    every: int = 10
    """Steps."""
'''
WEIGHTED = '''

@dataclass(frozen=True, kw_only=True)
class Weighted(Component):
    """Leaves the model as it is."""

    def build(self):
        return self
'''


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`top/run.toml` is based on `lab/base.toml`, whose schedule and norm are files of `lab/parts`."""
    (tmp_path / "lab" / "parts").mkdir(parents=True)
    (tmp_path / "top").mkdir()
    (tmp_path / "lab" / "parts" / "schedule.py").write_text(SCHEDULE.format(scale=1))
    (tmp_path / "lab" / "parts" / "norm.py").write_text(NORM)
    base = TINY.replace('name = "cosine"\nwarmup = 2', 'name = "./parts/schedule.py:Constant"')
    base = base.replace("[model]\n", '[model]\nnorm = {name = "./parts/norm.py:Plain"}\n')
    (tmp_path / "lab" / "base.toml").write_text(base)
    (tmp_path / "top" / "run.toml").write_text('base = "../lab/base.toml"\n\n[schedule]\nfactor = 0.5\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trust, "_files", set())
    return tmp_path


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Calls `forge-train`: exit code and output, in one line."""

    def call(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        found = capsys.readouterr()
        return int(ended.value.code or 0), " ".join((found.out + found.err).split())

    return call


def test_every_command_takes_a_recipe_whose_base_names_files(project: Path, say: Callable[..., tuple[int, str]]) -> None:
    code, said = say("check", "top/run.toml")
    assert code == 0 and "norm.py, schedule.py" in said
    code, said = say("plan", "top/run.toml")
    assert code == 0 and "optimizer state" in said
    code, said = say("config", "show", "top/run.toml")
    assert code == 0 and f'"{project}/lab/parts/schedule.py:Constant"' in said and "factor = 0.5" in said
    code, said = say("config", "explain", "top/run.toml", "schedule.factor")
    assert code == 0 and "Factor on the learning rate" in said and "greater than 0" in said
    code, said = say("check", "top/run.toml", "--schedule.factor=-1", "--schedule.facter=1")
    assert code == 2 and "greater than 0, not -1" in said and "did you mean 'factor'" in said
    code, said = say("plugins", "show", "lab/parts/schedule.py:Constant", "--group", "schedules")
    assert code == 0 and "factor" in said
    assert say("run", "top/run.toml", "--job.dir=run", "--hooks=[{name='log', every=1}]")[0] == 0
    (project / "lab" / "parts" / "schedule.py").unlink()
    code, said = say("report", "run")
    assert code == 0 and "schedule.py:Constant" in (project / "run" / "report.html").read_text(), said


def test_a_run_keeps_the_files_that_ran_and_says_that_one_has_changed(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe, run, file = project / "top" / "run.toml", project / "run", project / "lab" / "parts" / "schedule.py"
    first = file.read_bytes()
    train(recipe, [f"--job.dir={run}", "--train.max_steps=3"])
    digest = sha256(first).hexdigest()[:12]
    copy = run / PLUGIN_FILES / f"schedule-{digest}.py"
    assert copy.read_bytes() == first and copy.stat().st_mode & 0o777 == 0o600
    assert len(list(copy.parent.iterdir())) == 2, "of the schedule and of the norm"

    with caplog.at_level("INFO", logger="forge_train"):
        train(recipe, [f"--job.dir={run}", "--train.max_steps=4"])
    assert "schedule.py was" not in caplog.text

    file.write_text(SCHEDULE.format(scale=0.25))  # in the same process, as in a notebook
    caplog.clear()
    with caplog.at_level("INFO", logger="forge_train"):
        train(recipe, [f"--job.dir={run}", "--train.max_steps=5"])
    now = sha256(file.read_bytes()).hexdigest()[:12]
    assert f"schedule.py was sha256:{digest}, is sha256:{now}" in caplog.text and "norm.py was" not in caplog.text
    assert load_recipe(recipe).job.schedule.build(5)(0) == 0.125, "0.5 by 0.25: the code that was edited runs"
    assert {path.name for path in copy.parent.glob("schedule-*")} == {copy.name, f"schedule-{now}.py"}

    file.write_bytes(copy.read_bytes())
    assert load_recipe(recipe).job.schedule.build(5)(0) == 0.5, "the copy is the code of the first start"


def test_two_files_of_one_name_are_told_apart(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = project / "lab" / "schedule.py"
    other.write_text(NORM)
    overrides = [f"--job.dir={project / 'run'}", f"--model.norm.name={other}:Plain"]
    train(project / "top" / "run.toml", [*overrides, "--train.max_steps=3"])
    assert len(list((project / "run" / PLUGIN_FILES).glob("schedule-*.py"))) == 2
    with caplog.at_level("INFO", logger="forge_train"):
        train(project / "top" / "run.toml", [*overrides, "--train.max_steps=4"])
    assert "schedule.py was" not in caplog.text
    (project / "lab" / "parts" / "schedule.py").write_text(SCHEDULE.format(scale=2))
    with caplog.at_level("INFO", logger="forge_train"):
        train(project / "top" / "run.toml", [*overrides, "--train.max_steps=5"])
    assert "schedule.py was" in caplog.text


def test_a_class_that_is_called_like_ours_does_not_replace_ours(project: Path) -> None:
    file = project / "cosine.py"
    file.write_text(SCHEDULE.format(scale=1).replace("Constant", "Cosine"))
    named = load_recipe("debug", [f"--schedule.name={file}:Cosine"]).job.schedule
    ours = load_recipe("debug", ["--schedule.name=cosine"]).job.schedule
    assert type(named).__module__.startswith("forge_file_") and type(ours).__module__ == "forge_train.schedules"


WRONG = {
    "absent": ("./shedule.py:Constant", None, ["does not exist", "did you mean 'schedule.py'?"]),
    "absent, and nothing is like it": ("./x/y.py:Constant", None, ["does not exist", "starts at the folder of the recipe"]),
    "no class in the name": ("./mine.py", "", ["names a file", "./mine.py:ClassName"]),
    "syntax": ("./mine.py:Mine", "def x(:\n", ["SyntaxError", "mine.py, line 1"]),
    "fails when it is imported": ("./mine.py:Mine", "one = 1\nboom = one / 0\n", ["ZeroDivisionError", "(line 2)"]),
    "imports its neighbor": (
        "./mine.py:Mine",
        "import schedule\n",
        ["No module named 'schedule'", "move schedule into the file"],
    ),
    "imports what is not installed": ("./mine.py:Mine", "import no_such_library\n", ["No module named 'no_such_library'"]),
    "no class": ("./mine.py:Mine", "x = 1\n", ["defines no class", "derive a class from forge_core.Component"]),
    "another class": ("./mine.py:Mine", "class Mind: pass\n", ["did you mean 'Mind'?"]),
    "no component": ("./mine.py:Mine", "class Mine: pass\n", ["derive a class from forge_core.Component", "@dataclass"]),
    "of another group": ("./mine.py:Plain", NORM, ["has build(self, dim)", "its group calls build(self, steps)"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_with_what_to_do(tmp_path: Path, case: str) -> None:
    name, content, told = WRONG[case]
    (tmp_path / "schedule.py").write_text(SCHEDULE.format(scale=1))
    if content is not None:
        (tmp_path / "mine.py").write_text(content)
    (tmp_path / "mine.toml").write_text(f'base = "debug"\n\n[schedule]\nname = "{name}"\n')
    with pytest.raises(ConfigError) as refused:
        load_recipe(tmp_path / "mine.toml")
    (fault,) = refused.value.faults
    assert fault.key == "schedule.name" and fault.origin.endswith("mine.toml:4")
    assert all(words in fault.message for words in told), fault.message


PARTS = SCHEDULE.format(scale=1) + NORM


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """`run.toml` names `Constant` and `Plain` of `lab/parts.py`, which the base `lab/base.toml` lists."""
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "parts.py").write_text(PARTS)
    base = TINY.replace('name = "cosine"\nwarmup = 2', 'name = "Constant"')
    (tmp_path / "lab" / "base.toml").write_text('plugins = ["./parts.py"]\n' + base)
    (tmp_path / "run.toml").write_text('base = "lab/base.toml"\n\n[model]\nnorm = {name = "Plain"}\n[schedule]\nfactor = 0.5\n')
    return tmp_path


def test_classes_of_listed_files_need_no_file_name(listed: Path) -> None:
    recipe = load_recipe(listed / "run.toml")
    place = listed / "lab" / "parts.py"
    assert (type(recipe.job.schedule).__name__, recipe.job.schedule.factor) == ("Constant", 0.5)
    assert {("forge.schedules", f"{place}:Constant"), ("forge.norms", f"{place}:Plain")} <= set(recipe.used)


def test_a_run_keeps_the_full_names_of_listed_classes(listed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(listed)
    train(Path("run.toml"), ["--job.dir=out", "--train.max_steps=2"])
    kept = (listed / "out" / "config.toml").read_text()
    assert "plugins" not in kept and f'name = "{listed / "lab" / "parts.py"}:Constant"' in kept
    assert [file.read_text() for file in (listed / "out" / PLUGIN_FILES).rglob("*.py")] == [PARTS]


def test_a_listed_class_is_named_on_the_command_line_and_the_list_given_there(listed: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.py").write_text(SCHEDULE.format(scale=3).replace("class Constant", "class Triple"))
    recipe = load_recipe(listed / "run.toml", ["--schedule.name=Triple", '--plugins=["more.py"]', "--schedule.factor=2"])
    assert recipe.job.schedule.build(10)(0) == 6
    assert load_recipe(Path("lab/base.toml"), ["--model.norm.name=Plain"]).job.model.norm.__class__.__name__ == "Plain"


def test_a_listed_file_runs_only_if_a_class_of_it_is_chosen(listed: Path) -> None:
    (listed / "lab" / "parts.py").write_text(PARTS + "\nraise SystemExit('ran')\n")
    load_recipe(listed / "lab" / "base.toml", ["--schedule.name=constant"])
    with pytest.raises(ConfigError, match="ran"):
        load_recipe(listed / "lab" / "base.toml")


def test_items_of_lists_and_keys_of_tables_name_listed_classes(listed: Path) -> None:
    (listed / "more.py").write_text(HOOK + WEIGHTED)
    parts = '\n[[hooks]]\nname = "Counted"\nevery = 5\n\n[transforms.Weighted]\n'
    recipe = listed / "more.toml"
    recipe.write_text('base = "run.toml"\nplugins = ["more.py"]\n' + parts)
    loaded = load_recipe(recipe)
    (hook,) = loaded.job.hooks
    assert (type(hook).__name__, hook.every) == ("Counted", 5)
    assert type(loaded.job.transforms["Weighted"]).__name__ == "Weighted"
    assert ("forge.transforms", f"{listed / 'more.py'}:Weighted") in loaded.used


@pytest.mark.parametrize(("name", "told"), [("Constat", "'Constant'"), ("cosin", "'cosine'"), ("Unlike", "known: ")])
def test_a_misspelt_name_gets_the_nearest_of_listed_classes_and_components(listed: Path, name: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_recipe(listed / "run.toml", [f"--schedule.name={name}"])
    (fault,) = [fault for fault in refused.value.faults if fault.key == "schedule.name"]
    assert fault.origin == "--schedule.name" and told in f"{fault.message} {fault.hint}"


def test_a_name_of_two_distributions_is_not_taken_for_a_listed_class(listed: Path) -> None:
    registry = Registry()
    (ours,) = [entry for entry in registry.of("forge.schedules") if entry.name == "constant"]
    both = [Entry(ours.group, "Constants", distribution, "1", ours.target) for distribution in ("one", "other")]
    with pytest.raises(ConfigError, match=r"'Constants' is claimed by one 1 and other 1"):
        load_recipe(listed / "run.toml", ["--schedule.name=Constants"], 1, Registry([*registry.entries, *both]))


def test_names_of_other_keys_are_no_classes(listed: Path) -> None:
    assert load_recipe(listed / "run.toml", ["--job.name=Constant"]).job.job.name == "Constant"


LISTS = {
    "no list": ('"./parts.py"', "plugins", "expected a list of Python files"),
    "no text": ("[1]", "plugins", "expected a list of Python files"),
    "a module": ('["my.parts"]', "plugins.0", "entry points"),
    "absent": ('["./parts.py", "./part.py"]', "plugins.1", "did you mean 'parts.py'?"),
    "no Python": ('["./wrong.py"]', "plugins.0", "(wrong.py, line 1)"),
    "a folder": ('["./lab.py"]', "plugins.0", "does not exist"),
    "without a class": ('["./empty.py"]', "plugins.0", "defines no class"),
    "two meanings": ('["./parts.py", "./other.py"]', "schedule.name", "other.py:Constant'"),
}


@pytest.mark.parametrize("case", LISTS)
def test_a_wrong_list_of_plugins_is_refused_with_what_to_do(tmp_path: Path, case: str) -> None:
    plugins, key, told = LISTS[case]
    for name, content in {"parts": PARTS, "other": PARTS, "wrong": "def x(:\n", "empty": "x = 1\n"}.items():
        (tmp_path / f"{name}.py").write_text(content)
    (tmp_path / "lab.py").mkdir()
    (tmp_path / "mine.toml").write_text(f'base = "debug"\nplugins = {plugins}\n\n[schedule]\nname = "Constant"\n')
    with pytest.raises(ConfigError) as refused:
        load_recipe(tmp_path / "mine.toml")
    (fault,) = refused.value.faults
    assert fault.key == key and told in f"{fault.message} {fault.hint}"
    assert fault.origin.endswith("mine.toml:2" if key.startswith("plugins") else "mine.toml:5")


def test_a_listed_file_that_cannot_be_read_is_refused(listed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes

    def denied(path: Path) -> bytes:
        if path.suffix == ".py":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(ConfigError, match=r"cannot be read as Python: .*Permission denied"):
        load_recipe(listed / "run.toml")


def test_a_listed_class_does_not_take_over_the_name_of_a_component(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCHEDULE.format(scale=1).replace("class Constant", "class constant"))
    (tmp_path / "mine.toml").write_text('base = "debug"\nplugins = ["mine.py"]\n[schedule]\nname = "constant"\n')
    with pytest.raises(ConfigError, match=r"several meanings; write .*mine\.py:constant' or 'forge-train:constant'"):
        load_recipe(tmp_path / "mine.toml")
    (tmp_path / "mine.toml").write_text('base = "debug"\nplugins = ["mine.py"]\n[schedule]\nname = "forge-train:constant"\n')
    assert type(load_recipe(tmp_path / "mine.toml").job.schedule).__name__ == "Constant"


def test_a_list_of_plugins_in_a_table_is_told_where_it_belongs(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "debug"\n[train]\nplugins = ["./mine.py"]\n')
    with pytest.raises(ConfigError, match="at the top of the user's file"):
        load_recipe(tmp_path / "mine.toml")
