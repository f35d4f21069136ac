"""The node: limits, shared memory, room on the disk and its speed, compiler, optional packages. No torch."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

from forge_core.files import write_file
from forge_core.machine import slow_bf16, usable_cores
from forge_core.terminal import size
from forge_train.doctor.step import Check, DoctorSettings
from forge_train.doctor.torch_build import sees_gpu

_LEAST_SHARED = 1 << 30
_LEAST_ROOM = 1 << 30
_FILE = 1 << 30
_EXTRAS = {
    "torchao": "forge-parallel[float8]",
    "s3fs": "forge-ckpt[remote]",
    "tensorboard": "forge-train[tensorboard]",
    "wandb": "forge-train[wandb]",
}


@dataclass(frozen=True)
class NodeFacts:
    """Properties of a node.

    Attributes:
        gpu: True if the system has a visible GPU.
        infiniband: True if the system has InfiniBand cards.
        file: maximum bytes of a file; None without a limit.
        locked: maximum bytes of memory that a process may lock; None without a limit.
        shared: bytes of /dev/shm; None if it does not exist.
        free: free bytes on the disk of the run.
        wanted: minimum bytes that the run needs there.
        triton: True if Triton is installed.
        compiler: path of a C compiler; None if there is none.
        missing: modules of extras that are not installed.
        cores: number of cores that this process may use.
        slow_bf16: a warning if a processor without bf16 units would have to train.
    """

    gpu: bool
    infiniband: bool
    file: int | None
    locked: int | None
    shared: int | None
    free: int
    wanted: int
    triton: bool
    compiler: str | None
    missing: tuple[str, ...]
    cores: int
    slow_bf16: str | None = None


def examine_node(settings: DoctorSettings) -> Iterator[Check]:
    """Step `node`: collects facts about the node and checks them."""
    return judge_node(facts(settings))


def facts(settings: DoctorSettings, root: Path = Path("/")) -> NodeFacts:
    """Returns the properties of this node."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shared, cards = root / "dev/shm", root / "sys/class/infiniband"
    return NodeFacts(
        gpu=sees_gpu(root),
        infiniband=cards.is_dir() and any(cards.iterdir()),
        file=None if (largest := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) == resource.RLIM_INFINITY else largest,
        locked=None if locked == resource.RLIM_INFINITY else locked,
        shared=shutil.disk_usage(shared).total if shared.is_dir() else None,
        free=shutil.disk_usage(settings.directory).free,
        wanted=checkpoints(settings) if settings.acceptance else _LEAST_ROOM,
        triton=find_spec("triton") is not None,
        compiler=_compiler(),
        missing=tuple(name for name in _EXTRAS if find_spec(name) is None),
        cores=usable_cores(root),
        slow_bf16=slow_bf16(root),
    )


def checkpoints(settings: DoctorSettings) -> int:
    """Returns the maximum bytes of checkpoints on the disk in a run of the recipe: those that it keeps and the one being written.

    Counts weights and both moments of AdamW, 4 bytes each; checkpoints kept by `keep_hours` are not counted.
    """
    from forge_models.flops import counts_of
    from forge_train.recipe.load import load_recipe

    job = load_recipe(settings.recipe, settings.overrides).job
    counts = counts_of(job.model)
    if counts is None or job.checkpoint.store.build(Path(settings.directory)).free() is None:  # behind a URL
        return _LEAST_ROOM
    return _LEAST_ROOM + (job.checkpoint.most_kept(job.train.max_steps) + 1) * 12 * counts.parameters


def _compiler() -> str | None:
    """Returns the compiler that Triton would use."""
    return os.environ.get("CC") or next(filter(None, map(shutil.which, ("clang", "gcc"))), None)


def judge_node(found: NodeFacts) -> Iterator[Check]:
    """Yields checks of a node's facts, with remedies."""
    yield Check("cores", "PASS", f"{found.cores} usable")
    if found.slow_bf16:
        yield Check("bf16 on the processor", "SKIPPED", found.slow_bf16, remedy="set precision.compute = 'fp32' on this machine")
    yield _room(found)
    yield _file(found)
    yield _shared(found)
    yield _locked(found)
    yield _triton(found)
    if found.missing:
        wanted = " ".join(f'"{_EXTRAS[name]}"' for name in found.missing)
        told = f"{', '.join(found.missing)} not installed"
        yield Check("extras", "SKIPPED", told, remedy=f"if a recipe needs them: pip install {wanted}")
    else:
        yield Check("extras", "PASS", "all installed")


def _room(found: NodeFacts) -> Check:
    name, told, expected = "room on the disk", f"{size(found.free)} free", f"{size(found.wanted)} for checkpoints and logs"
    if found.free >= found.wanted:
        return Check(name, "PASS", told, expected=expected)
    remedy = "free disk space, set job.dir (here: --directory) to a larger disk, or lower checkpoint.keep"
    return Check(name, "FAIL", told, expected=expected, remedy=remedy)


def _file(found: NodeFacts) -> Check:
    name, expected = "size of a file (ulimit -f)", "unlimited: a checkpoint has one large file per rank"
    if found.file is None:
        return Check(name, "PASS", "unlimited", expected=expected)
    remedy = "set ulimit -f unlimited, or use more ranks: a start refuses a limit below the size of a rank's file"
    return Check(name, "FAIL" if found.file < _FILE else "SKIPPED", size(found.file), expected=expected, remedy=remedy)


def _shared(found: NodeFacts) -> Check:
    name, expected = "/dev/shm", f"{size(_LEAST_SHARED)}: NCCL and loaders pass tensors through it"
    if found.shared is None:
        return Check(name, "SKIPPED", "this system does not have it", expected=expected)
    if found.shared >= _LEAST_SHARED:
        return Check(name, "PASS", size(found.shared), expected=expected)
    remedy = "start the container with --shm-size=16g or --ipc=host; otherwise runs end with SIGBUS"
    return Check(name, "FAIL" if found.gpu else "SKIPPED", size(found.shared), expected=expected, remedy=remedy)


def _locked(found: NodeFacts) -> Check:
    name, expected = "memory that can be locked (ulimit -l)", "unlimited on nodes with InfiniBand cards"
    told = "unlimited" if found.locked is None else size(found.locked)
    if found.locked is not None and found.infiniband:
        remedy = "ulimit -l unlimited, for NCCL to register memory (limits.conf, LimitMEMLOCK of slurmd, or --ulimit memlock=-1)"
        return Check(name, "FAIL", told, expected=expected, remedy=remedy)
    return Check(name, "PASS", told, expected=expected)


def _triton(found: NodeFacts) -> Check:
    name, expected = "compiler for Triton", "a C compiler, with which torch.compile and flex attention build launchers"
    if not found.gpu:
        return Check(name, "SKIPPED", "no GPU is visible", expected=expected)
    if not found.triton:
        return Check(
            name, "FAIL", "triton is not installed", expected=expected, remedy="pip install triton, or remove transforms.compile"
        )
    if found.compiler is None:
        return Check(
            name, "FAIL", "neither $CC, clang nor gcc exists", expected=expected, remedy="apt-get install gcc, or set CC"
        )
    return Check(name, "PASS", found.compiler, expected=expected)


_GPU_DISK_BYTES, _CPU_DISK_BYTES = 1 << 30, 1 << 25
_SLOW_DISK = 100e6


def examine_disk(settings: DoctorSettings) -> Iterator[Check]:
    """Step `disk`: measures the disk with a temporary file."""
    length = _GPU_DISK_BYTES if sees_gpu() else _CPU_DISK_BYTES
    content = os.urandom(1 << 20) * (length >> 20)
    with tempfile.TemporaryDirectory(prefix=".forge-doctor-", dir=settings.directory) as name:
        file = Path(name) / "block"
        began = perf_counter()
        write_file(file, content)
        yield _rate("write and flush", length / (perf_counter() - began))
        _forget(file)
        began = perf_counter()
        found = file.read_bytes()
        yield _rate("read", length / (perf_counter() - began))
    if found == content:
        yield Check("content", "PASS", "unchanged")
    else:
        yield Check("content", "FAIL", "differs from what was written", remedy="do not train here; check dmesg for I/O errors")


def _rate(name: str, rate: float) -> Check:
    slow = rate < _SLOW_DISK
    remedy = (
        "saves and resumes will take long: set job.dir (here: --directory) to a local or a parallel file system" if slow else ""
    )
    return Check(name, "SLOW" if slow else "PASS", rate / 1e6, "MB/s", f"{_SLOW_DISK / 1e6:.0f} MB/s at least", remedy, "higher")


def _forget(file: Path) -> None:
    """Drops the file from the page cache, so that it is read from the disk."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
