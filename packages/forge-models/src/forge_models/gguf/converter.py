"""The converter `gguf`, chosen by `--from` and `--to`: one file, for the architectures that tests compare with transformers."""

import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from forge_core.component import Component
from forge_core.errors import ConfigError
from forge_core.files import publish, sync_path
from forge_core.machine import available_memory
from forge_core.protocols.weights import NO_EXTRAS, Weights
from forge_core.terminal import size
from forge_models.components.decoder import DecoderConfig
from forge_models.gguf.architectures import ARCHITECTURES, Architecture, decoder_in, stored_metadata
from forge_models.gguf.reader import GgufFile
from forge_models.gguf.tensors import (
    GgufTensor,
    Quantization,
    RoundedWeights,
    bytes_of,
    library,
    rope_factors,
    tensors_in,
    typed,
)
from forge_models.gguf.tokenizer import tokenizer_metadata
from forge_models.hf.config import Unsupported
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import config_of, meaning_of
from forge_models.hf.reader import TOKENIZER_FILES, TOKENS, tokenizer_of

if TYPE_CHECKING:
    from torch import Tensor

FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""`general.file_type` for the type of most tensors."""


@dataclass(frozen=True, kw_only=True)
class GgufConverter(Component):
    """GGUF files, for llama.cpp and programs that use it: Llama, Qwen2, Qwen3, Gemma-2 and 3, StableLM, Phi-3."""

    family: str | None = None
    """Architecture to write, such as `qwen3moe`, or the Hugging Face family that has it; by default that of the weights' origin,
    else the first that fits."""
    tokenizer: str | None = None
    """Folder of the tokenizer to write; by default the files that came with the weights."""
    quantization: Quantization = "none"
    """Quantization of matrices: `q8_0` stores 8 bits and a scale for every 32 values. Vectors stay in fp32."""
    pre_tokenizer: str | None = None
    """Name that llama.cpp has for the rule that splits text into words; by default recognized from the tokenizer's files.
    `none` leaves the tokenizer out."""

    def read(self, path: Path) -> GgufFile:
        """Opens a file; see `GgufFile`."""
        return GgufFile(path)

    def stored(self, weights: Weights) -> RoundedWeights:
        """Returns the weights with the values that the file has for them."""
        return RoundedWeights(weights, self._plan(weights)[1])

    def write(self, path: Path, weights: Weights) -> None:
        """Writes a file, complete or not at all.

        MTP modules, which logits do not need, are left out.

        Raises:
            Unsupported: no architecture describes the model or its tokenizer, or `path` exists.
        """
        if path.exists():
            raise Unsupported(f"{path} exists; choose another name")
        if getattr(weights.model, "labels", ()):
            raise Unsupported("a GGUF file has no classifier; write a folder in the Hugging Face format (--to hf)")
        architecture, tensors = self._plan(weights)
        assert isinstance(weights.model, DecoderConfig)
        folder = weights.facts.tokenizer if self.tokenizer is None else Path(self.tokenizer)
        if self.tokenizer is not None and tokenizer_of(Path(self.tokenizer)) is None:
            raise Unsupported(f"{self.tokenizer} contains no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}")
        metadata = general_metadata(path.stem, tensors, self.quantization)
        metadata |= {f"{architecture.name}.{key}": value for key, value in architecture.write(weights.model).items()}
        metadata |= tokenizer_metadata(folder, weights.facts, weights.model.vocab_size, self.pre_tokenizer)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        try:
            _write(partial, architecture, metadata, tensors, weights)
            sync_path(partial)
            publish(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def reference(self, path: Path, tokens: "Tensor", extras: "Mapping[str, Tensor]" = NO_EXTRAS) -> "Tensor | str":
        """Returns the logits of transformers in fp32, or a text that says why they are not available.

        transformers takes the tensors from the file, and settings from Forge: it does not read all settings of a file.
        """
        del extras
        # an element of q8_0 takes 34 bytes for 32 values, and 4 bytes of each in fp32
        needed, free = 4 * path.stat().st_size, available_memory()
        if free is not None and needed > free // 2:
            return f"the other library would need about {size(needed)}, {size(free)} are free"
        import torch

        if missing := [name for name in ("transformers", "accelerate") if find_spec(name) is None]:
            return f"{missing[0]} is not installed"  # transformers needs accelerate for this format
        import transformers

        file = GgufFile(path)
        values = config_of(FAMILIES[file.architecture.family], file.model) | dict.fromkeys(TOKENS)
        kind = str(values.pop("model_type"))
        config = transformers.AutoConfig.for_model(kind, **values)
        with redirect_stderr(StringIO()), torch.no_grad():  # a bar of progress
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                config=config,
                dtype=torch.float32,
                local_files_only=True,
                attn_implementation="eager",
                experts_implementation="eager",
            )
            return model.eval()(tokens).logits

    def _plan(self, weights: Weights) -> tuple[Architecture, list[GgufTensor]]:
        if type(weights.model) is not DecoderConfig:  # a subclass has parts that no architecture describes
            raise Unsupported(f"a {type(weights.model).__name__} cannot be written as a GGUF file; write it with --to hf")
        if self.quantization not in (known := get_args(Quantization)):
            raise Unsupported(f"quantization {self.quantization!r} is not implemented; choose one of {', '.join(known)}")
        architecture = architecture_of(weights.model, self.family, weights.facts.family)
        tensors = [typed(each, weights.tensors, self.quantization) for each in tensors_in(architecture, weights.model)]
        return architecture, tensors


def general_metadata(name: str, tensors: Sequence[GgufTensor], quantization: Quantization) -> dict[str, Any]:
    """Returns the keys `general.*`, except for the architecture, which the gguf package writes."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.type] = sizes.get(tensor.type, 0) + bytes_of(tensor)
    found: dict[str, Any] = {"general.type": "model", "general.name": name}
    found["general.file_type"] = FILE_TYPES[max(sizes, key=lambda kind: sizes[kind])]
    return found | ({"general.quantization_version": library().GGML_QUANT_VERSION} if quantization != "none" else {})


def _write(
    path: Path, architecture: Architecture, metadata: Mapping[str, Any], tensors: Sequence[GgufTensor], weights: Weights
) -> None:
    """Writes a file; one tensor is in memory at a time."""
    import numpy as np

    gguf = library()
    kinds = gguf.GGUFValueType

    class Writer(gguf.GGUFWriter):
        """Also writes empty lists: llama.cpp needs the list of merges of a tokenizer that has none, such as that of bytes."""

        def _pack_val(self, val: Any, vtype: Any, add_vtype: bool, sub_type: Any = None) -> bytes:
            if vtype == kinds.ARRAY and not val:
                return struct.pack("<IIQ", kinds.ARRAY, kinds.STRING, 0)
            return super()._pack_val(val, vtype, add_vtype, sub_type)

    writer: Any = Writer(path, architecture.name)
    for key, value in metadata.items():
        kind = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING, list: kinds.ARRAY}[type(value)]
        writer.add_key_value(key, value, kind)
    for tensor in tensors:
        dtype = np.dtype({"F32": np.float32, "F16": np.float16}.get(tensor.type, np.uint8))
        kind = gguf.GGMLQuantizationType[tensor.type]
        writer.add_tensor_info(tensor.name, tensor.bytes_shape(), dtype, bytes_of(tensor), kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(values_of(tensor, weights))
        writer.flush()
    finally:
        writer.close()


def values_of(tensor: GgufTensor, weights: Weights) -> Any:
    """Returns the values of one tensor of the file."""
    import numpy as np

    if not tensor.parts:
        assert isinstance(weights.model, DecoderConfig)
        return tensor.pack(rope_factors(weights.model))
    read = weights.read([part for part, _ in tensor.parts])
    values = [tensor.pack(read[part]) for part, _ in tensor.parts]
    joined = values[0] if len(values) == 1 else np.concatenate(values)
    return np.ascontiguousarray(tensor.ordered(joined))


def misfits_of(architecture: Architecture, decoder: DecoderConfig) -> list[str]:
    """Returns what a file of an architecture cannot describe of `decoder`; empty if reading it back returns the same model."""
    try:
        metadata = stored_metadata(architecture.write(decoder))
        again = decoder_in(architecture, metadata, [each.name for each in tensors_in(architecture, decoder)], architecture.name)
    except (ConfigError, Unsupported) as refusal:
        return [str(refusal)]
    wanted, got = meaning_of(decoder), meaning_of(again)
    return [
        f"{name} = {wanted.get(name)!r}, it has {got.get(name)!r}"
        for name in dict.fromkeys((*wanted, *got))
        if wanted.get(name) != got.get(name)
    ]


def architecture_of(decoder: DecoderConfig, wanted: str | None = None, preferred: str = "") -> Architecture:
    """Returns the architecture that fully describes `decoder`: the wanted one, else that of the preferred family, else the first.

    Args:
        decoder: the model.
        wanted: name of an architecture, or of a Hugging Face family that has one.
        preferred: Hugging Face family that the weights come from.

    Raises:
        Unsupported: there is none; names for each what it cannot describe.
    """
    by_family = {one.family: one for one in ARCHITECTURES.values()}
    if wanted is not None and wanted not in ARCHITECTURES and wanted not in by_family:
        raise Unsupported(
            f"GGUF for {wanted!r} is not implemented; implemented are {', '.join(ARCHITECTURES)}. "
            "Write a Hugging Face folder (--to hf), which other programs convert"
        )
    if wanted is not None:
        order = [ARCHITECTURES.get(wanted) or by_family[wanted]]
    else:
        order = [*([by_family[preferred]] if preferred in by_family else []), *ARCHITECTURES.values()]
    reasons = []
    for architecture in dict.fromkeys(order):
        if not (found := misfits_of(architecture, decoder)):
            return architecture
        reasons.append(f"{architecture.name}: {'; '.join(found)}")
    origin = f" (its family is {preferred})" if preferred and preferred not in by_family else ""
    lines = [f"no GGUF architecture that Forge writes can describe this model{origin}; write a Hugging Face folder (--to hf):"]
    raise Unsupported("\n  ".join([*lines, *reasons]))
