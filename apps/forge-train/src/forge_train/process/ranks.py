"""The ranks of a job start and end together: verdicts, exit codes, and what rank 0 reports for all.

All ranks run one recipe and one code. What one rank refuses, all refuse, with one exit code, and rank 0 reports it once. Verdicts
go through the store of the process group and not through a collective, because a rank that refuses may leave the others in a
collective, and they must not take another message for its result.
"""

import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forge_ckpt.world import ProcessGroupWorld, SingleProcessWorld
from forge_core.config.tree import leaves
from forge_core.errors import ForgeError
from forge_core.protocols.checkpoint import World
from forge_core.redaction import redacted, redacted_text
from forge_core.registry import HOMES, Registry, canonical
from forge_core.terminal import Console
from forge_parallel.launch import process_group
from forge_parallel.launch.environment import Launch
from forge_parallel.launch.watch import PeerFailure, Watch, is_broken_connection
from forge_train.process.logs import RunLog
from forge_train.process.stop import Interrupted, Signals
from forge_train.torch_private import default_store

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from forge_train.recipe.load import Resolved

_forge_log = logging.getLogger("forge")

_OWN = {name: name.replace("-", "_") for name in ("forge-core", *HOMES)}
"""Forge's distributions and their packages."""

_PLUGIN_FILE = re.compile(r'[^"]*/([^/"]+\.py:\w+)')

_log = logging.getLogger(__name__)

OWN_KEYS = frozenset({"train.threads", "parallel.patience"})
"""Keys that may differ between ranks: how many cores a node has, and after how long a rank says for whom it waits. They change no
number, and no rank waits for another because of them."""

REPORT = 30.0
"""Seconds after which a rank that waits for the verdict of all says for whom."""

LAST_WORDS = 5.0
"""Seconds that a rank which ends waits for the others: rank 0 until they have read why, they until it has said so."""


class Refused(ForgeError):
    """One or more ranks refused to begin; the same cause and exit code on every rank."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Agreement:
    """This rank's part in the verdicts of all. Without a store it is alone, and its faults are its own.

    Attributes:
        rank, size: of the world.
        store: of the process group.
        patience: seconds to wait for the verdict of a rank that says nothing.
        life: how often these processes have begun before; verdicts of one life are not those of another.
    """

    rank: int = 0
    size: int = 1
    store: Any = None
    patience: float = 600.0
    life: int = 0

    def again(self, life: int) -> "Agreement":
        """For another beginning of the same processes."""
        return replace(self, life=life)

    @classmethod
    def of_group(cls, patience: float) -> "Agreement":
        """Collective: of the ranks of the default process group."""
        import torch.distributed as dist

        return cls(dist.get_rank(), dist.get_world_size(), default_store(), patience)

    @contextmanager
    def together(self, phase: str, collective: bool = False) -> Iterator[None]:
        """Collective: runs a body on every rank, each `phase` once. In a `collective` body, ranks may wait for one that refuses.

        Raises:
            Refused: on every rank, with the cause of the first rank that refused. The traceback of what is not a refusal goes
                to the log of the rank where it was.
        """
        fault: Exception | None = None
        try:
            yield
        except Exception as cause:
            if self.store is None:
                raise
            fault = cause
        if self.store is None:
            return
        if fault is not None and not isinstance(fault, ForgeError):
            _log.critical("%s", "".join(traceback.format_exception(fault)))
        patience = LAST_WORDS if collective and fault is not None else self.patience
        found = self._verdict(self.store, phase, fault, patience)
        if found is not None:
            raise found from fault

    def said(self) -> None:
        """Before all ranks end: waits until rank 0 has said why and the others have read it; never for long."""
        if self.store is None:
            return
        try:
            if self.rank == 0:
                self.store.set("start/said", "1")
                until = time.monotonic() + LAST_WORDS
                while self.store.add("start/read", 0) < self.size - 1 and time.monotonic() < until:
                    time.sleep(0.01)
            else:
                _wait_for(self.store, "start/said", LAST_WORDS)
                self.store.add("start/read", 1)
        except RuntimeError:  # the store is gone, and with it the rank that keeps it
            return

    def _verdict(self, store: Any, phase: str, fault: Exception | None, patience: float) -> Refused | None:
        """The first rank's cause; None when no rank has one. A fault that the others do not come to hear is raised as it is."""
        key = f"start/{self.life}/{phase}"
        if fault is not None:
            code = fault.exit_code if isinstance(fault, ForgeError) else 1
            text = str(fault) if isinstance(fault, ForgeError) else f"{type(fault).__name__}: {fault}"
            store.set(f"{key}/{self.rank}", json.dumps([text, code]))
            store.append(f"{key}/faulty", f"{self.rank} ")
        try:
            store.set(f"{key}/here/{self.rank}", "1")
            if store.add(f"{key}/arrived", 1) == self.size:
                store.set(f"{key}/all", "1")

            def absent() -> str:
                late = [str(rank) for rank in range(self.size) if not store.check([f"{key}/here/{rank}"])]
                more = f" and {len(late) - 8} more" if len(late) > 8 else ""
                return f"rank {', '.join(late[:8])}{more} has not reached {phase!r}" if late else f"{phase!r} is nearly done"

            _wait_for(store, f"{key}/all", patience, absent)
            faulty = [int(rank) for rank in store.get(f"{key}/faulty").split()] if store.check([f"{key}/faulty"]) else []
            if not faulty:
                return None
            first = min(faulty)
            text, code = json.loads(store.get(f"{key}/{first}"))
        except RuntimeError as cause:
            if fault is not None:
                raise fault from cause
            raise ForgeError(
                f"some ranks did not reach {phase!r} within parallel.timeout = {patience:g} s, or rank 0 died; "
                "see the output of the other ranks"
            ) from cause
        return Refused(text if first == 0 else f"rank {first}: {text}", code)


@dataclass
class JobRanks:
    """This process among the ranks of a job. By default it is alone, on a CPU.

    Attributes:
        launch: rank and size, as the launcher says.
        device: device of this rank.
        agreement: what one rank refuses, all refuse.
        signals: requests to stop.
        watch: records what this rank does, so that a rank that hangs can be named.
        log: log file of this rank; None where messages go to the terminal only.
        console: the terminal of rank 0; None on other ranks.
    """

    launch: Launch = field(default_factory=Launch)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    agreement: Agreement = field(default_factory=Agreement)
    signals: Signals = field(default_factory=Signals)
    watch: Watch = field(default_factory=Watch)
    log: RunLog | None = None
    console: "Terminal | None" = None

    @property
    def world(self) -> World:
        """The ranks as checkpoints see them."""
        return ProcessGroupWorld() if self.launch.size > 1 else SingleProcessWorld()

    def again(self, life: int) -> "JobRanks":
        """Returns the same ranks for another start of the same processes."""
        return replace(self, agreement=self.agreement.again(life))

    def together(self, name: str, collective: bool = False) -> AbstractContextManager[None]:
        """Collective: runs a block on every rank; if one rank refuses, all do. See `Agreement.together`."""
        return self.agreement.together(name, collective)

    def say(self, message: str) -> None:
        """Writes a message of the start to the log of every rank, and to the terminal of rank 0."""
        _log.info(message)
        if self.console is not None:
            self.console.print(redacted_text(message), highlight=False, soft_wrap=True)


def content_of(resolved: "Resolved", registry: Registry) -> dict[str, str]:
    """What has to be equal on all ranks, by key, without secrets: the resolved recipe but for `OWN_KEYS`, and the distribution,
    version and code of what it uses.

    Plugin files count by what is in them and not by where they are. A hidden value carries a digest, so that two of them can be
    told apart without being shown.
    """
    content = {}
    for key, value, _ in leaves(resolved.tree):
        if key not in OWN_KEYS:
            shown, whole = (json.dumps(each, default=str) for each in (redacted(value, key), value))
            hidden = f" #{sha256(whole.encode()).hexdigest()[:12]}" if shown != whole else ""
            content[key] = _without_folders(shown) + hidden
    for entry in (registry.find(group, name) for group, name in resolved.used):
        content[f"{entry.group.removeprefix('forge.')} {_without_folders(entry.name)}"] = f"{entry.distribution} {entry.version}"
        if canonical(entry.distribution) not in _OWN and ".py:" not in entry.target:
            content |= {f"code of {entry.target.partition(':')[0]}": _digest(_files_of(entry.target.partition(".")[0]))}
    return content | {f"code of {name}": _digest(_files_of(name)) for name in sorted(_OWN.values())}


def _without_folders(text: str) -> str:
    """`/home/me/mine.py:Thing` is `mine.py:Thing`: nodes may have their copies in different places."""
    return _PLUGIN_FILE.sub(r"\1", text)


def _files_of(package: str) -> dict[str, bytes]:
    """The Python files of a package, by name; none where it has no folder."""
    spec = find_spec(package)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = [(folder, file) for folder in folders for file in folder.rglob("*.py")]
    if not files and spec is not None and spec.origin and Path(spec.origin).is_file():
        files = [(Path(spec.origin).parent, Path(spec.origin))]
    return {str(file.relative_to(folder)): file.read_bytes() for folder, file in files}


def _digest(files: Mapping[str, bytes]) -> str:
    whole = sha256()
    for name, content in sorted(files.items()):
        whole.update(f"{name}\0{len(content)}\0".encode() + content)
    return f"sha256:{whole.hexdigest()[:12]}"


def _wait_for(store: Any, key: str, patience: float, absent: Callable[[], str] | None = None) -> None:
    """Until a key is there. It waits in Python, where signals are heard; `store.wait` would hold them back. After `REPORT`
    seconds, and again after twice as many, it says what `absent` says.

    Raises:
        RuntimeError: it is not there after `patience` seconds, or the store is gone.
    """
    began, pause, report = time.monotonic(), 0.001, REPORT
    while not store.check([key]):
        passed = time.monotonic() - began
        if passed > patience:
            raise RuntimeError(f"{key} did not arrive within {patience:g} s")
        if passed > report and absent is not None:
            report *= 2
            _log.warning("waiting for %.0f s at the start: %s", passed, absent())
        time.sleep(pause)
        pause = min(1.5 * pause, 0.2)


@contextmanager
def rank_zero_first(world: World) -> Iterator[None]:
    """Collective: rank 0 runs the body first, so that the others find what it prepares; its failure is raised on all."""
    if world.rank > 0:
        try:
            verdict = world.broadcast(None)
        except RuntimeError as cause:
            cause.add_note("prepare the data beforehand with `forge-train prepare RECIPE`, or raise parallel.timeout")
            raise
        if verdict != b"ready":
            raise ForgeError(verdict.decode())
        yield
        return
    try:
        yield
    except Exception as error:
        world.broadcast(f"rank 0 failed while preparing the data: {error or type(error).__name__}".encode())
        raise
    world.broadcast(b"ready")


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Names the file that torchrun shows in its summary; the exit code of torchrun itself is 1 for any failure."""


def conclude(error: BaseException, watch: Watch, say: Callable[[ForgeError], object]) -> int:
    """The exit code for `error`, after it told the other ranks and the launcher; `say` prints a refusal.

    A broken connection becomes the name of the rank behind it.

    Raises:
        BaseException: `error` itself, where it is not a failure but a way to end the process, such as SystemExit.
    """
    if not isinstance(error, (Exception, Interrupted)):
        raise error
    if is_broken_connection(error) and not isinstance(error, PeerFailure):
        _forge_log.info("%s", "".join(traceback.format_exception(error)))
        error = watch.explain(error)
    code = error.exit_code if isinstance(error, (ForgeError, Interrupted)) else 1
    line = str(error) if code != 1 else f"{type(error).__name__}: {error}"
    if isinstance(error, ForgeError):
        say(error)
    elif isinstance(error, Interrupted):
        _forge_log.warning("%s", line)
    else:
        _forge_log.critical("%s", "".join(traceback.format_exception(error)))
    watch.failed(redacted_text(line), code)
    tell_launcher(line, code, follows=isinstance(error, PeerFailure))
    return code


def tell_launcher(line: str, code: int, follows: bool = False) -> None:
    """Writes what torchrun shows as the cause; it takes the earliest, so one that follows from another is a second younger."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    text = f"forge-train ended with exit code {code}: {redacted_text(line)}"
    extra = {"py_callstack": text, "timestamp": str(int(time.time()) + follows)}
    try:
        with Path(path).open("w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)
    except OSError as cause:
        _forge_log.info("the launcher's error file %s cannot be written: %s", path, cause)


def on_ranks(where: Launch, console: Console, body: Callable[[], None]) -> None:
    """Collective: `body`, which opens the process group itself, and what follows. On several processes this never returns.

    Raises:
        ForgeError: what the body refuses, in a world of one; of several processes the first one prints it.
    """
    code = 0
    try:
        body()
        process_group.destroy_process_groups()
    except ForgeError as refusal:
        if where.size == 1:
            raise
        code = refusal.exit_code
        if where.rank == 0 or isinstance(refusal, PeerFailure):  # what another rank is refused alone, only it can say
            code = console.error(refusal)
    sys.stdout.flush()
    sys.stderr.flush()
    if where.size > 1:
        # A worker of a process group may abort while the interpreter shuts down, which would hide the real exit code.
        os._exit(code)
