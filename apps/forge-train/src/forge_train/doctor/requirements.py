"""What a machine must have for a task, by name: `forge-train doctor --requires gpu,slurm`. No torch except in `torch` and `gpu`.

Each requirement is a step of the doctor with a time limit: a driver, a controller or a network that hangs fails the requirement.
"""

import netrc
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from forge_core.errors import ForgeError
from forge_core.files import lines_of
from forge_train.doctor.step import Check, DoctorSettings, DoctorStep

_HERE = "forge_train.doctor.requirements"

REQUIREMENTS = (
    DoctorStep("torch", f"{_HERE}:examine_installation", 120, (), "torch can be imported and computes"),
    DoctorStep("gpu", f"{_HERE}:examine_gpu", 120, (), "torch can use an accelerator of this machine"),
    DoctorStep("multi-node", f"{_HERE}:examine_nodes", 90, (), "a job can have at least two nodes"),
    DoctorStep("slurm", f"{_HERE}:examine_slurm", 90, (), "programs of SLURM, and a controller that answers"),
    DoctorStep("wandb", f"{_HERE}:examine_wandb", 30, (), "Weights & Biases is installed, with an API key or offline"),
    DoctorStep("hf", f"{_HERE}:examine_hub", 60, (), "the Hugging Face Hub can be reached"),
)
"""The requirements of `doctor --requires`; `what` is the sentence of the documentation."""

_ANSWER_SECONDS = 30.0
"""Seconds to wait for an answer of SLURM's controller, or of the Hub."""

_PROGRAMS = ("sbatch", "srun", "squeue", "sinfo", "scancel")
_USABLE = ("idle", "mixed", "allocated", "completing", "planned")
"""States of nodes that run a job, now or later, as sinfo's %T names them."""

_HUB = "https://huggingface.co"
_WANDB = "https://api.wandb.ai"


def required(names: str) -> list[DoctorStep]:
    """Returns the requirements named in `names`, separated by commas, in the order of the table.

    Raises:
        ForgeError: a name is unknown, or there is none.
    """
    given = [name.strip() for name in names.split(",") if name.strip()]
    known = [step.name for step in REQUIREMENTS]
    listed = f"known: {', '.join(known)}"
    if not given:
        raise ForgeError(f"--requires names nothing; {listed}")
    for name in given:
        if name not in known:
            raise ForgeError(f"--requires {name}: no requirement has this name; {listed}")
    return [step for step in REQUIREMENTS if step.name in given]


def examine_installation(_: DoctorSettings) -> Iterator[Check]:
    """Requirement `torch`: checks that torch can be imported and that its sums are right."""
    name, expected = "torch", "torch can be imported and computes"
    try:
        import torch
    except (ImportError, OSError) as cause:  # OSError: a shared library of the wheel is missing or of another machine
        remedy = "install Forge and torch again in a fresh environment: the skill install-and-verify has the commands"
        yield Check(name, "FAIL", f"{type(cause).__name__}: {cause}".partition("\n")[0], expected=expected, remedy=remedy)
        return
    total = int((torch.ones(4, 3, dtype=torch.float64) @ torch.ones(3, 5, dtype=torch.float64)).sum())
    if total != 4 * 3 * 5:
        remedy = "install torch again for this processor; `forge-train doctor --acceptance debug` says what else is wrong"
        yield Check(name, "FAIL", f"a product of ones sums to {total}, not 60", expected=expected, remedy=remedy)
        return
    yield Check(name, "PASS", torch.__version__, expected=expected)


def examine_gpu(_: DoctorSettings) -> Iterator[Check]:
    """Requirement `gpu`: checks that torch can use an accelerator; if not, says what of driver, torch or job is missing."""
    import torch

    from forge_parallel import accelerator
    from forge_train.doctor.torch_build import facts, judge

    name, expected = "GPU", "at least one that torch can use"
    number = accelerator.count()
    if not number:
        wrong = [check for check in judge(facts()) if check.verdict == "FAIL"]
        remedy = (
            "use a machine with a GPU; on a cluster, work inside a job that has one, such as `srun --gpus=1 --pty bash`. "
            "Everything that this requirement does not gate runs on the CPU"
        )
        yield from wrong or [Check(name, "FAIL", "no GPU is visible", expected=expected, remedy=remedy)]
        return
    here = accelerator.use(0)
    total = int((torch.ones(64, 64, device=here) @ torch.ones(64, 64, device=here)).sum())
    if total != 64**3:
        remedy = "take the GPU out of service, and run `forge-train doctor --acceptance` on its node"
        yield Check(name, "FAIL", f"a product of ones sums to {total}, not {64**3}", expected=expected, remedy=remedy)
        return
    yield Check(name, "PASS", f"{number} x {accelerator.name(here)}", expected=expected)


def examine_slurm(_: DoctorSettings) -> Iterator[Check]:
    """Requirement `slurm`: checks that SLURM's programs are on PATH and that its controller lists partitions."""
    name, expected = "SLURM", f"{', '.join(_PROGRAMS)} on PATH, and a partition"
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        remedy = (
            "log in to a login node of the cluster, or load its module (`module avail slurm`); on one machine without SLURM "
            "use `forge-train launch local`"
        )
        yield Check(name, "FAIL", f"{', '.join(missing)} not on PATH", expected=expected, remedy=remedy)
        return
    try:
        names = dict.fromkeys(row["partition"] for row in _partitions())
    except ForgeError as silence:
        remedy = "`scontrol ping` says whether the controller is up; try again later, or ask who runs the cluster"
        yield Check(name, "FAIL", str(silence), expected=expected, remedy=remedy)
        return
    if not names:
        remedy = "ask who runs the cluster for a partition that you may use"
        yield Check(name, "FAIL", "sinfo lists no partition", expected=expected, remedy=remedy)
        return
    yield Check(name, "PASS", f"partitions {', '.join(names)}", expected=expected)


def examine_nodes(_: DoctorSettings) -> Iterator[Check]:
    """Requirement `multi-node`: checks that this process is part of a job of several nodes, or that a partition has several."""
    yield judge_nodes(os.environ)


def judge_nodes(environment: Mapping[str, str]) -> Check:
    """Returns the check of the number of nodes: of this job, or of the largest partition."""
    name, expected = "nodes", "at least two in one job"
    inside = _job_nodes(environment)
    if inside is not None:
        number, told = inside, f"this job has {inside}"
        remedy = "ask for two nodes: `salloc --nodes=2`, or `--nodes 2` of `forge-train launch slurm`"
    elif shutil.which("sinfo") is None:
        number, told = 1, "no job of several nodes, and no SLURM that could start one"
        remedy = (
            "work inside a job of two nodes or on a login node of a cluster; on machines without a scheduler start "
            "`forge-train launch local RECIPE --machines 2 --machine K --address HOST` on each of them"
        )
    else:
        remedy = "use a cluster or a partition with more nodes that are up: `sinfo --format='%R %D %T'` lists them"
        try:
            sizes = _sizes_of_partitions()
        except ForgeError as silence:
            return Check(
                name, "FAIL", str(silence), expected=expected, remedy="`scontrol ping` says whether the controller is up"
            )
        largest = max(sizes, key=lambda one: sizes[one], default="")
        number = sizes.get(largest, 0)
        told = f"partition {largest} has {number} usable" if largest else "sinfo lists no usable node"
    if number >= 2:
        return Check(name, "PASS", told, expected=expected)
    return Check(name, "FAIL", told, expected=expected, remedy=remedy)


def _job_nodes(environment: Mapping[str, str]) -> int | None:
    """Returns the number of nodes of the job that this process belongs to; None outside of a job."""
    for variable in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if environment.get(variable, "").isdigit():
            return int(environment[variable])
    world, local = (environment.get(variable, "") for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world.isdigit() and local.isdigit() and int(local):
        return -(-int(world) // int(local))
    return None


def _sizes_of_partitions() -> dict[str, int]:
    """Returns the number of usable nodes of each partition."""
    sizes: dict[str, int] = {}
    for row in _partitions():
        state = row["state"].rstrip("~#$@^-+").lower()  # with `*` a node does not respond, and with `!` or `%` it goes down
        if row["available"] == "up" and state in _USABLE and row["nodes"].isdigit():
            sizes[row["partition"]] = sizes.get(row["partition"], 0) + int(row["nodes"])
    return sizes


def _partitions() -> list[dict[str, str]]:
    """Returns one row for each partition and state of its nodes.

    Raises:
        ForgeError: the controller does not answer.
    """
    keys = ("partition", "available", "state", "nodes")
    command = ["sinfo", "--noheader", "--format=%R|%a|%T|%D"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ForgeError(f"SLURM's controller did not answer sinfo within {_ANSWER_SECONDS:.0f} s") from None
    except OSError as cause:
        raise ForgeError(f"sinfo cannot be started: {cause.strerror}") from cause
    if done.returncode:
        raise ForgeError(f"sinfo failed: {done.stderr.strip() or f'it ended with code {done.returncode}'}")
    rows = (line.strip().split("|") for line in lines_of(done.stdout) if line.strip())
    return [dict(zip(keys, [*row, *[""] * len(keys)], strict=False)) for row in rows]


def examine_wandb(_: DoctorSettings) -> Iterator[Check]:
    """Requirement `wandb`: checks that the tracker `wandb` would start without asking for a key."""
    yield judge_wandb(os.environ, find_spec("wandb") is not None)


def judge_wandb(environment: Mapping[str, str], installed: bool) -> Check:
    """Returns the check of W&B; looks for a key where `wandb login` leaves it, and does not show it."""
    name, expected = "Weights & Biases", "installed, with an API key or offline"
    if not installed:
        return Check(name, "FAIL", "wandb is not installed", expected=expected, remedy='pip install "forge-train[wandb]"')
    mode = environment.get("WANDB_MODE", "").lower()
    if mode in ("offline", "dryrun", "disabled"):
        return Check(name, "PASS", f"WANDB_MODE is {mode}: nothing is uploaded", expected=expected)
    if environment.get("WANDB_API_KEY"):
        return Check(name, "PASS", "the key is in WANDB_API_KEY", expected=expected)
    host = urlsplit(environment.get("WANDB_BASE_URL") or _WANDB).hostname or ""
    file = Path(environment.get("NETRC") or Path(environment.get("HOME") or Path.home()) / ".netrc")
    try:
        login = netrc.netrc(file).authenticators(host) if file.is_file() else None
    except (OSError, netrc.NetrcParseError) as cause:
        remedy = f"correct {file}, or set WANDB_API_KEY"
        return Check(name, "FAIL", f"{file} cannot be read: {cause}", expected=expected, remedy=remedy)
    if login and login[2]:
        return Check(name, "PASS", f"{file} has a key for {host}", expected=expected)
    remedy = "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to keep the numbers on this machine"
    return Check(name, "FAIL", f"no API key for {host}", expected=expected, remedy=remedy)


def examine_hub(_: DoctorSettings) -> Iterator[Check]:
    """Requirement `hf`: checks that models and data sets can be downloaded from the Hugging Face Hub."""
    return judge_hub(os.environ, find_spec("huggingface_hub") is not None, find_spec("datasets") is not None)


def judge_hub(environment: Mapping[str, str], client: bool, datasets: bool) -> Iterator[Check]:
    """Yields the checks of the Hub: its client is installed, the network is allowed, and it answers."""
    name, expected = "Hugging Face Hub", "its client is installed, and it answers"
    if not client:
        yield Check(name, "FAIL", "huggingface_hub is not installed", expected=expected, remedy="pip install huggingface_hub")
        return
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if environment.get(variable, "").upper() in ("1", "ON", "YES", "TRUE"):
            remedy = f"unset {variable}, or use a folder that is on this machine already"
            yield Check(name, "FAIL", f"{variable} is {environment[variable]}", expected=expected, remedy=remedy)
            return
    address = environment.get("HF_ENDPOINT") or _HUB
    told = _unreachable(address)
    if told:
        remedy = (
            "download the folder on a machine with a network (`hf download OWNER/NAME --local-dir DIR`) and copy it here; "
            "behind a proxy set HTTPS_PROXY, with a mirror HF_ENDPOINT"
        )
        yield Check(name, "FAIL", f"{address} cannot be reached: {told}", expected=expected, remedy=remedy)
        return
    yield Check(name, "PASS", f"{address} answers", expected=expected)
    if not datasets:
        remedy = 'for the source `huggingface`: pip install "forge-data[huggingface]"'
        yield Check("data sets", "SKIPPED", "datasets is not installed", remedy=remedy)


def _unreachable(address: str) -> str:
    """Returns why an address does not answer; empty if it does."""
    if urlsplit(address).scheme not in ("http", "https"):
        return "it is no http address"
    try:
        urlopen(Request(address, method="HEAD"), timeout=_ANSWER_SECONDS).close()
    except HTTPError as answer:  # a refusal is an answer, too
        return "" if answer.code < 500 else f"it answers with {answer.code}"
    except (OSError, ValueError) as cause:
        return str(getattr(cause, "reason", cause))
    return ""
