"""Applies expert parallelism to a model: shards stacked experts over ranks, and replaces the layers' dispatchers."""

from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from forge_core.errors import PlanError
from forge_core.protocols.model import ExpertDispatcher
from forge_core.protocols.topology import Context, Topology
from forge_parallel.placement.collectives import Ranks
from forge_parallel.placement.shares import chunk, stacks
from forge_parallel.transforms.expert.dispatchers import AllGatherDispatcher, AllToAllDispatcher

CUT = frozenset({"ep", "etp"})
"""Mesh dimensions over which ranks compute with different experts or parts of them; other dimensions only shard storage."""


@cache
def stack_class(original: type[nn.Module], parameters: tuple[str, ...]) -> type[nn.Module]:
    """Returns a subclass of a module's class in which each parameter reads as this rank's experts, a plain tensor."""
    return type(f"{original.__name__}Share", (original,), {name: property(_share_of(name)) for name in parameters})


def _share_of(name: str) -> Any:
    def read(self: nn.Module) -> Tensor | None:
        parameter = self._parameters[name]
        # Outside the module's forward the parameter is an FSDP shard on data axes, which FSDP itself reads.
        if not isinstance(parameter, DTensor) or not CUT.issuperset(parameter.device_mesh.mesh_dim_names or ()):
            return parameter
        return parameter.to_local()

    return read


def share_experts(part: nn.Module, context: Context, *, dispatcher: str, ranks_per_node: int | None, overlap: bool) -> None:
    """Shards every module of `part` that contains stacked experts, and replaces its dispatcher.

    Raises:
        PlanError: a layer has no dispatcher to replace, experts cannot be split evenly, or ranks per node do not divide ep.
    """
    topology = context.topology
    if dispatcher == "hierarchical" and topology.layout.ep > 1:
        # Collective on all ranks, including those whose stages have no experts.
        topology.nodes("ep", _per_node(topology.layout.ep, ranks_per_node))
    for path in stacks(context.specs):
        parent = path.rpartition(".")[0]
        layer: Any = part.get_submodule(parent)
        if not isinstance(getattr(layer, "dispatch", None), ExpertDispatcher):
            raise PlanError(
                f"expert: {path} contains stacked experts, but {parent} has no `dispatch` (ExpertDispatcher) to replace; add "
                "one, or set parallel.ep = 1"
            )
        module = part.get_submodule(path)
        _cut(module, path, context)
        layer.dispatch = open_dispatcher(layer.dispatch, topology, dispatcher, ranks_per_node, overlap)


def open_dispatcher(
    local: ExpertDispatcher, topology: Topology, dispatcher: str, ranks_per_node: int | None = None, overlap: bool = True
) -> ExpertDispatcher:
    """Returns the dispatcher that replaces a layer's `local` one. `ranks_per_node`: see `ExpertParallel`."""
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
            f"transforms.expert.dispatcher = 'hierarchical' with parallel.ep = {ep}: ranks_per_node = {node} must divide ep, "
            "with at least two ranks per node and two nodes; correct it, or use 'all_to_all'"
        )
    return node


def _cut(module: nn.Module, path: str, context: Context) -> None:
    """Replaces every stacked parameter by a DTensor over (ep, etp) with this rank's share, on the meta device."""
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
                    f"expert: {path}.{name} has {shape[dim]} along {dims[dim]!r}, which parallel.{axis} = {ranks} does not "
                    f"divide; choose another parallel.{axis}"
                )
            shape[dim] = chunk(shape[dim], ranks, topology.coordinates[axis])[1]
            placements.append(Shard(dim))
        local = parameter.detach().new_empty(shape)
        whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
        module._parameters[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    module.__class__ = stack_class(type(module), tuple(parameters))
