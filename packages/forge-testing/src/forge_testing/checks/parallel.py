"""Checks of transforms, pipeline schedules and optimizers."""

import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_core.layout import Layout
from forge_core.protocols.model import NamedTensor, Optimizer
from forge_core.specs import Group, Init, Specs, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from forge_parallel.placement.topology import Topology


class TransformChecks:
    """Checks for every transform: its place in a plan, the axes that it claims, and the declarations of its options."""

    @staticmethod
    def check_place(component: Any) -> None:
        """Checks that `name`, `order`, `axes`, `needs` and `plane` have valid values."""
        from forge_core.features import Plane
        from forge_core.layout import SIZES
        from forge_parallel.model.plan import Order

        transform = component.build()
        axes, needs = frozenset(transform.axes), frozenset(transform.needs)
        assert isinstance(transform.name, str) and transform.name, f"name is {transform.name!r}; use the name of recipes"
        assert transform.order in list(Order), f"order is {transform.order!r}; it is one of {', '.join(Order.__members__)}"
        assert axes <= set(SIZES), f"claims axes {', '.join(sorted(axes - set(SIZES)))}; axes are {', '.join(SIZES)}"
        planes = typing.get_args(Plane)
        assert transform.plane in planes, f"plane is {transform.plane!r}; planes are {', '.join(planes)}"
        assert transform.name not in needs, "needs itself"
        assert not axes or transform.plane == "layout", f"claims axes, so its plane is 'layout', not {transform.plane!r}"

    @staticmethod
    def check_options(component: Any) -> None:
        """Checks that every option declares for all values whether they must be proven (Feature) or why not (Neutral)."""
        from forge_core.features import undeclared

        silent = [f"{name} ({', '.join(map(repr, values))})" if values else name for name, values in undeclared(type(component))]
        assert not silent, f"options declare neither Feature nor Neutral: {'; '.join(silent)}"


RANKS = (2, 3, 4)
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12)


class PipelineScheduleChecks:
    """Checks for every pipeline schedule: it does all of the work, each action once and on its rank, without a deadlock."""

    check_options = TransformChecks.check_options

    @staticmethod
    def check_order(component: Any) -> None:
        """Checks that each stage runs one forward and one backward per micro-batch, whole or in two halves, on its rank."""
        from forge_parallel.pipeline.schedules import placement

        for schedule, ranks, count in _accepted(component):
            where, table = placement(schedule, ranks), schedule.actions(ranks, count)
            given = f"{count} micro-batches on {ranks} ranks"
            assert len(table) == ranks, f"actions({ranks}, {count}) are of {len(table)} ranks"
            wrong = [(rank, action) for rank, order in enumerate(table) for action in order if where[action.stage] != rank]
            assert not wrong, f"{given}: rank {wrong[0][0]} does {wrong[0][1]}, a stage of rank {where[wrong[0][1].stage]}"
            done = Counter((kind, stage, index) for order in table for kind, stage, index in order)
            for stage in range(len(where)):
                for index in range(count):
                    forward, whole, inputs, weights = (done[kind, stage, index] for kind in "FBIW")
                    found = f"{given}: stage {stage} runs micro-batch {index}"
                    assert forward == 1, f"{found} forward {forward} times"
                    assert (whole, inputs, weights) in ((1, 0, 0), (0, 1, 1)), (
                        f"{found} backward {whole} times whole, {inputs} times for inputs and {weights} times for weights"
                    )
            assert schedule.splits_backward or not any(done[key] for key in done if key[0] in "IW"), (
                "splits backward, but splits_backward is False"
            )

    @staticmethod
    def check_ends(component: Any) -> None:
        """Checks that the schedule does not deadlock, and that its bubble is not larger than GPipe's."""
        from forge_parallel.pipeline.schedules import placement, simulate

        for schedule, ranks, count in _accepted(component):
            bubble = simulate(schedule.actions(ranks, count), len(placement(schedule, ranks))).bubble
            limit = (ranks - 1) / count + 1e-9  # that of GPipe (Narayanan et al., 2021)
            assert bubble <= limit, f"{count} micro-batches on {ranks} ranks: bubble {bubble:.2f}, more than GPipe's {limit:.2f}"

    @staticmethod
    def check_refusals(component: Any) -> None:
        """Checks that `refusal` accepts one micro-batch per stage, and refuses zero micro-batches."""
        schedule = component.build()
        for ranks in RANKS:
            count = ranks * schedule.stages_per_rank
            why = schedule.refusal(ranks, count)
            assert why is None, f"refuses one micro-batch per stage, {count} on {ranks} ranks: {why}"
            assert schedule.refusal(ranks, 0), f"does not refuse 0 micro-batches on {ranks} ranks"


def _accepted(component: Any) -> list[tuple[Any, int, int]]:
    schedule = component.build()
    cases = [(schedule, ranks, count) for ranks in RANKS for count in MICRO_BATCHES if schedule.refusal(ranks, count) is None]
    assert cases, f"refuses {MICRO_BATCHES} micro-batches on {RANKS} ranks"
    return cases


"""(shape, group) of the test parameters; those with three dimensions are stacked matrices."""
CUTS = ((0, 5, 5, 9, 12), (0, 2, 4, 4, 9), (0, 3, 3, 7, 7), (0, 1, 1, 2, 3), (0, 0, 1, 3, 3))
"""Boundaries at which each parameter's first dimension is split for four ranks; some ranks get nothing."""
TOLERANCE = 1e-12
"""In fp64, relative to the largest element; torch's fused kernels round the end of a vector differently than its middle."""
STEPS = 4


@dataclass(frozen=True)
class Held:
    """A model with only the test parameters."""

    tensors: "Mapping[str, Tensor]"

    def trainable(self) -> list[NamedTensor]:
        return [NamedTensor(name, tensor, SHAPES[name][1]) for name, tensor in self.tensors.items()]

    @property
    def specs(self) -> Specs:
        described = {
            name: TensorSpec((None,) * len(shape), Init("zeros"), group, stacked=len(shape) > 2)
            for name, (shape, group) in SHAPES.items()
        }
        return Specs(described, {}, (), {})

    @property
    def topology(self) -> "Topology":
        import torch

        from forge_parallel.placement.topology import Topology

        return Topology(Layout(), torch.device("cpu"))


class OptimizerChecks:
    """Checks for every optimizer: a skipped step keeps every bit, a resume is exact, and sharded tensors are supported."""

    @staticmethod
    def check_skip(component: Any) -> None:
        """Checks that no bit of weights and state changes if `skip` is 1, even with infinite gradients."""
        import torch

        held, optimizer = _made(component, _drawn(0))
        start = {name: tensor.detach().clone() for name, tensor in held.items()}
        _step(held, optimizer, _drawn(1), 0)
        still = [name for name, tensor in held.items() if torch.equal(start[name], tensor.detach())]
        assert not still, f"a step with skip = 0 does not change {', '.join(still)}"
        every = _state(optimizer) | held
        before = {name: tensor.detach().clone() for name, tensor in every.items()}
        for tensor in held.values():
            tensor.grad = torch.full_like(tensor, torch.nan)
        optimizer.step(torch.ones(()))
        changed = [name for name, tensor in every.items() if not torch.equal(_bits(before[name]), _bits(tensor))]
        assert not changed, f"a step with skip = 1 changes {', '.join(changed)}"

    @staticmethod
    def check_zero_grad(component: Any) -> None:
        """Checks that `zero_grad` leaves no gradient to which the next step would add."""
        held, optimizer = _made(component, _drawn(0))
        _step(held, optimizer, _drawn(1), 0)
        left = [name for name, tensor in held.items() if tensor.grad is not None and bool(tensor.grad.any())]
        assert not left, f"zero_grad leaves a gradient of {', '.join(left)}"

    @staticmethod
    def check_decay(component: Any) -> None:
        """Checks that embeddings, norms and biases are not decayed: without a gradient they do not change."""
        import torch

        start = _drawn(0)
        held, optimizer = _made(component, start)
        for step in range(STEPS):
            _step(held, optimizer, {name: torch.zeros_like(tensor) for name, tensor in start.items()}, step)
        moved = [
            name
            for name, tensor in held.items()
            if SHAPES[name][1] in ("embedding", "vector") and not torch.equal(start[name], tensor.detach())
        ]
        assert not moved, f"steps without a gradient move {', '.join(moved)}, which weight decay is not for"

    @staticmethod
    def check_factor(component: Any) -> None:
        """Checks that `set_factor` multiplies the peak rate: with 0 nothing changes, and earlier factors have no effect."""
        import torch

        made = [_made(component, _drawn(0)) for _ in range(3)]
        for (held, optimizer), factors in zip(made, ((0.5, 0.0), (0.5,), (0.25, 0.5)), strict=True):
            for factor in factors:
                optimizer.set_factor(factor)
            _give(held, _drawn(1))
            optimizer.step(torch.zeros(()))
        (still, _), (once, _), (twice, _) = made
        moved = [name for name, tensor in _drawn(0).items() if not torch.equal(tensor, still[name].detach())]
        assert not moved, f"with set_factor(0) a step moves {', '.join(moved)}"
        differ = [name for name, tensor in once.items() if not torch.equal(tensor.detach(), twice[name].detach())]
        assert not differ, f"set_factor(0.5) depends on the factor before it: {', '.join(differ)} move at another rate"

    @staticmethod
    def check_resume(component: Any) -> None:
        """Checks that weights and `state()` are complete: an optimizer restored from both continues bit for bit."""
        import torch

        held, optimizer = _made(component, _drawn(0))
        for step in range(STEPS):
            _step(held, optimizer, _drawn(1 + step), step)
        resumed, other = _made(component, {name: tensor.detach() for name, tensor in held.items()})
        saved, empty = _state(optimizer), _state(other)
        assert set(saved) == set(empty), f"state() has other tensors after {STEPS} steps: {set(saved) ^ set(empty)}"
        for name, tensor in empty.items():
            tensor.detach().copy_(saved[name].detach())
        for step in range(STEPS, 2 * STEPS):
            for tensors, made in ((held, optimizer), (resumed, other)):
                _step(tensors, made, _drawn(1 + step), step)
            differ = [name for name, tensor in held.items() if not torch.equal(_bits(tensor), _bits(resumed[name]))]
            assert not differ, (
                f"step {step - STEPS + 1} after a resume moves {', '.join(differ)} otherwise; state() is incomplete"
            )

    @staticmethod
    def check_parts(component: Any) -> None:
        """Checks that an optimizer that declares `elementwise` or `blocks` updates shards of four ranks like whole tensors."""
        claim = getattr(component, "shards", None)
        if claim not in ("elementwise", "blocks"):
            return
        import torch

        start, ranks = _drawn(0), len(CUTS[0]) - 1
        whole, optimizer = _made(component, start)
        parts = [_made(component, _part(start, rank)) for rank in range(ranks)]
        for step in range(STEPS):
            gradient = _drawn(1 + step)
            _step(whole, optimizer, gradient, step)
            for rank, (held, made) in enumerate(parts):
                _step(held, made, _part(gradient, rank), step)
            for name, tensor in whole.items():
                together = torch.cat([held[name].detach() for held, _ in parts])
                error = float((together - tensor.detach()).abs().max() / tensor.detach().abs().max())
                assert error <= TOLERANCE, (
                    f"says {claim!r}, but step {step + 1} of {name} in parts differs from that of the whole by {error:.1e}"
                )


SHAPES: "dict[str, tuple[tuple[int, ...], Group]]" = {
    "a.weight": ((12, 10), "matrix"),
    "table.weight": ((9, 4), "embedding"),
    "norm.weight": ((7,), "vector"),
    "experts.weight": ((3, 5, 4), "matrix"),
    "choice.weight": ((3, 4), "router"),
}


def _drawn(seed: int) -> "dict[str, Tensor]":
    import torch

    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, (shape, _) in SHAPES.items()}


def _made(component: Any, tensors: "Mapping[str, Tensor]") -> "tuple[dict[str, Tensor], Optimizer]":
    import torch

    held: dict[str, Tensor] = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in tensors.items()}
    return held, component.build(Held(held))


def _give(held: "Mapping[str, Tensor]", gradient: "Mapping[str, Tensor]") -> None:
    for name, tensor in held.items():
        tensor.grad = gradient[name].clone()


def _step(held: "Mapping[str, Tensor]", optimizer: Optimizer, gradient: "Mapping[str, Tensor]", step: int) -> None:
    import torch

    _give(held, gradient)
    optimizer.set_factor(1.0 / (step + 1))
    optimizer.step(torch.zeros(()))
    optimizer.zero_grad()


def _part(tensors: "Mapping[str, Tensor]", rank: int) -> "dict[str, Tensor]":
    return {name: tensor[cuts[rank] : cuts[rank + 1]] for (name, tensor), cuts in zip(tensors.items(), CUTS, strict=True)}


def _state(optimizer: Optimizer) -> "dict[str, Tensor]":
    return {f"{key} of {name}": tensor for key, tensors in optimizer.state().items() for name, tensor in tensors.items()}


def _bits(tensor: "Tensor") -> "Tensor":
    """Returns the bits of a tensor, so that -0 differs from 0 and NaN equals itself."""
    import torch

    return tensor.detach().contiguous().view(-1).view(torch.uint8)
