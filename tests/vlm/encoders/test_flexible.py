"""SigLIP 2 NaFlex: images of any proportions, padded, against transformers' processor and model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional as F

from forge_models.hf.config import Unsupported
from forge_testing import modules
from forge_vlm.components.encoders import SigLIP2
from forge_vlm.encoders.vit import patch_mask, resize_positions
from forge_vlm.images.pixels import native_grid, native_patches

transformers = pytest.importorskip("transformers")

PATCH, MOST = 4, 20
SHAPES = [(40, 40), (61, 17), (13, 50), (16, 16), (90, 9), (14, 90)]


def photo(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


def stored(folder: Path) -> torch.nn.Module:
    """A small NaFlex tower and its processor, as transformers writes them."""
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}
    theirs = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**sizes, patch_size=PATCH, num_patches=16))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2 + (parameter.dim() < 2))
    theirs.eval().save_pretrained(folder)
    Siglip2ImageProcessorPil(patch_size=PATCH, max_num_patches=MOST).save_pretrained(folder)
    return theirs


def ours(component: SigLIP2) -> torch.nn.Module:
    module = modules.on_meta(component.build).to_empty(device="cpu").eval()
    module.load_state_dict(component.weights().read(list(component.weights().tensors)))
    return module


def test_features_of_images_of_any_proportions_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    theirs, processor = stored(tmp_path), Siglip2ImageProcessorPil.from_pretrained(tmp_path)
    images = [photo(*shape) for shape in SHAPES]
    inputs = processor(images=images, return_tensors="pt")
    component = SigLIP2(path=str(tmp_path), patches=MOST)
    cut = [native_patches(image, component.processing, PATCH, MOST) for image in images]
    pixels, grids = torch.from_numpy(np.stack([each for each, _ in cut])), torch.tensor([grid for _, grid in cut])
    assert torch.equal(grids, inputs["spatial_shapes"].to(grids.dtype))
    theirs_first = inputs["pixel_values"].view(len(images), MOST, PATCH, PATCH, 3).permute(0, 1, 4, 2, 3).flatten(2)
    torch.testing.assert_close(pixels, theirs_first, atol=1e-6, rtol=0)
    assert torch.equal(patch_mask(grids, MOST).int(), inputs["pixel_attention_mask"].int())
    with torch.no_grad():
        wanted = theirs(**inputs).last_hidden_state
        found = ours(component)(pixels, grids)
    for at, (rows, columns) in enumerate(grids.tolist()):
        torch.testing.assert_close(found[at, : rows * columns], wanted[at, : rows * columns], atol=1e-5, rtol=1e-5)
        assert not found[at, rows * columns :].any()
    assert (component.tokens, component.width, component.input_shape) == (MOST, 24, (MOST, PATCH * PATCH * 3))


@pytest.mark.parametrize("grid", [(5, 5), (3, 7), (1, 20), (10, 2), (2, 2)])
def test_positions_are_interpolated_as_torch_does(grid: tuple[int, int]) -> None:
    table = modules.drawn(25, 6)
    rows, columns = grid
    image = table.view(1, 5, 5, 6).permute(0, 3, 1, 2)
    wanted = F.interpolate(image, size=grid, mode="bilinear", align_corners=False, antialias=True)
    found = resize_positions(table, torch.tensor([grid]), rows * columns + 3)
    torch.testing.assert_close(found[0, : rows * columns], wanted[0].flatten(1).T, atol=1e-6, rtol=1e-6)
    assert bool(found.isfinite().all())


def test_positions_of_one_column_by_two_passes() -> None:
    """torch's antialiased interpolation of a contiguous image is wrong where the result is one column wide, so transformers'
    model is, too. One pass for each side, on images that are wider, shows what it should be."""
    table = modules.drawn(16, 3)
    options = {"mode": "bilinear", "align_corners": False, "antialias": True}
    image = table.view(1, 4, 4, 3).permute(0, 3, 1, 2).contiguous()
    across = (image * torch.tensor([0.625, 0.875, 0.875, 0.625]).double() / 3).sum(-1, keepdim=True)  # a triangle 8 wide
    wanted = F.interpolate(across.repeat(1, 1, 1, 2), size=(10, 2), **options)[0, ..., 0].T
    torch.testing.assert_close(resize_positions(table, torch.tensor([[10, 1]]), 10)[0], wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("side", [1, 7, 64, 500, 3000])
@pytest.mark.parametrize("other", [5, 100, 777])
def test_grids_are_those_of_the_processor(side: int, other: int) -> None:
    from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

    for width, height in ((side, other), (other, side)):
        high, wide = get_image_size_for_max_num_patches(height, width, 16, 256)
        assert native_grid(width, height, 16, 256) == (high // 16, wide // 16)


@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([9, 64, 1024]))
def test_an_image_has_at_most_as_many_patches(width: int, height: int, most: int) -> None:
    rows, columns = native_grid(width, height, 14, most)
    assert 1 <= rows * columns <= most


def test_padding_is_not_seen(tmp_path: Path) -> None:
    stored(tmp_path)
    module = ours(SigLIP2(path=str(tmp_path), patches=MOST))
    grids, x = torch.tensor([[3, 4], [0, 0]]), modules.drawn(2, MOST, PATCH * PATCH * 3).float()
    other = x.clone()
    other[0, 12:] = 7.0
    assert torch.equal(module(x, grids)[0], module(other, grids)[0])
    assert patch_mask(grids, MOST).sum(1).tolist() == [12, 1]
    assert bool(module(x, grids).isfinite().all()), "an image without patches, which stands for none, is finite"


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    stored(tmp_path)
    module = ours(SigLIP2(path=str(tmp_path), patches=MOST))
    x, grids = modules.drawn(1, MOST, 48).float(), torch.tensor([[2, 3]])
    with pytest.raises(ValueError, match="an encoder of images of any proportions needs grids"):
        module(x)
    with pytest.raises(ValueError, match=r"the encoder takes \(20, 48\): patches, numbers in a patch"):
        module(x[:, :5], grids)
    with pytest.raises(ValueError, match="size makes images square and patches keeps their proportions"):
        SigLIP2(path=str(tmp_path), patches=MOST, size=16)
    with pytest.raises(ValueError, match="grids"):
        ours(SigLIP2(path=str(tmp_path)))(modules.drawn(1, 3, 16, 16).float(), grids)
    values = json.loads((tmp_path / "config.json").read_text())
    fixed = {**values, "model_type": "siglip_vision_model", "image_size": 16}
    fixed.pop("num_patches")
    (tmp_path / "config.json").write_text(json.dumps(fixed))
    with pytest.raises(Unsupported, match="was not trained on images of any proportions; remove patches"):
        _ = SigLIP2(path=str(tmp_path), patches=MOST).tokens
