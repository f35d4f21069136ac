"""Applies tensor parallelism: splits matrices over ranks (Shoeybi et al., 2019), and the residual stream along the sequence
(Korthikanti et al., 2022).

`tensor.rules` decides what is split and how, as data; `tensor.layers` defines the classes of the modules.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from forge_core.errors import PlanError
from forge_core.protocols.model import Context, Topology
from forge_core.specs import Specs
from forge_parallel.accelerator import shares_memory
from forge_parallel.placement.collectives import Ranks, all_gather
from forge_parallel.placement.shares import chunk, rows_refusal
from forge_parallel.step.reduce import local_grad
from forge_parallel.torch_private import overlap_tensor_parallelism
from forge_parallel.transforms.tensor.layers import Split, split_class
from forge_parallel.transforms.tensor.rules import Role, Rules, kv_copies


def cut(part: nn.Module, table: Rules, context: Context, sequence_parallel: bool) -> None:
    """Replaces every parameter of `part` by a DTensor on the tp mesh, and the class of every module according to its role in
    `table`.

    Raises:
        PlanError: the specs do not say how to split a parameter, or a rank would get no part of one.
    """
    topology = context.topology
    ranks, mesh = Ranks.of(topology.group("tp")), topology.dense["tp"]
    local: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in list(part.named_modules()):
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        slots = {name: p for name, p in parameters.items() if f"{path}.{name}" not in table.apart}
        for slot, parameter in slots.items():
            if parameter not in local:
                local[parameter] = _cut_parameter(f"{path}.{slot}".removeprefix("."), parameter, table, mesh)
            module._parameters[slot] = local[parameter]
        role = table.roles.get(path)
        if role in (Role.REGION, Role.SIDE_INPUTS, Role.HEAD_SUM) or (
            role is not None and slots
        ):  # parameters may be on another stage
            summed = any(f"{path}.{slot}" in table.summed for slot in slots)
            packed = tuple(slot for slot in slots if f"{path}.{slot}" in table.packed)
            # Of a copied layer each rank uses the part of one head; a matrix without heads, as of an adapter, it uses whole.
            copied = tuple(slot for slot in slots if role is Role.KV_COPY and _has_heads(f"{path}.{slot}", context.specs))
            module.__class__ = split_class(type(module), role, tuple(slots), summed, packed, copied)
            module.partial = tuple(slot for slot in slots if f"{path}.{slot}" in table.partial)  # type: ignore[assignment]
            _settle(module, path, role, ranks, context.specs, sequence_parallel)


def _has_heads(name: str, specs: Specs) -> bool:
    return "kv_heads" in specs.tensors[name].dims


def cut_sequences(part: nn.Module, on: bool) -> None:
    """Sets whether the residual stream is split along the sequence; if not, sequences may have any length."""
    for module in part.modules():
        if isinstance(module, Split):
            module.sequence = on


def sum_partial_gradients(part: nn.Module, topology: Topology) -> None:
    """Collective: sums over tp the gradients of parameters that every rank holds whole but used only for its own share."""
    if topology.layout.tp == 1:
        return
    split = (module for module in part.modules() if isinstance(module, Split))
    local = [local_grad(p) for module in split for slot in module.partial if (p := module._parameters[slot]) is not None]
    gradients = [gradient for gradient in local if gradient is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients]).to(topology.device)
    dist.all_reduce(flat, group=topology.group("tp"))
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def overlap(topology: Topology) -> None:
    """Lets the compiler fuse gathers and scatters of sequences with adjacent matrix products.

    Raises:
        PlanError: the device has no symmetric memory.
    """
    if not shares_memory(topology.device):
        raise PlanError(
            "tensor: asynchronous tensor parallelism needs NVIDIA GPUs that can access each other's memory; "
            "set transforms.tensor.asynchronous = false"
        )
    overlap_tensor_parallelism(topology.group("tp"))


def _cut_parameter(name: str, parameter: nn.Parameter, table: Rules, mesh: DeviceMesh) -> nn.Parameter:
    """Returns this rank's parameter, on the meta device."""
    if name not in table.cut:
        raise PlanError(f"tensor: {name} is not in the model's specs(); add a TensorSpec for it to Specs.tensors")
    whole = parameter.detach()
    if name in table.packed:
        whole = whole.unflatten(1, (table.packed[name], -1))
    dim, shape = table.cut[name], list(whole.shape)
    if dim is not None:
        size = shape[dim]
        if why := rows_refusal(name, size, mesh.size()):
            raise PlanError(f"tensor: {why}")
        shape[dim] = chunk(size, mesh.size(), mesh.get_local_rank())[1]
    local = whole.new_empty(shape)  # keeps the class of a tensor that another transform has wrapped
    placement = Replicate() if dim is None else Shard(dim)
    laid_out = DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(laid_out, requires_grad=parameter.requires_grad)


def _settle(module: Any, path: str, role: Role, ranks: Ranks, specs: Specs, sequence: bool) -> None:
    """Sets the attributes with this rank's share of a module."""
    module.tp, module.sequence = ranks, sequence
    if role in (Role.TABLE, Role.HEAD, Role.GATHERED):
        size = module._parameters["weight"].shape[0]
        share = chunk(size, ranks.size, 0)[1]
        first, rows = chunk(size, ranks.size, ranks.rank)
        if role is Role.TABLE:
            module.first, module.rows = first, rows
            if getattr(module, "padding_idx", None) is not None:  # its gradient is dropped on the rank that holds the row
                module.padding_idx = module.padding_idx - first if first <= module.padding_idx < first + rows else None
        elif role is Role.GATHERED:
            module.width, module.share = size, share
        else:
            if not hasattr(getattr(module, "core", None), "split"):
                raise PlanError(f"tensor: {path} computes logits, but has no `core` (LossHead) that computes the loss; add one")
            module.vocab, module.share = size, share
            module.core = module.core.split(first, partial(_of_all, ranks=ranks))
    elif role is Role.ACROSS:
        keys = specs.modules[path].inputs[0][-1] == "kv_heads"
        module.copies = kv_copies(specs, ranks.size) if keys else 1
    elif role is Role.KV_COPY:
        kv_heads = specs.units["kv_heads"]
        head = ranks.rank * kv_heads // ranks.size
        module.parts = {}
        for slot, parameter in module._parameters.items():
            if parameter is not None and _has_heads(f"{path}.{slot}", specs):
                dim = specs.tensors[f"{path}.{slot}"].dims.index("kv_heads")
                width = parameter.shape[dim] // kv_heads
                module.parts[slot] = (*(slice(None),) * dim, slice(head * width, (head + 1) * width))


def _of_all(numbers: Tensor, ranks: Ranks) -> Tensor:
    """Collective: gathers (3, n) into (ranks, 3, n)."""
    return all_gather(numbers[None], ranks, 0)
