"""Trackers write the metrics of a run: JSON lines, TensorBoard, Weights & Biases. A tracker that fails does not stop the run.

After a resume the steps since the checkpoint are trained again, and what trackers hold of them is void:

- JSON lines: a line is `{"step": 120, "time": "2026-01-31T12:00:00.123+00:00", "loss": 3.2, ...}`, appended by a single system
  call. NaN and the infinities, for which JSON has no number, are the strings "nan", "inf" and "-inf", and `read_metrics` returns
  them as floats. A resume after step s appends `{"rewind": s, "time": ...}`, and `read_metrics` leaves out earlier lines of later
  steps. Nothing is cut from the file, so it shows every start of the run and what a crash lost.
- TensorBoard: a resume after step s starts a new event file with the "purge step" s + 1, from which TensorBoard ignores earlier
  files. One event holds all values of a write, as 32-bit floats.
- W&B: its own step never goes back, and it drops values of earlier steps. So every row has `step`, the axis of its charts, and
  `started_after`, the step from which this start resumed. A row is void if a later start has a `started_after` below its `step`.
"""

import importlib
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Gt

from forge_core.component import FREE, Component
from forge_core.errors import ForgeError
from forge_core.protocols.run import Tracker
from forge_core.redaction import redacted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forge_core.protocols.run import Run


_log = logging.getLogger(__name__)


class SafeTracker:
    """A tracker whose failures cost one warning; later ones are silent, and later writes are still tried."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.warned = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Passes on the values of optimizer step `step`."""
        self._try(lambda: self.tracker.write(step, values))

    def rewind(self, step: int) -> None:
        """Passes on that a run goes on after `step`; 0 is the start of a run."""
        self._try(lambda: self.tracker.rewind(step))

    def close(self) -> None:
        """Passes on that nothing more will be written."""
        self._try(self.tracker.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as cause:  # noqa: BLE001 - no error of a library, a disk or a network may stop training
            if not self.warned:
                self.warned = True
                what = type(self.tracker).__name__
                _log.warning("%s failed (%s: %s); the run goes on; later failures are silent", what, type(cause).__name__, cause)


def import_library(name: str, extra: str) -> Any:
    """Imports a library that a tracker needs, `extra` being the one of forge-train that installs it.

    Raises:
        ForgeError: it is not installed; says what to install.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] != name.partition(".")[0]:
            raise  # the library is there, and something that it needs is not: its own message says what
        raise ForgeError(
            f'tracker {extra!r} needs a library that is not installed: pip install "forge-train[{extra}]"'
        ) from cause


METRICS = "metrics.jsonl"
"""File in the run's directory."""

_ODD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class JsonlTracker:
    """Appends to one file.

    Raises:
        OSError: the disk is full or gone; a later write mends a line that was cut off (`write` and `rewind`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._torn = _ends_inside_a_line(path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends `values` of optimizer step `step` with the time of now."""
        self._append({"step": step, "time": _now(), **{name: _number(value) for name, value in values.items()}})

    def rewind(self, step: int) -> None:
        """A run goes on after `step`: later lines are void. Writes nothing into a file without lines: a run begins."""
        if any("step" in item for item in json_objects(self.path)):
            self._append({"rewind": step, "time": _now()})

    def close(self) -> None:
        """Nothing is held open between writes."""

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry, allow_nan=False).encode() + b"\n"
        if self._torn:
            line = b"\n" + line
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(handle, line)
        finally:
            os.close(handle)
        self._torn = written < len(line)
        if self._torn:
            raise OSError(f"only {written} of {len(line)} bytes were written to {self.path}")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Entries of the file in the order written, without what a rewind made void. No file means no entries.

    A line that a kill cut off is skipped. `time` is text, `step` an int, every other value a float.
    """
    entries: list[dict[str, Any]] = []
    for item in json_objects(path):
        if "rewind" in item:
            entries = [entry for entry in entries if entry["step"] <= item["rewind"]]
        elif "step" in item:
            entries.append({name: _value(name, value) for name, value in item.items()})
    return entries


def json_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of the file one by one, as they are in it, void ones too; `{}` for one that is cut off or no JSON object."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in filter(str.strip, lines):
            try:
                item = json.loads(line)
            except ValueError:  # cut off by a kill or a full disk
                item = {}
            yield item if isinstance(item, dict) else {}


def _value(name: str, value: Any) -> Any:
    return _ODD.get(value, value) if isinstance(value, str) and name != "time" else value


def _number(value: float) -> float | int | str:
    if isinstance(value, int):
        return value
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _ends_inside_a_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # no file yet, or one that the first write will complain about
        return False


class TensorBoardTracker:
    """Writes with TensorBoard's own writer; a thread of it flushes every `flush_seconds`.

    Raises:
        ForgeError: tensorboard is not installed.
    """

    def __init__(self, directory: Path, flush_seconds: float = 30.0) -> None:
        self.directory = directory
        self.flush_seconds = flush_seconds
        self._events = import_library("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = import_library("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._files = import_library("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._open: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one event with the values of optimizer step `step`."""
        scalar = self._summaries.Summary.Value
        summary = self._summaries.Summary(value=[scalar(tag=name, simple_value=value) for name, value in values.items()])
        self._writer().add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))

    def rewind(self, step: int) -> None:
        """Voids what earlier starts wrote after `step`; a run without earlier files has nothing to void."""
        if any(self.directory.glob("events.out.tfevents.*")):
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer().add_event(self._events.Event(wall_time=time.time(), step=step + 1, session_log=start))

    def close(self) -> None:
        """Flushes and ends the file."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _writer(self) -> Any:
        if self._open is None:
            self._open = self._files.EventFileWriter(str(self.directory), flush_secs=self.flush_seconds)
        return self._open


RUN_ID = "wandb-id"
"""File in the run's directory with the W&B run id: a resumed run goes on under the same one."""

FINISH_SECONDS = 120.0
"""How long the end of a run waits for a network; what is not sent by then stays in the folder, for `wandb sync`."""


class WandbTracker:
    """One W&B run for all starts of a run; the connection is made by `rewind`, which every start calls once.

    The resolved recipe is sent without secrets. Source code, command line and the terminal's text are not sent.

    Raises:
        ForgeError: wandb is not installed, or is to go online and knows no API key.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        config: Mapping[str, Any],
        *,
        project: str = "forge",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        self._wandb = import_library("wandb", "wandb")
        _refuse_without_key(self._wandb, mode)
        self._directory, self._name, self._config = directory, name, config
        self._project, self._entity, self._group, self._tags, self._mode = project, entity, group, list(tags), mode
        self._after = 0
        self._run: Any = None

    def rewind(self, step: int) -> None:
        """Opens the W&B run, new or by its kept id; rows from here on say that they started after `step`."""
        self._after = step
        if self._run is None:
            self._run = self._start()
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs one row. Nothing while the run could not be opened: asking again at each step would hold up training."""
        if self._run is not None:
            self._run.log({**values, "step": step, "started_after": self._after})

    def close(self) -> None:
        """Ends the W&B run and waits for what is still to be sent."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _start(self) -> Any:
        quiet = self._wandb.Settings(
            silent=True,
            console="off",  # the terminal belongs to the trainer
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_meta=True,  # it holds the command line, where a secret may stand
            x_save_requirements=False,
            init_timeout=30.0,
            login_timeout=1.0,  # a run cannot answer a question
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        )
        return self._wandb.init(
            project=self._project,
            entity=self._entity,
            group=self._group,
            tags=self._tags or None,
            name=self._name,
            id=run_id(self._directory),
            resume="allow",
            dir=str(self._directory),
            mode=self._mode,
            config=redacted(self._config),
            settings=quiet,
        )


def _refuse_without_key(wandb: Any, mode: str | None) -> None:
    """Raises ForgeError when W&B would ask at the terminal for a key, while the other ranks wait."""
    online = mode in (None, "online") and wandb.setup().settings.mode == "online"
    if online and not wandb.login(prompt=False):
        raise ForgeError("tracker 'wandb' has no API key: run `wandb login`, set WANDB_API_KEY, or set mode = \"offline\"")


def run_id(directory: Path) -> str:
    """The W&B id of the run in `directory`, made at the first call and kept in a file."""
    path = directory / RUN_ID
    if path.is_file() and (known := path.read_text(encoding="utf-8").strip()):
        return known
    made = uuid.uuid4().hex[:12]
    path.write_text(made + "\n", encoding="utf-8")
    return made


@dataclass(frozen=True, kw_only=True)
class Jsonl(Component):
    """JSON lines in `metrics.jsonl` of the run's directory; every run keeps them, named in its recipe or not."""

    def build(self, run: "Run") -> "Tracker":
        return JsonlTracker(run.directory / METRICS)


@dataclass(frozen=True, kw_only=True)
class TensorBoard(Component):
    """TensorBoard event files in `tensorboard/` of the run's directory; needs `pip install "forge-train[tensorboard]"`."""

    key_class: ClassVar = FREE

    flush_seconds: Annotated[float, Gt(0)] = 30.0
    """Longest time that values wait in memory before they are written to the file."""

    def build(self, run: "Run") -> "Tracker":
        return TensorBoardTracker(run.directory / "tensorboard", flush_seconds=self.flush_seconds)


@dataclass(frozen=True, kw_only=True)
class Wandb(Component):
    """Weights & Biases, with the resolved recipe (secrets removed); needs `pip install "forge-train[wandb]"`."""

    key_class: ClassVar = FREE

    project: str = "forge"
    """Project that the run appears in."""
    entity: str | None = None
    """User or team that owns the project; the account's default when absent."""
    group: str | None = None
    """Runs of one group are shown together."""
    tags: list[str] = field(default_factory=list)
    """Labels of the run."""
    mode: Literal["online", "offline"] | None = None
    """`offline` writes a folder that `wandb sync` uploads later; when absent, `WANDB_MODE` or W&B's own settings decide."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Wandb]":
        return (cls(mode="offline"),)

    def build(self, run: "Run") -> "Tracker":
        return WandbTracker(
            directory=run.directory,
            name=run.job.job.name,
            config=run.config,
            project=self.project,
            entity=self.entity,
            group=self.group,
            tags=self.tags,
            mode=self.mode,
        )
