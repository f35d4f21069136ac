"""AdamW whose parameters and moments are bf16, computed in fp32 and rounded stochastically.

Six bytes an element instead of twelve, and unlike plain bf16 it learns: what a single step cannot show is kept on average.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from forge_core.protocols.model import TrainableModel
from forge_parallel.optim import rounding
from forge_parallel.optim.adamw import DECAYED
from forge_parallel.optim.rounding import flat_index, key_of, noise, rounded
from forge_parallel.placement.boxes import local_box
from forge_parallel.transforms.compiler import require

MOMENTS = ("exp_avg", "exp_avg_sq")


class _Part(NamedTuple):
    """What is updated by one call: a region of a parameter's box, its place in the global tensor (`rounding.regions`), and the
    keys of the noise of the weight and of both moments. The latter two are int64 on the device."""

    region: tuple[slice, ...]
    place: torch.Tensor
    keys: torch.Tensor


class AdamWBf16:
    """Updates `model.trainable()`, all bf16; implements `forge_core.protocols.model.Optimizer`.

    On an accelerator a parameter is one compiled kernel, which makes its random bits too. A CPU works through it in chunks.
    All that a step needs is on the device before it: the host waits for nothing.
    """

    def __init__(self, model: TrainableModel, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        self._named = list(model.trainable())
        self._peak, self.lr = lr, lr
        self._betas, self._eps = betas, eps
        self._device = self._named[0].tensor.device
        # One count for all: a step is taken by every parameter or by none.
        self._step = torch.zeros((), dtype=torch.int64, device=self._device)
        self._moments = {key: {name: torch.zeros_like(tensor) for name, tensor, _ in self._named} for key in MOMENTS}
        self._decays = {
            group: torch.full((), weight_decay if group in DECAYED else 0.0, device=self._device)
            for group in {group for _, _, group in self._named}
        }
        fused = self._device.type != "cpu"
        require(self._device, "precision.state = 'bf16'")
        self._parts = {name: list(_parts(name, tensor, None if fused else rounding.CHUNK)) for name, tensor, _ in self._named}
        self._update: Callable[..., None] = torch.compile(_update, dynamic=True, fullgraph=True) if fused else _update

    @torch.no_grad()
    def step(self, skip: torch.Tensor | None = None) -> None:
        """One update; where `skip` is 1 nothing changes, the step count included."""
        taken = torch.ones_like(self._step) if skip is None else (1 - skip).to(self._device, torch.int64)
        self._step += taken
        # A tensor, so that no rate is compiled in; filled by a kernel, because a copy from the host would be waited for.
        rate = torch.full((), self.lr, dtype=torch.float32, device=self._device)
        for name, tensor, group in self._named:
            if tensor.grad is None:
                continue
            held = [local_box(each).local for each in (tensor, *(self._moments[key][name] for key in MOMENTS), tensor.grad)]
            for region, place, keys in self._parts[name]:
                views = [each[region] for each in held]
                self._update(*views, place, keys, self._step, taken, rate, self._decays[group], self._betas, self._eps)

    def shorten(self) -> None:
        """From here on a step updates one part of each parameter: all a dry run needs, as every part takes the same memory."""
        self._parts = {name: parts[:1] for name, parts in self._parts.items()}

    def set_factor(self, factor: float) -> None:
        """Sets the learning rate to `factor` times its peak."""
        self.lr = self._peak * factor

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for _, tensor, _ in self._named:
            tensor.grad = None

    def state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """`exp_avg` and `exp_avg_sq` (as the parameter) by global name, and the `step` of all, under the name `all`."""
        return {"step": {"all": self._step}, **self._moments}


def _parts(name: str, tensor: torch.Tensor, elements: int | None) -> Iterator[_Part]:
    box = local_box(tensor)
    keys = torch.tensor([key_of(name, state) for state in ("weight", *MOMENTS)], device=box.local.device)
    for region, place in rounding.regions(box, elements):
        yield _Part(region, torch.tensor(place, device=box.local.device), keys)


def _update(
    weight: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    slope: torch.Tensor,
    place: torch.Tensor,
    keys: torch.Tensor,
    step: torch.Tensor,
    taken: torch.Tensor,
    rate: torch.Tensor,
    decay: torch.Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Changes weight, mean and mean square in place where `taken` is 1, each rounded once; the arithmetic of Loshchilov and
    Hutter (2019) in fp32."""
    gradient = slope.float()
    first = torch.lerp(mean.float(), gradient, 1 - betas[0])
    second = torch.lerp(square.float(), gradient.square(), 1 - betas[1])
    corrected = first / (1 - betas[0] ** step)
    root = (second / (1 - betas[1] ** step)).sqrt() + eps
    moved = weight.float() * (1 - rate * decay) - rate * corrected / root
    index = flat_index(weight.shape, place)
    for number, (held, value) in enumerate(((weight, moved), (mean, first), (square, second))):
        new = rounded(value, noise(index, keys[number], step))
        held.copy_(torch.where(taken.bool(), new, held))
