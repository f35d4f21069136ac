"""Slow ranks in real groups: one that sleeps is named with its host, in layouts whose ranks wait for each other in each layer."""

import logging
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from forge_core.protocols.run import Hook
from forge_parallel.launch.watch import Watch
from forge_train.hooks.stragglers import Stragglers
from forge_train.run.loop import fit
from forge_train.trackers import METRICS, read_metrics
from harness.pool import World
from harness.siblings import fast
from train.runs import TINY, digest, prepared

SMALL = TINY.replace("layers = 2", "layers = 1")


class Sleeps(Hook):
    """Rank 1 is slow in every step until one: before the forward, or in what a hook does after the step."""

    def __init__(self, where: str, until: int, seconds: float = 0.2) -> None:
        self.where, self.until, self.seconds = where, until, seconds

    def start(self, run: Any) -> None:
        self.run = run

    def before_step(self, run: Any) -> None:
        time.sleep(0.02)  # of every rank, so that there is a time to compare with
        if self.where == "data":
            self._sleep()

    def after_step(self, run: Any, result: Any) -> None:
        if self.where == "hook":
            run.watch.enter("hook sleeps", "sleeps")
            self._sleep()

    def _sleep(self) -> None:
        if self.run.topology.rank == 1 and self.run.state.step < self.until:
            time.sleep(self.seconds)


def _named(recipe: Path, folder: Path, settings: list[str], where: str, until: int) -> tuple[list[str], str]:
    """What the report of rank 0 warns of, and the weights."""
    run, _ = prepared(recipe, [f"--job.dir={folder}", "--checkpoint.every=0", "--train.micro_batch=4", *settings])
    run.hooks[:] = [Sleeps(where, until), Stragglers(every=3)]
    fit(run)
    return run.health.summary(), digest(run)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize(("where", "layout"), fast(("data", "dp2"), of=[("data", "dp2"), ("data", "tp2")]))
def test_fault_36_a_rank_that_sleeps_is_named_with_its_host_and_no_other_is(
    world: World, recipe: Path, tmp_path: Path, where: str, layout: str
) -> None:
    settings = ["--train.max_steps=15", *(["--parallel.tp=2"] if layout == "tp2" else [])]
    (warned, _), (other, _) = world.run(_named, 2, recipe, tmp_path / "run", settings, where, 100, timeout=90)
    assert warned == other
    assert len(warned) == 1
    found = re.fullmatch(rf"after step (\d+), rank 1 on {socket.gethostname()} is slower than the others: .*", warned[0])
    assert found and int(found[1]) in (9, 12, 15), "in its third slow window"
    logged = [entry for entry in read_metrics(tmp_path / "run" / METRICS) if "stragglers/named" in entry]
    assert [entry["step"] for entry in logged] == [3, 6, 9, 12, 15]
    assert [entry["stragglers/named"] for entry in logged] == [float(entry["step"] >= int(found[1])) for entry in logged]
    assert logged[-1]["stragglers/slowest_rank"] == 1


@pytest.mark.slow
def test_fault_36_a_rank_that_is_fast_again_is_said_and_clean_ranks_are_never_named(
    world: World, recipe: Path, tmp_path: Path
) -> None:
    (warned, slow), _ = world.run(_named, 2, recipe, tmp_path / "a", ["--train.max_steps=39"], "data", 15, timeout=90)
    assert len(warned) == 2 and warned[1].endswith("is as fast as the others again")
    (warned, clean), _ = world.run(_named, 2, recipe, tmp_path / "b", ["--train.max_steps=39"], "data", 0, timeout=90)
    assert warned == [] and slow == clean, "bits of the run are those without it"


@pytest.mark.slow
def test_what_a_hook_takes_names_no_rank(world: World, recipe: Path, tmp_path: Path) -> None:
    for warned, _ in world.run(_named, 2, recipe, tmp_path / "run", ["--train.max_steps=15"], "hook", 100, timeout=90):
        assert warned == []


def test_the_watch_tells_the_seconds_of_each_section() -> None:
    watch, began = Watch(), time.monotonic()
    watch.enter("reads", "data")
    time.sleep(0.05)
    watch.enter("computes", "step of 8 places")
    time.sleep(0.1)
    first = watch.seconds()
    assert first["data"] >= 0.05 and first["step of 8 places"] >= 0.1, "the section that has not ended counts up to now"
    assert first["data"] + first["step of 8 places"] <= time.monotonic() - began
    time.sleep(0.05)
    watch.enter("updates", "update")
    second = watch.seconds()
    assert second["data"] == first["data"] and second["step of 8 places"] >= first["step of 8 places"] + 0.05


def test_alone_it_looks_at_nothing(recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=4"])
    hook = Stragglers(every=2)
    run.hooks[:] = [hook]
    with caplog.at_level(logging.WARNING):
        fit(run)
    assert hook.world is None and hook.steps == [] and caplog.records == []
