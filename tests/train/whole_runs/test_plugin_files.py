"""Classes in Python files that a recipe names: from layered recipes, through every command, edited, absent and wrong."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from forge_core import trust
from forge_core.errors import ConfigError
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


def test_a_list_of_plugins_is_told_where_the_file_belongs(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "debug"\nplugins = ["./mine.py"]\n')
    with pytest.raises(ConfigError, match=r'name = "\./file\.py:ClassName"'):
        load_recipe(tmp_path / "mine.toml")
