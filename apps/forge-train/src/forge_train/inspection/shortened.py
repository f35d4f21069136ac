"""Stored weights of a model without the blocks behind the last one that is looked at: they are neither read nor run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from forge_core.component import Component
from forge_core.protocols.weights import StoredTensor, Weights, WeightsInfo
from forge_models.interp.taps import InterpError, choose, layer_of, taps


class Shortened:
    """`Weights` for a component of fewer blocks. Tensors of the others are there, and nothing asks for them."""

    def __init__(self, model: Component, weights: Weights) -> None:
        self.model, self._weights = model, weights
        self.tensors: Mapping[str, StoredTensor] = weights.tensors
        self.facts: WeightsInfo = weights.facts

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """As the whole model's."""
        return self._weights.read(names)

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> torch.Tensor:
        """As the whole model's."""
        return self._weights.box(name, offset, extent)


def shortened(weights: Weights, names: str | Sequence[str]) -> Weights:
    """The weights for inner values that patterns name; as they are where one lies behind all blocks, or where the model cannot
    be built with fewer.

    Raises:
        InterpError: a pattern matches nothing.
    """
    component: Any = weights.model
    with torch.device("meta"):
        layers = [layer_of(name) for name in choose(taps(component.build()), names)]
    last = max((layer for layer in layers if layer is not None), default=0)
    if None in layers or not isinstance(getattr(component, "layers", None), int):
        return weights
    try:
        fewer = replace(component, layers=last + 1, **({"mtp": None} if hasattr(component, "mtp") else {}))
        with torch.device("meta"):
            found = choose(taps(fewer.build()), names)
    except (ValueError, InterpError):  # a key that names a later block, or keeps experts for later ones
        return weights
    return Shortened(fewer, weights) if len(found) == len(layers) else weights
