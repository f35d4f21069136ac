"""The settings of a model's parameters that a recipe asks for."""

from dataclasses import replace
from typing import Any

from forge_core.errors import PlanError
from forge_parallel.model.realize import Blueprint
from forge_parallel.optim.groups import Settings
from forge_parallel.optim.stages import settings_of
from forge_train.recipe.schema import Job


def settings_in(job: Job, blueprint: Blueprint) -> Settings:
    """Those of `[parameters]` and of `[[train.stages]]`, for the blueprint of the recipe's model.

    Raises:
        PlanError: a pattern matches nothing, everything is frozen, widths cannot be scaled, or stages do not fit the model.
    """
    narrow = narrow_of(job)
    made = None if narrow is None else Blueprint.of(narrow.build)
    return settings_of(blueprint, job.parameters.groups, made, job.train.stages)


def narrow_of(job: Job) -> Any:
    """The component of the model whose rates were tuned; None where widths are not scaled.

    Raises:
        PlanError: the widths make no model.
    """
    if not job.parameters.width_base:
        return None
    try:
        return replace(job.model, **job.parameters.width_base)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise PlanError(f"parameters.width_base: these values make no model: {error}") from error
