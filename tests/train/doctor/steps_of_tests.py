"""Steps that go wrong in every way that a step can."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from forge_train.doctor.step import Check, Settings, Skip


def right(_: Settings) -> Iterator[Check]:
    yield Check("number", "PASS", 2.0, "GB/s", better="higher")


def slow(_: Settings) -> Iterator[Check]:
    yield Check("number", "PASS", 1.0)
    yield Check("other", "SLOW", 1.0, remedy="wait")


def wrong(_: Settings) -> Iterator[Check]:
    yield Check("number", "FAIL", "three", remedy="count again")


def absent(_: Settings) -> Iterator[Check]:
    raise Skip("not here", "buy one")


def hangs(settings: Settings) -> Iterator[Check]:
    """With a process that it started, as a step with ranks has them."""
    yield Check("before", "PASS", 1.0)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(settings.directory, "grandchild").write_text(str(child.pid))
    time.sleep(600)


def aborts(_: Settings) -> Iterator[Check]:
    yield Check("before", "PASS", 1.0)
    print("about to abort", flush=True)
    os.abort()


def is_killed(_: Settings) -> Iterator[Check]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield Check("after", "PASS", 1.0)


def raises(_: Settings) -> Iterator[Check]:
    yield Check("before", "PASS", 1.0)
    raise ValueError("three is not a number")


def leaves(_: Settings) -> Iterator[Check]:
    """Code 0 without an end."""
    yield Check("before", "PASS", 1.0)
    os._exit(0)
