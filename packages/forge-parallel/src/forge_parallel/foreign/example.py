"""What a foreign module is called with."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_parallel.foreign.recording import SeemingReal, without_memory
from forge_parallel.torch_private import DisableTorchFunction, TorchDispatchMode, tree_iter, tree_map

Example = Mapping[str, Any] | Tensor
"""Keyword arguments of the module, or its only argument. Dimension 0 of its tensors counts rows."""

LENGTH = 8


def call(module: nn.Module, example: Example) -> Any:
    """The module's output."""
    return module(**example) if isinstance(example, Mapping) else module(example)


def called_hollow(module: nn.Module, example: Example, mode: AbstractContextManager[Any], *, gradients: bool = False) -> Any:
    """The output of a module whose parameters have no memory, inside of `mode`, which has to compute. Floating-point inputs get
    the format of its parameters: which one it will compute in is not known to it."""
    dtype = next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), None)

    def fitted(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    with torch.set_grad_enabled(gradients), torch.random.fork_rng(devices=[]), SeemingReal(), mode:
        return call(module, tree_map(fitted, example))


def hollow(module: nn.Module) -> nn.Module:
    """A copy whose parameters have no memory, in training."""
    parameters = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in module.parameters() if not p.is_meta}
    return deepcopy(module, parameters).train()  # type: ignore[arg-type]


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives: with values where all of its arguments have them."""
    if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_iter((args, kwargs))):
        return func(*args, **kwargs)
    args, kwargs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    return func(*args, **without_memory(kwargs))


def example_for(module: nn.Module, rows: int = 2) -> Tensor:
    """A guess of an input: token ids (rows, 8) of an embedding, or features (rows, 8, in_features) of a linear layer; the first
    one with which a forward without memory runs.

    Raises:
        PlanError: the module has neither.
    """
    guesses = list(_guesses(module, rows))
    if not guesses:
        raise PlanError(
            f"parallelize: {type(module).__name__} has no embedding and no linear layer to guess its input by; {how(module)}"
        )
    likely = next((guess for guess in guesses if not guess.is_floating_point()), guesses[0])
    return next((guess for guess in guesses if len(guesses) > 1 and _runs(module, guess)), likely)


def how(module: nn.Module) -> str:
    """The argument that gives the input of `module`."""
    parameters = signature(module.forward).parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    needed = [one.name for one in named if one.default is one.empty] or [one.name for one in named[:1]]
    given = ", ".join(f"{name!r}: ..." for name in needed)
    return f"give what the module is called with, parallelize(..., example={{{given}}})"


def guessed(module: nn.Module, example: Tensor) -> str:
    """What a refusal adds where a guess of `example_for` failed."""
    kind = "features" if example.is_floating_point() else "token ids"
    return f"the input was a guess, {kind} of shape {tuple(example.shape)}; {how(module)}"


def _guesses(module: nn.Module, rows: int) -> Iterator[Tensor]:
    """By the first module with parameters, then by the first embedding and the first linear layer."""
    parts = [part for part in module.modules() if any(p is not None for p in part._parameters.values())]
    firsts = [next((part for part in parts if isinstance(part, kind)), None) for kind in (nn.Embedding, nn.Linear)]
    generator = torch.Generator().manual_seed(0)
    for part in dict.fromkeys([*parts[:1], *firsts]):
        if isinstance(part, nn.Embedding):
            yield torch.randint(part.num_embeddings, (rows, LENGTH), generator=generator)
        elif isinstance(part, nn.Linear):
            yield torch.randn(rows, LENGTH, part.in_features, generator=generator)


class _WithoutMemory(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        with DisableTorchFunction():
            return computed(func, args, kwargs or {})


def _runs(module: nn.Module, example: Example) -> bool:
    try:
        called_hollow(hollow(module), example, _WithoutMemory())
    except Exception:  # noqa: BLE001 (whatever a module does with what it is not meant for)
        return False
    return True


def shares(example: Example, count: int) -> list[Example]:
    """`example` cut into `count` shares of its rows. Tensors without rows and other values go to all.

    Raises:
        PlanError: the rows cannot be shared evenly.
    """
    tensors = [example] if isinstance(example, Tensor) else [value for value in example.values() if isinstance(value, Tensor)]
    rows = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)
    if not rows or rows % count:
        raise PlanError(f"verify: the example has {rows} rows, which {count} shares cannot divide; give a multiple of {count}")

    def cut(value: Any, index: int) -> Any:
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows:
            value = value.chunk(count)[index]
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    if isinstance(example, Tensor):
        return [cut(example, index) for index in range(count)]
    return [{name: cut(value, index) for name, value in example.items()} for index in range(count)]
