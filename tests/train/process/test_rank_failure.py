"""A rank that raises, dies, hangs or is interrupted takes the others down in seconds, and its name is what one reads."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from forge_core.layout import Layout
from train.runs import TINY

HOOK = '''
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from forge_core.component import Component
from forge_core.errors import ForgeError
from forge_core.protocols.run import Hook


def on_fire(*_):
    Path(os.environ["WHEN"]).write_text(str(time.time()))
    raise ValueError("the stage is on fire")


class Failing(Hook):
    def check(self, run):
        if os.environ["HOW"] == "interrupted" and run.topology.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)

    def before_step(self, run):
        if run.state.step == 2 and run.topology.rank == 0 and os.environ["HOW"] == "host dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if run.state.step == 2 and os.environ["HOW"] == f"stage of {run.topology.rank} fails forward":
            run.model.parts[0].register_forward_pre_hook(on_fire)
        if run.state.step == 2 and os.environ["HOW"] == f"stage of {run.topology.rank} fails backward":
            run.model.trainable()[0].tensor.register_hook(on_fire)
        if run.state.step == 2 and run.topology.rank == 1 and "stage" not in os.environ["HOW"]:
            Path(os.environ["WHEN"]).write_text(str(time.time()))
            how = os.environ["HOW"]
            if how == "raises":
                raise ForgeError("the device of rank 1 is on fire")
            if how == "sleeps":
                time.sleep(1000)
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Fails(Component):
    """Fails on rank 1."""

    def build(self):
        return Failing()
'''

RUN = ["-m", "forge_train", "run", "tiny.toml", "--parallel.patience=1"]


def prepare(folder: Path, how: str) -> dict[str, str]:
    """Writes recipe and hook; the environment of the ranks."""
    (folder / "mine.py").write_text(HOOK)
    (folder / "tiny.toml").write_text(TINY + '\n[[hooks]]\nname = "./mine.py:Fails"\n')
    return {**os.environ, "OMP_NUM_THREADS": "1", "WHEN": str(folder / "when"), "HOW": how}


def ranks_of(folder: Path, how: str, timeout: float = 60, size: int = 2, settings: Sequence[str] = ()) -> list[tuple[int, str]]:
    """(exit code, standard error without remarks on the start) of the ranks; no launcher ends one for the other."""
    environment = prepare(folder, how)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, *RUN, f"--parallel.timeout={timeout}", *settings],
            cwd=folder,
            env={**environment, "RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(folder / f"error-{rank}")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, re.sub(r".* at the start: .*\n", "", text)) for rank, text in zip(ranks, said, strict=True)]


def test_h5_under_torchrun_the_others_end_within_seconds_and_the_cause_is_in_its_summary(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, *RUN], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=prepare(tmp_path, "raises")
    )
    ended = time.time()
    assert done.returncode == 1, "torchrun's own, whatever ours is"
    assert ended - float((tmp_path / "when").read_text()) < 10
    said = done.stderr + done.stdout
    assert "rank 1: ERROR: the device of rank 1 is on fire" in said
    assert "loop.py" not in said and "Connection" not in said, "no traceback but that of torchrun itself"
    _, root = said.split("Root Cause")
    assert re.search(r"rank *: 1 ", root) and "exit code 2: the device of rank 1 is on fire" in root.replace("exitcode", "")
    assert "the device of rank 1 is on fire" in (tmp_path / "runs" / "tiny" / "logs" / "rank-00001.log").read_text()


@pytest.mark.slow
def test_h1_a_rank_that_hangs_is_named_and_ended(tmp_path: Path) -> None:
    (first, waiting), (second, hanging) = ranks_of(tmp_path, "sleeps", timeout=10)
    assert (first, second) == (5, 5)
    place = r"rank 1 \(process \d+ on \S+; step 3, mine\.py:\d+ \(before_step\), \d+ s\)"
    assert re.search(rf"rank 0: WARNING: waiting for \d+ s in step 3, topology\.py:\d+ \(all_reduce\), for {place}\n", waiting)
    assert re.search(rf"(?m)^rank 0: ERROR: {place} did not come within 10 s\. .*resumes from its newest checkpoint$", waiting)
    assert re.search(rf"(?m)^rank 1: ERROR: the others have given up: {place} did not .* its stacks are in its log\n\Z", hanging)
    assert "Traceback" not in waiting + hanging
    log = (tmp_path / "runs" / "tiny" / "logs" / "rank-00001.log").read_text()
    assert re.search(r'File ".*/mine\.py", line \d+ in before_step', log), "its stack is kept"
    report = (tmp_path / "runs" / "tiny" / "logs" / "hang.txt").read_text()
    assert re.search(rf"(?m)^{place} did not come within 10 s$", report) and "default_pg #" in report
    assert "gloo" in (tmp_path / "runs" / "tiny" / "logs" / "rank-00000.log").read_text(), "so is what the other one met"


def test_fault_28_h8_ctrl_c_in_preparation_is_no_failure_and_the_others_know(tmp_path: Path) -> None:
    (first, said), (second, other) = ranks_of(tmp_path, "interrupted")
    assert (first, second) == (75, 75), other
    assert said == "rank 0: WARNING: interrupted by SIGINT before the first step; nothing was saved\n"
    assert "rank 0 ended first, with exit code 75: interrupted by SIGINT" in other and "Traceback" not in other
    error = json.loads((tmp_path / "error-0").read_text())["message"]
    assert error["message"].startswith("forge-train ended with exit code 75: interrupted by SIGINT")


@pytest.mark.slow
def test_h3_a_rank_that_is_killed_ends_the_others_with_a_code_and_one_line(tmp_path: Path) -> None:
    (first, said), (second, _) = ranks_of(tmp_path, "dies")
    assert (first, second) == (5, -9)
    assert time.time() - float((tmp_path / "when").read_text()) < 20
    assert re.match(
        r"rank 0: ERROR: rank 1 \(process \d+ on .*\) ended without a message: killed, out of memory or stopped, or its host is "
        r"cut off\.",
        said,
    )
    assert said.count("\n") == 1


@pytest.mark.slow
def test_trials_f8_with_rank_0_killed_the_others_say_one_line_and_no_native_frames(tmp_path: Path) -> None:
    (first, _), (second, said) = ranks_of(tmp_path, "host dies")
    assert (first, second) == (-9, 5)
    assert re.fullmatch(r"rank 1: ERROR: .*rank 0.*resumes from its newest checkpoint\n", said), said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "way", "layout"),
    [*product((0, 1), ("forward", "backward"), ("pp2",)), (1, "forward", "pp4"), (1, "forward", "pp2dp2")],
)
def test_an_error_in_one_stage_ends_all_ranks_in_seconds_and_is_what_they_name(
    tmp_path: Path, who: int, way: str, layout: str
) -> None:
    """torch wraps it in an error that lists shapes. Ranks wait for their neighbors only, and each one that ends ends the next."""
    settings = {
        "pp2": ["--parallel.pp=2"],
        "pp4": ["--parallel.pp=4", "--model.layers=4"],
        "pp2dp2": ["--parallel.pp=2", "--parallel.dp_shard=2"],
    }[layout]
    size = Layout.parse(layout).world
    ended = ranks_of(tmp_path, f"stage of {who} fails {way}", timeout=300, size=size, settings=settings)
    assert time.time() - float((tmp_path / "when").read_text()) < 20, "not the 300 s of parallel.timeout"
    assert [code for code, _ in ended] == [1 if rank == who else 5 for rank in range(size)]
    for rank, (_, said) in enumerate(ended):
        if rank == who:
            assert re.search(r"\nValueError: the stage is on fire\n.*[Ff]ailed to run (stage )?" + way + r"\n", said)
            assert "direct cause" not in said
        else:
            cause = rf"rank {who} ended first, with exit code 1: ValueError: the stage is on fire\. "
            assert re.match(rf"rank {rank}: ERROR: (the others have given up: )?{cause}", said)
            assert said.count("\n") == 1
    error = json.loads((tmp_path / f"error-{who}").read_text())["message"]["message"]
    assert error == "forge-train ended with exit code 1: ValueError: the stage is on fire"
