"""Weights of a base that a run holds in 8 or 4 bits: its codes and scales as the model stores them, and its values as the model
computes with them.

A base is quantized while it is read, a few rows at a time: rows are quantized independently, so a rank that holds some rows reads
only these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forge_core.component import Component
from forge_core.protocols.weights import StoredTensor, Weights
from forge_models.base_format import Format
from forge_models.blocks.quantized import SCALE, dequantized, quantized, quantized_names

Rows = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name of a matrix, and offset and extent of some of its rows, without the last dimension."""


def in_full(model: Any) -> Any:
    """Returns a model's component with its base in full precision, so that tensors have the shapes of the base's files."""
    lora = getattr(model, "lora", None)
    return model if lora is None else replace(model, lora=replace(lora, base_format="full"))


def quantized_in(model: Any) -> dict[str, Format]:
    """Returns the matrices that a model's component holds quantized, with their formats."""
    with torch.device("meta"):
        return quantized_names(model.build())


class QuantizedWeights:
    """`Weights` of a base with codes and scales in place of the matrices that the model holds quantized.

    The rows that were quantized last are kept, because scales are read after the codes of the same rows.
    """

    def __init__(self, base: Weights, model: Any) -> None:
        """`model` is the component of the adapter."""
        self._base = base
        with torch.device("meta"):
            module = model.build()
        self._formats = quantized_names(module)
        shapes = dict(module.named_parameters())
        own = {name: shapes[name] for matrix in self._formats for name in (matrix, matrix + SCALE)}
        self.tensors: Mapping[str, StoredTensor] = dict(base.tensors) | {
            name: StoredTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in own.items()
        }
        self.model: Component = model
        self.facts = base.facts
        self._last: tuple[Rows, tuple[Tensor, Tensor]] | None = None

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns whole tensors."""
        return {name: self.box(name, (0,) * len(shape), shape) for name in names for shape in [self.tensors[name].shape]}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        """Returns a box of one tensor."""
        matrix = name if name in self._formats else name.removesuffix(SCALE)
        if matrix not in self._formats:
            return self._base.box(name, offset, extent)
        codes, scale = self._quantized((matrix, tuple(offset[:-1]), tuple(extent[:-1])))
        return (codes if matrix == name else scale)[..., offset[-1] : offset[-1] + extent[-1]]

    def _quantized(self, rows: Rows) -> tuple[Tensor, Tensor]:
        if self._last is None or self._last[0] != rows:
            self._last = None  # frees the codes of other rows before these are made
            self._last = rows, quantized(_rows(self._base, rows), self._formats[rows[0]])
        return self._last[1]


class DequantizedWeights:
    """`Weights` with the values that a model with a quantized base computes with: those of the codes, in fp32."""

    def __init__(self, base: Weights, model: Any) -> None:
        """`model` is the component of the adapter."""
        self._base, self._formats = base, quantized_in(model)
        self.tensors: Mapping[str, StoredTensor] = {
            name: replace(entry, dtype="float32") if name in self._formats else entry for name, entry in base.tensors.items()
        }
        self.model: Component = base.model
        self.facts = base.facts

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns whole tensors."""
        return {name: self.box(name, (0,) * len(shape), shape) for name in names for shape in [self.tensors[name].shape]}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        """Returns a box of one tensor."""
        if name not in self._formats:
            return self._base.box(name, offset, extent)
        kind = self._formats[name]
        rows = _rows(self._base, (name, tuple(offset[:-1]), tuple(extent[:-1])))
        return dequantized(*quantized(rows, kind), kind)[..., offset[-1] : offset[-1] + extent[-1]]


def _rows(base: Weights, rows: Rows) -> Tensor:
    name, offset, extent = rows
    return base.box(name, (*offset, 0), (*extent, base.tensors[name].shape[-1]))
