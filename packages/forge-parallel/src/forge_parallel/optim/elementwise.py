"""Optimizers whose update of an element depends only on that element: AdamW, AdamW in bf16, and Lion.

`AdamW` uses torch's fused kernel; all its state exists from construction on, and a step can be skipped on the device. The
others share one kernel of Forge, which computes updates in the dtype of the parameters. bf16 parameters are updated in fp32 and
rounded stochastically: up or down with probabilities that preserve the expected value. A step of 1e-5 on a weight of 1 is far
below half a unit in the last place of bf16 and would always be lost by rounding to nearest; with stochastic rounding, it is
taken once in a few hundred steps (Gupta et al., 2015). The noise of an element is a hash of (key, step, flat index in the
global tensor), so it is the same in every layout, and nothing needs to be stored.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from forge_core.protocols.model import NamedTensor, TrainableModel
from forge_parallel.accelerator import require_compiler
from forge_parallel.optim.groups import DECAYED, HasTorchView, decay_of
from forge_parallel.placement.boxes import Box, local_box, local_part

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(HasTorchView):
    """Updates `model.trainable()`; implements `forge_core.protocols.model.Optimizer`.

    torch's kernel is called with the local shards instead of DTensors. The update is elementwise, so the result is the same, and
    DTensor does not have to propagate the sharding of lists of all parameters, which takes longer than the step of a small model.
    """

    def __init__(self, model: TrainableModel, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        self._named = list(model.trainable())
        self.lr = self._peak = lr
        self._betas, self._eps = betas, eps
        self._groups = [
            (weight_decay, [(name, tensor) for name, tensor, group in self._named if group in DECAYED]),
            (0.0, [(name, tensor) for name, tensor, group in self._named if group not in DECAYED]),
        ]
        like = partial(torch.zeros_like, memory_format=torch.preserve_format)
        steps = {name: torch.zeros((), dtype=torch.float32, device=tensor.device) for name, tensor, _ in self._named}
        self._state = {"step": steps} | {key: {name: like(tensor) for name, tensor, _ in self._named} for key in MOMENTS}

    @torch.no_grad()
    def step(self, skip: torch.Tensor | None = None) -> None:
        """Updates the parameters; if `skip` is 1, nothing changes, the step count included."""
        if skip is not None and self._named:
            # Otherwise torch would copy it asynchronously, and a kernel on the host would read it too early.
            skip = skip.to(self._named[0].tensor.device)
        for decay, parameters in self._groups:
            trained = [(name, tensor, tensor.grad) for name, tensor in parameters if tensor.grad is not None]
            if not trained:
                continue
            for name, tensor, gradient in trained:
                _check_placements(name, tensor, gradient)
            adamw(
                [_local(tensor) for _, tensor, _ in trained],
                [_local(gradient) for _, _, gradient in trained],
                [_local(self._state["exp_avg"][name]) for name, _, _ in trained],
                [_local(self._state["exp_avg_sq"][name]) for name, _, _ in trained],
                [],  # max_exp_avg_sqs, which only AMSGrad has
                [self._state["step"][name] for name, _, _ in trained],
                fused=True,
                found_inf=skip,  # made for gradient scaling: the kernel updates nothing if it is 1
                lr=self.lr,
                beta1=self._betas[0],
                beta2=self._betas[1],
                eps=self._eps,
                weight_decay=decay,
                amsgrad=False,
                maximize=False,
            )

    def set_factor(self, factor: float) -> None:
        """Sets the learning rate to `factor` times its peak."""
        self.lr = self._peak * factor

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for _, tensor, _ in self._named:
            tensor.grad = None

    def trained(self) -> Sequence[NamedTensor]:
        """Returns the updated parameters."""
        return self._named

    def by_parameter(self) -> Sequence[tuple[Sequence[str], torch.Tensor]]:
        """See `forge_core.protocols.model.Optimizer`."""
        return []

    def state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Returns `step` (scalar), `exp_avg` and `exp_avg_sq` (shaped like the parameter) by global name."""
        return self._state


def _local(tensor: Tensor) -> Tensor:
    """Returns the shard of a DTensor on this rank; any other tensor unchanged."""
    return local_part(tensor) if isinstance(tensor, DTensor) else tensor


def _check_placements(name: str, tensor: Tensor, gradient: Tensor) -> None:
    """Raises AssertionError if the shards of a parameter and its gradient are not the same elements."""
    ours, theirs = (each.placements if isinstance(each, DTensor) else None for each in (tensor, gradient))
    if ours != theirs:
        raise AssertionError(f"{name}: the parameter has the placements {ours}, but its gradient {theirs}")


CHUNK = 1 << 22
"""Number of elements updated at a time without a compiler; limits temporary memory to some tens of MiB."""


def key_of(name: str, state: str) -> int:
    """Returns a 31-bit key for the noise of one tensor."""
    return int.from_bytes(blake2b(f"{state}/{name}".encode(), digest_size=4).digest(), "little") >> 1


def noise(index: torch.Tensor, key: int | torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Returns uniform 16-bit integers (int32), one per flat `index` (int64). `step`, and `key` unless it is a number, are int64
    scalars on the device.

    Three rounds of the murmur3 finalizer (Appleby, 2011) over 32-bit words. Products of int32 wrap around, which is all that the
    hash needs of them; a GPU takes several times as long for products of int64.
    """
    word = index.to(torch.int32)
    for salt in (index >> 32, key, step):
        salted = salt * 0x9E3779B1
        word = word + ((salted + (1 << 31)) % (1 << 32) - (1 << 31) if isinstance(salted, int) else salted.to(torch.int32))
        word = (word ^ _shifted(word, 16)) * -0x7A143595  # 0x85EBCA6B
        word = (word ^ _shifted(word, 13)) * -0x3D4D51CB  # 0xC2B2AE35
        word = word ^ _shifted(word, 16)
    return word & 0xFFFF


def _shifted(word: torch.Tensor, places: int) -> torch.Tensor:
    """Returns int32 words shifted to the right, with zeros on the left."""
    return (word >> places) & (0xFFFFFFFF >> places)


def rounded(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Rounds fp32 `value` to bf16 with 16 random `bits`, which are added below the last bit that remains.

    Infinities and NaN stay unchanged.
    """
    cut = (value.view(torch.int32) + bits) & -65536
    return torch.where(torch.isfinite(value), cut.view(torch.float32), value).to(torch.bfloat16)


def regions(box: Box, elements: int | None) -> Iterator[tuple[tuple[slice, ...], list[int]]]:
    """Yields regions of a box with about `elements` elements at most, or the whole box, each with its place: the flat global
    index of its first element, then for each dimension the distance of neighbors in the flattened global tensor."""
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
    """Returns the flat global indices (int64) of the elements of a region of this shape; `place` as from `regions`, on the
    device."""
    index = place[0]
    for dim, size in enumerate(shape):
        places = torch.arange(size, device=place.device) * place[1 + dim]
        index = index + places.view(-1, *[1] * (len(shape) - dim - 1))
    return index


Counts = Mapping[str, Tensor]
"""Name -> one number per parameter, (parameters,) on the device."""


class UpdateRule(NamedTuple):
    """The arithmetic of an optimizer.

    Attributes:
        states: names of the states, which have one value per element.
        update: (weight, states, gradient, numbers) -> (new weight, *new states). All are shaped like the weight except `numbers`,
            the results of `numbers` below for this parameter.
        numbers: (counts after this step, learning rate) -> further arguments of `update`, each (parameters,) fp64.
        counts: name -> dtype of values per parameter besides `step`; they start at 0.
        advance: (counts before, learning rate) -> counts after a step. `step` (int64) is counted automatically.
        copied: names of the states that start as a copy of the weight; others start as zeros.
    """

    states: tuple[str, ...]
    update: Callable[[Tensor, Sequence[Tensor], Tensor, Sequence[Tensor]], tuple[Tensor, ...]]
    numbers: Callable[[Counts, Tensor], Sequence[Tensor]]
    counts: Mapping[str, torch.dtype] = {}
    advance: Callable[[Counts, Tensor], Counts] = lambda counts, rate: counts  # noqa: ARG005
    copied: frozenset[str] = frozenset()


class StateFormat(Protocol):
    """Stores states in another format than that of their computation."""

    def zeros(self, state: str, name: str, tensor: Tensor) -> Tensor:
        """Returns the initial state of the parameter `name`; its rows (all dimensions but the last) are those of the
        parameter."""
        ...

    def kernel(self, rule: UpdateRule, device: torch.device) -> Callable[..., None]:
        """Returns the update function, with the arguments of `_kernel`."""
        ...


class _Part(NamedTuple):
    """The input of one update call: a region of a parameter's box, its place in the global tensor (`regions`), and the keys of
    the noise of the weight and of each state. Place and keys are int64 on the device."""

    region: tuple[slice, ...]
    place: Tensor
    keys: Tensor


class ElementwiseOptimizer(HasTorchView):
    """Updates `model.trainable()` by a rule; implements `forge_core.protocols.model.Optimizer`.

    On an accelerator, one compiled kernel per parameter computes the update and its random bits. On a CPU, parameters are updated
    in chunks. All inputs of a step are on the device, so the host never waits. Parameters without a gradient are not changed.

    Args:
        model: its parameters are updated.
        rule: the arithmetic.
        lr: peak learning rate.
        weight_decay: decay of the parameters in decayed groups.
        kept: storage format of states; None: as computed, or rounded to bf16 like the parameters.
    """

    def __init__(
        self, model: TrainableModel, rule: UpdateRule, lr: float, weight_decay: float, kept: "StateFormat | None" = None
    ) -> None:
        self._named = list(model.trainable())
        self._rule, self._peak, self.lr = rule, lr, lr
        self._device = self._named[0].tensor.device if self._named else torch.device("cpu")
        # Kernel arguments have the dtype of the computation, because GPUs have few fp64 units.
        self._format = torch.promote_types(self._named[0].tensor.dtype, torch.float32) if self._named else torch.float32
        zeros = _as_the_parameter if kept is None else kept.zeros
        self._states = {state: {name: zeros(state, name, tensor) for name, tensor, _ in self._named} for state in rule.states}
        for state in rule.copied:
            for name, tensor, _ in self._named:
                local_box(self._states[state][name]).local.copy_(local_box(tensor).local)
        # One count per parameter, because a parameter that is frozen at first starts later than others.
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
        """Updates the parameters; if `skip` is 1, nothing changes, the counts included."""
        if not self._parts:
            return
        # A tensor, so that the rate is not compiled in; filled by a kernel, because a copy from the host would synchronize.
        rate = torch.full((), self.lr, dtype=torch.float64, device=self._device)
        taken = torch.full((), True, device=self._device) if skip is None else (skip == 0).to(self._device)
        after = dict(self._rule.advance(self._counts, rate)) | {"step": self._counts["step"] + 1}
        for key, count in self._counts.items():
            count.copy_(torch.where(taken, after[key], count))
        exact = [torch.full_like(self._decays, self.lr), self._decays, *self._rule.numbers(self._counts, rate)]
        numbers = [number.to(self._format) for number in exact]
        for index, (name, tensor, _) in enumerate(self._named):
            if tensor.grad is None:
                continue
            states = [self._states[state][name] for state in self._rule.states]
            local = [local_box(each).local for each in (tensor, *states, tensor.grad)]
            own_numbers = [number[index] for number in numbers]
            for region, place, keys in self._parts[name]:
                *values, grad = (each[region] for each in local)
                self._update(values, grad, own_numbers, place, keys, self._counts["step"][index], taken)

    def shorten(self) -> None:
        """Limits further steps to one part of one parameter per shape. That suffices for a dry run, since the other parameters
        are updated one after another and need the same memory."""
        first = {local_box(tensor).local.shape: name for name, tensor, _ in reversed(self._named)}
        self._parts = {name: parts[:1] if name in first.values() else [] for name, parts in self._parts.items()}

    def by_parameter(self) -> Sequence[tuple[Sequence[str], Tensor]]:
        """See `forge_core.protocols.model.Optimizer`."""
        return [([name for name, _, _ in self._named], self._decays)]

    def set_factor(self, factor: float) -> None:
        """Sets the learning rate to `factor` times its peak."""
        self.lr = self._peak * factor

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for _, tensor, _ in self._named:
            tensor.grad = None

    def trained(self) -> Sequence[NamedTensor]:
        """Returns the updated parameters."""
        return self._named

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the rule's states (shaped like the parameter) and counts (scalars), including `step`, by global name."""
        return {key: dict(zip(self._parts, counts, strict=True)) for key, counts in self._counts.items()} | self._states


def _as_the_parameter(state: str, name: str, tensor: Tensor) -> Tensor:  # noqa: ARG001 (as `Kept.zeros`)
    return torch.zeros_like(tensor)


def _parts(name: str, tensor: Tensor, states: Sequence[str], elements: int | None) -> Iterator[_Part]:
    box = local_box(tensor)
    keys = torch.tensor([key_of(name, state) for state in ("weight", *states)], device=box.local.device)
    for region, place in regions(box, elements):
        yield _Part(region, torch.tensor(place, device=box.local.device), keys)


def _kernel(rule: UpdateRule) -> Callable[..., None]:
    """Returns the function that updates weight and states in place where `taken`; in bf16 each is rounded with its own noise."""

    def update(
        values: Sequence[Tensor],
        grad: Tensor,
        numbers: Sequence[Tensor],
        place: Tensor,
        keys: Tensor,
        step: Tensor,
        taken: Tensor,
    ) -> None:
        low = values[0].dtype == torch.bfloat16
        wide = torch.float32 if low else values[0].dtype
        weight, *states = (value.to(wide) for value in values)
        results = rule.update(weight, states, grad.to(wide), numbers)
        index = flat_index(weight.shape, place) if low else place
        for number, (value, result) in enumerate(zip(values, results, strict=True)):
            new = rounded(result, noise(index, keys[number], step)) if low else result
            value.copy_(torch.where(taken, new, value))

    return update


def adamw_rule(betas: tuple[float, float], eps: float) -> UpdateRule:
    """Returns the update rule of AdamW (Loshchilov and Hutter, 2019)."""

    def numbers(counts: Counts, rate: Tensor) -> Sequence[Tensor]:  # noqa: ARG001 (the signature of all rules)
        return [1 - beta ** counts["step"].double() for beta in betas]

    def update(weight: Tensor, moments: Sequence[Tensor], grad: Tensor, numbers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rate, decay, *corrections = numbers
        first = torch.lerp(moments[0], grad, 1 - betas[0])
        second = torch.lerp(moments[1], grad.square(), 1 - betas[1])
        root = (second / corrections[1]).sqrt() + eps
        return weight * (1 - rate * decay) - rate * (first / corrections[0]) / root, first, second

    return UpdateRule(MOMENTS, update, numbers)


def adamw_bf16(
    model: TrainableModel, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> ElementwiseOptimizer:
    """Returns the optimizer for `model.trainable()`."""
    return ElementwiseOptimizer(model, adamw_rule(betas, eps), lr, weight_decay)


def lion_rule(betas: tuple[float, float]) -> UpdateRule:
    """Returns the update rule of Lion. With gradient g, momentum m, learning rate lr and decay wd:

    w = (1 - lr * wd) * w - lr * sign(beta1 * m + (1 - beta1) * g)
    m = beta2 * m + (1 - beta2) * g
    """

    def update(weight: Tensor, states: Sequence[Tensor], grad: Tensor, numbers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rate, decay = numbers
        direction = torch.lerp(states[0], grad, 1 - betas[0]).sign()
        return weight * (1 - rate * decay) - rate * direction, torch.lerp(states[0], grad, 1 - betas[1])

    return UpdateRule(("momentum",), update, lambda counts, rate: ())  # noqa: ARG005


def lion(model: TrainableModel, lr: float, betas: tuple[float, float], weight_decay: float) -> ElementwiseOptimizer:
    """Returns the optimizer for `model.trainable()`."""
    return ElementwiseOptimizer(model, lion_rule(betas), lr, weight_decay)
