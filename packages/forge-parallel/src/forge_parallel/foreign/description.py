"""The description of a module that has none: its specs, its tensor-parallel plan and an example input, read from the module."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.errors import PlanError
from forge_core.specs import Group, Init, Specs, TensorSpec
from forge_parallel.foreign.weights import SeemingReal, without_memory
from forge_parallel.torch_private import DisableTorchFunction, TorchDispatchMode, tree_iter, tree_map
from forge_parallel.transforms.tensor.rules import Role, Rules

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


class _Operators(TorchDispatchMode):
    """Writes down operators with names for their tensors: of a parameter, the input, or the operator that made it."""

    def __init__(self, part: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.steps: list[Any] = []
        self._kept: list[Any] = []  # so that an id stays its tensor's own
        self._names: dict[int, str] = {id(p): slot for slot, p in part._parameters.items() if p is not None}
        self._names[id(x)] = "input"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and writes it down."""
        with DisableTorchFunction():
            out = func(*args, **(kwargs or {}))
        given = [self.name(leaf) for leaf in tree_iter((args, kwargs or {}))]
        for index, leaf in enumerate(tree_iter(out)):
            if isinstance(leaf, Tensor):
                self._names.setdefault(id(leaf), f"{len(self.steps)}.{index}")
        self._kept.append((args, out))
        self.steps.append((str(func), given))
        return out

    def name(self, leaf: Any) -> str:
        """Of a tensor or another argument."""
        return self._names.get(id(leaf), "another tensor") if isinstance(leaf, Tensor) else repr(leaf)


def must_be_known(path: str, part: nn.Module, role: Role, forward: Callable[..., Any], x: Tensor, replaced: bool) -> None:
    """Refuses a layer that computes something else than its role cuts.

    Args:
        path: of the layer.
        part: the layer; parameters on the meta device.
        role: what it becomes.
        forward: its own.
        x: its input.
        replaced: whether `forward` is set on the instance, where it hides that of the class which the layer is given.

    Raises:
        PlanError: the operators of `forward` are not those of the known computation on the same parameters.
    """
    # Not `part.weight`, which may be computed.
    weight, bias = (part._parameters.get(slot) for slot in ("weight", "bias"))
    known: Callable[..., Tensor] = partial(F.linear, weight=weight, bias=bias)  # type: ignore[arg-type]
    what = "multiplies by its weight and adds its bias"
    if role is Role.TABLE:
        what, known = "looks up its weight", partial(F.embedding, weight=weight, padding_idx=part.padding_idx)  # type: ignore[arg-type]
    if replaced:
        why = "its forward was replaced on the instance"
    elif weight is None or _operators(part, x, forward) != _operators(part, x, known):
        own = type(part).forward not in (nn.Linear.forward, nn.Embedding.forward)
        why = "its class has a forward of its own" if own else "it is parametrized, or has an option that changes the result"
    else:
        return
    raise PlanError(
        f"tensor: {path} ({type(part).__name__}) would be cut as a module that {what}, but it computes something else: {why}; "
        "take it out of the plan, or move what it does beyond that into a module around it"
    )


def _operators(part: nn.Module, x: Tensor, compute: Callable[[Tensor], Any]) -> Any:
    with torch.no_grad(), _Operators(part, x) as seen:
        out = compute(x)
    return seen.steps, tree_map(seen.name, out)


def must_be_known_experts(path: str, part: nn.Module) -> None:
    """Refuses experts whose forward, which asks for values and so cannot be followed, is not one of transformers.

    Raises:
        PlanError: its class, or the instance, has another forward.
    """
    if "forward" in vars(part) or type(part).forward.__module__.partition(".")[0] != "transformers":
        raise PlanError(
            f"tensor: {path} ({type(part).__name__}) would be cut as experts of transformers, but has a forward of its own, and "
            "what that computes with a part of the features is not known; take it out of the plan, or set tp to 1"
        )


STYLES: Mapping[str, Role] = {
    "colwise": Role.ENTERING,
    "colwise_gather_output": Role.GATHERED,
    "colwise_rep": Role.GATHERED,
    "rowwise": Role.ROW,
    "moe_tp_experts": Role.EXPERTS,
    "embedding_rowwise": Role.TABLE,
    "replicated_with_grad_allreduce": Role.STREAM,
    "replicate": Role.STREAM,
}
"""Styles that are implemented, by the names that transformers uses, and what a module becomes."""

CUT = {Role.ENTERING: 0, Role.GATHERED: 0, Role.TABLE: 0, Role.ROW: 1}
"""The dimension of a weight (outputs, inputs) that is cut."""

STACKED = {"colwise": (1, 1), "packed_colwise": (2, 2), "rowwise": (2, 1)}
"""Styles of parameters that stack the weights (outputs, inputs) of experts: the dimension that is cut, and how many matrices of
equal size are packed into the outputs, which then count as a separate dimension."""


def rules_of(module: nn.Module, plan: Mapping[str, str]) -> Rules:
    """How a plan lays out `module`, which may be on the meta device.

    A pattern of the module's own plan (`_tp_plan`, as transformers' models have it) may match nothing: such plans list
    alternatives, such as dense layers and experts.

    Raises:
        PlanError: a style is not implemented, a pattern matches nothing, or a matched module is not a linear layer or table.
    """
    roles: dict[str, Role] = {}
    summed: set[str] = set()
    stacked, packed = _stacked(module, plan)
    own = getattr(module, "_tp_plan", None) or {}
    for pattern, style in plan.items():
        if any(_matches(pattern, name) for name in stacked):
            continue
        paths = [path for path, _ in module.named_modules() if path and _matches(pattern, path)]
        if not paths and own.get(pattern) == style:
            continue
        if style not in STYLES:
            known = ", ".join(sorted({*STYLES, *STACKED}))
            raise PlanError(f"tensor: the plan's style {style!r} ({pattern}) is not implemented; those that are: {known}")
        if not paths:
            raise PlanError(f"tensor: the plan's pattern {pattern!r} ({style}) matches no module")
        for path in paths:
            part, role = module.get_submodule(path), STYLES[style]
            wanted = nn.Embedding if role is Role.TABLE else nn.Linear
            if role in CUT and not isinstance(part, wanted):
                raise PlanError(f"tensor: {style!r} is for {wanted.__name__}, and {path} is a {type(part).__name__}")
            if roles.setdefault(path, role) is not role:
                raise PlanError(f"tensor: the plan gives {path} two styles")
            if style == "replicated_with_grad_allreduce":
                summed |= {f"{path}.{name}" for name, _ in part.named_parameters()}
    _sums(module, roles, stacked)
    if not stacked and not any(role in CUT for role in roles.values()):
        raise PlanError("tensor: the plan cuts nothing; give tp_plan={pattern: style}, or set tp to 1")
    ties = {id(p): name for name, p in module.named_parameters()}
    cut: dict[str, int | None] = {name: stacked.get(name) for name, _ in module.named_parameters()}
    for path, role in roles.items():
        if role not in CUT:
            continue
        for slot, parameter in module.get_submodule(path).named_parameters(recurse=False):
            dim = None if role is Role.ROW and slot == "bias" else CUT[role]
            name = ties[id(parameter)]
            _agree(name, cut, dim, roles, path)
            cut[name] = dim
    for name, _ in module.named_parameters(remove_duplicate=False):  # a tied copy's module reads the parameter, too
        roles.setdefault(name.rpartition(".")[0], Role.STREAM)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path = name.rpartition(".")[0]
        if cut[ties[id(parameter)]] is not None and roles.get(path, Role.STREAM) is Role.STREAM:
            raise PlanError(
                f"tensor: {name} is tied to {ties[id(parameter)]}, which the plan cuts, but the plan gives it no style; "
                "a tied table and head need 'embedding_rowwise' and 'colwise_gather_output'"
            )
    return Rules(cut, roles, partial=frozenset(), summed=frozenset(summed), packed=packed)


def _sums(module: nn.Module, roles: Mapping[str, Role], stacked: Mapping[str, int]) -> None:
    """Experts' results are summed over ranks where, and only where, all of their weights are cut."""
    if lost := sorted(name for name in stacked if roles.get(name.rpartition(".")[0]) is not Role.EXPERTS):
        raise PlanError(f"tensor: the plan cuts {lost[0]}; give its module the style 'moe_tp_experts', which sums results")
    for path in (path for path, role in roles.items() if role is Role.EXPERTS):
        names = [f"{path}.{slot}" for slot, _ in module.get_submodule(path).named_parameters()]
        if not names or not all(name in stacked for name in names):
            raise PlanError(f"tensor: 'moe_tp_experts' sums the results of {path}, but the plan does not cut all of its weights")


def _stacked(module: nn.Module, plan: Mapping[str, str]) -> tuple[dict[str, int], dict[str, int]]:
    """Parameters that stack experts and that the plan cuts: the dimension of each, and how many matrices are packed into it.

    Raises:
        PlanError: they are not laid out as (experts, outputs, inputs) with packed matrices one after the other.
    """
    cut: dict[str, int] = {}
    packed: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        style = next((style for pattern, style in plan.items() if _matches(pattern, name)), None)
        if style not in STACKED:
            continue
        owner = module.get_submodule(name.rpartition(".")[0])
        cut[name], matrices = STACKED[style]
        if matrices > 1:
            packed[name] = matrices
        turned = getattr(owner, "is_transposed", False) or not getattr(owner, "is_concatenated", True)
        biased = any(other is not None and other.dim() < 3 for other in owner._parameters.values())
        if parameter.dim() != 3 or parameter.shape[1] % matrices or turned or biased:
            raise PlanError(
                f"tensor: {style!r} cuts stacked experts of the form (experts, outputs, inputs), without biases and with packed "
                f"matrices one after the other; {name} is not of it; set tp to 1"
            )
    return cut, packed


def _agree(name: str, cut: Mapping[str, int | None], dim: int | None, roles: Mapping[str, Role], path: str) -> None:
    if cut[name] is not None and cut[name] != dim:
        raise PlanError(f"tensor: tied parameter {name} would be cut in two ways, one of them as {roles[path].name} at {path}")


def _matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), path) is not None


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
