"""Random text cannot be predicted: a loss below the logarithm of its vocabulary is a label that a model has seen."""

from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch

from forge_core.batch import IGNORE, Batch
from forge_core.layout import Layout
from forge_models.objectives import CrossEntropy
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_vlm.fusion.fusion import Misplaced
from vlm.tiny import IMAGE, MODELS

ROWS, LENGTH, STEPS = 16, 32, 200
FLOOR = log(IMAGE)
"""Of ids that are even over all but the placeholder."""


def drawn(model: Any, generator: torch.Generator) -> Batch:
    """Rows of random ids with one random image each at a random place; the label of a place is the next id, if it is text that
    the place may not see by the model's mask."""
    count = model.context.per_image
    ids = torch.randint(IMAGE, (ROWS, LENGTH + 1), generator=generator)
    for row, place in enumerate(torch.randint(LENGTH - count, (ROWS,), generator=generator).tolist()):
        ids[row, place : place + count] = IMAGE
    labels = ids[:, 1:].masked_fill(ids[:, 1:] == IMAGE, IGNORE).masked_fill(ids[:, :-1] == IMAGE, IGNORE)
    if getattr(model.fusion, "image_attention", "") == "prefix":
        behind = (ids[:, :-1] == IMAGE).flip(1).cumsum(1).flip(1) == 0
        labels = labels.masked_fill(~behind, IGNORE)
    images = torch.randn(ROWS, 1, 8, 8, generator=generator)
    extras = {"images": images, "image_rows": torch.arange(ROWS).unsqueeze(1)}
    return Batch(ids[:, :-1].clone(), labels, extras=extras)


def lowest(name: str, leak: bool = False) -> float:
    """The mean loss of the last twenty steps, each on fresh rows. With `leak` the mask of the model is open: a place sees the
    token that it is to predict."""
    component, topology = MODELS[name], Topology.of(Layout.parse("1"), torch.device("cpu"))
    model = realize(Blueprint.of(component.build), Plan.of([], topology.layout), topology, 1, "fp32", "fp32")
    step, optimizer = Step(model, CrossEntropy()), AdamWConfig(lr=1e-2).build(model)
    part: Any = model.part
    if leak:
        part.fusion.seen = lambda mask, told, *_: torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    generator, losses = torch.Generator().manual_seed(7), []
    for _ in range(STEPS):
        result = step([drawn(part, generator)])
        optimizer.step(result.skip)
        optimizer.zero_grad()
        losses.append(float(result.loss))
    return sum(losses[-20:]) / 20


FAST = ("joint-prefix",)


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def test_no_fusion_predicts_random_text(name: str) -> None:
    """With images that are random too, wherever they stand: neither masks nor choices of experts look ahead in training."""
    assert lowest(name) >= FLOOR - 0.05


def test_a_token_that_is_seen_is_found() -> None:
    """What the test above rests on: in so many steps a model learns to read what its mask should hide."""
    assert lowest("joint", leak=True) < FLOOR - 1


def _called(labels: list[int], prefix: list[int] | None = None, documents: list[int] | None = None) -> None:
    """A row of two tokens, an image of four and two tokens, with a label at each place that `labels` names."""
    model = MODELS["joint-prefix"].build().to_empty(device="cpu")
    tokens = torch.tensor([[1, 2, *[IMAGE] * 4, 3, 4]])
    given: dict[str, Any] = {"images": torch.zeros(1, 1, 8, 8), "image_rows": torch.tensor([[0]])}
    if prefix is not None:
        given["prefix"] = torch.tensor([prefix]).bool()
    if documents is not None:
        given["documents"] = torch.tensor([documents])
    placed = torch.full((1, 8), IGNORE)
    placed[0, labels] = 3
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        model(tokens, labels=placed, objective=CrossEntropy(), **given)


def test_labels_of_what_a_prefix_shows_are_refused() -> None:
    """The prefix ends with the image at place 5: that place predicts the first token behind it."""
    _called([5, 6, 7])
    for place in (0, 1, 4):
        with pytest.raises(Misplaced, match=f"row 0 has a label at place {place}, inside of its prefix"):
            _called([place, 6])
    _called([1, 2, 6], prefix=[1, 1, 0, 0, 0, 0, 0, 0])
    with pytest.raises(Misplaced, match="place 0, inside of its prefix"):
        _called([0], prefix=[1, 1, 0, 0, 0, 0, 0, 0])
    _called([0, 1], documents=[0, 0, 1, 1, 1, 1, 1, 1])  # a document before the image's has no prefix
    with pytest.raises(Misplaced, match="place 0"):
        _called([0], documents=[0, 0, 0, 0, 0, 0, 0, 0])
    _called([1], prefix=[1, 1, 1, 1, 1, 1, 0, 0], documents=[0, 0, 1, 1, 1, 1, 1, 1])  # prefixes of two documents


def test_batches_for_checks_have_no_label_that_a_prefix_shows() -> None:
    """Those of another mask have some, in the same places."""
    tokens = torch.randint(1, IMAGE, (6, 24), generator=torch.Generator().manual_seed(2))
    plain = Batch(tokens, tokens.clone())
    model, other = MODELS["joint-prefix"].build(), MODELS["joint"].build()
    made, wide = model.with_extras(plain), other.with_extras(plain)
    assert torch.equal(made.tokens, wide.tokens)
    assert not model._seen_labels(made.labels, made.tokens, {}).any()  # type: ignore[union-attr]
    seen = model._seen_labels(wide.labels, wide.tokens, {})
    assert seen is not None and seen.any() and torch.equal(made.labels, wide.labels.masked_fill(seen, IGNORE))


def test_a_mask_of_images_hides_all_text() -> None:
    model = replace(MODELS["joint-bidirectional"]).build()
    assert model._seen_labels(torch.ones(1, 2), torch.ones(1, 2), {}) is None
