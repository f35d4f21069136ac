"""A short storm, whose faults come at steps: the run finishes with the bits of a clean one; and a storm that has to notice."""

import os
from pathlib import Path

import pytest

from forge_train.run.loop import fit
from harness.pool import World
from train.runs import prepared
from train.storm.faults import FAULTS
from train.storm.storm import Planned, Storm, differences, drawn, end_of
from train.storm.weather import FOLDER

SHORT = (
    Planned(0, 7, "a_gradient_is_not_finite", 1),
    Planned(0, 9, "a_byte_flips", 0),
    Planned(0, 13, "one_rank_is_asked_to_stop", 1),
)


def short(world: World, folder: Path, until: int, *faults: Planned, faulty: bool = False) -> list[str]:
    """What differs after a storm on two ranks."""
    storm = Storm(folder / "stormy", ranks=2, every=4, pace=0.15, faulty=faulty)
    storm.rage(faults, until)
    assert sorted(storm.did) == sorted(fault.kind for fault in faults)
    end, clean = end_of(storm.struck.checkpoints), storm.without(folder / "clean")
    assert end.name == f"step {until}"
    world.run(_calm, 2, clean.recipe, clean.struck.checkpoints.parent, until, timeout=60)
    return differences(end, end_of(clean.struck.checkpoints))


def _calm(recipe: Path, directory: Path, until: int) -> None:
    """Trains in processes that are there already."""
    os.environ[FOLDER] = str(recipe.parent)
    fit(prepared(recipe, [f"--job.dir={directory}", "--checkpoint.every=4", f"--train.stop_at={until}"])[0])


@pytest.mark.slow
def test_fault_44_a_run_in_a_short_storm_ends_with_the_bits_of_a_clean_one(world: World, tmp_path: Path) -> None:
    assert short(world, tmp_path, 18, *SHORT) == []


@pytest.mark.slow
def test_a_resume_that_leaves_the_samples_of_a_step_out_is_noticed(world: World, tmp_path: Path) -> None:
    found = short(world, tmp_path, 14, Planned(0, 9, "a_rank_is_killed", 1), faulty=True)
    assert found and found[0].startswith("file ")


def test_a_seed_fixes_a_storm_and_every_kind_comes_before_one_comes_again() -> None:
    faults = list(drawn(5, 1800, 4))
    assert faults == list(drawn(5, 1800, 4)) != list(drawn(6, 1800, 4))
    assert {fault.kind for fault in faults[: len(FAULTS)]} == set(FAULTS)
    assert 60 < len(faults) < 120, "twenty seconds apart in the mean, over half an hour"
    assert {fault.rank for fault in faults} == {0, 1, 2, 3}
    assert [fault.seconds for fault in faults] == sorted(fault.seconds for fault in faults)
