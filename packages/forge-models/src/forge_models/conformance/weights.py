"""Weights for the checks of converters: a small decoder in memory, and a copy whose reading fails."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forge_core.protocols.weights import StoredTensor, Weights, WeightsInfo
from forge_models.components.decoder import DecoderConfig
from forge_models.conformance import trial


class InMemory:
    """`Weights` of a component's model in memory, random, in fp32."""

    def __init__(self, component: Any) -> None:
        self.model, self.facts = component, WeightsInfo(step=7)
        module: Any = trial.on_meta(component.build)
        specs = module.specs()
        filled = trial.filled(module, specs.tensors, specs.ties).float()
        self._tensors = {name: tensor.detach() for name, tensor in filled.named_parameters()}
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(tuple(tensor.shape), "float32") for name, tensor in self._tensors.items()
        }

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns whole tensors by name."""
        return {name: self._tensors[name] for name in names}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        """Returns the box of one tensor that begins at `offset`."""
        return self._tensors[name][tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))]


class Torn(Exception):
    """Error that `Broken` raises."""


class Broken:
    """Weights whose last tensor cannot be read."""

    def __init__(self, weights: InMemory) -> None:
        self._weights, self.model, self.facts, self.tensors = weights, weights.model, weights.facts, weights.tensors

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns tensors by name.

        Raises:
            Torn: the last tensor is among `names`.
        """
        if list(self.tensors)[-1] in names:
            raise Torn
        return self._weights.read(names)

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        """Returns a box of a tensor.

        Raises:
            Torn: it is the last tensor.
        """
        if name == list(self.tensors)[-1]:
            raise Torn
        return self._weights.box(name, offset, extent)


def small() -> InMemory:
    """Returns weights of a plain decoder, which every format can express."""
    return InMemory(DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, vocab_size=32, max_length=64))


def logits(weights: Weights) -> Tensor:
    """Returns the logits (1, 12, vocab) of the weights' model in fp32."""
    component: Any = weights.model
    module: Any = trial.on_meta(component.build)
    specs = module.specs()
    model = trial.filled(module, specs.tensors, specs.ties).float()
    with torch.no_grad():
        for name, tensor in weights.read(list(weights.tensors)).items():
            model.get_parameter(name).copy_(tensor)
        return model(torch.arange(12)[None])
