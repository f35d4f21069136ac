"""Which values of `[transforms.shard]` to use on a device: a recommendation from bytes of memory and of traffic.

To sum gradients once a step, or to keep weights gathered from forward to backward, takes memory and saves traffic. `recommend`
estimates both for every combination of `reduce` and `reshard` and returns the one with the least traffic among those that fit
into the device; where none fits, the one with the least memory. `forge-train plan --device` prints it. A run never chooses: it
does what its recipe says.

The estimate reads the shapes of a model in about a second; a dry run takes several for each combination. Parameters,
gradients and optimizer state are exact except for padding and copies, with two moments for each parameter, as AdamW has.
Activations are what enters and leaves each matrix of a block, counted once for each matrix, also where several matrices share an
input. Experts have an even load.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, Literal, Protocol

import torch
from torch import nn

from forge_core.layout import Layout
from forge_core.specs import Dim, Specs
from forge_parallel.checks import compositions_are_proven
from forge_parallel.model.parallel_model import DTYPES
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import Action, PipelineSchedule, actions_of
from forge_parallel.pipeline.stages import StageSplit
from forge_parallel.placement.shares import CUT, apart
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify.proofs import ParallelJob

Reduce = Literal["last", "each"]

USABLE = 0.9
"""Part of a device's memory that may be planned for. The rest is for what the estimate does not count: the device's context,
buffers of collectives, fragmentation, and the estimate's own error."""

MOMENTS = 2
"""Tensors of optimizer state for each parameter."""


@dataclass(frozen=True)
class Option:
    """Values of `transforms.shard`, with the bytes that the fullest rank holds at most and exchanges in a step."""

    reduce: Reduce
    reshard: bool | None
    memory: int
    traffic: int


@dataclass(frozen=True)
class Recommendation:
    """The values of `[transforms.shard]` for a recipe on one kind of device.

    Attributes:
        best: the recommended values.
        proven: every combination that a test proves with the rest of the recipe, the recommended one included.
        unproven: combinations that no test proves with the rest of the recipe.
        memory: bytes of the device.
    """

    best: Option
    proven: tuple[Option, ...]
    unproven: tuple[Option, ...]
    memory: int

    @property
    def usable(self) -> int:
        """Bytes of the device that may be planned for."""
        return int(USABLE * self.memory)

    @property
    def fits(self) -> bool:
        """Whether the recommended values fit into the device."""
        return self.best.memory <= self.usable

    def as_json(self) -> dict[str, Any]:
        """Plain data, bytes as integers."""
        options = {name: [vars(option) for option in getattr(self, name)] for name in ("proven", "unproven")}
        return {"best": vars(self.best), **options, "memory": self.memory, "usable": self.usable, "fits": self.fits}


def keys_of(option: Option) -> tuple[str, str]:
    """The values as lines of `[transforms.shard]`. An unset `reshard` is written out, so that it replaces another value."""
    reshard = '"none"' if option.reshard is None else str(option.reshard).lower()
    return f'reduce = "{option.reduce}"', f"reshard = {reshard}"


class Described(Protocol):
    """A whole model on the meta device with its description, such as a blueprint."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def specs(self) -> Specs: ...


def recommend(job: ParallelJob, layout: Layout, describe: Callable[[], Described], memory: int) -> Recommendation | None:
    """The values of `[transforms.shard]` with the least traffic that fit into a device of `memory` bytes.

    Only values that a test proves with the rest of the recipe are recommended.

    Args:
        job: has passed its checks.
        layout: where the job runs.
        describe: makes the model on the meta device; called only if there is something to recommend.
        memory: of a device, in bytes.

    Returns:
        None where `transforms.shard` does nothing in this layout, or where no combination is proven.

    Raises:
        PlanError: the pipeline cannot be cut.
    """
    shard = job.transforms.get("shard", FullyShard())
    if not isinstance(shard, FullyShard):
        return None
    described = describe()
    if layout.dp_shard * layout.dp_replicate * layout.cp == 1 and not apart(described.specs, layout) and not shard.offload:
        return None
    once = layout.pp > 1 or _micro_batches(job, layout) == 1  # both values of `reduce` do the same then
    # Unset is what a layout does anyway; the other value of `reshard` is a feature, which has to be proven.
    priced = options(_needs(job, layout, described, shard), ("last",) if once else ("last", "each"), (None, layout.pp > 1))
    proven = tuple(one for one in priced if not any(compositions_are_proven(_with(job, shard, one), layout)))
    if not proven:
        return None
    return Recommendation(choose(proven, memory), proven, tuple(one for one in priced if one not in proven), memory)


def choose(found: Sequence[Option], memory: int) -> Option:
    """The option with the least traffic of those that fit into `memory` bytes of a device; else the one with the least memory.

    Ties go to less memory, then to the first option.
    """
    if fitting := [option for option in found if option.memory <= USABLE * memory]:
        return min(fitting, key=lambda option: (option.traffic, option.memory))
    return min(found, key=lambda option: (option.memory, option.traffic))


@dataclass(frozen=True)
class Needs:
    """Bytes of the rank that holds most, and how often it exchanges.

    Attributes:
        lasting: parameters, gradients and optimizer state as they are sharded.
        activations: what forwards keep for their backwards.
        passing: what is whole for a moment in any case: the units that are gathered at once, and their gradients.
        gradients: all gradients, whole, in the format in which they are summed.
        weights: the weights of all blocks, whole, in the format in which they are gathered.
        micro_batches: of a step.
        pipelined: a pipeline reduces once a step, whatever `reduce` says, and gathers once if it keeps.
    """

    lasting: int
    activations: int
    passing: int
    gradients: int
    weights: int
    micro_batches: int
    pipelined: bool = False


def options(needs: Needs, reduces: Sequence[Reduce], reshards: Sequence[bool | None]) -> tuple[Option, ...]:
    """Every pair of these values with its price, in this order. An unset `reshard` is yes, but no in a pipeline."""
    return tuple(_priced(needs, *pair) for pair in product(reduces, reshards))


def _priced(needs: Needs, reduce: Reduce, reshard: bool | None) -> Option:
    steps = needs.micro_batches
    once = reduce == "last" or needs.pipelined
    frees = not needs.pipelined if reshard is None else reshard
    whole = needs.gradients if once and steps > 1 else 0
    gathers = 2 * steps if frees else 1 if needs.pipelined else steps
    return Option(
        reduce,
        reshard,
        memory=needs.lasting + needs.activations + needs.passing + whole + (0 if frees else needs.weights),
        traffic=gathers * needs.weights + (1 if once else steps) * needs.gradients,
    )


def _with(job: Any, shard: FullyShard, option: Option) -> Any:
    """The job with these values."""
    transforms: Mapping[str, Any] = job.transforms
    return replace(job, transforms={**transforms, "shard": replace(shard, reduce=option.reduce, reshard=option.reshard)})


def _needs(job: ParallelJob, layout: Layout, described: Described, shard: FullyShard) -> Needs:
    recompute = job.transforms.get("recompute")
    load = Load(
        tokens=job.train.micro_batch * job.data.sequence_length,
        micro_batches=_micro_batches(job, layout),
        top_k=getattr(getattr(job.model, "moe", None), "top_k", 1),
        compute=job.precision.compute,
        state=job.precision.state,
        recompute=getattr(recompute, "policy", None),
        every=getattr(recompute, "every", 1),
        offload=shard.offload,
    )
    return needs(described, layout, load, job.parallel.pipeline.build() if layout.pp > 1 else None)


def _micro_batches(job: ParallelJob, layout: Layout) -> int:
    return max(1, job.train.global_batch // (layout.data * job.train.micro_batch))


@dataclass(frozen=True)
class Load:
    """What a rank works on, and how.

    Attributes:
        tokens: of a micro-batch, in whole rows.
        micro_batches: of a step.
        top_k: experts that a token goes to.
        compute, state: `bf16`, `fp32` or `fp64`.
        recompute: `full` keeps a block's input, `selective` also the outputs of its matrices; None keeps all.
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
    """Tensors that are gathered together: their elements on a rank before and after sharding, the numbers of a token that enter
    and leave their matrices, and those that selective recomputation keeps of exchanges between tp ranks."""

    whole: int = 0
    shard: int = 0
    entering: float = 0.0
    leaving: float = 0.0
    exchanged: float = 0.0


Units = tuple[tuple[Mapping[str, "_Unit"], int], ...]
"""For each pipeline rank, its tensors by block, and the number of its stages."""


def units_of(described: Described, layout: Layout, top_k: int, pipeline: Pipeline | None = None) -> Units:
    """The tensors of each pipeline rank; a search keeps them for all layouts that cut them alike.

    Raises:
        PlanError: the pipeline cannot be cut; see `StageSplit.of`.
    """
    if pipeline is None or layout.pp == 1:
        return ((_units(described, layout, top_k), 1),)
    cut = StageSplit.of(described.module, described.specs, pipeline, layout.pp, 0)
    found = []
    for rank in range(layout.pp):
        stages = [paths for stage, paths in enumerate(cut.stages) if cut.placement[stage] == rank]
        within = tuple(f"{path}." for paths in stages for path in paths)
        found.append((_units(described, layout, top_k, within), len(stages)))
    return tuple(found)


def needs(
    described: Described, layout: Layout, load: Load, pipeline: Pipeline | None = None, units: Units | None = None
) -> Needs:
    """The bytes of the rank that holds most. `units` are those of `units_of`, if they are known.

    Raises:
        PlanError: the pipeline cannot be cut; see `StageSplit.of`.
    """
    held = units_of(described, layout, load.top_k, pipeline) if units is None else units
    if pipeline is None or layout.pp == 1:
        return _of_rank(held[0][0], described.specs, layout, load, in_flight=1.0)
    opened = _opened(pipeline.schedule, layout.pp, load.micro_batches)
    found = [
        _of_rank(own, described.specs, layout, load, in_flight=most / stages)
        for (own, stages), most in zip(held, opened, strict=True)
    ]
    return max(found, key=lambda one: one.lasting + one.activations + one.gradients)


@lru_cache(maxsize=4096)
def _opened(schedule: PipelineSchedule, ranks: int, micro_batches: int) -> tuple[int, ...]:
    """`most_open` of every pipeline rank."""
    return tuple(most_open(order) for order in actions_of(schedule, ranks, micro_batches))


def most_open(order: Sequence[Action]) -> int:
    """The largest number of forwards of a rank whose backward has not ended. The backward of the inputs alone frees nothing."""
    now = most = 0
    for action in order:
        now += {"F": 1, "I": 0}.get(action.kind, -1)
        most = max(most, now)
    return most


def _of_rank(units: Mapping[str, _Unit], specs: Specs, layout: Layout, load: Load, in_flight: float) -> Needs:
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
    return width if load.recompute == "full" else 2 * width + unit.leaving + unit.exchanged


def _units(described: Described, layout: Layout, top_k: int, within: tuple[str, ...] = ("",)) -> dict[str, _Unit]:
    """The tensors of some modules, each once, by the path of their block; the key "" holds the tensors outside of blocks."""
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
            if layout.tp > 1 and not stacked and dims[-1] in CUT and dims[-2] == "embed":
                # Of its output, a sum over ranks, 1 / tp is in `leaving`. The rest is kept, with the scattered sum and with the
                # stream that ranks gathered before.
                unit.exchanged += 2 * parameter.shape[-2]
    return units


def _pieces(dim: Dim, stacked: bool, layout: Layout) -> int:
    """Number of parts into which tensor and expert parallelism cut a dimension."""
    if stacked:
        return {"expert": layout.ep, "ffn": layout.etp}.get(str(dim), 1)
    return layout.tp if dim in CUT else 1


def _features(size: int, dim: Dim, stacked: bool, layout: Layout) -> float:
    """Numbers of a token on one of tp ranks, which share either tokens or features; those of etp see each other's tokens."""
    return size / (1 if stacked and layout.etp > 1 and dim not in CUT else layout.tp)
