"""Every fusion in the layouts that it is offered with, against one process; ranks have other numbers of images, some none."""

import pytest
import torch

from forge_core.errors import ConfigError
from forge_core.registry import Registry
from forge_parallel.verify import proofs
from forge_parallel.verify.parity import share, synthetic
from forge_train.recipe.load import load_recipe
from harness.pool import World
from parallel.compositions import generate
from parallel.compositions.rows import FUSIONS, case_of
from parallel.compositions.test_compositions import equals_one_process
from vlm import layouts


def _name(row: frozenset[str]) -> str:
    return "+".join(sorted(row & FUSIONS.keys()) + sorted(row - FUSIONS.keys()))


@pytest.mark.parametrize("row", proofs.proven_rows()["fusions"], ids=_name)
def test_a_fusion_equals_one_process(world: World, row: frozenset[str]) -> None:
    equals_one_process(world, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", proofs.proven_rows()["fusions_slow"], ids=_name)
def test_the_remaining_fusions_equal_one_process(world: World, row: frozenset[str]) -> None:
    equals_one_process(world, row)


def test_rows_are_those_that_are_offered() -> None:
    made = layouts.rows()
    for kind in ("fusions", "fusions_slow"):
        assert set(proofs.proven_rows()[kind]) == set(made[kind])
        assert all(generate.legal(row) for row in made[kind])
    every = {row for rows in made.values() for row in rows}
    for feature in FUSIONS:
        mine = [row for row in every if feature in row]
        for strategy in ("dp_shard", "accumulate", "recompute", "muon", "bf16"):
            assert any(strategy in row for row in mine), (feature, strategy)


def test_rows_of_one_case_have_none_one_and_two_images() -> None:
    """What the comparison rests on: else an exchange that depends on images would not be seen."""
    case = case_of(frozenset({"fusion_joint", "accumulate", "dp_shard"}))
    model = case.build()
    counts = []
    for step in range(3):
        for batch in share(synthetic(case, step), 0, 1, 1):
            made = model.with_extras(batch)
            if not made.extras:  # as a loader gives text: the encoder of such a rank has nothing to do, and must not be missed
                counts.append(0)
                assert not (made.tokens == model.context.image_token).any()
                continue
            rows, images = made.extras["image_rows"], made.extras["images"]
            counts.append(int((rows >= 0).sum()))
            assert len(images) == counts[-1] > 0
            assert int((made.tokens == model.context.image_token).sum()) == counts[-1] * model.context.per_image
            here = made.tokens == model.context.image_token
            assert (made.labels[here] == -100).all()
            before = torch.zeros_like(here)
            before[:, :-1] = here[:, 1:]
            assert (made.labels[before] == -100).all()
    assert {0, 1, 2} == set(counts)


@pytest.mark.parametrize("preset", ["debug-joint", "debug-cross", "debug-mot"])
def test_trials_h_what_check_says_of_a_fusion_under_tp_works(preset: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_recipe(preset, ["--parallel.tp=2"], 2, Registry())
    (fault,) = [fault for fault in refusal.value.faults if fault.key == "model.fusion"]
    assert "remove it" not in str(fault) and "transforms.tensor.sequence_parallel = false" in str(fault)
    assert load_recipe(preset, ["--parallel.tp=2", "--transforms.tensor.sequence_parallel=false"], 2, Registry()).layout
