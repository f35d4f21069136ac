"""Preparing a store: the same bytes whoever did the work, nothing twice after a kill, and no store from a failure."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_data.components import Bpe, JsonLines
from forge_data.preparation import job, tokenization
from forge_data.sources.records import Records
from forge_data.sources.store import StoreSource
from forge_data.sources.text import text_files
from forge_data.tokenizers.bpe import trained
from forge_data.tokenizers.bytes import ByteTokenizer

WORDS = ["der", "Hund", "läuft", "über", "die", "Katze", "猫", "sleeps", "\n"]


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Records:
    """300 documents in about 20 parts."""
    monkeypatch.setattr(tokenization, "SMALLEST_PART", 4000)
    monkeypatch.setattr(tokenization, "_PORTION", 700)
    monkeypatch.setattr(job, "CHUNK", 1500)
    rng = np.random.default_rng(3)
    lines = [json.dumps({"text": " ".join(rng.choice(WORDS, size=int(rng.integers(1, 90))))}) for _ in range(300)]
    (tmp_path / "corpus").mkdir()
    for number in range(3):
        (tmp_path / "corpus" / f"{number}.jsonl").write_text("\n".join(lines[number::3]))
    return JsonLines(path=str(tmp_path / "corpus")).records()


def made(records: Any, path: Path, tokenizer: Tokenizer | None = None, **more: Any) -> dict[str, bytes]:
    """Every file of a new store, which is verified."""
    options = {"source": "s", "report": lambda _: None, "shard_tokens": 9000} | more
    store = tokenization.tokenize(records, tokenizer or ByteTokenizer(), path, **options)
    assert store.verify() == []
    assert [left.name for left in path.parent.iterdir() if left.name.startswith(f"{path.name}.")] == []
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_processes_threads_and_plain_iteration_write_the_same_bytes(records: Records, tmp_path: Path) -> None:
    context: Any = type("Context", (), {"texts": (records,), "report": lambda _: None})
    tokenizer = trained(Bpe(vocab_size=320), context)
    first = made(records, tmp_path / "one", tokenizer, workers=1)
    assert len(first) > 6
    assert made(records, tmp_path / "threads", tokenizer, workers=4) == first
    assert made(records, tmp_path / "process", tokenizer, workers=1, processes=True) == first
    assert made(records, tmp_path / "processes", tokenizer, workers=3, processes=True) == first

    class Plain:
        """`Texts` of a plugin: documents, and nothing about parts."""

        fingerprint = "plain"

        def __iter__(self) -> Iterator[tuple[str, str]]:
            yield from records

    assert made(Plain(), tmp_path / "plain", tokenizer) == first


def test_the_size_of_parts_follows_the_corpus_and_not_the_workers() -> None:
    assert tokenization.part_size(1000) == tokenization.SMALLEST_PART
    assert tokenization.part_size(10**13) == tokenization.LARGEST_PART
    assert all(
        1000 <= size / tokenization.part_size(size) <= tokenization.MANY_PARTS + 1 for size in (10**10, 10**11, 5 * 10**11)
    )


class Counting(ByteTokenizer):
    """Counts the texts it is given, and may fail or be slow."""

    def __init__(self, fail_after: int | None = None) -> None:
        super().__init__()
        self.calls, self.fail_after = 0, fail_after

    def encode(self, text: str) -> np.ndarray:
        self.calls += 1
        if self.fail_after is not None and self.calls > self.fail_after:
            raise KeyboardInterrupt
        return super().encode(text)


def test_finished_parts_are_not_done_again(records: Records, tmp_path: Path) -> None:
    whole = made(records, tmp_path / "whole", workers=1)
    with pytest.raises(KeyboardInterrupt):
        made(records, tmp_path / "store", Counting(fail_after=150), workers=1)
    assert not (tmp_path / "store").exists()
    (left,) = tmp_path.glob("store.parts-*")
    done = sorted(left.glob("0*.json"))
    assert 3 < len(done) < 20
    said: list[str] = []
    again = Counting()
    assert made(records, tmp_path / "store", again, workers=2, report=said.append) == whole
    assert 150 <= again.calls <= 150 + 30  # one part is begun again
    assert any(f"{len(done)} of " in line and "parts are already finished" in line for line in said)


def test_a_part_that_was_damaged_meanwhile_is_done_again(records: Records, tmp_path: Path) -> None:
    """A machine that lost power may have kept the name of a file and not its content."""
    whole = made(records, tmp_path / "whole", workers=1)
    with pytest.raises(KeyboardInterrupt):
        made(records, tmp_path / "store", Counting(fail_after=200), workers=1)
    (left,) = tmp_path.glob("store.parts-*")
    (left / "000001.ids").write_bytes(b"\0" * (left / "000001.ids").stat().st_size)
    (left / "000002.ends.npy").write_bytes(b"")
    (left / "000003.json").write_bytes(b'{"tok')
    assert made(records, tmp_path / "store", workers=1) == whole


def test_other_text_or_another_tokenizer_begins_anew(records: Records, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        made(records, tmp_path / "store", Counting(fail_after=200), workers=1)
    (tmp_path / "corpus" / "0.jsonl").write_text('{"text": "another"}')
    changed = JsonLines(path=str(tmp_path / "corpus")).records()
    assert made(changed, tmp_path / "store") == made(changed, tmp_path / "whole")


KILLED = """
import sys, time
from pathlib import Path
import forge_data.preparation.tokenization as prepare
from forge_data.components import JsonLines
from forge_data.tokenizers.bytes import ByteTokenizer
prepare.SMALLEST_PART = 4000
class Slow(ByteTokenizer):
    def encode(self, text):
        time.sleep(0.005)
        return super().encode(text)
records = JsonLines(path=sys.argv[1]).records()
prepare.tokenize(records, Slow(), Path(sys.argv[2]), source="s", workers=2, report=print, shard_tokens=9000)
"""


def test_a_killed_preparation_goes_on(records: Records, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "corpus"), str(tmp_path / "store")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("store.parts-*/0*.json"))) < 4 and time.monotonic() < until:
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "store").exists()
    done = len(list(tmp_path.glob("store.parts-*/0*.json")))
    again = Counting()
    assert made(records, tmp_path / "store", again, workers=1) == made(records, tmp_path / "whole", workers=1)
    assert done >= 4 and again.calls < 300


def test_a_worker_that_dies_is_a_message_and_the_rest_goes_on_later(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = tokenization._ask, []

    def kill(process: "subprocess.Popen[str]", number: int) -> Any:
        asked.append(number)
        if len(asked) == 5:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        return real(process, number)

    monkeypatch.setattr(tokenization, "_ask", kill)
    with pytest.raises(DataError, match=r"a worker ended \(exit code -9\) while it tokenized part \d+; perhaps memory ran out"):
        made(records, tmp_path / "store", workers=2, processes=True)
    monkeypatch.setattr(tokenization, "_ask", real)
    assert made(records, tmp_path / "store", workers=2) == made(records, tmp_path / "whole")


ORPHANED = """
import sys, time
from pathlib import Path
from forge_data.preparation.job import PreparationJob, write_job
from forge_data.preparation.tokenization import process_workers
from forge_data.sources.records import CorpusPart, Wanted
ends = {"eos": None, "tokenizer_eos": 256, "vocab_size": 257}
job = PreparationJob(parts=(CorpusPart((), 0, 0, 0),), wanted=Wanted("text"), dtype="uint16", skip=0, **ends)
from forge_data.tokenizers.bytes import ByteTokenizer
write_job(Path(sys.argv[1]), job, ByteTokenizer())
with process_workers(Path(sys.argv[1]), 2) as (work, stop):
    print(work(0).tokens, work(0).tokens, flush=True)
    time.sleep(60)
"""


def test_workers_do_not_outlive_who_started_them(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ORPHANED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None and process.stdout.readline() == "0 0\n"
        children = {int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()}
        process.kill()
    until = time.monotonic() + 30
    while any(running(pid) for pid in children) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(children) == 2 and not any(running(pid) for pid in children)


def running(pid: int) -> bool:
    """Whether a process lives; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("processes", [False, True])
def test_a_broken_record_stops_every_worker(records: Records, tmp_path: Path, processes: bool) -> None:
    (tmp_path / "corpus" / "1.jsonl").write_text('{"text": "fine"}\n{"no text": 1}')
    broken = JsonLines(path=str(tmp_path / "corpus")).records()
    with pytest.raises(DataError, match=r"1\.jsonl at byte 17 \(line 2\): 'text' is missing"):
        made(broken, tmp_path / "store", workers=2, processes=processes)
    assert not (tmp_path / "store").exists()


def test_a_tokenizer_that_no_other_process_can_make_is_used_by_threads(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shouting(ByteTokenizer):
        def encode(self, text: str) -> np.ndarray:
            return super().encode(text.upper())

        def dump(self) -> bytes:
            return b'{"type": "mine"}'

    monkeypatch.setattr(tokenization, "process_workers", lambda *_: pytest.fail("a process"))
    store = made(records, tmp_path / "store", Shouting(), workers=2, processes=True)
    assert b"HUND" in bytes(np.frombuffer(store["shard-00000.bin"], dtype="<u2").astype(np.uint8))


def test_a_full_disk_is_a_message_and_room_is_all_it_takes(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    (tmp_path / "texts").mkdir()
    for number in range(4):
        (tmp_path / "texts" / f"{number}.txt").write_text("words " * 2000)
    script = (
        "import resource, sys\nfrom forge_data.__main__ import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))\n"
        "sys.exit(main(['prepare', '--path', sys.argv[1], '--out', sys.argv[2], '--tokenizer', 'bytes', '--workers', '1']))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "texts"), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "cannot be written: File too large" in done.stderr, done.stderr
    assert "run the command again" in done.stderr.lower() and "Traceback" not in done.stderr
    assert not (tmp_path / "store").exists()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    made(text_files(str(tmp_path / "texts")), tmp_path / "store", shard_tokens=1 << 27)
    assert StoreSource(tmp_path / "store").documents == 4


def test_progress_says_how_far_and_how_fast(records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_core.terminal.ProgressMeter.__init__.__defaults__", (0.0,))
    said: list[str] = []
    made(records, tmp_path / "store", report=said.append, workers=1)
    shares = [int(line.partition("(")[2].partition("%")[0]) for line in said if "bytes of input (" in line]
    assert shares == sorted(shares) and shares[-1] == 100 and len(shares) > 10
    assert any("M/s" in line and "left" in line for line in said)
    assert "300 documents" in said[-1] or "documents" in said[-1]
