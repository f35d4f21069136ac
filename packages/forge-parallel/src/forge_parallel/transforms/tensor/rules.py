"""Derives tensor parallelism from logical dimensions: which dimension of each parameter is split, and the role of each module.

Pure data over `Specs`, so a layout is decided, or refused, before anything is built. The rules are those of Shoeybi et al.
(2019), with the sequence parallelism of Korthikanti et al. (2022): a matrix that outputs heads, hidden features or logits is
split along its outputs (column), one that takes them as input along its inputs (row); modules in between work on their own heads
and features.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from forge_core.errors import PlanError
from forge_core.specs import Dim, ModuleSpec, Specs, TensorSpec
from forge_parallel.placement.shares import CUT, heads_refusal, stream_refusal

STREAM: tuple[Dim, ...] = ("batch", "sequence", "embed")


class Role(Enum):
    """Role of a module under tensor parallelism."""

    REGION = "takes the whole sequence; a row module inside gives it back"
    COLUMN = "makes this rank's share of heads or features"
    KV_COPY = "makes the key-value head that this rank's query heads use; its weight is whole on every rank"
    ROW = "consumes this rank's share; the results of all ranks are summed"
    WHOLE_ROW = "a row whose input every rank has whole, and takes its own part of"
    TABLE = "looks up the rows that this rank has"
    HEAD = "makes this rank's share of the logits"
    ACROSS = "works across all heads, such as a norm: takes all ranks' shares, keeps its own of what it makes"
    SHARE = "works on each head by itself; its parameters are split with the heads"
    ENTERING = "a column that takes the residual stream itself, without a region around it"
    GATHERED = "an entering column whose outputs are brought together"
    EXPERTS = "runs all experts on this rank's share of their features, and sums what ranks make of each token"
    HEAD_SUM = "sums over this rank's heads; the sums of all ranks are added"
    SIDE_INPUTS = "takes the residual stream, and its own part of the tensors that come whole with it"
    STREAM = "works on the residual stream, or inside a region on what every rank has"


@dataclass(frozen=True)
class Rules:
    """How a part is split over tp ranks.

    Attributes:
        cut: parameter -> the dimension that is split; None if every rank holds the whole parameter.
        roles: path -> role of the module; a region that is also a head is listed as the head.
        partial: parameters whose gradients have to be summed over tp ranks once per step.
        summed: such parameters whose gradients are summed in each backward, for loops without Forge's step.
        apart: parameters of stacked experts; ranks have different tokens for them, so they are sharded as over data ranks.
        packed: parameter -> number of matrices that are concatenated along its dimension 1 (gate and up). They become a separate
            dimension, `cut` names the inner one, and each rank holds its rows of every matrix.
    """

    cut: Mapping[str, int | None]
    roles: Mapping[str, Role]
    partial: frozenset[str]
    summed: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()
    packed: Mapping[str, int] = field(default_factory=dict)


def tensor_parallel_rules(specs: Specs, tp: int, sequence: bool) -> Rules:
    """Returns the rules for the specs of a part. `sequence`: the residual stream is split along the sequence.

    Raises:
        PlanError: heads do not divide, no rule covers the module of a parameter that has to be split, or there is nothing to
            split.
    """
    copied = kv_copies(specs, tp) > 1
    cut: dict[str, int | None] = {}
    roles: dict[str, Role] = {}
    apart: set[str] = set()
    own: list[str] = []
    if sequence and (why := stream_refusal(specs.whole_stream)):
        raise PlanError(f"tensor: {why}; set transforms.tensor.sequence_parallel = false")
    if specs.tp_plan is not None and not specs.tp_plan:
        raise PlanError("tensor: the model's class comes with no plan of the layers to split; set parallel.tp = 1")
    if specs.tp_plan and any("expert" in spec.dims for spec in specs.tensors.values()):
        raise PlanError("tensor: stacked experts of this class are split by expert parallelism only; set parallel.tp = 1")
    for name, spec in specs.tensors.items():
        path = name.rpartition(".")[0]
        if "expert" in spec.dims:
            if not sequence:
                raise PlanError(
                    f"tensor: {name} contains stacked experts, whose ranks must have different tokens; "
                    "set transforms.tensor.sequence_parallel = true, or parallel.tp = 1"
                )
            apart.add(name)
            continue
        dim = _dimension(spec)
        if dim is None:
            cut[name] = None
            if _across(specs.modules.get(path)):
                roles[path] = Role.ACROSS
            continue
        if len(spec.dims) == 1 and _streams(specs.modules.get(path)):
            cut[name] = dim  # one number for each head of a region, of which every rank has its own
            own.append(path)
            continue
        role = _role(name, spec, specs.modules.get(path))
        if role is Role.COLUMN and copied and spec.dims[dim] == "kv_heads":
            role = Role.KV_COPY
        if roles.setdefault(path, role) is not role:
            raise PlanError(
                f"tensor: the parameters of {path} need different roles, {roles[path].name} and {role.name}; split the module, "
                "or set parallel.tp = 1"
            )
        cut[name] = None if role is Role.KV_COPY else dim
    heads = (path for path, module in specs.modules.items() if module.inputs[0] == STREAM and module.outputs[0][-1] == "vocab")
    with_side_inputs = (path for path, module in specs.modules.items() if module.inputs[0] == STREAM and len(module.inputs) > 1)
    roles |= dict.fromkeys(with_side_inputs, Role.SIDE_INPUTS)
    roles |= dict.fromkeys(heads, Role.HEAD)  # a tied head has no tensor of its own
    over_heads = (path for path, module in specs.modules.items() if "heads" in module.inputs[0][:-1])
    roles |= {path: Role.HEAD_SUM for path in over_heads if "heads" not in specs.modules[path].outputs[0]}
    for copy, original in specs.ties.items():  # nor has an embedding that is looked up under a second name
        path = copy.rpartition(".")[0]
        if path in specs.modules and roles.get(original.rpartition(".")[0]) is Role.TABLE:
            roles.setdefault(path, _role(copy, specs.tensors[original], specs.modules[path]))
    if not roles and specs.blocks:
        raise PlanError("tensor: no parameter has a dimension to split (heads, kv_heads, ffn, vocab); set parallel.tp = 1")
    regions = {_region(path, specs) for path, role in roles.items() if role in (Role.COLUMN, Role.KV_COPY)}
    if lost := [path for path in own if path not in regions]:
        raise PlanError(
            f"tensor: {lost[0]} has a parameter of each head, but no projection inside it makes heads; set parallel.tp = 1"
        )
    for name in cut:
        roles.setdefault(name.rpartition(".")[0], Role.STREAM)
    roles |= dict.fromkeys(regions, Role.REGION)
    whole = {name for name, dim in cut.items() if dim is None}
    partial = whole if sequence else {name for name in whole if _inside(name, regions, roles)}
    return Rules(cut, roles, frozenset(partial), apart=frozenset(apart))


def kv_copies(specs: Specs, tp: int) -> int:
    """Returns the number of ranks that hold the same key-value head.

    Raises:
        PlanError: heads cannot be split evenly.
    """
    if why := heads_refusal(specs.units, tp):
        raise PlanError(f"tensor: {why}")
    kv_heads = specs.units.get("kv_heads")
    return 1 if kv_heads is None or kv_heads % tp == 0 else tp // kv_heads


def _dimension(spec: TensorSpec) -> int | None:
    """Returns the first dimension to split; None if there is none."""
    return next((index for index, dim in enumerate(spec.dims) if dim in CUT), None)


def _role(name: str, spec: TensorSpec, module: ModuleSpec | None) -> Role:
    if module is None:
        raise PlanError(f"tensor: no rule covers {name}: its module has no entry in the model's specs; add one to Specs.modules")
    enters, leaves = module.inputs[0], module.outputs[0]
    into, out = enters[-1] in CUT, leaves[-1] in CUT
    if enters == ("batch", "sequence") and spec.dims == ("vocab", "embed"):
        return Role.TABLE
    if out and not into:
        return Role.HEAD if leaves[-1] == "vocab" else Role.COLUMN
    if into and not out:
        return Role.ROW
    if into and enters[-1] == leaves[-1] and [dim for dim in spec.dims if dim in CUT] == [enters[-1]]:
        return Role.SHARE
    raise PlanError(
        f"tensor: no rule covers {name}: its module maps {enters[-1]} to {leaves[-1]}, so it would need the whole of a "
        "dimension that is split over tp ranks; set parallel.tp = 1"
    )


def _streams(module: ModuleSpec | None) -> bool:
    return module is not None and module.inputs[0] == STREAM and module.outputs[0] == STREAM


def _across(module: ModuleSpec | None) -> bool:
    return module is not None and module.inputs[0][-1] in CUT and module.inputs[0][-1] == module.outputs[0][-1]


def _region(path: str, specs: Specs) -> str:
    """Returns the innermost module around `path` whose input and output are the residual stream."""
    for ancestor in ancestors(path):
        module = specs.modules.get(ancestor)
        if _streams(module):
            return ancestor
    raise PlanError(
        f"tensor: {path} is split along its outputs, but the specs name no module around it that takes the residual stream; add "
        "that module to Specs.modules"
    )


def ancestors(path: str) -> Iterator[str]:
    """Yields the paths of the modules around `path`, innermost first."""
    while path:
        path = path.rpartition(".")[0]
        if path:
            yield path


def _inside(name: str, regions: set[str], roles: Mapping[str, Role]) -> bool:
    """Whether a whole parameter is used only for this rank's heads or features. Biases of row modules are added to the sum."""
    path, _, slot = name.rpartition(".")
    return (roles[path] is not Role.ROW or slot != "bias") and any(
        path == region or path.startswith(f"{region}.") for region in regions
    )
