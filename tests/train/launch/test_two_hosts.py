"""Runs on two hosts: they train as on one, and what is wrong with their network is reported on both, by name, in bounded time."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from forge_train.trackers import read_metrics
from train.launch.real_slurm import wait_until
from train.launch.two_hosts import Host, two_hosts, why_not
from train.runs import TINY
from train.storm.storm import End, differences, end_of

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(why_not()), reason=why_not())]

PORT = 29511
PATIENCE, TIMEOUT = 3.0, 12.0
START_SECONDS = 120.0
END_SECONDS = 20.0
"""Upper limit of what the ranks need after `TIMEOUT` to find out the cause and to end."""

STEPS = 30
SLOW = """
import time
from dataclasses import dataclass

from forge_core.component import Component
from forge_core.protocols.run import Hook


class Waiting(Hook):
    def before_step(self, run):
        time.sleep(0.15)


@dataclass(frozen=True, kw_only=True)
class Waits(Component):
    \"\"\"Steps that last long enough to be disturbed.\"\"\"

    def build(self):
        return Waiting()
"""
HOOKS = """
[[hooks]]
name = "log"
every = 1

[[hooks]]
name = "./slow.py:Waits"
"""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "tiny.toml").write_text(TINY + HOOKS)
    with two_hosts(tmp_path) as both:
        yield both


def forge_train(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "forge_train", *arguments]


def ranks(folder: Path, hosts: Sequence[Host], *keys: str, **environment: str) -> "list[subprocess.Popen[bytes]]":
    """Starts one rank on each host, with a short patience."""
    keys = (f"--parallel.patience={PATIENCE}", f"--parallel.timeout={TIMEOUT}", f"--train.max_steps={STEPS}", *keys)
    started = []
    for rank, host in enumerate(hosts):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        address = {"MASTER_ADDR": "left", "MASTER_PORT": str(PORT)}
        command = forge_train("run", "tiny.toml", f"--job.dir={folder / 'run'}", *keys)
        variables = ENVIRONMENT | place | address | environment
        started.append(host.start(command, folder / f"{host.name}.out", variables, folder))
    return started


def ended(processes: "Sequence[subprocess.Popen[bytes]]", seconds: float) -> list[int]:
    until = time.monotonic() + seconds
    return [process.wait(max(until - time.monotonic(), 0.1)) for process in processes]


def wait_for_training(folder: Path, processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    """Waits until the ranks have done some steps."""
    wait_until(
        lambda: steps(folder) >= 5 or any(process.poll() is not None for process in processes), START_SECONDS, "both hosts train"
    )
    assert steps(folder) >= 5, outputs(folder)


def outputs(folder: Path) -> list[str]:
    return [(folder / f"{name}.out").read_text() for name in ("left", "right")]


def steps(folder: Path) -> int:
    return max((int(row["step"]) for row in read_metrics(folder / "run/metrics.jsonl")), default=0)


def on_one_host(folder: Path) -> End:
    """The end of the same run, whose two ranks are on this machine."""
    keys = ["--processes=2", "--job.dir=alone", f"--train.max_steps={STEPS}"]
    command = forge_train("launch", "local", "tiny.toml", *keys)
    done = subprocess.run(command, cwd=folder, env={**os.environ, **ENVIRONMENT}, capture_output=True, timeout=START_SECONDS)
    assert done.returncode == 0, done.stderr.decode()
    return end_of(folder / "alone/checkpoints")


def test_two_hosts_train_to_the_bits_of_one_though_their_link_was_down_for_seconds(
    tmp_path: Path, hosts: tuple[Host, Host]
) -> None:
    started = []
    for number, host in enumerate(hosts):
        machines = ["--processes=1", "--machines=2", f"--machine={number}", "--address=left", f"--port={PORT}"]
        keys = ["tiny.toml", *machines, f"--job.dir={tmp_path / 'run'}", f"--train.max_steps={STEPS}"]
        started.append(host.start(forge_train("launch", "local", *keys), tmp_path / f"{host.name}.out", ENVIRONMENT, tmp_path))
    wait_for_training(tmp_path, started)
    hosts[1].link("down")
    time.sleep(1)
    before = steps(tmp_path)
    time.sleep(3)
    assert steps(tmp_path) == before < STEPS, "without a link nobody trains"
    hosts[1].link("up")
    assert ended(started, START_SECONDS) == [0, 0], outputs(tmp_path)
    assert differences(end_of(tmp_path / "run/checkpoints"), on_one_host(tmp_path)) == []


def test_a_link_that_stays_down_is_reported_on_both_hosts_by_name(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    started = ranks(tmp_path, hosts)
    wait_for_training(tmp_path, started)
    hosts[1].link("down")
    assert ended(started, TIMEOUT + END_SECONDS) == [5, 5]
    left, right = outputs(tmp_path)
    assert re.search(r"WARNING: waiting for \d+ s in step \d+, .*, for rank 1 \(process \d+ on right; ", left)
    assert re.search(r"ERROR: rank 1 \(process \d+ on right; .*(its host is cut off|the network to its host is cut)", left)
    who = rf"rank 0 \(process \d+ on left, address 10\.99\.0\.1 .*\) at left:{PORT}"
    cut = rf"{who} has not answered for \d+ s: it is stopped, or the network between its host and right is cut"
    assert re.search(rf"WARNING: {cut}; rank 1 is in ", right) and re.search(rf"ERROR: {cut}", right)
    assert "start the run again: it resumes from its newest checkpoint" in left and "Traceback" not in left + right


@pytest.mark.parametrize(
    ("card", "code", "where", "why"),
    [
        ("lo", 5, r"address 127\.0\.0\.1 of lo \(GLOO_SOCKET_IFNAME\)", "Connection refused"),
        ("eth7", 2, r"address of eth7 \(GLOO_SOCKET_IFNAME\) unknown", "Unable to find address for: eth7"),
    ],
)
def test_the_wrong_network_interface_is_refused_on_both_hosts_by_name(
    tmp_path: Path, hosts: tuple[Host, Host], card: str, code: int, where: str, why: str
) -> None:
    started = ranks(tmp_path, hosts, GLOO_SOCKET_IFNAME=card)
    assert ended(started, START_SECONDS) == [code, code]
    for output in outputs(tmp_path):
        assert re.search(rf"error: rank \d \(process \d+ on (left|right), {where}\) is not connected to rank \d", output), output
        assert (
            why in output and "set GLOO_SOCKET_IFNAME on each host to the network interface that the other hosts reach" in output
        )
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.parametrize(
    ("dropped", "message"),
    [
        (
            "tcp dport 30000-65535",
            r"rank [01] \(process \d+ on (left|right), .*\) is not connected to rank [01] \(process \d+ on ",
        ),
        (f"tcp dport {PORT}", rf"rank \d of 2 .* waited \d+ s at the start: .*left:{PORT}"),
    ],
)
def test_a_firewall_that_drops_packets_is_reported_on_both_hosts(
    tmp_path: Path, hosts: tuple[Host, Host], dropped: str, message: str
) -> None:
    hosts[0].drop(dropped)
    started = ranks(tmp_path, hosts)
    assert ended(started, START_SECONDS + TIMEOUT) == [5, 5]
    for output in outputs(tmp_path):
        assert re.search(r"WARNING: waiting for \d+ s at the start: ", output), "reported while it waits"
        assert re.search(rf"error: .*{message}.*firewall", output), output
