"""Per-parameter settings of a recipe: `[parameters]` and `[[train.stages]]`."""

from dataclasses import replace
from typing import Any

from forge_core.errors import PlanError
from forge_parallel.model.realize import Blueprint
from forge_parallel.optim.groups import Settings
from forge_parallel.optim.stages import settings_of
from forge_train.recipe.schema import Job


def settings_in(job: Job, blueprint: Blueprint) -> Settings:
    """Returns the settings of `[parameters]` and `[[train.stages]]` for the blueprint of the recipe's model.

    Raises:
        PlanError: a pattern matches no parameter, all parameters are frozen, widths cannot be scaled, or stages do not fit the
            model.
    """
    narrow = narrow_of(job)
    narrow_blueprint = None if narrow is None else Blueprint.of(narrow.build)
    return settings_of(blueprint, job.parameters.groups, narrow_blueprint, job.train.stages)


def narrow_of(job: Job) -> Any:
    """Returns the component of the narrow model whose learning rates were tuned; None without `parameters.width_base`.

    Raises:
        PlanError: a model with these widths is not valid.
    """
    if not job.parameters.width_base:
        return None
    try:
        return replace(job.model, **job.parameters.width_base)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise PlanError(f"parameters.width_base: the model with these widths is not valid: {error}") from error
