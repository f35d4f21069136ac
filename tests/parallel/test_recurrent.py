"""Recurrent layers beside attention in layouts: loss, norm, gradients and weights equal those of one process, for packed rows."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_models.components.attentions import MLA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.kimi_delta import KDA
from forge_models.components.recurrent import GDN, Hybrid
from forge_models.components.state_space import Mamba2
from forge_models.objectives import CrossEntropy
from forge_parallel.model.plan import Plan
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import OneForwardOneBackward
from forge_parallel.transforms.compile import Compile
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_parallel.verify.parity import Case, Measurement, compare, measure
from harness.pool import World
from parallel.one_process import alone

CPU = torch.device("cpu")
SHARED_KEYS = GDN(key_heads=4, value_heads=8, key_dim=6, value_dim=4, negative_eigenvalues=True)
MIXED = Hybrid(recurrent=SHARED_KEYS, kinds=("recurrent", "full", "recurrent", "recurrent"), recurrent_norm_placement="sandwich")


def decoder(**changes: Any) -> DecoderConfig:
    sizes: dict[str, Any] = {"dim": 16, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "max_length": 32}
    return DecoderConfig(**sizes | {"vocab_size": 61, "attention": MIXED} | changes)


STILL = MLA(kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, rotates=False)
STATES = Mamba2(heads=8, head_dim=4, groups=4, state_dim=6, step_min=0.01)
RECURRENT = {
    "gated_delta_net": MIXED,
    "kimi_delta": Hybrid(recurrent=KDA(heads=4, head_dim=6), kinds=("recurrent", "full", "recurrent", "recurrent")),
    "kimi_delta_and_mla": Hybrid(recurrent=KDA(heads=4, head_dim=6), full=STILL, full_every=2),
    "mamba2": Hybrid(recurrent=STATES, kinds=("recurrent", "full", "recurrent", "recurrent")),
}


def case(kind: str) -> Case:
    changes: dict[str, Any] = {"kv_heads": None} if RECURRENT[kind].full is STILL else {}
    build = decoder(attention=RECURRENT[kind], **changes).build
    return Case(build, CrossEntropy().build(), AdamWConfig(lr=1e-2).build, 61, rows=8, micro_batch=2, silent=2)


CASE = case("gated_delta_net")
LAYOUTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "dp": ("dp2", (FullyShard(),)),
    "tp": ("tp2", (TensorParallel(), FullyShard())),
    "tp_whole": ("tp2", (TensorParallel(sequence_parallel=False), FullyShard())),
    "tp4": ("tp4", (TensorParallel(), FullyShard())),
    "pp": ("pp2", (FullyShard(),)),
    "cp": ("cp2", (ContextParallel(), FullyShard())),
    "cp_ring": ("cp4", (ContextParallel(kind="ring"), FullyShard())),
    "cp_ulysses": ("cp2", (ContextParallel(kind="ulysses"), FullyShard())),
    "tp_cp": ("cp2tp2", (TensorParallel(), ContextParallel(), FullyShard())),
    "tp_cp_recompute": ("cp2tp2", (TensorParallel(), ContextParallel(kind="ulysses"), Recompute(policy="full"), FullyShard())),
    "recompute": ("1", (Recompute(),)),
    "recompute_full": ("1", (Recompute(policy="full"),)),
    "dp_recompute": ("dp2", (Recompute(), FullyShard())),
}
SLOW = ("tp4", "tp_whole", "cp_ring", "tp_cp_recompute", "dp_recompute", "cp_ulysses", "recompute_full")
FAST_OF_OTHERS = ("pp", "tp_cp")


def _measured(name: str, kind: str) -> Measurement:
    layout, transforms = LAYOUTS[name]
    at = Layout.parse(layout)
    pipeline = Pipeline(OneForwardOneBackward().build()) if at.pp > 1 else None
    return measure(case(kind), Plan.of(transforms, at, pipeline=pipeline), CPU)


def _runs() -> Iterator[Any]:
    for kind in RECURRENT:
        for name in LAYOUTS:
            slow = name in SLOW or (kind != "gated_delta_net" and name not in FAST_OF_OTHERS)
            # Two axes at once with one kind; the first kind runs on each axis by itself.
            slow = slow or (name, kind) in [("tp_cp", other) for other in RECURRENT if other != "mamba2"]
            yield pytest.param(name, kind, marks=pytest.mark.slow if slow else (), id=f"{kind}-{name}")


@pytest.mark.parametrize(("name", "kind"), list(_runs()))
def test_a_layout_equals_one_process(world: World, name: str, kind: str) -> None:
    whole = alone(measure, replace(case(kind), micro_batch=8), Plan.of([], Layout()), CPU)
    for found in world.run(_measured, Layout.parse(LAYOUTS[name][0]).world, name, kind):
        difference = compare(whole, found)
        assert difference.accepted("fp64"), difference


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECURRENT)
def test_compiled_blocks_equal_eager_ones(kind: str) -> None:
    whole = measure(case(kind), Plan.of([], Layout()), CPU)
    difference = compare(whole, measure(case(kind), Plan.of([Compile()], Layout()), CPU))
    assert difference.accepted("fp64"), difference


@pytest.mark.parametrize(
    ("layout", "transforms", "says"),
    [
        ("tp4", (TensorParallel(),), r"6 heads of recurrent layers cannot be divided among parallel\.tp = 4 ranks"),
        ("cp4", (ContextParallel(), FullyShard()), r"parallel\.cp = 4 does not divide their 6 heads"),
        ("cp2tp2", (TensorParallel(), ContextParallel(), FullyShard()), r"parallel\.cp = 2 \* parallel\.tp = 2 does not divide"),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused(world: World, layout: str, transforms: tuple[Any, ...], says: str) -> None:
    for found in world.run(_refused, 4, layout, transforms):
        import re

        assert re.search(says, found), found


def _refused(layout: str, transforms: tuple[Any, ...]) -> str:
    odd = decoder(attention=Hybrid(recurrent=GDN(key_heads=6, value_heads=6), full_every=2))
    try:
        measure(replace(CASE, build=odd.build), Plan.of(transforms, Layout.parse(layout)), CPU)
    except PlanError as error:
        return str(error)
    return "was not refused"
