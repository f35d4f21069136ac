"""Describes a module without specs: derives specs, the tensor-parallel rules and an example input from the module."""

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
from forge_parallel.torch_private import DisableTorchFunction, TorchDispatchMode, aten, tree_iter, tree_map
from forge_parallel.transforms.tensor.rules import Role, Rules

NOT_DRAWN = Init("zeros")
"""Initial values in the specs of foreign modules; never used, because the weights come from the module."""


def describe(module: nn.Module, blocks: Sequence[str]) -> Specs:
    """Returns specs without logical dimensions, sufficient for sharding, recomputation, compilation and optimizer groups.

    Args:
        module: on any device, the meta device included.
        blocks: paths of the repeated blocks in forward order.
    """
    return Specs(
        tensors={name: _spec(module, name) for name, _ in _tensors(module)},
        modules={},
        blocks=tuple(blocks),
        units={},
        ties=tied(module),
    )


def tied(module: nn.Module) -> dict[str, str]:
    """Returns {name of each repeated parameter: the name under which it appears first}."""
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
    """Returns the optimizer group: weights of embeddings, the last linear layer as head, 1-D tensors as vectors, else
    matrices."""
    if dims < 2:
        return "vector"
    if isinstance(owner, nn.Embedding):
        return "embedding"
    linear = [part for part in root.modules() if isinstance(part, nn.Linear)]
    return "head" if linear and owner is linear[-1] and linear[-1].in_features != linear[-1].out_features else "matrix"


class _Operators(TorchDispatchMode):
    """Records operators; tensors are named after the parameter, the input or the recorded operator that they come from."""

    def __init__(self, part: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.steps: list[Any] = []
        self._kept: list[Any] = []  # keeps the tensors alive, so that no id is reused
        self._names: dict[int, str] = {id(p): slot for slot, p in part._parameters.items() if p is not None}
        self._names[id(x)] = "input"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs and records an operator."""
        with DisableTorchFunction():
            out = func(*args, **(kwargs or {}))
        arguments = [self.name(leaf) for leaf in tree_iter((args, kwargs or {}))]
        for index, leaf in enumerate(tree_iter(out)):
            if isinstance(leaf, Tensor):
                self._names.setdefault(id(leaf), f"{len(self.steps)}.{index}")
        self._kept.append((args, out))
        self.steps.append((str(func), arguments))
        return out

    def name(self, leaf: Any) -> str:
        """Returns the name of a tensor, or the repr of another argument."""
        return self._names.get(id(leaf), "another tensor") if isinstance(leaf, Tensor) else repr(leaf)


def must_be_known(path: str, part: nn.Module, role: Role, forward: Callable[..., Any], x: Tensor, replaced: bool) -> None:
    """Refuses a layer whose computation differs from the one that its role splits.

    Args:
        path: path of the layer.
        part: the layer, with parameters on the meta device.
        role: the layer's role in the plan.
        forward: the layer's own forward.
        x: the layer's input.
        replaced: whether `forward` is set on the instance, where it would hide the forward of the parallel class.

    Raises:
        PlanError: the operators of `forward` differ from those of the known computation with the same parameters.
    """
    # Not `part.weight`, which a parametrization may compute.
    weight, bias = (part._parameters.get(slot) for slot in ("weight", "bias"))
    known: Callable[..., Tensor] = partial(F.linear, weight=weight, bias=bias)  # type: ignore[arg-type]
    what = "multiplies by its weight and adds its bias"
    if weight is not None and len(factors := _factors(part)) == 2:
        scaling: Any = part.scaling
        known = partial(_with_adapter, weight=weight, bias=bias, factors=factors, scaling=scaling)
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
        f"tensor: the plan splits {path} ({type(part).__name__}) as a layer that {what}, but it computes something else: {why}; "
        "remove it from the plan, or move the extra computation into a module around it"
    )


def _factors(part: nn.Module) -> list[Tensor]:
    """Returns the factors of a low-rank adapter, first that of the inputs; empty without an adapter."""
    follows: Mapping[str, int] = getattr(part, "follows", {})
    own = {dim: p for slot, dim in reversed(list(follows.items())) if (p := part._parameters.get(slot)) is not None}
    return [own[dim] for dim in (1, 0) if dim in own]


def _with_adapter(x: Tensor, weight: Tensor, bias: Tensor | None, factors: Sequence[Tensor], scaling: float) -> Tensor:
    """Returns the output of a linear layer with a low-rank adapter."""
    first, second = factors
    return F.linear(x, weight, bias) + scaling * F.linear(F.linear(x, first), second)


def followers(module: nn.Module, rules: Rules) -> frozenset[str]:
    """Returns the names of parameters of split layers that are whole, such as one factor of an adapter: their gradients are
    partial on each rank. Such a layer has an attribute `follows`: parameter -> the dimension of the weight along which it is
    split if the weight is."""
    names = {
        f"{path}.{slot}"
        for path, role in rules.roles.items()
        if role in CUT
        for slot in getattr(module.get_submodule(path), "follows", ())
    }
    return frozenset(name for name in names if name in rules.cut and rules.cut[name] is None)


def _operators(part: nn.Module, x: Tensor, compute: Callable[[Tensor], Any]) -> Any:
    with torch.no_grad(), _Operators(part, x) as seen:
        out = compute(x)
    return seen.steps, tree_map(seen.name, out)


def must_be_known_experts(path: str, part: nn.Module) -> None:
    """Refuses experts whose forward does not come from transformers. An experts' forward reads values, so it cannot be traced.

    Raises:
        PlanError: the class or the instance defines another forward.
    """
    if "forward" in vars(part) or type(part).forward.__module__.partition(".")[0] != "transformers":
        raise PlanError(
            f"tensor: the plan splits {path} ({type(part).__name__}) as experts of transformers, but it has its own forward, "
            "which may be wrong on a part of the features; remove it from the plan, or set tp to 1"
        )


STYLES: Mapping[str, Role] = {
    "colwise": Role.ENTERING,
    "colwise_gather_output": Role.GATHERED,
    "colwise_rep": Role.GATHERED,
    "rowwise": Role.ROW,
    "rowwise_split_input": Role.WHOLE_ROW,
    "moe_tp_experts": Role.EXPERTS,
    "embedding_rowwise": Role.TABLE,
    "replicated_with_grad_allreduce": Role.STREAM,
    "replicate": Role.STREAM,
}
"""Supported styles, under the names that transformers uses -> role of the module."""

CUT = {Role.ENTERING: 0, Role.GATHERED: 0, Role.TABLE: 0, Role.ROW: 1, Role.WHOLE_ROW: 1}
"""Role -> the dimension of the weight (outputs, inputs) that is split."""

STACKED = {"colwise": (1, 1), "packed_colwise": (2, 2), "rowwise": (2, 1)}
"""Styles of stacked expert weights (experts, outputs, inputs) -> (dimension that is split, number of equally large matrices that
are packed into the outputs; these become a separate dimension)."""


def rules_of(module: nn.Module, plan: Mapping[str, str]) -> Rules:
    """Returns the rules by which `plan` splits `module`, which may be on the meta device.

    A pattern of the module's own plan (`_tp_plan` of transformers' models) may match no module: such plans list alternatives,
    for example dense layers and experts.

    Raises:
        PlanError: a style is not supported, a pattern matches no module, or a matched module is not a linear layer or embedding.
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
            raise PlanError(f"tensor: style {style!r} of the plan's pattern {pattern!r} is not supported; use one of {known}")
        if not paths:
            raise PlanError(f"tensor: the plan's pattern {pattern!r} ({style}) matches no module; correct or remove it")
        for path in paths:
            part, role = module.get_submodule(path), STYLES[style]
            wanted = nn.Embedding if role is Role.TABLE else nn.Linear
            if role in CUT and not isinstance(part, wanted):
                kind = type(part).__name__
                raise PlanError(f"tensor: style {style!r} needs an {wanted.__name__}, but {path} is a {kind}; change the plan")
            if roles.setdefault(path, role) is not role:
                raise PlanError(f"tensor: the plan's patterns give {path} two styles; keep one of them")
            if style == "replicated_with_grad_allreduce":
                summed |= {f"{path}.{name}" for name, _ in part.named_parameters()}
    _sums(module, roles, stacked)
    if not stacked and not any(role in CUT for role in roles.values()):
        raise PlanError("tensor: the plan splits no parameter; give tp_plan={pattern: style}, or set tp to 1")
    ties = {id(p): name for name, p in module.named_parameters()}
    cut: dict[str, int | None] = {name: stacked.get(name) for name, _ in module.named_parameters()}
    for path, role in roles.items():
        if role not in CUT:
            continue
        part: Any = module.get_submodule(path)
        for slot, parameter in part.named_parameters(recurse=False):
            dim = None if role in (Role.ROW, Role.WHOLE_ROW) and slot == "bias" else CUT[role]
            if getattr(part, "follows", {}).get(slot, dim) != dim:  # such as a factor of an adapter
                dim = None
            name = ties[id(parameter)]
            _agree(name, cut, dim, roles, path)
            cut[name] = dim
    for name, _ in module.named_parameters(remove_duplicate=False):  # modules with a tied copy read the parameter as well
        roles.setdefault(name.rpartition(".")[0], Role.STREAM)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path = name.rpartition(".")[0]
        if cut[ties[id(parameter)]] is not None and roles.get(path, Role.STREAM) is Role.STREAM:
            raise PlanError(
                f"tensor: {name} is tied to {ties[id(parameter)]}, which the plan splits, but the plan has no style for {path}; "
                "give a tied embedding and head the styles 'embedding_rowwise' and 'colwise_gather_output'"
            )
    return Rules(cut, roles, partial=frozenset(), summed=frozenset(summed), packed=packed)


def _sums(module: nn.Module, roles: Mapping[str, Role], stacked: Mapping[str, int]) -> None:
    """Checks that the results of experts are summed over ranks if and only if all of their weights are split."""
    if lost := sorted(name for name in stacked if roles.get(name.rpartition(".")[0]) is not Role.EXPERTS):
        raise PlanError(f"tensor: the plan splits {lost[0]}; give its module the style 'moe_tp_experts', which sums the results")
    for path in (path for path, role in roles.items() if role is Role.EXPERTS):
        names = [f"{path}.{slot}" for slot, _ in module.get_submodule(path).named_parameters()]
        if not names or not all(name in stacked for name in names):
            raise PlanError(
                f"tensor: 'moe_tp_experts' sums the results of {path}, but the plan does not split all of its weights"
            )


def _stacked(module: nn.Module, plan: Mapping[str, str]) -> tuple[dict[str, int], dict[str, int]]:
    """Returns, for stacked expert parameters that the plan splits, the split dimension and the number of packed matrices.

    Raises:
        PlanError: the layout is not (experts, outputs, inputs) with packed matrices one after the other.
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
                f"tensor: style {style!r} needs stacked experts (experts, outputs, inputs) without biases and with packed "
                f"matrices one after the other, but {name} is laid out differently; set tp to 1"
            )
    return cut, packed


def _agree(name: str, cut: Mapping[str, int | None], dim: int | None, roles: Mapping[str, Role], path: str) -> None:
    if cut[name] is not None and cut[name] != dim:
        raise PlanError(
            f"tensor: the plan splits the tied parameter {name} along two dimensions; one is {roles[path].name} at {path}"
        )


def _matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), path) is not None


Example = Mapping[str, Any] | Tensor
"""Keyword arguments of the module, or its only argument. Dimension 0 of tensors is rows."""

LENGTH = 8


def call(module: nn.Module, example: Example) -> Any:
    """Returns the module's output for `example`."""
    return module(**example) if isinstance(example, Mapping) else module(example)


def called_hollow(module: nn.Module, example: Example, mode: AbstractContextManager[Any], *, gradients: bool = False) -> Any:
    """Returns the output of a module on the meta device, computed inside `mode`. Floating-point inputs are cast to the dtype of
    the module's parameters, because the compute dtype is not known here."""
    dtype = next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), None)

    def fitted(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    with torch.set_grad_enabled(gradients), torch.random.fork_rng(devices=[]), SeemingReal(), mode:
        return call(module, tree_map(fitted, example))


def hollow(module: nn.Module) -> nn.Module:
    """Returns a copy in training mode with its parameters on the meta device."""
    parameters = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in module.parameters() if not p.is_meta}
    return deepcopy(module, parameters).train()  # type: ignore[arg-type]


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns an operator's result: with values if no argument is a meta tensor, otherwise on the meta device."""
    if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_iter((args, kwargs))):
        return func(*args, **kwargs)
    args, kwargs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    return func(*args, **without_memory(kwargs))


def example_for(module: nn.Module, rows: int = 2) -> Tensor:
    """Returns a guessed input: token ids (rows, 8) for an embedding or features (rows, 8, in_features) for a linear layer; the
    first guess with which a forward on the meta device runs.

    Raises:
        PlanError: the module has neither an embedding nor a linear layer.
    """
    guesses = list(_guesses(module, rows))
    if not guesses:
        raise PlanError(
            f"parallelize: no input can be guessed, because {type(module).__name__} has no embedding and no linear layer; "
            f"{how(module)}"
        )
    likely = next((guess for guess in guesses if not guess.is_floating_point()), guesses[0])
    return next((guess for guess in guesses if len(guesses) > 1 and _runs(module, guess)), likely)


def how(module: nn.Module) -> str:
    """Returns the advice to pass an example, with the names of the module's arguments."""
    parameters = signature(module.forward).parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    needed = [one.name for one in named if one.default is one.empty] or [one.name for one in named[:1]]
    arguments = ", ".join(f"{name!r}: ..." for name in needed)
    return f"pass the module's arguments as parallelize(..., example={{{arguments}}})"


def guessed(module: nn.Module, example: Tensor) -> str:
    """Returns the note that an error adds if its cause may be the guess of `example_for`."""
    kind = "features" if example.is_floating_point() else "token ids"
    return f"the input was a guess, {kind} of shape {tuple(example.shape)}; {how(module)}"


def _guesses(module: nn.Module, rows: int) -> Iterator[Tensor]:
    """Yields guesses for the first module with parameters, then for the first embedding and the first linear layer."""
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
        """Runs an operator on the meta device."""
        if func is aten.embedding.default and args[1].is_floating_point():
            raise IndexError("an embedding needs integers")  # torch 2.11 computes its shape from any tensor
        with DisableTorchFunction():
            return computed(func, args, kwargs or {})


def _runs(module: nn.Module, example: Example) -> bool:
    try:
        called_hollow(hollow(module), example, _WithoutMemory())
    except Exception:  # noqa: BLE001 (a module may fail in any way on a wrong input)
        return False
    return True


def shares(example: Example, count: int) -> list[Example]:
    """Splits `example` into `count` shares of its rows. Tensors without rows and other values are in every share.

    Raises:
        PlanError: `count` does not divide the number of rows.
    """
    tensors = [example] if isinstance(example, Tensor) else [value for value in example.values() if isinstance(value, Tensor)]
    rows = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)
    if not rows or rows % count:
        raise PlanError(f"verify: the example has {rows} rows, which cannot be split into {count} equal shares; give a multiple")

    def cut(value: Any, index: int) -> Any:
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows:
            value = value.chunk(count)[index]
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    if isinstance(example, Tensor):
        return [cut(example, index) for index in range(count)]
    return [{name: cut(value, index) for name, value in example.items()} for index in range(count)]
