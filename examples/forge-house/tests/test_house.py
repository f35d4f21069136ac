"""The rules of the house, on recipes and on trackers."""

import time

import pytest
from forge_house import TrackerRules

from forge_core import ConfigError, Registry
from forge_testing import conforms, examine
from forge_train import Jsonl, load_recipe


def test_it_conforms() -> None:
    conforms("forge-house")


def test_the_preset_is_a_recipe_that_keeps_the_rules() -> None:
    job = load_recipe("house", [], world=1).job
    assert (job.job.name, job.checkpoint.every, job.checkpoint.keep) == ("house", 10, 3)


@pytest.mark.parametrize("every", [0, 501])
def test_a_long_run_that_loses_much_is_refused(every: int) -> None:
    long = ["--train.max_steps=1000", f"--checkpoint.every={every}"]
    with pytest.raises(ConfigError, match=r"checkpoint\.every(.|\n)*the house loses at most 500"):
        load_recipe("house", long, world=1)
    load_recipe("house", ["--train.max_steps=999", f"--checkpoint.every={every}"], world=1)
    load_recipe("house", ["--train.max_steps=1000", "--checkpoint.every=500"], world=1)


def test_trackers_of_all_distributions_are_checked_by_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = [found for found in Registry().of("forge.trackers") if found.name == "jsonl"]
    result = examine(entry, Registry())
    assert "check_fast" in result.passed and not result.problems
    monkeypatch.setattr("forge_train.trackers.JsonlTracker.write", lambda *_: time.sleep(0.11))
    with pytest.raises(AssertionError, match="a write takes 11"):
        TrackerRules.check_fast(Jsonl())
