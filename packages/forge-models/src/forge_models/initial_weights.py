"""Initial weights of a whole model from its specs and a seed, the same as in a training run with any layout."""

from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from forge_core import specs
from forge_core.specs import Init, Specs
from forge_models.accelerator import draws_initial_weights


@torch.no_grad()
def initialize(model: nn.Module, seed: int = 0) -> None:
    """Initializes every parameter and buffer of a model from its `specs()`, in fp32, rounded to the dtype of the tensor.

    Values depend on the seed, the tensor's name and its device type. Changes that a recipe makes to the specs, such as settings
    of parameter groups and scaled widths, are not applied here.

    Raises:
        TypeError: the model has no `specs()`.
        ValueError: a tensor is on the meta device, or has no spec.
    """
    describe = getattr(model, "specs", None)
    if not callable(describe):
        raise TypeError(f"{type(model).__name__} does not describe itself: give it specs() -> forge_core.specs.Specs")
    described = cast(Specs, describe())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in described.tensors:
            raise ValueError(f"{name} has no TensorSpec in {type(model).__name__}.specs()")
        if tensor.is_meta:
            raise ValueError(f"{name} has no memory; write model.to_empty(device='cpu') first")
        spec = described.tensors[name]
        if spec.stacked:
            for row, matrix in enumerate(tensor):
                _fill(matrix, spec.init, specs.row_name(name, row), seed)
        else:
            _fill(tensor, spec.init, name, seed)


def _fill(tensor: Tensor, init: Init, name: str, seed: int) -> None:
    if not init.drawn:
        tensor.fill_(1.0 if init.kind == "ones" else 0.0)
        return
    key, flat, uniform = specs.key_of(seed, name), tensor.detach().view(-1), init.kind != "normal"
    if init.kind == "choices":  # depend on all samples of a row, which may be in two blocks
        drawn = [_drawn(key, block, tensor.device, uniform) for block in range(-(-len(flat) // specs.BLOCK))]
        tensor.copy_(init.of(torch.cat(drawn)[: len(flat)].view(tensor.shape)))
        return
    for block, part in enumerate(flat.split(specs.BLOCK)):
        drawn = _drawn(key, block, tensor.device, uniform)
        part.copy_(init.of(drawn[: part.numel()]))


def _drawn(key: bytes, block: int, device: torch.device, uniform: bool) -> Tensor:
    if draws_initial_weights(device):
        generator = torch.Generator(device).manual_seed(specs.device_seed(key, block))
        values = torch.empty(specs.BLOCK, device=device, dtype=torch.float32)
        return values.uniform_(-1, 1, generator=generator) if uniform else values.normal_(generator=generator)
    stream = np.random.Generator(np.random.Philox(**specs.philox(key, block)))  # type: ignore[arg-type]
    if uniform:
        return torch.from_numpy(stream.random(specs.BLOCK, dtype=np.float32)).mul_(2).sub_(1)
    return torch.from_numpy(stream.standard_normal(specs.BLOCK, dtype=np.float32))
