"""What tensor parallelism makes of a module, followed through one forward without memory, before anything is laid out.

A plan names layers; what lies between them it does not name. Between a layer cut by its outputs and one cut by its inputs every
rank has a part of the features: a parameter that works there gets a part of its gradient on each rank, and an operator that looks
across the features sees a part of them. So each operator's arguments are followed: which dimension is split, and from which whole
parameters they come.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_parallel.foreign.dimensions import UNKNOWN, across, dimension_of, named_arguments
from forge_parallel.foreign.example import Example, call
from forge_parallel.foreign.recording import SeemingReal, without_memory, written
from forge_parallel.tensor.rules import Role, Rules
from forge_parallel.torch_private import DisableTorchFunction, TorchDispatchMode, storage_key, tree_iter, tree_map

OPAQUE = {Role.ENTERING, Role.GATHERED, Role.ROW, Role.TABLE, Role.EXPERTS}
"""Roles that change what is split. Their modules' own operators are the layout's business."""

VALUELESS = ("_like", "new_")
"""In the names of operators that take a shape from a tensor, and no value."""


@dataclass(frozen=True)
class _State:
    """What is known of a tensor: the dimension that is split over ranks (None: every rank has the whole), and the whole
    parameters and outputs of modules to which its gradient goes without a sum over ranks."""

    split: int | None = None
    sources: frozenset[str] = frozenset()


CLEAN = _State()


class Follower(TorchDispatchMode):
    """Follows one forward of `module`, whose parameters have no memory. What depends on none of them, such as positions and
    masks, has its value."""

    def __init__(self, module: nn.Module, rules: Rules) -> None:
        super().__init__()
        self._rules, self._path, self._inside = rules, [""], 0
        self._states: dict[int, tuple[Tensor, _State]] = {}  # a tensor is kept, so that its id stays its own
        self._filled: dict[int, Tensor] = {}  # storages that split features were written into
        self._cut: dict[int, str] = {}
        self.partial: set[str] = set()
        self.whole: set[str] = set()
        self.outputs: set[str] = set()
        self.drawing: list[str] = []
        for name, parameter in module.named_parameters():
            if rules.cut.get(name) is None:
                self._set(parameter, _State(None, frozenset({name})))
            else:
                self._cut[id(parameter)] = name
        for path, part in module.named_modules():
            if rules.roles.get(path) is Role.EXPERTS:  # such modules ask for values; what they return has the form of their input
                part.forward = lambda x, *_, **__: torch.zeros_like(x)
            part.register_forward_pre_hook(self._entering(path), with_kwargs=True)
            part.register_forward_hook(self._leaving(path))

    def _of(self, tensor: Tensor) -> _State:
        state = self._states.get(id(tensor), (tensor, CLEAN))[1]
        if state.split is None and storage_key(tensor.untyped_storage()) in self._filled:
            return replace(state, split=UNKNOWN)
        return state

    def _set(self, out: Any, state: _State) -> None:
        for leaf in tree_iter(out):
            if isinstance(leaf, Tensor):
                self._states[id(leaf)] = leaf, state

    def _entering(self, path: str) -> Any:
        role = self._rules.roles.get(path)

        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._path.append(path)
            if role not in OPAQUE:
                return
            given = [self._of(leaf) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
            if role is Role.ROW and given[0].split is None:
                raise PlanError(f"tensor: {path} is rowwise, but takes whole features; the layer that makes them must be colwise")
            if role is not Role.ROW and any(state.split is not None for state in given):
                raise PlanError(f"tensor: {path} needs whole features, but takes split ones; make the layer before it whole")
            self.whole |= set().union(*(state.sources for state in given))
            self._inside += 1

        return hook

    def _leaving(self, path: str) -> Any:
        role = self._rules.roles.get(path)

        def hook(_: nn.Module, __: Any, out: Any) -> None:
            self._path.pop()
            if role not in OPAQUE:
                return
            self._inside -= 1
            if role is Role.ENTERING:
                self._set(out, _State(out.dim() - 1))
            else:
                self.outputs.add(path)
                self._set(out, _State(None, frozenset({path})))

        return hook

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and follows what it does."""
        with DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = named_arguments(func, args, kwargs)
        if _draws(func, given):
            self.drawing.append(self._path[-1])
        states = [self._of(leaf) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        if cut := [self._cut[id(leaf)] for leaf in tree_iter((args, kwargs)) if id(leaf) in self._cut and not self._inside]:
            raise PlanError(f"tensor: the plan cuts {cut[0]}, but it is read outside of its module's forward; leave it whole")
        out = self._compute(func, args, kwargs)
        name = func.overloadpacket.__name__
        if self._inside or any(part in name for part in VALUELESS):
            return out
        if any(state.split is not None for state in states):
            self.partial |= set().union(*(state.sources for state in states if state.split is None))
            self._split(name, given, out)
            self._filled |= {storage_key(leaf.untyped_storage()): leaf for leaf in written(func, args, kwargs)}
        else:
            sources = frozenset().union(*(state.sources for state in states))
            for leaf in tree_iter(out):
                if isinstance(leaf, Tensor):
                    self._set(leaf, _State(None, sources if leaf.is_floating_point() else frozenset()))
        return out

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """With values where all arguments have them."""
        if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_iter((args, kwargs))):
            return func(*args, **kwargs)
        args, kwargs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        return func(*args, **without_memory(kwargs))

    def _split(self, name: str, given: Mapping[str, Any], out: Any) -> None:
        """Of an operator with a split argument."""
        tensors = [leaf for leaf in tree_iter(list(given.values())) if isinstance(leaf, Tensor)]
        splits = [(leaf, split) for leaf in tensors if (split := self._of(leaf).split) is not None]
        for leaf, split in splits:
            if split != UNKNOWN and across(name, given, leaf, split, out):
                raise PlanError(
                    f"tensor: {self._path[-1] or 'the module'} applies {name} across features that are split over tp ranks, "
                    "and each rank has a part of them; split the layer before it, so that each layer makes one thing, such as "
                    "queries, or remove it from the plan"
                )
        for leaf in tree_iter(out):
            if isinstance(leaf, Tensor):
                known = (dimension_of(name, given, tensor, split, leaf) for tensor, split in splits if split != UNKNOWN)
                self._set(leaf, _State(next((dim for dim in known if dim != UNKNOWN), UNKNOWN)))

    def finish(self, out: Any) -> None:
        """Takes the module's output, which the loss uses alike on all ranks."""
        for leaf in tree_iter(list(out.values()) if isinstance(out, Mapping) else out):
            if isinstance(leaf, Tensor):
                if self._of(leaf).split is not None:
                    raise PlanError(
                        "tensor: the module's output is split over tp ranks; give the last layer 'colwise_gather_output', or "
                        "take it out of the plan"
                    )
                self.whole |= self._of(leaf).sources


def follow(module: nn.Module, rules: Rules, example: Example) -> frozenset[str]:
    """Names of whole parameters that see split activations, whose gradients are sums over tp ranks.

    Args:
        module: parameters on the meta device; unchanged.
        rules: how it is to be cut.
        example: what the module is called with.

    Raises:
        PlanError: it draws random numbers, looks across what is split, uses one parameter on both sides, or cannot be run
            without memory.
    """
    hollow = deepcopy(module)
    follower = Follower(hollow, rules)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), SeemingReal(), follower:
            out = call(hollow, example)
    except PlanError:
        raise
    except Exception as cause:
        raise PlanError(
            f"parallelize: tensor parallelism has to follow one forward of {type(module).__name__} without memory, and it fails: "
            f"{cause}; give example=, what the module is called with, or set tp to 1"
        ) from cause
    follower.finish(out)
    _judge(follower, rules)
    return frozenset(follower.partial)


def _judge(found: Follower, rules: Rules) -> None:
    if found.drawing:
        raise PlanError(
            f"parallelize: {_listed(found.drawing)} draws random numbers in forward, such as dropout, and tp ranks would draw "
            "different ones; set its rate to 0, or set tp to 1"
        )
    if mixed := sorted(found.partial & found.outputs):
        raise PlanError(
            f"tensor: the whole output of {mixed[0]} meets split features, and its gradient would be a part on each rank; cut "
            "the layer that uses it, too, or take both out of the plan"
        )
    if both := sorted(found.partial & found.whole):
        raise PlanError(
            f"tensor: {both[0]} works on split and on whole features, so its gradient is partly a sum over tp ranks; use two "
            "parameters, or set tp to 1"
        )
    if wrong := sorted(rules.summed & found.whole):
        raise PlanError(
            f"tensor: the plan sums the gradient of {wrong[0]} over tp ranks ('replicated_with_grad_allreduce'), but it works on "
            "whole features, where every rank has all of it; take it out of the plan"
        )


def _draws(func: Any, given: Mapping[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    return given["dropout_p"] > 0 if "dropout_p" in given else True


def _listed(paths: Iterable[str]) -> str:
    found = list(dict.fromkeys(path or "the module itself" for path in paths))
    return ", ".join(found[:3])
