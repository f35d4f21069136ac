"""The least that a step must exchange, in closed form, from a model's shapes and the policy that was chosen.

What is counted may exceed it: uneven shards are padded, and code may send more than it needs.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from forge_parallel.dryrun.traffic import axis_of
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.placement.shares import chunk
from forge_parallel.placement.topology import SHARD_AND_CP
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel

DATA = ("dp_replicate", "dp_shard", SHARD_AND_CP)


@dataclass(frozen=True)
class Bound:
    """Bytes that must leave every rank in a step, see `Flow.wire`."""

    axis: str
    kind: str
    wire: int


def bounds(model: ParallelModel, micro_batches: int, tokens: int, documents: bool = False) -> Iterator[Bound]:
    """For each axis and kind of collective for which a closed form is known.

    None is, yet, for a pipeline, for experts, and for an attention that makes keys and values in another way than from the
    residual stream, head by head.

    Args:
        model: on one rank.
        micro_batches: per step.
        tokens: of a micro-batch, in whole rows.
        documents: rows hold several documents, of which ranks that share a row tell each other.
    """
    layout = model.topology.layout
    if layout.pp * layout.ep > 1:
        return
    found: list[Bound] = []
    open_end = False
    for transform in model.plan.transforms:
        if isinstance(transform, FullyShard):
            found += _sharded(model, transform, micro_batches)
        elif isinstance(transform, TensorParallel):
            found += _split(model, transform, micro_batches, tokens // layout.cp)
        elif isinstance(transform, ContextParallel) and layout.cp > 1:
            attended = list(_attended(model, transform, micro_batches, tokens, documents))
            found += attended
            open_end = not attended
    # Where only rows are shared, parameters and attention exchange over the same ranks, and are counted as one.
    total = Counter[tuple[str, str]]()
    for bound in found:
        total[bound.axis, bound.kind] += bound.wire
    yield from (Bound(*key, wire) for key, wire in total.items() if not (open_end and key[0] == "cp"))


def _attended(
    model: ParallelModel, context: ContextParallel, micro_batches: int, tokens: int, documents: bool
) -> Iterator[Bound]:
    """Attention over n ranks that share rows: each token's keys and values have to reach every rank, and their gradients to
    come back (`all_gather`; Llama 3, 2024), the latter as sums that grow on their way (`ring`; Liu et al., 2023); or each token's
    heads the rank that works on them (`ulysses`; Jacobs et al., 2023), key-value heads as often as ranks need them.
    """
    layout, specs = model.topology.layout, model.specs
    ranks, size = layout.cp, model.compute.itemsize
    again = any(isinstance(transform, Recompute) and transform.policy == "full" for transform in model.plan.transforms)
    widths = Counter[tuple[str | None, ...]]()
    for name, spec in specs.tensors.items():
        if name.startswith(tuple(f"{path}." for path in specs.blocks)) and len(spec.dims) == 2:
            widths[spec.dims] += model.shapes[name][spec.dims[0] == "embed"] if name in model.shapes else 0
    queries, outputs, pairs = (widths[dims] for dims in (("heads", "embed"), ("embed", "heads"), ("kv_heads", "embed")))
    if again or not (queries and outputs and pairs):
        return
    heads, kv_heads = specs.units["heads"], specs.units["kv_heads"]
    held = ceil(kv_heads / layout.tp)  # key-value heads of a tp rank
    pair = pairs // kv_heads  # of one key-value head in all layers
    mine = tokens // ranks  # places of this rank
    if documents:
        yield Bound("cp", "all_gather", micro_batches * (ranks - 1) * mine * torch.int32.itemsize)
    if context.kind == "all_gather":
        for kind in ("all_gather", "all_to_all"):
            yield Bound("cp", kind, micro_batches * (ranks - 1) * mine * held * pair * size)
    elif context.kind == "ring":
        wide = torch.promote_types(model.compute, torch.float32).itemsize
        yield Bound("cp", "send", micro_batches * (ranks - 1) * mine * held * pair * (2 * size + wide))
    else:
        share = heads // layout.tp // ranks
        others = (first for rank, first in enumerate(range(0, share * ranks, share)) if rank != model.topology.coordinates["cp"])
        needed = sum(len({head * kv_heads // heads for head in range(first, first + share)}) for first in others)
        apart = (ranks - 1) * share * (queries + outputs) // heads + needed * pair
        yield Bound("cp", "all_to_all", micro_batches * 2 * mine * apart * size)


def _split(model: ParallelModel, split: TensorParallel, micro_batches: int, tokens: int) -> Iterator[Bound]:
    """Tensor and sequence parallelism over n ranks (Korthikanti et al., 2022).

    The stream is gathered before each pair of cut matrices and scattered after it, in the forward and, the other way round,
    in the backward; the table of the embedding scatters once, the head gathers once, and three numbers of each token's loss; all
    of these again for each MTP module. Where recomputation keeps nothing, a block does its forward's
    exchanges again, and no closed form is given.
    """
    size = model.topology.layout.tp
    again = any(isinstance(transform, Recompute) and transform.policy == "full" for transform in model.plan.transforms)
    if size == 1 or not split.sequence_parallel or again:
        return
    pairs = sum(spec.dims in (("embed", "heads"), ("embed", "ffn")) for spec in model.specs.tensors.values())
    stream = tokens * model.specs.units["embed"] * model.compute.itemsize
    numbers = 3 * tokens * torch.promote_types(model.compute, torch.float32).itemsize
    scored = 1 + model.specs.mtp_depth  # tokens that the head is called for
    for kind, further in (("all_gather", (size - 1) * numbers), ("reduce_scatter", 0)):
        yield Bound("tp", kind, micro_batches * (2 * (pairs + scored) * _share(stream, size) + scored * further))


def _sharded(model: ParallelModel, shard: FullyShard, micro_batches: int) -> Iterator[Bound]:
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
    for name, tensor in model.parameters_held():
        elements = _elements(tensor)
        gathered += elements * (gathers if name.startswith(blocks) else 1)
        scattered += elements * tensor.requires_grad
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
