"""Lists every parameter of a rank after all transforms: the classes around it, its placement and its bytes; uses fake tensors."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_core.protocols.model import Context, Transform
from forge_parallel.dryrun.estimate import Workload
from forge_parallel.dryrun.fake_world import Weightless, fake_world
from forge_parallel.dryrun.memory import held
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.plan import Order, Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.stages import apply
from forge_parallel.placement.topology import Topology
from forge_parallel.torch_private import detect_fake_mode


@dataclass(frozen=True)
class ParameterPlacement:
    """One parameter of one rank.

    Attributes:
        name: global name.
        classes: classes of the modules around it, outermost first.
        shape: global shape.
        local: shape of the rank's part.
        placements: one per mesh axis, such as `("dp_shard: Shard(dim=0)",)`; empty if the rank holds the whole parameter.
        dtype: such as `float32`.
        bytes: memory including the padding of uneven shards; 0 for a tied copy, which shares memory with its original.
    """

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    local: tuple[int, ...]
    placements: tuple[str, ...]
    dtype: str
    bytes: int


def parameters_of(workload: Workload, plan: Plan, rank: int = 0) -> list[ParameterPlacement]:
    """Returns the parameters of `rank` after all transforms. Runs no step, so it takes a second instead of many as `dry_run`
    does.

    Raises:
        ForgeError: an error of a real run; or this process belongs to a process group.
    """
    with fake_world(plan.layout.world, rank), ExitStack() as stack:
        topology = Topology.of(plan.layout, torch.device("cpu"))
        without_memory = Plan.of([*plan.transforms, _WithoutMemory(stack)], plan.layout, plan.pipeline)
        model = realize(
            apply(Blueprint.of(workload.build), workload.settings),
            without_memory,
            topology,
            _unfilled,
            workload.compute,
            workload.state,
        )
        return list(_placed(model))


@dataclass(frozen=True)
class _WithoutMemory(Transform):
    """The last transform of the plan: meshes need real integers, and from here on tensors are fake."""

    stack: ExitStack
    name: str = "without_memory"
    order: int = max(Order) + 1
    axes: frozenset[str] = field(default_factory=frozenset)

    def apply(self, part: nn.Module, context: Context) -> nn.Module:
        if detect_fake_mode() is None:  # otherwise another part of the pipeline has entered it
            self.stack.enter_context(Weightless())
        return part


def _unfilled(_: ParallelModel) -> None:
    """Replaces the initialization of weights; does nothing."""


def _placed(model: ParallelModel) -> Iterable[ParameterPlacement]:
    seen: set[int] = set()
    for part in model.parts:
        classes = {path: type(module).__name__ for path, module in part.named_modules()}
        for name, parameter in part.named_parameters(remove_duplicate=False):
            first = id(parameter) not in seen
            seen.add(id(parameter))
            yield ParameterPlacement(
                name,
                tuple(classes[path] for path in _around(name)),
                tuple(parameter.shape),
                tuple(parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape),
                _placements(parameter),
                str(parameter.dtype).removeprefix("torch."),
                held([parameter]) if first else 0,
            )


def _around(name: str) -> list[str]:
    """Returns the paths of the modules around a parameter: `""`, `blocks`, `blocks.0`, ..."""
    steps = name.split(".")[:-1]
    return [".".join(steps[:count]) for count in range(len(steps) + 1)]


def _placements(parameter: nn.Parameter) -> tuple[str, ...]:
    if not isinstance(parameter, DTensor):
        return ()
    names = parameter.device_mesh.mesh_dim_names or tuple(f"axis {number}" for number in range(parameter.device_mesh.ndim))
    return tuple(f"{axis}: {placement}" for axis, placement in zip(names, parameter.placements, strict=True))
