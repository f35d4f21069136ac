"""Freezing and unfreezing parameters of a model that is laid out, between two steps."""

from collections.abc import Collection

from torch import nn
from torch.distributed.fsdp import FSDPModule

from forge_parallel.build.parallel_model import ParallelModel
from forge_parallel.torch_private import look_at_parameters_again


def freeze(model: ParallelModel, frozen: Collection[str]) -> None:
    """Of the parameters that took a gradient when the model was made, those in `frozen` take none from here on; all others do.

    Modules inside of a part that have nothing left to learn run as in evaluation: without dropout, and without counting what
    balances experts. The part itself does not, since what ranks exchange may not depend on what a stage has.

    Args:
        model: between two steps; it has no gradients.
        frozen: global names of the whole model, the same on every rank. A tied copy is frozen with its original.
    """
    for name in model.learns:
        model.everything[name].requires_grad_(model.specs.ties.get(name, name) not in frozen)
    for part in model.parts:
        part.train()
        rest(part)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                look_at_parameters_again(module)


def rest(module: nn.Module) -> None:
    """Puts the outermost modules inside of `module` that have parameters, and none that takes a gradient, in evaluation mode."""
    for child in module.children():
        parameters = list(child.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            child.eval()
        else:
            rest(child)
