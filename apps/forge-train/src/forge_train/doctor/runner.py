"""Runs steps one after the other, each in a process with a time limit: a hang or an abort is a verdict, too. No torch."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from forge_core.errors import ForgeError, did_you_mean
from forge_train.doctor.child import FOUND, SETTINGS
from forge_train.doctor.step import Check, Result, Settings, Step, checks_of

_LINES = 30
"""Of what a step printed before it went wrong, how many are kept."""


def chosen(steps: Sequence[Step], only: str) -> list[Step]:
    """The steps named in `only` (separated by commas), in their own order; all where it is empty.

    Raises:
        ForgeError: a name is unknown.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [step.name for step in steps]
    for name in names:
        if name not in known:
            raise ForgeError(f"--only {name}: no step has this name; {did_you_mean(name, known) or 'known: ' + ', '.join(known)}")
    return [step for step in steps if not names or step.name in names]


def examine(steps: Iterable[Step], settings: Settings, after: Callable[[list[Result]], None]) -> list[Result]:
    """Runs the steps; `after` gets everything found so far once each of them is through.

    A step that was not chosen blocks nothing.
    """
    results: list[Result] = []
    for step in steps:
        blocked = [result.name for result in results if result.blocked and result.name in step.needs]
        if blocked:
            reason = f"{' and '.join(blocked)} did not pass"
            check = Check("runs here", "SKIPPED", reason, remedy=f"first do what {' and '.join(blocked)} says")
            results.append(Result.of(step, 0.0, [check], blocked=True))
        else:
            results.append(run(step, settings))
        after(results)
    return results


def run(step: Step, settings: Settings) -> Result:
    """What one step found, also when its process hangs or dies."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / SETTINGS).write_text(json.dumps(asdict(settings)), encoding="utf-8")
        began = time.monotonic()
        with (folder / "log").open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "forge_train.doctor.child", step.target, str(folder)],
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
                _end(child)
        seconds = time.monotonic() - began
        text = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:]
        return _result(step, folder, code, seconds, "\n".join(text))


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Ends the process and those that it started: they are a session."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdin is not None:
        child.stdin.close()


def _result(step: Step, folder: Path, code: int | None, seconds: float, log: str) -> Result:
    found = folder / FOUND
    written = json.loads(found.read_text(encoding="utf-8")) if found.is_file() else {"ended": False, "checks": []}
    checks = checks_of(written["checks"])
    if code == 0 and written["ended"]:
        return Result.of(step, seconds, checks)
    last = f"after the check {checks[-1].name!r}" if checks else "before its first check"
    return Result.of(step, seconds, [*checks, _broken(step, code, last, log)], log=log)


def _broken(step: Step, code: int | None, last: str, log: str) -> Check:
    if code is None:
        told = f"did not end in {step.seconds:g} s, {last}"
        remedy = "a device, a link or a disk that hangs: look at dmesg (Xid, I/O errors), then run this step alone with --only"
    elif code < 0:
        told = f"ended by {signal.Signals(-code).name}, {last}"
        remedy = "a driver, a library or the memory limit ended it: look at dmesg and at the log below"
    else:
        told = f"raised {log.splitlines()[-1] if log else 'an error'}, {last}"
        remedy = "the log below has the traceback"
    return Check("ends as it should", "FAIL", told, expected=f"ends in {step.seconds:g} s", remedy=remedy)
