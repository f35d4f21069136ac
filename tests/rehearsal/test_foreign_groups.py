"""A loop of one's own may open its process group in any way that serves its device; `parallelize` compares weights there."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forge_core.errors import PlanError
from forge_parallel import parallelize
from harness.pool import World
from parallel.foreign_modules import Plain

pytestmark = pytest.mark.rehearsal


def _laid_out(backend: str, alike: bool) -> tuple[str, Any]:
    """What it says of weights that are or are not the same on all ranks."""
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    torch.manual_seed(0 if alike else rank)
    try:
        model = parallelize(Plain(), "dp2")
        return "", {parameter.device.type for part in model.parts for parameter in part.parameters()}
    except PlanError as refusal:
        return str(refusal), None
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_weights_are_compared_whatever_the_group_is_called(devices: World, backend: str) -> None:
    assert devices.run(_laid_out, 2, backend, True, group=False) == [("", {"cuda"})] * 2
    for message, _ in devices.run(_laid_out, 2, backend, False, group=False):
        assert "the weights differ between ranks, first in embed.weight" in message
