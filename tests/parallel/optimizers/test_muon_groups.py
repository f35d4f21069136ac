"""Groups of parameters under Muon: a first step of half the rate is half as long, in one process and where ranks exchange."""

from dataclasses import replace

import pytest
import torch

from forge_parallel.optim.groups import ParameterGroup
from harness.pool import World
from parallel.compositions.rows import case_of, measured
from parallel.one_process import alone

HALVED = "blocks.*.attention.*"


@pytest.mark.parametrize(("layout", "ranks"), [("1", 1), ("dp2", 2)])
def test_half_the_rate_is_half_the_step(world: World, layout: str, ranks: int) -> None:
    row = frozenset({"muon", "accumulate"} | ({"dp_shard"} if ranks > 1 else set()))
    plain = replace(case_of(row), steps=1, rows=8, micro_batch=1)
    whole = alone(measured, plain, "1", row)
    groups = (ParameterGroup(match=HALVED, lr=0.5),)
    for found in world.run(measured, ranks, replace(plain, groups=groups), layout, row):
        halved = 0
        for name, before in whole.initial.items():
            factor = 0.5 if ".attention." in name else 1.0
            halved += factor != 1
            expected = before + factor * (whole.weights[name] - before)
            torch.testing.assert_close(found.weights[name], expected, rtol=1e-9, atol=1e-11, msg=lambda t, n=name: f"{n}: {t}")
        assert halved > 0
