"""Classes of transformers in the layouts that they are offered with, against one process.

They compute norms and routers in fp32 in any dtype. So a last bit that differs in fp64, as sums in another order have it, may
become a last bit of fp32 here and there, and these runs are compared more coarsely than others. A sum that is missing, or made
twice, is a hundred times farther.
"""

from dataclasses import replace

import pytest

from forge_parallel.verify import proofs
from forge_parallel.verify.parity import compare
from harness.pool import World
from models.hf import causal_lm_rows
from parallel.compositions import generate
from parallel.compositions.rows import LOW, case_of, layout_of, measured
from parallel.compositions.test_compositions import equals_one_process
from parallel.one_process import alone

LIMITS = {"loss": 1e-5, "norm": 1e-4, "gradients": 1e-4, "weights": 1e-2}
"""Largest errors. An optimizer that divides by gradients enlarges those of weights."""


def is_near_one_process(world: World, row: frozenset[str], steps: int) -> None:
    if row & LOW:
        equals_one_process(world, row, steps=steps)
        return
    case, layout = replace(case_of(row), steps=steps), layout_of(row)
    exact = alone(measured, case, "1", frozenset())
    for found in world.run(measured, layout.world, case, str(layout), row, timeout=400):
        difference = compare(exact, found)
        assert difference.initial
        assert all(getattr(difference, name) <= limit for name, limit in LIMITS.items()), difference


def _name(row: frozenset[str]) -> str:
    return "+".join(sorted(row - {causal_lm_rows.FEATURE}))


@pytest.mark.parametrize("row", proofs.proven_rows()["transformers"], ids=_name)
def test_a_class_of_transformers_equals_one_process(world: World, row: frozenset[str]) -> None:
    is_near_one_process(world, row, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("row", proofs.proven_rows()["transformers_slow"], ids=_name)
def test_the_remaining_layouts_equal_one_process(world: World, row: frozenset[str]) -> None:
    is_near_one_process(world, row, steps=3)


def test_rows_are_those_that_are_offered() -> None:
    made = causal_lm_rows.rows()
    for kind, rows in made.items():
        assert set(proofs.proven_rows()[kind]) == set(rows)
        assert all(generate.legal(row) for row in rows)
