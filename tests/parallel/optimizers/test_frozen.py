"""Frozen parameters where a layout could trip over them: at the start of the model, whole stages, and foreign modules."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from forge_core.layout import Layout
from forge_parallel import parallelize
from forge_parallel.dryrun.estimate import Workload, dry_run
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint
from forge_parallel.optim import optimizers
from forge_parallel.optim.groups import ParameterGroup as Group
from forge_parallel.optim.groups import grouped
from forge_parallel.optim.optimizers import AdamWConfig, ScheduleFreeAdamWConfig
from forge_parallel.optim.stages import settings_of
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify.parity import Measurement, compare
from harness.pool import World
from harness.siblings import fast
from parallel.compositions.rows import DECODER, case_of, layout_of, measured
from parallel.foreign_modules import VOCAB, Plain
from parallel.tiny import cross_entropy

FIRST = ("embed.weight", "blocks.0.*", "blocks.1.*")
"""All of the first of two stages."""

ROWS = {
    "dp_shard accumulate recompute": FIRST,
    "tp": FIRST,
    "cp_ring": FIRST,
    "dp_replicate": FIRST,
    "pp_1f1b accumulate": FIRST,
    "pp_interleaved_zero_bubble accumulate": FIRST,
    "pp_zbv accumulate": FIRST,
    "pp_1f1b accumulate tied": ("blocks.0.*",),
}


def _measured(row: str, layout: str) -> Measurement:
    words = frozenset(row.split())
    groups = tuple(Group(match=pattern, frozen=True) for pattern in ROWS[row])
    return measured(replace(case_of(words), groups=groups), layout, words)


@pytest.mark.parametrize("row", fast("tp", "dp_shard accumulate recompute", "pp_zbv accumulate", of=ROWS))
def test_the_start_of_a_model_may_be_frozen_in_a_layout(world: World, row: str) -> None:
    """Loss, norm, gradients and weights are those of one process, in which the frozen ones stay as they were drawn."""
    alone = _measured(row, "1")
    names = {name for name, tensor in alone.weights.items() if torch.equal(tensor, alone.initial[name])}
    assert names == alone.weights.keys() - alone.gradients.keys() and names
    layout = layout_of(frozenset(row.split()))
    for found in world.run(_measured, layout.world, row, str(layout)):
        assert compare(alone, found).accepted("fp64")


def test_a_plan_counts_no_state_and_no_gradient_of_what_is_frozen() -> None:
    """AdamW in fp32: two moments of four bytes for each trained element, four bytes of gradient, and a count for each tensor."""
    layout = Layout.parse("dp2")
    blueprint = Blueprint.of(DECODER.build)
    # The first of two ranks has the larger half of the rows.
    sizes = {name: p.numel() // len(p) * ((len(p) + 1) // 2) for name, p in blueprint.module.named_parameters()}
    found = []
    for patterns in ((), FIRST):
        settings = settings_of(blueprint, [Group(match=pattern, frozen=True) for pattern in patterns])
        optimizer = partial(optimizers.build_optimizer, AdamWConfig(), settings=settings)
        workload = Workload(DECODER.build, cross_entropy, optimizer, 2, 16, settings=settings)
        trained = {name: size for name, size in sizes.items() if name not in settings.frozen}
        estimate = dry_run(workload, Plan.of([FullyShard()], layout))
        assert estimate.elements == sum(sizes.values())
        assert estimate.gradients == 4 * sum(trained.values())
        assert estimate.optimizer == 8 * sum(trained.values()) + 4 * len(trained)
        found.append(estimate.optimizer)
    assert found[1] < found[0]


class Foreign(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)


def _foreign(layout: str) -> dict[str, torch.Tensor]:
    model = parallelize(Foreign, layout, state="fp64", compute="fp64")
    groups = [Group(match="blocks.1.*", lr=0.5), Group(match="*.bias", weight_decay=0.3)]
    optimizer = optimizers.build_optimizer(
        ScheduleFreeAdamWConfig(), model, grouped(groups, list(model.shapes), model.specs.ties)
    )
    assert all("embed.weight" not in tensors for tensors in optimizer.state().values())
    rows = torch.arange(4 * 5).view(4, 5) % VOCAB
    mine = rows.chunk(model.data_ranks)[model.data_rank]
    for _ in range(3):
        model.module(mine).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with model.averaged():
        return model.state_dict(whole=True)


def test_foreign_modules_have_groups_and_freeze_what_they_froze_themselves(world: World) -> None:
    torch.manual_seed(0)
    alone = _foreign("1")
    for found in world.run(_foreign, 2, "dp2"):
        for name, tensor in alone.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)
