"""What sharding has to choose between, in bytes of a rank, from the shapes of a model: cheap enough for every start.

A dry run is closer, and takes a minute where this takes a second. This errs upwards: parameters, gradients and optimizer state
are exact but for padding and copies, with two moments for each parameter, as AdamW has; of activations it counts what enters
and what leaves each matrix of a block, also where several share what enters. Experts have an even load.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import nn

from forge_core.layout import Layout
from forge_core.specs import Dim, Specs
from forge_parallel.model.parallel_model import DTYPES
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import Action
from forge_parallel.pipeline.stages import StageSplit
from forge_parallel.placement.shares import CUT
from forge_parallel.transforms.shard_choice import Needs

MOMENTS = 2
"""Tensors of optimizer state for each parameter."""


class Described(Protocol):
    """A whole model on the meta device with its description, such as a blueprint."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def specs(self) -> Specs: ...


@dataclass(frozen=True)
class Load:
    """What a rank works on, and how.

    Attributes:
        tokens: of a micro-batch, in whole rows.
        micro_batches: of a step.
        top_k: experts that a token goes to.
        compute, state: `bf16`, `fp32` or `fp64`.
        recompute: `full` keeps a block's input, `selective` what its matrices make, too; None keeps all.
        every: recompute in every n-th block.
        offload: shards lie on the host.
    """

    tokens: int
    micro_batches: int
    top_k: int = 1
    compute: str = "bf16"
    state: str = "fp32"
    recompute: str | None = None
    every: int = 1
    offload: bool = False


@dataclass
class _Unit:
    """What is gathered at once: its elements on a rank before and after they are sharded, and numbers of a token that enter and
    leave its matrices."""

    whole: int = 0
    shard: int = 0
    entering: float = 0.0
    leaving: float = 0.0


def needs(described: Described, layout: Layout, load: Load, pipeline: Pipeline | None = None) -> Needs:
    """Of the pipeline's rank that holds most.

    Raises:
        PlanError: the pipeline cannot be cut; see `Cut.of`.
    """
    if pipeline is None or layout.pp == 1:
        return _of_rank(_units(described, layout, load.top_k), described.specs, layout, load, in_flight=1.0)
    cut = StageSplit.of(described.module, described.specs, pipeline, layout.pp, 0)
    found = []
    for rank, order in enumerate(pipeline.schedule.actions(layout.pp, load.micro_batches)):
        stages = [paths for stage, paths in enumerate(cut.stages) if cut.placement[stage] == rank]
        within = tuple(f"{path}." for paths in stages for path in paths)
        units = _units(described, layout, load.top_k, within)
        found.append(_of_rank(units, described.specs, layout, load, in_flight=most_open(order) / len(stages)))
    return max(found, key=lambda one: one.lasting + one.activations + one.gradients)


def most_open(order: Sequence[Action]) -> int:
    """Forwards of a rank's stages whose backward is not over, at most; the half for inputs leaves what the other needs."""
    now = most = 0
    for action in order:
        now += {"F": 1, "I": 0}.get(action.kind, -1)
        most = max(most, now)
    return most


def _of_rank(units: dict[str, _Unit], specs: Specs, layout: Layout, load: Load, in_flight: float) -> Needs:
    compute, state = DTYPES[load.compute], DTYPES[load.state]
    summed = torch.promote_types(state, torch.float32) if compute == torch.bfloat16 else compute
    blocks = [units[path] for path in specs.blocks if path in units]
    rest = units.get("", _Unit())
    largest = sorted((unit.whole for unit in (rest, *blocks)), reverse=True)
    width = specs.units.get("embed", 0) / layout.tp
    kept = sum(_kept(unit, width, load, index) for index, unit in enumerate(blocks))
    again = max((unit.entering + unit.leaving for unit in blocks), default=0.0) if load.recompute else 0.0
    shards = sum(unit.shard for unit in units.values())
    return Needs(
        lasting=0 if load.offload else shards * state.itemsize * (2 + MOMENTS),
        activations=int(load.tokens // layout.cp * compute.itemsize * (in_flight * kept + again)),
        # What is outside of blocks stays gathered; a block comes while another works; a gradient is cast to be summed.
        passing=(rest.whole + sum(largest[:2])) * compute.itemsize + largest[0] * (compute.itemsize + summed.itemsize),
        gradients=sum(unit.whole for unit in units.values()) * summed.itemsize,
        weights=sum(unit.whole for unit in blocks) * compute.itemsize,
        micro_batches=load.micro_batches,
        pipelined=layout.pp > 1,
    )


def _kept(unit: _Unit, width: float, load: Load, index: int) -> float:
    """Numbers of a token that a block keeps: the stream before and after attention, and what matrices take and make."""
    if load.recompute is None or index % load.every:
        return 2 * width + unit.entering + unit.leaving
    return width if load.recompute == "full" else 2 * width + unit.leaving


def _units(described: Described, layout: Layout, top_k: int, within: tuple[str, ...] = ("",)) -> dict[str, _Unit]:
    """By path of a block, and "" for what is outside of them: the tensors of some modules, each once."""
    specs, seen, units = described.specs, set[int](), dict[str, _Unit]()
    for name, parameter in described.module.named_parameters(remove_duplicate=False):
        if not name.startswith(within) or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        dims = specs.tensors[specs.ties.get(name, name)].dims
        stacked = "expert" in dims
        unit = units.setdefault(next((path for path in specs.blocks if name.startswith(f"{path}.")), ""), _Unit())
        whole = prod(-(-size // _pieces(dim, stacked, layout)) for size, dim in zip(parameter.shape, dims, strict=True))
        unit.whole += whole
        unit.shard += -(-whole // (layout.size("efsdp") if stacked else layout.dp_shard * layout.cp))
        if len(dims) - stacked == 2:
            taken = top_k if stacked else 1
            unit.leaving += taken * _features(parameter.shape[-2], dims[-2], stacked, layout)
            unit.entering += taken * _features(parameter.shape[-1], dims[-1], stacked, layout)
    return units


def _pieces(dim: Dim, stacked: bool, layout: Layout) -> int:
    """Into how many parts tensor and expert parallelism cut a dimension."""
    if stacked:
        return {"expert": layout.ep, "ffn": layout.etp}.get(str(dim), 1)
    return layout.tp if dim in CUT else 1


def _features(size: int, dim: Dim, stacked: bool, layout: Layout) -> float:
    """Numbers of a token on one of tp ranks, which share either tokens or features; those of etp see each other's tokens."""
    return size / (1 if stacked and layout.etp > 1 and dim == "embed" else layout.tp)
