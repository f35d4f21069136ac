"""Optimizers whose update of an element depends on that element only: AdamW in bf16 and Lion, in one fused kernel.

Numbers are computed in the format of the parameters. bf16 parameters are computed in fp32 and rounded stochastically: up or
down with the probability that keeps the expected value. A step of 1e-5 on a weight of 1 is far below half a unit in the last
place of bf16 and would always be rounded away; rounded stochastically it is taken once in a few hundred steps (Gupta et al.,
2015). The noise of an element is a hash of (key, step, flat index in the global tensor), so every layout draws the same noise
and nothing needs to be stored.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forge_core.protocols.model import TrainableModel
from forge_parallel.accelerator import require_compiler
from forge_parallel.optim.groups import decay_of
from forge_parallel.placement.boxes import Box, local_box

CHUNK = 1 << 22
"""Elements that are worked on at a time where operators run one by one: the extra memory is some tens of MiB for any tensor."""


def key_of(name: str, state: str) -> int:
    """A 31-bit key for one tensor's noise."""
    return int.from_bytes(blake2b(f"{state}/{name}".encode(), digest_size=4).digest(), "little") >> 1


def noise(index: torch.Tensor, key: int | torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Uniform 16-bit integers, int32, one for each flat `index` (int64). `step`, and `key` unless it is a number, are int64
    scalars on the device.

    Three rounds of the murmur3 finalizer (Appleby, 2011) over 32-bit words held in int64.
    """
    word = index & 0xFFFFFFFF
    for salt in (index >> 32, key, step):
        word = (word + salt * 0x9E3779B1) & 0xFFFFFFFF
        word = ((word ^ (word >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
        word = ((word ^ (word >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
        word = word ^ (word >> 16)
    return (word & 0xFFFF).to(torch.int32)


def rounded(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """fp32 `value` rounded to bf16 by 16 random `bits`: they are added below the last kept bit, then cut off.

    Infinities and NaN stay what they are.
    """
    cut = (value.view(torch.int32) + bits) & -65536
    return torch.where(torch.isfinite(value), cut.view(torch.float32), value).to(torch.bfloat16)


def regions(box: Box, elements: int | None) -> Iterator[tuple[tuple[slice, ...], list[int]]]:
    """Parts of a box of at most about `elements`, or all of it: each with its place, which is the flat global index of its first
    element, and of each dimension how far apart neighbors are in the global tensor."""
    shape = tuple(box.local.shape)
    if box.local.numel() == 0:
        return
    strides = [prod(box.shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * stride for start, stride in zip(box.offset, strides, strict=True))
    if not shape:
        yield (), [0]
        return
    rows = shape[0] if elements is None else max(1, elements // max(1, prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield (slice(start, min(start + rows, shape[0])),), [first + start * strides[0], *strides]


def flat_index(shape: Sequence[int], place: torch.Tensor) -> torch.Tensor:
    """Global indices of the elements of a part of this shape, int64; `place` as of `regions`, on the device."""
    index = place[0]
    for dim, size in enumerate(shape):
        places = torch.arange(size, device=place.device) * place[1 + dim]
        index = index + places.view(-1, *[1] * (len(shape) - dim - 1))
    return index


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
        self._parts = {name: list(_parts(name, tensor, rule.states, None if fused else CHUNK)) for name, tensor, _ in self._named}
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


MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw_rule(betas: tuple[float, float], eps: float) -> UpdateRule:
    """The arithmetic of Loshchilov and Hutter (2019)."""

    def numbers(counts: Counts, rate: Tensor) -> Sequence[Tensor]:  # noqa: ARG001 (every rule is given both)
        return [1 - beta ** counts["step"].double() for beta in betas]

    def update(weight: Tensor, moments: Sequence[Tensor], slope: Tensor, numbers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rate, decay, *corrections = numbers
        first = torch.lerp(moments[0], slope, 1 - betas[0])
        second = torch.lerp(moments[1], slope.square(), 1 - betas[1])
        root = (second / corrections[1]).sqrt() + eps
        return weight * (1 - rate * decay) - rate * (first / corrections[0]) / root, first, second

    return UpdateRule(MOMENTS, update, numbers)


def adamw_bf16(
    model: TrainableModel, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> ElementwiseOptimizer:
    """The optimizer, for `model.trainable()`."""
    return ElementwiseOptimizer(model, adamw_rule(betas, eps), lr, weight_decay)


def lion_rule(betas: tuple[float, float]) -> UpdateRule:
    """With gradient g, momentum m, rate lr and decay wd:

    w = (1 - lr * wd) * w - lr * sign(beta1 * m + (1 - beta1) * g)
    m = beta2 * m + (1 - beta2) * g
    """

    def update(weight: Tensor, states: Sequence[Tensor], slope: Tensor, numbers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rate, decay = numbers
        direction = torch.lerp(states[0], slope, 1 - betas[0]).sign()
        return weight * (1 - rate * decay) - rate * direction, torch.lerp(states[0], slope, 1 - betas[1])

    return UpdateRule(("momentum",), update, lambda counts, rate: ())  # noqa: ARG005


def lion(model: TrainableModel, lr: float, betas: tuple[float, float], weight_decay: float) -> ElementwiseOptimizer:
    """The optimizer, for `model.trainable()`."""
    return ElementwiseOptimizer(model, lion_rule(betas), lr, weight_decay)
