"""What counts as depending on the device, what counts as run; and the list of what no rehearsal runs is short and not stale."""

import ast
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest
import torch

from rehearsal.reach import unreached
from rehearsal.reach.record import Loader
from rehearsal.reach.scope import Line, every_line, lines


def texts(source: str, module: str = "forge_some.part") -> list[str]:
    source = dedent(source)
    return [line.text for _, line in lines(ast.parse(source), source, module)]


def test_the_list_names_lines_that_are_there_and_few() -> None:
    known, listed = set(every_line()), unreached.listed(unreached.LIST.read_text())
    assert [str(line) for line in listed if line not in known] == [], "run nox -s rehearsal"
    assert len(set(listed)) == len(listed)
    assert len(listed) < len(known) / 4


@pytest.mark.parametrize(
    "question",
    [
        "device.type == 'cpu'",
        "x.device.type != accelerator.CPU.type",
        "device.type not in HOSTS",
        "accelerator.kind()",
        "has_flex(device)",
    ],
)
def test_a_function_that_asks_is_in_the_scope(question: str) -> None:
    source = f"""
    from forge_models.accelerator import HOSTS, has_flex
    from forge_parallel import accelerator

    class Part:
        def asks(self, device):
            '''Not a line.'''
            found = {question}
            def inner():
                return 2
            return inner

        def does_not(self):
            return 3
    """
    assert texts(source) == [f"found = {question}", "def inner():", "return 2", "return inner"]


def test_rooms_are_in_the_scope_whole() -> None:
    assert texts("def one():\n    return 1\n", "forge_data.accelerator") == ["return 1"]
    assert texts("def one():\n    return 1\n") == []


def test_lines_that_are_alike_are_told_apart() -> None:
    source = "def one(d):\n    if d.type == 'cpu':\n        return 1\n    try:\n        return 1\n    finally:\n        pass\n"
    assert texts(source) == ["if d.type == 'cpu':", "return 1", "try:", "return 1 (2)", "pass"]


def test_lines_are_marked_where_they_run_and_nowhere_else(tmp_path: Path) -> None:
    file, run = tmp_path / "part.py", list[Line]()
    file.write_text("def one(d):\n    if d.type == 'cpu':\n        return 1\n    else:\n        found = 2\n    return found\n")
    module = ModuleType("forge_some.part")
    Loader("forge_some.part", str(file), run.append).exec_module(module)
    assert module.one(torch.device("meta")) == module.one(torch.device("meta")) == 2
    assert [line.text for line in run] == ["if d.type == 'cpu':", "found = 2", "return found"]


def test_a_process_writes_down_what_it_runs(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from pathlib import Path\n"
        "from rehearsal.reach.record import Marking\n"
        f"sys.meta_path.insert(0, Marking(Path({str(tmp_path)!r})))\n"
        "from threading import Thread\n"
        "from forge_parallel import accelerator\n"
        "thread = Thread(target=accelerator.current)\n"
        "thread.start(); thread.join()\n"
        "import os; os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    found = {line for line in unreached.reached(tmp_path) if ":current:" in line}
    assert found == {
        "forge_parallel.accelerator:current: current_kind = kind()",
        f"forge_parallel.accelerator:current: {_second_line_of_current()}",
    }


def _second_line_of_current() -> str:
    return [line.text for line in every_line() if (line.module, line.function) == ("forge_parallel.accelerator", "current")][1]


def test_a_list_says_what_it_was_given() -> None:
    known = every_line()
    half = {str(line) for line in known[::2]}
    text = unreached.written(known, half)
    assert unreached.listed(text) == [line for line in known if str(line) not in half]
