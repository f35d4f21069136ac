"""Stored activations in the formats of other tools. What they cannot say is widened exactly: bf16 becomes fp32."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from forge_models.interp.listing import InterpError
from forge_models.interp.store.read import ActivationStore
from forge_models.interp.store.write import INDEX


def to_npz(store: ActivationStore, path: Path) -> None:
    """One array (rows, ...) for each inner value, and `input`, `position`, `token`. Holds one inner value in memory at a time."""
    import zipfile

    import numpy as np

    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name in (*store.names, *INDEX):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, _wide(store.read(name)).numpy(), allow_pickle=False)


def to_parquet(store: ActivationStore, path: Path) -> None:
    """A row for each token, a list of numbers for each inner value, its dimensions in one; a row group for each shard."""
    import pyarrow as pa
    from pyarrow import parquet

    def table(values: Mapping[str, Tensor]) -> Any:
        columns = {}
        for name, value in values.items():
            flat = pa.array(_wide(value).flatten().numpy())
            columns[name] = flat if name in INDEX else pa.FixedSizeListArray.from_arrays(flat, value[0].numel())
        return pa.table(columns)

    names = (*store.names, *INDEX)
    writer: Any = None
    for parts in zip(*(store.parts(name) for name in names), strict=True):
        group = table(dict(zip(names, parts, strict=True)))
        writer = writer or parquet.ParquetWriter(path, group.schema)
        writer.write_table(group)
    if writer is None:
        raise InterpError(f"{store.folder} has no rows")
    writer.close()


CONVERTERS: Mapping[str, Callable[[ActivationStore, Path], None]] = MappingProxyType({".npz": to_npz, ".parquet": to_parquet})
"""By the suffix of the file."""


def convert(store: ActivationStore, path: Path) -> None:
    """Writes the store as the format that the suffix of `path` names.

    Raises:
        InterpError: another suffix, or a library that is not installed.
    """
    if path.suffix not in CONVERTERS:
        raise InterpError(f"{path}: activations can be written as {' and '.join(CONVERTERS)} files")
    try:
        CONVERTERS[path.suffix](store, path)
    except ImportError as cause:
        raise InterpError(f"{path.suffix} files need {cause.name}: pip install 'forge-models[interp]'") from cause


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype == torch.bfloat16 else value
