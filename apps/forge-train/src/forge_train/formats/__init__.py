"""Formats of weights: Forge's checkpoints, safetensors, torch's distributed checkpoints, and torch files.

    from pathlib import Path
    from safetensors.torch import save_file
    from forge_models import initialize
    from forge_train import load_recipe
    from forge_train.formats import Dcp, Safetensors

    model = load_recipe("debug").job.model.build()
    initialize(model, seed=0)
    save_file(dict(model.named_parameters()), "model.safetensors")  # files that Forge did not write need a recipe
    weights = Safetensors(recipe="debug").build().read(Path("model.safetensors"))
    Dcp().build().write(Path("dcp"), weights)
    assert Dcp().build().read(Path("dcp")).tensors.keys() == weights.tensors.keys()

`forge-train convert` converts between all of them and the Hugging Face format.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_train.formats.converters import Dcp, Forge, Safetensors, Torch
    from forge_train.formats.forge import ForgeWeights
    from forge_train.formats.plain import PlainWeights, check_fit, describe, facts_of, model_of, new_folder

__all__ = [
    "Dcp",
    "Forge",
    "ForgeWeights",
    "PlainWeights",
    "Safetensors",
    "Torch",
    "check_fit",
    "describe",
    "facts_of",
    "model_of",
    "new_folder",
]
__getattr__, __dir__ = lazy_exports(__name__)
