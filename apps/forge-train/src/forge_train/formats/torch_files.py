"""The formats `dcp` and `torch`: checkpoints of `torch.distributed.checkpoint`, and `torch.save` files with a dict of tensors.

Both are pickles. Next to torch's files, Forge writes `forge.json` with the position and digest of each tensor's bytes, so that
it can read them without unpickling. Files without `forge.json`, or files that have changed since, come from somebody else. A
separate process unpickles tensors and their descriptions, and refuses files that contain anything else without `--unsafe-pickle`.

The keys of `dcp` are the names of parameters at the top, as torchtitan has written them since its pull request 1347 of 2025.
Checkpoints of `{"model": ...}`, as torchtitan wrote them before, have the prefix `model.`. Names and orientation of tensors are
Forge's; a model with other names needs a mapping, or the format `hf`.
"""

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from io import BufferedIOBase
from math import prod
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import IO, Any
from warnings import catch_warnings
from weakref import finalize

import torch

from forge_ckpt.format.tensor_bytes import DTYPES
from forge_core.errors import ForgeError
from forge_core.protocols.weights import NO_EXTRAS, StoredTensor, Weights
from forge_train.formats.forge import TOKENIZER
from forge_train.formats.plain import PlainWeights, check_fit, describe, facts_of, model_of, new_folder
from forge_train.formats.unpickle import METADATA, unpickle

SIDECAR = "forge.json"


@dataclass(frozen=True)
class StoredBytes:
    """Position of a tensor's bytes in a file, and their blake2b digest."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    digest: str

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @classmethod
    def parsed(cls, entry: Mapping[str, Any], folder: Path) -> "StoredBytes":
        """Parses the entry of a tensor in `forge.json`.

        Raises:
            ValueError: the entry does not point into a file in the folder.
        """
        place = cls(**{**entry, "shape": tuple(map(int, entry["shape"]))})
        file = folder / place.file
        if Path(place.file).name != place.file or file.is_symlink() or min(0, place.start, *place.shape) < 0:
            raise ValueError(place.file)
        if place.start + place.bytes > file.stat().st_size:
            raise ValueError(place.file)
        return place


class BytesWeights:
    """`Weights` that Forge wrote: reads the bytes that `forge.json` points to, without unpickling.

    Raises:
        ForgeError: the tensors do not fit the model.
    """

    def __init__(self, folder: Path, content: Mapping[str, Any], places: Mapping[str, StoredBytes], recipe: str | None) -> None:
        self._folder, self._places = folder, places
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(place.shape, place.dtype) for name, place in places.items()
        }
        self.model = model_of(content, recipe, folder)
        check_fit(self.model, self.tensors, folder)
        self.facts = facts_of(content, folder, folder / TOKENIZER)

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Reads whole tensors.

        Raises:
            ForgeError: the bytes have changed since they were written.
        """
        return {name: self._tensor(name) for name in names}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> torch.Tensor:
        """Reads the slice of one tensor at `offset` with shape `extent`; reads the whole tensor to check its digest."""
        return self._tensor(name)[tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))]

    def _tensor(self, name: str) -> torch.Tensor:
        place = self._places[name]
        with (self._folder / place.file).open("rb") as file:
            file.seek(place.start)
            data = bytearray(file.read(place.bytes))
        if blake2b(data).hexdigest() != place.digest:
            raise ForgeError(
                f"{self._folder / place.file}: the bytes of {name} at {place.start} have changed since they were written; "
                "restore the file"
            )
        dtype = DTYPES[place.dtype]
        return torch.frombuffer(data, dtype=dtype).reshape(place.shape) if data else torch.empty(place.shape, dtype=dtype)


def read_pickled(
    path: Path, kind: str, marker: Path, *, recipe: str | None, prefix: str, unsafe: bool
) -> BytesWeights | PlainWeights:
    """Opens pickled weights, by `forge.json` or by unpickling them in another process.

    Args:
        kind: `dcp` or `torch`.
        marker: the file by which the format is recognized; `forge.json` is ignored if this file has changed since.
        unsafe: also unpickle objects that are not tensors.

    Raises:
        ForgeError: there are no such weights, unpickling failed, or the tensors do not fit the model.
    """
    if not marker.is_file():
        raise ForgeError(f"{path} is not of format {kind!r}: {marker} is missing")
    if (found := _of_forge(path, marker)) is not None:
        return BytesWeights(path, *found, recipe)
    if (path / SIDECAR).exists() and not unsafe:
        raise ForgeError(
            f"{path} has changed since Forge wrote it: {SIDECAR} does not fit its files. Restore them; to read them as they are, "
            "without checking their bytes, pass --unsafe-pickle"
        )
    folder = mkdtemp(prefix="forge-unpickled-")
    try:
        left = unpickle(kind, path, Path(folder), unsafe, prefix)
        weights = PlainWeights(Path(folder), recipe, prefix, origin=path, left=left)
    except BaseException:
        rmtree(folder, ignore_errors=True)
        raise
    finalize(weights, rmtree, folder, ignore_errors=True)
    return weights


def write_sidecar(folder: Path, weights: Weights, marker: Path, places: Mapping[str, StoredBytes]) -> None:
    """Writes `forge.json` next to torch's files."""
    tensors = {name: vars(place) | {"shape": list(place.shape)} for name, place in places.items()}
    content = {"version": 1, "marker": _digest(marker), **describe(weights), "tensors": tensors}
    (folder / SIDECAR).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def place_in(file: Path, span: tuple[int, int], key: str, stored: StoredTensor) -> StoredBytes:
    """Returns the place of storage `key` in an archive of `torch.save`, which is at `span` (start, length) of a file."""
    with file.open("rb") as raw, zipfile.ZipFile(_Part(raw, sum(span))) as archive:
        entry = next(item for item in archive.infolist() if item.filename.endswith(f"/data/{key}"))
        raw.seek(entry.header_offset + 26)  # lengths of name and extra field; the bytes follow these fields
        name, extra = (int.from_bytes(raw.read(2), "little") for _ in range(2))
        start = entry.header_offset + 30 + name + extra
        raw.seek(start)
        digest = blake2b(raw.read(prod(stored.shape) * DTYPES[stored.dtype].itemsize)).hexdigest()
    return StoredBytes(stored.dtype, stored.shape, file.name, start, digest)


def _of_forge(folder: Path, marker: Path) -> tuple[Mapping[str, Any], Mapping[str, StoredBytes]] | None:
    """Returns the content of `forge.json` and the places in it; None if it is missing, invalid or of other files."""
    try:
        content = json.loads((folder / SIDECAR).read_text(encoding="utf-8"))
        places = {name: StoredBytes.parsed(entry, folder) for name, entry in content["tensors"].items()}
        mine = content["version"] == 1 and content["marker"] == _digest(marker)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return (content, places) if mine else None


def _digest(file: Path) -> str:
    found = blake2b()
    with file.open("rb") as opened:
        while part := opened.read(1 << 20):
            found.update(part)
    return found.hexdigest()


class _Part(BufferedIOBase):
    """A view of a file that ends at `end`, the end of an archive in it."""

    def __init__(self, file: IO[bytes], end: int) -> None:
        self._file, self._end = file, end

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(self._end + offset if whence == 2 else offset, 0 if whence == 2 else whence)

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._end - self._file.tell())
        return self._file.read(left if size is None or size < 0 else min(size, left))


class DcpConverter:
    """The converter `dcp`."""

    def __init__(self, *, recipe: str | None, prefix: str, names: str, unsafe_pickle: bool) -> None:
        self.recipe, self.prefix, self.names, self.unsafe_pickle = recipe, prefix, names, unsafe_pickle

    def read(self, path: Path) -> Weights:
        """Opens a checkpoint; see `read_pickled`, and `read_framework` for the names of other frameworks."""
        if self.names != "forge":
            from forge_train.formats.frameworks import FRAMEWORKS, read_framework

            return read_framework(FRAMEWORKS[self.names], path, self.recipe, self.unsafe_pickle)
        return read_pickled(path, "dcp", path / METADATA, recipe=self.recipe, prefix=self.prefix, unsafe=self.unsafe_pickle)

    def write(self, path: Path, weights: Weights) -> None:
        """Writes a checkpoint of one rank, one tensor at a time, and `forge.json` next to it.

        Raises:
            ForgeError: `path` exists and is not an empty folder, or the names are not Forge's.
        """
        if self.names != "forge":
            raise ForgeError(f"Forge reads checkpoints of {self.names} and does not write them; write the format hf instead")
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        prefix = self.prefix
        failed: list[Exception] = []

        class OnDemand(DefaultSavePlanner):
            """Reads each tensor only when its bytes are written."""

            def lookup_object(self, index: Any) -> torch.Tensor:
                name = index.fqn.removeprefix(prefix)
                try:
                    return weights.read([name])[name]
                except Exception as cause:
                    failed.append(cause)
                    raise

        outlines = {
            prefix + name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
            for name, entry in weights.tensors.items()
        }
        with new_folder(path, weights) as folder:
            with catch_warnings(action="ignore", category=UserWarning):  # torch warns about saving from one process
                try:
                    dcp.save(outlines, checkpoint_id=folder, planner=OnDemand(), no_dist=True)
                except dcp.CheckpointException:
                    if failed:
                        raise failed[0] from None
                    raise
            places = {}
            # Read again: torch 2.11 does not return where it wrote.
            written: Any = dcp.FileSystemReader(folder).read_metadata().storage_data
            for index, info in written.items():
                name = index.fqn.removeprefix(prefix)
                span = (info.offset, info.length)
                places[name] = place_in(folder / info.relative_path, span, "0", weights.tensors[name])
            write_sidecar(folder, weights, folder / METADATA, places)

    def reference(self, path: Path, tokens: torch.Tensor, extras: Mapping[str, torch.Tensor] = NO_EXTRAS) -> str:
        """Returns why there is no reference: the format has only tensors."""
        return "a distributed checkpoint has no model to run"


TORCH_FILE = "model.pt"


class TorchConverter:
    """The converter `torch`."""

    def __init__(self, *, recipe: str | None, prefix: str, names: str, unsafe_pickle: bool) -> None:
        self.recipe, self.prefix, self.names, self.unsafe_pickle = recipe, prefix, names, unsafe_pickle

    def read(self, path: Path) -> Weights:
        """Opens a file of any name, or a folder with `model.pt`; see `read_pickled`, and `read_nanogpt` for its names."""
        if self.names != "forge":
            from forge_train.formats.frameworks import read_nanogpt

            return read_nanogpt(path, self.recipe, self.unsafe_pickle)
        file = path / TORCH_FILE if path.is_dir() else path
        return read_pickled(
            file.parent if path.is_dir() else path,
            "torch",
            file,
            recipe=self.recipe,
            prefix=self.prefix,
            unsafe=self.unsafe_pickle,
        )

    def write(self, path: Path, weights: Weights) -> None:
        """Writes a folder with `model.pt`, `{name: tensor}`, and `forge.json` next to it. Needs memory for all weights.

        Raises:
            ForgeError: `path` exists and is not an empty folder, or the names are not Forge's.
        """
        if self.names != "forge":
            raise ForgeError("Forge reads files of nanoGPT and does not write them; write the format hf instead")
        with new_folder(path, weights) as folder:
            state = {self.prefix + name: tensor.clone() for name, tensor in weights.read(list(weights.tensors)).items()}
            torch.save(state, folder / TORCH_FILE)
            span = (0, (folder / TORCH_FILE).stat().st_size)
            places = {
                name: place_in(folder / TORCH_FILE, span, str(number), weights.tensors[name])
                for number, name in enumerate(weights.tensors)
            }
            write_sidecar(folder, weights, folder / TORCH_FILE, places)

    def reference(self, path: Path, tokens: torch.Tensor, extras: Mapping[str, torch.Tensor] = NO_EXTRAS) -> str:
        """Returns why there is no reference: the format has only tensors."""
        return "a file of tensors has no model to run"
