"""The least that a step must exchange, in closed form, from a model's shapes and the policy that was chosen.

What is counted may exceed it: uneven shards are padded, and code may send more than it needs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from forge_parallel.boxes import chunk
from forge_parallel.model import ParallelModel
from forge_parallel.topology import SHARD_AND_CP
from forge_parallel.traffic import axis_of
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import Shard
from forge_parallel.transforms.tensor import Tensor

DATA = ("dp_replicate", "dp_shard", SHARD_AND_CP)


@dataclass(frozen=True)
class Bound:
    """Bytes that must leave every rank in a step, see `Flow.wire`."""

    axis: str
    kind: str
    wire: int


def bounds(model: ParallelModel, micro_batches: int, tokens: int) -> Iterator[Bound]:
    """For each axis and kind of collective for which a closed form is known; `tokens` are those of a micro-batch.

    None is, yet, for a pipeline, for experts, and for what ranks that share rows (`cp`) exchange in attention.
    """
    layout = model.topology.layout
    if layout.pp * layout.ep > 1:
        return
    for transform in model.plan.transforms:
        # Where only rows are shared, parameters and attention exchange over the same ranks, and are counted as one.
        if isinstance(transform, Shard) and (layout.cp == 1 or layout.dp_shard > 1):
            yield from _sharded(model, transform, micro_batches)
        elif isinstance(transform, Tensor):
            yield from _split(model, transform, micro_batches, tokens)


def _split(model: ParallelModel, split: Tensor, micro_batches: int, tokens: int) -> Iterator[Bound]:
    """Tensor and sequence parallelism over n ranks (Korthikanti et al., 2022).

    The stream is gathered before each pair of cut matrices and scattered after it, in the forward and, the other way round,
    in the backward; the table of the embedding scatters once, the head gathers once. Where recomputation keeps nothing, a block
    does its forward's exchanges again, and no closed form is given.
    """
    size = model.topology.layout.tp
    again = any(isinstance(transform, Recompute) and transform.keep is None for transform in model.plan.transforms)
    if size == 1 or not split.sequence or again:
        return
    pairs = sum(spec.dims in (("embed", "heads"), ("embed", "ffn")) for spec in model.specs.tensors.values())
    stream = tokens * model.specs.units["embed"] * model.compute.itemsize
    for kind in ("all_gather", "reduce_scatter"):
        yield Bound("tp", kind, micro_batches * (2 * pairs + 2) * _share(stream, size))


def _sharded(model: ParallelModel, shard: Shard, micro_batches: int) -> Iterator[Bound]:
    """Fully sharded data parallelism over n ranks, with r replicas (Rajbhandari et al., 2020; Zhao et al., 2023).

    Per micro-batch, blocks are gathered for the forward and, when they are freed after it, again for the backward; what
    is outside of blocks is gathered once. Gradients are scattered, and the shards summed over replicas, once a step or once
    a micro-batch.
    """
    layout, blocks = model.topology.layout, tuple(f"{path}." for path in model.specs.blocks)
    size = layout.dp_shard * layout.cp
    if size * layout.dp_replicate == 1:
        return
    gathers = 1 if shard.reshard is False else 2
    gathered = scattered = 0
    for name, tensor, _ in model.trainable():
        elements = _elements(tensor)
        gathered += elements * (gathers if name.startswith(blocks) else 1)
        scattered += elements
    context = model.contexts[0]
    wide = torch.promote_types(context.state, torch.float32) if context.compute == torch.bfloat16 else context.state
    times = micro_batches if shard.reduce == "each" else 1
    if size > 1:
        mesh = model.topology.data_mesh
        axis = axis_of(dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1)), layout)
        yield Bound(axis, "all_gather", micro_batches * _share(gathered * context.compute.itemsize, size))
        yield Bound(axis, "reduce_scatter", times * _share(scattered * wide.itemsize, size))
    if layout.dp_replicate > 1:
        summed = 2 * _share(scattered * wide.itemsize, layout.dp_replicate)
        yield Bound("dp_replicate", "all_reduce", times * (-(-summed // size)))


def _share(payload: int, size: int) -> int:
    """(n - 1) / n of the payload."""
    return -(-payload * (size - 1) // size)


def _elements(tensor: torch.Tensor) -> int:
    """Elements of the box that the data ranks share: what tensor parallelism left of the global tensor."""
    extent = list(tensor.shape)
    if isinstance(tensor, DTensor):
        mesh, at = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert at is not None and mesh.mesh_dim_names is not None, "a tensor lives on the mesh of its rank"
        for index, (name, placement) in enumerate(zip(mesh.mesh_dim_names, tensor.placements, strict=True)):
            if name not in DATA and not isinstance(placement, Replicate):
                dim = placement.dim  # type: ignore[attr-defined]  # every other way to hold a tensor is a cut
                extent[dim] = chunk(extent[dim], mesh.size(index), at[index])[1]
    return prod(extent)
