"""Kernels that give the same bits each time, where torch has them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic as torch_deterministic

from forge_core.errors import PlanError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FILLING: Any = torch_deterministic
"""A module whose attribute torch makes when it is imported."""

FIXED = (":4096:8", ":16:8")
"""Workspaces with which products on several streams of CUDA are summed in one order; the first is the faster one."""


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Inside, what is computed twice from the same numbers has the same bits; with `on` False nothing changes.

    torch takes other kernels, which may be slower, and an operator that has none raises an error with its name
    (`torch.use_deterministic_algorithms`). It has to be entered before the first product on a GPU. Collectives of NCCL sum in an
    order that depends on how ranks are connected: the same nodes give the same bits, others may not.

    Raises:
        PlanError: the environment asks for a workspace with which products differ.
    """
    if not on:
        yield
        return
    if os.environ.setdefault(WORKSPACE, FIXED[0]) not in FIXED:
        raise PlanError(
            f"deterministic kernels need {WORKSPACE} to be {' or '.join(FIXED)}, and it is {os.environ[WORKSPACE]!r}; "
            "unset it, or set train.deterministic = false"
        )
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, fill = torch.backends.cudnn.benchmark, _FILLING.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it chooses kernels by their time
    _FILLING.fill_uninitialized_memory = False  # no number of a run comes from there, and filling takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark, _FILLING.fill_uninitialized_memory = benchmark, fill
