"""How often the host waits in a whole run, through `fit`, with the hooks that presets have: once in `log.every` steps.

A wait is counted, as everywhere in the rehearsal, where the host stands until the device has done something. There are two kinds:

- The device has work behind what is waited for. So it is with the verdict of a step, which is read when the next one is queued
  (docs/adr/0024): the host is a whole step ahead, and the device never stands still. Each step has one verdict, and may have one
  such wait.
- The device has nothing left to do: it stands still until the host has queued more. That is what costs time, and what the budget
  of one in `log.every` steps is for. A line of the log and the progress share one, in the step that they show; others have none.

The first step is not counted: its line is written at once, and groups connect and kernels are made in it.
"""

import json
from collections import Counter
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from forge_core.registry import Registry
from forge_train.recipe.load import load_recipe
from forge_train.run.loop import fit
from harness.pool import World
from rehearsal.ranks import own_device
from rehearsal.test_host_waits import EachStep
from train.runs import TINY, prepared
from train.whole_runs.test_moe_run import SPARSE

pytestmark = pytest.mark.rehearsal
STEPS, EVERY = 20, 10
HOOKS = """
[[hooks]]
name = "log"

[[hooks]]
name = "save"

[[hooks]]
name = "progress"
"""
"""Of the presets that train; `log.every` is 10."""
VERDICT = "forge_parallel/step/step.py DeferredRead.numbers"
BEHIND = f"{VERDICT}: event with work behind it"
IDLE = f"{VERDICT}: synchronize"
RUNS = {
    "dense": (TINY, 1, []),
    "dense on dp_shard = 2": (TINY, 2, ["--parallel.dp_shard=2"]),
    "experts": (SPARSE, 1, ["--precision.compute=bf16"]),
}


def _counted(recipe: Path, overrides: list[str], reading: bool = False) -> list[dict[str, int]]:
    """Of each step the waits by place, what hooks do behind it among them. `reading`: with a hook that reads every loss."""
    from rehearsal.device.waits import counted

    with own_device() as device:
        run, reader = prepared(recipe, overrides, device)
        if run.topology.rank == 0:
            run.ranks.console = Console(file=StringIO(), force_terminal=True)
        with counted() as total:
            each = EachStep(total)
            run.hooks[:] = [*(hook for hook in run.hooks if reading or hook is not reader), each]
            fit(run)
    found = []
    for step in each.steps:
        places: Counter[str] = Counter()
        for site, count in step.items():
            places[site.place] += count
        found.append(dict(places))
    return found


def _recipe(tmp_path: Path, text: str, steps: int) -> tuple[Path, list[str]]:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text.partition("[[hooks]]")[0] + HOOKS)
    settings = [f"--job.dir={tmp_path / 'run'}", f"--train.max_steps={steps}", "--checkpoint.every=1000"]
    return recipe, [*settings, "--data.documents=ignore"]


@pytest.mark.parametrize("name", RUNS)
def test_the_device_stands_still_once_in_every_ten_steps(devices: World, tmp_path: Path, name: str) -> None:
    text, ranks, overrides = RUNS[name]
    recipe, settings = _recipe(tmp_path, text, STEPS)
    for found in devices.run(_counted, ranks, recipe, [*settings, *overrides], group=False):
        assert len(found) == STEPS
        for step, waits in enumerate(found[1:], start=2):
            shown = step % EVERY == 0
            judged = step - 1 if (step - 1) % EVERY and step > 2 else None  # what is shown was judged with it
            assert waits == ({BEHIND: 1} if judged else {}) | ({IDLE: 1} if shown else {}), f"step {step}"
        idle = sum(count for waits in found[1:] for place, count in waits.items() if place != BEHIND)
        assert idle <= STEPS / EVERY
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, EVERY, STEPS], "each wait has its line"


def test_a_hook_that_reads_every_step_makes_the_device_stand_still_in_each(devices: World, tmp_path: Path) -> None:
    """So the count above can fail."""
    recipe, settings = _recipe(tmp_path, TINY, 4)
    (found,) = devices.run(_counted, 1, recipe, settings, True, group=False)
    assert [waits.get(IDLE, 0) for waits in found] == [1, 1, 1, 1]


def test_the_hooks_are_those_of_presets(tmp_path: Path) -> None:
    recipe, settings = _recipe(tmp_path, TINY, STEPS)
    registry = Registry()
    ours = load_recipe(recipe, settings, 1, registry).job.hooks
    for preset in ("20m", "1b", "70b"):
        assert load_recipe(preset, [], 8, registry).job.hooks == ours, preset
    assert next(hook for hook in ours if hasattr(hook, "every")).every == EVERY
