"""Inner values of models with images: what only they have, and all of it on ranks."""

from typing import Any

import pytest
import torch

from forge_core.batch import Batch
from forge_core.layout import Layout
from forge_interp.captures import capture
from forge_interp.commands.look import look
from forge_interp.commands.ranks import capture_sharded, edit_sharded
from forge_interp.edits import add, edit, zero
from forge_interp.tap_names import WITH_IMAGES, InterpError, taps
from forge_models.objectives import CrossEntropy
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel
from harness.pool import World
from harness.siblings import fast
from parallel.pipelines import piped
from vlm.tiny import IMAGE, MODELS, batch, build, row

GATES = ("blocks.1.cross.attention.gate", "blocks.1.cross.mlp.gate")


def rows_of(name: str) -> dict[str, Any]:
    """Two rows with text before and behind an image."""
    component = MODELS[name]
    first, second = row(component, 3, 5, "1", 7, 9), row(component, 4, "2", 8, 2, 6)
    return batch(first, second)


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        return MODELS[name].build()


@pytest.mark.parametrize("name", ["joint", "cross", "mot"])
def test_the_modality_of_each_token_is_read_with_the_values_of_the_same_tokens(name: str) -> None:
    model, given = build(MODELS[name]), rows_of(name)
    with torch.no_grad(), capture(model, ["modality", "norm"]) as seen:
        model(**given)
    assert torch.equal(seen["modality"][..., 0], (given["x"] == IMAGE).long())
    assert seen["norm"].shape[:2] == given["x"].shape
    with pytest.raises(InterpError, match="modality can be captured, not edited"), edit(model, "modality", zero()):
        pass


def test_gates_are_those_of_the_parameters_and_without_them_no_image_is_seen() -> None:
    model, given = build(MODELS["cross"]), rows_of("cross")
    blocks: Any = model.blocks
    with torch.no_grad(), capture(model, [*GATES, "blocks.1.cross.attention.q", "norm"]) as seen:
        logits = model(**given)
    for name, parameter in zip(GATES, ("attention_gate", "mlp_gate"), strict=True):
        gate = getattr(blocks["1"].cross, parameter).tanh()
        assert torch.equal(seen[name], gate.expand(*given["x"].shape, 1))
    assert seen["blocks.1.cross.attention.q"].shape == (*given["x"].shape, 4, 4)
    with torch.no_grad(), edit(model, GATES, zero()):
        blind = model(**given)
    images = {**given, "images": given["images"] * 0 + 7}
    with torch.no_grad(), edit(model, GATES, zero()):
        torch.testing.assert_close(model(**images), blind, rtol=0, atol=0)
    assert not torch.allclose(blind, logits)
    with torch.no_grad(), edit(model, GATES, zero(), positions=[given["x"].shape[1] - 1]):
        some = model(**given)  # only the last token is blind
    assert torch.equal(some[:, :-1], logits[:, :-1])
    assert not torch.allclose(some[:, -1], logits[:, -1])


def test_nothing_is_computed_otherwise_while_gates_are_heard() -> None:
    model, given = build(MODELS["cross"]), rows_of("cross")
    with torch.no_grad():
        plain = model(**given)
        with capture(model, [*GATES, "modality"]):
            assert torch.equal(model(**given), plain)


def test_values_that_not_every_token_has_are_refused_by_name() -> None:
    cross, mot = taps(on_meta("cross")), taps(on_meta("mot-experts"))
    listed = {*cross, *mot}
    assert {name for name in WITH_IMAGES if not any(path.endswith(name) for path in listed)} == set()
    for name, word, why in (
        ("cross", "blocks.1.cross.attention.k", "is of images, not of tokens"),
        ("mot-experts", "blocks.1.image.router.logits", "has the tokens of one modality"),
    ):
        model = build(MODELS[name])
        with pytest.raises(InterpError, match=f"{word} cannot be selected: it {why}"), capture(model, word):
            pass
        with torch.no_grad(), capture(model, "blocks.*") as seen:
            model(**rows_of(name))
        assert word not in list(seen)
        assert len(seen["blocks.1.residual"]) == 2
    assert mot["blocks.1.image.router.logits"].shape == (4,)


def laid_out(name: str, layout: str) -> tuple[ParallelModel, Batch]:
    """A model on ranks, and this rank's share of four rows with images."""
    at = Layout.parse(layout)
    transforms: list[Any] = [FullyShard(), TensorParallel(sequence_parallel=False), ExpertParallel()]
    plan = Plan.of(transforms, at, piped("1f1b")) if at.pp > 1 else Plan.of(transforms, at)
    model = realize(Blueprint.of(MODELS[name].build), plan, Topology.of(at, torch.device("cpu")), 3, "fp64", "fp64")
    tokens, labels = (torch.randint(1, IMAGE, (4, 16), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    size = 4 // model.topology.data_size
    mine = slice(model.topology.data_rank * size, (model.topology.data_rank + 1) * size)
    share = Batch(tokens[mine], labels[mine], samples=tuple(range(mine.start, mine.stop)))
    return model, on_meta(name).with_extras(share)


def gathered(name: str, layout: str, names: list[str], edited: bool) -> tuple[dict[str, torch.Tensor], float]:
    model, mine = laid_out(name, layout)
    whole, step = on_meta(name), Step(model, CrossEntropy().build())
    with edit_sharded(model, whole, names[0], add(torch.tensor(30.0 if edited else 0.0))):
        with capture_sharded(model, whole, [*names, "modality"], samples=[mine.samples]) as seen:
            loss = step.evaluate([mine]).loss
        return {name: seen[name] for name in seen}, loss


NAMES = {
    "joint": ["blocks.1.residual", "blocks.0.attention.heads"],
    "cross": [*GATES, "blocks.1.cross.attention.q", "blocks.1.cross.mlp.hidden"],
    "mot": ["blocks.1.residual_mid", "blocks.2.attention.q"],
    "mot-experts": ["blocks.1.mlp.added"],
}
CASES = [
    *((name, layout) for name in ("joint", "cross", "mot") for layout in ("dp2", "tp2")),
    *((name, "pp2") for name in ("joint", "mot")),
    ("cross", "dp2tp2"),
    ("mot-experts", "dp2ep2"),
]


@pytest.mark.parametrize(("name", "layout"), fast(("cross", "tp2"), of=CASES))
def test_ranks_hear_and_edit_what_one_process_does(world: World, name: str, layout: str) -> None:
    losses = []
    for edited in (False, True):
        values, loss = gathered(name, "1", NAMES[name], edited)
        losses.append(loss)
        for found, their_loss in world.run(gathered, Layout.parse(layout).world, name, layout, NAMES[name], edited):
            assert their_loss == pytest.approx(loss, rel=1e-12)
            assert found.keys() == values.keys()
            for path, value in values.items():
                torch.testing.assert_close(found[path], value, rtol=1e-10, atol=1e-12)
        assert values["modality"].unique().tolist() == [0, 1]
    assert abs(losses[0] - losses[1]) > 1e-6


def test_a_look_of_the_hook_inside_leaves_out_what_not_every_token_has() -> None:
    model, mine = laid_out("mot-experts", "1")
    step = Step(model, CrossEntropy().build())
    found = look(model, on_meta("mot-experts"), step, mine, ("cka", "routing"), [3, 7])
    assert found.streams.keys() == {"blocks.0", "blocks.1", "blocks.2"}
    assert found.experts == {}
