"""The blocks of a foreign module: modules that are gathered, recomputed and compiled one by one.

A block is a module that is called, and whose parameters are read nowhere but in its calls. A class name or a list of modules only
says where to look: lists are not called themselves, a module may be there only for its parameters, and parameters may be shared.
So one forward without memory is watched, where that can be done.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_parallel.foreign.example import Example, called_hollow, computed, example_for, hollow
from forge_parallel.torch_private import DisableTorchFunction, TorchDispatchMode, storage_key, tree_iter

Reads = dict[str, frozenset[str]]
"""Name of a parameter -> paths of the modules that are running at each operator that reads it."""


class _Reading(TorchDispatchMode):
    """Watches where parameters are read in one forward of `module`, whose parameters have no memory."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.reads: Reads = {}
        self._running: list[str] = []
        self._names = {storage_key(parameter.untyped_storage()): name for name, parameter in module.named_parameters()}
        for path, part in module.named_modules():
            part.register_forward_pre_hook(lambda *_, path=path: self._running.append(path), prepend=True)
            part.register_forward_hook(lambda *_: self._leave())

    def _leave(self) -> None:
        self._running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        with DisableTorchFunction():
            for leaf in tree_iter((args, kwargs)):
                if isinstance(leaf, Tensor) and (name := self._names.get(storage_key(leaf.untyped_storage()))):
                    self.reads[name] = self.reads.get(name, frozenset(self._running)) & frozenset(self._running)
            return computed(func, args, kwargs or {})


def reads(module: nn.Module, example: Example | None) -> Reads | None:
    """Where a forward of `module`, which is not changed, reads its parameters; None if that cannot be watched."""
    try:
        copy = hollow(module)
        watched = _Reading(copy)
        called_hollow(copy, example_for(module) if example is None else example, watched)
    except Exception:  # noqa: BLE001 (whatever a module asks of values that it does not have)
        return None
    return watched.reads


def find_blocks(module: nn.Module, seen: Reads | None = None) -> list[str]:
    """Paths of the repeated blocks, none in another one: of classes that `_no_split_modules` names, as transformers' models do,
    or of the longest list of modules of one class, and all other lists of that class.

    Of modules that cannot be blocks, what they contain is taken. A module that shares parameters with others is none.

    Args:
        module: with or without memory.
        seen: where its parameters are read; None if that is not known.
    """
    found = [path for top in _repeated(module) for path in _units(module, top, seen)]
    first = {module.get_submodule(path): path for path in reversed(found)}  # a module may be in several places
    return [path for path in found if first[module.get_submodule(path)] == path]


def refuse_blocks(module: nn.Module, blocks: Sequence[str], seen: Reads | None, shard: bool) -> None:
    """
    Raises:
        PlanError: a path of `blocks` cannot be a block: it does not exist, is in another one, is not called, or, if blocks are
            sharded one by one, shares parameters with others or is read from outside.
    """
    paths = dict(module.named_modules())
    if missing := [path for path in blocks if path not in paths]:
        raise PlanError(f"parallelize: the module has no {', '.join(missing)}; give paths of existing modules, blocks=[...]")
    for path in blocks:
        kind = type(paths[path]).__name__
        if inside := next((other for other in blocks if path.startswith(f"{other}.")), None):
            raise PlanError(f"parallelize: blocks= names {path}, which is in {inside}; give one of them")
        if not _callable(paths[path]):
            raise PlanError(f"parallelize: blocks= names {path}, but a {kind} is never called; give the modules in it that are")
        if shard and (shared := _shared(module, path)):
            raise PlanError(
                f"parallelize: {path} shares {shared[0]} with modules outside of it, so it cannot be a block of its own; "
                "leave it out of blocks="
            )
        if shard and (outside := _read_outside(module, path, seen)):
            raise PlanError(
                f"parallelize: {path} cannot be a block: {outside[0]} is read where {path} is not called; leave it out of blocks="
            )


def _repeated(module: nn.Module) -> list[str]:
    named = getattr(module, "_no_split_modules", None) or ()
    tops = [path for path, part in module.named_modules() if type(part).__name__ in named]
    kinds = [type(module.get_submodule(path)) for path in tops]
    chosen = [path for path, kind in zip(tops, kinds, strict=True) if kinds.count(kind) > 1]
    if not chosen:
        lists = list(_lists(module))
        longest = max(lists, key=len, default=[])
        kind = {type(module.get_submodule(path)) for path in longest}
        chosen = [path for paths in lists if {type(module.get_submodule(one)) for one in paths} == kind for path in paths]
    return [path for path in chosen if not any(path.startswith(f"{other}.") for other in chosen)]


def _lists(module: nn.Module) -> Iterator[list[str]]:
    """Paths of the modules of each list with two or more modules of one class, not of lists in them."""
    taken: list[str] = []
    for path, part in module.named_modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential | nn.ModuleDict) or any(
            path.startswith(f"{one}.") for one in taken
        ):
            continue
        named = dict(part.named_children())
        if len(named) > 1 and len({type(child) for child in named.values()}) == 1:
            paths = [f"{path}.{name}".removeprefix(".") for name in named]
            taken += paths
            yield paths


def _units(module: nn.Module, path: str, seen: Reads | None) -> list[str]:
    part = module.get_submodule(path)
    if all(parameter.dim() < 2 for parameter in part.parameters()):
        return []
    shared = bool(_shared(module, path))
    if _callable(part) and not shared and not _read_outside(module, path, seen):
        return [path]
    if _callable(part) and seen is None:  # whether the modules in it are called is not known
        return []
    return [unit for name, _ in part.named_children() for unit in _units(module, f"{path}.{name}", seen)]


def _callable(part: nn.Module) -> bool:
    return getattr(type(part).forward, "__name__", "") != "_forward_unimplemented"


def _shared(module: nn.Module, path: str) -> list[str]:
    """Names of the parameters in `path` that are also found without passing through it."""
    part = module.get_submodule(path)
    outside = {id(p) for other in _around(module, part) for p in other._parameters.values()}
    return [f"{path}.{name}" for name, parameter in part.named_parameters() if id(parameter) in outside]


def _around(module: nn.Module, part: nn.Module) -> set[nn.Module]:
    found: set[nn.Module] = set()
    todo = [module]
    while todo:
        one = todo.pop()
        if one is not part and one not in found:
            found.add(one)
            todo += one.children()
    return found


def _read_outside(module: nn.Module, path: str, seen: Reads | None) -> list[str]:
    """Names of the parameters in `path` that are read where `path` is not running."""
    names = (name for name, _ in module.named_parameters() if name.startswith(f"{path}."))
    return [name for name in names if seen is not None and name in seen and path not in seen[name]]
