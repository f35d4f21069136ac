"""A run of an image-text class of transformers: from a folder with a processor to a folder that transformers loads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from harness.pool import World
from models.hf.test_commands import run
from models.hf.test_from_hf import trained
from train.runs import prepared
from vlm.hf.image_text_folder import folder_of, processor_of, recipe_of, records_of


def made(tmp_path: Path, kind: str, more: str = "") -> tuple[Path, Path]:
    """Returns recipe and folder."""
    folder, records = folder_of(tmp_path / "source", kind), records_of(tmp_path / "data")
    return recipe_of(tmp_path / "recipe.toml", folder, records, more), folder


@pytest.mark.parametrize("kind", ["llava", "llava_next", "idefics3", "gemma3"])
def test_a_batch_has_the_tokens_and_pixels_of_the_processor(kind: str, tmp_path: Path) -> None:
    recipe, _ = made(tmp_path, kind)
    training, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.global_batch=12"])
    batches, _ = next(training.data.from_cursor(training.data.start()))
    processor = processor_of(kind)
    records = [json.loads(line) for line in (tmp_path / "data" / "records.jsonl").read_text().splitlines()]
    expected: dict[tuple[int, ...], tuple[Any, list[bool]]] = {}
    for record in records:
        images = [Image.open(tmp_path / "data" / name) for name in record["image"]]
        question = [*({"type": "image"} if not part else {"type": "text", "text": part} for part in _split(record))]
        turns = [{"role": "user", "content": question}, record["messages"][1]]
        text = processor.apply_chat_template(turns, tokenize=False)
        whole = processor(images=images or None, text=[text], add_special_tokens=False)
        prompt = processor.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
        asked = processor(images=images or None, text=[prompt], add_special_tokens=False)["input_ids"][0]
        pixels = np.asarray(whole["pixel_values"]).reshape(-1, 3, 8, 8) if images else None
        expected[tuple(whole["input_ids"][0])] = (pixels, len(asked))  # type: ignore[assignment]
    seen = 0
    for batch in batches:
        for row, ids in enumerate(batch.tokens.tolist()):
            found = next(key for key in expected if ids[: len(key)] == list(key))
            pixels, asked = expected[found]
            labels = batch.labels[row].tolist()
            assert all(label == -100 for label in labels[: asked - 1]), "a question or an image is learned"  # type: ignore[operator]
            said = list(found[asked:])  # type: ignore[misc]
            assert labels[asked - 1 : asked - 1 + len(said) - 1] == said[:-1]  # type: ignore[operator]
            if pixels is not None:
                numbers = [number for number in batch.extras["image_rows"][row].tolist() if number >= 0]
                assert np.allclose(batch.extras["images"][numbers, :, :8].numpy(), pixels, atol=1e-6)  # without sizes
            elif "image_rows" in batch.extras:
                assert (batch.extras["image_rows"][row] == -1).all()
            seen += 1
    assert seen == 12


def _split(record: dict[str, Any]) -> list[str]:
    """Returns texts, and "" in place of each image."""
    parts: list[str] = []
    for place, text in enumerate(record["messages"][0]["content"].split("<image>")):
        parts += ([""] if place else []) + ([text] if text else [])
    return parts


@pytest.mark.slow
def test_a_run_starts_resumes_bitwise_and_is_loaded_by_transformers(world: World, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    recipe, folder = made(tmp_path, "gemma3", '[[parameters.groups]]\nmatch = "model.vision_tower.*"\nfrozen = true')
    given = dict(AutoModelForImageTextToText.from_pretrained(folder).named_parameters())
    _, before, whole = trained(recipe, [f"--job.dir={tmp_path / 'whole'}", "--train.max_steps=4"])
    assert all(torch.equal(before[name], given[name]) for name in given)
    moved = {name for name in given if not torch.equal(whole[name], given[name])}
    assert moved == {name for name in given if not name.startswith("model.vision_tower.")}
    trained(recipe, [f"--job.dir={tmp_path / 'parts'}", "--train.max_steps=2"])
    step, _, parts = trained(recipe, [f"--job.dir={tmp_path / 'parts'}", "--train.max_steps=4"])
    assert step == 2
    assert all(torch.equal(parts[name], whole[name]) for name in whole)

    shared = ["--parallel.dp_shard=2", f"--job.dir={tmp_path / 'two'}", "--train.max_steps=4"]
    for _, start, two in world.run(trained, 2, recipe, shared):
        assert all(torch.equal(start[name], given[name]) for name in given)
        assert all(torch.allclose(two[name], whole[name], rtol=1e-3, atol=2e-4) for name in whole)

    assert run("convert", "--from", "forge", "--to", "hf", tmp_path / "parts", tmp_path / "out") == 0
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", local_files_only=True)
    assert all(torch.equal(parameter, parts[name]) for name, parameter in loaded.named_parameters())
    processor = AutoProcessor.from_pretrained(tmp_path / "out", local_files_only=True)
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    text = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    image = Image.new("RGB", (9, 9), (200, 10, 60))
    given_now = processor(images=[image], text=[text], return_tensors="pt")
    theirs = processor_of("gemma3")(images=[image], text=[text], return_tensors="pt")
    assert torch.equal(given_now["input_ids"], theirs["input_ids"])
    assert loaded.generate(**given_now, max_new_tokens=3, do_sample=False).shape[1] <= given_now["input_ids"].shape[1] + 3
