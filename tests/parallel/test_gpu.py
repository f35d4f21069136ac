"""What only a CUDA device can show. Runs with `pytest -m gpu`."""

import pytest
import torch

from forge_core.layout import Layout
from forge_core.specs import Init, TensorSpec
from forge_parallel.boxes import Box
from forge_parallel.clipping import clip
from forge_parallel.components.optimizers import AdamW
from forge_parallel.init import fill
from forge_parallel.parity import Case, compare, measure, share, synthetic
from forge_parallel.plan import Plan
from forge_parallel.realization import Blueprint, realize
from forge_parallel.step import Step
from forge_parallel.topology import Topology
from parallel.tiny import VOCAB, Tiny, cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CASE = Case(Tiny, cross_entropy, AdamW(lr=1e-2).build, VOCAB)


def test_initial_weights_of_a_box_are_those_of_the_whole() -> None:
    spec = TensorSpec((None, None), Init("normal", 0.02), "matrix")
    whole, part = torch.empty(300, 700, device="cuda"), torch.empty(100, 50, device="cuda")
    fill(Box((300, 700), (0, 0), whole), spec, "w", 0)
    fill(Box((300, 700), (150, 600), part), spec, "w", 0)
    assert torch.equal(part, whole[150:250, 600:650])
    assert abs(whole.std() / 0.02 - 1) < 0.02


def test_no_host_synchronisation_in_a_step() -> None:
    layout = Layout()
    model = realize(Blueprint.of(Tiny), Plan.of([], layout), Topology(layout, torch.device("cuda", 0)), 0, "bf16")
    step, optimizer = Step(model, cross_entropy), AdamW().build(model)
    batches = [batch.to("cuda") for batch in share(synthetic(CASE, 0), 0, 1, 4)]
    step(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = step(batches)
        clip(model, result.norm, 1.0)
        optimizer.step(result.skip)
        optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.numbers()["skipped"] == 0


def test_micro_batches_leave_the_numbers_alone() -> None:
    device = torch.device("cuda", 0)
    whole, cut = (measure(Case(**{**vars(CASE), "micro_batch": size}), Layout(), [], device) for size in (8, 1))
    assert compare(whole, cut).accepted("fp64")
