"""Converts pickled weights to safetensors in a separate process: `python -I -m forge_train.formats.unpickle ...`.

Unpickling can run any code of the file's author as this user. So only tensors and the descriptions of tensors are unpickled,
and a file that names anything else is refused; on the user's request everything is unpickled. It happens only here, and the
result is files of plain tensors.
"""

import io
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from forge_core.errors import ForgeError

METADATA = ".metadata"
"""File by which a folder is known as a distributed checkpoint."""

_REFUSED = 3
"""Exit code for a file that contains more than tensors."""
_LIMIT = 2 << 30

_DESCRIPTIONS = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
        *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.serialization": {"_get_layout"},
}
"""What the metadata of a distributed checkpoint may name: each is plain data, or a function that returns a constant of torch."""


def unpickle(kind: str, path: Path, folder: Path, unsafe: bool, *prefixes: str) -> int:
    """Writes those tensors of a pickled file whose names begin with one of `prefixes` to safetensors files, in another process.

    Args:
        kind: `dcp` or `torch`.
        path: the checkpoint or file.
        folder: where to write; it is created.
        unsafe: also unpickle objects that are not tensors.
        prefixes: beginnings of names.

    Returns:
        The number of other tensors.

    Raises:
        ForgeError: the file contains more than tensors, or is damaged.
    """
    module = [sys.executable, "-I", "-m", "forge_train.formats.unpickle"]
    command = [*module, kind, str(path), str(folder), "unsafe" if unsafe else "safe", *prefixes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1][:500]
    if done.returncode == _REFUSED:
        raise ForgeError(
            f"{path} contains more than tensors ({last}), and unpickling that can run any code of its author as this user, so "
            "nothing was read. If you trust its author, pass --unsafe-pickle"
        )
    if done.returncode:
        raise ForgeError(f"{path} could not be unpickled: {last}")
    return int(done.stdout.split()[-1])


class _Unpickler(pickle.Unpickler):
    """Unpickles anything. Python 3.13 alone writes `pathlib._local` as the module of a path; other versions lack this module."""

    def find_class(self, module: str, name: str) -> Any:
        return self.find("pathlib" if module == "pathlib._local" else module, name)

    def find(self, module: str, name: str) -> Any:
        return super().find_class(module, name)


class _DescriptionUnpickler(_Unpickler):
    """Unpickles the metadata of a distributed checkpoint and nothing else."""

    def find(self, module: str, name: str) -> Any:
        if name in _DESCRIPTIONS.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find(module, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def of_dcp(path: Path, keep: Callable[[str], bool], unsafe: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the tensors of a distributed checkpoint by flat name, in groups of about `_LIMIT` bytes."""
    import torch.distributed.checkpoint as dcp  # takes as long as torch itself, and files of `torch.save` do not need it
    from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

    class Reader(dcp.FileSystemReader):
        """Unpickles only descriptions from the metadata, unless the user trusts the author; torch reads only tensors."""

        def read_metadata(self, *_: Any, **__: Any) -> Any:
            content = io.BytesIO((Path(self.path) / METADATA).read_bytes())
            metadata = (_Unpickler if unsafe else _DescriptionUnpickler)(content).load()
            if getattr(metadata, "storage_meta", None) is None:
                metadata.storage_meta = StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    known = Reader(path).read_metadata().state_dict_metadata
    entries = {name: entry for name, entry in known.items() if isinstance(entry, TensorStorageMetadata) and keep(name)}
    group: dict[str, torch.Tensor] = {}
    for name, entry in entries.items():
        group[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        if sum(tensor.nbytes for tensor in group.values()) >= _LIMIT:
            dcp.load(group, storage_reader=Reader(path), no_dist=True)
            yield group
            group = {}
    if group:
        dcp.load(group, storage_reader=Reader(path), no_dist=True)
        yield group


def of_torch(path: Path, keep: Callable[[str], bool], unsafe: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the tensors of a file of `torch.save`; the names of nested dicts are joined with dots."""
    yield {name: tensor for name, tensor in _flat(torch.load(path, map_location="cpu", weights_only=not unsafe)) if keep(name)}


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, torch.nn.Module):
        yield from _flat(value.state_dict(), name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))


def main(kind: str, source: Path, target: Path, unsafe: bool, *prefixes: str) -> None:
    """Writes the tensors whose names begin with one of `prefixes` to safetensors files; prints how many others there are."""
    from safetensors.torch import save_file

    left = 0

    def keep(name: str) -> bool:
        nonlocal left
        left += not name.startswith(prefixes)
        return name.startswith(prefixes)

    target.mkdir(exist_ok=True)
    for number, group in enumerate({"dcp": of_dcp, "torch": of_torch}[kind](source, keep, unsafe)):
        # safetensors does not allow shared memory, so tied tensors are copied.
        save_file(
            {name: tensor.detach().clone().contiguous() for name, tensor in group.items()}, target / f"{number}.safetensors"
        )
    print(left)


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "unsafe", *sys.argv[5:])
    except pickle.UnpicklingError as cause:
        if (named := re.search(r"GLOBAL ([\w.]+)", str(cause))) is None:
            raise
        print(named[1], file=sys.stderr)
        sys.exit(_REFUSED)
