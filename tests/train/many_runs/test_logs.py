"""The merged log: by time, each line after its rank, whole tracebacks, and the same from the end as from the beginning."""

import json
from pathlib import Path

import pytest

from forge_core.errors import DataError
from forge_train.cli import main
from forge_train.runs import logs
from forge_train.runs.logs import log_files, merged


def record(second: int, rank: int, text: str) -> str:
    return f"2026-03-01T08:00:{second:02d}.000Z rank {rank}/3 INFO forge: {text}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three ranks; rank 1 has a traceback, the clock of rank 2 is set back, its last line has no end."""
    (tmp_path / "logs").mkdir()
    lines = {
        0: [record(1, 0, "a"), record(4, 0, "b"), "", record(9, 0, "c")],
        1: ["no time yet", record(2, 1, "d"), "Traceback:", "  é\u2028x", record(4, 1, "e")],
        2: [record(3, 2, "f"), record(1, 2, "set back"), record(5, 2, "g")],
    }
    for rank, text in lines.items():
        (tmp_path / "logs" / f"rank-{rank:05d}.log").write_text("\n".join(text) + ("" if rank == 2 else "\n"))
    (tmp_path / "logs" / "hang.txt").write_text("not a log of a rank")
    (tmp_path / "logs" / "rank-x.log").write_text("not a log of a rank")
    return tmp_path


EXPECTED = [
    (1, "no time yet"),
    (0, record(1, 0, "a")),
    (1, record(2, 1, "d")),
    (1, "Traceback:"),
    (1, "  é\u2028x"),
    (2, record(3, 2, "f")),
    (2, record(1, 2, "set back")),
    (0, record(4, 0, "b")),
    (0, ""),
    (1, record(4, 1, "e")),
    (2, record(5, 2, "g")),
    (0, record(9, 0, "c")),
]


@pytest.mark.parametrize("block", [1, 10, 2**20])
def test_lines_are_merged_by_time(run: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_BLOCK", block)
    assert list(merged(log_files(run))) == EXPECTED


@pytest.mark.parametrize("block", [1, 60, 2**20])
@pytest.mark.parametrize("tail", range(1, 15))
def test_the_tail_is_the_end_of_the_whole(run: Path, tail: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_BLOCK", block)
    assert list(merged(log_files(run), tail)) == EXPECTED[-tail:]


def test_a_program_gets_the_same_lines(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["runs", "log", str(run), "--tail", "3", "--json"])
    lines = [(item["rank"], item["line"]) for item in json.loads(capsys.readouterr().out)]
    assert not end.value.code and lines == EXPECTED[-3:]


def test_some_ranks(run: Path) -> None:
    assert list(merged(log_files(run, {1, 2}))) == [line for line in EXPECTED if line[0] in (1, 2)]
    assert list(merged(log_files(run, [2]), 1)) == [(2, record(5, 2, "g"))]


def test_windows_ends_and_empty_logs(run: Path) -> None:
    (run / "logs" / "rank-00000.log").write_bytes(b"2026-03-01T08:00:01.000Z rank 0/3 INFO forge: a\r\n")
    (run / "logs" / "rank-00001.log").write_bytes(b"")
    assert list(merged(log_files(run, [0, 1]))) == [(0, record(1, 0, "a"))]
    assert list(merged(log_files(run, [1]), 3)) == []


def test_a_tail_does_not_read_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs" / "rank-00000.log"
    path.write_text("".join(record(number % 60, 0, "x" * 200) + "\n" for number in range(40_000)))
    read, block = [0], logs._block

    def counted(path: Path, at: int, size: int) -> bytes:
        found = block(path, at, size)
        read[0] += len(found)
        return found

    monkeypatch.setattr(logs, "_block", counted)
    assert len(list(merged(log_files(tmp_path), 5))) == 5
    assert read[0] <= 2**20 < path.stat().st_size / 5


def test_what_has_no_log_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no log of rank 7; it has those of ranks 0 to 2"):
        log_files(run, [0, 7])
    (run / "logs" / "rank-00001.log").unlink()
    with pytest.raises(DataError, match=r"ranks 0, 2"):
        log_files(run, [1])
    for place in (tmp_path / "nowhere", run / "logs"):
        with pytest.raises(DataError, match=r"has no logs: there is no logs/rank-00000.log; give a run's directory"):
            log_files(place)
