"""State of foreign loaders as JSON and back, exactly: what JSON lacks is written as a tagged object."""

from base64 import b64decode, b64encode
from typing import Any

from forge_core.errors import DataError

_TAG = "__forge__"


def as_plain(value: Any, owner: str) -> Any:
    """A value that JSON can hold.

    Raises:
        DataError: it contains something else than numbers, text, bytes, lists, tuples, dictionaries, arrays and tensors.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [as_plain(item, owner) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [as_plain(item, owner) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: as_plain(item, owner) for key, item in value.items()}
        return {_TAG: "dict", "items": [[as_plain(key, owner), as_plain(item, owner)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "data": b64encode(value).decode()}
    kind = type(value).__module__.split(".")[0]
    if kind in ("torch", "numpy") and hasattr(value, "shape"):
        array = value.detach().cpu().numpy() if kind == "torch" else value
        if array.dtype.kind in "biufc":
            data = b64encode(array.tobytes()).decode()
            return {_TAG: kind, "dtype": array.dtype.str, "shape": list(array.shape), "data": data}
    raise DataError(f"the state of the loader {owner!r} has a {type(value).__name__}, which a checkpoint cannot store")


def from_plain(value: Any) -> Any:
    """The value that `as_plain` was given."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: from_plain(item) for key, item in value.items()}
    if kind == "tuple":
        return tuple(from_plain(item) for item in value["items"])
    if kind == "dict":
        return {from_plain(key): from_plain(item) for key, item in value["items"]}
    data = b64decode(value["data"])
    if kind == "bytes":
        return data
    import numpy as np

    array = np.frombuffer(data, dtype=value["dtype"]).reshape(value["shape"]).copy()
    if kind == "numpy":
        return array if array.ndim else array[()]
    import torch

    return torch.from_numpy(array)
