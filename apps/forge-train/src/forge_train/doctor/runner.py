"""The steps of the doctor, and their execution: each in a process of its own with a time limit. No torch."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from forge_core.errors import ForgeError, did_you_mean
from forge_train.doctor.step import Check, DoctorSettings, DoctorStep, Skip, StepOutcome, checks_of

_HERE = "forge_train.doctor"

QUICK = (
    DoctorStep("node", f"{_HERE}.node:examine_node", 120, (), "limits, shared memory, disk space, compiler, extras"),
    DoctorStep("torch", f"{_HERE}.torch_build:examine_torch", 120, (), "torch and its CUDA against the driver and the GPUs"),
    DoctorStep(
        "gpus",
        f"{_HERE}.gpus:examine_gpus",
        120,
        ("torch",),
        "memory errors, clocks, power, NUMA, peer access",
    ),
)
"""Steps of `doctor`."""

ACCEPTANCE = (
    *QUICK,
    DoctorStep(
        "device",
        f"{_HERE}.correctness:examine_device",
        180,
        ("torch",),
        "memory keeps its content; repeated products have the same bits",
    ),
    DoctorStep(
        "bandwidth",
        f"{_HERE}.speed:examine_bandwidth",
        180,
        ("torch", "device"),
        "copies within and between host and device",
    ),
    DoctorStep("disk", f"{_HERE}.node:examine_disk", 180, (), "write, flush and read in the directory of runs, as a save does"),
    DoctorStep(
        "matmul",
        f"{_HERE}.speed:examine_matmul",
        300,
        ("torch", "device"),
        "products, including the recipe's shapes, against the peak",
    ),
    DoctorStep(
        "kernels",
        f"{_HERE}.speed:examine_kernels",
        300,
        ("torch", "device"),
        "the kernels that torch chooses, and their speed",
    ),
    DoctorStep(
        "numbers",
        f"{_HERE}.correctness:examine_numbers",
        600,
        ("torch", "device"),
        "training steps on the device against fp64 on a CPU",
    ),
    DoctorStep(
        "collectives",
        f"{_HERE}.correctness:examine_collectives",
        300,
        ("torch", "device"),
        "reductions and exchanges between devices",
    ),
    DoctorStep(
        "training", f"{_HERE}.training:examine_training", 900, ("torch", "device", "numbers"), "the recipe for some steps"
    ),
    DoctorStep(
        "endurance",
        f"{_HERE}.training:endure",
        900,
        ("training",),
        "the recipe for minutes: steps stay equally fast, losses finite",
    ),
    DoctorStep(
        "tests",
        f"{_HERE}.training:examine_tests",
        1800,
        ("torch", "device", "numbers"),
        "the repository's GPU tests",
    ),
)
"""Steps of `doctor --acceptance`."""


SETTINGS, FOUND, ERROR = "settings.json", "found.json", "error"
"""Files through which a step and its process exchange settings, results and what ended it."""

_LINES = 30
"""Number of lines to keep of the output of a failed step."""


def chosen(steps: Sequence[DoctorStep], only: str) -> list[DoctorStep]:
    """Returns the steps named in `only` (separated by commas), in their own order; all steps if it is empty.

    Raises:
        ForgeError: a name is unknown.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [step.name for step in steps]
    for name in names:
        if name not in known:
            raise ForgeError(f"--only {name}: no step has this name; {did_you_mean(name, known) or 'known: ' + ', '.join(known)}")
    return [step for step in steps if not names or step.name in names]


def examine_all(
    steps: Iterable[DoctorStep], settings: DoctorSettings, after: Callable[[list[StepOutcome]], None]
) -> list[StepOutcome]:
    """Runs the steps; calls `after` with all results so far after each step.

    A step that was not chosen does not block others.
    """
    results: list[StepOutcome] = []
    for step in steps:
        blocked = [result.name for result in results if result.blocked and result.name in step.needs]
        if blocked:
            reason = f"{' and '.join(blocked)} did not pass"
            check = Check("runs here", "SKIPPED", reason, remedy=f"first fix the findings of {' and '.join(blocked)}")
            results.append(StepOutcome.of(step, 0.0, [check], blocked=True))
        else:
            results.append(run_step(step, settings))
        after(results)
    return results


def run_step(step: DoctorStep, settings: DoctorSettings) -> StepOutcome:
    """Runs one step in its own process and returns its result, also if the process hangs or dies."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / SETTINGS).write_text(json.dumps(asdict(settings)), encoding="utf-8")
        began = time.monotonic()
        with (folder / "log").open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "forge_train.doctor.runner", step.target, str(folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(step.seconds)
            finally:
                code = child.poll()
                _end_child(child)
        seconds = time.monotonic() - began
        text = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:]
        return _result(step, folder, code, seconds, "\n".join(text))


def _end_child(child: "subprocess.Popen[bytes]") -> None:
    """Kills the process and all processes that it started, which form a session."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdin is not None:
        child.stdin.close()


def _result(step: DoctorStep, folder: Path, code: int | None, seconds: float, log: str) -> StepOutcome:
    found = folder / FOUND
    written = json.loads(found.read_text(encoding="utf-8")) if found.is_file() else {"ended": False, "checks": []}
    checks = checks_of(written["checks"])
    if code == 0 and written["ended"]:
        return StepOutcome.of(step, seconds, checks)
    last = f"after the check {checks[-1].name!r}" if checks else "before its first check"
    error = (folder / ERROR).read_text(encoding="utf-8") if (folder / ERROR).is_file() else "an error"
    return StepOutcome.of(step, seconds, [*checks, _broken(step, code, last, error)], log=log)


def _broken(step: DoctorStep, code: int | None, last: str, error: str) -> Check:
    if code is None:
        told = f"did not end in {step.seconds:g} s, {last}"
        remedy = "a device, a link or a disk may hang: check dmesg (Xid, I/O errors), then run only this step with --only"
    elif code < 0:
        told = f"ended by {signal.Signals(-code).name}, {last}"
        remedy = "a driver, a library or the memory limit may have ended it: check dmesg and the log below"
    else:
        told = f"raised {error}, {last}"
        remedy = "the log below has the traceback"
    return Check("ends as it should", "FAIL", told, expected=f"ends in {step.seconds:g} s", remedy=remedy)


def work_as_child(target: str, folder: Path) -> None:
    """Runs a step's function in its own process: `python -m forge_train.doctor.runner module:function FOLDER`.

    Writes each check immediately, so that no result is lost if a later check ends the process.
    """
    given: dict[str, Any] = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    settings = DoctorSettings(**{**given, "overrides": tuple(given["overrides"])})
    module, _, function = target.partition(":")
    found: list[Check] = []
    try:
        steps: Iterable[Check] = getattr(import_module(module), function)(settings)
        for check in steps:
            found.append(check)
            _write_found(folder, found, ended=False)
    except Skip as reason:
        found.append(Check("runs here", "SKIPPED", str(reason), remedy=reason.remedy))
    _write_found(folder, found, ended=True)


def _write_found(folder: Path, found: list[Check], ended: bool) -> None:
    new = folder / f"{FOUND}.new"
    new.write_text(json.dumps({"ended": ended, "checks": [asdict(check) for check in found]}), encoding="utf-8")
    new.replace(folder / FOUND)


def _write_error(folder: Path, error: BaseException) -> None:
    """Writes kind and first line of an error: a compiler's cause is in its first lines, and its last ones are advice."""
    first = next(iter(str(error).strip().splitlines()), "")
    (folder / ERROR).write_text(f"{type(error).__name__}: {first}".removesuffix(": "), encoding="utf-8")


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code = 0
    try:
        work_as_child(sys.argv[1], Path(sys.argv[2]))
    except BaseException as error:  # noqa: BLE001 (the parent reads the log)
        traceback.print_exc()
        _write_error(Path(sys.argv[2]), error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that wait, and those of libraries, may abort an ordinary exit
