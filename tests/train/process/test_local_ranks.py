"""Ranks as processes: when one is gone all are, with the first cause named; they are started again as long as that may help."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from forge_train.process.restarts import Ended, Fewer, Passed, run_local_ranks, supervise
from harness.siblings import fast

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
        time.sleep(0.0 if how.startswith("first") else 0.5)
        os._exit(5)
    time.sleep(1000)
time.sleep(0.6 if how.startswith("first") else 0.2)
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
    "exit": Ended(9, "rank 2 ended with exit code 9 without a message", 2),
    "exception": Ended(1, "rank 2 ended with exit code 1 without a message", 2),
    "import": Ended(1, "rank 2 ended with exit code 1 without a message", 2),
    "refused": Ended(2, "rank 2 exit code 2: a wrong key", 2),
    "all follow": Ended(-9, "rank 2 was ended by SIGKILL", 2),
    "first all follow": Ended(-9, "rank 2 was ended by SIGKILL", 2),  # the rank that failed may take longer to end
}


@pytest.mark.parametrize("how", fast("SIGKILL", "exit", "refused", "first all follow", of=CAUSES))
def test_fault_33_when_a_rank_is_gone_all_are_and_the_first_cause_is_named(tmp_path: Path, how: str) -> None:
    began = time.monotonic()
    assert run_local_ranks(command(tmp_path, how), range(4), grace=1.0) == CAUSES[how]
    assert time.monotonic() - began < 10
    assert len(list(tmp_path.glob("pid-0-*"))) == 4
    assert alive(tmp_path) == []


def test_fault_33_ranks_do_not_outlive_who_started_them(tmp_path: Path) -> None:
    parent = tmp_path / "parent.py"
    started = command(tmp_path, "waits")
    imports = "from forge_train.process.restarts import run_local_ranks\n"
    parent.write_text(f"{imports}run_local_ranks({started!r}, range(2))\n")
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
        pytest.param("mends exception", 1, 0, 2, marks=pytest.mark.slow),
        pytest.param("SIGKILL", 2, 5, 3, marks=pytest.mark.slow),
        ("exception", 1, 1, 2),
        ("refused", 2, 2, 1),
        ("exit", 2, 9, 1),
    ],
)
def test_failed_ranks_are_started_again_as_long_as_that_may_help(
    tmp_path: Path, how: str, restarts: int, code: int, expected: int
) -> None:
    said: list[str] = []
    assert supervise(command(tmp_path, how), 3, restarts, said.append, grace=0.3) == code
    assert lives(tmp_path) == expected
    assert alive(tmp_path) == []
    again = [line for line in said if "restart" in line and "no restart" not in line]
    assert len(again) == expected - 1
    if expected > 1:
        assert again[0].startswith("rank 2 ") and f"restart 1 of {restarts}, from the newest verified checkpoint" in again[0]
        ports = {path.read_text() for path in tmp_path.glob("port-0-*")}
        assert len(ports) == 1, "all ranks of a life meet at one address"
    if code and expected > restarts:
        assert said[-1].endswith(f"no restarts left (maximum {restarts})")


def test_after_a_signal_nothing_is_started_again(tmp_path: Path) -> None:
    signals = Passed()
    signals.note(signal.SIGTERM, None)
    assert supervise(command(tmp_path, "SIGKILL"), 3, 5, print, signals, grace=0.3) == 5
    assert lives(tmp_path) <= 1
    assert signals.take() == [], "it was passed on"


SAVING_RANK = """
import os, signal, sys, time
from pathlib import Path

folder, rank, received = Path(sys.argv[1]), int(os.environ["RANK"]), []
signal.signal(signal.SIGTERM, lambda number, frame: received.append("SIGTERM"))
signal.signal(signal.SIGUSR1, lambda number, frame: received.append("SIGUSR1"))
(folder / f"ready-{rank}").touch()
while not received:
    time.sleep(0.01)
if rank == 0:
    time.sleep(1.0)
    (folder / "saved").write_text(" ".join(received))
print(f"line of rank {rank}", flush=True)
os._exit(75)
"""


def test_a_rank_that_still_saves_is_not_disturbed_when_others_have_ended_with_75(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch's `PContext.wait` sends SIGTERM to the others as soon as one rank has ended with another code than 0."""
    (tmp_path / "rank.py").write_text(SAVING_RANK)
    signals = Passed()

    def warn_when_ready() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 3:
            time.sleep(0.01)
        signals.note(signal.SIGUSR1, None)

    thread = threading.Thread(target=warn_when_ready)
    thread.start()
    command = [sys.executable, str(tmp_path / "rank.py"), str(tmp_path)]
    assert supervise(command, 3, 5, print, signals) == 75
    thread.join()
    assert (tmp_path / "saved").read_text() == "SIGUSR1"
    assert sorted(capfd.readouterr().out.splitlines()) == [f"line of rank {rank}" for rank in range(3)]


KILLED = Ended(-9, "rank 1 was ended by SIGKILL", 1)


def halves(size: int) -> str:
    """As a global batch of 8 rows has it."""
    return "" if 8 % size == 0 else f"8 rows cannot be divided among {size}"


def test_the_second_failure_of_a_place_in_a_row_leaves_it_out() -> None:
    fewer = Fewer(1, halves)
    assert fewer.after(KILLED, range(4)) == ([0, 1, 2, 3], "")
    places, said = fewer.after(KILLED, range(4))
    assert places == [0, 2], "three ranks do not divide the batch"
    assert said == "the rank at local place 1 failed twice in a row: continuing with 2 of 4 ranks, at local places 0, 2"
    assert fewer.after(KILLED, places) == ([0, 2], ""), "rank 1 is at place 2 now: a first failure"
    assert fewer.after(Ended(1, "", 0), places) == ([0, 2], ""), "another place"
    assert fewer.after(KILLED, places) == ([0, 2], ""), "not in a row"
    assert fewer.after(KILLED, places)[0] == [0]


def test_failures_that_say_nothing_about_a_place_do_not_count() -> None:
    fewer = Fewer(1, halves, blameless=(5, 8))
    for code in (5, 8, 5):
        assert fewer.after(Ended(code, "", 1), range(4)) == ([0, 1, 2, 3], "")
    fewer.after(KILLED, range(4))
    assert fewer.after(Ended(8, "", 1), range(4))[0] == [0, 1, 2, 3], "one that counts, and one that does not"
    assert fewer.after(KILLED, range(4))[0] == [0, 1, 2, 3]


def test_what_does_not_fit_is_said_and_all_are_started_again() -> None:
    fewer = Fewer(2, lambda size: f"{size} are refused")
    fewer.after(KILLED, range(4))
    places, said = fewer.after(KILLED, range(4))
    assert places == [0, 1, 2, 3]
    assert said.endswith("no smaller number of ranks, down to 2, fits: with 3: 3 are refused; with 2: 2 are refused")
    assert fewer.largest(2) == (0, "2 ranks cannot be reduced further")


@pytest.mark.parametrize(("there", "expected"), [(3, [0, 1]), (2, [0, 1]), (1, [0]), (0, [0, 1, 2, 3]), (4, [0, 1, 2, 3])])
def test_a_device_that_is_gone_is_not_waited_for(there: int, expected: list[int]) -> None:
    places, said = Fewer(1, halves, devices=lambda: there).after(Ended(1, "", 3), range(4))
    assert places == expected
    assert (f"this machine now has only {there} device" in said) == (len(expected) < 4)


def test_devices_that_are_left_have_new_numbers_when_one_more_is_gone() -> None:
    """Of four, place 1 is left out; then the machine shows two: they are 0 and 1."""
    assert Fewer(1, halves, devices=lambda: 2).after(Ended(1, "", 0), [0, 2])[0] == [0, 1]


REPORTING_RANK = """
import os, signal, sys, time
from pathlib import Path
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "FORGE_LOCAL_DEVICE")
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
(Path(sys.argv[1]) / f"life-{life}-{os.environ['RANK']}").write_text(" ".join(os.environ[name] for name in names))
if os.environ["FORGE_LOCAL_DEVICE"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.3 if os.environ["WORLD_SIZE"] == "2" else 1000)
"""


def test_ranks_that_are_left_find_their_devices(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(REPORTING_RANK)
    said: list[str] = []
    command = [sys.executable, str(tmp_path / "rank.py"), str(tmp_path)]
    assert supervise(command, 4, 3, said.append, grace=0.2, fewer=Fewer(2, halves)) == 0
    lives = {path.name: path.read_text() for path in tmp_path.glob("life-2-*")}
    assert lives == {"life-2-0": "0 0 2 2 0", "life-2-1": "1 1 2 2 2"}
    assert [line.partition(";")[0] for line in said] == [
        "rank 1 was ended by SIGKILL",
        "rank 1 was ended by SIGKILL",
        "the rank at local place 1 failed twice in a row: continuing with 2 of 4 ranks, at local places 0, 2",
    ]
