"""Checks of stores of checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import LinkingStore

DATA = bytes(range(256)) * 41 + b"end"


class StoreChecks:
    """Checks of stores: bytes, atomic renames, listing, removal, links, and errors for missing files."""

    @staticmethod
    def check_bytes(component: Any) -> None:
        """Checks that the written bytes are read: completely, in part, into a buffer, and by another store at the same path."""
        with _opened(component) as (store, again):
            store.write("tmp/data.bin", [DATA[:1000], memoryview(DATA)[1000:1000], memoryview(DATA)[1000:]])
            store.write("tmp/none.bin", [])
            for reader in (store, again()):
                assert reader.read("tmp/data.bin") == DATA, "read gives other bytes than were written"
                assert reader.read("tmp/data.bin", 300, 17) == DATA[300:317], "read(path, offset, length) gives other bytes"
                assert reader.read("tmp/data.bin", 300) == DATA[300:], "read(path, offset) gives other bytes"
                buffer = bytearray(100)
                reader.read_into("tmp/data.bin", 5, memoryview(buffer))
                assert bytes(buffer) == DATA[5:105], "read_into gives other bytes"
                assert reader.size("tmp/data.bin") == len(DATA), f"size is {reader.size('tmp/data.bin')}, not {len(DATA)}"
                assert (reader.size("tmp/none.bin"), reader.read("tmp/none.bin")) == (0, b""), "an empty file is not empty"

    @staticmethod
    def check_chunks(component: Any) -> None:
        """Checks that a chunk is written before the next one is requested, because both may use the same memory."""
        with _opened(component) as (store, _):
            store.write("tmp/data.bin", _in_one_buffer(1000))
            assert store.read("tmp/data.bin") == DATA, "write keeps a chunk while it asks for the next one, in the same buffer"

    @staticmethod
    def check_rename(component: Any) -> None:
        """Checks that `rename` makes a directory visible as a whole, and replaces files but never directories."""
        with _opened(component) as (store, again):
            store.write("tmp/a/one.bin", [b"1"])
            store.write("tmp/a/two.bin", [b"2"])
            assert "step" not in again().list(), "a directory is there before its rename"
            store.rename("tmp/a", "step")
            assert sorted(again().list("step")) == ["one.bin", "two.bin"], "a renamed directory is not whole"
            assert "a" not in again().list("tmp"), "a renamed directory is still under its old name"
            store.write("tmp/new", [b"new"])
            store.write("tmp/old", [b"old"])
            store.rename("tmp/new", "tmp/old")
            assert again().read("tmp/old") == b"new", "rename does not replace a file"
            store.write("tmp/b/three.bin", [b"3"])
            _refused(lambda: store.rename("tmp/b", "step"), "rename replaces a directory that is there")
            assert again().read("step/one.bin") == b"1", "a refused rename has changed its target"

    @staticmethod
    def check_list(component: Any) -> None:
        """Checks that `list` is sorted, and empty for a missing directory, and that `remove` removes only its path."""
        with _opened(component) as (store, again):
            for name in ("b", "a", "c"):
                store.write(f"step/{name}", [name.encode()])
            names = list(again().list("step"))
            assert names == ["a", "b", "c"], f"list gives {names}, not a, b, c in order"
            assert list(again().list("missing")) == [], "list of a directory that does not exist is not empty"
            store.remove("step/b")
            assert list(again().list("step")) == ["a", "c"], "remove of a file removes another, or none"
            store.write("other/d", [b"d"])
            store.remove("step")
            assert list(again().list("step")) == [], "remove of a directory leaves something in it"
            assert again().read("other/d") == b"d", "remove of a directory removes another"
            store.remove("step")  # a missing one is not an error

    @staticmethod
    def check_link(component: Any) -> None:
        """Checks that `link`, if supported, adds a name that outlives the first name, or returns False."""
        with _opened(component) as (store, again):
            if not isinstance(store, LinkingStore):
                return
            store.write("one/data.bin", [DATA])
            assert not store.link("one/missing.bin", "two/missing.bin"), "link says that it gave a missing file a name"
            if not store.link("one/data.bin", "two/data.bin"):
                assert not again().list("two"), "link says False, and leaves a file"
                return
            assert list(again().list("one")) == ["data.bin"], "link takes the first name away"
            store.remove("one")
            assert again().read("two/data.bin") == DATA, "a linked file has other bytes"

    @staticmethod
    def check_missing(component: Any) -> None:
        """Checks that reads of a missing file raise FileNotFoundError, and of a file that is too short CheckpointError."""
        with _opened(component) as (store, _):
            store.write("short", [b"123"])
            for name, call in _reads(store, "missing").items():
                try:
                    call()
                except FileNotFoundError:
                    continue
                raise AssertionError(f"{name} of a missing file does not raise FileNotFoundError")
            _refused(lambda: store.read("short", 1, 5), "read past the end of a file gives something")
            _refused(lambda: store.read_into("short", 1, memoryview(bytearray(5))), "read_into past the end gives something")

    @staticmethod
    def check_outside(component: Any) -> None:
        """Checks that no path leads out of the store."""
        with _opened(component) as (store, _):
            store.write("inside", [b"1"])
            for path in ("../outside", "a/../../outside", "/outside"):
                _refused(lambda path=path: store.write(path, [b"1"]), f"write takes the path {path!r}")


@contextmanager
def _opened(component: Any) -> Iterator[Any]:
    """Yields a store at a new path, and a function that opens it again."""
    with TemporaryDirectory(prefix="forge-store-") as folder:
        path = Path(folder) / "checkpoints"
        yield component.build(path), lambda: component.build(path)


def _in_one_buffer(size: int) -> Iterator[memoryview]:
    buffer = bytearray(size)
    for start in range(0, len(DATA), size):
        part = DATA[start : start + size]
        buffer[: len(part)] = part
        yield memoryview(buffer)[: len(part)]


def _reads(store: Any, path: str) -> dict[str, Any]:
    return {
        "read": lambda: store.read(path),
        "read_into": lambda: store.read_into(path, 0, memoryview(bytearray(1))),
        "size": lambda: store.size(path),
    }


def _refused(call: Any, otherwise: str) -> None:
    try:
        call()
    except (CheckpointError, OSError, ValueError):
        return
    raise AssertionError(otherwise)
