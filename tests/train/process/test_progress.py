"""Restarts without a newer checkpoint end, with a reason that a person can read."""

from pathlib import Path

import pytest

from forge_train.directory import NO_PROGRESS_FILE, RESTARTS_FILE
from forge_train.process.restarts import (
    NoProgress,
    is_automatic,
    note_start,
    refuse_without_progress,
)


def start(folder: Path, step: int, automatic: bool = True) -> None:
    refuse_without_progress(folder, step, automatic)
    note_start(folder, step, automatic)


def test_fault_26_three_restarts_without_a_newer_checkpoint_are_the_last(tmp_path: Path) -> None:
    start(tmp_path, 0, automatic=False)
    for _ in range(3):
        start(tmp_path, 0)
    with pytest.raises(NoProgress, match="restarted 3 times from step 0") as error:
        start(tmp_path, 0)
    assert error.value.exit_code == 93
    assert "Look at the ends of its logs; start it by hand to continue" in (tmp_path / NO_PROGRESS_FILE).read_text()
    with pytest.raises(NoProgress):
        start(tmp_path, 0)
    start(tmp_path, 0, automatic=False)
    assert not (tmp_path / NO_PROGRESS_FILE).exists(), "a person has looked"
    for _ in range(3):
        start(tmp_path, 0)


def test_fault_26_a_newer_checkpoint_is_progress(tmp_path: Path) -> None:
    for step in (0, 0, 0, 3, 3, 3, 6):
        start(tmp_path, step)
    for _ in range(2):
        start(tmp_path, 6)
    with pytest.raises(NoProgress, match="the checkpoint of step 6"):
        start(tmp_path, 6)


def test_fault_26_a_record_that_cannot_be_read_counts_nothing(tmp_path: Path) -> None:
    for broken in ("", "[]", '{"step": 0}', '{"step": 0, "restarts": "x"}', "\x00"):
        (tmp_path / RESTARTS_FILE).write_text(broken)
        start(tmp_path, 0)


def test_who_says_that_a_start_is_automatic() -> None:
    assert not is_automatic({})
    assert not is_automatic({"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": ""})
    assert is_automatic({"TORCHELASTIC_RESTART_COUNT": "1"})
    assert is_automatic({"SLURM_RESTART_COUNT": "2"})
