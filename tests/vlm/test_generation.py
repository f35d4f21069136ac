"""T10: generation with a cache, rows of unequal length and number of images, against the whole row at every step."""

from typing import Any

import pytest
import torch

from forge_models.generation import GenerationError, generate
from vlm.tiny import IMAGE, MODELS, batch, build, row


def greedy(model: Any, sample: Any, count: int) -> list[int]:
    """Token after token, each from a forward over the whole row."""
    ids, images = sample
    ids = [*ids]
    new: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            inputs = batch((ids, images))
            prefix = torch.zeros(1, len(ids), dtype=torch.bool)
            prefix[:, : len(sample[0])] = True
            logits = model(**inputs, prefix=prefix)[0, -1]
        logits[IMAGE] = -torch.inf
        new.append(int(logits.argmax()))
        ids.append(new[-1])
    return new


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_changes_no_token(name: str) -> None:
    component = MODELS[name]
    model = build(component)
    samples = [row(component, 3, "1", 4, 5), row(component, 6, 7), row(component, "2", 8, "3", 9, 10, 11, 12)]
    wanted = [greedy(model, sample, 8) for sample in samples]
    width = max(len(ids) for ids, _ in samples)
    inputs = batch(*(([*ids, *[0] * (width - len(ids))], images) for ids, images in samples))
    prefix = torch.arange(width) < torch.tensor([[len(ids)] for ids, _ in samples])
    extras = {"images": inputs["images"], "image_rows": inputs["image_rows"], "prefix": prefix}
    prompts = [ids for ids, _ in samples]
    assert generate(model, prompts, max_tokens=8, inputs=extras) == wanted
    text = [ids for ids, images in samples if not images]
    assert generate(model, text, max_tokens=8, inputs={"prefix": prefix[1:2, : len(text[0])]}) == [wanted[1]]
    with pytest.raises(GenerationError, match="cannot be split"):
        generate(model, prompts, max_tokens=8, inputs=extras, prefill=4)


def test_a_placeholder_is_never_written() -> None:
    model = build(MODELS["joint"])
    later = model(torch.tensor([[3, 4]]), cache=model.new_cache(1, 8))
    assert later[0, 0, IMAGE] == -torch.inf
    assert torch.isfinite(later[0, 0, :IMAGE]).all()


def test_images_come_with_the_first_tokens() -> None:
    component = MODELS["joint"]
    model = build(component)
    inputs = batch(row(component, 3, "1", 4))
    cache = model.new_cache(1, 32)
    model(torch.tensor([[3, 4]]), cache=cache)
    with pytest.raises(ValueError, match="first tokens of a cache"):
        model(**inputs, cache=cache)
