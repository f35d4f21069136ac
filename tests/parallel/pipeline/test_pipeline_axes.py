"""Pipelines together with every other axis, against one process."""

from dataclasses import replace

import pytest

from forge_core.layout import Layout
from forge_parallel.step.step import Step
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_parallel.verify.parity import Case, compare, share, synthetic
from harness.pool import World
from parallel.pipelines import decoder_case, measured, realized


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "packed"), [("1f1b", True), ("zbv", True), ("1f1b", False)])
def test_hidden_states_that_are_cut_along_the_sequence_travel_as_they_are(world: World, schedule: str, packed: bool) -> None:
    """Tensor parallelism leaves each rank a part of the sequence; the rest of what stages read, and the ties, are whole."""
    case = decoder_case()
    reference = _stepped(case, "1", schedule, packed)
    for found in world.run(_stepped, 4, case, "pp2tp2", schedule, packed):
        assert found == pytest.approx(reference, rel=1e-10)


def _stepped(case: Case, layout: str, schedule: str, packed: bool) -> dict[str, float]:
    """Numbers of the second step, which depend on the update of the first."""
    model = realized(case, layout, schedule, TensorParallel())
    step, optimizer = Step(model, case.objective), case.optimizer(model)
    numbers: dict[str, float] = {}
    for number in range(2):
        batches = share(synthetic(case, number), model.topology.data_rank, model.topology.data_size, case.micro_batch)
        result = step(batches if packed else [replace(batch, positions=None, documents=None) for batch in batches])
        optimizer.step(result.skip)
        optimizer.zero_grad()
        numbers = result.numbers()
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("layout", ["pp2dp2tp2", "pp2hsdp2x2", "pp2dp2cp2", "pp2cp2tp2", "pp2tp4", "pp4dp2"])
def test_three_axes_equal_one_process(world: World, layout: str, schedule: str) -> None:
    """On eight processes; four ranks with two stages each need as many blocks."""
    case = decoder_case(rows=16, layers=8)
    reference = measured(case, "1")
    for found in world.run(
        measured, Layout.parse(layout).world, case, layout, schedule, features=frozenset({"cp_ring"}), timeout=300
    ):
        difference = compare(reference, found)
        assert difference.accepted("fp64"), difference
