"""`data diff` of runs and checkpoints: what they consumed, not what their recipes say today."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_core.errors import ForgeError
from forge_data.commands.diff import compare_runs, is_run
from train.runs import TINY, train


def compared(one: Path, other: Path) -> dict[str, Any]:
    assert is_run(str(one)) and is_run(str(other))
    return compare_runs(str(one), str(other), None, lambda _: None)


def test_runs_and_checkpoints_are_compared_as_far_as_both_have_come(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(1, 61, size=5000, dtype=np.uint16)
    np.save(tmp_path / "ids.npy", ids)
    recipe = tmp_path / "tiny.toml"
    tokens = f'name = "tokens"\npath = "{tmp_path / "ids.npy"}"\n'
    recipe.write_text(TINY.replace('name = "random"\nvocab_size = 61\ntokens = 4000\ndocument = 23\n', tokens))
    seen = [
        train(recipe, [f"--job.dir={tmp_path / name}", *more])["samples"]
        for name, more in (("one", []), ("short", ["--train.max_steps=5"]), ("other", ["--job.seed=4"]))
    ]
    assert seen[0][:5] == seen[1]

    found = compared(tmp_path / "one", tmp_path / "short")
    assert found["equal"] and found["steps"] == 5
    assert [run["steps"] for run in found["runs"]] == [8, 5] and all(run["consumed"] for run in found["runs"])
    assert found["runs"][0]["tokens"] == {"tokens": 8 * 8 * 16}
    earlier = compared(tmp_path / "one" / "checkpoints" / "step-00000003", tmp_path / "short")
    assert earlier["equal"] and earlier["steps"] == 3 and [run["steps"] for run in earlier["runs"]] == [3, 5]

    found = compared(tmp_path / "one", tmp_path / "other")
    row = next(row for row, (mine, theirs) in enumerate(zip(seen[0][0], seen[2][0], strict=True)) if mine != theirs)
    assert (found["first"]["step"], found["first"]["row"], found["settings"]) == (0, row, ["seed is 3, there 4"])
    place = int(found["first"]["places"][0].rsplit(" ", 1)[1])
    offset = np.load(tmp_path / "ids.npy", mmap_mode="r").offset  # type: ignore[attr-defined]
    assert ids[(place - offset) // 2] == found["first"]["values"][0]

    np.save(tmp_path / "ids.npy", ids[::-1])
    with pytest.raises(ForgeError, match=r"sources\.tokens\.fingerprint was"):
        compared(tmp_path / "one", tmp_path / "short")
