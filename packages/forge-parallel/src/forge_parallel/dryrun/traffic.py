"""Counts the bytes that ranks exchange, by intercepting every collective operator of torch.

It counts what the code does, not what a formula predicts, in real runs and in a fake world.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from forge_core.errors import ForgeError
from forge_core.layout import DENSE, SPARSE, Layout
from forge_parallel.torch_private import TorchDispatchMode, python_body, resolve_process_group, schema, tree_leaves

NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"})

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "_allgather_base_": "all_gather",
        "allgather_": "all_gather",
        "allgather_coalesced_": "all_gather",
        "allgather_into_tensor_coalesced_": "all_gather",
        "all_gather_into_tensor": "all_gather",
        "all_gather_into_tensor_coalesced": "all_gather",
        "all_gather_into_tensor_out": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "reduce_scatter_": "reduce_scatter",
        "reduce_scatter_tensor": "reduce_scatter",
        "reduce_scatter_tensor_coalesced": "reduce_scatter",
        "reduce_scatter_tensor_coalesced_": "reduce_scatter",
        "reduce_scatter_tensor_out": "reduce_scatter",
        "allreduce_": "all_reduce",
        "allreduce_coalesced_": "all_reduce",
        "all_reduce": "all_reduce",
        "all_reduce_": "all_reduce",
        "all_reduce_coalesced": "all_reduce",
        "all_reduce_coalesced_": "all_reduce",
        "alltoall_": "all_to_all",
        "alltoall_base_": "all_to_all",
        "all_to_all_single": "all_to_all",
        "shard_dim_alltoall": "all_to_all",
        "broadcast": "broadcast",
        "broadcast_": "broadcast",
        "reduce_": "reduce",
        "gather_": "gather",
        "scatter_": "scatter",
        "send": "send",
        "isend": "send",
        "recv_": "receive",
        "recv_any_source_": "receive",
        "irecv": "receive",
    }
)
"""torch's operator -> kind of traffic."""

SILENT = frozenset(
    {
        "wait_tensor",
        "wait_tensors",
        "_wrap_tensor_autograd",
        "barrier",
        "monitored_barrier_",
        "check_for_nan",
        "mesh_get_process_group",
    }
)
"""Operators that transfer no data."""


GROUPS = frozenset({"group", "group_name", "process_group"})
"""Names of arguments with which custom operators take a group of ranks; an operator without one of them is not counted."""


EXPERTS: Mapping[str, str] = MappingProxyType(
    {f"mesh_{axis}": axis for axis in SPARSE if axis not in DENSE} | {name: name for name in ("ep.inside", "ep.across")}
)
"""Description of a group of experts -> axis, because its ranks may equal those of another axis. The last two are the nodes of
`ep` and the peers across nodes."""


@dataclass(frozen=True)
class Flow:
    """The traffic of one rank over one axis by one kind of collective.

    Attributes:
        axis: axes along which the ranks of the group differ, see `axis_of`.
        kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `send`, `receive`, ...
        count: number of calls.
        payload: bytes of the whole tensors on one rank: the gathered result, or the input of a reduction or exchange.
        wire: bytes that an optimal algorithm must send from this rank, and equally many that it must receive: with n ranks
            (n - 1) / n of a gathered or scattered tensor, twice that for an all-reduce (Patarasuk & Yuan, 2009).
    """

    axis: str
    kind: str
    count: int
    payload: int
    wire: int

    def __add__(self, other: "Flow") -> "Flow":
        count, payload, wire = self.count + other.count, self.payload + other.payload, self.wire + other.wire
        return replace(self, count=count, payload=payload, wire=wire)

    def __mul__(self, times: int) -> "Flow":
        return replace(self, count=times * self.count, payload=times * self.payload, wire=times * self.wire)


class Traffic(TorchDispatchMode):
    """Context that counts every collective of this rank, including those of backwards and of sharded parameters.

    Code that is compiled inside this context runs uncompiled.

    Args:
        layout: names the axes.
        tell: receives each call before it runs: its traffic, the number of its ranks, and the tensors of its payload.

    Raises:
        ForgeError: torch has a collective operator for which there is no rule.
    """

    def __init__(self, layout: Layout, tell: Callable[[Flow, int, list[torch.Tensor]], None] | None = None) -> None:
        super().__init__()
        self._layout, self._tell = layout, tell
        self._flows: dict[tuple[str, str], Flow] = {}
        self._largest: dict[tuple[str, str], int] = {}
        self._axes: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor of tensors, such as DTensor: operators on its parts are counted
        if func.namespace in NAMESPACES:
            for flow, ranks, sent in self._counted(func, args, kwargs or {}):
                key = flow.axis, flow.kind
                if self._tell is not None:
                    self._tell(flow, ranks, [leaf for leaf in tree_leaves(sent) if isinstance(leaf, torch.Tensor)])
                self._flows[key] = self._flows[key] + flow if key in self._flows else flow
                self._largest[key] = max(self._largest.get(key, 0), flow.payload)
        elif _takes_a_group(func):
            written = python_body(func)
            if written is None:
                raise ForgeError(f"{func} takes a group of ranks but is not written in Python, so its traffic cannot be counted")
            with self:  # counts the collectives inside the custom operator
                return written(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def flows(self) -> list[Flow]:
        """Returns all traffic so far, summed by axis and kind, sorted."""
        return [self._flows[key] for key in sorted(self._flows)]

    def largest(self, kind: str) -> int:
        """Returns the bytes of the largest payload of one call of a kind."""
        return max((size for (_, named), size in self._largest.items() if named == kind), default=0)

    def _counted(self, func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Flow, int, Any]]:
        name = schema(func).name.partition("::")[2]
        if name in SILENT:
            return
        arguments = dict(zip((argument.name for argument in schema(func).arguments), args, strict=False)) | kwargs
        handle = arguments["process_group"] if "process_group" in arguments else arguments.get("group_name")
        if handle is None or (name not in KINDS and name != "batch_p2p_ops"):
            raise ForgeError(f"there is no rule to count the traffic of {func}; add it to forge_parallel.dryrun.traffic.KINDS")
        group = _group(handle)
        axis = self._axis(group)
        if name == "batch_p2p_ops":
            for way, tensor in zip(arguments["op_list"], arguments["tensors"], strict=True):
                yield Flow(axis, KINDS[way], 1, _bytes(tensor), _bytes(tensor)), group.size(), tensor
            return
        kind = KINDS[name]
        payload = _payload(kind, arguments, group.size())
        flow = Flow(axis, kind, 1, payload, _wire(kind, arguments, payload, group))
        yield flow, group.size(), _named(arguments, "input", "tensor")

    def _axis(self, group: dist.ProcessGroup) -> str:
        if group.group_name not in self._axes:
            ranks = dist.get_process_group_ranks(group)
            named = EXPERTS.get(group.group_desc) if len(ranks) > 1 else None
            self._axes[group.group_name] = named or axis_of(ranks, self._layout)
        return self._axes[group.group_name]


@cache
def _takes_a_group(func: Any) -> bool:
    return any(argument.name in GROUPS for argument in schema(func).arguments)


def axis_of(ranks: list[int], layout: Layout) -> str:
    """Returns the axes along which `ranks` differ, joined by `+`; `world` for all ranks of several axes.

    Axes of experts are named if the group does not belong to the dense view; a group of neither view is named by its size.
    """
    if len(ranks) == 1:
        return "self"
    if len(ranks) == layout.world and sum(layout.size(axis) > 1 for axis in DENSE) > 1:
        return "world"
    places = [layout.coordinates(rank) for rank in ranks]
    for view in (DENSE, SPARSE):
        varying = [axis for axis in view if len({place[axis] for place in places}) > 1]
        if prod(layout.size(axis) for axis in varying) == len(ranks):
            return "+".join(varying)
    return f"{len(ranks)} ranks"


def _group(handle: Any) -> dist.ProcessGroup:
    if isinstance(handle, str):
        return resolve_process_group(handle)  # type: ignore[arg-type]  # a named string in newer versions
    return handle if isinstance(handle, dist.ProcessGroup) else dist.ProcessGroup.unbox(handle)


def _bytes(tensors: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))


def _named(given: Mapping[str, Any], *prefixes: str) -> list[Any]:
    """Returns the arguments with tensors; names of split sizes have the same prefixes."""
    return [value for name, value in given.items() if name.startswith(prefixes) and not name.endswith("sizes")]


def _payload(kind: str, given: Mapping[str, Any], size: int) -> int:
    if kind == "all_gather":
        gathered = _named(given, "out")
        return _bytes(gathered) if gathered else size * _bytes(_named(given, "input"))
    return _bytes(_named(given, "input", "tensor"))


def _wire(kind: str, given: Mapping[str, Any], payload: int, group: dist.ProcessGroup) -> int:
    size = group.size()
    if size == 1:
        return 0
    if kind == "all_gather":
        return payload - _bytes(_named(given, "input"))
    if kind == "reduce_scatter":
        scattered = _named(given, "out")
        return payload - (_bytes(scattered) if scattered else payload // size)
    if kind == "all_to_all":
        return payload - _kept(given, payload, group)
    return wire_of(kind, payload, size)


SCATTERED = frozenset({"all_gather", "reduce_scatter", "all_to_all"})
"""Kinds whose wire depends on more than the payload."""


def wire_of(kind: str, payload: int, ranks: int) -> int:
    """Returns the wire of a call of a kind that is not in `SCATTERED`, see `Flow`."""
    if ranks == 1:
        return 0
    return -(-2 * payload * (ranks - 1) // ranks) if kind == "all_reduce" else payload


def _kept(given: Mapping[str, Any], payload: int, group: dist.ProcessGroup) -> int:
    """Returns the bytes of an all-to-all that a rank sends to itself."""
    rank = group.rank()
    if isinstance(given.get("input_tensors"), list):
        return _bytes(given["input_tensors"][rank])
    splits = given.get("input_split_sizes") or []
    return payload * int(splits[rank]) // max(1, int(sum(splits))) if splits else payload // group.size()
