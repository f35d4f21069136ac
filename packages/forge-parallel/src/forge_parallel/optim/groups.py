"""Groups of parameters (`[parameters]`): name patterns choose which are trained, with which rate and decay.

Each group has its own optimizer. Width scaling (muP) multiplies initial weights and rates. No torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod, sqrt
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Protocol

from annotated_types import Ge, Gt

from forge_core.component import FREE, class_name
from forge_core.errors import PlanError
from forge_core.features import Feature, Neutral
from forge_core.protocols.model import NamedTensor, Optimizer, TrainableModel
from forge_core.specs import Specs
from forge_parallel.placement.shares import collapsed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that are trained in another way than the others, chosen by their names."""

    key_class: ClassVar = FREE

    match: Annotated[str, Neutral("names, which are the same in every layout")]
    """Pattern of global names, such as "blocks.*.attention.*"; `*` crosses dots. Where several groups match, a later one counts,
    key by key."""
    lr: Annotated[Annotated[float, Gt(0)] | None, Neutral("a number of each parameter")] = None
    """Factor of the learning rate."""
    weight_decay: Annotated[Annotated[float, Ge(0)] | None, Neutral("a number of each parameter")] = None
    """Weight decay in place of the optimizer's, also for what is not decayed by default."""
    frozen: Annotated[bool | None, Feature("frozen", when=True, plane="model"), Neutral("as without a group", when=False)] = None
    """Not trained: no gradient, no state, not in the gradient's norm. A resume may change it: what is trained from then on begins
    without state."""

    def __post_init__(self) -> None:
        if self.lr is None and self.weight_decay is None and self.frozen is None:
            raise ValueError(f"the group of {self.match!r} changes nothing; give lr, weight_decay or frozen")


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Which of a model's parameters are trained, and how."""

    key_class: ClassVar = FREE

    groups: list[ParameterGroup] = field(default_factory=list)
    """Groups of parameters, and their settings."""
    width_base: dict[str, int] = field(default_factory=dict)
    """Width scaling: the keys of `[model]` that make it the narrow model whose rates were tuned, such as
    {dim = 256, ffn_dim = 1024, heads = 4, kv_heads = 4}. Initial weights and rates are then scaled from its widths to those of
    the model, so that the same rates are the best ones (muP: Yang et al., 2022, "Tensor Programs V"). For Adam and sign
    descent."""


@dataclass(frozen=True, kw_only=True)
class TrainingStage:
    """A span of a run's steps in which some parameters are trained and all others are frozen.

    A NAME is one of the model's roles, such as `encoder`, `adapter`, `fusion` and `decoder` of `vlm`, or a pattern of names of
    parameters, such as "blocks.*.attention.*", in which `*` crosses dots.
    """

    key_class: ClassVar = FREE

    until: Annotated[Annotated[int, Gt(0)] | None, Neutral("a number of steps")] = None
    """How many steps of the run are done when the stage ends. The last stage has none, and lasts to the run's end."""
    train: Annotated[tuple[str, ...], Feature("frozen", unless=("*",), plane="model")]
    """NAMEs of what is trained. What `parameters.groups` freezes, no stage trains."""
    lr: Annotated[dict[str, Annotated[float, Gt(0)]], Neutral("a number of each parameter")] = field(default_factory=dict)
    """Factors of the learning rate by NAME, times those of `parameters.groups`; of several for a parameter the last counts."""
    weight_decay: Annotated[dict[str, Annotated[float, Ge(0)]], Neutral("a number of each parameter")] = field(
        default_factory=dict
    )
    """Weight decays by NAME, in place of the optimizer's and of those of `parameters.groups`."""
    warmup: Annotated[
        Annotated[int, Ge(0)] | dict[str, Annotated[int, Ge(0)]], Neutral("a number of each parameter, and of the step")
    ] = 0
    """Steps from the stage's first over which rates rise to their own, on top of `schedule`: step s of W runs at (s + 1) / W.
    For all that is trained, or by NAME."""

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("train = [] trains nothing; name what is trained")

    @property
    def warmups(self) -> dict[str, int]:
        """`warmup` by NAME."""
        return {"*": self.warmup} if isinstance(self.warmup, int) else self.warmup


DECAYED = frozenset({"matrix", "head", "router"})
"""Optimizer groups that are decayed: embeddings, norms and biases are not (`forge_core.specs.Group`)."""


def decay_of(group: str, weight_decay: float) -> float:
    """The weight decay of a parameter of this group."""
    return weight_decay if group in DECAYED else 0.0


class Setting(NamedTuple):
    """Of one parameter.

    Attributes:
        lr: factor of the learning rate.
        weight_decay: in place of the optimizer's; None = the optimizer's, of what it decays.
        decay: factor of either.
        warmup: steps from the first of its stage over which its rate rises.
    """

    lr: float = 1.0
    weight_decay: float | None = None
    decay: float = 1.0
    warmup: int = 0


PLAIN = Setting()


@dataclass(frozen=True)
class Settings:
    """Of a model.

    Attributes:
        each: settings by global name; names that are not there have `PLAIN`.
        frozen: parameters that are not trained.
        std: standard deviation of initial weights that differs from the model's own.
        stages: of a run in stages (`optim.stages`), the settings of each, in their order.
        first: of a stage, its first step, counted from 0.
    """

    each: Mapping[str, Setting] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    std: Mapping[str, float] = field(default_factory=dict)
    stages: "tuple[Settings, ...]" = ()
    first: int = 0

    def of(self, name: str) -> Setting:
        """Of one parameter."""
        return self.each.get(name, PLAIN)


NO_SETTINGS = Settings()


class Group(Protocol):
    """As `forge_parallel.optim.groups.ParameterGroup`."""

    @property
    def match(self) -> str: ...
    @property
    def lr(self) -> float | None: ...
    @property
    def weight_decay(self) -> float | None: ...
    @property
    def frozen(self) -> bool | None: ...


def grouped(groups: Iterable[Group], names: Sequence[str], ties: Mapping[str, str], before: Settings = NO_SETTINGS) -> Settings:
    """The settings of `before`, changed by each group in turn: where several match, a later one counts, key by key.

    Args:
        groups: patterns and what they change.
        names: of every parameter of the whole model.
        ties: name of a tied copy -> name of its original, which stands for both.
        before: factors of rates are multiplied with these.

    Raises:
        PlanError: a pattern matches nothing, or everything is frozen.
    """
    chosen: dict[str, dict[str, float | bool | None]] = {name: {} for name in names}
    for index, group in enumerate(groups):
        matches = [name for name in names if fnmatchcase(name, group.match)]
        if not matches:
            raise PlanError(f"parameters.groups.{index}.match: {group.match!r} {nearest(group.match, names, ties)}")
        keys = {"lr": group.lr, "weight_decay": group.weight_decay, "frozen": group.frozen}
        for name in matches:
            chosen[name] |= {key: value for key, value in keys.items() if value is not None}
    frozen = frozenset(name for name, keys in chosen.items() if keys.pop("frozen", False))
    if names and frozen == set(names):
        raise PlanError(
            "parameters.groups: every parameter of the model is frozen, so nothing would be trained; narrow a pattern"
        )
    each = dict(before.each)
    for name, keys in chosen.items():
        old, factor = before.of(name), keys.pop("lr", 1.0)
        if (new := old._replace(lr=old.lr * float(factor or 1.0), **keys)) != PLAIN:  # type: ignore[arg-type]
            each[name] = new
    return replace(before, each=each, frozen=frozen)


def nearest(pattern: str, names: Sequence[str], ties: Mapping[str, str], roles: Sequence[str] = ()) -> str:
    """Why a pattern matches nothing, and what is near to it: names, patterns of them, and `roles`, names for several."""
    for copy, original in ties.items():
        if fnmatchcase(copy, pattern):
            return f"matches only {copy}, which is tied to {original}; name {original}"
    near = [pattern for name in collapsed(names) for pattern in _patterns(name)]
    close = get_close_matches(pattern, list(dict.fromkeys([*roles, *near, *names])), n=3, cutoff=0.5)
    known = ", ".join([*roles, *collapsed(names)])
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are {known}"
    return f"matches no parameter of the model; {hint}"


def _patterns(name: str) -> Iterable[str]:
    """A name, and the patterns of all that stands below each of its modules."""
    words = name.split(".")
    return [name, *(".".join([*words[:end], "*"]) for end in range(1, len(words)))]


Shapes = Mapping[str, tuple[int, ...]]
"""Of every parameter by global name."""

KEY = "parameters.width_base"


def scaled(specs: Specs, shapes: Shapes, narrow: Specs, narrow_shapes: Shapes) -> Settings:
    """Initial weights and rates of a model, given the narrow one whose rates were tuned.

    Raises:
        PlanError: the two differ in more than widths, nothing is wider, or the model's forward would have to be scaled too.
    """
    if other := sorted(shapes.keys() ^ narrow_shapes.keys()):
        raise PlanError(f"{KEY}: the narrow model has other parameters than the model: {', '.join(other)}; change widths only")
    if specs.ties:
        copy, original = next(iter(specs.ties.items()))
        raise PlanError(
            f"{KEY}: {copy} is tied to {original}, and a table that is scaled as an input and as an output would need a factor "
            "in the forward; untie them"
        )
    each: dict[str, Setting] = {}
    std: dict[str, float] = {}
    for name, shape in shapes.items():
        spec, before = specs.tensors[name], narrow_shapes[name]
        if len(shape) != len(before) or spec.init.kind != narrow.tensors[name].init.kind:
            raise PlanError(f"{KEY}: {name} is another tensor in the narrow model; change widths only")
        _heads_are_as_wide(name, specs, shape, narrow, before)
        first = 1 if spec.stacked else 0
        inputs = prod(shape[first + 1 :]) / prod(before[first + 1 :])
        ratio = inputs if len(shape) - first > 1 and spec.group in ("matrix", "head", "router") else 1.0
        hidden = spec.group == "matrix" and shape[first : first + 1] != before[first : first + 1]
        if ratio != 1:
            each[name] = Setting(lr=1 / ratio, decay=ratio)
        if spec.init.kind == "normal":
            std[name] = narrow.tensors[name].init.std / (sqrt(ratio) if hidden else ratio)
    if not each:
        raise PlanError(f"{KEY}: no matrix of the model is wider than the narrow model's; give smaller widths, or remove it")
    return Settings(each=each, std=std)


def _heads_are_as_wide(name: str, specs: Specs, shape: tuple[int, ...], narrow: Specs, before: tuple[int, ...]) -> None:
    """Scores of heads are divided by the root of their width, and would have to be by the width itself if that grew."""
    for dim, meaning in enumerate(specs.tensors[name].dims):
        if meaning in ("heads", "kv_heads") and meaning in specs.units and meaning in narrow.units:
            width, old = shape[dim] // specs.units[meaning], before[dim] // narrow.units[meaning]
            if width != old:
                raise PlanError(
                    f"{KEY}: heads are {width} wide, and {old} in the narrow model; attention would need other scores. Scale the "
                    "number of heads with the width"
                )


NOT_OF_PARAMETERS = (
    "optimizer: it keeps a state under a name that is not a parameter's, so it cannot be used with parameters.groups, "
    "parameters.width_base or train.stages"
)


class ParameterSubset:
    """Some parameters of a model, as an optimizer is given them; all else is the model's.

    Args:
        model: which they belong to.
        names: of the parameters.
        decayed: what is not decayed by default is: such parameters are shown as a head.
    """

    def __init__(self, model: TrainableModel, names: Iterable[str], decayed: bool = False) -> None:
        self._model, self._names, self._decayed = model, frozenset(names), decayed

    def trainable(self) -> list[NamedTensor]:
        """Those of the model that were selected, in its order."""
        return [
            NamedTensor(name, tensor, "head" if self._decayed and group not in DECAYED else group)
            for name, tensor, group in self._model.trainable()
            if name in self._names
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Beginning(ParameterSubset):
    """Parameters that begin to be trained: an optimizer of them shows its first state, and never updates."""

    def evaluate_with(self, averages: Any) -> None:
        """Nothing is evaluated with it."""


class GroupedOptimizer:
    """Several optimizers, each with a factor of the rate; implements `forge_core.protocols.model.Optimizer`.

    Raises:
        PlanError: they keep states under one name.
    """

    def __init__(self, parts: Sequence[tuple[float, Optimizer]]) -> None:
        self._parts = parts
        self.set_factor(1.0)
        owners = [key for _, part in parts for state, tensors in part.state().items() for key in ((state, n) for n in tensors)]
        if len(owners) != len(set(owners)):
            raise PlanError(NOT_OF_PARAMETERS)

    def step(self, skip: "Tensor | None" = None) -> None:
        """One update of all."""
        for _, part in self._parts:
            part.step(skip)

    def set_factor(self, factor: float) -> None:
        """Sets the learning rate of each to `factor` times its peak, times its own factor."""
        for own, part in self._parts:
            part.set_factor(factor * own)
        own, first = self._parts[0]
        if (rate := getattr(first, "lr", None)) is not None:
            self.lr = rate / own

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for _, part in self._parts:
            part.zero_grad()

    def state(self) -> "Mapping[str, Mapping[str, Tensor]]":
        """Of all together."""
        found: dict[str, dict[str, Tensor]] = {}
        for _, part in self._parts:
            for key, tensors in part.state().items():
                found.setdefault(key, {}).update(tensors)
        return found

    def shorten(self) -> None:
        """See `Optimizer`."""
        for _, part in self._parts:
            getattr(part, "shorten", lambda: None)()


def with_settings(component: Any, model: TrainableModel, settings: Settings) -> Optimizer:
    """The optimizer of a component in which each parameter has its settings.

    Raises:
        PlanError: the optimizer has no weight decay that could be set, or cannot be split.
    """
    shared: dict[Setting, list[str]] = {}
    for name, _, _ in model.trainable():
        shared.setdefault(settings.of(name), []).append(name)
    if shared.keys() <= {PLAIN}:
        return component.build(model)
    return GroupedOptimizer([(own.lr, one_setting(component, model, own, names)) for own, names in shared.items()])


def one_setting(component: Any, model: TrainableModel, own: Setting, names: Sequence[str]) -> Optimizer:
    """The optimizer of parameters that share a setting; their factor of the rate is the caller's.

    Raises:
        PlanError: see `with_settings`.
    """
    given = own.weight_decay
    known = "weight_decay" in getattr(component, "__dataclass_fields__", ())
    if given is not None and not known:
        raise PlanError(
            f"weight_decay = {given} of {', '.join(names)}: optimizer {class_name(component)} has no key weight_decay; remove "
            "it from parameters.groups and train.stages"
        )
    if known and (decay := (component.weight_decay if given is None else given) * own.decay) != component.weight_decay:
        component = replace(component, weight_decay=decay)
    return component.build(ParameterSubset(model, names, decayed=bool(given)))
