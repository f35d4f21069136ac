"""Pieces of a plain module and its optimizer under torch's own parallelism: the box of each tensor that a rank holds."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Piece, World

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

COMPILED = "_orig_mod."
"""Prefix that torch.compile adds to the names in a module that it wraps."""


def pieces(model: "nn.Module", optimizer: "Optimizer | None" = None, *, world: World, fresh: bool = False) -> list[Piece]:
    """Collective: returns this rank's boxes of `model/<name>` and `optimizer/<name>/<state>`, for `save` and `load`.

    Names do not depend on how the module is wrapped, and boxes contain their offsets, so a checkpoint can be loaded with another
    kind of parallelism. If several ranks hold the same box, the first of them writes it. A tied parameter has its first name.

    Args:
        model: a module whose parameters and persistent buffers are plain tensors, equal on all ranks, or `DTensor`s.
        optimizer: optimizer of these parameters. Save its state other than tensors, such as learning rates, in `meta`.
        world: `ProcessGroupWorld()` or `SingleProcessWorld()`.
        fresh: creates the state of an optimizer that has made no step, by a step with learning rate 0 and zero gradients, so
            that it can be loaded.

    Raises:
        CheckpointError: a tensor is a partial sum, the optimizer state has other values than tensors, or the optimizer has
            parameters that the model does not have.
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
            if value is not None:  # SGD without momentum has None
                name = f"{names[id(parameter)]}/{state}"
                yield f"optimizer/{name}", _tensor(value, name)


def _tensor(value: Any, name: str) -> "Tensor":
    import torch

    if not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{name} is a {type(value).__name__}, and a checkpoint holds tensors; put it into meta")
    return value


def _box(name: str, tensor: "Tensor") -> "tuple[tuple[int, ...], Tensor]":
    """Returns the offset of this rank's part of a tensor, and the live part."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tensor.detach()
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{name} is {tensor.placements}, which waits for a sum over ranks; redistribute it first")
    local = tensor.to_local().detach()
    chunks = tensor.__create_chunk_list__()  # the method by which torch's own checkpoints find the offset
    if not local.numel():
        return (0,) * tensor.dim(), local
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        raise CheckpointError(f"{name} is {tensor.placements}, of which this rank has several parts; redistribute it first")
    return tuple(chunks[0].offsets), local


def _make_state(optimizer: "Optimizer") -> None:
    """Creates the state of an optimizer by a step with learning rate 0, which changes no weight.

    Raises:
        CheckpointError: the optimizer already has a state, which the step would change.
    """
    import torch

    if optimizer.state:
        raise CheckpointError("fresh = True requires an optimizer without steps, but this one has made steps: remove fresh")
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
