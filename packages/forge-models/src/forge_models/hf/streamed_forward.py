"""Logits straight from stored weights, one block in memory at a time: how a conversion of any size is checked."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.protocols.weights import NO_EXTRAS

if TYPE_CHECKING:
    from forge_core.protocols.weights import Weights


def fixed_tokens(component: Any, length: int = 32, rows: int = 2) -> Tensor:
    """(rows, length) token ids that are always the same for a model, shorter where it takes no more."""
    generator = torch.Generator().manual_seed(20)
    return torch.randint(0, component.vocab_size, (rows, min(length, component.max_length)), generator=generator)


def fixed_rows(component: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens, and further inputs of the model by name, that are always the same for a model: those of its method `fixed_rows`,
    where it needs more than `fixed_tokens`."""
    made = getattr(component, "fixed_rows", None)
    return (fixed_tokens(component), {}) if made is None else made()


@torch.no_grad()
def logits_of(
    weights: "Weights", tokens: Tensor, dtype: torch.dtype = torch.float32, extras: Mapping[str, Tensor] = NO_EXTRAS
) -> Tensor:
    """Logits (B, T, vocab) of `tokens` (B, T) in `dtype`, on the CPU; `extras` are further inputs of the model.

    Each block's tensors are read when it runs and dropped afterwards. Equal weights give equal bits: every tensor is
    copied to separate memory first, so that neither its place in a file nor its stored dtype decides a kernel.
    """
    component: Any = weights.model
    with torch.device("meta"):
        model = component.build()
    model.eval()
    tied, held = dict(model.specs().ties), frozenset(dict(model.named_buffers()))
    units = [(path, module) for path, module in model.named_children() if not isinstance(module, nn.ModuleDict)]
    units += [(f"blocks.{name}", block) for name, block in model.blocks.items()]
    for path, unit in units:
        buffers = sorted(name for name in held if name.startswith(f"{path}."))
        unit.register_forward_pre_hook(_loader(weights, path, tied, dtype, buffers_of(weights, model, buffers)))
        unit.register_forward_hook(_drop)
    return model(tokens, **extras)


def buffers_of(weights: "Weights", model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Values of some buffers of `model` by global name, on the CPU, in the dtypes that they have there: those of `weights`, or,
    where a format knows nothing of a buffer, such as the counters of a run, what its spec begins with."""
    specs, shown = model.specs().tensors, dict(model.named_buffers())  # type: ignore[operator]
    stored = [name for name in names if name in weights.tensors]
    found = {name: torch.zeros(shown[name].shape, dtype=shown[name].dtype) for name in names}
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
