"""Parameter groups (`[parameters]`): name patterns select parameters to freeze, or to train with another rate or decay.

Each group has its own optimizer. Width scaling (muP) multiplies initial weights and learning rates. Does not import torch.
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

    from forge_parallel.optim.torch_view import TorchOptimizer


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Settings of the parameters whose names match a pattern."""

    key_class: ClassVar = FREE

    match: Annotated[str, Neutral("names, which are the same in every layout")]
    """Pattern of global names, such as "blocks.*.attention.*"; `*` matches dots as well. If several groups match, the last one
    that sets a key applies."""
    lr: Annotated[Annotated[float, Gt(0)] | None, Neutral("a number of each parameter")] = None
    """Factor of the learning rate."""
    weight_decay: Annotated[Annotated[float, Ge(0)] | None, Neutral("a number of each parameter")] = None
    """Weight decay that replaces the optimizer's, also for parameters that are not decayed by default."""
    frozen: Annotated[bool | None, Feature("frozen", when=True, plane="model"), Neutral("as without a group", when=False)] = None
    """Whether the parameters are not trained: no gradient, no optimizer state, not in the gradient norm. A resume may change
    this; parameters that are unfrozen start without state."""

    def __post_init__(self) -> None:
        if self.lr is None and self.weight_decay is None and self.frozen is None:
            raise ValueError(f"the group with match = {self.match!r} sets nothing; set lr, weight_decay or frozen")


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Which parameters of a model are trained, and how."""

    key_class: ClassVar = FREE

    groups: list[ParameterGroup] = field(default_factory=list)
    """Groups of parameters and their settings."""
    width_base: dict[str, int] = field(default_factory=dict)
    """Width scaling: the keys of `[model]` that define the narrow model for which rates were tuned, such as
    {dim = 256, ffn_dim = 1024, heads = 4, kv_heads = 4}. Initial weights and learning rates are scaled from its widths to those
    of the model, so that the tuned rates stay optimal (muP: Yang et al., 2022, "Tensor Programs V"). For Adam and sign
    descent."""


@dataclass(frozen=True, kw_only=True)
class TrainingStage:
    """A range of steps in which some parameters are trained and all others are frozen.

    A NAME is one of the model's roles, such as `encoder`, `adapter`, `fusion` and `decoder` of `vlm`, or a pattern of parameter
    names, such as "blocks.*.attention.*", in which `*` matches dots as well.
    """

    key_class: ClassVar = FREE

    until: Annotated[Annotated[int, Gt(0)] | None, Neutral("a number of steps")] = None
    """Number of steps of the run after which the stage ends. Leave it out in the last stage, which lasts to the end of the
    run."""
    train: Annotated[tuple[str, ...], Feature("frozen", unless=("*",), plane="model")]
    """NAMEs of the trained parameters. Parameters that `parameters.groups` freezes are not trained in any stage."""
    lr: Annotated[dict[str, Annotated[float, Gt(0)]], Neutral("a number of each parameter")] = field(default_factory=dict)
    """NAME -> factor of the learning rate, on top of `parameters.groups`; the last one that matches a parameter applies."""
    weight_decay: Annotated[dict[str, Annotated[float, Ge(0)]], Neutral("a number of each parameter")] = field(
        default_factory=dict
    )
    """NAME -> weight decay, which replaces those of the optimizer and of `parameters.groups`."""
    warmup: Annotated[
        Annotated[int, Ge(0)] | dict[str, Annotated[int, Ge(0)]], Neutral("a number of each parameter, and of the step")
    ] = 0
    """Steps at the start of the stage in which learning rates rise, on top of `schedule`: step s of W has the factor (s + 1) / W.
    One number, or NAME -> number."""

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("train = [] trains nothing; name the parameters to train")

    @property
    def warmups(self) -> dict[str, int]:
        """NAME -> number of warm-up steps."""
        return {"*": self.warmup} if isinstance(self.warmup, int) else self.warmup


DECAYED = frozenset({"matrix", "head", "router"})
"""Optimizer groups with weight decay (`forge_core.specs.Group`); embeddings, norms and biases have none."""


def decay_of(group: str, weight_decay: float) -> float:
    """Returns the weight decay of a parameter of the optimizer group."""
    return weight_decay if group in DECAYED else 0.0


class Setting(NamedTuple):
    """Settings of one parameter.

    Attributes:
        lr: factor of the learning rate.
        weight_decay: replaces the optimizer's weight decay; None: the optimizer's, if the parameter is decayed.
        decay: factor of either weight decay.
        warmup: steps at the start of its stage in which the learning rate rises.
    """

    lr: float = 1.0
    weight_decay: float | None = None
    decay: float = 1.0
    warmup: int = 0


PLAIN = Setting()


@dataclass(frozen=True)
class Settings:
    """Settings of a model's parameters.

    Attributes:
        each: global name -> setting; other parameters have `PLAIN`.
        frozen: names of the parameters that are not trained.
        std: global name -> standard deviation of initial weights, if it differs from the model's.
        stages: settings of each training stage (`optim.stages`), in order.
        first: first step of a stage, counted from 0.
    """

    each: Mapping[str, Setting] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    std: Mapping[str, float] = field(default_factory=dict)
    stages: "tuple[Settings, ...]" = ()
    first: int = 0

    def of(self, name: str) -> Setting:
        """Returns the setting of one parameter."""
        return self.each.get(name, PLAIN)


NO_SETTINGS = Settings()


class GroupSection(Protocol):
    """See `forge_parallel.optim.groups.ParameterGroup`."""

    @property
    def match(self) -> str: ...
    @property
    def lr(self) -> float | None: ...
    @property
    def weight_decay(self) -> float | None: ...
    @property
    def frozen(self) -> bool | None: ...


def grouped(
    groups: Iterable[GroupSection], names: Sequence[str], ties: Mapping[str, str], before: Settings = NO_SETTINGS
) -> Settings:
    """Returns the settings of `before`, changed by each group in turn: the last one that sets a key of a parameter applies.

    Args:
        groups: patterns and their settings.
        names: names of all parameters of the whole model.
        ties: name of a tied copy -> name of its original; settings belong to the original.
        before: previous settings; factors of rates are multiplied with these.

    Raises:
        PlanError: a pattern matches no parameter, or all parameters are frozen.
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
            "parameters.groups: every parameter of the model is frozen, so nothing would be trained; narrow one of the patterns"
        )
    each = dict(before.each)
    for name, keys in chosen.items():
        old, factor = before.of(name), keys.pop("lr", 1.0)
        if (new := old._replace(lr=old.lr * float(factor or 1.0), **keys)) != PLAIN:  # type: ignore[arg-type]
            each[name] = new
    return replace(before, each=each, frozen=frozen)


def nearest(pattern: str, names: Sequence[str], ties: Mapping[str, str], roles: Sequence[str] = ()) -> str:
    """Returns why a pattern matches nothing, with the closest names, patterns of names, and `roles` (names of several)."""
    for copy, original in ties.items():
        if fnmatchcase(copy, pattern):
            return f"matches only {copy}, which is tied to {original}; use {original} instead"
    near = [pattern for name in collapsed(names) for pattern in _patterns(name)]
    close = get_close_matches(pattern, list(dict.fromkeys([*roles, *near, *names])), n=3, cutoff=0.5)
    known = ", ".join([*roles, *collapsed(names)])
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"the parameters are {known}"
    return f"matches no parameter of the model; {hint}"


def _patterns(name: str) -> Iterable[str]:
    """Returns a name, and for each module above it the pattern that matches everything inside the module."""
    words = name.split(".")
    return [name, *(".".join([*words[:end], "*"]) for end in range(1, len(words)))]


Shapes = Mapping[str, tuple[int, ...]]
"""Global name -> shape of every parameter."""

KEY = "parameters.width_base"


def scaled(specs: Specs, shapes: Shapes, narrow: Specs, narrow_shapes: Shapes) -> Settings:
    """Returns settings that scale initial weights and rates of a model from the narrow model for which they were tuned.

    Raises:
        PlanError: the models differ in more than widths, no matrix is wider, or scaling would have to change the model's forward.
    """
    if other := sorted(shapes.keys() ^ narrow_shapes.keys()):
        raise PlanError(f"{KEY}: only one of the model and its narrow model has {', '.join(other)}; change widths only")
    if specs.ties:
        copy, original = next(iter(specs.ties.items()))
        raise PlanError(
            f"{KEY}: {copy} is tied to {original}, and scaling a matrix that is both input and output would need a factor in the "
            "forward; untie them"
        )
    each: dict[str, Setting] = {}
    std: dict[str, float] = {}
    for name, shape in shapes.items():
        spec, before = specs.tensors[name], narrow_shapes[name]
        if len(shape) != len(before) or spec.init.kind != narrow.tensors[name].init.kind:
            raise PlanError(f"{KEY}: {name} has other dimensions or initial values in the narrow model; change widths only")
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
        raise PlanError(
            f"{KEY}: no matrix of the model is wider than in the narrow model; give smaller widths, or remove the key"
        )
    return Settings(each=each, std=std)


def _heads_are_as_wide(name: str, specs: Specs, shape: tuple[int, ...], narrow: Specs, before: tuple[int, ...]) -> None:
    """Refuses heads of another width: scores are divided by the root of the width, but would have to be by the width itself."""
    for dim, meaning in enumerate(specs.tensors[name].dims):
        if meaning in ("heads", "kv_heads") and meaning in specs.units and meaning in narrow.units:
            width, old = shape[dim] // specs.units[meaning], before[dim] // narrow.units[meaning]
            if width != old:
                raise PlanError(
                    f"{KEY}: heads are {width} wide in the model and {old} in the narrow model, which would need other attention "
                    "scores; change the number of heads instead of their width"
                )


NOT_OF_PARAMETERS = (
    "optimizer: it has a state whose name is not that of a parameter, so it does not support parameters.groups, "
    "parameters.width_base or train.stages; remove these keys"
)


class HasTorchView:
    """Gives an optimizer with `lr` and `trained()` (`forge_parallel.optim.torch_view.ViewedOptimizer`) the method `torch()`."""

    def torch(self: Any) -> "TorchOptimizer":
        """Returns a `torch.optim.Optimizer` that reads and changes this optimizer, for schedulers of torch and loops that expect
        one. Its parameter group has the learning rate; the view sets it at each step, so use no other schedule."""
        from forge_parallel.optim.torch_view import TorchOptimizer

        return TorchOptimizer(self)


class ParameterSubset:
    """A subset of a model's parameters, for an optimizer; everything else is that of the model.

    Args:
        model: the model.
        names: names of the parameters.
        decayed: whether to decay parameters that are not decayed by default; these get the optimizer group `head`.
    """

    def __init__(self, model: TrainableModel, names: Iterable[str], decayed: bool = False) -> None:
        self._model, self._names, self._decayed = model, frozenset(names), decayed

    def trainable(self) -> list[NamedTensor]:
        """Returns the model's trainable parameters in the subset, in the model's order."""
        return [
            NamedTensor(name, tensor, "head" if self._decayed and group not in DECAYED else group)
            for name, tensor, group in self._model.trainable()
            if name in self._names
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Beginning(ParameterSubset):
    """Parameters whose training starts later: an optimizer of them only provides its initial state."""

    def evaluate_with(self, averages: Any) -> None:
        """Does nothing, since these parameters are not evaluated with averages."""


class GroupedOptimizer(HasTorchView):
    """Several optimizers, each with its own factor of the learning rate; implements `forge_core.protocols.model.Optimizer`.

    Raises:
        PlanError: two optimizers have a state of the same name for the same parameter.
    """

    def __init__(self, parts: Sequence[tuple[float, Optimizer]]) -> None:
        self._parts = parts
        self.set_factor(1.0)
        owners = [key for _, part in parts for state, tensors in part.state().items() for key in ((state, n) for n in tensors)]
        if len(owners) != len(set(owners)):
            raise PlanError(NOT_OF_PARAMETERS)

    def step(self, skip: "Tensor | None" = None) -> None:
        """Updates the parameters of all optimizers."""
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

    def trained(self) -> Sequence[NamedTensor]:
        """Returns the parameters of all optimizers."""
        return [named for _, part in self._parts for named in part.trained()]  # type: ignore[attr-defined]

    def by_parameter(self) -> "Sequence[tuple[Sequence[str], Tensor]] | None":
        """See `forge_core.protocols.model.Optimizer`."""
        parts: list[Any] = [part for _, part in self._parts]
        if not all("by_parameter" in vars(type(part)) for part in parts):
            return None
        return [vector for part in parts for vector in part.by_parameter()]

    def state(self) -> "Mapping[str, Mapping[str, Tensor]]":
        """Returns the states of all optimizers together."""
        states: dict[str, dict[str, Tensor]] = {}
        for _, part in self._parts:
            for key, tensors in part.state().items():
                states.setdefault(key, {}).update(tensors)
        return states

    def shorten(self) -> None:
        """See `Optimizer`."""
        for _, part in self._parts:
            getattr(part, "shorten", lambda: None)()


def with_settings(component: Any, model: TrainableModel, settings: Settings) -> Optimizer:
    """Returns the optimizer of a component in which each parameter has its settings.

    Raises:
        PlanError: the optimizer has no weight decay to set, or cannot be split by parameter.
    """
    shared: dict[Setting, list[str]] = {}
    for name, _, _ in model.trainable():
        shared.setdefault(settings.of(name), []).append(name)
    if shared.keys() <= {PLAIN}:
        return component.build(model)
    return GroupedOptimizer([(own.lr, one_setting(component, model, own, names)) for own, names in shared.items()])


def one_setting(component: Any, model: TrainableModel, own: Setting, names: Sequence[str]) -> Optimizer:
    """Returns the optimizer of parameters with the same setting; the caller applies their factor of the learning rate.

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
