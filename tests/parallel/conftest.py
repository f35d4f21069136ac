"""One process compared with several must compute as each of them does: with one thread, or as many as the session
`machines` asks for."""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def as_many_threads_as_ranks_have() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("FORGE_TEST_THREADS", "1")))
    yield
    torch.set_num_threads(before)
