"""Processes that have CUDA devices of the rehearsal; the test process itself has none, and gives the numbers of a CPU."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.pool import World
from rehearsal import inductor
from rehearsal.device import NoCompiler, environment
from rehearsal.reach import unreached
from rehearsal.reach.record import DIRECTORY
from rehearsal.reach.scope import every_line


@pytest.fixture(scope="session")
def devices() -> Iterator[World]:
    """A pool like `world`, with a device for every rank."""
    try:
        pool = World(environment())
    except NoCompiler as reason:
        pytest.skip(str(reason))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A pool of processes that compile for a device and launch nothing."""
    try:
        pool = World(inductor.environment(tmp_path_factory.mktemp("compilers")))
    except (NoCompiler, inductor.NoTriton) as reason:
        pytest.skip(str(reason))
    yield pool
    pool.close()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """After a whole rehearsal that passed: a list of unreached lines that changed is written, and fails the session."""
    directory = os.environ.get(DIRECTORY)
    if directory is None or exitstatus != pytest.ExitCode.OK or not session.testscollected:
        return
    found = unreached.written(every_line(), unreached.reached(Path(directory)))
    if found != unreached.LIST.read_text():
        unreached.LIST.write_text(found)
        print(f"\n{unreached.LIST} changed: look at what came in, and commit it or rehearse it")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
