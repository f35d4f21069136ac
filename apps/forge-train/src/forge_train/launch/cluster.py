"""The cluster file of `forge-train launch`: a typed tree of its own, layered like a recipe.

A cluster file describes a cluster, not a run: partition, account, GPUs per node, container. Its `base` names another cluster
file. On the command line, `--slurm.KEY=VALUE`, `--kubernetes.KEY=VALUE`, `--container.KEY=VALUE` and `--environment.NAME=VALUE`
override it; all other keys belong to the recipe.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from forge_core.component import FREE
from forge_core.config.layers import load_layers
from forge_core.config.tree import DEFAULT, Table
from forge_core.config.validation import walk
from forge_core.errors import ConfigError, Fault, LayoutError
from forge_core.redaction import redacted_text, secret
from forge_core.registry import Registry
from forge_train.directory import run_directory
from forge_train.recipe.load import Recipe, load_recipe

SECTIONS = ("slurm", "kubernetes", "container", "environment")
"""Sections of a cluster file; no section of a recipe has one of these names."""

TASK = "{task}"
"""Stands in recipe keys for the number of the array task: `--job.seed={task}`."""

_TIME = re.compile(r"\d+|\d+:\d{1,2}(:\d{1,2})?|\d+-\d{1,2}(:\d{1,2}){0,2}")
_ARRAY = re.compile(r"(\d+(-\d+(:[1-9]\d*)?)?)(,\d+(-\d+(:[1-9]\d*)?)?)*(%[1-9]\d*)?")
_MOST_TASKS = 1000

_SET_BY_LAUNCH = {
    **dict.fromkeys(("job-name", "J"), "the recipe's job.name"),
    **dict.fromkeys(("nodes", "N"), "slurm.nodes"),
    **dict.fromkeys(("ntasks", "n", "ntasks-per-node"), "slurm.ranks_per_node"),
    **dict.fromkeys(("gpus-per-task", "gpu-bind"), "slurm.gpus_per_node, since each rank must see all GPUs of its node"),
    **dict.fromkeys(("signal",), "slurm.warn_seconds"),
    **dict.fromkeys(("array", "a"), "slurm.array"),
    **dict.fromkeys(("requeue", "no-requeue"), "slurm.max_requeues"),
    **dict.fromkeys(("comment",), "the launcher, which recognizes the run by it"),
    **dict.fromkeys(("output", "o", "error", "e", "open-mode"), "the launcher, which writes one log per rank"),
    **dict.fromkeys(("chdir", "D"), "the working directory of this command"),
}
"""Options of sbatch that the script sets itself, and what determines them."""


@dataclass(frozen=True, kw_only=True)
class SlurmSection:
    """A job of SLURM: its nodes, its limits, and when it is requeued."""

    key_class: ClassVar = FREE

    nodes: Annotated[int, Gt(0)] = 1
    """Number of nodes."""
    gpus_per_node: Annotated[int, Gt(0)] | None = None
    """GPUs to request on each node."""
    gpu_type: str | None = None
    """Type of the GPUs, as the cluster names it, such as `h100`."""
    ranks_per_node: Annotated[int, Gt(0)] | None = None
    """Ranks on each node; unset, one rank per GPU."""
    cpus_per_rank: Annotated[int, Gt(0)] | None = None
    """CPU cores of each rank."""
    memory: str | None = None
    """Host memory of each node, such as `"200G"`; `"0"` is all of it."""
    time: str | None = None
    """Time limit: `minutes`, `hours:minutes:seconds` or `days-hours:minutes:seconds`. Unset, the partition's default."""
    partition: str | None = None
    """Partition, or several with commas."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that the nodes must have, such as `"h100&ib"`."""
    exclude: str | None = None
    """Nodes that the job must not use, such as `"gpu[03,07]"`."""
    array: str | None = None
    """Job array, such as `"0-7"` or `"0-7%2"`. Each task is a run of its own: the recipe's keys contain `{task}`."""
    warn_seconds: Annotated[int, Ge(10)] = 120
    """Seconds before the time limit at which the run is asked to stop: enough for a step and a checkpoint."""
    max_requeues: Annotated[int, Ge(0)] = 50
    """Maximum number of requeues; afterwards the job ends, and a person has to submit it again."""
    setup: list[str] = field(default_factory=list)
    """Lines of shell to run on the first node before the ranks start, such as `module load cuda`."""
    options: dict[str, str | int] = field(default_factory=dict)
    """Further options of sbatch without their dashes, such as `{reservation = "team", mail-type = "FAIL"}`; an empty string is
    an option without a value."""

    def __post_init__(self) -> None:
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise ValueError(
                f'time = {self.time!r} is not a time limit of SLURM; write "30" (minutes), "4:00:00" or "2-12:00:00"'
            )
        if self.array is not None and not _ARRAY.fullmatch(self.array):
            raise ValueError(f'array = {self.array!r} is not a list of task numbers; write "0-7", "0-7%2" or "1,3,5"')
        if self.gpu_type is not None and self.gpus_per_node is None:
            raise ValueError("gpu_type has no effect without gpus_per_node; set their number")
        for name in self.options:
            if name.startswith("-"):
                raise ValueError(f"options.{name}: write the name without dashes")
            if name in _SET_BY_LAUNCH:
                raise ValueError(f"options.{name} is determined by {_SET_BY_LAUNCH[name]}; remove it")
            if (key := name.replace("-", "_")) in {"time", "partition", "account", "qos", "constraint", "exclude"}:
                raise ValueError(f"options.{name}: use the key slurm.{key}")

    @property
    def ranks(self) -> int:
        """Ranks on each node.

        Raises:
            LayoutError: neither the number of GPUs nor that of ranks is set.
        """
        return _ranks_per_node("slurm", self.ranks_per_node, self.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class KubernetesSection:
    """A job of Kubernetes: one pod per node."""

    key_class: ClassVar = FREE

    kind: Literal["jobset", "pytorchjob"] = "jobset"
    """`jobset` (jobset.x-k8s.io/v1alpha2), or `pytorchjob` of the Kubeflow training operator (kubeflow.org/v1)."""
    nodes: Annotated[int, Gt(0)] = 1
    """Number of pods; each has a node of its own if it requests all of the node's GPUs."""
    gpus_per_node: Annotated[int, Gt(0)] | None = None
    """GPUs of each pod."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the resource that counts GPUs, such as `amd.com/gpu`."""
    ranks_per_node: Annotated[int, Gt(0)] | None = None
    """Ranks in each pod; unset, one rank per GPU."""
    cpus: Annotated[int, Gt(0)] | None = None
    """CPU cores of each pod."""
    memory: str | None = None
    """Host memory of each pod, such as `"200Gi"`."""
    shared_memory: str = "16Gi"
    """Limit of /dev/shm, which NCCL and data loaders use; it counts as memory of the pod."""
    namespace: str | None = None
    """Namespace; unset, that of `kubectl`."""
    volume: str | None = None
    """PersistentVolumeClaim for the run's directory. All pods write to it: its access mode is ReadWriteMany."""
    mount: str = "/forge"
    """Path of the volume in the pods; the working directory, and so `runs/`, is here."""
    service_account: str | None = None
    """Service account of the pods."""
    image_pull_secret: str | None = None
    """Secret with which the image is pulled."""
    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that the nodes must have."""
    tolerate: list[str] = field(default_factory=list)
    """Keys of taints that the pods tolerate, such as `nvidia.com/gpu`."""
    priority_class: str | None = None
    """Priority class of the pods."""
    queue: str | None = None
    """Local queue of Kueue that admits the job."""
    max_restarts: Annotated[int, Ge(0)] = 50
    """Maximum number of restarts of all pods, after a failure or a preemption."""
    grace_seconds: Annotated[int, Gt(0)] = 120
    """Seconds between a pod's stop signal and its end: enough for a step and a checkpoint."""

    def __post_init__(self) -> None:
        if not self.mount.startswith("/") or self.mount.rstrip("/") == "":
            raise ValueError(f"mount = {self.mount!r} must be an absolute path below /")

    @property
    def ranks(self) -> int:
        """Ranks in each pod.

        Raises:
            LayoutError: neither the number of GPUs nor that of ranks is set.
        """
        return _ranks_per_node("kubernetes", self.ranks_per_node, self.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class ContainerSection:
    """The container that the ranks run in."""

    key_class: ClassVar = FREE

    runtime: Literal["pyxis", "apptainer"] | None = None
    """How SLURM starts containers: with the plugin pyxis, or with apptainer. Kubernetes needs only `image`."""
    image: str | None = None
    """The image: a name in a registry, or the path of a file (`.sqsh` for pyxis, `.sif` for apptainer)."""
    mounts: list[str] = field(default_factory=list)
    """Paths of the host that the container of a SLURM job sees, each alone or with a colon and its path in the container. The
    working directory is always one of them."""
    command: str = "forge-train"
    """Command in the container that starts the trainer, such as `/opt/venv/bin/forge-train`."""

    def __post_init__(self) -> None:
        if self.runtime is not None and self.image is None:
            raise ValueError(f"runtime = {self.runtime!r} needs an image; set container.image")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A whole cluster file."""

    key_class: ClassVar = FREE

    slurm: SlurmSection = field(default_factory=SlurmSection)
    """Jobs of SLURM."""
    kubernetes: KubernetesSection = field(default_factory=KubernetesSection)
    """Jobs of Kubernetes."""
    container: ContainerSection = field(default_factory=ContainerSection)
    """The container of the ranks."""
    environment: dict[str, str | int] = field(default_factory=dict)
    """Environment variables of all ranks."""

    def __post_init__(self) -> None:
        for name, value in self.environment.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise ValueError(f"environment.{name} is not a name of an environment variable")
            if secret(name) or redacted_text(str(value)) != str(value):
                raise ValueError(
                    f"environment.{name} may be a secret, and scripts and manifests can be read by others: export it in the "
                    "shell that submits, since sbatch passes its environment on; pods get it from their image or service account"
                )
        for section in (self.slurm, self.kubernetes, self.container):
            for key, text in _texts(section):
                if re.search(r"[\x00-\x1f\x7f]", text):
                    raise ValueError(
                        f"{key}: {text[:40]!r} has a line break or another control character; write one line per item"
                    )


def _texts(section: Any) -> Iterator[tuple[str, str]]:
    """Yields each text of a section, also in its lists and tables, with its key."""
    for item in fields(section):
        value = getattr(section, item.name)
        if isinstance(value, dict):
            yield from ((item.name, str(text)) for pair in value.items() for text in pair)
        elif isinstance(value, list):
            yield from ((item.name, text) for text in value)
        elif isinstance(value, str):
            yield item.name, value


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divides `--section.key=value` into those of the cluster file and those of the recipe."""
    own = [argument for argument in arguments if argument.removeprefix("--").split(".")[0].split("=")[0] in SECTIONS]
    return own, [argument for argument in arguments if argument not in own]


def load_cluster(path: str | None, overrides: Sequence[str]) -> Cluster:
    """Reads a cluster file with its bases and overrides.

    Args:
        path: a TOML file; None for the defaults.

    Raises:
        ConfigError: the file has faults; the error lists all of them, with the names of known keys that are near.
    """
    registry = Registry()
    if path is not None and not path.endswith(".toml"):
        raise ConfigError(
            [Fault("--cluster", f"{path!r} is not a TOML file", "command line", "name a file such as cluster.toml")]
        )
    try:
        layered = load_layers(Table({}, DEFAULT) if path is None else _as_file(path), overrides, Cluster, registry)
    except ConfigError as error:
        raise ConfigError(replace(fault, key="--cluster") if fault.key == "RECIPE" else fault for fault in error.faults) from None
    outcome = walk(Cluster, layered.tree, registry)
    if faults := [*layered.faults, *outcome.faults]:
        raise ConfigError(dict.fromkeys(faults))
    return outcome.value


def _as_file(path: str) -> str:
    return path if "/" in path else f"./{path}"


def array_tasks(array: str | None) -> list[int]:
    """Returns the numbers of the tasks of an array, in order; empty without an array.

    Raises:
        ConfigError: the array has no task, or more than 1000, each of which is checked.
    """
    tasks: list[int] = []
    for part in (array or "").partition("%")[0].split(","):
        if not part:
            continue
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        tasks += range(int(first), int(last or first) + 1, int(step or 1))[: _MOST_TASKS + 1]
        if len(tasks) > _MOST_TASKS:
            break
    if array and not 0 < len(tasks) <= _MOST_TASKS:
        count = "no task" if not tasks else f"more than {_MOST_TASKS} tasks"
        raise ConfigError([Fault("slurm.array", f"{array!r} has {count}", hint=f"give 1 to {_MOST_TASKS} tasks")])
    return tasks


@dataclass(frozen=True)
class CheckedRun:
    """What is launched: a recipe that `check` accepts for the world size of the job.

    Attributes:
        recipe: absolute path of the file, or name of a preset.
        overrides: arguments of `run`; may contain `{task}`.
        name: `job.name`, may contain `{task}`.
        directory: directory of the run, relative to `folder` or absolute; may contain `{task}`.
        folder: working directory of the job, absolute.
        world: number of ranks.
        directories: absolute directories of all tasks; one without an array.
        warnings: warnings of `check`.
        signal: the signal that asks the run to stop; not that of its hook `profile`.
    """

    recipe: str
    overrides: tuple[str, ...]
    name: str
    directory: str
    folder: Path
    world: int
    directories: tuple[Path, ...]
    warnings: tuple[str, ...] = ()
    signal: str = "USR1"


def check_run(
    recipe: str, overrides: Sequence[str], world: int, array: str | None = None, folder: Path | None = None
) -> CheckedRun:
    """Checks the recipe for the world size, for each task of an array, as `forge-train check` does.

    Raises:
        ConfigError: the recipe has faults, or the tasks of an array would share a directory.
    """
    folder = (folder or Path.cwd()).absolute()
    tasks, registry = array_tasks(array), Registry()
    uses_task = any(TASK in override for override in overrides)
    if uses_task and not tasks:
        raise ConfigError(
            [Fault("slurm.array", f"{TASK} in a key of the recipe needs a job array", hint="set --array, such as 0-7")]
        )
    for override in overrides:
        key, _, value = override.removeprefix("--").partition("=")
        if secret(key.rpartition(".")[2]) or redacted_text(value) != value:
            raise ConfigError(
                [Fault(key, "may be a secret, and the script of a job can be read by others", hint="pass it in the environment")]
            )
    checked: dict[Path, Recipe] = {}
    for task in tasks or [None]:
        own = [item if task is None else item.replace(TASK, str(task)) for item in overrides]
        resolved = load_recipe(recipe, own, world, registry)
        directory = folder / run_directory(resolved.job)
        if directory in checked:
            raise ConfigError(
                [
                    Fault(
                        "slurm.array",
                        f"several tasks would train in {directory}",
                        hint=f"add --job.name=NAME-{TASK}, or --job.dir",
                    )
                ]
            )
        checked[directory] = resolved
    job = next(iter(checked.values())).job
    name, place = job.job.name, str(run_directory(job))
    if TASK in name + place:
        raise ConfigError([Fault("job.name", f"{TASK} is replaced only on the command line", hint=f"set --job.name=NAME-{TASK}")])
    if tasks:
        name, place = (_given(overrides, key) for key in ("job.name", "job.dir"))
        name, place = name or job.job.name, place or f"runs/{name or job.job.name}"
    hooks = [getattr(hook, "signal", None) for hook in job.hooks]
    return CheckedRun(
        recipe=str(Path(recipe).absolute()) if recipe.endswith(".toml") or "/" in recipe else recipe,
        overrides=tuple(overrides),
        name=name,
        directory=place,
        folder=folder,
        world=world,
        directories=tuple(checked),
        warnings=tuple(dict.fromkeys(line for resolved in checked.values() for line in resolved.warnings)),
        signal="USR2" if "SIGUSR1" in hooks else "USR1",
    )


def _given(overrides: Sequence[str], key: str) -> str:
    return next((item.partition("=")[2] for item in overrides if item.startswith(f"--{key}=")), "")


def trainer_command(container: ContainerSection) -> list[str]:
    """Returns the command that starts the trainer: that of the container, or this installation."""
    return shlex.split(container.command) if container.runtime is not None else [sys.executable, "-m", "forge_train"]


def _ranks_per_node(section: str, ranks: int | None, gpus: int | None) -> int:
    if (count := ranks or gpus) is None:
        raise LayoutError(
            f"the number of ranks is not known: set {section}.gpus_per_node (one rank per GPU), or for a run on CPUs "
            f"{section}.ranks_per_node"
        )
    if gpus is not None and count > gpus:
        raise LayoutError(
            f"{section}.ranks_per_node = {count} is larger than {section}.gpus_per_node = {gpus}; a rank needs a GPU"
        )
    return count
