"""The manifest as JSON: the one file that makes a directory a checkpoint.

The first line has the xxh3_128 of the rest (the seal). Pieces are stored in columns, so that millions of them are cheap:

    {"seal": "<32 hex digits>",
     "manifest": {"format": "forge-checkpoint", "version": 1, "step": 100, "generation": "<32 hex digits>", "world": 4,
       "tensors": [{"name": "model/head.weight", "dtype": "float32", "shape": [512, 64]}, ...],
       "files": [{"name": "rank-00000.bin", "bytes": 65536, "pieces": {
          "tensor": [0, ...],            which tensor, per piece, in the order of their bytes
          "box": [0, 0, 128, 64, ...],   offset then extent, as many numbers as the tensor has dimensions
          "checksum": "<32 hex digits per piece>"}}, ...],
       "meta": {...}}}

`decode` trusts nothing: it refuses malicious manifests in time and memory that are bounded by their length.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from forge_ckpt.format.manifest import Manifest, TensorInfo, build, check_tensor, is_whole, need
from forge_ckpt.format.names import MANIFEST, is_safe
from forge_core.errors import CheckpointError, Damaged, NewerFormat

FORMAT, VERSION = "forge-checkpoint", 1
MAX_BYTES = 256 << 20
"""Maximum size of a manifest; 2,000 tensors over 1,024 ranks take about 100 MB."""

_MAX_BRACKETS = 1_000_000
_HEX = re.compile(r"[0-9a-f]{32}")
_SEAL = re.compile(rb'\{"seal": "([0-9a-f]{32})",\n')
_META = b',"meta":'


def encode(manifest: Manifest) -> bytes:
    """Returns the sealed bytes of a manifest.

    Raises:
        CheckpointError: `meta` is not valid JSON, or the manifest is longer than `MAX_BYTES`.
    """
    meta = dict(manifest.meta)
    check_meta(meta)
    pieces = manifest.pieces
    dims = np.array([len(info.shape) for info in manifest.tensors], dtype=np.int64)[pieces.tensor]
    borders = np.searchsorted(pieces.file, np.arange(len(manifest.files) + 1)).tolist()
    # offset and extent side by side, without the padding: the numbers in the JSON
    real = np.arange(pieces.offset.shape[1]) < dims[:, None]
    both, keep = np.concatenate([pieces.offset, pieces.extent], axis=1), np.concatenate([real, real], axis=1)
    files = [
        {
            "name": name,
            "bytes": size,
            "pieces": {
                "tensor": pieces.tensor[low:high].tolist(),
                "box": both[low:high][keep[low:high]].tolist(),
                "checksum": pieces.checksum[16 * low : 16 * high].hex(),
            },
        }
        for (name, size), low, high in zip(manifest.files, borders[:-1], borders[1:], strict=True)
    ]
    head = {"format": FORMAT, "version": VERSION, "step": manifest.step, "generation": manifest.generation}
    tensors = [{"name": info.name, "dtype": info.dtype, "shape": list(info.shape)} for info in manifest.tensors]
    body = {**head, "world": manifest.world, "tensors": tensors, "files": files, "meta": meta}
    rest = b'"manifest": ' + json.dumps(body, allow_nan=False, separators=(",", ":")).encode("ascii") + b"}\n"
    data = b'{"seal": "' + xxhash.xxh3_128_hexdigest(rest).encode() + b'",\n' + rest
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"the manifest has {len(data)} bytes; at most {MAX_BYTES} can be read again")
    return data


def check_meta(meta: object, path: str = "meta") -> None:
    """Refuses values that JSON would change or lose: keys that are not strings, numbers that are not finite, other types.

    Raises:
        CheckpointError: a value cannot be stored; the message names its path.
    """
    if isinstance(meta, dict):
        for key, value in meta.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{path} has key {key!r}: keys must be strings")
            check_meta(value, f"{path}.{key}")
    elif isinstance(meta, list | tuple):
        for position, value in enumerate(meta):
            check_meta(value, f"{path}[{position}]")
    elif isinstance(meta, float):
        if meta != meta or meta in (float("inf"), float("-inf")):
            raise CheckpointError(f"{path} is {meta}: JSON has only finite numbers; use None or a string")
    elif not (meta is None or isinstance(meta, str | int)):
        raise CheckpointError(f"{path} is of type {type(meta).__name__}: only JSON can be stored here; pass tensors as pieces")


def decode(data: bytes) -> Manifest:
    """Parses a manifest, and checks all of its values.

    Raises:
        Damaged: the manifest differs from what `encode` wrote, or its values are impossible.
        NewerFormat: a later version wrote the manifest.
    """
    if len(data) > MAX_BYTES:
        raise Damaged(f"{MANIFEST} has {len(data)} bytes; at most {MAX_BYTES} are read")
    _check_seal(data)
    if data.count(b"{") + data.count(b"[") > _MAX_BRACKETS:
        raise Damaged(f"{MANIFEST} has more than {_MAX_BRACKETS} objects and lists")
    try:
        body = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)["manifest"]
        return _from_json(body)
    except (Damaged, NewerFormat):
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, CheckpointError) as cause:
        raise Damaged(f"{MANIFEST} is not valid: {str(cause)[:500] or type(cause).__name__}") from cause


def meta_of(data: bytes) -> dict[str, Any]:
    """Returns only the `meta` of a manifest, without parsing its pieces, which can be millions.

    Raises:
        Damaged: the manifest differs from what `encode` wrote.
    """
    _check_seal(data)
    # `encode` writes `meta` last. The quotes would be escaped in a string, and no earlier key has this name.
    _, separator, rest = data.partition(_META)
    try:
        need(bool(separator), "meta is missing")
        meta = json.JSONDecoder(object_pairs_hook=_unique).raw_decode(rest.decode("ascii"))[0]
        need(isinstance(meta, dict), "meta must be an object")
    except (ValueError, RecursionError) as cause:
        raise Damaged(f"{MANIFEST} is not valid: {str(cause)[:500] or type(cause).__name__}") from cause
    return meta


def _check_seal(data: bytes) -> None:
    seal = _SEAL.match(data)
    rest = memoryview(data)[seal.end() :] if seal else memoryview(b"")
    if seal is None or xxhash.xxh3_128_hexdigest(rest).encode() != seal[1]:
        raise Damaged(f"{MANIFEST} is empty, truncated or modified: its seal does not match")


def _from_json(body: dict[str, Any]) -> Manifest:
    need(isinstance(body, dict) and body.get("format") == FORMAT, "the format is unknown")
    version = body.get("version")
    need(type(version) is int and version >= 1, "the version is missing")
    if body["version"] > VERSION:
        raise NewerFormat(
            f"the checkpoint has format version {version}, this forge-ckpt reads up to {VERSION}; install a newer forge-ckpt"
        )
    _keys(body, "format", "version", "step", "generation", "world", "tensors", "files", "meta")
    need(is_whole(body["step"]) and is_whole(body["world"]) and body["world"] >= 1, "step and world must be integers from 0")
    need(_HEX.fullmatch(body["generation"]) is not None, "generation must be 32 hexadecimal digits")
    need(isinstance(body["meta"], dict), "meta must be an object")
    tensors = [_tensor(entry) for entry in _list(body["tensors"])]
    need(len({info.name for info in tensors}) == len(tensors), "a tensor's name occurs twice")
    columns = [_columns(entry) for entry in _list(body["files"])]
    names = [name for name, _, _, _, _ in columns]
    need(len(set(names)) == len(names), "a file's name occurs twice")
    counts = [len(tensor) for _, _, tensor, _, _ in columns]
    tensor = np.concatenate([np.zeros(0, dtype=np.int64), *(tensor for _, _, tensor, _, _ in columns)])
    flat = np.concatenate([np.zeros(0, dtype=np.int64), *(box for _, _, _, box, _ in columns)])
    need(
        not len(tensor) or (int(tensor.min()) >= 0 and int(tensor.max()) < len(tensors)),
        "a piece of an unknown tensor",
    )
    offset, extent = _boxes(tensors, tensor, flat)
    return build(
        step=body["step"],
        generation=body["generation"],
        world=body["world"],
        tensors=tensors,
        files=[(name, size) for name, size, _, _, _ in columns],
        tensor=tensor,
        file=np.repeat(np.arange(len(columns), dtype=np.int64), counts),
        offset=offset,
        extent=extent,
        checksum=b"".join(checksum for *_, checksum in columns),
        meta=body["meta"],
    )


def _tensor(entry: Any) -> TensorInfo:
    _keys(entry, "name", "dtype", "shape")
    name, dtype, shape = entry["name"], entry["dtype"], tuple(_list(entry["shape"]))
    check_tensor(name, dtype, shape)
    return TensorInfo(name, dtype, shape)


def _columns(entry: Any) -> tuple[str, int, np.ndarray, np.ndarray, bytes]:
    _keys(entry, "name", "bytes", "pieces")
    name, size, pieces = entry["name"], entry["bytes"], entry["pieces"]
    need(
        isinstance(name, str) and is_safe(name) and name != MANIFEST,
        f"{str(name)[:80]!r} is not a valid file name",
    )
    need(is_whole(size), f"{name}: bytes must be a non-negative integer")
    _keys(pieces, "tensor", "box", "checksum")
    tensor, checksum = _integers(pieces["tensor"]), pieces["checksum"]
    need(
        isinstance(checksum, str) and len(checksum) == 32 * len(tensor),
        f"{name}: expected one checksum per piece",
    )
    return name, size, tensor, _integers(pieces["box"]), bytes.fromhex(checksum)


def _boxes(tensors: Sequence[TensorInfo], tensor: np.ndarray, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpacks the numbers of all boxes into padded (P, D) offsets and extents."""
    dims = np.array([len(info.shape) for info in tensors], dtype=np.int64)[tensor] if len(tensor) else tensor
    need(int(2 * dims.sum()) == len(flat), "the number of box coordinates does not match the pieces")
    widest = max([1, *(len(info.shape) for info in tensors)])
    need(widest * len(tensor) <= 1 << 27, "too many pieces of too many dimensions")
    real = np.arange(widest) < dims[:, None]
    both = np.concatenate([np.zeros(real.shape, dtype=np.int64), np.ones(real.shape, dtype=np.int64)], axis=1)
    both[np.concatenate([real, real], axis=1)] = flat
    return both[:, :widest], both[:, widest:]


def _integers(values: Any) -> np.ndarray:
    need(set(map(type, _list(values))) <= {int}, "expected integers")  # numpy would silently round 1.5 and accept True
    return np.array(values, dtype=np.int64)


def _list(value: Any) -> list[Any]:
    need(isinstance(value, list), "expected a list")
    return value


def _keys(value: Any, *wanted: str) -> None:
    need(isinstance(value, dict) and set(value) == set(wanted), f"an object must have the keys {', '.join(wanted)}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    need(len(found) == len(pairs), "a key occurs twice in one object")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not valid JSON")
