"""Low-rank adapters of a class of transformers: which of its layers can have one, found by running the class's own forward.

A class may read the weight of a layer without calling the layer, and an adapter of it would do nothing. So a forward is observed:
only layers that it calls can be adapted.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.specs import TensorSpec
from forge_models.blocks.lora import FACTOR_A, FACTOR_B, LoRALinear, factor, factor_specs
from forge_models.blocks.lora import attach as attach_to_layers
from forge_models.components.lora import LoRAConfig
from forge_models.hf.causal_lm_anatomy import replaced
from forge_models.hf.config import Unsupported

Product = Callable[[Tensor, Tensor], Tensor]


def attach(model: Any, lora: LoRAConfig) -> None:
    """Freezes a model and gives the matrices that `lora.targets` names adapters.

    Args:
        model: a `CausalLM` on the meta device; its modules are changed in place.
        lora: targets, rank, scale and kind.

    Raises:
        Unsupported: no layer can have an adapter, or a target names none that can.
    """
    layers, stacks = linear_layers(model), stacked_matrices(model)
    name = type(model).__name__
    if not layers and not stacks:
        raise Unsupported(
            f"{name} has no layer that can have an adapter: those that its forward calls are not of the class torch.nn.Linear; "
            "use a family that Forge implements, or train without [model.lora]"
        )
    try:
        chosen = model.targeted(lora, [*layers, *stacks])
    except ValueError as cause:
        raise Unsupported(f"model.lora: {cause}") from cause
    attach_to_layers(model, tuple(path for path in chosen if path in layers), lora)
    for path in chosen:
        if path in stacks:
            _attach_to_stack(model, path, lora)
    model.adapted = True


def blocks_path(blocks: Sequence[str], path: str) -> str:
    """Returns the path of a module as that of Forge's decoders: `blocks.3.` in place of the path of a block. A module outside
    of the blocks keeps its path."""
    for index, block in enumerate(blocks):
        if path.startswith(f"{block}."):
            return f"blocks.{index}{path.removeprefix(block)}"
    return path


def linear_layers(model: Any) -> list[str]:
    """Returns the paths of the linear layers, without the head, that a forward calls.

    Raises:
        Unsupported: the forward fails with numbers in place of its weights.
    """
    head = model.get_output_embeddings()
    layers = {path: part for path, part in model.named_modules() if type(part) is nn.Linear and part is not head}
    called: set[str] = set()

    def stand_in(path: str, outputs: int) -> Any:
        def forward(x: Tensor) -> Tensor:
            called.add(_alike(path))
            return x.new_zeros((*x.shape[:-1], outputs))

        return forward

    stubs = [(part, stand_in(path, part.out_features)) for path, part in layers.items()]
    owners = [(layer, layer.dispatch) for path in model.stacks() if (layer := _owner(model, path)) is not None]
    for layer, _ in owners:
        layer.dispatch = lambda flat, *_: torch.zeros_like(flat)
    try:
        with _zeros(model), replaced(*stubs), torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model(torch.zeros(1, 4, dtype=torch.int64))
    except Exception as cause:
        raise Unsupported(
            f"model.lora: which layers of {type(model).__name__} can have adapters is not known, because its forward fails with "
            f"zeros as weights ({type(cause).__name__}: {cause}); train it without [model.lora]"
        ) from cause
    finally:
        for layer, dispatch in owners:
            layer.dispatch = dispatch
    return [path for path in layers if _alike(path) in called]


def _alike(path: str) -> str:
    """Returns a path without its numbers: experts of a list and blocks are called in the same way, or not at all."""
    return re.sub(r"\.\d+(?=\.)", ".#", path)


@contextmanager
def _zeros(model: nn.Module) -> Iterator[None]:
    """Context in which all parameters and buffers on the meta device are zeros on the CPU that take no memory."""
    kept: list[tuple[dict[str, Any], str, Any]] = []
    for part in model.modules():
        both: tuple[dict[str, Any], dict[str, Any]] = (part._parameters, part._buffers)
        for held in both:
            for slot, tensor in held.items():
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    kept.append((held, slot, tensor))
                    zeros = torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
                    held[slot] = nn.Parameter(zeros, False) if held is part._parameters else zeros
    try:
        yield
    finally:
        for held, slot, tensor in kept:
            held[slot] = tensor


def _owner(model: Any, path: str) -> Any:
    return model.get_submodule(path.rpartition(".")[0])


def stacked_matrices(model: Any) -> list[str]:
    """Returns the names of matrices of stacked experts (experts, outputs, inputs) that can have adapters."""
    found = []
    for path in model.stacks():
        experts: Any = model.get_submodule(path)
        if not experts.is_transposed:
            found += [f"{path}.{name}" for name, tensor in experts.named_parameters(recurse=False) if tensor.dim() == 3]
    return found


def _attach_to_stack(model: Any, path: str, lora: LoRAConfig) -> None:
    where, _, name = path.rpartition(".")
    experts: Any = model.get_submodule(where)
    weight = getattr(experts, name)
    count, outputs, inputs = weight.shape
    experts.adapter = (*getattr(experts, "adapter", ()), f"{name}_{FACTOR_A}", f"{name}_{FACTOR_B}")
    experts.scaling = lora.scaling
    setattr(experts, f"{name}_{FACTOR_A}", factor(weight, count, lora.rank, inputs))
    setattr(experts, f"{name}_{FACTOR_B}", factor(weight, count, outputs, lora.rank))
    weight.requires_grad_(False)


def adapted_product(experts: Any, name: str, product: Product, rows: Tensor, out: Tensor) -> Tensor:
    """Returns the output of a stack of matrices, with that of its adapter if it has one.

    Args:
        experts: the module with the stack.
        name: name of the stack.
        product: rows sorted by expert (n, inputs) and a stack (experts, outputs, inputs) -> (n, outputs).
        rows: (n, inputs).
        out: (n, outputs), the output of the base.
    """
    if f"{name}_{FACTOR_A}" not in getattr(experts, "adapter", ()):
        return out
    a, b = getattr(experts, f"{name}_{FACTOR_A}"), getattr(experts, f"{name}_{FACTOR_B}")
    return out + experts.scaling * product(product(rows, a), b)


def adapter_widths(experts: Any) -> tuple[int, ...]:
    """Returns the lengths of the rows between the two factors of adapters of stacked experts; empty without adapters."""
    return tuple({getattr(experts, slot).shape[1] for slot in getattr(experts, "adapter", ()) if slot.endswith(FACTOR_A)})


def adapter_specs(model: nn.Module) -> dict[str, TensorSpec]:
    """Returns the specs of all parameters of adapters by global name."""
    found: dict[str, TensorSpec] = {}
    for path, module in model.named_modules():
        part: Any = module
        if isinstance(part, LoRALinear):
            found |= {f"{path}.{slot}": spec for slot, spec in part.tensor_specs().items()}
            continue
        for slot in getattr(part, "adapter", ()):
            if slot.endswith(FACTOR_A):
                prefix = f"{path}.{slot.removesuffix(FACTOR_A)}"
                found |= factor_specs(prefix, (None, None), getattr(part, slot).shape[-1], False, ("expert",))
    return found
