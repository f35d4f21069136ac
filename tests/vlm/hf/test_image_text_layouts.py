"""An image-text class of transformers in the layouts that it is offered with; ranks have other numbers of images, some none."""

from dataclasses import replace

import pytest

from forge_parallel.verify import proofs
from forge_parallel.verify.parity import Measurement, compare, share, synthetic
from harness.pool import World
from models.hf.test_causal_lm_layouts import LIMITS
from parallel.compositions import generate
from parallel.compositions.rows import LOW, case_of, layout_of, measured
from parallel.compositions.test_compositions import equals_one_process
from parallel.one_process import alone
from vlm.hf import image_text_rows


def is_near_one_process(world: World, row: frozenset[str], steps: int) -> None:
    if row & LOW:
        equals_one_process(world, row, steps=steps)
        return
    case, layout = replace(case_of(row), steps=steps), layout_of(row)
    exact = _without_key_biases(alone(measured, case, "1", frozenset()))
    for found in world.run(measured, layout.world, case, str(layout), row, timeout=400):
        difference = compare(exact, _without_key_biases(found))
        assert difference.initial
        assert all(getattr(difference, name) <= limit for name, limit in LIMITS.items()), difference


def _without_key_biases(found: Measurement) -> Measurement:
    """Leaves out weights whose gradient is rounding alone, which an optimizer that divides by gradients enlarges: the bias of
    all keys of a row changes no weight of its attention."""
    return replace(found, weights={name: value for name, value in found.weights.items() if not name.endswith("k_proj.bias")})


def _name(row: frozenset[str]) -> str:
    return "+".join(sorted(row - {image_text_rows.FEATURE}))


@pytest.mark.parametrize("row", proofs.proven_rows()["image_text"], ids=_name)
def test_an_image_text_class_equals_one_process(world: World, row: frozenset[str]) -> None:
    is_near_one_process(world, row, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("row", proofs.proven_rows()["image_text_slow"], ids=_name)
def test_the_remaining_layouts_equal_one_process(world: World, row: frozenset[str]) -> None:
    is_near_one_process(world, row, steps=3)


def test_rows_are_those_that_are_offered() -> None:
    made = image_text_rows.rows()
    for kind, rows in made.items():
        assert set(proofs.proven_rows()[kind]) == set(rows)
        assert all(generate.legal(row) for row in rows)


def test_rows_of_one_case_have_none_one_and_two_images() -> None:
    """What the comparison rests on: else ranks that make other exchanges would not be seen."""
    case = case_of(frozenset({image_text_rows.FEATURE, "accumulate", "dp_shard"}))
    model = case.build()
    counts = []
    for step in range(3):
        for batch in share(synthetic(case, step), 0, 1, 1):
            made = model.with_extras(batch)
            counts.append(len(made.extras["images"]) if made.extras else 0)
            assert int((made.tokens == model.images.token).sum()) == counts[-1] * model.images.per_tile
    assert {*counts} == {0, 1, 2}
