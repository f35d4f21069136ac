"""The blocks of a foreign module: modules that are gathered, recomputed and compiled one by one.

A block is a module whose parameters are read only while its forward runs. A class name or a list of modules is only a hint where
blocks are: a list is never called, a module may exist only to hold parameters, and parameters may be shared. So, where possible,
one forward on the meta device is observed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_parallel.foreign.description import Example, called_hollow, computed, example_for, hollow
from forge_parallel.foreign.forward import place
from forge_parallel.foreign.weights import written
from forge_parallel.torch_private import DisableTorchFunction, TorchDispatchMode, is_compiled, storage_key, tree_iter


@dataclass(frozen=True)
class Seen:
    """What one forward did.

    Attributes:
        reads: parameter name -> paths of the modules whose forward runs at every read of the parameter.
        changes: module path -> the line that modifies an input of the module in place, in its forward or through its output.
        changes_later: the same for lines that run after the module's forward.
    """

    reads: Mapping[str, frozenset[str]]
    changes: Mapping[str, str]
    changes_later: Mapping[str, str]


class _Watched(TorchDispatchMode):
    """Observes one forward of `module`, whose parameters are on the meta device."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.reads: dict[str, frozenset[str]] = {}
        self.changes: dict[str, str] = {}
        self.changes_later: dict[str, str] = {}
        self._running: list[str] = []
        self._inputs: list[set[int]] = []  # input storages of each running module
        self._called: dict[int, set[str]] = {}  # storage -> modules that received it as input
        self._passed: dict[int, set[str]] = {}  # storage -> modules that received and returned it
        self._kept: list[Any] = []  # keeps the tensors alive, so that no storage key is reused
        self._names = {storage_key(parameter.untyped_storage()): name for name, parameter in module.named_parameters()}
        for path, part in module.named_modules():
            part.register_forward_pre_hook(
                lambda _, *inputs, path=path: self._enter(path, inputs), prepend=True, with_kwargs=True
            )
            part.register_forward_hook(lambda _, __, output: self._leave(output))

    def _enter(self, path: str, inputs: Any) -> None:
        self._running.append(path)
        self._inputs.append(self._learning(inputs))

    def _leave(self, output: Any) -> None:
        path, inputs = self._running.pop(), self._inputs.pop()
        for storage in inputs:
            self._called.setdefault(storage, set()).add(path)
        for storage in inputs & self._learning(output):
            self._passed.setdefault(storage, set()).add(path)

    def _learning(self, values: Any) -> set[int]:
        """Returns the storages of tensors that require a gradient."""
        self._kept += (tensors := [leaf for leaf in tree_iter(values) if isinstance(leaf, Tensor) and leaf.requires_grad])
        return {storage_key(leaf.untyped_storage()) for leaf in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and records its reads and in-place changes."""
        with DisableTorchFunction():
            for leaf in tree_iter((args, kwargs)):
                if isinstance(leaf, Tensor) and (name := self._names.get(storage_key(leaf.untyped_storage()))):
                    self.reads[name] = self.reads.get(name, frozenset(self._running)) & frozenset(self._running)
            for tensor in written(func, args, kwargs or {}):
                self._change(storage_key(tensor.untyped_storage()))
            return computed(func, args, kwargs or {})

    def _change(self, storage: int) -> None:
        within = [path for path, inputs in zip(self._running, self._inputs, strict=True) if storage in inputs]
        for path in (*within, *self._passed.get(storage, ())):
            self.changes.setdefault(path, place())
        for path in self._called.get(storage, ()):
            self.changes_later.setdefault(path, place())


def watch(module: nn.Module, example: Example | None) -> Seen | None:
    """Returns what one forward of `module` does; None if the forward fails on the meta device. `module` is not changed."""
    try:
        copy = hollow(module)
        watched = _Watched(copy)
        called_hollow(copy, example_for(module) if example is None else example, watched, gradients=True)
    except Exception:  # noqa: BLE001 (the forward may need values of meta tensors and fail in any way)
        return None
    return Seen(watched.reads, watched.changes, watched.changes_later)


def find_blocks(module: nn.Module, seen: Seen | None = None) -> list[str]:
    """Returns the paths of the repeated blocks; no block lies in another one.

    Candidates are modules of the classes in `_no_split_modules` (as in transformers' models); otherwise the modules of the
    longest list with one class and of all other lists of that class. A candidate that cannot be a block, for example because it
    shares parameters with other modules, is replaced by the blocks inside it.

    Args:
        module: on any device, the meta device included.
        seen: what a forward of `module` does; None if unknown.
    """
    candidates = [path for top in _repeated(module) for path in _units(module, top, seen)]
    first = {module.get_submodule(path): path for path in reversed(candidates)}  # a module may be in several places
    return [path for path in candidates if first[module.get_submodule(path)] == path]


def refuse_blocks(module: nn.Module, blocks: Sequence[str], seen: Seen | None, shard: bool) -> None:
    """Refuses modules that cannot be blocks.

    Raises:
        PlanError: a path of `blocks` does not exist, lies in another block or is never called; or, if blocks are sharded one by
            one, shares parameters with other modules or has parameters that are read outside its forward.
    """
    paths = dict(module.named_modules())
    if missing := [path for path in blocks if path not in paths]:
        raise PlanError(f"parallelize: blocks=[...] names modules that do not exist: {', '.join(missing)}; give existing paths")
    for path in blocks:
        kind = type(paths[path]).__name__
        if inside := next((other for other in blocks if path.startswith(f"{other}.")), None):
            raise PlanError(f"parallelize: blocks=[...] names both {inside} and {path}, which lies in {inside}; give only one")
        if not _callable(paths[path]):
            raise PlanError(
                f"parallelize: {path} ({kind}) in blocks=[...] has no forward; give the modules in it that are called"
            )
        if shard and (shared := _shared(module, path)):
            raise PlanError(
                f"parallelize: {path} cannot be a block, because modules outside it share its parameter {shared[0]}; "
                "remove it from blocks=[...]"
            )
        if shard and (outside := _read_outside(module, path, seen)):
            raise PlanError(
                f"parallelize: {path} cannot be a block, because {outside[0]} is read outside its forward; "
                "remove it from blocks=[...]"
            )


def refuse_changes(module: nn.Module, paths: Sequence[str], seen: Seen | None, why: str, later: bool = False) -> None:
    """Refuses modules whose inputs are modified in place.

    Args:
        module: the root of `paths`; its classes are named in the error.
        paths: modules that a strategy wraps.
        seen: what a forward does; None if unknown.
        why: why the strategy needs unmodified inputs.
        later: whether the inputs must also stay unmodified after the module's forward.

    Raises:
        PlanError: an input that requires a gradient is modified in place.
    """
    if seen is None:
        return
    for path in paths:
        if line := seen.changes.get(path) or (later and seen.changes_later.get(path)):
            kind = type(module.get_submodule(path)).__name__
            raise PlanError(
                f"parallelize: an input of {path} ({kind}) is modified in place at {line}, but "
                f"{why}; write x = x + y there instead of x += y, or modify a clone"
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
        chosen = [path for paths in lists if {type(module.get_submodule(path)) for path in paths} == kind for path in paths]
    return [path for path in chosen if not any(path.startswith(f"{other}.") for other in chosen)]


def _lists(module: nn.Module) -> Iterator[list[str]]:
    """Yields, for each list of two or more modules of one class, the paths of these modules; skips lists inside such lists."""
    taken: list[str] = []
    for path, part in module.named_modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential | nn.ModuleDict) or any(
            path.startswith(f"{listed}.") for listed in taken
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
    if _callable(part) and seen is None:  # unknown whether its children are called
        return []
    return [unit for name, _ in part.named_children() for unit in _units(module, f"{path}.{name}", seen)]


def _callable(part: nn.Module) -> bool:
    return getattr(type(part).forward, "__name__", "") != "_forward_unimplemented"


def _shared(module: nn.Module, path: str) -> list[str]:
    """Returns the names of the parameters in `path` that modules outside `path` hold as well."""
    part = module.get_submodule(path)
    outside = {id(p) for other in _around(module, part) for p in other._parameters.values()}
    return [f"{path}.{name}" for name, parameter in part.named_parameters() if id(parameter) in outside]


def _around(module: nn.Module, part: nn.Module) -> set[nn.Module]:
    around: set[nn.Module] = set()
    todo = [module]
    while todo:
        current = todo.pop()
        if current is not part and current not in around:
            around.add(current)
            todo += current.children()
    return around


def _read_outside(module: nn.Module, path: str, seen: Seen | None) -> list[str]:
    """Returns the names of the parameters in `path` that are read while `path` is not running."""
    names = (name for name, _ in module.named_parameters() if name.startswith(f"{path}."))
    return [name for name in names if seen is not None and path not in seen.reads.get(name, (path,))]


def refuse_compiled(module: nn.Module) -> None:
    """Refuses modules that are already compiled: their graphs are of whole parameters, and names of parameters differ.

    Raises:
        PlanError: a module was returned by `torch.compile`, or its `compile` was called.
    """
    for path, part in module.named_modules():
        if is_compiled(part):
            raise PlanError(
                f"parallelize: {path or type(part).__name__} is already compiled; parallelize the module without torch.compile, "
                "with transforms=[Compile()] for its blocks, or compile the result with torch.compile(model)"
            )
