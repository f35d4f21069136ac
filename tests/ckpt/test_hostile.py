"""A manifest made to harm, correctly sealed, is refused in bounded time and memory."""

import copy
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from ckpt.ranks import whole
from forge_ckpt.checkpoint.locate import resolve
from forge_ckpt.checkpoint.save import save
from forge_ckpt.format.codec import decode, encode
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError, Damaged


def seal(rest: bytes) -> bytes:
    return b'{"seal": "' + xxhash.xxh3_128_hexdigest(rest).encode() + b'",\n' + rest


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("honest") / "c"
    save(
        LocalStore(root),
        whole({"t": torch.ones(4, 6), "u": torch.ones(3).bfloat16()}),
        {"a": [1, {"b": 2.5}]},
        1,
        SingleProcessWorld(),
    )
    return json.loads((root / "step-00000001/manifest.json").read_text())["manifest"]


def sealed(body: Any) -> bytes:
    return seal(b'"manifest": ' + json.dumps(body).encode() + b"}\n")


def refused_with_peak(data: bytes) -> int:
    """Bytes of memory at the worst moment of a refusal."""
    tracemalloc.start()
    try:
        with pytest.raises(Damaged):
            decode(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def put(*path: str | int, value: Any) -> Callable[[Any], None]:
    def apply(body: Any) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return apply


BOX = ("files", 0, "pieces", "box")
SHAPE = ("tensors", 0, "shape")
HOSTILE: dict[str, Callable[[Any], None]] = {
    "huge shape": put(*SHAPE, value=[2**59, 2**59]),
    "shape that wraps to the right volume": put(*SHAPE, value=[2**32, 2**32 + 4]),
    "shape beyond int64": put(*SHAPE, value=[10**30, 1]),
    "negative shape": put(*SHAPE, value=[-4, -6]),
    "shape of floats": put(*SHAPE, value=[4.0, 6.0]),
    "shape of booleans": put(*SHAPE, value=[True, True]),
    "shape is text": put(*SHAPE, value="46"),
    "shape of a thousand dimensions": put(*SHAPE, value=[1] * 1000),
    "another shape": put(*SHAPE, value=[6, 4]),
    "larger shape": put(*SHAPE, value=[4, 7]),
    "unknown dtype": put("tensors", 0, "dtype", value="object"),
    "dtype that is an attribute of torch": put("tensors", 0, "dtype", value="load"),
    "dtype is a list": put("tensors", 0, "dtype", value=["float32"]),
    "other dtype": put("tensors", 0, "dtype", value="float64"),
    "duplicate tensor": put("tensors", 1, "name", value="t"),
    "empty name": put("tensors", 0, "name", value=""),
    "name with control characters": put("tensors", 0, "name", value="a\x1b[2J"),
    "name of a megabyte": put("tensors", 0, "name", value="x" * 10**6),
    "file outside": put("files", 0, "name", value="../secret"),
    "absolute file": put("files", 0, "name", value="/dev/zero"),
    "nested file": put("files", 0, "name", value="a/b"),
    "file name with a zero byte": put("files", 0, "name", value="a\0"),
    "file is the manifest": put("files", 0, "name", value="manifest.json"),
    "file name is a number": put("files", 0, "name", value=3),
    "file size wrong": put("files", 0, "bytes", value=103),
    "file size negative": put("files", 0, "bytes", value=-102),
    "file size huge": put("files", 0, "bytes", value=2**70),
    "file listed twice": lambda body: body["files"].append(copy.deepcopy(body["files"][0])),
    "tensor index outside": put("files", 0, "pieces", "tensor", value=[0, 2]),
    "tensor index negative": put("files", 0, "pieces", "tensor", value=[0, -1]),
    "tensor index a float": put("files", 0, "pieces", "tensor", value=[0, 1.0]),
    "tensor index true": put("files", 0, "pieces", "tensor", value=[0, True]),
    "gap": put(*BOX, value=[0, 0, 4, 5, 0, 3]),
    "outside": put(*BOX, value=[1, 0, 4, 6, 0, 3]),
    "negative offset": put(*BOX, value=[-1, 0, 4, 6, 0, 3]),
    "empty box": put(*BOX, value=[0, 0, 0, 6, 0, 3]),
    "box that wraps": put(*BOX, value=[2**63 - 1, 0, 4, 6, 0, 3]),
    "box beyond int64": put(*BOX, value=[2**64, 0, 4, 6, 0, 3]),
    "too few box numbers": put(*BOX, value=[0, 0, 4, 6]),
    "nested box": put(*BOX, value=[[0, 0], [4, 6], 0, 3]),
    "box null": put(*BOX, value=None),
    "overlap": put(
        "files", 0, "pieces", value={"tensor": [0, 0, 1], "box": [0, 0, 4, 6, 0, 0, 1, 1, 0, 3], "checksum": "0" * 96}
    ),
    "checksum missing": put("files", 0, "pieces", "checksum", value="0" * 32),
    "checksum no hex": put("files", 0, "pieces", "checksum", value="z" * 64),
    "step negative": put("step", value=-1),
    "step true": put("step", value=True),
    "world 0": put("world", value=0),
    "generation with a path": put("generation", value="../" + "0" * 29),
    "generation null": put("generation", value=None),
    "meta a list": put("meta", value=[]),
    "format": put("format", value="pickle"),
    "version text": put("version", value="1"),
    "version 0": put("version", value=0),
    "extra key": put("hook", value="x"),
    "tensors an object": put("tensors", value={}),
    "tensors of text": put("tensors", value=["t"]),
    "no tensors": put("tensors", value=[]),
}


def test_the_honest_one_is_accepted_and_survives_a_round_trip(honest: dict[str, Any]) -> None:
    manifest = decode(sealed(honest))
    assert manifest.meta == {"a": [1, {"b": 2.5}]} and manifest.bytes == 102
    assert decode(encode(manifest)).pieces.checksum == manifest.pieces.checksum


@pytest.mark.parametrize("kind", HOSTILE)
def test_fault_46_hostile_manifest_is_refused(honest: dict[str, Any], kind: str) -> None:
    body = copy.deepcopy(honest)
    HOSTILE[kind](body)
    assert json.dumps(body) != json.dumps(honest)
    with pytest.raises(Damaged):
        decode(sealed(body))


def test_fault_46_duplicate_keys_deep_nesting_and_what_is_no_json(honest: dict[str, Any]) -> None:
    text = json.dumps(honest)
    cases = [
        text.replace('"step": 1', '"step": 1, "step": 1'),
        text.replace('{"a"', '{"a": 1, "a"'),
        text.replace("2.5", "NaN"),
        text.replace("2.5", "1e999999") + "]",
        text.replace("2.5", "[" * 100_000 + "]" * 100_000),
        text.replace("2.5", "9" * 10_000),
        "null",
        "[]",
        "{}",
        '"manifest"',
        text[:-1],
        text + "x",
    ]
    for case in cases:
        with pytest.raises(Damaged):
            decode(seal(b'"manifest": ' + case.encode() + b"}\n"))
    for data in (
        b"",
        b"{}",
        b"null",
        b"\x80\x04.",
        b'{"seal": "' + b"0" * 32 + b'",\n',
        "\ud800".encode("utf-16", "surrogatepass"),
    ):
        with pytest.raises(Damaged):
            decode(data)


@pytest.mark.parametrize(
    "entries",
    ['"tensors":[' + "{}," * 1_200_000 + "{}]", '"tensors":' + "[" * 1_200_000, '"files":[' + "0," * 1_000_000 + "0]"],
    ids=["millions of objects", "millions of brackets", "millions of numbers"],
)
def test_fault_46_long_manifests_cost_bounded_time_and_memory(honest: dict[str, Any], entries: str) -> None:
    head = json.dumps({key: value for key, value in honest.items() if key not in ("tensors", "files")})[:-1]
    data = seal(b'"manifest": ' + head.encode() + b", " + entries.encode() + b"}}\n")
    started = time.monotonic()
    assert refused_with_peak(data) < 25 * len(data)
    assert time.monotonic() - started < 20


def test_fault_46_claims_of_a_small_manifest_cost_nothing(honest: dict[str, Any]) -> None:
    body = copy.deepcopy(honest)
    body["world"] = 10**9
    body["tensors"] = [{"name": f"t{i}", "dtype": "float32", "shape": [2**28, 2**28]} for i in range(100)]
    assert refused_with_peak(sealed(body)) < 10_000_000


def test_fault_46_an_endless_manifest_is_not_read(tmp_path: Path) -> None:
    from forge_ckpt.checkpoint.verification import open_manifest
    from forge_ckpt.format import codec

    store = LocalStore(tmp_path / "c")
    store.write("step-00000001/x", [b""])
    with (tmp_path / "c/step-00000001/manifest.json").open("wb") as file:
        file.truncate(codec.MAX_BYTES + 1)  # sparse: no such bytes exist
    with pytest.raises(Damaged, match="at most"):
        open_manifest(store, "step-00000001")


@pytest.mark.parametrize("name", ["..", ".", "../elsewhere", "a/b", "step-00000001\n", ""])
def test_a_name_that_a_store_lists_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    """Stores are plugins, and an object storage lists whatever somebody uploaded."""

    class Listing(LocalStore):
        def list(self) -> list[str]:
            return [name]

    with pytest.raises(CheckpointError, match="no checkpoint found"):
        resolve(Listing(tmp_path), name, SingleProcessWorld())
