"""Tensor parallelism by a plan of patterns and styles, as transformers' models carry one: {"layers.*.mlp.up_proj": "colwise"}.

`*` stands for one number in a path, or for any text without a dot. The residual stream stays whole on every rank, since such a
plan says nothing of norms; so a column takes it in by an identity whose backward sums over ranks, and a row sums its result.
"""

import re
from collections.abc import Mapping

from torch import nn

from forge_core.errors import PlanError
from forge_parallel.tensor.rules import Role, Rules

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
