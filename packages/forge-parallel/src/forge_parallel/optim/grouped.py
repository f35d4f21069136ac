"""Any optimizer with settings for some parameters: one of it for each setting, together one optimizer.

So an optimizer knows nothing of groups: it is given the parameters that share a setting, with their factor and their decay.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forge_core.errors import PlanError
from forge_core.protocols.model import NamedTensor, Optimizer, TrainableModel
from forge_parallel.optim.decay import DECAYED
from forge_parallel.optim.settings import PLAIN, Setting, Settings

if TYPE_CHECKING:
    from torch import Tensor


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
            f"weight_decay = {given} of {', '.join(names)}: optimizer {type(component).__name__} has no key weight_decay; remove "
            "it from parameters.groups and train.stages"
        )
    if known and (decay := (component.weight_decay if given is None else given) * own.decay) != component.weight_decay:
        component = replace(component, weight_decay=decay)
    return component.build(ParameterSubset(model, names, decayed=bool(given)))
