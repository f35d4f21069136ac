"""Logits from stored weights with one block in memory at a time, to check conversions of any size."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.errors import ForgeError
from forge_core.protocols.weights import NO_EXTRAS

if TYPE_CHECKING:
    from forge_core.protocols.weights import Weights


def fixed_tokens(component: Any, length: int = 32, rows: int = 2) -> Tensor:
    """Returns (rows, length) token ids, always the same for a model; shorter if the model has a maximum length that is."""
    generator = torch.Generator().manual_seed(20)
    return torch.randint(
        0, component.vocab_size, (rows, min(length, getattr(component, "max_length", length))), generator=generator
    )


def fixed_rows(component: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns tokens, and further inputs by name, that are always the same for a model. A model with further inputs defines a
    method `fixed_rows`."""
    made = getattr(component, "fixed_rows", None)
    return (fixed_tokens(component), {}) if made is None else made()


@torch.no_grad()
def logits_of(
    weights: "Weights", tokens: Tensor, dtype: torch.dtype = torch.float32, extras: Mapping[str, Tensor] = NO_EXTRAS
) -> Tensor:
    """Returns logits (B, T, vocab) of `tokens` (B, T) in `dtype`, on the CPU; `extras` are further inputs of the model.

    The tensors of each block are read when it runs and freed afterwards. Equal weights give bitwise equal logits: every tensor
    is first copied to separate memory, so that neither its alignment in a file nor its stored dtype affects the kernel.
    """
    component: Any = weights.model
    with torch.device("meta"):
        model = component.build()
    model.eval()
    tied, held = dict(model.specs().ties), frozenset(dict(model.named_buffers()))
    for path, unit in _units(model):
        buffers = sorted(name for name in held if name.startswith(f"{path}."))
        unit.register_forward_pre_hook(_loader(weights, path, tied, dtype, buffers_of(weights, model, buffers)))
        unit.register_forward_hook(_drop)
    return model(tokens, **extras)


def _units(model: Any) -> list[tuple[str, nn.Module]]:
    """Returns, by path, the modules that are loaded one at a time: blocks, and everything outside of them."""
    blocks = model.specs().blocks
    around = {".".join(words[:end]) for path in blocks for words in [path.split(".")] for end in range(len(words))}
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{unit}.") for unit in found)
        if path not in around and not inside and (path in blocks or module.state_dict(keep_vars=True)):
            found[path] = module
    return list(found.items())


def buffers_of(weights: "Weights", model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Returns the values of some buffers of `model` by global name, on the CPU and in their dtypes in the model: those of
    `weights`, or the initial values of the spec if the format does not store a buffer, such as a counter of a run.

    Raises:
        ForgeError: the format does not store a buffer whose initial values are random.
    """
    specs, shown = model.specs().tensors, dict(model.named_buffers())  # type: ignore[operator]
    stored = [name for name in names if name in weights.tensors]
    found = {name: torch.zeros(shown[name].shape, dtype=shown[name].dtype) for name in names}
    if lost := [name for name in names if name not in weights.tensors and specs[name].init.drawn]:
        raise ForgeError(f"{weights.facts.origin} has no {lost[0]}, whose values a model draws; take weights that store it")
    for name, value in found.items():
        value.fill_(1 if specs[name].init.kind == "ones" else 0)
    read = weights.read(stored) if stored else {}
    return found | {name: tensor.to(shown[name].dtype) for name, tensor in read.items()}


def _loader(
    weights: "Weights", path: str, tied: dict[str, str], dtype: torch.dtype, buffers: dict[str, Tensor]
) -> Callable[[nn.Module, Any], None]:
    def load(module: nn.Module, _inputs: Any) -> None:
        names = {name: f"{path}.{name}" for name, _ in module.named_parameters()}
        names = {name: tied.get(whole, whole) for name, whole in names.items()}
        read = weights.read(list(names.values()))
        state = {name: read[whole].to(dtype, copy=True) for name, whole in names.items()}
        state |= {name.removeprefix(f"{path}."): value.clone() for name, value in buffers.items()}
        module.load_state_dict(state, assign=True, strict=False)

    return load


def _drop(module: nn.Module, _inputs: Any, _output: Any) -> None:
    module.to("meta")
