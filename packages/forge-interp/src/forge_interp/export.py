"""Exports stored activations to the formats of other tools. Unsupported dtypes are widened exactly: bf16 becomes fp32."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from forge_interp.store import INDEX, ActivationStore
from forge_interp.tap_names import InterpError


def to_npz(store: ActivationStore, path: Path) -> None:
    """Writes one array (rows, ...) per inner value, and `input`, `position`, `token`. Memory holds one inner value at a time."""
    import zipfile

    import numpy as np

    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name in (*store.names, *INDEX):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, _wide(store.read(name)).numpy(), allow_pickle=False)


def to_parquet(store: ActivationStore, path: Path) -> None:
    """Writes one row per token, with a flat list of numbers per inner value, and one row group per shard."""
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


def to_hdf5(store: ActivationStore, path: Path) -> None:
    """Writes one data set per inner value and for `input`, `position` and `token`; the facts of the capture are an attribute."""
    import h5py

    with h5py.File(path, "w") as file:
        file.attrs["facts"] = json.dumps(store.manifest["facts"])
        for name in (*store.names, *INDEX):
            # Names need no change, because only slashes create groups in HDF5.
            made = file.create_dataset(name, (store.rows, *_shape(store, name)), _wide(store.read(name, 0, 0)).numpy().dtype)
            for start, part in _parts(store, name):
                made[start : start + len(part)] = part


def to_zarr(store: ActivationStore, path: Path) -> None:
    """Writes one array per inner value and for `input`, `position` and `token`, one chunk per shard. Dimensions have names, so
    that `xarray.open_zarr` can read the file."""
    import zarr

    longest = max((shard["rows"] for shard in store.manifest["shards"]), default=1)
    group = zarr.open_group(path, mode="w", zarr_format=3, attributes={"facts": store.manifest["facts"]})
    for name in (*store.names, *INDEX):
        shape = _shape(store, name)
        made = group.create_array(
            name,
            shape=(store.rows, *shape),
            chunks=(longest, *shape),
            dtype=_wide(store.read(name, 0, 0)).numpy().dtype,
            dimension_names=_dims(name, len(shape)),
        )
        for start, part in _parts(store, name):
            made[start : start + len(part)] = part


def as_xarray(store: ActivationStore, names: Sequence[str] | None = None) -> Any:
    """Returns an `xarray.Dataset` in memory: a variable (row, ...) per inner value, and `input`, `position`, `token` per row.

    Args:
        names: names of inner values; None = all.

    Raises:
        InterpError: xarray is not installed, or a name was not captured.
    """
    try:
        import xarray
    except ImportError as cause:
        raise _missing("a data set of xarray", cause) from cause
    values = {
        name: (_dims(name, len(_shape(store, name))), _wide(store.read(name)).numpy())
        for name in (store.names if names is None else names)
    }
    coordinates = {name: ("row", store.read(name).numpy()) for name in INDEX}
    return xarray.Dataset(values, coordinates, {"facts": json.dumps(store.manifest["facts"])})


CONVERTERS: Mapping[str, Callable[[ActivationStore, Path], None]] = MappingProxyType(
    {".npz": to_npz, ".parquet": to_parquet, ".h5": to_hdf5, ".zarr": to_zarr}
)
"""Converters by the suffix of the file."""


def convert(store: ActivationStore, path: Path) -> None:
    """Writes the store in the format given by the suffix of `path`.

    Raises:
        InterpError: the suffix is not supported, or a library is not installed.
    """
    if path.suffix not in CONVERTERS:
        raise InterpError(f"{path}: activations can be written as {', '.join(CONVERTERS)} files")
    try:
        CONVERTERS[path.suffix](store, path)
    except ImportError as cause:
        raise _missing(f"{path.suffix} files", cause) from cause
    except OSError as cause:
        raise InterpError(f"{path} cannot be written: {cause}; choose another path, or free space") from cause


def _missing(what: str, cause: ImportError) -> InterpError:
    return InterpError(f"{what} need {cause.name}: pip install 'forge-interp[neuro]'")


def _shape(store: ActivationStore, name: str) -> tuple[int, ...]:
    """Returns the shape of one row."""
    return tuple(store.read(name, 0, 0).shape[1:])


def _parts(store: ActivationStore, name: str) -> Iterator[tuple[int, Any]]:
    """Yields (index of the first row, rows), one shard at a time."""
    start = 0
    for part in store.parts(name):
        yield start, _wide(part).numpy()
        start += len(part)


def _dims(name: str, count: int) -> tuple[str, ...]:
    """Returns names of dimensions; those after the row are specific to this value, because widths differ."""
    return ("row", *(f"{name}.{number}" for number in range(count)))


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype == torch.bfloat16 else value
