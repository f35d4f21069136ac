"""Fewer local ranks: a place that fails twice in a row is left out, a device that is gone too; what does not fit is said."""

import os
import sys
from pathlib import Path

import pytest

from forge_ckpt.resilience.fewer import Fewer
from forge_ckpt.resilience.local_ranks import DEVICE, Ended
from forge_ckpt.resilience.restarts import supervise
from forge_parallel.launch import environment

KILLED = Ended(-9, "rank 1 was ended by SIGKILL", 1)


def halves(size: int) -> str:
    """As a global batch of 8 rows has it."""
    return "" if 8 % size == 0 else f"8 rows cannot be divided among {size}"


def test_the_second_failure_of_a_place_in_a_row_leaves_it_out() -> None:
    fewer = Fewer(1, halves)
    assert fewer.after(KILLED, range(4)) == ([0, 1, 2, 3], "")
    places, said = fewer.after(KILLED, range(4))
    assert places == [0, 2], "three ranks do not divide the batch"
    assert said == "the rank at local place 1 failed twice in a row: going on with 2 of 4 ranks, at local places 0, 2"
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
    assert said.endswith("no smaller number of ranks from 2 on fits: with 3: 3 are refused; with 2: 2 are refused")
    assert fewer.largest(2) == (0, "2 ranks cannot get fewer")


@pytest.mark.parametrize(("there", "expected"), [(3, [0, 1]), (2, [0, 1]), (1, [0]), (0, [0, 1, 2, 3]), (4, [0, 1, 2, 3])])
def test_a_device_that_is_gone_is_not_waited_for(there: int, expected: list[int]) -> None:
    places, said = Fewer(1, halves, devices=lambda: there).after(Ended(1, "", 3), range(4))
    assert places == expected
    assert (f"this machine shows {there} device" in said) == (len(expected) < 4)


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
    assert supervise(command, 4, 3, os.environ, said.append, grace=0.2, fewer=Fewer(2, halves)) == 0
    lives = {path.name: path.read_text() for path in tmp_path.glob("life-2-*")}
    assert lives == {"life-2-0": "0 0 2 2 0", "life-2-1": "1 1 2 2 2"}
    assert [line.partition(";")[0] for line in said] == [
        "rank 1 was ended by SIGKILL",
        "rank 1 was ended by SIGKILL",
        "the rank at local place 1 failed twice in a row: going on with 2 of 4 ranks, at local places 0, 2",
    ]
    assert DEVICE == environment.DEVICE
