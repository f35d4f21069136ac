"""Converts pickled weights to safetensors in a separate process: `python -I -m forge_train.formats.unpickle ...`.

Unpickling can run any code of the file's author as this user. It happens only here, and only on the user's request; the result is
files of plain tensors.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

_LIMIT = 2 << 30


def of_dcp(path: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the tensors of a distributed checkpoint by flat name, in groups of about `_LIMIT` bytes."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    entries = {name: entry for name, entry in known.items() if isinstance(entry, TensorStorageMetadata)}
    group: dict[str, torch.Tensor] = {}
    for name, entry in entries.items():
        group[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        if sum(tensor.nbytes for tensor in group.values()) >= _LIMIT:
            dcp.load(group, checkpoint_id=path, no_dist=True)
            yield group
            group = {}
    if group:
        dcp.load(group, checkpoint_id=path, no_dist=True)
        yield group


def of_torch(path: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the tensors of a file of `torch.save`; the names of nested dicts are joined with dots."""
    yield dict(_flat(torch.load(path, map_location="cpu", weights_only=False)))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, torch.nn.Module):
        yield from _flat(value.state_dict(), name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))


def main(kind: str, source: Path, target: Path) -> None:
    """Writes safetensors files into `target`."""
    from safetensors.torch import save_file

    for number, group in enumerate({"dcp": of_dcp, "torch": of_torch}[kind](source)):
        # safetensors does not allow shared memory, so tied tensors are copied.
        save_file(
            {name: tensor.detach().clone().contiguous() for name, tensor in group.items()}, target / f"{number}.safetensors"
        )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
