"""Models with multi-token prediction in layouts: stages, splits, and a dry run. See `test_compositions` for parity."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from forge_core.errors import ConfigError, PlanError
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_models.components.decoder import MTPConfig
from forge_models.objectives import CrossEntropy
from forge_parallel.dryrun.estimate import Workload, dry_run
from forge_parallel.model.plan import Plan
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import GPipe, OneForwardOneBackward, ZeroBubbleV
from forge_parallel.pipeline.stages import StageSplit
from forge_train.recipe.load import load_recipe
from parallel.compositions.rows import DECODER, names


def cut(schedule: Any, ranks: int = 2, depth: int = 2, split: str = "balanced", **fields: Any) -> StageSplit:
    with torch.device("meta"):
        module = replace(DECODER, mtp=MTPConfig(depth=depth), **fields).build()
    return StageSplit.of(module, module.specs(), Pipeline(schedule.build(), split), ranks, ranks - 1)


def test_modules_stay_beside_the_head_with_a_table_that_follows() -> None:
    found = cut(OneForwardOneBackward())
    assert found.stages[-1][-3:] == ("norm", "head", "mtp")
    assert sum(path.startswith("blocks.") for stage in found.stages for path in stage) == 4
    assert [(one.copy, one.original) for one in found.followers] == [("mtp.embed.weight", "embed.weight")]
    assert len(cut(OneForwardOneBackward(), tied_embeddings=True).followers) == 2


def test_a_balanced_split_counts_modules_and_every_use_of_the_head() -> None:
    """By hand: a block has 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24 = 1920 weights in products, the head 61 * 16 = 976."""
    for layers, depth, expected in ((4, 1, [3, 1]), (8, 1, [5, 3]), (8, 2, [6, 2])):
        # A module has 1920 + 2 * 16 * 16: what is behind the blocks weighs 2 * 976 + 2432 with one, 3 * 976 + 2 * 2432 with two.
        found = cut(GPipe(), depth=depth, layers=layers)
        assert [sum(path.startswith("blocks.") for path in stage) for stage in found.stages] == expected


@pytest.mark.usefixtures("newer_torch")
def test_depth_two_is_refused_with_split_backwards() -> None:
    with pytest.raises(PlanError, match=r"'zbv'.*prediction of depth 2"):
        cut(ZeroBubbleV(), split="1,1,1,1")
    assert cut(ZeroBubbleV(), depth=1, split="1,1,1,1").last is False
    recipe = ["--model.mtp.depth=2", "--parallel.pp=2", "--parallel.pipeline.schedule={name='zbv'}", "--model.layers=4"]
    with pytest.raises(ConfigError) as refusal:
        load_recipe("debug", [*recipe, "--hooks=[]"], 2, Registry())
    assert {fault.key for fault in refusal.value.faults} == {"model.mtp.depth"}
    resolved = load_recipe("debug", ["--model.mtp.depth=2"], 1, Registry())
    assert "mtp" in names(resolved.job, Layout())
    assert "mtp" not in names(load_recipe("debug", [], 1, Registry()).job, Layout())


@pytest.mark.slow
def test_a_dry_run_knows_every_use_of_the_head() -> None:
    """What heads keep are gradients: of each one's input (rows x length x width), and of the weight (vocabulary x width)."""
    workload = Workload(
        replace(DECODER, mtp=MTPConfig(depth=2)).build,
        CrossEntropy().build(),
        AdamWConfig().build,
        rows=2,
        length=16,
        compute="fp32",
    )
    estimate = dry_run(workload, Plan.of([], Layout()))
    assert estimate.head == pytest.approx(3 * 4 * (2 * 16 * 16 + 61 * 16), abs=1024)
    plain = dry_run(replace(workload, build=DECODER.build), Plan.of([], Layout()))
    assert estimate.head_work == pytest.approx(plain.head_work, rel=0.2)
