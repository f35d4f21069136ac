"""`realize`: turns a blueprint and a plan into a trainable model; there is no other way to create one.

Transforms are applied to the blueprint on the meta device, in the order of the plan. Only then is memory allocated and every
tensor initialized exactly once. No transform can be applied later.

Initial weights are a function of (seed, global name), the same in every layout on one type of device. `forge_core.specs` defines
the random stream of every element. A rank draws only the blocks that overlap its shard; the full
tensor never exists. (torch's CPU generator keeps only 32 bits of a seed, too few for the blocks of a large model.)
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_core.errors import PlanError
from forge_core.specs import BLOCK, Init, Specs, TensorSpec, device_seed, key_of, philox, row_name
from forge_parallel import accelerator
from forge_parallel.model.parallel_model import DTYPES, Context, ParallelModel
from forge_parallel.model.plan import Plan
from forge_parallel.pipeline import stages
from forge_parallel.pipeline.stages import StageSplit
from forge_parallel.placement.boxes import Box, local_box
from forge_parallel.placement.shares import stacks
from forge_parallel.placement.topology import Topology


@dataclass(frozen=True)
class Blueprint:
    """A model on the meta device and its specs."""

    module: nn.Module
    specs: Specs

    @classmethod
    def of(cls, build: Callable[[], nn.Module]) -> "Blueprint":
        """Calls `build` on the meta device.

        Raises:
            PlanError: the model has no `specs()`, the specs do not match its tensors, or the builder allocated memory.
        """
        with torch.device("meta"):
            module = build()
        if not callable(getattr(module, "specs", None)):
            raise PlanError(f"{type(module).__name__} has no specs(); add a method specs() -> forge_core.specs.Specs")
        specs = module.specs()  # type: ignore[operator]
        _agree(module, specs)
        return cls(module, specs)


def _agree(module: nn.Module, specs: Specs) -> None:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if off_meta := sorted(name for name, tensor in tensors.items() if not tensor.is_meta):
        raise PlanError(f"the builder allocated memory for {', '.join(off_meta)}; create tensors without `device`")
    if missing := sorted(tensors.keys() - specs.tensors.keys()):
        raise PlanError(f"{type(module).__name__}.specs() lacks {', '.join(missing)}; add a TensorSpec for each to Specs.tensors")
    if unknown := sorted(specs.tensors.keys() - tensors.keys()):
        raise PlanError(f"specs().tensors names tensors that the model does not have: {', '.join(unknown)}; remove them")
    for name, tensor in tensors.items():
        if len(specs.tensors[name].dims) != tensor.dim():
            raise PlanError(
                f"{name} has {tensor.dim()} dimensions, but its spec names {len(specs.tensors[name].dims)}; correct it"
            )
        spec = specs.tensors[name]
        if spec.fused and sum(spec.fused) != (rows := tensor.shape[spec.stacked]):
            fused = " + ".join(map(str, spec.fused))
            raise PlanError(f"{name} has {rows} rows, but its spec fuses matrices of {fused} rows; correct it")
    if (ties := _ties(module)) != dict(specs.ties):
        raise PlanError(f"the model ties parameters {ties}, but its specs().ties are {dict(specs.ties)}; correct them")
    paths = dict(module.named_modules())
    if lost := sorted(path for path in specs.blocks if path not in paths):
        raise PlanError(f"specs().blocks names modules that the model does not have: {', '.join(lost)}; remove them")


def _ties(module: nn.Module) -> dict[str, str]:
    """Returns {name of each repeated parameter: the name under which it appears first}."""
    first: dict[int, str] = {}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first.setdefault(id(p), name) != name}


def _tie(part: nn.Module, specs: Specs) -> None:
    """Ties parameters again, because `to_empty` allocates memory for each of them."""
    for copy, original in specs.ties.items():
        path, _, slot = copy.rpartition(".")
        module, _, name = original.rpartition(".")
        part.get_submodule(path)._parameters[slot] = part.get_submodule(module)._parameters[name]


def _allocate(part: nn.Module, parameters: torch.device, buffers: torch.device) -> None:
    """Allocates memory for parameters and buffers of `part` on their devices."""
    part.to_empty(device=parameters)
    if parameters != buffers:
        for module in part.modules():
            for slot, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[slot] = torch.empty_like(buffer, device=buffers)


def _experts_are_kept(part: nn.Module, specs: Specs, topology: Topology) -> None:
    """Refuses plans in which no transform sums the gradients of experts over ranks that see different tokens."""
    layout = topology.layout
    for path in stacks(specs) if layout.efsdp * layout.ep * layout.etp > 1 else ():
        for name, parameter in part.get_submodule(path).named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                raise PlanError(f"no transform sums the gradients of {path}.{name} over ranks; add [transforms.shard]")


Restore = Callable[[ParallelModel], None]
"""Fills every tensor of a model from another source, such as a checkpoint."""


def realize(
    blueprint: Blueprint,
    plan: Plan,
    topology: Topology,
    source: int | Restore,
    compute: str = "fp32",
    state: str = "fp32",
    average: bool = False,
) -> ParallelModel:
    """Applies the plan, allocates memory and initializes all tensors.

    Args:
        blueprint: consumed; its module becomes the model's part, or is split into parts if the plan has a pipeline.
        plan: plan for the layout of `topology`.
        topology: this rank's coordinates and process groups.
        source: seed of the initial weights, or a function that restores the weights.
        compute: dtype of forward and backward: `bf16`, `fp32` or `fp64`.
        state: dtype of parameters, gradients and optimizer state: `fp32` or `fp64`.
        average: whether gradients are averaged over data ranks instead of summed, for loops that compute a mean on each rank.

    Raises:
        PlanError: the plan is for another layout, or a tensor has no spec.
    """
    if plan.layout != topology.layout:
        raise PlanError(f"the plan is for layout {plan.layout}, but the topology for {topology.layout}; use the same layout")
    whole = blueprint.module.to(DTYPES[state])
    shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}
    described, cut = [(whole, blueprint.specs)], None
    if plan.pipeline is not None:
        cut = StageSplit.of(whole, blueprint.specs, plan.pipeline, plan.layout.pp, topology.coordinates["pp"])
        described = [cut.part(whole, stage) for stage in cut.local]
        for part, specs in described:
            _agree(part, specs)
    if stacks(blueprint.specs):
        topology.open_for_experts()
    device = topology.device
    for transform in plan.transforms:
        device = transform.parameter_device(device)
    parts, contexts = [], []
    for part, specs in described:
        context = Context(specs, topology, DTYPES[compute], DTYPES[state], blueprint.specs, average)
        for transform in plan.transforms:
            part = transform.apply(part, context)
        _experts_are_kept(part, specs, topology)
        _allocate(part, device, topology.device)
        _tie(part, specs)
        parts.append(part)
        contexts.append(context)
    model = ParallelModel(tuple(parts), tuple(contexts), blueprint.specs, shapes, plan, topology, DTYPES[compute], cut)
    if cut is not None:
        stages.check(cut, model.everything, shapes, topology)
    if isinstance(source, int):
        initialize(model, source)
    else:
        source(model)
    if cut is not None:
        stages.refresh(cut, model.everything, topology)
    return model


def initialize(model: ParallelModel, seed: int, names: Collection[str] | None = None) -> None:
    """Initializes every parameter and buffer once, as its spec says; with `names`, only those."""
    chosen = None if names is None else frozenset(names)
    with torch.no_grad():
        for name, tensor in _all_tensors(model):
            if chosen is not None and name not in chosen:
                continue
            fill(local_box(tensor), _spec(model, name), name, seed, model.topology.device)


def _all_tensors(model: ParallelModel) -> list[tuple[str, torch.Tensor]]:
    """Returns all local tensors, non-persistent buffers included, since `to_empty` leaves these uninitialized as well."""
    copies = model.cut.copies if model.cut is not None else frozenset()
    every = (named for part in model.parts for named in (*part.named_parameters(), *part.named_buffers()))
    return [(name, tensor) for name, tensor in every if name not in copies]


def _spec(model: ParallelModel, name: str) -> TensorSpec:
    if name not in model.specs.tensors:
        raise PlanError(
            f"a transform has added {name}, which is not in the model's specs(); transforms must keep the names of tensors"
        )
    return model.specs.tensors[name]


SLAB = 1 << 20
"""Number of elements drawn at a time; limits the temporary memory to a few megabytes."""

Draw = Callable[[int, int], torch.Tensor]
"""(first, last) flat index -> fp32 samples for [first, last), of a standard normal or uniform in [-1, 1)."""
Values = Callable[[torch.Tensor], torch.Tensor]
"""Samples -> initial values (`Init.of`)."""


def fill(box: Box, spec: TensorSpec, name: str, seed: int, device: torch.device | None = None) -> None:
    """Fills `box.local` according to `spec.init`, in fp32, rounded to the tensor's dtype.

    `device` is the device whose random stream is used, if it differs from that of `box.local`.
    """
    if spec.stacked:
        for row in range(box.local.shape[0]):
            part = Box(box.shape[1:], box.offset[1:], box.local[row])
            _fill(part, spec.init, row_name(name, box.offset[0] + row), seed, device)
    else:
        _fill(box, spec.init, name, seed, device)


def _fill(box: Box, init: Init, name: str, seed: int, device: torch.device | None) -> None:
    if init.drawn:
        draw = _stream(seed, name, device or box.local.device, init.kind != "normal")
        _scatter(box.local, box.shape, box.offset, 0, init.of, draw)
    else:
        box.local.fill_(1.0 if init.kind == "ones" else 0.0)


def _scatter(local: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...], base: int, values: Values, draw: Draw) -> None:
    """Fills `local`, the box at `offset` in a tensor of `shape` whose first element has flat index `base`."""
    if local.numel() == 0:
        return
    if local.dim() == 0:
        local.copy_(values(draw(base, base + 1)[0]))
        return
    width = prod(shape[1:])
    if width > SLAB:
        for row in range(local.shape[0]):
            _scatter(local[row], shape[1:], offset[1:], base + (offset[0] + row) * width, values, draw)
        return
    inner = tuple(slice(start, start + size) for start, size in zip(offset[1:], local.shape[1:], strict=True))
    step = max(1, SLAB // width)
    for row in range(0, local.shape[0], step):
        rows = min(step, local.shape[0] - row)
        first = base + (offset[0] + row) * width
        drawn = draw(first, first + rows * width).view(rows, *shape[1:])
        local[row : row + rows].copy_(values(drawn[:, *inner]))


def _stream(seed: int, name: str, device: torch.device, uniform: bool = False) -> Draw:
    key = key_of(seed, name)

    def cpu(block: int, count: int) -> torch.Tensor:
        generator = np.random.Generator(np.random.Philox(**philox(key, block)))  # type: ignore[arg-type]
        if uniform:
            return torch.from_numpy(generator.random(count, dtype=np.float32)).mul_(2).sub_(1)
        return torch.from_numpy(generator.standard_normal(count, dtype=np.float32))

    def cuda(block: int, _: int) -> torch.Tensor:  # always a whole block: its first values depend on how many are drawn
        generator = torch.Generator(device).manual_seed(device_seed(key, block))
        values = torch.empty(BLOCK, device=device, dtype=torch.float32)
        return values.uniform_(-1, 1, generator=generator) if uniform else values.normal_(generator=generator)

    draw_block = cuda if accelerator.draws(device) else cpu

    def draw(first: int, last: int) -> torch.Tensor:
        start = first // BLOCK
        blocks = [draw_block(block, min(BLOCK, last - block * BLOCK)) for block in range(start, (last - 1) // BLOCK + 1)]
        return torch.cat(blocks)[first - start * BLOCK : last - start * BLOCK]

    return draw
