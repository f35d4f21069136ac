"""Expert parallelism: stacked experts are sharded over ranks, and dispatchers send tokens to the ranks that hold their experts.

A token is sent at most once to each rank, and the results that come back are summed. The two directions are each other's
transpose, so each is the gradient of the other:

    spread   (N, ...) -> rows received here      token t is copied to every rank that has one of its experts
    collect  rows received here -> (N, ...)      the ranks' results for token t are sent back and summed

`share_experts` applies this to a model: it shards the experts and replaces the dispatchers of the layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from forge_core.errors import PlanError
from forge_core.protocols.model import Context, ExpertDispatcher, Topology
from forge_parallel.placement.collectives import GatherWide, Ranks, all_gather, all_to_all, all_to_all_single, evenly, functional
from forge_parallel.placement.shares import chunk, stacks


def on_host(counts: Tensor) -> Any:
    """Returns a small tensor as numbers; synchronizes with the device."""
    return counts.tolist()


@dataclass(frozen=True)
class Route:
    """Which of this rank's tokens are sent where.

    Attributes:
        token: (sent,) token of each row that is sent, in rank order.
        places: (N, columns) row in which a token is sent to its next destination; 0 where `goes` is False.
        goes: (N, columns) whether there is a destination.
        send: number of rows for each rank.
        receive: number of rows from each rank.
        slots: number of slots that arrive with them.
        ranks: the group.
    """

    token: Tensor
    places: Tensor
    goes: Tensor
    send: list[int]
    receive: list[int]
    slots: int
    ranks: Ranks

    @classmethod
    def of(cls, owners: Tensor, ranks: Ranks, read: Callable[[Tensor], Any] = on_host) -> "Route":
        """Builds a route from the rank of each slot (N, top_k), or -1.

        One small exchange tells every rank how much it will receive. The host waits for its result, its only wait in a layer.
        `read` converts (2, 2, ranks) to numbers: rows and slots, each sent and received.
        """
        slots = owners.new_zeros(ranks.size + 1).scatter_add_(0, owners.where(owners >= 0, ranks.size).flatten(), _ones(owners))
        goes, destinations = _distinct(owners, ranks.size)
        keys, order = destinations.where(goes, ranks.size).flatten().sort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        borders = torch.searchsorted(keys, torch.arange(ranks.size + 1, device=keys.device))
        outgoing = torch.stack([borders.diff(), slots[: ranks.size]], 1)
        even = [1] * ranks.size
        incoming = all_to_all_single(outgoing, even, even, ranks)
        (send, _), (receive, arriving) = read(torch.stack([outgoing, incoming]).mT)
        token = order[: sum(send)] // destinations.shape[1]
        return cls(token, places.view_as(goes).where(goes, 0), goes, send, receive, sum(arriving), ranks)


def _ones(owners: Tensor) -> Tensor:
    return torch.ones_like(owners).flatten()


def _distinct(owners: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Returns (whether, where) a token is sent, (N, columns) each, every rank once; columns are the most possible
    destinations."""
    if ranks <= owners.shape[1]:
        wanted = owners.new_zeros(len(owners), ranks + 1).scatter_(1, owners.where(owners >= 0, ranks), 1)
        return wanted[:, :ranks] > 0, torch.arange(ranks, device=owners.device).expand(len(owners), ranks)
    ordered = owners.sort(1).values
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return (ordered >= 0) & ~repeated, ordered


def depart(x: Tensor, route: Route) -> Tensor:
    """Starts to send the rows. The result must not be read before `Arrive` has waited for it; no gradient."""
    rows = x.detach().index_select(0, route.token)  # several times faster than indexing on a CPU
    return functional.all_to_all_single(rows, route.receive, route.send, route.ranks.name)


def _collect(rows: Tensor, route: Route) -> Tensor:
    back = all_to_all_single(rows, route.receive, route.send, route.ranks)
    total = back.new_zeros(len(route.goes), back.shape[1], dtype=torch.promote_types(back.dtype, torch.float32))
    if len(back):
        for places, goes in zip(route.places.unbind(1), route.goes.unbind(1), strict=True):
            # Summed in rank order, so results are bitwise reproducible; index_add is not, on a GPU.
            total += back.index_select(0, places).masked_fill_(~goes.unsqueeze(1), 0)
    return total.to(rows.dtype)


class Arrive(torch.autograd.Function):
    """The second half of `spread`: (x, result of `depart`, route) -> rows; backward: `collect`."""

    @staticmethod
    def forward(ctx: Any, _x: Tensor, departed: Tensor, route: Route) -> Tensor:
        ctx.route = route
        rows = functional.wait_tensor(departed)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _collect(grads[0].contiguous(), ctx.route), None, None


class Collect(torch.autograd.Function):
    """Rows received here -> sums over the ranks to which a token was sent; backward: `spread`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _collect(rows, route)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return functional.wait_tensor(depart(grads[0], ctx.route)), None


ExpertFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AllToAllDispatcher:
    """Sends each token once to every rank that has one or more of its experts.

    A rank sums its experts' weighted results for a token before it sends the sum back. With `overlap`, `overlap_with` is called
    while tokens are being sent. `route` computes the destinations.
    """

    ranks: Ranks
    inner: ExpertDispatcher
    overlap: bool = True
    route: Callable[[Tensor, Ranks], Route] = Route.of

    def __call__(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        expert_fn: ExpertFunction,
        num_experts: int,
        slots: int | None = None,
        overlap_with: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """See `ExpertDispatcher`; `expert_fn` receives the experts of this rank."""
        share = num_experts // self.ranks.size
        route = self.route(experts.div(share, rounding_mode="floor"), self.ranks)
        told = _told(experts, weights)
        under_way = depart(x, route), depart(told, route)
        added = overlap_with() if overlap_with is not None and self.overlap else None
        rows = Arrive.apply(x, under_way[0], route)
        arrived, chosen = _read(Arrive.apply(told, under_way[1], route))
        results = self.inner(rows, _own(chosen, share, self.ranks), arrived, expert_fn, share, route.slots)
        y = Collect.apply(results, route)
        if overlap_with is not None and added is None:
            added = overlap_with()
        return y if added is None else y + added


@dataclass(frozen=True)
class AllGatherDispatcher:
    """Gathers all tokens on all ranks. `divided`: ranks have different experts; otherwise each has a part of every expert's
    matrices.

    Sends more bytes than `AllToAllDispatcher`, unless tokens have experts on most ranks, but all shares have equal sizes. `read`
    copies the numbers of all ranks' tokens and slots (2, ranks) to the host.
    """

    ranks: Ranks
    inner: ExpertDispatcher
    divided: bool = True
    read: Callable[[Tensor], list[list[int]]] = Tensor.tolist

    def __call__(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        expert_fn: ExpertFunction,
        num_experts: int,
        slots: int | None = None,
        overlap_with: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """See `ExpertDispatcher`; `expert_fn` receives the experts of this rank."""
        lengths, known = self._agreed(x, -1 if slots is None else slots)
        more = (0, 0, 0, max(lengths) - len(x))
        rows = GatherWide.apply(F.pad(x, more), self.ranks)
        arrived, chosen = _read(GatherWide.apply(_told(F.pad(experts, more, value=-1), F.pad(weights, more)), self.ranks))
        share, total = num_experts, None
        if self.divided:
            share = num_experts // self.ranks.size
            chosen = _own(chosen, share, self.ranks)
        elif -1 not in known:
            total = sum(known)
        results = self.inner(rows, chosen, arrived, expert_fn, share, total)
        splits = evenly(results, self.ranks)
        sums = all_to_all(results, splits, splits, self.ranks).unflatten(0, (self.ranks.size, -1))
        wide = torch.promote_types(x.dtype, torch.float32)
        y = sums.sum(0, dtype=wide).to(x.dtype)[: len(x)]
        return y if overlap_with is None else y + overlap_with()

    def _agreed(self, x: Tensor, slots: int) -> tuple[list[int], list[int]]:
        """Returns tokens and slots of every rank, which may differ between ranks. The host waits for the result, once."""
        # Filled on the device: a tensor built from numbers on the host would be a second wait.
        own = torch.cat([torch.full((1, 1), number, device=x.device) for number in (len(x), slots)], 1)
        lengths, known = self.read(all_gather(own, self.ranks, 0).mT)
        return lengths, known


def _told(experts: Tensor, weights: Tensor) -> Tensor:
    """Packs weights and experts of each token into one tensor (N, 2 top_k); fp32 represents every expert index exactly."""
    return torch.cat([weights, experts.to(weights.dtype)], 1)


def _read(told: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = told.chunk(2, 1)
    return weights, experts.detach().long()


def _own(experts: Tensor, share: int, ranks: Ranks) -> Tensor:
    """Returns indices among this rank's `share` experts; -1 for experts of other ranks."""
    return (experts - ranks.rank * share).where(experts.div(share, rounding_mode="floor") == ranks.rank, -1)


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
    if not stacks(context.whole or context.specs):
        raise PlanError("expert: the model has no stacked experts to split; set parallel.ep = 1")
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
            if axis == "etp" and "ffn" not in dims:
                raise PlanError(
                    f"expert: {path}.{name} would be added once for each part of an expert; set parallel.etp = 1, or "
                    "model.mlp.bias = false"
                )
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
