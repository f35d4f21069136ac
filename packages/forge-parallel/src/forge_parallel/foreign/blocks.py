"""The blocks of a foreign module: modules that are gathered, recomputed and compiled one by one.

A block is a module that is called, and whose parameters are read nowhere but in its calls. A class name or a list of modules only
says where to look: lists are not called themselves, a module may be there only for its parameters, and parameters may be shared.
So one forward without memory is watched, where that can be done.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_parallel.foreign.description import Example, called_hollow, computed, example_for, hollow
from forge_parallel.foreign.forward import place
from forge_parallel.foreign.weights import written
from forge_parallel.torch_private import DisableTorchFunction, TorchDispatchMode, storage_key, tree_iter


@dataclass(frozen=True)
class Seen:
    """What a forward did.

    Attributes:
        reads: name of a parameter -> paths of the modules that are running at each operator that reads it.
        changes: path of a module -> the line that changes an input of it in place, in its call or through what it returns.
        changes_later: the same of lines that do so after the call.
    """

    reads: Mapping[str, frozenset[str]]
    changes: Mapping[str, str]
    changes_later: Mapping[str, str]


class _Watched(TorchDispatchMode):
    """Watches one forward of `module`, whose parameters have no memory."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.reads: dict[str, frozenset[str]] = {}
        self.changes: dict[str, str] = {}
        self.changes_later: dict[str, str] = {}
        self._running: list[str] = []
        self._inputs: list[set[int]] = []  # storages, of each module that is running
        self._called: dict[int, set[str]] = {}  # storage -> modules that were given it
        self._passed: dict[int, set[str]] = {}  # storage -> modules that were given it and returned it
        self._kept: list[Any] = []  # so that a storage's key stays its own
        self._names = {storage_key(parameter.untyped_storage()): name for name, parameter in module.named_parameters()}
        for path, part in module.named_modules():
            part.register_forward_pre_hook(lambda _, *given, path=path: self._enter(path, given), prepend=True, with_kwargs=True)
            part.register_forward_hook(lambda _, __, output: self._leave(output))

    def _enter(self, path: str, given: Any) -> None:
        self._running.append(path)
        self._inputs.append(self._learning(given))

    def _leave(self, output: Any) -> None:
        path, given = self._running.pop(), self._inputs.pop()
        for storage in given:
            self._called.setdefault(storage, set()).add(path)
        for storage in given & self._learning(output):
            self._passed.setdefault(storage, set()).add(path)

    def _learning(self, values: Any) -> set[int]:
        """Storages of tensors with a gradient."""
        self._kept += (found := [leaf for leaf in tree_iter(values) if isinstance(leaf, Tensor) and leaf.requires_grad])
        return {storage_key(leaf.untyped_storage()) for leaf in found}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        with DisableTorchFunction():
            for leaf in tree_iter((args, kwargs)):
                if isinstance(leaf, Tensor) and (name := self._names.get(storage_key(leaf.untyped_storage()))):
                    self.reads[name] = self.reads.get(name, frozenset(self._running)) & frozenset(self._running)
            for tensor in written(func, args, kwargs or {}):
                self._change(storage_key(tensor.untyped_storage()))
            return computed(func, args, kwargs or {})

    def _change(self, storage: int) -> None:
        within = [path for path, given in zip(self._running, self._inputs, strict=True) if storage in given]
        for path in (*within, *self._passed.get(storage, ())):
            self.changes.setdefault(path, place())
        for path in self._called.get(storage, ()):
            self.changes_later.setdefault(path, place())


def watch(module: nn.Module, example: Example | None) -> Seen | None:
    """What a forward of `module`, which is not changed, does; None if that cannot be watched."""
    try:
        copy = hollow(module)
        watched = _Watched(copy)
        called_hollow(copy, example_for(module) if example is None else example, watched, gradients=True)
    except Exception:  # noqa: BLE001 (whatever a module asks of values that it does not have)
        return None
    return Seen(watched.reads, watched.changes, watched.changes_later)


def find_blocks(module: nn.Module, seen: Seen | None = None) -> list[str]:
    """Paths of the repeated blocks, none in another one: of classes that `_no_split_modules` names, as transformers' models do,
    or of the longest list of modules of one class, and all other lists of that class.

    Of modules that cannot be blocks, what they contain is taken. A module that shares parameters with others is none.

    Args:
        module: with or without memory.
        seen: what a forward of it does; None if that is not known.
    """
    found = [path for top in _repeated(module) for path in _units(module, top, seen)]
    first = {module.get_submodule(path): path for path in reversed(found)}  # a module may be in several places
    return [path for path in found if first[module.get_submodule(path)] == path]


def refuse_blocks(module: nn.Module, blocks: Sequence[str], seen: Seen | None, shard: bool) -> None:
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


def refuse_changes(module: nn.Module, paths: Sequence[str], seen: Seen | None, why: str, later: bool = False) -> None:
    """
    Args:
        module: to name the class of a path.
        paths: of modules that are called by a strategy.
        seen: what a forward does; None if that is not known.
        why: what the strategy does with their inputs.
        later: whether these may not change after the call, either.

    Raises:
        PlanError: an input that has a gradient is changed in place.
    """
    if seen is None:
        return
    for path in paths:
        if line := seen.changes.get(path) or (later and seen.changes_later.get(path)):
            kind = type(module.get_submodule(path)).__name__
            raise PlanError(
                f"parallelize: an input of {path} ({kind}) is changed in place at {line}, but "
                f"{why}; write x = x + y there instead of x += y, or change a clone"
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


def _units(module: nn.Module, path: str, seen: Seen | None) -> list[str]:
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


def _read_outside(module: nn.Module, path: str, seen: Seen | None) -> list[str]:
    """Names of the parameters in `path` that are read where `path` is not running."""
    names = (name for name, _ in module.named_parameters() if name.startswith(f"{path}."))
    return [name for name in names if seen is not None and path not in seen.reads.get(name, (path,))]
