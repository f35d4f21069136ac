"""A rank that hangs is named, with its section and the stacks of all ranks, and the processes end: real groups, seconds for what
takes minutes elsewhere."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_parallel.launch.hang_report import Entered, parting
from harness import commands
from harness.siblings import fast

RANK = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path

import torch
import torch.distributed as dist

from forge_parallel.launch import process_group
from forge_parallel.launch.environment import read_launcher
from forge_parallel.launch.limits import LearnedLimits
from forge_parallel.launch.watch import Watch, is_broken_connection

how, folder = sys.argv[1], Path(sys.argv[2])
where = read_launcher(os.environ)
process_group.init_process_groups(where, 60)
watch = Watch.open(where, 1.0, 60)
watch.limits = LearnedLimits(2.0, waiting=())
watch._grace = 3.0
watch.log_to(folder / f"rank-{where.rank}.log")
guilty = where.rank == where.size - 1
lock = threading.Lock()


def wait_for_all(count):
    if where.size > 1:
        dist.all_reduce(torch.zeros(count))


def hang():
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "keeps the interpreter":
        ctypes.PyDLL(None).sleep(40)
    elif how == "lock":
        lock.acquire()
        lock.acquire()
    elif how == "data":
        while True:
            time.sleep(0.001)


def train():
    for step in range(1, 40):
        watch.enter(f"reading the data of step {step}", "data")
        if guilty and step == 20 and how == "data":
            hang()
        watch.enter(f"step {step}", "step")
        wait_for_all(3)
        if guilty and step == 20:
            time.sleep(0.6)  # it is heard of
            if how == "skips a collective":
                dist.all_reduce(torch.zeros(5), group=dist.new_group(list(range(where.size))))
            hang()
        wait_for_all(4)


try:
    train()
except RuntimeError as error:
    assert is_broken_connection(error), error
    os._exit(watch.explain(error).exit_code)
os._exit(0)
"""


def hung(folder: Path, how: str, size: int) -> tuple[list[int], str]:
    """Exit codes of the ranks, and the report."""
    (folder / "rank.py").write_text(RANK)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment["MASTER_PORT"] = str(free.getsockname()[1])
    command = [sys.executable, "rank.py", how, str(folder)]
    if size == 1:
        environment = {key: value for key, value in environment.items() if key != "WORLD_SIZE" and not key.startswith("MASTER")}
    ranks = [
        subprocess.Popen(command, cwd=folder, env=environment | ({"RANK": str(rank)} if size > 1 else {})) for rank in range(size)
    ]
    try:
        until = time.monotonic() + 60
        waited = ranks[:-1] if how == "stopped" else ranks
        for rank in waited:
            rank.wait(until - time.monotonic())
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [rank.returncode for rank in ranks], (folder / "hang.txt").read_text()


WHERE = r"rank \d \(process \d+ on \S+; "
GUILTY = {
    "stopped": r"step 20, .*",
    "keeps the interpreter": r"step 20, .*",
    "lock": r"step 20, rank\.py:\d+ \(hang\), \d+ s",
    "data": r"reading the data of step 20, rank\.py:\d+ \(hang\), \d+ s",
    "skips a collective": r"step 20, rank\.py:\d+ \(train\), \d+ s",
}
CASES = [("stopped", 2), ("keeps the interpreter", 2), ("lock", 2), ("data", 2), ("data", 1), ("skips a collective", 3)]


@pytest.mark.parametrize(("how", "size"), fast(("stopped", 2), of=CASES))
def test_fault_35_a_rank_that_hangs_is_named_with_its_section_and_all_stacks(tmp_path: Path, how: str, size: int) -> None:
    codes, report = hung(tmp_path, how, size)
    assert codes == [5] * (size - 1) + [{"stopped": -signal.SIGKILL, "keeps the interpreter": 1}.get(how, 5)]
    _, cause, *rest = report.splitlines()
    assert re.fullmatch(rf"rank {size - 1} \(process \d+ on \S+; {GUILTY[how]}\) did not come within 2 s", cause)
    stories = re.split(r"--- rank \d ---\n", "\n".join(rest))[1:]
    assert len(stories) == size
    for rank, story in enumerate(stories[:-1]):
        assert re.match(rf"rank {rank} \(.*; step 20, rank\.py:\d+ \(wait_for_all\)", story)
        assert "line" in story and "in wait_for_all" in story and "in train" in story
        assert "default_pg #39 gloo:all_reduce [[3]]" in story, "what torch's flight recorder knows"
    if how in ("stopped", "keeps the interpreter"):
        assert re.match(rf"silent; last status: rank {size - 1} \(", stories[-1])
    else:
        assert re.match(rf"rank {size - 1} \(", stories[-1]) and ("in hang" in stories[-1] or how == "skips a collective")
    if how == "keeps the interpreter":
        assert re.search(r'File ".*rank\.py", line \d+ in hang', (tmp_path / "rank-1.log").read_text()), (
            "written without the lock"
        )
    if how == "skips a collective":
        assert "ranks part at collective 40 of group 0 default_pg: rank 0, 1: gloo:all_reduce [[4]]; rank 2: nothing" in report


def test_fault_35_where_ranks_part() -> None:
    same = [Entered("world", number, "all_reduce [4]") for number in range(3, 9)]
    assert parting({0: same, 1: same[2:]}) == "", "a record that is shorter at its beginning says nothing"
    other = [*same[:4], Entered("world", 7, "all_gather [2]"), same[5]]
    assert parting({0: same, 1: other, 2: same}) == (
        "ranks part at collective 7 of group world: rank 0, 2: all_reduce [4]; rank 1: all_gather [2]"
    )
    assert (
        parting({0: same, 1: same[:-1]}) == "ranks part at collective 8 of group world: rank 0: all_reduce [4]; rank 1: nothing"
    )
    assert parting({0: same, 1: [Entered("others", 1, "x")]}) == "", "groups of other ranks are compared among those"
    assert parting({}) == ""


LOOKS = """
import gc
import threading

from forge_parallel.launch.hang_report import frames_of_threads, stacks_of_all_threads


class Cycle:
    pass


def wait(begun, over):
    begun.release()
    over.acquire()


def look(at, later):
    # A collection is due after some more objects: here one is made for the frame of each thread, in the call that is tested.
    gc.disable()
    begun, over = threading.Semaphore(0), threading.Semaphore(0)
    threads = [threading.Thread(target=wait, args=(begun, over)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in threads:
        begun.acquire()
    for _ in range(100):
        cycle = Cycle()
        cycle.me, cycle.local = cycle, threading.local()
        cycle.local.value = 1
    del cycle
    reused = [{} for _ in range(50)]
    del reused  # Python makes the next dictionaries of these, which do not count
    gc.set_threshold(gc.get_count()[0] + later)
    gc.enable()
    found = at()
    for _ in threads:
        over.release()
    for thread in threads:
        thread.join()
    return found


for at in (frames_of_threads, stacks_of_all_threads):
    for later in range(12):
        assert look(at, later) and gc.isenabled()
gc.disable()
assert threading.get_ident() in frames_of_threads() and not gc.isenabled()
print("seen")
"""


def test_looking_at_threads_frees_no_garbage_meanwhile() -> None:
    """Before Python 3.11.9 the process would stand still, and nothing in it could say so."""
    done = commands.run("-c", LOOKS, timeout=60)
    assert (done.returncode, done.stdout) == (0, "seen\n"), done.stderr
