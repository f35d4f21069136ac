"""Fixtures of all tests, and the table of where the minutes go."""

import functools
import gc
import re
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings

from harness import crashes, margins
from harness.pool import World

settings.register_profile("shared", deadline=None)  # a machine that does other work is not a slow function
settings.load_profile("shared")

_COMPARES = re.compile(r"assert_close|assert_allclose|closeness|approx\(|\.accepted\(")


def pytest_configure(config: pytest.Config) -> None:
    """Counts repeated calls; notes how close comparisons are to their limits, where that is asked for."""
    config.pluginmanager.register(crashes.Count())
    if (noted := margins.plugin()) is not None:
        config.pluginmanager.register(noted)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of every module that compares floating-point numbers: `nox -s machines` runs those."""
    compares = functools.cache(lambda path: bool(_COMPARES.search(path.read_text())))
    for item in items:
        if compares(item.path):
            item.add_marker(pytest.mark.numbers)


FREEZES, IMPORTS = 50, 100
"""A process freezes what it has imported and cached after so many tests, or when it has imported so many modules more. Otherwise
each training in the process collects garbage among half a million objects, which takes a quarter of the time."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Freezes, before the first test and from time to time, the objects that stay until the end."""
    done, modules = item.config.stash.get(FROZEN, (0, 0))
    if done % FREEZES == 0 or len(sys.modules) > modules + IMPORTS:
        gc.collect()
        gc.freeze()
        modules = len(sys.modules)
    item.config.stash[FROZEN] = (done + 1, modules)


FROZEN = pytest.StashKey[tuple[int, int]]()
"""Number of tests that this process has begun, and of modules when it last froze objects."""


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Runs functions on several gloo processes; how is told at the head of `harness/pool.py`."""
    pool = World()
    yield pool
    pool.close()


@pytest.fixture
def newer_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules refuse what they refuse on the newest torch. Their other rules do not depend on the release, but torch 2.11 and
    2.12 do not split a backward at all."""
    from forge_parallel.pipeline import schedules

    monkeypatch.setattr(schedules, "_torch_release", lambda: schedules.SPLITS_BACKWARD)


@pytest.fixture(autouse=True)
def nothing_stays_in_memory() -> Iterator[None]:
    """Objects behind `memory://` belong to the process: without this, one test finds those of another."""
    yield
    if (memory := sys.modules.get("fsspec.implementations.memory")) is not None:
        memory.MemoryFileSystem.store.clear()
        memory.MemoryFileSystem.pseudo_dirs[:] = [""]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints minutes and numbers of tests per folder of `tests/`."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for outcome in ("passed", "failed", "error", ""):
        for report in terminalreporter.stats.get(outcome, ()):
            if isinstance(report, pytest.TestReport):
                folder = report.nodeid.split("/")[1] if report.nodeid.count("/") > 1 else "."
                seconds[folder] += report.duration
                tests[folder] += report.when == "call"
    if sum(tests.values()) < 2:
        return
    terminalreporter.section("minutes per package")
    for folder, spent in seconds.most_common():
        terminalreporter.write_line(f"{folder:12} {spent / 60:6.2f} min {tests[folder]:6} tests")
    terminalreporter.write_line(f"{'all':12} {sum(seconds.values()) / 60:6.2f} min {sum(tests.values()):6} tests")
