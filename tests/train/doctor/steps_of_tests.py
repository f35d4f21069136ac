"""Steps that go wrong in every way that a step can."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from forge_train.doctor.step import Check, DoctorSettings, Skip


def right(_: DoctorSettings) -> Iterator[Check]:
    yield Check("number", "PASS", 2.0, "GB/s", better="higher")


def slow(_: DoctorSettings) -> Iterator[Check]:
    yield Check("number", "PASS", 1.0)
    yield Check("other", "SLOW", 1.0, remedy="wait")


def wrong(_: DoctorSettings) -> Iterator[Check]:
    yield Check("number", "FAIL", "three", remedy="count again")


def absent(_: DoctorSettings) -> Iterator[Check]:
    raise Skip("not here", "buy one")


def hangs(settings: DoctorSettings) -> Iterator[Check]:
    """With a process that it started, as a step with ranks has them."""
    yield Check("before", "PASS", 1.0)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(settings.directory, "grandchild").write_text(str(child.pid))
    time.sleep(600)


def aborts(_: DoctorSettings) -> Iterator[Check]:
    yield Check("before", "PASS", 1.0)
    print("about to abort", flush=True)
    os.abort()


def is_killed(_: DoctorSettings) -> Iterator[Check]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield Check("after", "PASS", 1.0)


def raises(_: DoctorSettings) -> Iterator[Check]:
    yield Check("before", "PASS", 1.0)
    raise ValueError("three is not a number")


def compiles(_: DoctorSettings) -> Iterator[Check]:
    """Raises as compilers do: the cause in the first line, pages of what they held, and advice in the last."""
    yield from ()
    raise RuntimeError("no kernel for heads of 8\n" + "  held: everything\n" * 200 + "Set VERBOSE=1 for more")


def mute(_: DoctorSettings) -> Iterator[Check]:
    yield from ()
    raise AssertionError


def leaves(_: DoctorSettings) -> Iterator[Check]:
    """Code 0 without an end."""
    yield Check("before", "PASS", 1.0)
    os._exit(0)
