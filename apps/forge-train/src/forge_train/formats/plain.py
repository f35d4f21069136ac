"""The format `safetensors`: one file or several, the model's own names, and the model's description in their headers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from forge_core.errors import ForgeError
from forge_core.protocols.weights import NO_EXTRAS, StoredTensor, Weights
from forge_models.hf.reader import DTYPES, INDEX, SINGLE
from forge_train.formats.described import check_fit, describe, facts_of, model_of
from forge_train.formats.folder import new_folder
from forge_train.inference.forge_weights import TOKENIZER

DESCRIPTION = "forge"
"""Key of a file's metadata with the description, as JSON."""

_DTYPES = DTYPES | {"I8": "int8", "I16": "int16", "U16": "uint16", "U32": "uint32", "U64": "uint64", "C64": "complex64"}
_DTYPES |= {"F8_E8M0": "float8_e8m0fnu"}


class PlainWeights:
    """`Weights` of safetensors files: memory-mapped, so what is not asked for is not read.

    Args:
        path: a file, or a folder of them.
        recipe: says which model it is; by default the files do.
        prefix: of the names that are read; others are left out, which a note says.
        origin: what messages call it.

    Raises:
        ForgeError: there are none, a file is damaged, or the tensors do not fit the model: one error with all that does not.
    """

    def __init__(self, path: Path, recipe: str | None = None, prefix: str = "", origin: Path | None = None) -> None:
        origin = origin or path
        opened = [_opened(file) for file in _files(path)]
        self._places: dict[str, tuple[Any, str]] = {}
        left = 0
        for handle in opened:
            for stored in handle.keys():  # noqa: SIM118 (a handle does not iterate)
                if not stored.startswith(prefix):
                    left += 1
                elif self._places.setdefault(stored.removeprefix(prefix), (handle, stored)) != (handle, stored):
                    raise ForgeError(f"{path}: tensor {stored} is in two files; keep the files of one model in the folder")
        if not self._places:
            raise ForgeError(f"{path} has no tensor{f' whose name begins with {prefix!r}' if prefix else ''}")
        texts = {text for handle in opened if (text := (handle.metadata() or {}).get(DESCRIPTION)) is not None}
        if len(texts) > 1:
            raise ForgeError(f"{path}: its files are of different models; keep the files of one model in the folder")
        description = _parsed(texts.pop(), path) if texts else None
        self.tensors: Mapping[str, StoredTensor] = {name: _stored(*place) for name, place in self._places.items()}
        self.model = model_of(description, recipe, origin)
        check_fit(self.model, self.tensors, origin)
        notes = (f"{left} tensors whose names do not begin with {prefix!r} were left out",) if left else ()
        folder = path if path.is_dir() else path.parent
        self.facts = facts_of(description, origin, folder / TOKENIZER, notes)

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Whole tensors, mapped from the files."""
        return {name: handle.get_tensor(stored) for name in names for handle, stored in [self._places[name]]}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> torch.Tensor:
        """The box of one tensor that begins at `offset`."""
        handle, stored = self._places[name]
        if not offset:
            return handle.get_tensor(stored)
        return handle.get_slice(stored)[tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))]


class PlainConverter:
    """The converter `safetensors`."""

    def __init__(self, *, max_shard_bytes: int, recipe: str | None, prefix: str) -> None:
        self.max_shard_bytes, self.recipe, self.prefix = max_shard_bytes, recipe, prefix

    def read(self, path: Path) -> PlainWeights:
        """Opens a file or a folder; see `PlainWeights`."""
        return PlainWeights(path, self.recipe, self.prefix)

    def write(self, path: Path, weights: Weights) -> None:
        """Writes a folder with `model.safetensors`, or with shards and their index, as other libraries name them.

        Raises:
            ForgeError: `path` is taken.
        """
        from safetensors.torch import save_file

        metadata = {"format": "pt", DESCRIPTION: json.dumps(describe(weights))}
        with new_folder(path, weights) as folder:
            shards = list(_shards(weights.tensors, self.max_shard_bytes))
            files: dict[str, str] = {}
            for number, names in enumerate(shards, 1):
                file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                tensors = {self.prefix + name: tensor.contiguous() for name, tensor in weights.read(names).items()}
                save_file(tensors, str(folder / file), metadata=metadata)
                files |= dict.fromkeys(tensors, file)
            if len(shards) > 1:
                total = sum(_bytes(entry) for entry in weights.tensors.values())
                index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
                (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def reference(self, path: Path, tokens: torch.Tensor, extras: Mapping[str, torch.Tensor] = NO_EXTRAS) -> str:
        """The format has tensors and no model."""
        return "safetensors has no model that could be run"


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if not found:
        raise ForgeError(f"{path} is not a safetensors file, nor a folder that holds some")
    if (path / INDEX).is_file():
        try:
            named = set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise ForgeError(f"{path / INDEX} is not an index of safetensors: {cause!r}") from cause
        if odd := sorted(named ^ {file.name for file in found}):
            raise ForgeError(f"{path / INDEX} and the folder differ about {', '.join(odd[:5])}")
    return found


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(file), framework="pt").__enter__()
    except (SafetensorError, OSError) as cause:
        raise ForgeError(f"{file} cannot be read as safetensors: {cause}") from cause


def _parsed(text: str, path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise ForgeError(f"{path}: its description {DESCRIPTION!r} is not JSON: {cause}") from cause
    if not isinstance(found, dict):
        raise ForgeError(f"{path}: its description {DESCRIPTION!r} is not an object")
    return found


def _stored(handle: Any, name: str) -> StoredTensor:
    entry = handle.get_slice(name)
    dtype = str(entry.get_dtype())
    if dtype not in _DTYPES:
        raise ForgeError(f"{name}: dtype {dtype} is not implemented")
    return StoredTensor(tuple(entry.get_shape()), _DTYPES[dtype])


def _bytes(entry: StoredTensor) -> int:
    return prod(entry.shape) * getattr(torch, entry.dtype).itemsize


def _shards(tensors: Mapping[str, StoredTensor], limit: int) -> Iterator[list[str]]:
    """Names in order, cut so that no group has more than `limit` bytes unless it is a single tensor."""
    group: list[str] = []
    size = 0
    for name, entry in tensors.items():
        if group and size + _bytes(entry) > limit:
            yield group
            group, size = [], 0
        group.append(name)
        size += _bytes(entry)
    yield group
