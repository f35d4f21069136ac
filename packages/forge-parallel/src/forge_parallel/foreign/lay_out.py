"""A foreign module laid out over ranks, once it is known what to cut: what `parallelize` and its verification share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.specs import Specs
from forge_parallel import accelerator
from forge_parallel.build.parallel_model import ParallelModel
from forge_parallel.build.plan import Order, Plan
from forge_parallel.build.precision import DTYPES
from forge_parallel.build.realize import Blueprint, Restore, realize
from forge_parallel.components.pipeline import OneForwardOneBackward
from forge_parallel.foreign.blocks import Seen, find_blocks, refuse_blocks, refuse_changes, watch
from forge_parallel.foreign.describe import describe
from forge_parallel.foreign.example import Example, example_for, guessed
from forge_parallel.foreign.following import follow
from forge_parallel.foreign.parallelized import ParallelizedModule
from forge_parallel.foreign.staged import stage
from forge_parallel.foreign.styles import rules_of
from forge_parallel.foreign.weights import Skeleton, of_builder, of_module, refuse_narrow
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.placement.topology import Topology
from forge_parallel.tensor.rules import Rules
from forge_parallel.tensor.transform import TensorParallel
from forge_parallel.torch_private import BatchNorm
from forge_parallel.transforms.shard import FullyShard


def refuse_axes(layout: Layout) -> None:
    """
    Raises:
        PlanError: the layout has an axis along which foreign modules cannot be laid out.
    """
    for axis in ("cp", "ep", "etp"):
        if layout.size(axis) > 1:
            raise PlanError(
                f"parallelize: {axis} = {layout.size(axis)} is not supported for foreign modules; use dp, hsdp, tp and pp"
            )


def lay_out(
    source: nn.Module | Callable[[], nn.Module],
    layout: Layout,
    transforms: Iterable[Any] = (),
    *,
    tp_plan: Mapping[str, str] | None = None,
    blocks: Sequence[str] | None = None,
    pipeline: Pipeline | None = None,
    device: torch.device | str | None = None,
    compute: str = "fp32",
    state: str = "fp32",
    seed: int = 0,
    example: Example | None = None,
) -> ParallelizedModule:
    """Collective: see `parallelize`.

    Raises:
        PlanError: what cannot be laid out, by name.
        LayoutError: the layout has another number of ranks than are running.
    """
    refuse_axes(layout)
    place = torch.device(device) if device is not None else accelerator.current()
    topology = Topology.of(layout, place)
    skeleton = of_module(source, place) if isinstance(source, nn.Module) else of_builder(source, seed)
    prepare(skeleton.module)
    refuse_narrow(skeleton, DTYPES[compute])
    _lie_in_order(skeleton.module)
    chosen = _transforms(skeleton, layout, transforms, tp_plan, example)
    if layout.data > 1:
        refuse_batch_statistics(skeleton.module)
    recomputes = any(one.phase == Order.RECOMPUTE for one in chosen)
    seen = watch(skeleton.module, example) if layout.data > 1 or layout.pp > 1 or recomputes else None
    specs = describe(skeleton.module, _blocks(skeleton.module, layout, chosen, blocks, seen))
    if layout.pp > 1:
        on_input(skeleton.module, example, lambda given: stage(skeleton.module, list(specs.blocks), given))
        specs = skeleton.module.specs()  # type: ignore[operator]
        staged = (*specs.blocks, *specs.exit)
        refuse_changes(skeleton.module, staged, seen, "a stage of a pipeline takes the gradient of what it is handed")
        pipeline = pipeline or Pipeline(OneForwardOneBackward().build())
    plan = Plan.of(chosen, layout, pipeline)
    hollow = skeleton.hollow()

    def realized(module: nn.Module, fill: Restore) -> ParallelModel:
        model = realize(Blueprint(module, specs), plan, topology, fill, compute, state, average=True)
        if compute != state:
            for part in model.parts:
                if not isinstance(part, FSDPModule):  # which casts by itself
                    part.register_forward_pre_hook(partial(_must_be_cast, model.compute))
        return model

    again = _copied(hollow)
    return ParallelizedModule(realized(hollow, skeleton.fill), lambda fill: realized(deepcopy(again()), fill))


def _lie_in_order(module: nn.Module) -> None:
    """FSDP takes parameters only whose elements lie in memory in the order of their indices. Tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for slot, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_contiguous():
                part._parameters[slot] = made.setdefault(
                    id(parameter), nn.Parameter(parameter.detach().contiguous(), parameter.requires_grad)
                )


def _blocks(
    module: nn.Module, layout: Layout, transforms: Iterable[Any], given: Sequence[str] | None, seen: Seen | None
) -> Sequence[str]:
    """The blocks in the order of their use. Without any, the whole module is sharded as one."""
    sharded = layout.data > 1
    blocks = find_blocks(module, seen) if given is None else given
    refuse_blocks(module, blocks, seen, sharded and layout.pp == 1)
    needing = [one.name for one in transforms if one.phase in (Order.RECOMPUTE, Order.COMPILE)]
    needing += ["pp"] if layout.pp > 1 else []
    if needing and not blocks:
        raise PlanError(
            f"parallelize: {needing[0]} works on blocks, and there is no list of two or more modules of one class to take as "
            "such; give their paths in the order of their use, blocks=[...]"
        )
    if sharded:
        refuse_changes(module, blocks, seen, "FSDP2 watches a block's inputs for the end of its backward")
    if any(one.phase == Order.RECOMPUTE for one in transforms):
        refuse_changes(module, blocks, seen, "recomputation calls a block again with its inputs", later=True)
    return blocks


def on_input(module: nn.Module, example: Example | None, follows: Callable[[Example], Any]) -> Any:
    """What `follows` gives for the example, or for a guess: then a refusal says so, if a forward failed."""
    if example is not None:
        return follows(example)
    guess = example_for(module)
    try:
        return follows(guess)
    except PlanError as refusal:
        if refusal.__cause__ is None:
            raise
        raise PlanError(f"{refusal}; {guessed(module, guess)}") from refusal.__cause__


def _copied(hollow: nn.Module) -> Callable[[], nn.Module]:
    """Gives a copy of a module that is about to be laid out: it has no memory now, and its classes are its own.

    Raises:
        PlanError: when it is asked for a module that cannot be copied.
    """
    try:
        copy = deepcopy(hollow)
    except Exception as error:  # noqa: BLE001 (whatever a module holds, and only a copy needs it)
        cause = error

        def refuse() -> nn.Module:
            raise PlanError(f"deepcopy: {type(hollow).__name__} cannot be copied: {cause}") from cause

        return refuse
    return lambda: copy


def _transforms(
    skeleton: Skeleton, layout: Layout, given: Iterable[Any], tp_plan: Mapping[str, str] | None, example: Example | None
) -> list[Any]:
    built = [one.build() if callable(getattr(one, "build", None)) else one for one in given]
    names = {transform.name for transform in built}
    if layout.dp_shard * layout.dp_replicate > 1 and "shard" not in names:
        built.append(FullyShard())
    if layout.tp > 1 and "tensor" not in names:
        plan = tp_plan if tp_plan is not None else getattr(skeleton.module, "_tp_plan", None)
        if not plan:
            raise PlanError(
                f"parallelize: tp = {layout.tp} needs a plan of what to cut, such as "
                "tp_plan={'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}"
            )
        rules = rules_of(skeleton.module, plan)
        found = on_input(skeleton.module, example, lambda given: follow(skeleton.module, rules, given, layout.tp))
        rules = replace(rules, summed=rules.summed | found)
        built.append(_PlannedTensor(sequence_parallel=False, planned=rules))
    return built


@dataclass(frozen=True, kw_only=True)
class _PlannedTensor(TensorParallel):
    """Cuts what a `tp_plan` says."""

    planned: Rules

    def rules(self, specs: Specs, tp: int) -> Rules:
        return self.planned


def prepare(module: nn.Module) -> None:
    """A transformers model in training must not fill its key-value cache: recomputation would fill it twice."""
    config = getattr(module, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]


def refuse_batch_statistics(module: nn.Module) -> None:
    """Data ranks would each keep the statistics of their rows, and go apart."""
    for path, part in module.named_modules():
        if isinstance(part, BatchNorm) and part.track_running_stats and not isinstance(part, nn.SyncBatchNorm):
            raise PlanError(
                f"parallelize: {path} ({type(part).__name__}) keeps running statistics, and each data rank would keep those of "
                "its rows only; use SyncBatchNorm, track_running_stats=False or another norm, or one data rank"
            )


def _must_be_cast(compute: torch.dtype, module: nn.Module, _: Any) -> None:
    held = {slot.dtype for part in module.modules() for slot in part._parameters.values() if slot is not None}
    if any(dtype.is_floating_point and dtype != compute for dtype in held):
        raise PlanError(
            f"parallelize: on one data rank parameters are cast to {compute} for the span of a forward and its backward; write "
            "`with model.computing():` around both, or use model.step"
        )
