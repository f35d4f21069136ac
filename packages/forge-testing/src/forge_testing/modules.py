"""Helpers of checks: build modules on the meta device, compare them with their specs, initialize them, and run them in fp64."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.protocols.weights import StoredTensor, Weights, WeightsInfo
from forge_core.specs import TensorSpec
from forge_models.components.decoder import DecoderConfig
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
            vocab_size=40,
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
            elif init.drawn:
                buffer.copy_(init.of(2 * torch.rand(buffer.shape, generator=draw) - 1))
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


def rows() -> Tensor:
    """Returns random hidden states (ROWS, LENGTH, DIM) in fp64."""
    return drawn(ROWS, LENGTH, DIM)


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


def bidirectional(run: Callable[[Tensor], Tensor], x: Tensor, other: Tensor) -> None:
    """Checks that every output changes if the first or the last token changes."""
    with torch.no_grad():
        whole = run(x)
        for at in (0, x.shape[1] - 1):
            changed = x.clone()
            changed[:, at] = other[:, at]
            moved = (run(changed) != whole).flatten(2).any(2)
            assert bool(moved.all()), f"not every token sees token {at}"


def idles(module: nn.Module, given: tuple[int, ...], made: tuple[int, ...]) -> None:
    """Checks that an empty batch (0, *given) returns (0, *made), and that every parameter has a gradient of zero.

    Ranks without images then run the same collectives as other ranks.
    """
    for parameter in module.parameters():
        parameter.requires_grad_()
    found = module(torch.zeros(0, *given, dtype=torch.float64))
    assert tuple(found.shape) == (0, *made), f"an empty batch returns the shape {tuple(found.shape)}, not {(0, *made)}"
    if not any(True for _ in module.parameters()):
        return
    found.sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient for an empty batch; it must be zero"
        assert not bool(parameter.grad.any()), f"{name} has a nonzero gradient for an empty batch"


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


class InMemory:
    """`Weights` of a component's model in memory, random, in fp32."""

    def __init__(self, component: Any) -> None:
        self.model, self.facts = component, WeightsInfo(step=7)
        module: Any = on_meta(component.build)
        specs = module.specs()
        model = filled(module, specs.tensors, specs.ties).float()
        self._tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(tuple(tensor.shape), "float32") for name, tensor in self._tensors.items()
        }

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns whole tensors by name."""
        return {name: self._tensors[name] for name in names}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        """Returns the box of one tensor that begins at `offset`."""
        return self._tensors[name][tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))]


class Torn(Exception):
    """Error that `Broken` raises."""


class Broken:
    """Weights whose last tensor cannot be read."""

    def __init__(self, weights: InMemory) -> None:
        self._weights, self.model, self.facts, self.tensors = weights, weights.model, weights.facts, weights.tensors

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns tensors by name.

        Raises:
            Torn: the last tensor is among `names`.
        """
        if list(self.tensors)[-1] in names:
            raise Torn
        return self._weights.read(names)

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        """Returns a box of a tensor.

        Raises:
            Torn: it is the last tensor.
        """
        if name == list(self.tensors)[-1]:
            raise Torn
        return self._weights.box(name, offset, extent)


def small() -> InMemory:
    """Returns weights of a plain decoder, which every format can express."""
    return InMemory(DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, vocab_size=32, max_length=64))


def logits(weights: Weights) -> Tensor:
    """Returns the logits (1, 12, vocab) of the weights' model in fp32."""
    component: Any = weights.model
    module: Any = on_meta(component.build)
    specs = module.specs()
    model = filled(module, specs.tensors, specs.ties).float()
    with torch.no_grad():
        for name, tensor in weights.read(list(weights.tensors)).items():
            model.get_parameter(name).copy_(tensor)
        return model(torch.arange(12)[None])
