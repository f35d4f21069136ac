"""The dry run on CUDA: every operator of a step meets tensors of one device, and the plan is that of a CPU where it has to be."""

from dataclasses import replace

import pytest
import torch

from forge_models.objectives import CrossEntropy
from forge_parallel.dryrun.estimate import Estimate, Workload, dry_run
from forge_parallel.model.plan import Plan
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.sections import PipelineConfig
from forge_parallel.verify.proofs import proven_rows
from harness.pool import World
from parallel.compositions.rows import decoder_of, layout_of, precision_of, schedule_of, transforms_of

pytestmark = pytest.mark.rehearsal


def _flexes(row: frozenset[str]) -> bool:
    """Attention of pieces of rows is flex attention but in fp64; only a compiler takes that apart into operators that count."""
    return "cp_ring" in row or {"cp_all_gather", "bf16"} <= row


PROVEN = [
    pytest.param(row, id="+".join(sorted(row)), marks=[pytest.mark.slow] if which != "fast" else [])
    for which in ("fast", "slow", "large")
    for row in proven_rows()[which]
    if not _flexes(row)
]
"""All rows of the table of proofs but those; `nox -s slow` runs what is not fast."""


def _workload(row: frozenset[str]) -> Workload:
    """Rows of 128 tokens: float8 takes tokens in sixteens on every rank."""
    precision, experts = precision_of(row), "experts" in row
    built = replace(decoder_of(row), max_length=128)
    objective = CrossEntropy(z_loss=1e-2).build()
    pieces = 8 if layout_of(row).pp > 1 or experts else 2
    return Workload(built.build, objective, AdamWConfig().build, 2, 128, pieces, precision.compute, precision.state)


def _estimated(row: frozenset[str], device: str) -> Estimate:
    layout = layout_of(row)
    if device == "cuda":
        torch.cuda.init()
    pipeline = PipelineConfig(schedule=schedule_of(row)).build() if layout.pp > 1 else None
    plan = Plan.of(transforms_of(row).values(), layout, pipeline)
    return dry_run(_workload(row), plan, device=torch.device(device))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", PROVEN)
def test_a_composition_is_planned_on_cuda(devices: World, row: frozenset[str]) -> None:
    """Weights, gradients, state and traffic are those of a CPU; a tensor of the host among those of a device is an error."""
    (found,) = devices.run(_estimated, 1, row, "cuda", group=False, timeout=400)
    (expected,) = devices.run(_estimated, 1, row, "cpu", group=False, timeout=400)
    for name in ("parameters", "gradients", "optimizer", "elements", "gathered", "reduced", "flows"):
        assert getattr(found, name) == getattr(expected, name), name
