"""The description of a module that has none: read off its tree, its class names and its parameters."""

from collections.abc import Iterator, Sequence

from torch import nn

from forge_core.specs import Group, Init, Specs, TensorSpec

NOT_DRAWN = Init("zeros")
"""Foreign weights come from the module itself, never from a spec."""


def describe(module: nn.Module, blocks: Sequence[str]) -> Specs:
    """Specs without logical dimensions: enough for sharding, recomputation, compilation and optimizer groups.

    Args:
        module: with or without memory.
        blocks: paths of the repeated blocks in the order of their use.
    """
    return Specs(
        tensors={name: _spec(module, name) for name, _ in _tensors(module)},
        modules={},
        blocks=tuple(blocks),
        units={},
        ties=tied(module),
    )


def tied(module: nn.Module) -> dict[str, str]:
    """Name of each repeated parameter -> the name under which it appears first."""
    first: dict[int, str] = {}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first.setdefault(id(p), name) != name}


def _tensors(module: nn.Module) -> Iterator[tuple[str, object]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _spec(module: nn.Module, name: str) -> TensorSpec:
    path, _, slot = name.rpartition(".")
    owner = module.get_submodule(path)
    tensor = owner._parameters.get(slot)
    if tensor is None:
        tensor = owner._buffers[slot]
    assert tensor is not None
    return TensorSpec((None,) * tensor.dim(), NOT_DRAWN, _group(owner, tensor.dim(), module))


def _group(owner: nn.Module, dims: int, root: nn.Module) -> Group:
    """Optimizer group: tables are embeddings, the last linear layer of the tree is the head, 1-D tensors are vectors."""
    if dims < 2:
        return "vector"
    if isinstance(owner, nn.Embedding):
        return "embedding"
    linear = [part for part in root.modules() if isinstance(part, nn.Linear)]
    return "head" if linear and owner is linear[-1] and linear[-1].in_features != linear[-1].out_features else "matrix"
