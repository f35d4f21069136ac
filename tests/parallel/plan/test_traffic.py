"""Bytes of collectives, counted where they are exchanged: every kind, and the axes that groups of ranks are named by."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from forge_core.errors import ForgeError
from forge_core.layout import Layout
from forge_parallel.dryrun.traffic import KINDS, NAMESPACES, SILENT, Flow, Traffic, axis_of
from harness.pool import World


def test_every_collective_operator_of_torch_is_known() -> None:
    """A new version of torch may bring another one, which must not slip by uncounted."""
    names = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    operators = {operator for namespace, operator in names if namespace in NAMESPACES - {"symm_mem"}}
    refused = {"batch_p2p_ops", "gather_into_tensor_"}  # the latter from torch 2.15 on
    assert operators <= KINDS.keys() | SILENT | refused
    assert {"_allgather_base_", "allreduce_", "send", "all_to_all_single"} <= operators


def test_an_unknown_exchange_is_refused() -> None:
    with Traffic(Layout()), pytest.raises(ForgeError, match="there is no rule to count"):
        torch.ops.symm_mem.stream_write_value32_(torch.zeros(2, dtype=torch.int32), 0, 1)


def _exchange() -> tuple[list[Flow], int]:
    """One call of each kind between three ranks; torch's own counter counts along."""
    rank, layout = dist.get_rank(), Layout.parse("dp3")
    x = torch.full((6,), float(rank))
    with Traffic(layout) as traffic, CommDebugMode() as counts:
        dist.all_reduce(x)
        dist.all_gather([torch.empty(6) for _ in range(3)], x)
        dist.reduce_scatter(torch.empty(2), list(x.split(2)))
        dist.broadcast(x, 0)
        dist.all_to_all_single(torch.empty(6), x)
        mine, theirs = [[1, 2, 3], [2, 2, 2], [3, 2, 1]][rank], [[1, 2, 3], [2, 2, 2], [3, 2, 1]][rank]
        dist.all_to_all_single(torch.empty(6), x, theirs, mine)
        waits = [dist.isend(x, (rank + 1) % 3), dist.irecv(torch.empty(6), (rank - 1) % 3)]
        for wait in waits:
            assert wait is not None
            wait.wait()
        dist.barrier()
    return traffic.flows(), counts.get_total_counts()


def test_bytes_of_each_kind(world: World) -> None:
    size = 6 * 4
    for rank, (flows, total) in enumerate(world.run(_exchange, 3)):
        assert total == 6  # sends and receives are none of its business
        kept = size // 3 + 4 * [1, 2, 1][rank]
        assert {flow.kind: (flow.axis, flow.count, flow.payload, flow.wire) for flow in flows} == {
            "all_reduce": ("dp_shard", 1, size, 2 * size * 2 // 3),
            "all_gather": ("dp_shard", 1, 3 * size, 2 * size),
            "reduce_scatter": ("dp_shard", 1, size, size * 2 // 3),
            "broadcast": ("dp_shard", 1, size, size),
            "all_to_all": ("dp_shard", 2, 2 * size, 2 * size - kept),
            "send": ("dp_shard", 1, size, size),
            "receive": ("dp_shard", 1, size, size),
        }


@pytest.mark.parametrize(
    ("layout", "ranks", "axis"),
    [
        ("dp4", [0, 1, 2, 3], "dp_shard"),
        ("dp4", [2], "self"),
        ("dp2tp2", [0, 1, 2, 3], "world"),
        ("dp2tp2", [2, 3], "tp"),
        ("dp2tp2", [1, 3], "dp_shard"),
        ("hsdp2x2cp2", [0, 1, 2, 3], "dp_shard+cp"),
        ("pp2tp2", [1, 3], "pp"),
        ("dp4ep2", [0, 1], "ep"),
        ("dp4ep2", [0, 2], "efsdp"),
        ("dp4", [0, 3], "2 ranks"),
    ],
)
def test_a_group_is_named_by_the_axes_along_which_its_ranks_differ(layout: str, ranks: list[int], axis: str) -> None:
    if axis != "2 ranks":
        assert axis_of(ranks, Layout.parse(layout)) == axis
    else:
        assert axis_of([0, 1, 3], Layout.parse(layout)) == "3 ranks"
