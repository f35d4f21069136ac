"""Ranks meet in the store of rank 0 before their first collective: who is there, on which device, and do all run the same thing?

Rank 0 opens a meeting under a new number and says what it runs. Every other rank compares that with its own content, says what
differs, and waits for an answer. Rank 0 answers once all have come, or once it knows why they cannot start; all of them then
start, or end with the same message. Only rank 0 judges, and each answer is for one process: what an earlier start left in a store
that outlives the ranks, as torchrun's agent keeps one, is never taken for an answer.
"""

import json
import logging
import os
import platform
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
import torch.distributed as dist

from forge_core.errors import ForgeError, LayoutError
from forge_core.terminal import size
from forge_parallel import accelerator
from forge_parallel.launch.environment import Launch
from forge_parallel.launch.watch import PeerFailure

_NEARLY = 0.02
"""By which share two memories may differ and count as alike: error correction and drivers take some of it."""


@dataclass(frozen=True)
class Device:
    """What a rank works on: its `kind` decides how tensors are exchanged, its `architecture` which kernels there are."""

    host: str
    kind: str
    name: str
    architecture: str = ""
    memory: int | None = None

    @classmethod
    def of(cls, host: str, device: torch.device) -> "Device":
        """That of this process."""
        asked = accelerator.name(device), accelerator.architecture(device), accelerator.memory(device)
        return cls(host, device.type, *asked)

    def __str__(self) -> str:
        told = [self.name, f"of {self.architecture}" if self.architecture else "", size(self.memory) if self.memory else ""]
        return " ".join(filter(None, told))


def judged(devices: Sequence[Device]) -> tuple[str, str]:
    """(why these cannot work together, what to know of them when they do), by rank; "" for nothing."""
    if len({one.kind for one in devices}) > 1:
        idle = sorted({one.host for one in devices if one.kind == accelerator.CPU.type})
        do = f"`forge-train doctor` on {', '.join(idle[:4])} says why torch uses no GPU there" if idle else "choose one kind"
        return f"ranks have devices of different kinds: {_listed(devices)}; {do}", ""
    if len({one.architecture for one in devices}) > 1:
        return (
            f"ranks have devices of different capabilities: {_listed(devices)}; their kernels would not compute the same. "
            "Choose nodes of one kind (--constraint, --nodelist), or devices of one kind with CUDA_VISIBLE_DEVICES",
            "",
        )
    memories = [one.memory for one in devices if one.memory is not None]
    unequal = bool(memories) and min(memories) < (1 - _NEARLY) * max(memories)
    if unequal or len({one.name for one in devices}) > 1:
        return "", f"ranks have different devices: {_listed(devices)}; all wait for the slowest, and the smallest memory counts"
    return "", ""


def _listed(devices: Sequence[Device]) -> str:
    """Which ranks have which device, and on which host the first of them is."""
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(devices):
        ranks.setdefault(str(one), []).append(rank)
    return ", ".join(f"{_ranks(held)} {told} ({devices[held[0]].host})" for told, held in ranks.items())


def _ranks(held: Sequence[int]) -> str:
    if len(held) == 1:
        return f"rank {held[0]} has"
    if list(held) == list(range(held[0], held[-1] + 1)):
        return f"ranks {held[0]}-{held[-1]} have"
    more = f" and {len(held) - 8} more" if len(held) > 8 else ""
    return f"ranks {', '.join(map(str, held[:8]))}{more} have"


STOPPED = 75
"""Exit code of a rank that a signal ends while it waits: EX_TEMPFAIL, "start it again"."""

_HURRY_SECONDS = 3.0
"""How long a rank that was asked to stop waits for the others, so that they learn of it."""

_FAULT_SECONDS = 30.0
"""How long rank 0 waits for the others once it knows that they cannot start, so that they learn why."""

_LAST_SECONDS = 5.0
"""For how long rank 0 keeps its store so that the others can read why they end."""

_SHOWN = 8
"""How many keys and ranks a message names."""

SAME_ON_ALL_RANKS = (
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS"),
    *("NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE", "NCCL_PXN_DISABLE", "GLOO_DEVICE_TRANSPORT"),
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("TORCH_BLAS_PREFER_CUBLASLT", "PYTORCH_TUNABLEOP_ENABLED", "TORCH_CUDNN_V8_API_DISABLED", "CUDNN_DETERMINISTIC"),
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"),
    *("DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_DEFAULT_FPMATH_MODE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"),
    *("TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "TORCHINDUCTOR_MAX_AUTOTUNE"),
)
"""Variables that change the result of a kernel, or the order in which a collective sums. Those that name a network card, a
folder, a level of logging or a number of threads may differ between hosts."""

_log = logging.getLogger(__name__)


class RanksDiffer(ForgeError):
    """Ranks of one world do not run the same thing; the same message on every rank."""


Content = Sequence[Mapping[str, str]]
"""What has to be equal on all ranks, part by part: values by their keys."""


def surroundings() -> dict[str, str]:
    """What decides numbers besides a recipe: versions, and the variables of `SAME_ON_ALL_RANKS` that are set."""
    versions = {"version of Python": platform.python_version(), "version of torch": torch.__version__}
    return versions | {f"environment {name}": os.environ[name] for name in SAME_ON_ALL_RANKS if name in os.environ}


@dataclass(frozen=True)
class Attendant:
    """What a rank says when it comes to the meeting, or leaves it.

    Attributes:
        number: of this process, by which it is answered.
        identity: of its launch (`Launch.identity`); "" where its launcher gives none.
        run: name of what it runs; "" where it does not know.
        differs: keys whose values are not those of rank 0, with both values.
        left, code: why it does not wait any longer, and its exit code.
    """

    rank: int
    size: int
    identity: str
    run: str
    host: str
    process: int
    device: Device
    number: str = field(default_factory=lambda: secrets.token_hex(4))
    differs: Sequence[tuple[str, str, str]] = ()
    left: str = ""
    code: int = 0

    def as_text(self) -> str:
        """JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> "Attendant":
        """The inverse of `as_text`."""
        told = json.loads(text)
        return cls(**told | {"device": Device(**told["device"]), "differs": [tuple(each) for each in told["differs"]]})

    def is_of(self, other: "Attendant") -> bool:
        """Whether both were started together. Where a launcher gives no identity, the name of the run stands in for it."""
        if self.identity or other.identity:
            return self.identity == other.identity
        return not self.run or not other.run or self.run == other.run

    @property
    def launch(self) -> str:
        """The launch and the run: `SLURM job 7, step 1, restart 0, run 'small'`."""
        return ", ".join(filter(None, [self.identity, f"run {self.run!r}" if self.run else ""])) or "no name"

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"


class Wait:
    """The time until all ranks have come. It waits in Python, where signals are heard, says who is missing, and ends."""

    def __init__(self, where: Launch, limit: float, patience: float, hurry: Callable[[], bool]) -> None:
        self.where, self.limit, self.told, self.asked = where, limit, patience, hurry
        self.began, self.pause = time.monotonic(), 0.01
        self.hurries = False

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def hurry(self, seconds: float) -> None:
        """Ends after so many more seconds."""
        self.limit = min(self.limit, self.passed + seconds)

    def until(self, true: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Returns once `true` does.

        Raises:
            PeerFailure: the time is up; with code `STOPPED` where a signal has shortened it.
        """
        while not true():
            if not self.hurries and self.asked():
                self.hurries = True
                self.hurry(_HURRY_SECONDS)
            if self.passed > self.limit:
                raise PeerFailure(
                    f"rank {self.where.rank} of {self.where.size} (started by {self.where.launcher}) "
                    f"{'was asked to stop and ' if self.hurries else ''}waited {self.passed:.0f} s at the start: {missing()}; "
                    "is MASTER_ADDR the host of rank 0, and did every rank start?",
                    STOPPED if self.hurries else PeerFailure.exit_code,
                )
            if self.passed > self.told:
                self.told *= 2
                _log.warning("waiting for %.0f s at the start: %s", self.passed, missing())
            time.sleep(self.pause)
            self.pause = min(1.5 * self.pause, 0.5)


def meet(
    tcp: dist.Store, where: Launch, wait: Wait, device: torch.device, content: Mapping[str, str], run: str, outlives: bool
) -> tuple[dist.Store, str]:
    """Collective: the store of this group and a remark on unequal devices, once all ranks have come and run the same thing.

    Args:
        tcp: store that all ranks reach.
        content: what has to be equal on all ranks besides `surroundings()`, by key. Values are fit to be shown; of a hidden one,
            a digest of 12 digits after ` #` is compared and not shown. Empty where it could not be read, which is not this
            function's to say.
        run: name of the run; "" where it is not known.
        outlives: the store does not end with rank 0, so it may hold an earlier meeting.

    Raises:
        RanksDiffer: content or devices are not equal; the same words on every rank.
        PeerFailure: ranks did not come, or left.
        LayoutError: this process came to the ranks of another start.
    """
    host = socket.gethostname()
    me = Attendant(where.rank, where.size, where.identity, run, host, os.getpid(), Device.of(host, device))
    common = dist.PrefixStore("forge", tcp)
    both = [dict(content), surroundings()]
    if where.rank == 0:
        return _Host(common, me, wait, outlives).hold(both)
    return _Guest(common, me, wait, outlives).attend(both)


def opened_by(tcp: dist.Store) -> str:
    """Which start has its meeting in a store; "" where none has."""
    common = dist.PrefixStore("forge", tcp)
    if not common.check(["meeting"]):
        return ""
    host = Attendant.from_text(json.loads(common.get("meeting"))["host"])
    return f"{host} of {host.launch}"


class _Host:
    """Rank 0: waits for all, judges, answers."""

    def __init__(self, common: dist.Store, me: Attendant, wait: Wait, outlives: bool) -> None:
        self.common, self.me, self.wait, self.outlives = common, me, wait, outlives
        self.store = dist.PrefixStore(me.number, common)
        self.read = 0
        self.present: dict[int, Attendant] = {0: me}
        self.fault: tuple[str, int] | None = None
        self.said, self.when = "", 0.0

    def hold(self, content: Content) -> tuple[dist.Store, str]:
        self.common.set("meeting", json.dumps({"host": self.me.as_text(), "content": content}))
        cause = None
        try:
            self.wait.until(self.complete, self.missing)
        except PeerFailure as failure:
            cause = failure
        fault, code, remark = self.verdict(cause)
        self.answer(fault, code, remark)
        if fault:
            raise _error(fault, code) from cause
        return self.store, remark

    def verdict(self, cause: PeerFailure | None) -> tuple[str, int, str]:
        """(why the ranks cannot start or "", exit code, remark)."""
        if differs := self.differences():
            return differs, RanksDiffer.exit_code, ""
        if self.fault is not None:
            return *self.fault, ""
        if cause is not None:
            return str(cause), cause.exit_code, ""
        unlike, remark = judged([self.present[rank].device for rank in range(self.me.size)])
        return unlike, RanksDiffer.exit_code, remark

    def complete(self) -> bool:
        """Whether all ranks have come. Reads who has come since the last call."""
        for number in range(self.read + 1, self.store.add("came", 0) + 1):
            if not self.store.check([f"came/{number}"]):  # it is about to be written
                break
            self.read = number
            self.welcome(Attendant.from_text(self.store.get(f"came/{number}")))
        if (text := self.missing()) != self.said and self.wait.passed > self.when:
            self.said, self.when = text, self.wait.passed + 0.2
            self.store.set("missing", text)
        return len(self.present) == self.me.size

    def welcome(self, one: Attendant) -> None:
        if not one.is_of(self.me):
            _log.warning("%s of another start came and was refused: it is of %s, this is %s", one, one.launch, self.me.launch)
            self.tell(one, f"{one} is of {one.launch}, but {self.me} at {self.at} is of {self.me.launch}: {_OTHER}", _STRANGER)
            return
        before = self.present.get(one.rank)
        if one.left:
            if before is not None and before.number == one.number:
                self.end(f"{one} has left: {one.left}", one.code)
            return
        if one.size != self.me.size or not 0 < one.rank < self.me.size:
            self.present.setdefault(one.rank, one)
            self.end(f"{one} was started for a world of {one.size}, {self.me} for one of {self.me.size}", RanksDiffer.exit_code)
            return
        if before is not None:
            self.tell(before, f"another process came as rank {one.rank}: {one}", PeerFailure.exit_code)
        self.present[one.rank] = one
        if one.differs:
            self.wait.hurry(_FAULT_SECONDS)  # all will end; those that come soon learn why

    def end(self, why: str, code: int) -> None:
        self.fault = self.fault or (why, code)
        self.wait.hurry(_FAULT_SECONDS if code == RanksDiffer.exit_code else _HURRY_SECONDS)

    @property
    def at(self) -> str:
        return f"{self.wait.where.address}:{self.wait.where.port}"

    def missing(self) -> str:
        absent = [rank for rank in range(self.me.size) if rank not in self.present]
        count = self.me.size - len(absent)
        return f"{count} of {self.me.size} ranks have come; rank {_first(absent)} did not come to {self.at}"

    def differences(self) -> str:
        """What to say of ranks whose content is not that of rank 0; "" where there are none."""
        others = sorted((one for one in self.present.values() if one.differs), key=lambda one: one.rank)
        if not others:
            return ""
        told = []
        for one in others[:_SHOWN]:
            keys = "; ".join(f"{key} is {mine}, and {theirs} on rank 0" for key, theirs, mine in one.differs[:_SHOWN])
            more = f"; and {len(one.differs) - _SHOWN} more keys" if len(one.differs) > _SHOWN else ""
            told.append(f"{one}: {keys}{more}")
        more = f"; and {len(others) - _SHOWN} more ranks" if len(others) > _SHOWN else ""
        ranks = f"rank 0 is process {self.me.process} on {self.me.host}"
        return f"ranks differ: {'; '.join(told)}{more}; {ranks}. Start all of them with one recipe, one environment and one code"

    def tell(self, one: Attendant, fault: str, code: int, remark: str = "") -> None:
        self.store.set(f"answer/{one.number}", json.dumps({"fault": fault, "code": code, "remark": remark}))

    def answer(self, fault: str, code: int, remark: str = "") -> None:
        """Answers all who are there. The store may end with this process, so where they are refused they read first."""
        self.store.set("name", self.me.number)
        others = [one for one in self.present.values() if one.rank != 0]
        for one in others:
            self.tell(one, fault, code, remark)
        self.store.set("closed", "1")
        until = time.monotonic() + _LAST_SECONDS
        while fault and not self.outlives and time.monotonic() < until and self.store.add("heard", 0) < len(others):
            time.sleep(0.02)


class _Guest:
    """Any other rank: compares its content with that of rank 0, and waits for the answer."""

    def __init__(self, common: dist.Store, me: Attendant, wait: Wait, outlives: bool) -> None:
        self.common, self.me, self.wait, self.outlives = common, me, wait, outlives
        self.host, self.store = me, common
        self.meeting, self.looked = b"", 0.0

    def attend(self, content: Content) -> tuple[dist.Store, str]:
        try:
            self.wait.until(lambda: self.answered(content), self.missing)
        except PeerFailure as failure:
            if self.meeting:
                self.come(str(failure), failure.exit_code)
                self.store.add("heard", 1)  # it reads no answer any more
            raise
        told = json.loads(self.store.get(f"answer/{self.me.number}"))
        if told["fault"]:
            self.store.add("heard", 1)
            raise _error(told["fault"], told["code"])
        return self.store, told["remark"]

    def answered(self, content: Content) -> bool:
        """Whether rank 0 has answered. Comes to each new meeting; a store that outlives the ranks may begin with an old one."""
        if not self.meeting or (self.outlives and self.wait.passed > self.looked + 1):
            self.looked = self.wait.passed
            if not self.common.check(["meeting"]):
                return False
            if (meeting := self.common.get("meeting")) != self.meeting:
                self.meeting = meeting
                told = json.loads(meeting)
                self.host = Attendant.from_text(told["host"])
                self.store = dist.PrefixStore(self.host.number, self.common)
                self.me = replace(self.me, differs=_differences(told["content"], content))
                self.come()
        answer = f"answer/{self.me.number}"
        if self.store.check([answer]):
            return True
        if not self.outlives and self.store.check(["closed"]) and not self.store.check([answer]):
            raise LayoutError(
                f"{self.me} is of {self.me.launch}, and came too late: {self.host} at {self.wait.where.address}:"
                f"{self.wait.where.port} is of {self.host.launch} and has begun without it; {_OTHER}"
            )
        return False

    def come(self, left: str = "", code: int = 0) -> None:
        number = self.store.add("came", 1)
        self.store.set(f"came/{number}", replace(self.me, left=left, code=code).as_text())

    def missing(self) -> str:
        if not self.meeting:
            return "rank 0 has not opened the meeting of the ranks"
        if self.store.check(["missing"]):
            return self.store.get("missing").decode()
        return "rank 0 has not said who is missing"


_STRANGER = -1
"""Stands for an exit code in an answer that only one process is given: it came to the ranks of another start."""

_OTHER = "give each start its own MASTER_PORT, or start all of its ranks with one launcher"


def _error(fault: str, code: int) -> ForgeError:
    if code == _STRANGER:
        return LayoutError(fault)
    return RanksDiffer(fault) if code == RanksDiffer.exit_code else PeerFailure(fault, code)


def _differences(theirs: Content, mine: Content) -> list[tuple[str, str, str]]:
    """(key, value on rank 0, value here) of what is not equal. A part that one of them could not read is not compared."""
    found = []
    for there, here in zip(theirs, mine, strict=True):
        keys = [key for key in {**there, **here} if there.get(key) != here.get(key)] if there and here else []
        found += [(key, *(_shown(side.get(key, "not there")) for side in (there, here))) for key in keys]
    return found


def _shown(value: str) -> str:
    """Without the digest that tells two hidden values apart."""
    return re.sub(r" #[0-9a-f]{12}$", "", value)


def _first(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"{', '.join(map(str, ranks[:_SHOWN]))}{more}"
