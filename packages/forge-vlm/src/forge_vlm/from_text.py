"""A vision-language model that starts from a text model: every modality starts as a copy of its weights.

Text is then processed as by the text model. A model that starts from a joint decoder also processes images as that model did.

    blocks.0.attention.q_proj.weight    a tensor with the same name in the text model is copied
    ...q_proj.image.weight              weights of a modality are copied from the text model (mixture of transformers)
    ...layers.image.experts.up_proj     every expert is a copy of the text model's feed-forward part (MoMa)
    embed.weight, head.weight           further ids start as the mean of the text model's rows (Hewitt, 2021)

Tensors without a counterpart, such as encoder, adapter, cross blocks, routers and shared experts, are not in these weights and
are initialized as usual. Gates of cross blocks start at 0, so text has the logits of the text model; with experts it has them if
the weights of a token's experts have a constant sum and there is no shared expert.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forge_core.component import Component
from forge_core.protocols.weights import StoredTensor, Weights, WeightsInfo

TABLES = ("embed.weight", "head.weight")
_MLP_MATRICES = ("gate_proj", "up_proj", "down_proj")
_ROWS_AT_ONCE = 4096
"""Rows of a table that are read together."""


class FromText:
    """`Weights` of a vision-language model, computed from those of a text model when they are read."""

    def __init__(
        self, text: Weights, model: Component, shapes: Mapping[str, tuple[int, ...]], names: Sequence[str], total: float = 1.0
    ) -> None:
        """
        Args:
            text: weights of a decoder, or of a vision-language model whose modalities share their weights.
            model: the component of the vision-language model.
            shapes: of its tensors by name.
            names: of its modalities.
            total: sum of the weights of a token's experts.
        """
        self._text, self.model = text, model
        self._sources: dict[str, str] = {}
        self._grown: dict[str, Tensor] = {}
        self.tensors: Mapping[str, StoredTensor] = {}
        copied = grown = 0
        for name, shape in shapes.items():
            source = next((each for each in (name, *counterparts(name, names)) if each in text.tensors), None)
            if source is None:
                continue
            stored_tensor = text.tensors[source]
            grows = name in TABLES and stored_tensor.shape[1:] == shape[1:] and stored_tensor.shape[0] < shape[0]
            experts = _is_expert(name) and not _is_expert(source)
            self._sources[name] = source
            stored = (shape[0], *stored_tensor.shape) if experts else shape if grows else stored_tensor.shape
            self.tensors = {**self.tensors, name: StoredTensor(stored, stored_tensor.dtype)}
            copied, grown = copied + (source != name), grown + grows
        # Tensors without a place are kept: the caller refuses or names them.
        known = {*self._sources, *self._sources.values()}
        rest = [name for name in text.tensors if name not in known]
        self._sources |= {name: name for name in rest}
        self.tensors = {**self.tensors, **{name: text.tensors[name] for name in rest}}
        notes = []
        if copied:
            notes.append(f"{copied} tensors start as copies of those that all modalities had in common")
        if grown:
            notes.append(f"{grown} tables have more ids than the text model; those start as the mean of its rows")
        self._scale = 1 / total
        self.facts: WeightsInfo = replace(text.facts, notes=(*text.facts.notes, *notes), family="")

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Whole tensors by name."""
        return {name: self.box(name, [0] * len(self.tensors[name].shape), self.tensors[name].shape) for name in names}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        """The box of one tensor that begins at `offset`."""
        source = self._sources[name]
        stored, shape = self._text.tensors[source], self.tensors[name].shape
        if stored.shape == shape:
            return self._text.box(source, offset, extent)
        if len(stored.shape) < len(shape):  # experts
            expert = self._text.box(source, offset[1:], extent[1:])
            scaled = expert * self._scale if name.endswith("down_proj") else expert
            return scaled.expand(extent[0], *expert.shape).clone()
        rows = min(max(stored.shape[0] - offset[0], 0), extent[0])
        known = self._text.box(source, offset, (rows, *extent[1:]))
        mean = self._mean(source)[offset[1] : offset[1] + extent[1]].to(known.dtype)
        return torch.cat([known, mean.expand(extent[0] - rows, -1)])

    def _mean(self, name: str) -> Tensor:
        """(dim,) of the rows of a table, summed in fp64."""
        if name not in self._grown:
            rows, dim = self._text.tensors[name].shape
            starts = range(0, rows, _ROWS_AT_ONCE)
            parts = [
                self._text.box(name, (start, 0), (min(_ROWS_AT_ONCE, rows - start), dim)).double().sum(0) for start in starts
            ]
            self._grown[name] = torch.stack(parts).sum(0) / rows
        return self._grown[name]


def counterparts(name: str, modalities: Sequence[str]) -> tuple[str, ...]:
    """Possible names in a text model of a tensor that belongs to one modality, the most likely first: an expert may be an expert
    there, or the feed-forward part. Empty for other tensors."""
    parts = name.split(".")
    own = [place for place, part in enumerate(parts) if place > 1 and part in modalities]
    if parts[0] != "blocks" or not own:
        return ()
    kept = [part for place, part in enumerate(parts) if place not in own and part != "layers"]
    dense = [".".join([*(part for part in kept if part != "experts"), "weight"])] if _is_expert(name) else []
    return (".".join(kept), *dense)


def _is_expert(name: str) -> bool:
    return ".experts." in name and name.endswith(_MLP_MATRICES)


def from_text(weights: Weights, model: Any, names: Sequence[str]) -> Weights:
    """Weights that a model with these modalities starts from; those of the same fusion are unchanged."""
    source: Any = weights.model
    if type(source) is type(model) and type(source.chosen_fusion) is type(model.chosen_fusion):
        return weights
    with torch.device("meta"):
        module = model.build()
    shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
    router: Any = None if model.shape.moe is None else model.shape.moe.router
    return FromText(weights, model, shapes, names, getattr(router, "total", None) or 1.0)
