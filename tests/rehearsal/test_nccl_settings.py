"""What NCCL is told before it starts: to end a process whose collective failed, and to keep a record of the last ones."""

import os

import pytest

from forge_parallel.launch.process_group import limit
from harness.pool import World
from rehearsal.ranks import own_device

pytestmark = pytest.mark.rehearsal
NAMES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT")


def _told(own: dict[str, str]) -> list[str | None]:
    os.environ.update(own)
    with own_device() as device:
        limit(30, device)  # torch warns of a group that takes none
        assert device.type == "cuda"
    return [os.environ.get(name) for name in NAMES]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, ["3", "2000", None, "1"]),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}, ["1", None, "7", "1"]),
        ({"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}, ["3", "0", None, "0"]),
    ],
)
def test_it_is_told_what_the_user_has_not(devices: World, own: dict[str, str], expected: list[str | None]) -> None:
    assert devices.run(_told, 2, own, group=False, fresh=True) == [expected] * 2
