"""`forge-train profile`: what it prints, and what it refuses."""

import gzip
import json
import os
from pathlib import Path

import pytest

from forge_core.errors import ForgeError
from forge_train.cli import main
from forge_train.profiling.trace import chosen_traces, folder_of, forget_old, trace_of, traces_of, windows
from train.profiling.test_summary import STEP


def write(directory: Path, step: int, ranks: int = 1, world: int | None = None) -> None:
    for rank in range(ranks):
        path = trace_of(folder_of(directory, step), rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"rank": rank, "world": world or ranks, "step": step, "steps": 2}
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": STEP, "forge": about}).encode()))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["profile", *arguments])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_classes_are_printed_and_sum_to_the_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 40, ranks=2)
    lines = printed(capsys, str(tmp_path)).splitlines()
    assert lines[0] == "steps 40 to 41, 0.100 ms on rank 0, on the device"
    rows = [line.split("\t") for line in lines]
    assert ["1", "0.100", "0.015", "0.025", "0.040", "0.006", "0.014", "15.0", "25.0", "40.0", "6.0", "14.0"] in rows
    assert ["exposed", "0.040", "0.040", "0", "0.040", "0"] in rows, "the spread over ranks"
    assert any("aten::mm" in row for row in rows), "what waits is named by its operator"


def test_json_has_everything_in_nanoseconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 40, ranks=2)
    found = json.loads(printed(capsys, str(tmp_path), "--json"))
    assert found["ranks"]["1"]["classes"] == {
        "compute": 15_000, "overlapped": 25_000, "exposed": 40_000, "memory": 6_000, "idle": 14_000,
    }  # fmt: skip
    assert [row["label"] for row in found["over_ranks"]] == ["compute", "overlapped", "exposed", "memory", "idle", "window"]


def test_the_newest_window_is_shown_unless_a_step_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 40)
    write(tmp_path, 9)  # after a resume from an earlier step
    os.utime(folder_of(tmp_path, 40), (1, 1))
    assert printed(capsys, str(tmp_path)).startswith("steps 9 to 10")
    assert printed(capsys, str(tmp_path), "--step", "40").startswith("steps 40 to 41")
    assert printed(capsys, str(folder_of(tmp_path, 40))).startswith("steps 40 to 41")
    assert printed(capsys, str(trace_of(folder_of(tmp_path, 40), 0))).startswith("steps 40 to 41")


def test_old_windows_are_removed_by_when_they_were_written(tmp_path: Path) -> None:
    for age, step in enumerate([30, 4, 100]):
        write(tmp_path, step)
        os.utime(folder_of(tmp_path, step), (10 - age, 10 - age))
    forget_old(tmp_path, 2)
    assert list(windows(tmp_path)) == [4, 30]
    forget_old(tmp_path, 2)
    assert list(windows(tmp_path)) == [4, 30]


def test_what_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="does not exist"):
        chosen_traces(tmp_path / "absent", None)
    with pytest.raises(ForgeError, match="has no profiles"):
        chosen_traces(tmp_path, None)
    write(tmp_path, 40)
    with pytest.raises(ForgeError, match=r"--step 41: .* has profiles of the steps 40"):
        chosen_traces(tmp_path, 41)
    folder_of(tmp_path, 50).mkdir()
    with pytest.raises(ForgeError, match="no complete trace"):
        chosen_traces(tmp_path, 50)


def test_traces_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path, 40, ranks=4)
    write(tmp_path, 40, ranks=2)
    with pytest.raises(ForgeError, match="of runs on 2, 4 ranks"):
        traces_of(chosen_traces(tmp_path, 40))


def test_a_rank_without_a_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 40)
    with pytest.raises(SystemExit) as ended:
        main(["profile", str(tmp_path), "--rank", "3"])
    assert ended.value.code == 2
    assert "--rank 3 has no trace; choose one of the ranks 0" in capsys.readouterr().err
