"""Object storage without a server: what a store refuses, what it repeats, what it reads ahead, and what a name leads to."""

import builtins
import errno
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ckpt.ranks import blank, equal, on_ranks, sample, shards, whole
from ckpt.remote.dying import Dying, dying, objects, put_back
from forge_ckpt.checkpoint import verification
from forge_ckpt.checkpoint.read import load, newest
from forge_ckpt.checkpoint.save import save
from forge_ckpt.format import rank_files
from forge_ckpt.store import objects as layer
from forge_ckpt.store.remote import RemoteStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError

URL = "dying://bucket/run/checkpoints"
ALONE = SingleProcessWorld()


@pytest.fixture(autouse=True)
def system() -> Iterator[type[Dying]]:
    with dying() as made:
        yield made


def opened() -> RemoteStore:
    return RemoteStore(URL, pause=0.0)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("runs/x", "is not the URL of a folder"),
        ("s3://", "is not the URL of a folder"),
        ("://bucket", "is not the URL of a folder"),
        ("file:///data/runs", "the store 'local', which flushes"),
        ("local:///data/runs", "the store 'local', which flushes"),
        ("simplecache::s3://bucket/x", "a chain or a pattern"),
        ("s3://bucket/*", "a chain or a pattern"),
        ("ftp://user:word@host/x", r"credentials; set them in the environment"),
        ("abfs://box/x?token=word", r"credentials; set them in the environment"),
    ],
)
def test_a_url_that_cannot_be_a_store_is_refused(url: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as refused:
        RemoteStore(url)
    assert "word" not in str(refused.value), "fault 48"


def test_an_unknown_kind_of_url_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"nosuch://bucket/x cannot be opened: .*nosuch"):
        RemoteStore("nosuch://bucket/x").list()
    real = builtins.__import__

    def without(name: str, *given: Any) -> Any:
        if name.partition(".")[0] == "fsspec":
            raise ModuleNotFoundError("No module named 'fsspec'", name="fsspec")
        return real(name, *given)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CheckpointError, match=r"needs fsspec .*pip install 'forge-ckpt\[remote\]'"):
        RemoteStore("memory://bucket/x").list()


@pytest.mark.parametrize("path", ["../x", "a/../x", "/etc/passwd", "a//b", "", ".", "a b", "a\n", "x" * 300])
def test_fault_46_unsafe_paths_are_refused_everywhere(path: str) -> None:
    store = opened()
    for call in (store.read, store.size, store.remove, lambda p: store.write(p, [b"x"]), lambda p: store.rename(p, "y")):
        with pytest.raises(CheckpointError, match="not a valid path"):
            call(path)


@pytest.mark.parametrize("line", [b"../../other\n", b"/data\n", b"a//b\n", b"\xff\n", b"step", b"", b"a\nb\n"])
def test_fault_46_a_name_that_leads_elsewhere_is_none(line: bytes) -> None:
    save(opened(), whole(sample(1)), {}, 1, ALONE)
    put_back({path: line if "/names/" in path else data for path, data in objects().items()})
    assert "step-00000001" not in opened().list() and newest(opened(), ALONE) is None
    assert save(opened(), whole(sample(2)), {}, 1, ALONE) == "step-00000001"
    assert newest(opened(), ALONE) is not None


def test_a_folder_of_other_things_is_left_alone() -> None:
    put_back({"/bucket/run/checkpoints/thesis.txt": b"years of work"})
    with pytest.raises(CheckpointError, match=r"holds other objects .*thesis\.txt"):
        opened().write("x", [b"y"])
    with pytest.raises(CheckpointError, match="forge-checkpoints is missing"):
        opened().remove("thesis.txt")
    assert objects() == {"/bucket/run/checkpoints/thesis.txt": b"years of work"}


def failing(times: int, make: Any, *which: str, part: str = "") -> Any:
    """Raises so many times before requests of some kinds."""
    left = [times]

    def fails(operation: str, path: str) -> None:
        if operation in which and part in path and "forge-checkpoints" not in path and left[0] > 0:
            left[0] -= 1
            raise make()

    return staticmethod(fails)


class HTTPClientError(Exception):
    """Named as one of botocore, which is not an OSError."""


@pytest.mark.parametrize(
    "make",
    [lambda: OSError(errno.EIO, ""), lambda: OSError(errno.EBUSY, ""), TimeoutError, ConnectionResetError, HTTPClientError],
    ids=["EIO", "EBUSY", "timeout", "reset", "of a library"],
)
@pytest.mark.parametrize("operation", ["part", "put", "delete", "get"])
def test_fault_3_what_passes_by_itself_is_repeated_and_counted(
    system: type[Dying], caplog: pytest.LogCaptureFixture, operation: str, make: Any
) -> None:
    store = opened()
    save(store, whole(sample(1)), {}, 1, ALONE)
    system.fails = failing(2, make, operation)
    assert save(store, whole(sample(2)), {}, 2, ALONE, keep=1) == "step-00000002"
    assert store.retries == 2 and "2 operations of the store failed once and were repeated on rank 0" in caplog.text
    live = blank(sample())
    load(opened(), 2, whole(live), ALONE)
    assert equal(live, sample(2)) and [name for name in store.list() if "step" in name] == ["step-00000002"]


@pytest.mark.parametrize("make", [PermissionError, lambda: OSError(errno.ENOSPC, "full"), lambda: OSError(errno.EDQUOT, "quota")])
def test_fault_2_what_stays_fails_the_save_at_once(system: type[Dying], make: Any) -> None:
    store = opened()
    save(store, whole(sample(1)), {}, 1, ALONE)
    before = objects()
    system.fails = failing(1, make, "part")
    with pytest.raises(CheckpointError, match="the checkpoint of step 2 was not saved: rank 0"):
        save(store, whole(sample(2)), {}, 2, ALONE)
    assert store.retries == 0 and objects() == before, "what was written is removed"


def test_fault_3_repetition_is_bounded(system: type[Dying]) -> None:
    store = opened()
    store.prepare()
    system.fails = failing(1000, TimeoutError, "put")
    with pytest.raises(TimeoutError):
        store.write("a", [b"x"])
    assert store.retries == 2
    system.fails = failing(1, TimeoutError, "put")
    with pytest.raises(TimeoutError):  # a generator that is used up cannot be sent again
        store.write("d/b", (chunk for chunk in [b"x"]))


def test_a_put_that_arrived_without_an_answer_is_not_a_failure(system: type[Dying], monkeypatch: pytest.MonkeyPatch) -> None:
    put = Dying.pipe_file

    def deaf(self: Dying, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        put(self, path, value, mode)
        if "/names/" in str(path):
            raise TimeoutError

    monkeypatch.setattr(Dying, "pipe_file", deaf)
    assert save(opened(), whole(sample(1)), {}, 1, ALONE) == "step-00000001"
    assert newest(opened(), ALONE) is not None


@pytest.mark.parametrize("has_condition", [True, False])
def test_a_name_is_never_put_in_place_of_another(monkeypatch: pytest.MonkeyPatch, has_condition: bool) -> None:
    """Another job commits in the moment between the look and the put: the condition of the server decides; where it has none, the
    store looks once more."""
    put = Dying.pipe_file

    def plain(self: Dying, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if mode == "create":
            raise OSError(errno.ENOSYS, "not implemented")
        put(self, path, value)

    if not has_condition:
        monkeypatch.setattr(Dying, "pipe_file", plain)
    store, other = opened(), opened()
    for each, name in ((store, "a"), (other, "b")):
        each.write(f"{name}/file", [name.encode()])

    def looked() -> dict[str, str]:
        other.rename("b", "step")
        return {}

    monkeypatch.setattr(store, "_names", looked)
    with pytest.raises(FileExistsError):
        store.rename("a", "step")
    assert opened().read("step/file") == b"b"


@pytest.mark.parametrize("which", ["list", "name", "manifest", "data"])
def test_fault_12_a_network_that_fails_is_not_damage(system: type[Dying], which: str) -> None:
    """What cannot be read now stays where it is, for the next start."""
    save(opened(), whole(sample(1)), {}, 1, ALONE)
    before = objects()
    part = {"list": "/names/", "name": "/names/", "manifest": "manifest.json", "data": "rank-00000"}[which]
    system.fails = failing(1000, ConnectionResetError, "get", part=part)
    with pytest.raises((CheckpointError, OSError)) as refused:
        newest(opened(), ALONE)
    assert "damaged" not in str(refused.value)
    system.fails = failing(0, TimeoutError)
    assert objects() == before and newest(opened(), ALONE) is not None


def test_fault_5_a_flipped_bit_is_found_and_set_aside(system: type[Dying]) -> None:
    for step in (1, 2):
        save(opened(), whole(sample(step)), {}, step, ALONE)
    path = max(path for path in objects() if path.endswith("rank-00000.bin") and "step-00000002" in path)
    put_back({**objects(), path: objects()[path][:-1] + b"\x7f"})
    live = blank(sample())
    with pytest.raises(CheckpointError, match="is damaged; nothing was loaded"):
        load(opened(), 2, whole(live), ALONE)
    assert equal(live, blank(sample()))
    found = newest(opened(), ALONE)
    assert found is not None and found.step == 1 and found.skipped[0].name == "damaged-step-00000002"
    assert opened().list("damaged-step-00000002") == ["manifest.json", "rank-00000.bin"] and path in objects(), "kept to look at"
    assert save(opened(), whole(sample(2)), {}, 2, ALONE) == "step-00000002"


def test_a_name_that_is_given_anew_leads_to_the_new_files_at_once() -> None:
    """A rank that has read from a directory looks for its files again before it reads what has its name by now."""
    writer, reader = opened(), opened()
    for content in (b"one", b"two"):
        writer.write(f"draft-{content.decode()}/file", [content])
        writer.rename(f"draft-{content.decode()}", "step")
        buffer = bytearray(3)
        assert reader.size("step/file") == 3
        reader.read_into("step/file", 0, memoryview(buffer))
        assert bytes(buffer) == content
        writer.rename("step", f"damaged-{content.decode()}")
    writer.write("three/file", [b"three"])
    writer.rename("three", "step")
    assert reader.size("step/file") == 5
    writer.remove("step")
    writer.write("four/file", [b"4444"])
    writer.rename("four", "step")
    buffer = bytearray(4)
    reader.read_into("step/file", 0, memoryview(buffer))
    assert bytes(buffer) == b"4444"
    with pytest.raises(CheckpointError, match="ends at byte 4"):
        opened().read_into("step/file", 0, memoryview(bytearray(5)))


def test_small_pieces_are_read_ahead_in_few_requests(system: type[Dying], monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"model/{number}": torch.full((50,), float(number)) for number in range(200)}
    save(opened(), whole(state), {}, 1, ALONE)
    monkeypatch.setattr(layer, "AHEAD_BYTES", 5000)
    asked: list[str] = []
    largest = [0]
    ranged = Dying.cat_file

    def counted(self: Dying, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        found = ranged(self, path, start, end)
        if "rank-00000" in str(path):
            asked.append(path)
            largest[0] = max(largest[0], len(found))
        return found

    monkeypatch.setattr(Dying, "cat_file", counted)
    live = blank(state)
    load(opened(), 1, whole(live), ALONE)
    assert equal(live, state)
    reads = 2 * len(state)  # once to verify, once to load
    assert len(asked) < reads / 8 and largest[0] <= 5000


def test_ranks_save_and_load_together_on_another_layout(system: type[Dying]) -> None:
    full = torch.arange(240.0).reshape(24, 10)
    results = on_ranks(3, lambda world: save(opened(), [shards("w", full, 0, 3)[world.rank]], {"at": 3}, 7, world))
    assert results == ["step-00000007"] * 3

    def loading(world: Any) -> torch.Tensor:
        piece = shards("w", full, 1, 2)[world.rank]
        piece.local.zero_()
        assert load(opened(), 7, [piece], world) == {"at": 3}
        return piece.local

    assert torch.equal(torch.cat(on_ranks(2, loading), 1), full)


def test_fault_7_one_rank_cannot_send(system: type[Dying]) -> None:
    full = torch.arange(12.0).reshape(4, 3)
    system.fails = failing(1000, PermissionError, "part", part="rank-00001")
    results = on_ranks(2, lambda world: save(opened(), [shards("w", full, 0, 2)[world.rank]], {}, 1, world))
    assert len({str(result) for result in results}) == 1 and "rank 1: PermissionError" in str(results[0])
    assert not [path for path in objects() if "/data/" in path]


def test_a_store_goes_to_another_process_without_its_connections() -> None:
    store = opened()
    store.write("d/x", [b"y"])
    again = pickle.loads(pickle.dumps(store))  # noqa: S301 (its own)
    assert again.read("d/x") == b"y" and again.root == store.root == URL


def test_checksums_are_of_what_was_sent() -> None:
    """The manifest's checksums are taken of the chunks, before they are sent: what comes back is compared with them."""
    save(opened(), whole(sample(3)), {}, 1, ALONE)
    manifest = verification.open_manifest(opened(), "step-00000001")[0]
    buffer = memoryview(bytearray(1 << 20))
    for piece in range(len(manifest.pieces)):
        start, length = int(manifest.pieces.start[piece]), int(manifest.pieces.length[piece])
        found = rank_files.checksum(opened(), "step-00000001/rank-00000.bin", start, length, buffer)
        assert found == manifest.pieces.checksum[16 * piece : 16 * piece + 16]


def test_reads_go_back_and_see_what_has_changed_once_the_size_was_asked() -> None:
    store, data = opened(), bytes(range(200))
    store.write("draft/file", [data])

    def read(start: int) -> bytes:
        buffer = bytearray(10)
        store.read_into("draft/file", start, memoryview(buffer))
        return bytes(buffer)

    for start in (50, 60, 70, 5, 65, 190, 0):
        assert read(start) == data[start : start + 10]
    put_back({path: content[::-1] if path.endswith("draft/file") else content for path, content in objects().items()})
    assert store.size("draft/file") == 200 and read(0) == data[::-1][:10]


def test_a_whole_file_of_several_mib_is_read() -> None:
    data = bytes(range(256)) * (10 << 10)
    opened().write("draft/file", [data])
    assert opened().read("draft/file") == data and opened().read("draft/file", 3 << 19) == data[3 << 19 :]


def test_fault_12_a_name_that_cannot_be_read_is_not_a_missing_file(system: type[Dying]) -> None:
    save(opened(), whole(sample(1)), {}, 1, ALONE)
    system.fails = failing(1000, ConnectionResetError, "get", part="/names/")
    with pytest.raises(ConnectionResetError):
        opened().size("step-00000001/manifest.json")


def test_another_rank_that_prepares_the_store_at_the_same_time_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    other, store = opened(), opened()
    other.write("draft/rank-00000.bin", [b"x"])
    looks = iter([False, True])
    monkeypatch.setattr(store, "_is_marked", lambda: next(looks))
    store.prepare()
    assert next(looks, None) is None


def test_what_was_renamed_is_gone_under_its_first_name() -> None:
    store = opened()
    store.write("draft/file", [b"x"])
    store.write("latest", [b"y"])
    with pytest.raises(FileExistsError):
        store.rename("draft", "latest")
    store.rename("draft", "step")
    with pytest.raises(FileNotFoundError):
        store.rename("draft", "other")
    store.remove("draft")
    assert store.read("step/file") == b"x" and "other" not in store.list()
