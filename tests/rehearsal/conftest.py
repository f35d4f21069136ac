"""Processes that have CUDA devices of the rehearsal; the test process itself has none, and gives the numbers of a CPU."""

from collections.abc import Iterator

import pytest

from harness.pool import World
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
