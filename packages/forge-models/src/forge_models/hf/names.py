"""Maps global names to names in a Hugging Face checkpoint, from a family's data, and converts tensors between the two layouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forge_core.component import Component
from forge_models.components.attentions import MLA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.recurrent import Hybrid
from forge_models.hf.family import Family
from forge_models.hf.labels import SCORE
from forge_models.hf.layers import INDEXER_NAMES, LATENT_NAMES, ExpertNames, latent_rows, rotated_rows

if TYPE_CHECKING:
    from torch import Tensor

OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "norm.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
}
"""Tensors outside the blocks; the same in every family."""

HEAD = "lm_head.weight"
JOINT = ("q_proj", "k_proj", "v_proj")
"""Our matrices that `Family.joint` has in turns."""
FUSED = ".experts.gate_up_proj"
"""Suffix of the name of a tensor that stacks the gate and up projections of all experts of a layer."""
DERIVED = ("rotary_emb.inv_freq",)
"""Suffixes of buffers that are computed from the configuration; old checkpoints contain them, but they are not read."""


@dataclass(frozen=True)
class TensorPlace:
    """Position of one of the model's tensors in a checkpoint.

    Attributes:
        shape: shape of the model's tensor.
        names: name in the checkpoint; if stacked, one name for each entry of dimension 0.
        stacked: whether the model's tensor stacks separate tensors of the checkpoint.
        rows: row i of the model's tensor is row rows[i] of the checkpoint's, which has more rows if `fused`; empty = the same
            order.
        fused: (dimension, start, size): the model's tensor is the part of the checkpoint's tensor from `start` along `dimension`,
            whose size there is `size`; None = the whole tensor.
        step: the part has every `step`-th index of that dimension, from `start` on.
        turned: whether the last two dimensions are exchanged in the checkpoint; `fused` is in the model's order.
        buffer: whether it is a buffer, whose dtype does not follow that of the checkpoint.
        reshaped: shape in the checkpoint if it differs but the order of the elements does not; empty = the same shape.
        integers: whether it is a buffer of int64.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    stacked: bool = False
    rows: tuple[int, ...] = ()
    fused: tuple[int, int, int] | None = None
    step: int = 1
    turned: bool = False
    buffer: bool = False
    reshaped: tuple[int, ...] = ()
    integers: bool = False

    @property
    def theirs(self) -> tuple[int, ...]:
        """Shape of each tensor in the checkpoint."""
        if self.reshaped:
            return self.reshaped
        shape = self.shape[1:] if self.stacked else self.shape
        if self.fused is not None:
            axis, _, size = self.fused
            shape = (*shape[:axis], size, *shape[axis + 1 :])
        return (*shape[:-2], shape[-1], shape[-2]) if self.turned else shape

    def box(self, stored: Any, box: tuple[slice, ...]) -> "Tensor":
        """Returns a box of the model's tensor from the checkpoint's tensor, of which as little as possible is read by slicing."""
        step = self.step
        if self.fused is not None:
            axis, start, _ = self.fused
            first, last = box[axis].start, box[axis].stop
            read = slice(start + first * step, start + (last - 1) * step + 1 if last > first else start + first * step)
            box = (*box[:axis], read, *box[axis + 1 :])
        found = stored[(*box[:-2], box[-1], box[-2]) if self.turned else box]
        found = found.transpose(-1, -2) if self.turned else found
        return found if self.fused is None or step == 1 else found[(*[slice(None)] * self.fused[0], slice(None, None, step))]

    def part(self, whole: "Tensor") -> "Tensor":
        """Returns the view of the checkpoint's tensor that is the model's."""
        return self.box(whole, tuple(slice(0, size) for size in self.shape))

    def join(self, tensors: "Sequence[Tensor]") -> "Tensor":
        """Returns the model's tensor from the checkpoint's tensors, in the order of `names`."""
        import torch

        if self.stacked:
            return torch.stack(list(tensors))
        if (self.fused is not None or self.turned) and not self.rows:
            return self.part(tensors[0])
        found = tensors[0][list(self.rows)] if self.rows else tensors[0]
        return found.reshape(self.shape) if self.reshaped else found

    def split(self, tensor: "Tensor") -> "dict[str, Tensor]":
        """Returns the checkpoint's tensors by name from the model's tensor, each in separate memory."""
        import torch

        if self.stacked:
            return {name: part.clone() for name, part in zip(self.names, tensor, strict=True)}
        if self.rows:
            tensor = tensor[torch.tensor(self.rows).argsort()]
        if self.turned:
            return {self.names[0]: tensor.transpose(-1, -2).contiguous()}
        return {self.names[0]: tensor.reshape(self.theirs).contiguous()}


def places_in(family: Family, decoder: DecoderConfig, fused: bool = False) -> dict[str, TensorPlace]:
    """Returns global name -> place for every parameter of a model, and for every buffer that the family knows.

    With `fused`, all experts of a layer are in two tensors, gate and up together and down, as transformers keeps them in memory
    and saves them with `save_original_format=False`.

    Raises:
        KeyError: the family does not have a parameter of the model.
    """
    parameters, buffers = _shapes(decoder)
    experts = family.experts
    if fused and experts is not None and not experts.fused:
        experts = replace(experts, part=experts.fused_part, fused=True)
    found = {name: _place(family, experts, decoder, name, shape) for name, shape in parameters.items()}
    found |= _fused(family, found)
    ends = ("router.bias",) if experts is not None and experts.bias is not None else ()
    ends += ("router.table",) if experts is not None and experts.table is not None else ()
    ends += (".scalar",) if "scalar" in family.parts else ()
    known = {name: shape for name, shape in buffers.items() if name.endswith(ends)}
    for name, shape in known.items():
        place = _place(family, experts, decoder, name, shape)
        found[name] = replace(place, buffer=True, integers=name.endswith("router.table"))
    return found


def shapes_of(model: Component) -> dict[str, tuple[int, ...]]:
    """Returns global name -> shape of every parameter of a model; tied copies are left out. Allocates nothing."""
    return _shapes(model)[0]


def _shapes(model: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    import torch

    with torch.device("meta"):
        module = model.build()
    parameters = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    return parameters, {name: tuple(buffer.shape) for name, buffer in module.named_buffers()}


def _place(family: Family, experts: ExpertNames | None, decoder: DecoderConfig, name: str, shape: tuple[int, ...]) -> TensorPlace:
    if name == "head.weight" and decoder.labels:
        return TensorPlace(shape, (SCORE,))
    if (theirs := {**OUTSIDE, **family.outside}.get(name)) is not None:
        return TensorPlace(shape, (theirs,))
    if (own := family.place(decoder, name, shape)) is not None:
        return TensorPlace(shape, own[:1], reshaped=() if own[1] == shape else own[1])
    blocks, layer, part, *further = name.split(".", 3)
    if blocks != "blocks":
        raise KeyError(name)
    if not further:
        return TensorPlace(shape, (f"{family.layers}.{layer}.{family.parts[part]}",))
    rest = further[0]
    prefix = f"{family.layers}.{family.layer_of(decoder, int(layer), part)}"
    if part == "mlp" and experts is not None and decoder.shape.has_experts(int(layer)):
        if rest in experts.others:
            return TensorPlace(shape, (f"{prefix}.{experts.others[rest]}",))
        prefix = f"{prefix}.{experts.part}".removesuffix(".")
        if rest.startswith("experts.") and experts.interleaved:
            return _interleaved(f"{prefix}.{rest}", shape)
        if rest.startswith("experts.") and experts.fused:
            matrix, width = rest.removeprefix("experts."), shape[1]
            if matrix == "down_proj":
                return TensorPlace(shape, (f"{prefix}.experts.down_proj",), turned=experts.turned)
            fused = (1, width * ("gate_proj", "up_proj").index(matrix), 2 * width)
            return TensorPlace(shape, (prefix + FUSED,), fused=fused, turned=experts.turned)
        if rest.startswith("experts."):
            matrix = rest.removeprefix("experts.")
            matrix = experts.matrices.get(matrix, matrix)
            return TensorPlace(
                shape, tuple(f"{prefix}.experts.{expert}.{matrix}.weight" for expert in range(shape[0])), stacked=True
            )
        named = {
            "router.weight": f"{experts.router}.weight",
            "router.bias": experts.bias,
            "router.table": experts.table,
            "shared_gate": experts.shared_gate,
        }
        theirs = named.get(rest)
        linear, _, end = rest.partition(".")
        if linear in experts.latent:
            theirs = f"{experts.latent[linear]}.{end}"
        if theirs is None and rest.startswith("shared."):
            theirs = f"{experts.shared}.{rest.removeprefix('shared.')}"
        if theirs is None:
            raise KeyError(name)
        return TensorPlace(shape, (f"{prefix}.{theirs}",))
    rows: tuple[int, ...] = ()
    named, _, end = rest.partition(".")
    if (theirs := family.parts.get(f"{part}.{named}")) is not None:
        return TensorPlace(shape, (f"{prefix}.{theirs}.{end}",))
    attention = decoder.shape.attention
    if part == "attention" and isinstance(attention, Hybrid) and not attention.is_full(int(layer)):
        return _recurrent(family, decoder, attention.recurrent, f"{prefix}.{family.recurrent}", rest, shape)
    attention = getattr(attention, "full", attention)
    inner, _, end = rest.partition(".")
    if family.joint is not None and part == "attention" and inner in JOINT:
        rows = _of_each_head(decoder, JOINT.index(inner))
        theirs = f"{prefix}.{family.parts[part]}.{family.joint}.{end}"
        return TensorPlace(shape, (theirs,), rows=rows, fused=(0, 0, len(JOINT) * shape[0]))
    if inner in family.matrices:
        rest = f"{family.matrices[inner]}.{end}"
    if part == "attention" and isinstance(attention, MLA):
        rows = latent_rows(attention, decoder.heads, inner)
        rest = f"{LATENT_NAMES.get(inner, inner)}.{end}"
        if inner == "indexer":
            layer, _, slot = end.partition(".")
            rest = f"indexer.{INDEXER_NAMES.get(layer, layer)}.{slot}"
    if family.neighbors and part == "attention" and inner in ("q_proj", "k_proj"):
        rows = rotated_rows(decoder.shape.head_dim, decoder.heads if inner == "q_proj" else decoder.shape.kv_heads)
    turned = family.turned and len(shape) == 2
    return TensorPlace(shape, (f"{prefix}.{family.parts[part]}.{rest}",), rows=rows, turned=turned)


def _of_each_head(decoder: DecoderConfig, place: int) -> tuple[int, ...]:
    """Returns the rows of a checkpoint's joint matrix that are those of q (`place` 0), k (1) or v (2)."""
    width = decoder.shape.head_dim
    starts = (head * len(JOINT) * width + place * width for head in range(decoder.heads))
    return tuple(start + row for start in starts for row in range(width))


def _interleaved(path: str, shape: tuple[int, ...]) -> TensorPlace:
    """Returns the place of a parameter of experts whose gate and up projections alternate in one tensor, inputs first."""
    prefix, _, last = path.rpartition(".")
    matrix, _, slot = last.partition("_")
    end, turned = ("", True) if slot == "proj" else ("_bias", False)
    if matrix == "down":
        return TensorPlace(shape, (f"{prefix}.down_proj{end}",), turned=turned)
    fused = (1, ("gate", "up").index(matrix), 2 * shape[1])
    return TensorPlace(shape, (f"{prefix}.gate_up_proj{end}",), fused=fused, step=2, turned=turned)


def _recurrent(family: Family, decoder: DecoderConfig, part: Any, prefix: str, name: str, shape: tuple[int, ...]) -> TensorPlace:
    known = family.recurrent is not None and isinstance(part, family.recurrent_parts)
    found = family.recurrent_places(part, decoder)(name) if known else None
    if found is None:
        raise KeyError(name)
    theirs, rows, count, rest = found
    reshaped = (count, *rest) if rest and rest != shape[1:] else ()
    return TensorPlace(shape, (f"{prefix}.{theirs}",), rows=rows, fused=(0, 0, count) if rows else None, reshaped=reshaped)


def _fused(family: Family, places: Mapping[str, TensorPlace]) -> dict[str, TensorPlace]:
    """Returns the places of projections that the family fuses into one matrix, from their places as separate matrices."""
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
    """Returns the name prefixes of the MTP layers after the last layer, which are not read."""
    count = values.get(family.mtp_layers, 0) if family.mtp_layers is not None else 0
    first = decoder.layers
    return family.mtp_modules + tuple(
        f"model.layers.{layer}." for layer in range(first, first + (count if isinstance(count, int) else 0))
    )
