"""A preparation that is given again: complete, different, or beside what a killed one left."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_core.errors import DataError
from forge_data.__main__ import main
from forge_data.sources.arrays import ArrayWriter
from forge_data.sources.megatron import MegatronWriter
from forge_data.sources.store import StoreSource
from forge_data.sources.store_writer import StoreWriter
from forge_data.storage.workspace import Partial, remove_left


def prepare(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[Any, str]:
    """(exit code, all that was printed) of `data prepare` with the tokenizer `bytes`."""
    try:
        code = main(["prepare", "--tokenizer", "bytes", *map(str, arguments)])
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_m4_a_finished_store_is_complete_or_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts, out = tmp_path / "a.jsonl", tmp_path / "store"
    texts.write_text('{"text": "one", "body": "x"}\n{"text": "two", "body": "y"}\n')
    same = ("--path", texts, "--out", out)
    assert prepare(capsys, *same)[0] == 0
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()}
    os.utime(texts, (1, 1))
    code, said = prepare(capsys, *same, "--workers", 3)
    assert code == 0 and f"{out} is complete" in said and "tokens: 8" in said
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()} == before
    code, said = prepare(capsys, *same, "--text", "body")
    assert code == 2 and "finished store with other settings" in said and "text was nothing, is body" in said
    texts.write_text('{"text": "six", "body": "x"}\n{"text": "two", "body": "y"}\n')
    code, said = prepare(capsys, *same)
    assert code == 2 and "corpus was " in said and "Traceback" not in said
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["request"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    code, said = prepare(capsys, *same)
    assert code == 2 and "does not record what it was prepared from" in said
    (out / "shard-00000.bin").write_bytes(b"")
    code, said = prepare(capsys, *same)
    assert code == 2 and "shard-00000.bin is empty" in said


HOLDS = """
import sys, time
from pathlib import Path
from forge_data.sources.megatron import MegatronWriter
from forge_data.storage.workspace import Partial
held = [Partial(Path(sys.argv[1]), directory=True), Partial(Path(sys.argv[2]), directory=False)]
print("held", flush=True)
time.sleep(60)
"""


def test_m4_what_a_killed_process_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path: Path) -> None:
    store, array = tmp_path / "st[o]re", tmp_path / "a.npy"  # a name that is a pattern, too
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(store), str(array)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        held = sorted(tmp_path.iterdir())
        assert len(held) == 2
        (held[1] / "shard").write_bytes(b"1")
        with StoreWriter(store, dtype="uint16") as writer:
            writer.add(np.array([1]), np.array([1]))
        with ArrayWriter(array, "uint16", header=True, lose_documents=True) as arrays:
            arrays.add(np.array([1]), np.array([1]))
        assert sorted(tmp_path.iterdir()) == held  # a live one is left alone
        process.send_signal(signal.SIGKILL)
    (tmp_path / "other.partial-1").mkdir()
    remove_left(store)
    assert sorted(tmp_path.iterdir()) == [held[0], tmp_path / "other.partial-1"]
    with ArrayWriter(array, "uint16", header=True, lose_documents=True):
        pass
    assert sorted(tmp_path.iterdir()) == [tmp_path / "other.partial-1"]
    for name in ("m.bin", "m.idx"):
        (tmp_path / f"{name}.partial-1").write_bytes(b"1")
    with MegatronWriter(tmp_path / "m", "uint16") as pair:
        pair.add(np.array([1]), np.array([1]))
        pair.commit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.bin", "m.idx", "other.partial-1"]


def test_m4_the_next_preparation_removes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("text")
    left = tmp_path / "store.partial-00000000"
    for _ in range(2):  # with and without a finished store
        left.mkdir()
        (left / "shard-00000.bin").write_bytes(b"12")
        assert prepare(capsys, "--path", tmp_path / "a.txt", "--out", tmp_path / "store")[0] == 0
        assert not left.exists()
    assert StoreSource(tmp_path / "store").verify() == []


def test_a_partial_that_was_taken_for_a_left_one_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may look between its making and its lock."""
    import fcntl

    real, calls = fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            (made,) = tmp_path.glob("x.partial-*")
            made.rmdir()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    partial = Partial(tmp_path / "x", directory=True)
    assert partial.path.is_dir() and len(calls) == 2
    partial.close()
    partial.close()
    assert list(tmp_path.iterdir()) == []


def test_where_there_are_no_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def none(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    (tmp_path / "x.partial-1").mkdir()
    partial = Partial(tmp_path / "x", directory=True)
    assert (tmp_path / "x.partial-1").exists()
    partial.close()
    with pytest.raises(DataError, match="cannot be written"):
        StoreWriter(Path("/proc/none/x"), dtype="uint16")
