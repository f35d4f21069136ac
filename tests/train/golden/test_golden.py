"""Twenty steps of every preset, made small, give the losses that they gave before.

The numbers are a record, not a proof: what proves them compares with one process, torch or transformers. They show a change that
nobody meant to make: another default of a preset, another order of data, another initial weight. `record.py` writes them anew.
"""

import json
from pathlib import Path

import pytest

from harness.siblings import fast
from train.golden.record import CURVES, curve
from train.golden.small import STEPS, names

FAST = ("debug", "debug-moe", "8b-h200", "8x7b", "7b-mot")
"""One of each family of recipes."""

APART = 1e-5
"""How far a loss in fp32 may be from the record, relatively. Instruction sets round differently: SSE4 and AVX2 were up to 1.4e-7
from AVX-512."""


def test_there_is_a_curve_of_every_preset_and_they_learn() -> None:
    recorded = json.loads(CURVES.read_text())
    assert list(recorded) == list(names())
    assert all(len(losses) == STEPS and losses[-1] < 0.6 * losses[0] for losses in recorded.values())


@pytest.mark.parametrize("name", fast(*FAST, of=names()))
def test_a_preset_gives_the_losses_of_before(name: str, tmp_path: Path) -> None:
    assert curve(name, tmp_path) == pytest.approx(json.loads(CURVES.read_text())[name], rel=APART)
