"""The order of the schedule, its refusal without a receipt, and its use with one."""

import subprocess
import sys
from pathlib import Path

import pytest
from forge_looped_bfs import RECEIPTS, LoopedBFS

from forge_parallel.pipeline import Action
from forge_testing import conforms

RECIPE = """
base = "debug"

[model]
layers = 4

[parallel]
pp = 2

[parallel.pipeline]
schedule = { name = "looped_bfs" }

[train]
micro_batch = 2

[[hooks]]
name = "save"
"""


def forge(folder: Path, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "forge_train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == code, f"{arguments} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_it_conforms() -> None:
    conforms("forge-looped-bfs")


def test_a_rank_does_all_micro_batches_of_a_stage_before_the_next_stage() -> None:
    first, last = LoopedBFS().build().actions(2, 3)
    forwards = [Action("F", stage, index) for stage in (0, 2) for index in range(3)]
    assert [action for action in first if action.kind == "F"] == forwards
    assert [action.stage for action in last if action.kind == "B"] == [3, 3, 3, 1, 1, 1]


@pytest.mark.slow
def test_a_receipt_of_the_wheel_allows_the_layout(tmp_path: Path) -> None:
    """The folder of receipts is empty before a release, because a receipt holds for the code that it was made with."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    assert "looped_bfs" in forge(tmp_path, "check", "recipe.toml", "--world", "2", code=2)
    try:
        forge(tmp_path, "parity", "recipe.toml", "--layouts", "pp2", "--record", str(RECEIPTS))
        assert list(RECEIPTS.glob("*.json"))
        forge(tmp_path, "check", "recipe.toml", "--world", "2")
    finally:
        for receipt in RECEIPTS.glob("*.json"):
            receipt.unlink()
