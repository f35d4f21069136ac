"""A real SLURM of two nodes on this machine, n1 and n2: a controller and two daemons on the loopback. Needs root, no systemd.

    PYTHONPATH=tests python -m train.launch.real_slurm

starts one and ends it: whether this machine can run SLURM at all.
"""

import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

HOSTS = Path("/etc/hosts")
LINE = f"127.0.0.1 n1 n2 # two nodes of the test in process {os.getpid()}\n"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "munged", "munge")

LOST_SECONDS = 15
"""Seconds after which the controller gives up a node whose daemon does not answer."""

CONFIG = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
FirstJobId={job}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
SlurmdTimeout={silent}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=2000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=2000
PartitionName=low Nodes=n1,n2 Default=YES State=UP PriorityTier=1
PartitionName=high Nodes=n1,n2 State=UP PriorityTier=10
"""


def why_not() -> str:
    """Returns why this machine cannot run SLURM; empty if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None and not Path(f"/usr/sbin/{name}").exists()]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "daemons of SLURM need root"


def wait_until(reached: Callable[[], bool], seconds: float, what: str) -> None:
    """Waits for a condition.

    Raises:
        AssertionError: it was not reached in time.
    """
    until = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < until, f"{what} within {seconds:.0f} s"
        time.sleep(0.25)


@dataclass
class Slurm:
    """A running SLURM.

    Attributes:
        environment: environment of a login node.
        daemons: the controller and the daemon of each node, by name.
        requeued: when a requeued job was first seen, by its number and how often it was requeued.
    """

    folder: Path
    environment: dict[str, str]
    daemons: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)
    requeued: dict[tuple[str, str], float] = field(default_factory=dict)

    def run(self, *command: str, folder: Path | None = None) -> "subprocess.CompletedProcess[str]":
        """Runs a command on the login node."""
        return subprocess.run(command, env=self.environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False)

    def submit(self, folder: Path, recipe: str, *arguments: str) -> str:
        """Runs `launch slurm --submit` in a folder and returns the number of the job."""
        command = [sys.executable, "-m", "forge_train", "launch", "slurm", recipe, "--submit", *arguments]
        submitted = self.run(*command, folder=folder)
        assert submitted.returncode == 0, submitted.stderr
        return submitted.stdout.split()[2].rstrip(":")

    def job(self, number: str) -> Mapping[str, str]:
        """Returns what SLURM knows of a job or of a task of an array, such as `JobState` and `Restarts`."""
        shown = self.run("scontrol", "show", "job", "--oneliner", number)
        assert shown.returncode == 0, shown.stderr
        return dict(re.findall(r"(\w+)=(\S*)", shown.stdout.splitlines()[0]))

    def hurry(self, number: str) -> Mapping[str, str]:
        """Returns what SLURM knows of a job. Starts a requeued one after a few seconds, and not after SLURM's two minutes.

        A node refuses a job that comes back in the second in which it was killed there.
        """
        job = self.job(number)
        if job["JobState"] == "PENDING" and job["Reason"] == "BeginTime":
            waiting = (number, job["Restarts"])
            if time.monotonic() - self.requeued.setdefault(waiting, time.monotonic()) > 3:
                self.run("scontrol", "update", f"job={number}", "StartTime=now")
        return job

    def wait_for(self, number: str, *states: str, seconds: float = 120.0) -> Mapping[str, str]:
        """Waits until a job has one of these states; hurries it up."""

        def reached() -> bool:
            return (self.job if "PENDING" in states else self.hurry)(number)["JobState"] in states

        wait_until(reached, seconds, f"job {number} is {' or '.join(states)}")
        return self.job(number)

    def start(self, name: str) -> None:
        """Starts the controller (`controller`) or the daemon of a node."""
        command = ["slurmctld", "-D"] if name == "controller" else ["slurmd", "-D", "-N", name]
        with (self.folder / f"{name}.log").open("a") as log:
            self.daemons[name] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def lose(self, node: str) -> None:
        """Kills the daemon of a node; what runs there goes on."""
        self.daemons[node].send_signal(signal.SIGKILL)
        self.daemons[node].wait(30)

    def wait_until_idle(self, seconds: float = 60.0) -> None:
        """Waits until both nodes are there and have nothing to do."""
        wait_until(lambda: _idle(self.environment) == "2", seconds, "both nodes are idle")


@contextmanager
def real_slurm(folder: Path) -> Iterator[Slurm]:
    """Runs SLURM inside the `with` block; its jobs are canceled at the end. Several may run at the same time."""
    with socket.socket() as one, socket.socket() as two, socket.socket() as three:
        for free in (one, two, three):
            free.bind(("127.0.0.1", 0))
        port, first, second = (free.getsockname()[1] for free in (one, two, three))
    folder.mkdir(parents=True)
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    path = folder / "slurm.conf"
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
    environment = {**os.environ, "SLURM_CONF": str(path), "PATH": programs, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with _munge(environment) as munge:
        words = {"host": socket.gethostname(), "folder": folder, "munge": munge, "silent": LOST_SECONDS}
        # Ranks derive their port from the number of the job.
        words |= {"port": port, "first": first, "second": second, "job": 100 + 50 * (os.getpid() % 200)}
        path.write_text(CONFIG.format(**words))
        with HOSTS.open("a") as hosts:
            hosts.write(("" if HOSTS.read_text().endswith("\n") else "\n") + LINE)
        slurm = Slurm(folder, environment)
        try:
            for name in ("controller", "n1", "n2"):
                slurm.start(name)
                time.sleep(1)
            slurm.wait_until_idle(40)
            yield slurm
            slurm.run("scancel", "--user=root")
            for node in ("n1", "n2"):
                if slurm.daemons[node].poll() is not None:
                    slurm.start(node)
            slurm.wait_until_idle(90)
        finally:
            HOSTS.write_text(HOSTS.read_text().replace(LINE, ""))
            for daemon in reversed(slurm.daemons.values()):
                daemon.terminate()
                daemon.wait(30)
            _kill_rest(path)


@contextmanager
def _munge(environment: dict[str, str]) -> Iterator[Path]:
    """Runs a munged with its own key inside the `with` block; yields its socket."""
    with tempfile.TemporaryDirectory(prefix="forge-munge-") as name:  # the path of a socket has at most 107 characters
        folder = Path(name)
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        own = [f"--{what}-file={folder / what}" for what in ("key", "pid", "seed")]
        command = ["munged", "--foreground", "--force", f"--socket={folder / 'socket'}", *own]
        with (folder / "log").open("w") as log:
            munged = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            asking = ["munge", "--no-input", f"--socket={folder / 'socket'}"]
            answers = functools.partial(subprocess.run, asking, capture_output=True, env=environment, check=False)
            wait_until(lambda: answers().returncode == 0, 20, "munged answers")
            yield folder / "socket"
        finally:
            munged.terminate()
            munged.wait(30)


def _kill_rest(path: Path) -> None:
    """Kills what is left of the jobs, such as the step of a lost node: the processes that were given this SLURM's file."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"SLURM_CONF={path}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def _idle(environment: dict[str, str]) -> str:
    command = ["sinfo", "--noheader", "--partition=low", "--states=idle", "--format=%D"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60).stdout.strip()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, real_slurm(Path(place) / "slurm"):
        print("two nodes of a SLURM are idle")
