"""Opens a GGUF file: the model from its metadata, tensors memory-mapped."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.protocols.weights import StoredTensor, WeightsInfo
from forge_models.gguf.architectures import ARCHITECTURES, FACTORS, decoder_in, shortest
from forge_models.gguf.tensors import DTYPES, GgufTensor, library, rope_factors, tensors_in
from forge_models.hf.config import Unsupported

if TYPE_CHECKING:
    from torch import Tensor

SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
"""Key of the ids of special tokens -> its name in a file."""


class GgufFile:
    """`Weights` of a GGUF file with a decoder.

    The tokenizer in the file is not read.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file and checks everything except values.

        Raises:
            ConfigError, Unsupported: the file is damaged, or has an architecture, a setting or a tensor that is not implemented.
        """
        self.path = path
        try:
            reader: Any = library().GGUFReader(path)
        except (OSError, ValueError, IndexError) as cause:
            raise Unsupported(f"{path} cannot be read as a GGUF file: {cause}") from cause
        name = self._field(reader, "general.architecture")
        if name not in ARCHITECTURES:
            raise Unsupported(f"{path}: architecture {name!r} is not implemented; implemented are {', '.join(ARCHITECTURES)}")
        self.architecture = ARCHITECTURES[name]
        prefix = f"{name}."
        metadata = {key.removeprefix(prefix): self._field(reader, key) for key in reader.fields if key.startswith(prefix)}
        if "vocab_size" not in metadata and (tokens := reader.fields.get("tokenizer.ggml.tokens")) is not None:
            metadata["vocab_size"] = len(tokens.data)
        self._stored = {tensor.name: tensor for tensor in reader.tensors}
        self.model = decoder_in(self.architecture, metadata, self._stored, str(path))
        self._of = self._match(tensors_in(self.architecture, self.model))
        self.tensors: Mapping[str, StoredTensor] = {}
        for tensor in self._of.values():
            for part, size in tensor.parts:
                shape = (size, *tensor.shape[1:])
                self.tensors = {**self.tensors, part: StoredTensor(shape, DTYPES[tensor.type])}
        ids = {key: self._field(reader, f"tokenizer.ggml.{name}_token_id") for key, name in SPECIAL.items()}
        ends = [self._field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        ends = [each for each in ends if each is not None]
        has_tokenizer = self._field(reader, "tokenizer.ggml.model") not in (None, "none", "no_vocab")
        self.facts = WeightsInfo(
            special_tokens=ids,
            ends=tuple(ends) if len(ends) > 1 else (),
            origin=str(path),
            family=self.architecture.family,
            notes=("the tokenizer in the file was not read; pass its folder with --tokenizer",) if has_tokenizer else (),
        )

    def read(self, names: Sequence[str]) -> "dict[str, Tensor]":
        """Returns whole tensors, in separate memory."""
        return {name: self._part(name) for name in names}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> "Tensor":
        """Returns the box of one tensor that begins at `offset`; reads the whole tensor."""
        return self._part(name)[tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))]

    def _part(self, name: str) -> "Tensor":
        tensor = self._of[name]
        values = tensor.ordered(self._stored[tensor.name].data, back=True)
        start = 0
        for part, size in tensor.parts:
            if part == name:
                return tensor.unpack(values[start : start + size])
            start += size
        raise AssertionError(name)

    def _match(self, wanted: Sequence[GgufTensor]) -> dict[str, GgufTensor]:
        """Returns the tensor of the file for every tensor of the model.

        Raises:
            Unsupported: tensors are missing, unexpected, or have another shape or type; names all of them.
        """
        faults = [f"{name}: unexpected" for name in sorted(set(self._stored) - {tensor.name for tensor in wanted})]
        found: dict[str, GgufTensor] = {}
        for tensor in wanted:
            stored = self._stored.get(tensor.name)
            if stored is None:
                faults.append(f"{tensor.name}: missing")
                continue
            shape, kind = tuple(int(size) for size in reversed(stored.shape)), stored.tensor_type.name
            if shape != tensor.shape:
                faults.append(f"{tensor.name}: shape {shape}, but the metadata requires {tensor.shape}")
            elif kind not in DTYPES:
                faults.append(f"{tensor.name}: type {kind} is not implemented; implemented are {', '.join(DTYPES)}")
            else:
                found |= {part: replace(tensor, type=kind) for part, _ in tensor.parts}
        if faults:
            more = [f"and {len(faults) - 20} more"] if len(faults) > 20 else []
            raise Unsupported("\n  ".join([f"the tensors in {self.path} do not fit:", *faults[:20], *more]))
        if FACTORS in self._stored:
            self._check_factors()
        return found

    def _check_factors(self) -> None:
        """Checks that the table of frequencies is that of the settings.

        Raises:
            Unsupported: it is not.
        """
        import torch

        factors = torch.from_numpy(self._stored[FACTORS].data.copy())
        if not torch.allclose(factors, rope_factors(self.model), rtol=1e-5):
            raise Unsupported(f"{self.path}: {FACTORS} differs from the scaling in the metadata; write the file again")

    @staticmethod
    def _field(reader: Any, key: str) -> Any:
        """Returns the value of a key; None if it is absent."""
        field = reader.fields.get(key)
        value = None if field is None else field.contents()
        return shortest(value) if isinstance(value, float) else value
