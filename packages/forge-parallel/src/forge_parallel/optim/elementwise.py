"""Optimizers whose update of an element depends on that element alone: one mechanism, to which each brings its rule.

Numbers are computed in the format of the parameters, and of bf16 ones in fp32, then rounded stochastically (`rounding`): what a
single step cannot show is kept on average.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forge_core.protocols.model import TrainableModel
from forge_parallel.optim.rounding import CHUNK, regions
from forge_parallel.optim.decay import decay_of
from forge_parallel.optim.rounding import flat_index, key_of, noise, rounded
from forge_parallel.placement.boxes import local_box
from forge_parallel.transforms.compiler import require_compiler

Counts = Mapping[str, Tensor]
"""By name a number for each parameter, (parameters,) on the device."""


class UpdateRule(NamedTuple):
    """What one optimizer does.

    Attributes:
        states: names of what is kept for each element.
        update: (weight, states, gradient, numbers) -> new weight and states, in one tuple. All have the shape of the weight but
            `numbers`: those of `numbers` below, for this parameter.
        numbers: (counts after this step, learning rate) -> further arguments of `update`, each (parameters,) fp64.
        counts: what is kept for each parameter besides `step`, by name with its dtype; zeros at first.
        advance: (counts before, learning rate) -> counts after a step. `step`, int64, is counted by itself.
        copied: of the states, those that begin as the weight; others begin as zeros.
    """

    states: tuple[str, ...]
    update: Callable[[Tensor, Sequence[Tensor], Tensor, Sequence[Tensor]], tuple[Tensor, ...]]
    numbers: Callable[[Counts, Tensor], Sequence[Tensor]]
    counts: Mapping[str, torch.dtype] = {}
    advance: Callable[[Counts, Tensor], Counts] = lambda counts, rate: counts  # noqa: ARG005
    copied: frozenset[str] = frozenset()


class Kept(Protocol):
    """States that are kept in another form than they are computed in."""

    def zeros(self, state: str, name: str, tensor: Tensor) -> Tensor:
        """Before the first step, for a parameter of this name: rows (all dimensions but the last) are the parameter's."""
        ...

    def kernel(self, rule: UpdateRule, device: torch.device) -> Callable[..., None]:
        """As `_kernel` makes it."""
        ...


class _Part(NamedTuple):
    """What is updated by one call: a region of a parameter's box, its place in the global tensor (`regions`), and the
    keys of the noise of the weight and of each state. The latter two are int64 on the device."""

    region: tuple[slice, ...]
    place: Tensor
    keys: Tensor


class ElementwiseOptimizer:
    """Updates `model.trainable()` by a rule; implements `forge_core.protocols.model.Optimizer`.

    On an accelerator a parameter is one compiled kernel, which makes its random bits too. A CPU works through it in chunks.
    All that a step needs is on the device before it: the host waits for nothing. A parameter without a gradient stays as it is.

    Args:
        model: whose parameters are updated.
        rule: how.
        lr: the peak rate.
        weight_decay: of what is decayed.
        kept: how states are kept; None: as they are, or rounded to bf16 as the parameters are.
    """

    def __init__(
        self, model: TrainableModel, rule: UpdateRule, lr: float, weight_decay: float, kept: "Kept | None" = None
    ) -> None:
        self._named = list(model.trainable())
        self._rule, self._peak, self.lr = rule, lr, lr
        self._device = self._named[0].tensor.device if self._named else torch.device("cpu")
        # What a kernel gets has the format that it computes in: GPUs have few units for fp64.
        self._format = torch.promote_types(self._named[0].tensor.dtype, torch.float32) if self._named else torch.float32
        zeros = _as_the_parameter if kept is None else kept.zeros
        self._states = {state: {name: zeros(state, name, tensor) for name, tensor, _ in self._named} for state in rule.states}
        for state in rule.copied:
            for name, tensor, _ in self._named:
                local_box(self._states[state][name]).local.copy_(local_box(tensor).local)
        # One count for each parameter: one that is frozen at first begins later than others.
        kinds = {"step": torch.int64, **rule.counts}
        self._counts = {key: torch.zeros(len(self._named), dtype=kind, device=self._device) for key, kind in kinds.items()}
        decays = [decay_of(group, weight_decay) for _, _, group in self._named]
        self._decays = torch.tensor(decays, dtype=torch.float64, device=self._device)
        fused = self._device.type != "cpu"
        self._parts = {
            name: list(_parts(name, tensor, rule.states, None if fused else CHUNK)) for name, tensor, _ in self._named
        }
        require_compiler(self._device, "the update of this optimizer")
        kernel = _kernel(rule) if kept is None else kept.kernel(rule, self._device)
        self._update: Callable[..., None] = torch.compile(kernel, dynamic=True, fullgraph=True) if fused else kernel

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:
        """One update; where `skip` is 1 nothing changes, the counts included."""
        if not self._parts:
            return
        # Tensors, so that no rate is compiled in; filled by a kernel, because a copy from the host would be waited for.
        rate = torch.full((), self.lr, dtype=torch.float64, device=self._device)
        taken = torch.full((), True, device=self._device) if skip is None else (skip == 0).to(self._device)
        after = dict(self._rule.advance(self._counts, rate)) | {"step": self._counts["step"] + 1}
        for key, count in self._counts.items():
            count.copy_(torch.where(taken, after[key], count))
        exact = [rate.expand_as(self._decays), self._decays, *self._rule.numbers(self._counts, rate)]
        numbers = [number.to(self._format) for number in exact]
        for index, (name, tensor, _) in enumerate(self._named):
            if tensor.grad is None:
                continue
            held = [local_box(each).local for each in (tensor, *(self._states[s][name] for s in self._rule.states), tensor.grad)]
            mine = [number[index] for number in numbers]
            for region, place, keys in self._parts[name]:
                *values, slope = (each[region] for each in held)
                self._update(values, slope, mine, place, keys, self._counts["step"][index], taken)

    def shorten(self) -> None:
        """From here on a step updates one part of one parameter of each shape: all a dry run needs, as others take the same
        memory, one after another."""
        first = {local_box(tensor).local.shape: name for name, tensor, _ in reversed(self._named)}
        self._parts = {name: parts[:1] if name in first.values() else [] for name, parts in self._parts.items()}

    def set_factor(self, factor: float) -> None:
        """Sets the learning rate to `factor` times its peak."""
        self.lr = self._peak * factor

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for _, tensor, _ in self._named:
            tensor.grad = None

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The states of the rule (as the parameter) and its counts (scalars), `step` among them, by global name."""
        return {key: dict(zip(self._parts, counts, strict=True)) for key, counts in self._counts.items()} | self._states


def _as_the_parameter(state: str, name: str, tensor: Tensor) -> Tensor:  # noqa: ARG001 (as `Kept.zeros`)
    return torch.zeros_like(tensor)


def _parts(name: str, tensor: Tensor, states: Sequence[str], elements: int | None) -> Iterator[_Part]:
    box = local_box(tensor)
    keys = torch.tensor([key_of(name, state) for state in ("weight", *states)], device=box.local.device)
    for region, place in regions(box, elements):
        yield _Part(region, torch.tensor(place, device=box.local.device), keys)


def _kernel(rule: UpdateRule) -> Callable[..., None]:
    """Changes weight and states in place where `taken`; bf16 ones are rounded once, each with other noise."""

    def update(
        values: Sequence[Tensor],
        slope: Tensor,
        numbers: Sequence[Tensor],
        place: Tensor,
        keys: Tensor,
        step: Tensor,
        taken: Tensor,
    ) -> None:
        low = values[0].dtype == torch.bfloat16
        wide = torch.float32 if low else values[0].dtype
        weight, *states = (value.to(wide) for value in values)
        found = rule.update(weight, states, slope.to(wide), numbers)
        index = flat_index(weight.shape, place) if low else place
        for number, (held, value) in enumerate(zip(values, found, strict=True)):
            new = rounded(value, noise(index, keys[number], step)) if low else value
            held.copy_(torch.where(taken, new, held))

    return update
