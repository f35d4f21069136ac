"""forge-vlm alone: it stands on core, models and data, and on nothing else of Forge. An image becomes tokens of a decoder."""

from importlib.metadata import distributions

import torch
from PIL import Image

import forge_vlm
from forge_vlm import PixelShuffleConfig, ViT
from forge_vlm.context import AdapterContext
from forge_vlm.images.pixels import tile_pixels
from forge_vlm.images.tiling import Tiling

siblings = {found.name for found in distributions() if found.name.startswith("forge-")}
assert siblings == {"forge-vlm", "forge-core", "forge-models", "forge-data"}, siblings
assert forge_vlm.__doc__

chosen, shuffle = ViT(size=16, patch=4, dim=16, layers=1, heads=2), PixelShuffleConfig()
pixels, tiles = tile_pixels(Image.new("RGB", (40, 20)), Tiling(name="anyres"), chosen.processing)
features = chosen.build()(torch.from_numpy(pixels))
adapter = shuffle.build(AdapterContext(width=chosen.width, tokens=chosen.tokens, dim=12))
assert adapter(features).shape == (tiles.count, shuffle.tokens(chosen.tokens), 12) == (3, 4, 12)
