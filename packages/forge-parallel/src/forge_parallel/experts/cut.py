"""Expert parallelism (Lepikhin et al., 2020): each rank of `ep` holds other experts, each of `etp` a part of every one's width.

Ranks are borrowed from data, context and tensor parallelism, and keep reading their own tokens, which travel to their experts and
back. What is left of these axes shards the experts like data ranks (`efsdp`); `shard`, which this needs, does that.
"""

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from forge_core.errors import PlanError
from forge_core.protocols.model import ExpertDispatcher
from forge_core.protocols.topology import Context, Topology
from forge_parallel.experts.dispatchers import AllGatherDispatcher, AllToAllDispatcher
from forge_parallel.experts.stack import stack_class
from forge_parallel.placement.collectives import Ranks
from forge_parallel.placement.expert_stacks import stacks
from forge_parallel.placement.shares import chunk


def share_experts(part: nn.Module, context: Context, *, dispatcher: str, ranks_per_node: int | None, overlap: bool) -> None:
    """Works on every module of `part` that holds stacked experts.

    Raises:
        PlanError: a layer has no dispatcher to replace, experts cannot be shared evenly, or nodes do not divide ep.
    """
    topology = context.topology
    if dispatcher == "hierarchical" and topology.layout.ep > 1:
        # All ranks enter, also those whose stages have no expert.
        topology.nodes("ep", _per_node(topology.layout.ep, ranks_per_node))
    for path in stacks(context.specs):
        parent = path.rpartition(".")[0]
        layer: Any = part.get_submodule(parent)
        if not isinstance(getattr(layer, "dispatch", None), ExpertDispatcher):
            raise PlanError(
                f"expert: {path} stacks experts, but {parent} has no `dispatch` to replace (ExpertDispatcher); give it one, or "
                "set parallel.ep = 1"
            )
        module = part.get_submodule(path)
        _cut(module, path, context)
        layer.dispatch = open_dispatcher(layer.dispatch, topology, dispatcher, ranks_per_node, overlap)


def open_dispatcher(
    local: ExpertDispatcher, topology: Topology, dispatcher: str, ranks_per_node: int | None = None, overlap: bool = True
) -> ExpertDispatcher:
    """What takes the place of a layer's `local` one. `ranks_per_node`: see `ExpertParallel`."""
    layout = topology.layout
    inner = local if layout.etp == 1 else AllGatherDispatcher(Ranks.of(topology.group("etp")), local, divided=False)
    if layout.ep == 1:
        return inner
    if dispatcher == "all_gather":
        return AllGatherDispatcher(Ranks.of(topology.group("ep")), inner)
    if dispatcher == "all_to_all":
        return AllToAllDispatcher(Ranks.of(topology.group("ep")), inner, overlap)
    inside, across = (Ranks.of(group) for group in topology.nodes("ep", _per_node(layout.ep, ranks_per_node)))
    return AllToAllDispatcher(across, AllToAllDispatcher(inside, inner, overlap), overlap)


def _per_node(ep: int, node: int | None) -> int:
    if node is None or node >= ep or node == 1 or ep % node:
        raise PlanError(
            f"transforms.expert.dispatcher = 'hierarchical' with parallel.ep = {ep}: ranks_per_node = {node} must divide "
            "it, with more than one rank in a node and more than one node; else use 'all_to_all'"
        )
    return node


def _cut(module: nn.Module, path: str, context: Context) -> None:
    """Makes every stacked parameter a DTensor over (ep, etp) with the share of this rank, on the meta device."""
    topology = context.topology
    axes = [axis for axis in ("ep", "etp") if topology.layout.size(axis) > 1]
    mesh = topology.sparse[tuple(axes)] if len(axes) > 1 else topology.sparse[axes[0]]
    parameters = dict(module.named_parameters(recurse=False))
    for name, parameter in parameters.items():
        dims = context.specs.tensors[f"{path}.{name}"].dims
        shape, placements = list(parameter.shape), []
        for axis in axes:
            dim = dims.index("expert" if axis == "ep" else "ffn")
            ranks = topology.layout.size(axis)
            if shape[dim] % ranks:
                raise PlanError(
                    f"expert: {path}.{name} has {shape[dim]} along {dims[dim]!r}, which parallel.{axis} = {ranks} does not divide"
                )
            shape[dim] = chunk(shape[dim], ranks, topology.coordinates[axis])[1]
            placements.append(Shard(dim))
        local = parameter.detach().new_empty(shape)
        whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
        module._parameters[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    module.__class__ = stack_class(type(module), tuple(parameters))
