"""Recipes: their keys, and how a recipe is read and checked. Does not import torch.

    from forge_train.recipe import load_recipe

    recipe = load_recipe("debug", ["--train.max_steps=50"], world=1)  # a preset, or the path of a TOML file
    assert recipe.job.train.max_steps == 50
    print(recipe.layout, recipe.job.model)
    print(recipe.as_toml(origins=True))  # every key with its value, and where the value comes from

Without `world`, the number of processes, nothing is checked that depends on the layout.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_train.recipe.load import Recipe, load_recipe
    from forge_train.recipe.schema import Job, JobSection, Start, Train

__all__ = ["Job", "JobSection", "Recipe", "Start", "Train", "load_recipe"]
__getattr__, __dir__ = lazy_exports(__name__)
