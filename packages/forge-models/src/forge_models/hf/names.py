"""Global names <-> names in a Hugging Face checkpoint, from a family's data; and the two layouts of what lies there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forge_models.components.attentions import MLA
from forge_models.components.decoder import DecoderConfig
from forge_models.hf.attention import LATENT_NAMES, latent_rows
from forge_models.hf.family import Family
from forge_models.hf.moe import ExpertNames

if TYPE_CHECKING:
    from torch import Tensor

OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "norm.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
}
"""Tensors outside of the blocks; the same in every family."""

HEAD = "lm_head.weight"
FUSED = ".experts.gate_up_proj"
"""End of the name of a tensor with the gates of all experts of a layer above their up projections."""
DERIVED = ("rotary_emb.inv_freq",)
"""Ends of names of buffers that follow from the configuration; old checkpoints hold them, and they are not read."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor of ours lies in a checkpoint.

    Attributes:
        shape: of ours.
        names: one; of a stack one for each entry of dimension 0.
        stacked: whether ours stacks separate tensors.
        rows: row i of ours is row rows[i] of theirs; empty = the same order.
        fused: (dimension, start, size): ours are the entries of theirs from `start`, of `size` in all; None = theirs is ours.
        buffer: not a parameter, so a checkpoint's dtype is not its dtype.
        reshaped: the shape there, where it has the same numbers in the same order; empty = that of ours.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    stacked: bool = False
    rows: tuple[int, ...] = ()
    fused: tuple[int, int, int] | None = None
    buffer: bool = False
    reshaped: tuple[int, ...] = ()

    @property
    def theirs(self) -> tuple[int, ...]:
        """The shape of each tensor there."""
        if self.reshaped:
            return self.reshaped
        if self.fused is not None:
            axis, _, size = self.fused
            return (*self.shape[:axis], size, *self.shape[axis + 1 :])
        return self.shape[1:] if self.stacked else self.shape

    def within(self, box: tuple[slice, ...]) -> tuple[slice, ...]:
        """A box of ours in the coordinates of theirs."""
        if self.fused is None:
            return box
        axis, start, _ = self.fused
        return (*box[:axis], slice(start + box[axis].start, start + box[axis].stop), *box[axis + 1 :])

    def join(self, tensors: "Sequence[Tensor]") -> "Tensor":
        """Ours from theirs, in the order of `names`."""
        import torch

        if self.stacked:
            return torch.stack(list(tensors))
        if self.fused is not None:
            axis, start, _ = self.fused
            return tensors[0].narrow(axis, start, self.shape[axis])
        found = tensors[0][list(self.rows)] if self.rows else tensors[0]
        return found.reshape(self.shape) if self.reshaped else found

    def split(self, tensor: "Tensor") -> "dict[str, Tensor]":
        """Theirs by name from ours, each in separate memory."""
        import torch

        if self.stacked:
            return {name: part.clone() for name, part in zip(self.names, tensor, strict=True)}
        if self.rows:
            tensor = tensor[torch.tensor(self.rows).argsort()]
        return {self.names[0]: tensor.reshape(self.theirs).contiguous()}


def places_in(family: Family, decoder: DecoderConfig, fused: bool = False) -> dict[str, TensorPlace]:
    """Global name -> place, for every parameter of a model, and every buffer that the family knows.

    With `fused`, all experts of a layer are in two tensors, gate above up and down, as transformers holds them in memory and
    saves them with `save_original_format=False`.

    Raises:
        KeyError: the family lacks a parameter.
    """
    parameters, buffers = _shapes(decoder)
    experts = family.experts
    if fused and experts is not None:
        experts = replace(experts, part="mlp", fused=True)
    found = {name: _place(family, experts, decoder, name, shape) for name, shape in parameters.items()}
    found |= _fused(family, found)
    bias = "router.bias" if experts is not None and experts.bias is not None else None
    known = {name: shape for name, shape in buffers.items() if bias is not None and name.endswith(bias)}
    return found | {name: replace(_place(family, experts, decoder, name, shape), buffer=True) for name, shape in known.items()}


def shapes_of(decoder: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Global name -> shape of every parameter of a model; a tied copy is not repeated. Nothing is allocated."""
    return _shapes(decoder)[0]


def _shapes(decoder: DecoderConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    import torch

    with torch.device("meta"):
        module = decoder.build()
    parameters = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    return parameters, {name: tuple(buffer.shape) for name, buffer in module.named_buffers()}


def _place(family: Family, experts: ExpertNames | None, decoder: DecoderConfig, name: str, shape: tuple[int, ...]) -> TensorPlace:
    if name in OUTSIDE:
        return TensorPlace(shape, (OUTSIDE[name],))
    blocks, layer, part, rest = name.split(".", 3)
    if blocks != "blocks":
        raise KeyError(name)
    prefix = f"model.layers.{layer}"
    if part == "mlp" and experts is not None and decoder.shape.has_experts(int(layer)):
        prefix = f"{prefix}.{experts.part}"
        if rest.startswith("experts.") and experts.fused:
            matrix, width = rest.removeprefix("experts."), shape[1]
            if matrix == "down_proj":
                return TensorPlace(shape, (f"{prefix}.experts.down_proj",))
            return TensorPlace(shape, (prefix + FUSED,), fused=(1, width * ("gate_proj", "up_proj").index(matrix), 2 * width))
        if rest.startswith("experts."):
            matrix = rest.removeprefix("experts.")
            matrix = experts.matrices.get(matrix, matrix)
            return TensorPlace(
                shape, tuple(f"{prefix}.experts.{expert}.{matrix}.weight" for expert in range(shape[0])), stacked=True
            )
        theirs = {"router.weight": "gate.weight", "router.bias": experts.bias}.get(rest)
        if theirs is None and rest.startswith("shared."):
            theirs = f"shared_experts.{rest.removeprefix('shared.')}"
        if theirs is None:
            raise KeyError(name)
        return TensorPlace(shape, (f"{prefix}.{theirs}",))
    rows: tuple[int, ...] = ()
    attention = decoder.shape.attention
    if part == "attention" and isinstance(attention, MLA):
        inner, _, end = rest.partition(".")
        rows = latent_rows(attention, decoder.heads, inner)
        rest = f"{LATENT_NAMES.get(inner, inner)}.{end}"
    return TensorPlace(shape, (f"{prefix}.{family.parts[part]}.{rest}",), rows=rows)


def _fused(family: Family, places: Mapping[str, TensorPlace]) -> dict[str, TensorPlace]:
    """Places of what lies above each other in one matrix, from those that each would have alone."""
    found = {}
    for name, place in places.items():
        path, _, rest = name.rpartition(f".{name.split('.')[-2]}.")
        for matrix, parts in family.fused.items():
            if name.split(".")[-2] not in parts or place.stacked:
                continue
            sizes = [places[f"{path}.{part}.{rest}"].shape[0] for part in parts]
            before = sum(sizes[: parts.index(name.split(".")[-2])])
            theirs = place.names[0].replace(f".{name.split('.')[-2]}.", f".{matrix}.")
            found[name] = replace(place, names=(theirs,), fused=(0, before, sum(sizes)))
    return found


def mtp_layers(family: Family, decoder: DecoderConfig, values: Mapping[str, object]) -> tuple[str, ...]:
    """Beginnings of the names of layers behind the last one, which are not read."""
    count = values.get(family.mtp_layers, 0) if family.mtp_layers is not None else 0
    first = decoder.layers
    return tuple(f"model.layers.{layer}." for layer in range(first, first + (count if isinstance(count, int) else 0)))
