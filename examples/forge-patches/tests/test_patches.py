"""Patches against plain slicing, the mask of images, and a run of a model of all three parts."""

import subprocess
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from forge_patches.component import RawPatches
from forge_patches.sharpness import SharpnessScorer
from PIL import Image

from forge_testing import conforms
from forge_train import JobRanks, Run, load_recipe, read_metrics, train

RECIPE = """
base = "debug-joint"

[model]
encoder = { name = "raw_patches", size = 8, patch = 4 }
adapter = { name = "gated", hidden = 24 }
fusion = { name = "apart" }

[parallel]
proofs = ["receipts"]

[train]
max_steps = 4

[[hooks]]
name = "log"
every = 1
"""


def trained(folder: Path, *overrides: str) -> Run:
    """Trains the recipe in a folder, from where it stands."""
    (folder / "recipe.toml").write_text(RECIPE)
    recipe = load_recipe(str(folder / "recipe.toml"), [f"--job.dir={folder / 'run'}", *overrides], world=1)
    run, _ = train(recipe, JobRanks())
    run.saves.close()
    return run


def record_receipt(folder: Path) -> None:
    """Compares the recipe with itself, as `check` asks for, before a run may use a part that no receipt of Forge knows."""
    (folder / "recipe.toml").write_text(RECIPE)
    record = ("parity", "recipe.toml", "--layouts", "1", "--record", "receipts")
    command = [sys.executable, "-m", "forge_train", *record]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_they_conform() -> None:
    conforms("forge-patches")


def test_patches_are_slices_of_the_image() -> None:
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4))
    features = RawPatches(size=8, patch=4).build()(images)
    for row in range(2):
        for column in range(2):
            piece = images[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            assert torch.equal(features[:, 2 * row + column], piece.flatten(1))
    with pytest.raises(ValueError, match="multiple of patch"):
        RawPatches(size=10, patch=4)


def test_a_checkerboard_is_sharper_than_its_blur() -> None:
    board = (np.indices((16, 16)).sum(0) % 2 * 255).astype(np.uint8)
    files = [BytesIO() for _ in range(2)]
    Image.fromarray(board).save(files[0], "PNG")
    Image.fromarray(np.full_like(board, 127)).save(files[1], "PNG")
    scores = SharpnessScorer()([file.getvalue() for file in files], "what is this?")
    differences = np.array([255.0, -255.0] * 7 + [255.0])  # of the first row; those of the second have the other sign
    assert scores.scores.tolist() == pytest.approx([np.concatenate([differences, -differences]).var(), 0.0])
    assert scores.features.shape == (2, 64)


@pytest.mark.slow
def test_a_model_of_all_three_trains_and_an_image_does_not_see_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the recipe looks for its receipts
    record_receipt(tmp_path)
    run = trained(tmp_path)
    losses = [row["loss"] for row in read_metrics(run.directory / "metrics.jsonl") if "loss" in row]
    assert len(losses) == 4 and min(losses[1:]) < losses[0]  # four steps with batches of their own
    (model,) = run.model.parts
    component = run.job.model
    count, image = component.per_image, torch.randn(1, *model.image_shape, generator=torch.Generator().manual_seed(5))
    states: list[torch.Tensor] = []
    model.blocks[str(len(model.blocks) - 1)].register_forward_hook(lambda *given: states.append(given[2]))
    for word in (7, 8):  # another text before the same image
        row = torch.tensor([[word, *[component.placeholder] * count, 9]])
        with torch.no_grad():
            model.eval()(row, positions=torch.arange(count + 2)[None], images=image, image_rows=torch.tensor([[0]]))
    torch.testing.assert_close(states[0][:, 1 : count + 1], states[1][:, 1 : count + 1])
    assert not torch.allclose(states[0][:, -1], states[1][:, -1]), "text sees the text before the image"
