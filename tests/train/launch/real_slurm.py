"""A real SLURM of two nodes on this machine, n1 and n2: a controller and two daemons on the loopback. Needs root, no systemd."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HOSTS = Path("/etc/hosts")
LINE = "127.0.0.1 n1 n2 # two nodes of a test\n"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "munged", "munge")

CONFIG = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
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


@contextmanager
def real_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Runs SLURM inside the `with` block; yields the environment of a login node."""
    with socket.socket() as one, socket.socket() as two, socket.socket() as three:
        for free in (one, two, three):
            free.bind(("127.0.0.1", 0))
        port, first, second = (free.getsockname()[1] for free in (one, two, three))
    folder.mkdir(parents=True)
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    path = folder / "slurm.conf"
    path.write_text(CONFIG.format(host=socket.gethostname(), folder=folder, port=port, first=first, second=second))
    environment = {**os.environ, "SLURM_CONF": str(path), "PATH": f"{os.environ['PATH']}{os.pathsep}/usr/sbin"}
    daemons: list[subprocess.Popen[bytes]] = []
    hosts = HOSTS.read_text()
    try:
        if subprocess.run(["munge", "-n"], capture_output=True, env=environment, check=False).returncode != 0:
            Path("/run/munge").mkdir(exist_ok=True)
            shutil.chown("/run/munge", "munge", "munge")
            daemons.append(subprocess.Popen(["runuser", "-u", "munge", "--", "munged", "--foreground"], env=environment))
            wait_until(lambda: _munge_answers(environment), 20, "munged answers")
        HOSTS.write_text(hosts + ("" if hosts.endswith("\n") else "\n") + LINE)
        for command in (["slurmctld"], ["slurmd", "-N", "n1"], ["slurmd", "-N", "n2"]):
            with (folder / f"{command[-1]}.log").open("w") as log:
                daemons.append(subprocess.Popen([*command, "-D"], env=environment, stdout=log, stderr=log))
            time.sleep(1)
        wait_until(lambda: _idle(environment) == "2", 40, "both nodes are idle")
        yield environment
        subprocess.run(["scancel", "--user=root"], env=environment, check=False, timeout=30)
        wait_until(lambda: _idle(environment) == "2", 60, "all jobs have ended")
    finally:
        HOSTS.write_text(HOSTS.read_text().replace(LINE, ""))
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def _munge_answers(environment: dict[str, str]) -> bool:
    return subprocess.run(["munge", "-n"], capture_output=True, env=environment, check=False).returncode == 0


def _idle(environment: dict[str, str]) -> str:
    command = ["sinfo", "--noheader", "--partition=low", "--states=idle", "--format=%D"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60).stdout.strip()
