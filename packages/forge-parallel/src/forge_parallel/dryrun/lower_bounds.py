"""Lower bounds of the traffic of a step, in closed form, from a model's shapes and the chosen strategies.

Counted traffic may exceed them: uneven shards are padded, and code may send more than necessary.
"""

from collections import Counter
from collections.abc import Callable, Iterator
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
    """Bytes that every rank must send in a step, see `Flow.wire`."""

    axis: str
    kind: str
    wire: int


Times = Callable[[str], int]
"""Name of a tensor -> number of tensors of the whole model that it stands for."""


def once(_: str) -> int:
    """Returns 1: each tensor stands for itself."""
    return 1


def bounds(
    model: ParallelModel, micro_batches: int, tokens: int, documents: bool = False, times: Times = once
) -> Iterator[Bound]:
    """Yields a bound for each axis and kind of collective with a known closed form.

    None is known yet for pipelines, for experts, and for attention that does not compute keys and values from the residual stream
    head by head.

    Args:
        model: the model on one rank.
        micro_batches: per step.
        tokens: tokens of a micro-batch, in whole rows.
        documents: whether rows contain several documents, whose indices ranks that share a row exchange.
        times: see `Times`; for a model of which repeated blocks were left out.
    """
    layout = model.topology.layout
    if layout.pp * layout.ep > 1:
        return
    all_bounds: list[Bound] = []
    open_end = False
    for transform in model.plan.transforms:
        if isinstance(transform, FullyShard):
            all_bounds += _sharded(model, transform, micro_batches, times)
        elif isinstance(transform, TensorParallel):
            all_bounds += _split(model, transform, micro_batches, tokens // layout.cp, times)
        elif isinstance(transform, ContextParallel) and layout.cp > 1:
            attended = list(_attended(model, transform, micro_batches, tokens, documents, times))
            all_bounds += attended
            open_end = not attended
    # If only rows are split, parameters and attention use the same ranks and are counted together.
    total = Counter[tuple[str, str]]()
    for bound in all_bounds:
        total[bound.axis, bound.kind] += bound.wire
    yield from (Bound(*key, wire) for key, wire in total.items() if not (open_end and key[0] == "cp"))


def _attended(
    model: ParallelModel, context: ContextParallel, micro_batches: int, tokens: int, documents: bool, times: Times
) -> Iterator[Bound]:
    """Yields the bounds of attention over n ranks that share rows. Each token's keys and values must reach every rank, and their
    gradients must come back (`all_gather`; Llama 3, 2024), as partial sums in a ring (`ring`; Liu et al., 2023); or each token's
    heads must reach the rank that computes them (`ulysses`; Jacobs et al., 2023), key-value heads each rank that needs them.
    """
    layout, specs = model.topology.layout, model.specs
    ranks, size = layout.cp, model.compute.itemsize
    again = any(isinstance(transform, Recompute) and transform.policy == "full" for transform in model.plan.transforms)
    widths = Counter[tuple[str | None, ...]]()
    for name, spec in specs.tensors.items():
        if name.startswith(tuple(f"{path}." for path in specs.blocks)) and len(spec.dims) == 2:
            widths[spec.dims] += times(name) * model.shapes[name][spec.dims[0] == "embed"] if name in model.shapes else 0
    queries, outputs, pairs = (widths[dims] for dims in (("heads", "embed"), ("embed", "heads"), ("kv_heads", "embed")))
    if again or "state_heads" in specs.units or not (queries and outputs and pairs):  # no closed form with recurrent layers
        return
    heads, kv_heads = specs.units["heads"], specs.units["kv_heads"]
    held = ceil(kv_heads / layout.tp)  # key-value heads of a tp rank
    pair = pairs // kv_heads  # width of one key-value head over all layers
    mine = tokens // ranks  # positions of this rank
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
        # Rows of a gate on the output are part of its projection, but they are not sent.
        apart = (ranks - 1) * share * (min(queries, outputs) + outputs) // heads + needed * pair
        yield Bound("cp", "all_to_all", micro_batches * 2 * mine * apart * size)


def _split(model: ParallelModel, split: TensorParallel, micro_batches: int, tokens: int, times: Times) -> Iterator[Bound]:
    """Yields the bounds of tensor and sequence parallelism over n ranks (Korthikanti et al., 2022).

    The residual stream is gathered before each pair of split matrices and scattered after it in the forward, and vice versa in
    the backward. The embedding scatters once; the head gathers once, and three numbers of each token's loss; both again for each
    MTP module. With full recomputation, a block repeats the exchanges of its forward, and no closed form is given.
    """
    size = model.topology.layout.tp
    again = any(isinstance(transform, Recompute) and transform.policy == "full" for transform in model.plan.transforms)
    if size == 1 or not split.sequence_parallel or again:
        return
    last = (("embed", "heads"), ("embed", "state_heads"), ("embed", "ffn"))
    pairs = sum(times(name) for name, spec in model.specs.tensors.items() if spec.dims in last)
    stream = tokens * model.specs.units["embed"] * model.compute.itemsize
    numbers = 3 * tokens * torch.promote_types(model.compute, torch.float32).itemsize
    scored = 1 + model.specs.mtp_depth  # number of tokens for which the head computes a loss
    for kind, further in (("all_gather", (size - 1) * numbers), ("reduce_scatter", 0)):
        yield Bound("tp", kind, micro_batches * (2 * (pairs + scored) * _share(stream, size) + scored * further))


def _sharded(model: ParallelModel, shard: FullyShard, micro_batches: int, times: Times) -> Iterator[Bound]:
    """Yields the bounds of fully sharded data parallelism over n ranks, with r replicas (Rajbhandari et al., 2020; Zhao et al.,
    2023).

    Per micro-batch, blocks are gathered for the forward and, if they are freed after it, again for the backward; parameters
    outside blocks are gathered once. Gradients are scattered, and shards summed over replicas, once per step or once per
    micro-batch.
    """
    layout, blocks = model.topology.layout, tuple(f"{path}." for path in model.specs.blocks)
    size = layout.dp_shard * layout.cp
    if size * layout.dp_replicate == 1:
        return
    gathers = 1 if shard.reshard is False else 2
    gathered = scattered = 0
    for name, tensor in model.parameters_held():
        elements = times(name) * _elements(tensor)
        # Codes and scales of a quantized base are gathered as they are.
        size_of_one = model.compute.itemsize if tensor.is_floating_point() else tensor.element_size()
        gathered += elements * size_of_one * (gathers if name.startswith(blocks) else 1)
        scattered += elements * tensor.requires_grad
    context = model.contexts[0]
    wide = torch.promote_types(context.state, torch.float32) if context.compute == torch.bfloat16 else context.state
    reductions = micro_batches if shard.reduce == "each" else 1
    if size > 1:
        mesh = model.topology.data_mesh
        axis = axis_of(dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1)), layout)
        yield Bound(axis, "all_gather", micro_batches * _share(gathered, size))
        yield Bound(axis, "reduce_scatter", reductions * _share(scattered * wide.itemsize, size))
    if layout.dp_replicate > 1:
        summed = 2 * _share(scattered * wide.itemsize, layout.dp_replicate)
        yield Bound("dp_replicate", "all_reduce", reductions * (-(-summed // size)))


def _share(payload: int, size: int) -> int:
    """Returns (n - 1) / n of the payload."""
    return -(-payload * (size - 1) // size)


def _elements(tensor: torch.Tensor) -> int:
    """Returns the elements that data ranks share: those of the global tensor that tensor parallelism leaves to this rank."""
    extent = list(tensor.shape)
    if isinstance(tensor, DTensor):
        mesh, at = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert at is not None and mesh.mesh_dim_names is not None, "this rank is not in the tensor's mesh"
        for index, (name, placement) in enumerate(zip(mesh.mesh_dim_names, tensor.placements, strict=True)):
            if name not in DATA and not isinstance(placement, Replicate):
                dim = placement.dim  # type: ignore[attr-defined]  # all other placements are shards
                extent[dim] = chunk(extent[dim], mesh.size(index), at[index])[1]
    return prod(extent)
