"""Processes that have CUDA devices of the rehearsal; the test process itself has none, and gives the numbers of a CPU."""

from collections.abc import Iterator

import pytest

from harness.pool import World
from rehearsal import inductor
from rehearsal.device import NoCompiler, environment


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
