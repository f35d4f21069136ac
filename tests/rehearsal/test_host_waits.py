"""Where the host waits for the device in a step, line by line, against what `host_waits.json` allows.

The counts there are exact: a wait that is mended lowers its number, and a new one has to be asked for. Waits of uncompiled flex
attention are none of a GPU, so rows are masked by document only where attention takes lengths: in bf16.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forge_core.protocols.run import Hook
from forge_train.run.loop import fit
from harness.pool import World
from rehearsal.ranks import own_device
from train.runs import TINY, prepared
from train.whole_runs.test_moe_run import SPARSE

pytestmark = pytest.mark.rehearsal
ALLOWED = json.loads((Path(__file__).parent / "host_waits.json").read_text())
BY_HASH = (
    TINY
    + """
[model.moe]
experts = 4
router = { name = "hash" }
"""
)
MASKED = ["--data.documents=mask", "--precision.compute=bf16", "--model.dim=64"]
"""Heads of 16 numbers, which kernels of variable length take."""
BF16 = ["--precision.compute=bf16"]
"""In which a GPU has a kernel for all experts at once."""
RUNS = {
    "dense": (TINY, 1, []),
    "experts": (SPARSE, 1, BF16),
    "experts in fp32": (SPARSE, 1, []),
    "dense on dp_shard = 2": (TINY, 2, ["--parallel.dp_shard=2"]),
    "experts on ep = 2, all_to_all": (SPARSE, 2, ["--parallel.dp_shard=2", "--parallel.ep=2", *BF16]),
    "experts on ep = 2, all_gather": (
        SPARSE, 2, ["--parallel.dp_shard=2", "--parallel.ep=2", "--transforms.expert.dispatcher=all_gather", *BF16],
    ),
    "experts by hash": (BY_HASH, 1, BF16),
    "dense in float8 on dp_shard = 2": (
        TINY, 2, ["--parallel.dp_shard=2", "--model.dim=64", "--model.ffn_dim=64", "--transforms.float8.recipe=tensorwise"],
    ),
    "dense in bf16 state": (TINY, 1, ["--precision.compute=bf16", "--precision.state=bf16"]),
    "dense in moments of eight bits": (
        TINY, 1, ["--optimizer.name=adamw8bit", "--optimizer.block=8", "--optimizer.smallest=0"],
    ),
    "documents in bf16": (TINY, 1, MASKED),
    "documents in bf16 on pp = 2": (TINY, 2, [*MASKED, "--parallel.pp=2"]),
    "documents in bf16 on cp = 2": (TINY, 2, [*MASKED, "--parallel.cp=2", "--transforms.context.kind=ulysses"]),
}  # fmt: skip
PLAIN = ["--train.max_steps=4", "--checkpoint.every=100", "--hooks=[]"]


class EachStep(Hook):
    """What was counted from one step's end to the next one's."""

    def __init__(self, total: Counter[Any]) -> None:
        self.total, self.before = total, Counter[Any]()
        self.steps: list[Counter[Any]] = []

    def after_step(self, run: Any, result: Any) -> None:
        self.steps.append(self.total - self.before)
        self.before = Counter(self.total)


def _counted(recipe: Path, overrides: list[str]) -> tuple[list[dict[str, int]], list[str]]:
    """Of each step the waits by place, and every line behind them."""
    from rehearsal.device.waits import counted

    with own_device() as device:
        run, _ = prepared(recipe, overrides, device)
        with counted() as total:
            each = EachStep(total)
            run.hooks[:] = [each]
            fit(run)
    lines = sorted({f"{site.file}:{site.line} {site.kind}" for step in each.steps for site in step})
    places = []
    for step in each.steps:
        found: Counter[str] = Counter()
        for site, count in step.items():
            found[site.place] += count
        places.append(dict(found))
    return places, lines


@pytest.mark.parametrize("name", RUNS)
def test_waits_of_a_step_are_those_that_are_allowed(devices: World, tmp_path: Path, name: str) -> None:
    text, ranks, overrides = RUNS[name]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    documents = [] if overrides[: len(MASKED)] == MASKED else ["--data.documents=ignore"]
    settings = [f"--job.dir={tmp_path / 'run'}", *PLAIN, *documents, *overrides]
    for steps, lines in devices.run(_counted, ranks, recipe, settings, group=False):
        assert steps[2] == steps[3], "a step does not wait more often than the one before"
        assert steps[2] == ALLOWED[name], lines
