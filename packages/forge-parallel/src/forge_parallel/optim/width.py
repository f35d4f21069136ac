"""Width scaling: initial weights and learning rates with which models of all widths have the same best rate. No torch.

muP (Yang et al., 2022, "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer"), in the form of
its Table 3 for Adam, which needs no multiplier in the forward. The widths of a parameter are told by a narrow model: dimensions
that are larger here than there have grown, by r = here / there.

    inputs grew, and outputs    hidden   std / sqrt(r of inputs)   rate / r   weight decay * r
    inputs grew, outputs not    output   std / r                   rate / r   weight decay * r
    inputs did not              input    std                       rate       weight decay

std is the narrow model's. Decoupled decay is rate * weight_decay, so with the last column a weight decays alike in every width.
"""

from collections.abc import Mapping
from math import prod, sqrt

from forge_core.errors import PlanError
from forge_core.specs import Specs
from forge_parallel.optim.settings import Setting, Settings

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
