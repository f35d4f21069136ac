"""Starts and ends the ranks of a job together: verdicts, exit codes, and the messages of rank 0.

All ranks run the same recipe and code. If one rank refuses to start, all refuse, with the same exit code, and rank 0 reports the
cause once. Verdicts go through the store of the process group rather than through a collective, because a rank that refuses may
leave others inside a collective, which would take the verdict for its result.
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
from functools import partial
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
from forge_parallel.launch.large_store import absent, pause_of
from forge_parallel.launch.watch import PeerFailure, Watch, is_broken_connection
from forge_parallel.torch_private import default_store
from forge_train.process.logs import RunLog
from forge_train.process.restarts import ERROR_FILE
from forge_train.process.stop import Interrupted, Signals

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from forge_train.recipe.load import Recipe

_forge_log = logging.getLogger("forge")

_OWN = {name: name.replace("-", "_") for name in ("forge-core", *HOMES)}
"""Forge's distributions, and the package of each."""

_PLUGIN_FILE = re.compile(r'[^"]*/([^/"]+\.py:\w+)')

_log = logging.getLogger(__name__)

OWN_KEYS = frozenset({"train.threads", "parallel.patience"})
"""Keys that may differ between ranks: CPU threads, and the time after which a rank reports whom it waits for. They change neither
results nor the order of collectives."""

REPORT = 30.0
"""Seconds after which a rank that waits for a verdict logs the ranks that it waits for."""

_SHOWN = 8
"""Maximum number of ranks that a message names."""

LAST_WORDS = 5.0
"""Maximum seconds that ranks wait for each other before they end: rank 0 publishes the cause, and the other ranks read it."""


class Refused(ForgeError):
    """One or more ranks refused to start; cause and exit code are the same on every rank."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True)
class StartAgreement:
    """Exchanges verdicts between ranks. Without a store, the rank is alone and raises its own errors.

    Attributes:
        rank, size: rank of this process, and number of ranks.
        store: store of the process group.
        patience: maximum seconds to wait for the verdicts of all ranks.
        life: number of earlier starts of these processes; keeps the verdicts of different starts apart.
    """

    rank: int = 0
    size: int = 1
    store: Any = None
    patience: float = 600.0
    life: int = 0

    def again(self, life: int) -> "StartAgreement":
        """Returns the same agreement for another start of the same processes."""
        return replace(self, life=life)

    @classmethod
    def of_group(cls, patience: float) -> "StartAgreement":
        """Collective: returns the agreement of the ranks of the default process group."""
        import torch.distributed as dist

        return cls(dist.get_rank(), dist.get_world_size(), default_store(), patience)

    @contextmanager
    def together(self, phase: str, collective: bool = False) -> Iterator[None]:
        """Collective: runs the `with` block on every rank; if one rank fails, all ranks raise.

        Args:
            phase: name of the block, used once per start.
            collective: True if the block has collectives, in which other ranks may wait for the rank that failed.

        Raises:
            Refused: on every rank, with the cause of the first rank that failed. Tracebacks of unexpected errors go to the log
                of their rank.
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
        refusal = self._verdict(self.store, phase, fault, patience)
        if refusal is not None:
            raise refusal from fault

    def said(self) -> None:
        """Waits briefly, before all ranks end, until rank 0 has published the cause and the others have read it."""
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
        except RuntimeError:  # the rank that hosts the store has ended
            return

    def _verdict(self, store: Any, phase: str, fault: Exception | None, patience: float) -> Refused | None:
        """Returns the cause of the first rank that failed, or None. Raises `fault` itself if the other ranks do not respond."""
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

            _wait_for(store, f"{key}/all", patience, partial(self._late, store, key, phase), self.size)
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

    def _late(self, store: Any, key: str, phase: str) -> str:
        """Describes the ranks that have not reached a phase. Rank 0 looks them up and publishes them, the others read that."""
        if self.rank == 0:
            late = absent(store, [f"{key}/here/{rank}" for rank in range(self.size)], _SHOWN)
            more = self.size - store.add(f"{key}/arrived", 0) - len(late)
            ranks = ", ".join(name.rpartition("/")[2] for name in late) + (f" and {more} more" if more > 0 else "")
            store.set(f"{key}/late", f"rank {ranks} has not reached {phase!r}" if late else f"{phase!r} is nearly done")
        elif not store.check([f"{key}/here/0"]):
            return f"rank 0 has not reached {phase!r}"
        elif not store.check([f"{key}/late"]):
            return f"rank 0 has not said which ranks have not reached {phase!r}"
        return store.get(f"{key}/late").decode()


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
    agreement: StartAgreement = field(default_factory=StartAgreement)
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


def content_of(recipe: "Recipe", registry: Registry) -> dict[str, str]:
    """Returns what must be equal on all ranks, by key: the resolved recipe except `OWN_KEYS`, and the distribution, version and
    code of each component.

    Plugin files are compared by content, not by path. Secrets are replaced by a digest, so that differences can be found
    without showing them.
    """
    content = {}
    for key, value, _ in leaves(recipe.tree):
        if key not in OWN_KEYS:
            shown, whole = (json.dumps(item, default=str) for item in (redacted(value, key), value))
            hidden = f" #{sha256(whole.encode()).hexdigest()[:12]}" if shown != whole else ""
            content[key] = _without_folders(shown) + hidden
    for entry in (registry.find(group, name) for group, name in recipe.used):
        content[f"{entry.group.removeprefix('forge.')} {_without_folders(entry.name)}"] = f"{entry.distribution} {entry.version}"
        if canonical(entry.distribution) not in _OWN and ".py:" not in entry.target:
            content |= {f"code of {entry.target.partition(':')[0]}": _digest(_files_of(entry.target.partition(".")[0]))}
    return content | {f"code of {name}": _digest(_files_of(name)) for name in sorted(_OWN.values())}


def _without_folders(text: str) -> str:
    """Replaces `/home/me/mine.py:Thing` by `mine.py:Thing`, since nodes may have the file in different folders."""
    return _PLUGIN_FILE.sub(r"\1", text)


def _files_of(package: str) -> dict[str, bytes]:
    """Returns the contents of a package's Python files by relative path; for a single module, its own file."""
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


def _wait_for(store: Any, key: str, patience: float, late: Callable[[], str] | None = None, size: int = 1) -> None:
    """Waits for a key in the store; logs `late()` after `REPORT` seconds, and again each time the wait has doubled.

    It polls, each of `size` ranks for itself, in Python, so that signals are handled; `store.wait` would block them.

    Raises:
        RuntimeError: the key is missing after `patience` seconds, or the store is gone.
    """
    began, pause, report = time.monotonic(), 0.001, REPORT
    while not store.check([key]):
        passed = time.monotonic() - began
        if passed > patience:
            raise RuntimeError(f"key {key} was not set within {patience:g} s")
        if passed > report and late is not None:
            report *= 2
            _log.warning("waiting for %.0f s at the start: %s", passed, late())
        time.sleep(pause)
        pause = min(1.5 * pause, pause_of(size, 0.2))


@contextmanager
def rank_zero_first(world: World) -> Iterator[None]:
    """Collective: rank 0 runs the `with` block first and prepares files for the others; if it fails, all ranks raise."""
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


def conclude(error: BaseException, watch: Watch, say: Callable[[ForgeError], object]) -> int:
    """Reports `error` to the other ranks and the launcher, and returns its exit code; `say` prints a refusal.

    For a broken connection, the report names the rank at the other end.

    Raises:
        BaseException: `error` itself, if it ends the process without being a failure, such as SystemExit.
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
    """Writes the cause for torchrun, which shows the earliest one; a consequence (`follows`) is dated one second later."""
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
    """Collective: runs `body`, which opens the process group itself, and closes the group. Exits if there are several processes.

    Raises:
        ForgeError: `body` refused, on one process; with several processes, rank 0 prints the error.
    """
    code = 0
    try:
        body()
        process_group.destroy_process_groups()
    except ForgeError as refusal:
        if where.size == 1:
            raise
        code = refusal.exit_code
        if where.rank == 0 or isinstance(refusal, PeerFailure):  # a peer failure may be known to this rank only
            code = console.error(refusal)
        else:
            time.sleep(LAST_WORDS)  # a launcher ends all ranks when the first one ends, and rank 0 has to print the error
    sys.stdout.flush()
    sys.stderr.flush()
    if where.size > 1:
        # A worker of a process group may abort while the interpreter shuts down, which would hide the real exit code.
        os._exit(code)
