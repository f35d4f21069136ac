"""The launch of this process: alone, under torchrun, or under srun. Torch-free.

Only variables that a launcher has set are used; nothing is guessed. Contradictions (a rank without a world size, a rank outside
the world, no address) raise one error before any socket is opened.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from forge_core.errors import LayoutError

DEVICE = "FORGE_LOCAL_DEVICE"
"""Variable with the index of this process's local device, if that is not the local rank."""

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """The place of this process among all, from the launcher's variables.

    Attributes:
        device: index of the local device; the local rank, unless a launcher skips devices.
        identity: identifies the launch, so that ranks of two launches never connect; "" if the launcher provides none.
        note: a warning for the user about how the launcher was detected.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = ""
    port: int = 0
    launcher: str = "none"
    device: int = 0
    identity: str = ""
    note: str = ""


def read_launcher(environment: Mapping[str, str]) -> Launch:
    """Reads the variables of torchrun or srun; without either, returns a world of one process.

    Raises:
        LayoutError: variables are missing, are not integers, or contradict each other.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        missing = [name for name in TORCHRUN if not environment.get(name)]
        if missing:
            raise LayoutError(
                f"the launcher set {', '.join(n for n in TORCHRUN if n in environment)} but not {', '.join(missing)}; "
                "start with torchrun, or unset RANK and WORLD_SIZE for one process"
            )
        size, local_rank = _integer(environment, "WORLD_SIZE"), _integer(environment, "LOCAL_RANK", 0)
        launch = Launch(
            rank=_integer(environment, "RANK"),
            size=size,
            local_rank=local_rank,
            local_size=_integer(environment, "LOCAL_WORLD_SIZE", size),
            address=environment["MASTER_ADDR"],
            port=_integer(environment, "MASTER_PORT"),
            launcher="torchrun",
            device=_integer(environment, DEVICE, local_rank),
            identity="" if (run := environment.get("TORCHELASTIC_RUN_ID", "none")) == "none" else f"torchrun {run}",
        )
    elif "SLURM_PROCID" in environment and _integer(environment, "SLURM_NTASKS", 1) > 1 and not _is_step(environment):
        return Launch(
            note=f"SLURM gives this job {environment['SLURM_NTASKS']} tasks, but this process was not started by srun, so it "
            "runs alone; to use all tasks, start it with srun"
        )
    elif "SLURM_PROCID" in environment and _step_tasks(environment) > 1:
        launch = _of_srun(environment)
    else:
        return Launch()
    if not 0 <= launch.rank < launch.size:
        raise LayoutError(
            f"the launcher's rank is {launch.rank}, but the world size is {launch.size}; ranks must be 0 to {launch.size - 1}"
        )
    if not 0 < launch.port < 65536:
        raise LayoutError(f"MASTER_PORT = {launch.port} is not a port; give one from 1 to 65535")
    return launch


_NO_STEPS = range(0xFFFFFFF0, 1 << 32)
"""Step numbers that SLURM gives to processes not started by srun: batch scripts and shells of salloc."""

_FIRST_PORT, _PORTS = 20000, 12000
"""Ports below the range that Linux uses for outgoing connections, from 32768 on."""


def _is_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process. SLURM's variables alone do not tell: batch scripts have a rank and task count, too."""
    step = _integer(environment, "SLURM_STEP_ID", _integer(environment, "SLURM_STEPID", -1))
    return step >= 0 and step not in _NO_STEPS


def _step_tasks(environment: Mapping[str, str]) -> int:
    return _integer(environment, "SLURM_STEP_NUM_TASKS", _integer(environment, "SLURM_NTASKS", 1))


def _of_srun(environment: Mapping[str, str]) -> Launch:
    """Returns the launch of an srun step. Address and port belong to the step, because a job may run several steps at once."""
    job, step = _integer(environment, "SLURM_JOB_ID"), environment.get("SLURM_STEP_ID") or environment["SLURM_STEPID"]
    restart, local_rank = _integer(environment, "SLURM_RESTART_COUNT", 0), _integer(environment, "SLURM_LOCALID")
    size = _step_tasks(environment)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    return Launch(
        rank=_integer(environment, "SLURM_PROCID"),
        size=size,
        local_rank=local_rank,
        local_size=_tasks_on_node(environment, size),
        address=environment.get("MASTER_ADDR") or first_host(nodes),
        port=_integer(environment, "MASTER_PORT", _FIRST_PORT + (job + 4099 * int(step) + 257 * restart) % _PORTS),
        launcher="srun",
        device=local_rank,
        identity=f"SLURM job {job}, step {step}, restart {restart}",
    )


def is_agents_store() -> bool:
    """Whether torchrun's agent hosts the store; such a store outlives the ranks when the agent restarts them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def first_host(nodes: str) -> str:
    """Returns the first host of a SLURM node list: `gpu[03-05,9],login1` -> `gpu03`.

    Raises:
        LayoutError: the list is empty.
    """
    head, bracket, rest = nodes.partition("[")
    if not nodes or (bracket and "," in head):
        if head:
            return head.split(",")[0]
        raise LayoutError("SLURM_JOB_NODELIST is empty; set MASTER_ADDR to the name of the first node")
    if not bracket:
        return nodes.split(",")[0]
    first = rest.partition("]")[0].split(",")[0].split("-")[0]
    return head + first + _suffix(rest)


def _suffix(rest: str) -> str:
    """Returns the text after the bracket of the first host: `[1-2].lab` -> `.lab`."""
    return rest.partition("]")[2].split(",")[0]


def _tasks_on_node(environment: Mapping[str, str], size: int) -> int:
    """Returns the number of tasks on a node. SLURM writes `4(x2),3`; the first count is precise enough to divide the cores."""
    counts = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", str(size))
    return int(counts.split(",")[0].split("(")[0])


def _integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise LayoutError(f"the launcher's variable {name} = {text!r} is not an integer; correct it, or unset it") from None
