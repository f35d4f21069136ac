"""Which parameters of a model are trained, and how it is drawn: settled on its blueprint, before strategies see it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from forge_core.specs import Init
from forge_parallel.build.realize import Blueprint
from forge_parallel.optim.settings import NO_SETTINGS, Group, Settings, grouped
from forge_parallel.optim.stages.resolve import Stage, staged
from forge_parallel.optim.width import scaled


def settings_of(
    blueprint: Blueprint, groups: Iterable[Group] = (), narrow: Blueprint | None = None, stages: Sequence[Stage] = ()
) -> Settings:
    """The settings of a model's parameters.

    Args:
        blueprint: of the whole model.
        groups: patterns of names and what they change; see `forge_parallel.components.parameters`.
        narrow: the model whose rates were tuned, where widths are scaled.
        stages: of the run, see `optim.stages`.

    Raises:
        PlanError: a pattern matches nothing, everything is frozen, widths cannot be scaled, or stages do not fit the model.
    """
    shapes = _shapes(blueprint)
    before = NO_SETTINGS if narrow is None else scaled(blueprint.specs, shapes, narrow.specs, _shapes(narrow))
    trained = [name for name, parameter in blueprint.module.named_parameters() if parameter.requires_grad]
    found = grouped(groups, list(shapes), blueprint.specs.ties, before)
    # A model may freeze parameters by itself; a group says nothing of those that it does not match.
    found = replace(found, frozen=found.frozen | (shapes.keys() - set(trained)))
    return staged(stages, list(shapes), blueprint.specs, found)


def apply(blueprint: Blueprint, settings: Settings) -> Blueprint:
    """The same model with what is frozen frozen, and drawn as the settings say. Its module is changed in place."""
    for name, parameter in blueprint.module.named_parameters():
        if name in settings.frozen:
            parameter.requires_grad_(False)
    drawn = {name: replace(blueprint.specs.tensors[name], init=Init("normal", std)) for name, std in settings.std.items()}
    return Blueprint(blueprint.module, replace(blueprint.specs, tensors={**blueprint.specs.tensors, **drawn}))


def _shapes(blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in blueprint.module.named_parameters()}
