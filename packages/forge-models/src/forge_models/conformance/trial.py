"""Helpers of checks: build modules on the meta device, compare them with their specs, initialize them, and run them in fp64."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.specs import TensorSpec
from forge_models.components.layers import RMSNormConfig
from forge_models.shape import BlockContext, Rope

ROWS, LENGTH, DIM = 2, 12, 16
CLOSE = 1e-10
"""Tolerance in fp64, relative to the largest element, for sums in a different order."""


def context(component: Any, layer: int = 0) -> BlockContext:
    """Returns the sizes of a small decoder, with shared key-value heads unless the component refuses them."""
    found = None
    for kv_heads in (2, 4):
        sizes = BlockContext(
            dim=DIM,
            layers=2,
            layer=layer,
            heads=4,
            kv_heads=kv_heads,
            head_dim=6,
            ffn_dim=24,
            max_length=64,
            rope=Rope(),
            init_std=0.02,
            norm=RMSNormConfig(),
        )
        try:
            getattr(component, "check", lambda _: None)(sizes)
        except ValueError as error:
            found = error
        else:
            return sizes
    raise AssertionError(f"check(context) refuses 4 heads with 2 and with 4 key-value heads: {found}")


def on_meta(build: Callable[[], Any]) -> nn.Module:
    """Builds a module on the meta device; checks that `build` allocates no memory."""
    with torch.device("meta"):
        module = build()
    assert isinstance(module, nn.Module), f"build gives {type(module).__name__}, not a torch.nn.Module"
    tensors = _tensors(module)
    allocated = sorted(name for name, tensor in tensors.items() if not tensor.is_meta)
    assert not allocated, f"build allocates memory for {', '.join(allocated)}; create tensors without a device"
    return module


def specs_of(module: nn.Module) -> dict[str, TensorSpec]:
    """Returns the specs of a part by name: those of `tensor_specs()` of each of its modules."""
    return {
        ".".join(filter(None, (path, name))): spec
        for path, inner in module.named_modules()
        for name, spec in getattr(inner, "tensor_specs", dict)().items()
    }


def agree(module: nn.Module, specs: Mapping[str, TensorSpec]) -> None:
    """Checks that every tensor has a spec with the same number of dimensions, and every spec a tensor."""
    tensors = _tensors(module)
    missing, unknown = sorted(tensors.keys() - specs.keys()), sorted(specs.keys() - tensors.keys())
    assert not missing, f"specs leave out {', '.join(missing)}; give each a TensorSpec"
    assert not unknown, f"specs name tensors that are not there: {', '.join(unknown)}"
    for name, tensor in tensors.items():
        dims = specs[name].dims
        assert len(dims) == tensor.dim(), f"{name} has {tensor.dim()} dimensions, but its spec names {len(dims)}"


def filled(module: nn.Module, specs: Mapping[str, TensorSpec], ties: Mapping[str, str], seed: int = 0) -> nn.Module:
    """Fills a module on the CPU in fp64, in evaluation mode: random parameters, so that none is neutral; buffers as in specs."""
    module = module.double().to_empty(device="cpu").eval()
    for copy, original in ties.items():
        (path, _, slot), (source, _, name) = copy.rpartition("."), original.rpartition(".")
        module.get_submodule(path)._parameters[slot] = module.get_submodule(source)._parameters[name]
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spread = 0.3 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * spread + (parameter.dim() < 2))
            assert name in specs, f"{name} has no spec"
        for name, buffer in module.named_buffers():
            init = specs[name].init
            if init.kind == "normal":
                buffer.copy_(torch.randn(buffer.shape, generator=draw) * init.std)
            else:
                buffer.fill_(init.kind == "ones")
    return module


def part(build: Callable[[], Any], seed: int = 0) -> nn.Module:
    """Builds and fills a part of a model."""
    module = on_meta(build)
    specs = specs_of(module)
    agree(module, specs)
    return filled(module, specs, {}, seed)


def drawn(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(one: Tensor, other: Tensor, what: str) -> None:
    """Checks that both tensors are equal up to rounding."""
    assert one.shape == other.shape, f"{what}: {tuple(one.shape)} is not {tuple(other.shape)}"
    one, other = one.detach(), other.detach()
    error = float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)) if one.numel() else 0.0
    assert error <= CLOSE, f"{what}: outputs differ by {error:.1e}"


def repeats(run: Callable[[], Tensor]) -> None:
    """Checks that the same input gives bitwise equal outputs in evaluation."""
    with torch.no_grad():
        first, second = run(), run()
    assert torch.equal(first, second), "the same input gives other outputs the second time, in evaluation"


def learns(module: nn.Module, run: Callable[[], Tensor]) -> None:
    """Checks that in training every parameter has a gradient that is finite and not 0 everywhere."""
    module.train().zero_grad(set_to_none=True)
    output = run()
    assert bool(output.isfinite().all()), "outputs are not finite"
    (output * drawn(*output.shape, seed=11)).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} gets no gradient"
        assert bool(parameter.grad.isfinite().all()), f"the gradient of {name} is not finite"
        assert bool(parameter.grad.any()), f"the gradient of {name} is 0 everywhere"


def each_by_itself(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Checks that every token is independent of the others, so that rows can be split and packed anywhere."""
    with torch.no_grad():
        whole = run(x)
        for at in range(x.shape[1]):
            same(run(x[:, at : at + 1]), whole[:, at : at + 1], f"token {at} alone and in its row")


def causal(run: Callable[[Tensor], Tensor], x: Tensor, other: Tensor) -> None:
    """Checks that outputs up to token i do not change if all later tokens change, and that token 1 depends on token 0."""
    with torch.no_grad():
        whole = run(x)
        for at in range(x.shape[1] - 1):
            changed = torch.cat((x[:, : at + 1], other[:, at + 1 :]), 1)
            same(run(changed)[:, : at + 1], whole[:, : at + 1], f"tokens up to {at} see later ones")
        changed = torch.cat((other[:, :1], x[:, 1:]), 1)
        assert not torch.equal(run(changed)[:, 1], whole[:, 1]), "token 1 does not see token 0"


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())
