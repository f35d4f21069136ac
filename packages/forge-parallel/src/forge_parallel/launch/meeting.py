"""The meeting of all ranks in the store of rank 0, before the first collective: do all ranks exist and run the same thing?

Rank 0 opens a meeting under a new number and publishes its content. Every other rank compares this with its own content, reports
differences and waits for an answer. Rank 0 answers when all ranks have come, or when it knows why they cannot start. Then all
ranks start, or all end with the same message. Only rank 0 decides, and each answer is for one process: so leftovers of an earlier
start in a store that outlives the ranks, such as that of torchrun's agent, are never taken for an answer.
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
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from forge_core.errors import ForgeError, LayoutError
from forge_core.terminal import size
from forge_parallel import accelerator
from forge_parallel.launch.environment import Launch
from forge_parallel.launch.large_store import absent, pause_of, put, values
from forge_parallel.launch.watch import PeerFailure

_NEARLY = 0.02
"""Relative difference up to which two memory sizes count as equal: error correction and drivers use some of it."""


@dataclass(frozen=True)
class Device:
    """A rank's device: `kind` decides how tensors are exchanged, `architecture` which kernels exist."""

    host: str
    kind: str
    name: str
    architecture: str = ""
    memory: int | None = None

    @classmethod
    def of(cls, host: str, device: torch.device) -> "Device":
        """Returns the device of this process."""
        properties = accelerator.name(device), accelerator.architecture(device), accelerator.memory(device)
        return cls(host, device.type, *properties)

    def __str__(self) -> str:
        words = [self.name, f"of {self.architecture}" if self.architecture else "", size(self.memory) if self.memory else ""]
        return " ".join(filter(None, words))


def judged(devices: Sequence[Device]) -> tuple[str, str]:
    """Returns (why the devices cannot work together, a remark if they can), each "" if there is nothing to say."""
    if len({device.kind for device in devices}) > 1:
        idle = sorted({device.host for device in devices if device.kind == accelerator.CPU.type})
        do = f"`forge-train doctor` on {', '.join(idle[:4])} says why torch uses no GPU there" if idle else "choose one kind"
        return f"ranks have devices of different kinds: {_listed(devices)}; {do}", ""
    if len({device.architecture for device in devices}) > 1:
        return (
            f"ranks have devices of different capabilities: {_listed(devices)}; their kernels would compute different numbers. "
            "Choose nodes of one kind (--constraint, --nodelist), or devices of one kind with CUDA_VISIBLE_DEVICES",
            "",
        )
    memories = [device.memory for device in devices if device.memory is not None]
    unequal = bool(memories) and min(memories) < (1 - _NEARLY) * max(memories)
    if unequal or len({device.name for device in devices}) > 1:
        return "", f"ranks have different devices: {_listed(devices)}; all wait for the slowest, and the smallest memory counts"
    return "", ""


def _listed(devices: Sequence[Device]) -> str:
    """Lists which ranks have which device, each with the host of its first rank."""
    ranks: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault(str(device), []).append(rank)
    return ", ".join(f"{_ranks(group)} {name} ({devices[group[0]].host})" for name, group in ranks.items())


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]} have"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more} have"


STOPPED = 75
"""Exit code of a rank that a signal ends while it waits: EX_TEMPFAIL, which launchers treat as a reason to restart."""

_HURRY_SECONDS = 3.0
"""How long a rank that received a stop request waits for the others, so that they learn of it."""

_FAULT_SECONDS = 30.0
"""How long rank 0 waits for the others after it knows that they cannot start, so that they learn the reason."""

_LAST_SECONDS = 5.0
"""How long rank 0 keeps its store open, so that the others can read why they end."""

_SHOWN = 8
"""Maximum number of keys and ranks that a message names."""

_COME = (
    "is MASTER_ADDR the host of rank 0, did every rank start, and does the firewall of that host pass TCP from the other hosts?"
)

SAME_ON_ALL_RANKS = (
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS"),
    *("NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE", "NCCL_PXN_DISABLE", "GLOO_DEVICE_TRANSPORT"),
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("TORCH_BLAS_PREFER_CUBLASLT", "PYTORCH_TUNABLEOP_ENABLED", "TORCH_CUDNN_V8_API_DISABLED", "CUDNN_DETERMINISTIC"),
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"),
    *("DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_DEFAULT_FPMATH_MODE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"),
    *("TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "TORCHINDUCTOR_MAX_AUTOTUNE"),
)
"""Environment variables that change the results of kernels or the order of sums in collectives. Variables for network cards,
folders, log levels or thread counts may differ between hosts."""

_log = logging.getLogger(__name__)


class RanksDiffer(ForgeError):
    """The ranks of a world do not run the same thing; the message is the same on every rank."""


Content = Sequence[Mapping[str, str]]
"""The parts that must be equal on all ranks; each maps keys to values."""


def surroundings() -> dict[str, str]:
    """Returns what determines results besides the recipe: versions, and the variables of `SAME_ON_ALL_RANKS` that are set."""
    versions = {"version of Python": platform.python_version(), "version of torch": torch.__version__}
    return versions | {f"environment {name}": os.environ[name] for name in SAME_ON_ALL_RANKS if name in os.environ}


@dataclass(frozen=True)
class Attendant:
    """The message of a rank that comes to the meeting or leaves it.

    Attributes:
        number: identifies the process; answers are addressed to it.
        identity: identifies its launch (`Launch.identity`); "" if the launcher provides none.
        run: name of the run; "" if unknown.
        differs: keys whose values differ from those of rank 0, with both values.
        left, code: why the rank stopped waiting, and its exit code.
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
        """Returns the message as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> "Attendant":
        """Parses the JSON of `as_text`."""
        fields = json.loads(text)
        return cls(**fields | {"device": Device(**fields["device"]), "differs": [tuple(item) for item in fields["differs"]]})

    def is_of(self, other: "Attendant") -> bool:
        """Whether both belong to the same launch. Without identities, the names of the runs are compared."""
        if self.identity or other.identity:
            return self.identity == other.identity
        return not self.run or not other.run or self.run == other.run

    @property
    def launch(self) -> str:
        """The launch and the run, such as `SLURM job 7, step 1, restart 0, run 'small'`."""
        return ", ".join(filter(None, [self.identity, f"run {self.run!r}" if self.run else ""])) or "no name"

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"


class Wait:
    """Waits until all ranks have come. Waits in Python, where signals are handled, logs which ranks are missing, and times
    out."""

    def __init__(self, where: Launch, limit: float, patience: float, hurry: Callable[[], bool]) -> None:
        self.where, self.limit, self.told, self.asked = where, limit, patience, hurry
        self.began, self.pause = time.monotonic(), 0.01
        self.hurries = False

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def hurry(self, seconds: float) -> None:
        """Shortens the limit to `seconds` from now."""
        self.limit = min(self.limit, self.passed + seconds)

    def until(self, true: Callable[[], bool], missing: Callable[[], str], remedy: str = _COME) -> None:
        """Returns when `true` returns True.

        Args:
            missing: returns what is missing.
            remedy: what to do if the time limit is reached.

        Raises:
            PeerFailure: the time limit is reached; with exit code `STOPPED` after a stop request.
        """
        self.pause = 0.01
        while not true():
            if not self.hurries and self.asked():
                self.hurries = True
                self.hurry(_HURRY_SECONDS)
            if self.passed > self.limit:
                raise PeerFailure(
                    f"rank {self.where.rank} of {self.where.size} (started by {self.where.launcher}) "
                    f"{'received a stop request and ' if self.hurries else ''}waited {self.passed:.0f} s at the start: "
                    f"{missing()}; {remedy}",
                    STOPPED if self.hurries else PeerFailure.exit_code,
                )
            if self.passed > self.told:
                self.told *= 2
                _log.warning("waiting for %.0f s at the start: %s", self.passed, missing())
            time.sleep(self.pause)
            self.pause = min(1.5 * self.pause, pause_of(self.where.size, 0.5))


def meet(
    tcp: dist.Store, where: Launch, wait: Wait, device: torch.device, content: Mapping[str, str], run: str, outlives: bool
) -> tuple[dist.Store, str]:
    """Collective: checks that all ranks run the same thing. Returns the store of this group and a remark on unequal devices.

    Args:
        tcp: a store that all ranks can reach.
        content: what must be equal on all ranks besides `surroundings()`, by key. Values appear in messages; of a secret value, a
            digest of 12 digits after ` #` is compared but not shown. Empty if this rank could not read its content; that error is
            reported elsewhere.
        run: name of the run; "" if unknown.
        outlives: whether the store outlives rank 0, so that it may contain an earlier meeting.

    Raises:
        RanksDiffer: content or devices differ; the message is the same on every rank.
        PeerFailure: ranks did not come, or left.
        LayoutError: this process belongs to another launch than rank 0.
    """
    host = socket.gethostname()
    me = Attendant(where.rank, where.size, where.identity, run, host, os.getpid(), Device.of(host, device))
    common = dist.PrefixStore("forge", tcp)
    both = [dict(content), surroundings()]
    if where.rank == 0:
        return _Host(common, me, wait, outlives).hold(both)
    return _Guest(common, me, wait, outlives).attend(both)


def opened_by(tcp: dist.Store) -> str:
    """Returns the rank 0 and the launch whose meeting is in a store; "" if there is no meeting."""
    common = dist.PrefixStore("forge", tcp)
    if not common.check(["meeting"]):
        return ""
    host = Attendant.from_text(json.loads(common.get("meeting"))["host"])
    return f"{host} of {host.launch}"


class _Host:
    """Rank 0: waits for all ranks, decides, and answers."""

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
        """Returns (why the ranks cannot start, or ""; exit code; remark)."""
        if differs := self.differences():
            return differs, RanksDiffer.exit_code, ""
        if self.fault is not None:
            return *self.fault, ""
        if cause is not None:
            return str(cause), cause.exit_code, ""
        unlike, remark = judged([self.present[rank].device for rank in range(self.me.size)])
        return unlike, RanksDiffer.exit_code, remark

    def complete(self) -> bool:
        """Reads the messages since the last call. Returns whether all ranks have come."""
        keys = [f"came/{number}" for number in range(self.read + 1, self.store.add("came", 0) + 1)]
        if unwritten := absent(self.store, keys, 1):  # about to be written
            keys = keys[: keys.index(unwritten[0])]
        self.read += len(keys)
        for text in values(self.store, keys):
            self.welcome(Attendant.from_text(text))
        if self.wait.passed > self.when and (text := self.missing()) != self.said:
            self.said, self.when = text, self.wait.passed + 0.2
            self.store.set("missing", text)
        return len(self.present) == self.me.size

    def welcome(self, rank: Attendant) -> None:
        if not rank.is_of(self.me):
            _log.warning(
                "refused %s of another launch: it belongs to %s, but this rank 0 to %s", rank, rank.launch, self.me.launch
            )
            fault = f"{rank} belongs to {rank.launch}, but {self.me} at {self.at} belongs to {self.me.launch}; {_OTHER}"
            self.tell(rank, fault, _STRANGER)
            return
        before = self.present.get(rank.rank)
        if rank.left:
            if before is not None and before.number == rank.number:
                self.end(f"{rank} has left: {rank.left}", rank.code)
            return
        if rank.size != self.me.size or not 0 < rank.rank < self.me.size:
            self.present.setdefault(rank.rank, rank)
            fault = f"{rank} was started for a world of {rank.size} processes, but {self.me} for one of {self.me.size}"
            self.end(fault, RanksDiffer.exit_code)
            return
        if before is not None:
            self.tell(before, f"another process came as rank {rank.rank}: {rank}", PeerFailure.exit_code)
        self.present[rank.rank] = rank
        if rank.differs:
            self.wait.hurry(_FAULT_SECONDS)  # all will end; ranks that come soon get the reason

    def end(self, why: str, code: int) -> None:
        self.fault = self.fault or (why, code)
        self.wait.hurry(_FAULT_SECONDS if code == RanksDiffer.exit_code else _HURRY_SECONDS)

    @property
    def at(self) -> str:
        return f"{self.wait.where.address}:{self.wait.where.port}"

    def missing(self) -> str:
        late = [*islice((rank for rank in range(self.me.size) if rank not in self.present), _SHOWN)]
        count = sum(rank < self.me.size for rank in self.present)
        more = self.me.size - count - len(late)
        ranks = ", ".join(map(str, late)) + (f" and {more} more" if more else "")
        return f"{count} of {self.me.size} ranks have come; rank {ranks} did not come to {self.at}"

    def differences(self) -> str:
        """Describes the ranks whose content differs from that of rank 0; "" if there are none."""
        others = sorted((rank for rank in self.present.values() if rank.differs), key=lambda rank: rank.rank)
        if not others:
            return ""
        lines = []
        for rank in others[:_SHOWN]:
            keys = "; ".join(f"{key} is {mine}, and {theirs} on rank 0" for key, theirs, mine in rank.differs[:_SHOWN])
            more = f"; and {len(rank.differs) - _SHOWN} more keys" if len(rank.differs) > _SHOWN else ""
            lines.append(f"{rank}: {keys}{more}")
        more = f"; and {len(others) - _SHOWN} more ranks" if len(others) > _SHOWN else ""
        host = f"rank 0 is process {self.me.process} on {self.me.host}"
        return f"ranks differ: {'; '.join(lines)}{more}; {host}. Start all of them with one recipe, one environment and one code"

    def tell(self, rank: Attendant, *answer: Any) -> None:
        put(self.store, [_answer(rank, *answer)])

    def answer(self, fault: str, code: int, remark: str = "") -> None:
        """Answers all ranks that have come. After a refusal, waits until they have read it if the store ends with this
        process."""
        self.store.set("name", self.me.number)
        others = [rank for rank in self.present.values() if rank.rank != 0]
        put(self.store, [_answer(rank, fault, code, remark) for rank in others])
        self.store.set("closed", "1")
        until = time.monotonic() + _LAST_SECONDS
        while fault and not self.outlives and time.monotonic() < until and self.store.add("heard", 0) < len(others):
            time.sleep(0.02)


def _answer(rank: Attendant, fault: str, code: int, remark: str = "") -> tuple[str, str]:
    """Returns key and value of the answer to a process."""
    return f"answer/{rank.number}", json.dumps({"fault": fault, "code": code, "remark": remark})


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
                self.store.add("heard", 1)  # it will not read an answer
            raise
        answer = json.loads(self.store.get(f"answer/{self.me.number}"))
        if answer["fault"]:
            self.store.add("heard", 1)
            raise _error(answer["fault"], answer["code"])
        return self.store, answer["remark"]

    def answered(self, content: Content) -> bool:
        """Whether rank 0 has answered. Joins every new meeting, because a store that outlives the ranks may begin with an old
        one."""
        if not self.meeting or (self.outlives and self.wait.passed > self.looked + 1):
            self.looked = self.wait.passed
            if not self.common.check(["meeting"]):
                return False
            if (meeting := self.common.get("meeting")) != self.meeting:
                self.meeting = meeting
                opened = json.loads(meeting)
                self.host = Attendant.from_text(opened["host"])
                self.store = dist.PrefixStore(self.host.number, self.common)
                self.me = replace(self.me, differs=_differences(opened["content"], content))
                self.come()
        answer = f"answer/{self.me.number}"
        if self.store.check([answer]):
            return True
        if not self.outlives and self.store.check(["closed"]) and not self.store.check([answer]):
            raise LayoutError(
                f"{self.me} belongs to {self.me.launch} and came too late: {self.host} at {self.wait.where.address}:"
                f"{self.wait.where.port} belongs to {self.host.launch} and has started without it; {_OTHER}"
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
"""Exit code in an answer to a process of another launch."""

_OTHER = "give each launch its own MASTER_PORT, or start all of its ranks with one launcher"


def _error(fault: str, code: int) -> ForgeError:
    if code == _STRANGER:
        return LayoutError(fault)
    return RanksDiffer(fault) if code == RanksDiffer.exit_code else PeerFailure(fault, code)


def _differences(theirs: Content, mine: Content) -> list[tuple[str, str, str]]:
    """Returns (key, value on rank 0, value here) of all differences. Parts that one of the two could not read are skipped."""
    differences = []
    for there, here in zip(theirs, mine, strict=True):
        keys = [key for key in {**there, **here} if there.get(key) != here.get(key)] if there and here else []
        differences += [(key, *(_shown(side.get(key, "not set")) for side in (there, here))) for key in keys]
    return differences


def _shown(value: str) -> str:
    """Removes the digest of a secret value."""
    return re.sub(r" #[0-9a-f]{12}$", "", value)
