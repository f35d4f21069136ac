"""The directory store: nothing outside, nothing half, nothing of others."""

import errno
import os
import stat
from pathlib import Path

import pytest

from forge_ckpt.store.local import MARKER, LocalStore
from forge_core.errors import CheckpointError


def store_at(path: Path, **options) -> LocalStore:
    return LocalStore(path / "ckpt", pause=0.0, **options)


def test_write_read_rename_remove(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.write("d/a.bin", [b"hello ", memoryview(b"world")])
    assert store.read("d/a.bin") == b"hello world" and store.read("d/a.bin", 6, 3) == b"wor"
    assert store.size("d/a.bin") == 11 and store.list("d") == ["a.bin"] and store.list("none") == []
    store.rename("d", "e")
    assert store.list() == ["e", MARKER] and (tmp_path / "ckpt/e/a.bin").read_bytes() == b"hello world"
    store.remove("e")
    store.remove("e")
    assert store.list() == [MARKER]


@pytest.mark.parametrize("path", ["../x", "a/../x", "/etc/passwd", "a//b", "", ".", "a/.", "a b", "a\n", "a\0b", "ü", "x" * 300])
def test_fault_46_unsafe_paths_are_refused_everywhere(tmp_path: Path, path: str) -> None:
    store = store_at(tmp_path)
    for call in (store.read, store.size, store.remove, lambda p: store.write(p, [b"x"]), lambda p: store.rename(p, "y")):
        with pytest.raises(CheckpointError, match="not a valid path"):
            call(path)


def test_fault_46_links_pipes_and_devices_are_not_followed(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.write("d/real", [b"x"])
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (tmp_path / "outside").mkdir()
    root = tmp_path / "ckpt"
    (root / "d/link").symlink_to(secret)
    (root / "linked").symlink_to(tmp_path / "outside")
    (root / "d/zero").symlink_to("/dev/zero")
    os.mkfifo(root / "d/pipe")
    for path in ("d/link", "d/zero", "d/pipe", "linked/x", "d"):
        with pytest.raises(CheckpointError):
            store.read(path)
    with pytest.raises(CheckpointError):
        store.write("linked/x", [b"y"])
    with pytest.raises(FileExistsError):
        store.write("d/link", [b"y"])
    store.remove("linked")
    store.remove("d")
    assert secret.read_bytes() == b"secret" and (tmp_path / "outside").is_dir()


def test_rename_replaces_a_file_but_never_a_directory(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.write("new", [b"2"])
    store.write("old", [b"1"])
    store.rename("new", "old")
    assert store.read("old") == b"2"
    (tmp_path / "ckpt/a").mkdir()
    (tmp_path / "ckpt/b").mkdir()
    with pytest.raises(FileExistsError):
        store.rename("a", "b")


def test_a_directory_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt/thesis.txt").write_text("years of work")
    store = store_at(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds other files .*thesis\.txt"):
        store.write("x", [b"y"])
    with pytest.raises(CheckpointError, match="forge-checkpoints is missing"):
        store.remove("thesis.txt")
    assert (tmp_path / "ckpt/thesis.txt").read_text() == "years of work"


def test_fault_15_directory_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(tmp_path)
    store.write("x", [b"y"])
    uid = 4321
    if os.geteuid() == 0:
        os.chown(tmp_path / "ckpt", uid, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: uid)
    with pytest.raises(CheckpointError, match="belongs to user"):
        store.read("x")
    assert store_at(tmp_path, allow_foreign_owner=True).read("x") == b"y"


def test_fault_15_unusable_places_are_named_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        LocalStore(tmp_path / "file").prepare()
    with pytest.raises(CheckpointError, match="cannot be written to"):
        LocalStore(tmp_path / "file/below").prepare()


def test_modes_are_private_unless_shared(tmp_path: Path) -> None:
    previous = os.umask(0o022)
    try:
        for shared, file_mode, directory_mode in ((False, 0o600, 0o700), (True, 0o644, 0o755)):
            store = LocalStore(tmp_path / str(shared), shared=shared)
            store.write("d/x", [b"y"])
            assert stat.S_IMODE((tmp_path / str(shared) / "d/x").stat().st_mode) == file_mode
            assert stat.S_IMODE((tmp_path / str(shared) / "d").stat().st_mode) == directory_mode
    finally:
        os.umask(previous)


class Faulty:
    """A probe that raises once, at the given occurrence of an operation."""

    def __init__(self, operation: str, code: int, times: int = 1, skip: int = 0) -> None:
        self.operation, self.code, self.times, self.skip = operation, code, times, skip

    def __call__(self, operation: str, path: str) -> None:
        if operation == self.operation and path not in ("", MARKER):
            self.skip -= 1
            if self.skip < 0 and self.times > 0:
                self.times -= 1
                raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("operation", ["create", "write", "fsync", "rename", "unlink"])
def test_fault_3_a_transient_fault_passes(tmp_path: Path, operation: str, code: int) -> None:
    store = store_at(tmp_path, probe=Faulty(operation, code, skip=int(operation == "write")))
    store.write("d/a", [b"one", b"two"])
    store.rename("d/a", "d/b")
    store.write("d/c", [b"x"])
    store.remove("d/c")
    assert store.read("d/b") == b"onetwo" and store.list("d") == ["b"] and store.retries == 1


def test_fault_3_repetition_is_bounded_and_never_with_half_an_iterator(tmp_path: Path) -> None:
    store = store_at(tmp_path, probe=Faulty("write", errno.EIO, times=1000))
    with pytest.raises(OSError, match="Input/output"):
        store.write("a", [b"x"])
    assert store.retries == 4
    once = store_at(tmp_path, probe=Faulty("fsync", errno.EIO))
    with pytest.raises(OSError, match="Input/output"):  # the generator is used up: a second file would be empty
        once.write("d/b", (chunk for chunk in [b"x"]))


def test_a_fault_that_stays_is_raised_at_once(tmp_path: Path) -> None:
    store = store_at(tmp_path, probe=Faulty("write", errno.ENOSPC, times=1000))
    with pytest.raises(OSError, match="No space"):
        store.write("a", [b"x"])
    assert store.retries == 0
