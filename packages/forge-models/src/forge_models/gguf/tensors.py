"""Tensors of a GGUF file: their names, their types, and the conversion of a model's tensors to their bytes and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from forge_core.protocols.weights import StoredTensor, Weights
from forge_models.components.decoder import DecoderConfig
from forge_models.gguf.architectures import FACTORS, Architecture
from forge_models.hf.config import Unsupported
from forge_models.hf.families import FAMILIES
from forge_models.hf.names import places_in

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Quantization = Literal["none", "q8_0"]
TYPES: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""torch's name of a dtype -> its type in a file."""
DTYPES: Mapping[str, str] = {name: dtype for dtype, name in TYPES.items()} | {"Q8_0": "float32"}
"""Type in a file -> dtype of the values that it stands for."""
Q8_BLOCK = 32
"""Number of values of a row that share a scale in `Q8_0`."""
ALWAYS_FP32 = ("norm.weight", "ffn_gate_inp.weight", FACTORS)
"""Suffixes of the names of tensors that readers expect in fp32, besides vectors."""


def library() -> Any:
    """Returns the module `gguf`.

    Raises:
        Unsupported: the package is not installed.
    """
    try:
        import gguf
    except ImportError as cause:
        raise Unsupported("GGUF files need the gguf package: pip install 'forge-models[gguf]'") from cause
    return gguf


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file.

    Attributes:
        name: its name in the file.
        shape: its shape, slowest dimension first.
        parts: the model's tensors that it joins along dimension 0, and their sizes there; empty for a table that is computed from
            the settings.
        rows: row i of the file is row rows[i] of the joined tensor; empty = the same order.
        offset: number that the file adds to every value.
        type: type in the file; empty until `typed`.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]
    rows: tuple[int, ...] = ()
    offset: float = 0.0
    type: str = ""

    def pack(self, tensor: "Tensor") -> "np.ndarray[Any, Any]":
        """Returns the values of the file for a part in the model's order: numbers, or bytes for types that numpy lacks."""
        import torch

        if self.offset:
            tensor = tensor.float() + self.offset
        if self.type == "F32":
            return tensor.float().contiguous().numpy()
        if self.type == "F16":
            return tensor.to(torch.float16).contiguous().numpy()
        if self.type == "BF16":
            return tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
        gguf = library()
        return gguf.quants.quantize(tensor.float().contiguous().numpy(), gguf.GGMLQuantizationType.Q8_0)

    def unpack(self, values: "np.ndarray[Any, Any]") -> "Tensor":
        """Returns a part from the values of the file, in separate memory: the inverse of `pack`, except for rounding."""
        import torch

        if self.type == "BF16":
            tensor = torch.from_numpy(values.copy()).view(torch.bfloat16)
        elif self.type == "Q8_0":
            gguf = library()
            tensor = torch.from_numpy(gguf.quants.dequantize(values.copy(), gguf.GGMLQuantizationType.Q8_0))
        else:
            tensor = torch.from_numpy(values.copy())
        return tensor - self.offset if self.offset else tensor

    def bytes_shape(self) -> tuple[int, ...]:
        """Returns the shape of the array that `pack` returns for the whole tensor."""
        *outer, width = self.shape
        return (*outer, {"BF16": 2 * width, "Q8_0": width // Q8_BLOCK * 34}.get(self.type, width))

    def ordered(self, values: "np.ndarray[Any, Any]", back: bool = False) -> "np.ndarray[Any, Any]":
        """Returns rows in the order of the file, from that of the model; `back`: the other way round."""
        import numpy as np

        if not self.rows:
            return values
        rows = np.array(self.rows)
        return values[rows.argsort() if back else rows]


def tensors_in(architecture: Architecture, decoder: DecoderConfig) -> list[GgufTensor]:
    """Returns the tensors of a file, without types, in the order in which they are written.

    Raises:
        Unsupported: the architecture does not have a tensor of the model.
    """
    gguf = library()
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture.name], decoder.layers)
    try:
        places = places_in(FAMILIES[architecture.family], replace(decoder, mtp=None))
    except KeyError as cause:
        raise Unsupported(f"{architecture.name} has no tensor {cause.args[0]}") from cause
    found: dict[str, GgufTensor] = {}
    for ours, place in places.items():
        theirs = place.names[0].replace(".experts.0.", ".experts.") if place.stacked else place.names[0]
        name = names.get_name(theirs, (".weight", ".bias"))
        if name is None:
            raise Unsupported(f"{architecture.name} has no tensor {ours}")
        if name in found:  # a further part of a fused matrix
            found[name] = replace(found[name], parts=(*found[name].parts, (ours, place.shape[0])))
            continue
        shape = place.shape if place.stacked else place.theirs
        offset = architecture.norm_offset if name.endswith("norm.weight") else 0.0
        rows = _rows(architecture, decoder, name)
        found[name] = GgufTensor(name, shape, ((ours, place.shape[0]),), rows, offset)
    for place in places.values():  # parts of a fused matrix come in the order of their rows
        if place.fused is not None:
            name = names.get_name(place.names[0], (".weight", ".bias"))
            starts = {part: places[part].fused[1] for part, _ in found[name].parts}  # type: ignore[index]
            found[name] = replace(found[name], parts=tuple(sorted(found[name].parts, key=lambda part: starts[part[0]])))
    if decoder.rope.scaling == "llama3":
        found[FACTORS] = GgufTensor(FACTORS, (decoder.shape.head_dim // 2,), ())
    return list(found.values())


def _rows(architecture: Architecture, decoder: DecoderConfig, name: str) -> tuple[int, ...]:
    """Returns the order of rows of q and k whose readers rotate dimensions 2i and 2i + 1, where Forge rotates i and i + half."""
    heads = {"attn_q": decoder.heads, "attn_k": decoder.shape.kv_heads}.get(name.split(".")[-2])
    if not architecture.interleaved or heads is None:
        return ()
    width = decoder.shape.head_dim
    head = [row for pair in range(width // 2) for row in (pair, pair + width // 2)]
    return tuple(start * width + row for start in range(heads) for row in head)


def rope_factors(decoder: DecoderConfig) -> "Tensor":
    """Returns the numbers (head_dim / 2,) by which readers divide the frequencies, for the scaling `llama3`."""
    import torch

    from forge_models.blocks.rope import frequencies_of

    width, device = decoder.shape.head_dim, torch.device("cpu")
    plain = frequencies_of(replace(decoder.rope, **_UNSCALED), width, device)
    return plain / frequencies_of(decoder.rope, width, device)


_UNSCALED: Mapping[str, Any] = {
    "scaling": "none",
    "factor": None,
    "original_max_length": None,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def typed(tensor: GgufTensor, stored: Mapping[str, StoredTensor], quantization: Quantization) -> GgufTensor:
    """Returns a tensor with its type in the file: fp32 for vectors, norms and routers, else that of the weights or quantized.

    Raises:
        Unsupported: the file cannot have the weights' dtype, or rows cannot be quantized.
    """
    dtypes = {stored[name].dtype for name, _ in tensor.parts}
    if len(tensor.shape) < 2 or tensor.name.endswith(ALWAYS_FP32):
        wrong = dtypes - set(TYPES)
        kind = "F32"
    else:
        wrong = dtypes - set(TYPES) if len(dtypes) == 1 else dtypes
        kind = TYPES.get(next(iter(dtypes)), "")
        if quantization == "q8_0" and not wrong:
            if tensor.shape[-1] % Q8_BLOCK:
                raise Unsupported(
                    f"{tensor.name} has rows of {tensor.shape[-1]} values, but q8_0 needs a multiple of {Q8_BLOCK}; "
                    "write it without quantization, with --dtype bf16"
                )
            kind = "Q8_0"
    if wrong:
        raise Unsupported(
            f"{tensor.name} cannot be written from {' and '.join(sorted(dtypes))}; choose one with --dtype, such as bf16"
        )
    return replace(tensor, type=kind)


def bytes_of(tensor: GgufTensor) -> int:
    """Returns the size of a tensor in the file, in bytes."""
    return prod(tensor.bytes_shape()) * {"F32": 4, "F16": 2}.get(tensor.type, 1)


class RoundedWeights:
    """`Weights` with the values that a file has for them: rounded by its types, and by the offset of norms."""

    def __init__(self, weights: Weights, tensors: Sequence[GgufTensor]) -> None:
        self._weights = weights
        self._of = {part: tensor for tensor in tensors for part, _ in tensor.parts}
        self.model, self.facts = weights.model, weights.facts
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(weights.tensors[name].shape, DTYPES[tensor.type]) for name, tensor in self._of.items()
        }

    def read(self, names: Sequence[str]) -> "dict[str, Tensor]":
        """Reads whole tensors and rounds them."""
        read = self._weights.read(names)
        return {name: self._of[name].unpack(self._of[name].pack(tensor)) for name, tensor in read.items()}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> "Tensor":
        """Reads a slice of one tensor and rounds it; whole tensors are read, because blocks of values share a scale."""
        box = tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))
        return self.read([name])[name][box]
