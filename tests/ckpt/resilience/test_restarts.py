"""Ranks as processes: when one is gone all are, with the first cause named; they are started again as long as that may help."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_ckpt.resilience.local_ranks import Ended, run_local_ranks
from forge_ckpt.resilience.restarts import Passed, supervise

RANK = """
import json, os, signal, sys, time
from pathlib import Path

how, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
(folder / f"pid-{life}-{rank}").write_text(str(os.getpid()))
(folder / f"port-{life}-{rank}").write_text(os.environ["MASTER_PORT"])
if how.startswith("mends") and life != "0" or how == "well":
    sys.exit(0)
if rank != 2:
    if how.endswith("follow"):
        time.sleep(0.5)
        os._exit(5)
    time.sleep(1000)
time.sleep(0.2)
kind = how.split()[-1] if not how.endswith("follow") else "SIGKILL"
if kind == "SIGKILL":
    os.kill(os.getpid(), signal.SIGKILL)
if kind == "SIGSEGV":
    import ctypes
    ctypes.string_at(0)
if kind == "exit":
    os._exit(9)
if kind == "import":
    import no_such_module
if kind == "refused":
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": {"message": "exit code 2: a wrong key"}}))
    os._exit(2)
raise ValueError("an exception")
"""


def command(folder: Path, how: str) -> list[str]:
    (folder / "rank.py").write_text(RANK)
    return [sys.executable, str(folder / "rank.py"), how, str(folder)]


def alive(folder: Path) -> list[int]:
    """Ranks that were started and run still."""
    found = []
    for path in folder.glob("pid-*"):
        pid = int(path.read_text() or 0)
        status = Path(f"/proc/{pid}/status")
        if status.exists() and "(zombie)" not in status.read_text():
            found.append(pid)
    return found


CAUSES = {
    "SIGKILL": Ended(-9, "rank 2 was ended by SIGKILL", 2),
    "SIGSEGV": Ended(-11, "rank 2 was ended by SIGSEGV", 2),
    "exit": Ended(9, "rank 2 ended with exit code 9 without a word", 2),
    "exception": Ended(1, "rank 2 ended with exit code 1 without a word", 2),
    "import": Ended(1, "rank 2 ended with exit code 1 without a word", 2),
    "refused": Ended(2, "rank 2 exit code 2: a wrong key", 2),
    "all follow": Ended(-9, "rank 2 was ended by SIGKILL", 2),
}


@pytest.mark.parametrize("how", CAUSES)
def test_fault_33_when_a_rank_is_gone_all_are_and_the_first_cause_is_named(tmp_path: Path, how: str) -> None:
    began = time.monotonic()
    assert run_local_ranks(command(tmp_path, how), range(4), os.environ, grace=1.0) == CAUSES[how]
    assert time.monotonic() - began < 10
    assert len(list(tmp_path.glob("pid-0-*"))) == 4
    assert alive(tmp_path) == []


def test_fault_33_ranks_do_not_outlive_who_started_them(tmp_path: Path) -> None:
    parent = tmp_path / "parent.py"
    started = command(tmp_path, "waits")
    parent.write_text(f"import os\nfrom forge_ckpt.resilience.local_ranks import run\nrun({started!r}, range(2), os.environ)\n")
    with subprocess.Popen([sys.executable, str(parent)]) as supervisor:
        until = time.monotonic() + 30
        while len(alive(tmp_path)) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        both = alive(tmp_path)
        supervisor.kill()
    assert len(both) == 2
    while alive(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert alive(tmp_path) == []


def lives(folder: Path) -> int:
    return len({path.name.split("-")[1] for path in folder.glob("pid-*")})


@pytest.mark.parametrize(
    ("how", "restarts", "code", "expected"),
    [
        ("well", 2, 0, 1),
        ("mends SIGKILL", 2, 0, 2),
        ("mends exception", 1, 0, 2),
        ("SIGKILL", 2, 5, 3),
        ("exception", 1, 1, 2),
        ("refused", 2, 2, 1),
        ("exit", 2, 9, 1),
    ],
)
def test_failed_ranks_are_started_again_as_long_as_that_may_help(
    tmp_path: Path, how: str, restarts: int, code: int, expected: int
) -> None:
    said: list[str] = []
    assert supervise(command(tmp_path, how), 3, restarts, os.environ, said.append, grace=0.3) == code
    assert lives(tmp_path) == expected
    assert alive(tmp_path) == []
    again = [line for line in said if "restart" in line and "no restart" not in line]
    assert len(again) == expected - 1
    if expected > 1:
        assert again[0].startswith("rank 2 ") and f"restart 1 of {restarts}, from the newest verified checkpoint" in again[0]
        ports = {path.read_text() for path in tmp_path.glob("port-0-*")}
        assert len(ports) == 1, "all ranks of a life meet at one address"
    if code and expected > restarts:
        assert said[-1].endswith(f"no restart is left of {restarts}")


def test_after_a_signal_nothing_is_started_again(tmp_path: Path) -> None:
    signals = Passed()
    signals.note(signal.SIGTERM, None)
    assert supervise(command(tmp_path, "SIGKILL"), 3, 5, os.environ, print, signals, grace=0.3) == 5
    assert lives(tmp_path) <= 1
    assert signals.take() == [], "it was passed on"
