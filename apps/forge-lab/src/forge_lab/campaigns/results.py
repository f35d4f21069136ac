"""The parser: from the raw records of an entry to its result. Every table of a campaign is made by it, and by nothing else.

The statistics of an entry are over the measurements after the first `skip` steps: the median, and the quartiles by linear
interpolation. A measurement is a line of hook `log`, the mean over the steps since the line before.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal, cast

from forge_core.files import lines_of
from forge_core.redaction import redacted_text
from forge_lab.campaigns.records import ATTEMPT_FILE, OUTPUT, RUN, Attempt, read_attempt, read_json, recorded_entry
from forge_train.process.stop import FULL, HOOK_FAILED, REQUEUE
from forge_train.report.record import SUMMARY
from forge_train.trackers import METRICS, read_metrics

Status = Literal["finished", "out of memory", "time limit", "refused", "failed", "waiting"]
STATUSES: tuple[Status, ...] = ("finished", "out of memory", "time limit", "refused", "failed", "waiting")

REFUSED_CODE = 2
SHOWN_LINES = 12
_READ = 256 * 1024
"""Bytes that are read from the end of a log."""
_NO_MEMORY = re.compile(
    r"(?<!killed, )out of memory|can't allocate memory|cannot allocate memory|^MemoryError\b|oom_kill event",
    re.IGNORECASE | re.MULTILINE,
)
"""Evidence in what a process printed. What a rank says about one that vanished is none: "killed, out of memory or stopped"."""
_PAST_LIMIT = "DUE TO TIME LIMIT"
"""What SLURM writes into the output of a job that did not end by itself in time."""
_KILLED = re.compile(r"was ended by SIGKILL")


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of measurements; the quartiles of a single one are None."""

    median: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles | None":
        """Returns the statistics of some values; None if there are none."""
        if not values:
            return None
        low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (None, None, None)
        return cls(median(values), low, high)


@dataclass(frozen=True)
class EntryResult:
    """The result of an entry.

    Attributes:
        name, values, world: as of the entry.
        status: how it ended; `waiting` if it has no result.
        message: why, for all but `finished`.
        layout: text of the layout, such as `dp4tp2`.
        measured: number of measurements behind the statistics.
        step_seconds: seconds of an optimizer step.
        tokens_per_second: of all ranks together, without padding.
        mfu, model_tflops: fraction of the device's peak, and model TFLOP/s per device. None for CPUs, whose peak is not known.
        memory: peak bytes of rank 0: of the device's allocator, or resident memory of the process on a CPU.
        memory_of: `device` or `host`.
        loss: loss of the last measured step.
        parameters: parameters of the model, as the run counted them.
        hardware: name of the device.
        torch: version of torch.
        transforms: names of the transforms in the order of application.
        split: seconds of a step by part, of a profiled window.
    """

    name: str
    values: Mapping[str, Any]
    world: int
    status: Status
    message: str = ""
    layout: str = ""
    micro_batch: int | None = None
    micro_batches: int | None = None
    length: int | None = None
    measured: int = 0
    step_seconds: Quartiles | None = None
    tokens_per_second: Quartiles | None = None
    mfu: float | None = None
    model_tflops: float | None = None
    memory: int | None = None
    memory_of: str = ""
    loss: float | None = None
    parameters: int | None = None
    hardware: str = ""
    torch: str = ""
    transforms: Sequence[str] = ()
    split: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def per_rank(self) -> float | None:
        """Tokens per second of one rank."""
        return None if self.tokens_per_second is None else self.tokens_per_second.median / self.world

    def as_json(self) -> dict[str, Any]:
        """Returns all attributes as JSON."""
        loss = self.loss if self.loss is None or math.isfinite(self.loss) else str(self.loss)  # JSON has no NaN
        own = {"values": dict(self.values), "transforms": list(self.transforms), "per_rank": self.per_rank, "loss": loss}
        return asdict(self) | own


def read_result(folder: Path, skip: int) -> EntryResult:
    """Parses the raw records of an entry.

    Args:
        folder: directory of the entry.
        skip: number of first steps that are left out.
    """
    entry = recorded_entry(folder) or {}
    layout = entry.get("layout") or {}
    result = EntryResult(
        name=folder.name,
        values=entry.get("values") or {},
        world=int(entry.get("world") or 1),
        status="waiting",
        layout=str(layout.get("text") or ""),
        micro_batch=entry.get("micro_batch"),
        micro_batches=entry.get("micro_batches"),
        length=entry.get("length"),
    )
    attempt = read_attempt(folder)
    if attempt is None or attempt.fingerprint != entry.get("fingerprint"):
        message = f"{ATTEMPT_FILE} is damaged" if (folder / ATTEMPT_FILE).is_file() and attempt is None else ""
        return replace(result, message=message)
    result = replace(result, seconds=attempt.seconds)
    lines = read_metrics(folder / RUN / METRICS)
    status, message = _ended(folder, attempt, entry, max((line["step"] for line in lines), default=0))
    if status == "finished":
        measured = _measured(result, lines, skip)
        if measured.measured == 0:
            status, message = "failed", f"no step was measured after the first {skip}"
        else:
            result = measured
    return replace(_described(result, folder), status=status, message=redacted_text(message))


def _ended(folder: Path, attempt: Attempt, entry: Mapping[str, Any], step: int) -> tuple[Status, str]:
    """Returns the status of an ended entry, and why."""
    if attempt.refusal:
        return "refused", attempt.refusal
    if attempt.timed_out:
        return "time limit", f"stopped after {attempt.limit_seconds:g} s, at step {step} of {entry.get('steps')}"
    if attempt.code in (0, HOOK_FAILED):
        steps = entry.get("steps")
        if step != steps:
            return "failed", f"the run ended at step {step} of {steps}\n{last_lines(folder)}".strip()
        return "finished", ""
    text = text_of(folder)
    if attempt.code is None and _PAST_LIMIT in text:
        return "time limit", f"SLURM ended job {attempt.job} at its time limit, at step {step} of {entry.get('steps')}"
    if attempt.code == FULL or (attempt.code != REFUSED_CODE and _NO_MEMORY.search(text)):
        said = [line.strip() for line in lines_of(text) if _NO_MEMORY.search(line)]
        return "out of memory", said[-1] if said else "a rank ran out of memory"
    if attempt.code in (-9, 137) or _KILLED.search(text):
        if attempt.oom_kills == 0:
            return "failed", "a process was ended by SIGKILL, but the kernel has killed none for lack of memory"
        known = "" if attempt.oom_kills is None else f"; the kernel killed {attempt.oom_kills} for lack of memory meanwhile"
        return "out of memory", f"a process was ended by SIGKILL, as by the kernel when host memory is exhausted{known}"
    last = last_lines(folder)
    if attempt.code == REFUSED_CODE:
        return "refused", last or "refused with exit code 2"
    if attempt.code == REQUEUE and attempt.job is not None:
        return "time limit", f"job {attempt.job} was asked to stop before its time limit, at step {step} of {entry.get('steps')}"
    ended = "without a record of its end" if attempt.code is None else f"with exit code {attempt.code}"
    return "failed", "\n".join(line for line in (f"ended {ended}{attempt.note and '; '}{attempt.note}", last) if line)


def logs_of(folder: Path) -> list[Path]:
    """Returns the files with what the processes of an entry printed: of this machine, or of a job and its ranks."""
    jobs = sorted((folder / RUN / "slurm").glob("*/rank-*.log"))
    return [path for path in (folder / OUTPUT, *sorted(folder.glob("*.out")), *jobs) if path.is_file()]


def text_of(folder: Path) -> str:
    """Returns the ends of what the processes of an entry printed."""
    texts = []
    for path in logs_of(folder):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _READ))
            texts.append(file.read().decode("utf-8", "replace"))
    return "\n".join(texts)


def last_lines(folder: Path) -> str:
    """Returns the last lines that the processes of an entry printed, without blank ones."""
    lines = [line.rstrip() for line in lines_of(text_of(folder)) if line.strip()]
    return "\n".join(lines[-SHOWN_LINES:])


def _measured(result: EntryResult, lines: Sequence[Mapping[str, Any]], skip: int) -> EntryResult:
    """Returns the result with the statistics of the lines whose interval lies after the first `skip` steps."""
    logged = [line for line in lines if "step_seconds" in line]
    before = [0, *(line["step"] for line in logged)]
    kept = [line for line, begin in zip(logged, before, strict=False) if begin >= skip]
    device = [int(line["device_memory"]) for line in lines if "device_memory" in line]
    host = [int(line["peak_memory"]) for line in lines if "peak_memory" in line]
    parts = {
        name.removeprefix("split/"): float(value) for line in lines for name, value in line.items() if name.startswith("split/")
    }

    def values(name: str) -> list[float]:
        return [float(line[name]) for line in kept if name in line]

    mfu, tflops = values("mfu"), values("model_tflops")
    return replace(
        result,
        measured=len(kept),
        step_seconds=Quartiles.of(values("step_seconds")),
        tokens_per_second=Quartiles.of(values("tokens_per_second")),
        mfu=median(mfu) if mfu and device else None,
        model_tflops=median(tflops) if tflops else None,
        memory=max(device or host, default=None),
        memory_of="device" if device else "host" if host else "",
        loss=next((float(line["loss"]) for line in reversed(kept) if "loss" in line), None),
        split=parts,
    )


def _described(result: EntryResult, folder: Path) -> EntryResult:
    """Returns the result with what the run's report says about machine, versions and model."""
    report = read_json(folder / RUN / SUMMARY) or {}

    def table(name: str) -> Mapping[str, Any]:
        found = report.get(name)
        return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}

    machine, model = table("machine"), table("model")
    device = str(machine.get("Device of rank 0", ""))
    return replace(
        result,
        hardware=str(machine.get("Processor", device)) if device in ("", "cpu") else device,
        torch=str(table("versions").get("torch", "")),
        parameters=model.get("parameters"),
        transforms=list(model.get("transforms", [])),
    )
