"""Commands in forks: what they leave is what an interpreter of their own leaves."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import commands

PROBE = """
import atexit, json, os, sys, threading, warnings
atexit.register(lambda: print("at the end", file=sys.stderr))
def late():
    import time
    time.sleep(0.05)
    print("from a thread", file=sys.stderr)
threading.Thread(target=late).start()
import beside
paths = [path for path in sys.path if "site-packages" not in path and "__editable__" not in path]
print(json.dumps({
    "name": __name__, "arguments": sys.argv[1:], "directory": os.getcwd(), "path": paths, "answer": beside.answer,
    "environment": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},
    "main": sys.modules["__main__"].__dict__ is globals(), "files": [sys.stdout.isatty(), sys.stdin.read()],
    "warnings": [str(item) for item in warnings.filters[-4:]],
}))
sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "there").mkdir()
    for folder in (tmp_path, tmp_path / "there"):
        (folder / "beside.py").write_text("answer = 42\n")
        (folder / "probe.py").write_text(PROBE)
    return tmp_path


@pytest.mark.parametrize("words", [("-m", "probe"), ("-c", PROBE), ("there/probe.py",)], ids=("module", "code", "script"))
def test_a_command_is_what_it_is_in_an_interpreter_of_its_own(here: Path, words: tuple[str, ...]) -> None:
    environment = {**os.environ, "MINE": "ä", "PYTHONPATH": str(here / "elsewhere")}
    given = (*words, "--key=1 2", "", "7")
    alone = subprocess.run(
        [sys.executable, *given], cwd=here, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    forked = commands.run(*given, cwd=here, env=environment, torch=False)
    assert json.loads(forked.stdout) == json.loads(alone.stdout)
    assert (forked.returncode, forked.stderr) == (alone.returncode, alone.stderr) == (7, "from a thread\nat the end\n")


@pytest.mark.parametrize(
    ("code", "returned", "error"),
    [
        ("raise SystemExit('refused')", 1, "refused\n"),
        ("raise ValueError('of no use')", 1, "ValueError: of no use\n"),
        ("import os; os._exit(3)", 3, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
        ("pass", 0, ""),
    ],
)
def test_every_end_has_its_exit_code(code: str, returned: int, error: str) -> None:
    done = commands.run("-c", code)
    # a library may print at the end of a process that failed: nanobind reports objects that the traceback still holds
    assert (done.returncode, done.stdout) == (returned, "") and error in done.stderr and bool(done.stderr) == bool(error)


def test_a_command_finds_nothing_of_the_one_before(tmp_path: Path) -> None:
    code = "import os, sys, torch; print(hasattr(torch, 'mine'), 'MINE' in os.environ); torch.mine = os.environ['MINE'] = '1'"
    assert {commands.run("-c", code, cwd=tmp_path).stdout for _ in range(2)} == {"False False\n"}
    ids = {commands.run("-c", "import os; print(os.getpid(), os.getppid())").stdout for _ in range(2)}
    assert len(ids) == 2 and len({line.split()[1] for line in ids}) == 1, "forks of one process"


@pytest.mark.parametrize("threads", ["1", "2"])
def test_torch_has_as_many_threads_as_the_environment_says(threads: str) -> None:
    code = "import torch; print(torch.get_num_threads())"
    assert commands.run("-c", code, env={**os.environ, "OMP_NUM_THREADS": threads}).stdout == f"{threads}\n"


def test_a_command_without_torch_finds_what_it_imports_itself() -> None:
    heavy = "print(sorted({'torch', 'numpy', 'transformers', 'tokenizers', 'matplotlib'} & set(sys.modules)))"
    for code, expected in ((f"import sys; {heavy}", "[]"), (f"import sys, numpy; {heavy}", "['numpy']")):
        assert commands.run("-c", code, torch=False).stdout == expected + "\n"


def test_output_larger_than_a_pipe_arrives_whole() -> None:
    done = commands.run("-c", "import sys; print('o' * 300_000); print('e' * 300_000, file=sys.stderr)")
    assert (done.stdout, done.stderr) == ("o" * 300_000 + "\n", "e" * 300_000 + "\n")


HANGS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["time.sleep(600)", "os._exit(0)"], ids=("hangs", "leaves a child that holds its output"))
def test_a_command_that_does_not_end_is_killed_with_its_children(then: str) -> None:
    begin = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired) as late:
        commands.run("-c", HANGS.format(then=then), timeout=1.0)
    assert time.monotonic() - begin < 20
    for pid in late.value.output.split():
        assert _gone(int(pid))
    assert commands.run("-c", "print('next')").stdout == "next\n"


ORPHANS = """
import threading, time
from harness import commands
threading.Thread(target=commands.run, args=("-c", {code!r}), kwargs={{"torch": False}}, daemon=True).start()
time.sleep(600)
"""


def test_nothing_survives_a_test_process_that_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "note"
    code = (
        f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(f'{{os.getpid()}} {{os.getppid()}} '); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS.format(code=code)], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not (note.exists() and note.read_text().endswith(" ")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    for pid in note.read_text().split():
        assert _gone(int(pid))


def _gone(pid: int) -> bool:
    """Waits until no such process runs; one that ended without being asked for its code counts as gone."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False
