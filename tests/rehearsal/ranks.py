"""What a function on a rank of the rehearsal needs: the device that Forge gives it, and weights that a CPU would draw."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from forge_parallel.launch.environment import read_launcher
from forge_parallel.launch.process_group import destroy_process_groups, init_process_groups
from forge_parallel.model import realize


@contextmanager
def own_device() -> Iterator[torch.device]:
    """Collective: as a run begins and ends. On a CPU where this process has no device."""
    try:
        yield init_process_groups(read_launcher(os.environ), timeout=120)
    finally:
        destroy_process_groups()


@contextmanager
def draws_of_a_cpu() -> Iterator[None]:
    """Initial weights come from the streams of a CPU on every device; CUDA has others."""
    of_device = realize._stream

    def stream(seed: int, name: str, device: torch.device, uniform: bool = False) -> realize.Draw:
        draw = of_device(seed, name, torch.device("cpu"), uniform)
        return lambda first, last: draw(first, last).to(device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(realize, "_stream", stream)
        yield
