"""A world of any size in one process: collectives return at once and move nothing, and tensors have no memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from forge_core.errors import LayoutError
from forge_parallel.torch_private import (
    GROUPED_MM,
    LOCAL_SCALAR,
    FakeTensor,
    FakeTensorMode,
    fake_store,
    forget_meshes,
    tree_leaves,
)

aten = torch.ops.aten
ARANGE = (aten.arange.default, aten.arange.start, aten.arange.start_step)
ASKED = (torch.bool, torch.int32)
SMALL = 4096
"""Elements up to which whole numbers stay what they are."""


@contextmanager
def fake_world(size: int, rank: int) -> Iterator[None]:
    """Inside, this process is `rank` of `size`. A world of one has no process group, as in a real run.

    Raises:
        LayoutError: this process belongs to a real world.
    """
    if dist.is_initialized():
        raise LayoutError("this process belongs to a process group, and a dry run needs a separate process; start it in one")
    if size == 1:
        yield
        return
    store = fake_store()  # which registers the backend
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor's caches hold meshes, and meshes hold names of groups, which mean other ranks in the next world.
        forget_meshes()


class Weightless(FakeTensorMode):
    """Inside, tensors have shapes and no memory, except for a few whole numbers that code reads to find its way.

    Such numbers are micro-batches' indices, and what ranks tell each other about shapes: a rank hears what it would say
    itself. Where code asks a tensor without memory a question, such as whether any key is seen or every stage agrees, the
    answer is yes.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeTensor in types:
            if func is LOCAL_SCALAR and args[0].dtype in ASKED:
                return True if args[0].dtype == torch.bool else 1
            if func is aten.equal.default:
                return True
            if func is GROUPED_MM and args[0].dtype != torch.bfloat16:
                return super().__torch_dispatch__(aten.new_empty.default, types, (args[0], _grouped(*args, **(kwargs or {}))))
            return super().__torch_dispatch__(func, types, args, kwargs)
        given = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)]
        if tensors and all(_counts(tensor) for tensor in tensors):
            return aten.clone(args[0]) if func is aten.empty_like.default else func(*args, **given)
        if func in ARANGE and all(isinstance(bound, int) and abs(bound) <= SMALL for bound in args) and _integral(given):
            return func(*args, **given)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _grouped(rows: torch.Tensor, others: torch.Tensor, offs: torch.Tensor, **_: Any) -> list[int]:
    """The shape of a product of groups, of which torch knows without memory that of bf16 only."""
    if rows.dim() == others.dim() == 2:
        return [len(offs), rows.shape[0], others.shape[1]]
    return [rows.shape[-2], others.shape[-1]]


def _counts(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
    return plain and not tensor.is_floating_point() and tensor.numel() <= SMALL


def _integral(settings: Any) -> bool:
    dtype = settings.get("dtype")
    return dtype is None or not dtype.is_floating_point
