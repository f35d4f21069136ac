"""Pieces of a plain module and its optimizer under torch's own parallelism: which box of each tensor a rank holds."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Piece, World

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

COMPILED = "_orig_mod."
"""What the compiler puts into the names of a module that it wraps."""


def pieces(model: "nn.Module", optimizer: "Optimizer | None" = None, *, world: World, fresh: bool = False) -> list[Piece]:
    """Collective: the boxes of this rank of `model/<name>` and `optimizer/<name>/<state>`, for `save` and `load`.

    Names do not depend on how the module is wrapped, and boxes say where they lie, so what one kind of parallelism has written
    another one reads. What several ranks hold alike, the first of them writes. A tied parameter has its first name.

    Args:
        model: its parameters and persistent buffers are plain tensors, the same on all ranks, or `DTensor`s.
        optimizer: of these parameters. What it keeps besides tensors, such as learning rates, belongs into `meta`.
        world: `Group()`, or `SingleProcessWorld()`.
        fresh: the optimizer has made no step yet and is to be loaded: makes its state, by a step of rate 0 without gradients.

    Raises:
        CheckpointError: a tensor waits for a sum over ranks, an optimizer keeps something else than tensors, or has parameters
            that the model does not have.
    """
    if fresh and optimizer is not None:
        _make_state(optimizer)
    boxes = [(name, tuple(tensor.shape), *_box(name, tensor)) for name, tensor in _named(model, optimizer)]
    mine = [[name, list(offset), list(local.shape)] for name, _, offset, local in boxes]
    first: dict[str, int] = {}
    for rank, payload in enumerate(world.all_gather(json.dumps(mine).encode())):
        for box in json.loads(payload):
            first.setdefault(json.dumps(box), rank)
    return [
        Piece(name, shape, offset, local, first[json.dumps(box)] == world.rank)
        for (name, shape, offset, local), box in zip(boxes, mine, strict=True)
    ]


def _named(model: "nn.Module", optimizer: "Optimizer | None") -> "Iterator[tuple[str, Tensor]]":
    from torch.nn.parallel import DistributedDataParallel

    while isinstance(model, DistributedDataParallel):
        model = model.module
    names: dict[int, str] = {}
    for given, value in model.state_dict(keep_vars=True).items():
        name = given.replace(COMPILED, "")
        if id(value) not in names:
            names[id(value)] = name
            yield f"model/{name}", _tensor(value, name)
    for parameter, kept in optimizer.state.items() if optimizer is not None else ():
        if id(parameter) not in names:
            raise CheckpointError(f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model does not have")
        for state, value in kept.items():
            if value is not None:  # as SGD has it, without momentum
                name = f"{names[id(parameter)]}/{state}"
                yield f"optimizer/{name}", _tensor(value, name)


def _tensor(value: Any, name: str) -> "Tensor":
    import torch

    if not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{name} is a {type(value).__name__}, and a checkpoint holds tensors; put it into meta")
    return value


def _box(name: str, tensor: "Tensor") -> "tuple[tuple[int, ...], Tensor]":
    """Where this rank's part of a tensor begins, and the live part."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tensor.detach()
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{name} is {tensor.placements}, which waits for a sum over ranks; redistribute it first")
    local = tensor.to_local().detach()
    found = tensor.__create_chunk_list__()  # as torch's own checkpoints ask where a part lies
    if not local.numel():
        return (0,) * tensor.dim(), local
    if len(found) != 1 or tuple(found[0].sizes) != tuple(local.shape):
        raise CheckpointError(f"{name} is {tensor.placements}, of which this rank has several parts; redistribute it first")
    return tuple(found[0].offsets), local


def _make_state(optimizer: "Optimizer") -> None:
    """Lets an optimizer make what it keeps for each parameter. A step of rate 0 changes no weight.

    Raises:
        CheckpointError: it has made steps, which this would spoil.
    """
    import torch

    if optimizer.state:
        raise CheckpointError("fresh = True is for an optimizer that has made no step; this one has: leave it out")
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
