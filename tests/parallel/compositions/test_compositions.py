"""The rows of `forge_parallel.verify.proofs`: every strategy, in any composition that is offered, against one process.

A tiny decoder with grouped-query attention, packed documents, rows with very different numbers of labels, and one micro-batch
without any. In fp64 a layout has to give one process's loss, norm, gradients and weights to 1e-10; in float8 with fp32 sums those
of one process in float8 to 2e-6. In bf16 sums are rounded at other places, in fp32 by some strategies, after which a number may
become the neighboring float8: there a layout may be twice as far from the exact numbers as one process in that precision is, and
no farther. A sum that is missing, or made twice, is ten to a hundred times farther.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

from forge_core.features import interact
from forge_core.registry import Registry
from forge_parallel.verify import proofs
from forge_parallel.verify.parity import Measurement, compare
from forge_parallel.verify.proofs import features
from forge_train.recipe.load import load_recipe
from harness.closeness import below
from harness.pool import World
from parallel.compositions import generate
from parallel.compositions.rows import LOW, case_of, job_of, layout_of, measured
from parallel.one_process import alone as once

ROWS = proofs.proven_rows()


def equals_one_process(
    world: World, row: frozenset[str], measured: Callable[..., Measurement] = measured, group: bool = True, steps: int = 3
) -> None:
    case, layout = replace(case_of(row), steps=steps), layout_of(row)
    exact = once(measured, case, "1", frozenset())
    if row.isdisjoint(LOW):
        for found in world.run(measured, layout.world, case, str(layout), row, timeout=400, group=group):
            difference = compare(exact, found)
            assert difference.accepted("fp64"), difference
        return
    compute = "bf16" if "bf16" in row else "fp32"
    case = replace(case, compute=compute, state="bf16" if "bf16_state" in row else "fp32", steps=1)
    alone = once(measured, case, "1", row & {"float8", "float8_rowwise", "float8_experts"})
    for found in world.run(measured, layout.world, case, str(layout), row, timeout=400, group=group):
        difference = compare(alone, found)
        # Whether the same numbers are rounded to float8: experts on several ranks add theirs in another order.
        if compute == "fp32" and row.isdisjoint({"compile", "tp_whole", "float8_rowwise", "experts"}):
            assert difference.accepted("fp32"), difference
        else:
            assert difference.initial
            _is_as_near_as(exact, alone, found)


def _is_as_near_as(exact: Measurement, alone: Measurement, found: Measurement) -> None:
    assert found.tokens == alone.tokens
    for name, gradient in exact.gradients.items():
        allowed = 2 * _distance(gradient, alone.gradients[name])
        least = 1e-3 if gradient.numel() > 1 else 2e-2  # of one number, such as a gate, an error is not an average
        assert below(_distance(gradient, found.gradients[name]), max(allowed, least)), name
    assert found.loss == pytest.approx(alone.loss, rel=2e-3)
    assert found.norm == pytest.approx(alone.norm, rel=2e-2)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    whole = float(a.double().norm())
    difference = float((a.double() - b.double()).norm())
    return difference / whole if whole else difference  # closed gates let nothing through


def _name(row: frozenset[str]) -> str:
    return generate.text_of(row).replace(" ", "+")


@pytest.mark.parametrize("row", ROWS["fast"], ids=_name)
def test_a_run_equals_one_process(world: World, row: frozenset[str]) -> None:
    """The second step shows gradients that were not cleared, and the state of the optimizer."""
    equals_one_process(world, row, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS["slow"], ids=_name)
def test_the_remaining_pairs_equal_one_process(world: World, row: frozenset[str]) -> None:
    equals_one_process(world, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS["large"], ids=_name)
def test_three_axes_and_more_equal_one_process(world: World, row: frozenset[str]) -> None:
    equals_one_process(world, row)


def test_every_row_is_a_recipe_with_just_its_features() -> None:
    base = load_recipe("debug", ["--hooks=[]"], 1, Registry()).job
    for kind, rows in ROWS.items():
        for row in rows:
            assert {use.name for use in features(job_of(row, base), layout_of(row))} == row
            assert layout_of(row).world <= {"fast": 4, "large": 16}.get(kind, 8)
            assert kind == "gpu" or generate.legal(row), "a check refuses it"
    for test in proofs.TESTS.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[3] / file).read_text()


def test_every_pair_that_is_offered_is_proven() -> None:
    """What no row has is refused by a check, or named with its reason; what fp64 can show is shown in fp64."""
    base = load_recipe("debug", ["--hooks=[]"], 1, Registry()).job
    shown = {pair for kind in proofs.TESTS for row in ROWS[kind] for pair in generate.pairs_of(row)}
    names = generate.declared_features() - generate.ON_GPUS
    assert {frozenset([name]) for name in names} <= shown
    planes = {
        use.name: use.plane for rows in ROWS.values() for row in rows for use in features(job_of(row, base), layout_of(row))
    }
    missing = [
        frozenset(pair)
        for pair in combinations(sorted(names), 2)
        if interact(planes[pair[0]], planes[pair[1]]) and frozenset(pair) not in shown
    ]
    offered = generate.offered(missing)
    assert not offered, "run parallel.compositions.generate"
    assert not shown & generate.NOT_OFFERED.keys()


def test_features_that_no_row_proves_are_refused() -> None:
    never = {name for name in generate.declared_features() if not proofs.is_proven([name])}
    assert never == generate.ON_GPUS, "they need GPUs"


def test_all_axes_meet() -> None:
    """Each three of the axes on eight ranks, and all that a model can have at once on sixteen."""
    axes = ("dp_shard", "dp_replicate", "tp", "cp", "pp")
    met = [{axis for axis in axes if any(name == axis or name.startswith(f"{axis}_") for name in row)} for row in ROWS["large"]]
    assert all(any(set(three) <= found for found in met) for three in combinations(axes, 3))
    whole = [row for row in ROWS["large"] if layout_of(row).world == 16]
    assert any({"dp_shard", "tp"} < row and "experts" not in row and layout_of(row).size("cp") == 2 for row in whole)
    assert any({"experts", "dp_shard", "tp"} < row and layout_of(row).size("ep") > 1 and layout_of(row).pp == 2 for row in whole)
