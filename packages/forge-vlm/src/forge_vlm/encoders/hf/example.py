"""A small vision tower in the Hugging Face format, with random weights: what conformance checks try."""

import json
from math import prod
from pathlib import Path
from typing import Any

from forge_core.errors import ForgeError
from forge_vlm.encoders.hf.families import FAMILIES
from forge_vlm.images.processing import FILE

DIM, LAYERS, FFN, PATCH, GRID, CHANNELS = 16, 2, 32, 4, 2, 3


def write_tower(folder: Path, name: str) -> None:
    """Writes the folder's files: two blocks of width 16 over 2 x 2 patches.

    Raises:
        ForgeError: the family is not known.
    """
    import numpy as np
    from safetensors.numpy import save_file

    if name not in FAMILIES:
        raise ForgeError(f"{name!r} is none of the families of vision towers: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    config: dict[str, Any] = {
        "model_type": family.tower,
        "hidden_size": DIM,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "patch_size": PATCH,
        **({"num_patches": GRID**2} if "num_patches" in family.defaults else {"image_size": GRID * PATCH}),
        **({"mlp_ratio": FFN // DIM} if "mlp_ratio" in family.defaults else {"intermediate_size": FFN}),
    }
    preprocessor = {"image_mean": [0.5] * CHANNELS, "image_std": [0.5] * CHANNELS, "resample": 3}
    draw = np.random.default_rng(0)
    tensors = {theirs: draw.normal(0, 0.1, shape).astype(np.float32) for theirs, shape in _shapes(name).items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / FILE).write_text(json.dumps(preprocessor), encoding="utf-8")
    save_file(tensors, str(folder / "model.safetensors"))


def _shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Of the tensors of a tower alone, by their names in the files."""
    family = FAMILIES[name]
    pixels = (PATCH, PATCH, CHANNELS)
    vectors = {"norm": (DIM,), "entry_norm": (DIM,), "embed.class_token": (DIM,)}
    tables = {"embed.positions": (GRID**2 + bool(family.shape.get("class_token")), DIM)}
    matrices = {"mlp.up_proj": (FFN, DIM), "mlp.down_proj": (DIM, FFN)}
    found: dict[str, tuple[int, ...]] = {}

    def add(ours: str, theirs: str) -> None:
        if ours.endswith(("positions", "class_token", "scale.weight")):
            found[theirs] = vectors.get(ours) or tables.get(ours) or (DIM,)
            return
        weight: tuple[int, ...] = (DIM, DIM)
        if ours == "embed.proj":
            weight = (DIM, prod(pixels)) if family.columns else (DIM, CHANNELS, PATCH, PATCH)
        elif ours.endswith("norm"):
            weight = (DIM,)
        found[f"{theirs}.weight"] = matrices.get(ours, weight)
        if ours != "embed.proj" or family.shape.get("patch_bias", True):
            found[f"{theirs}.bias"] = found[f"{theirs}.weight"][:1]

    for ours, theirs in family.names.items():
        unused = ours in ("embed.class_token", "entry_norm") and not family.shape.get("class_token")
        if not unused:
            add(ours, theirs)
    for layer in range(LAYERS):
        for ours, theirs in family.inner.items():
            add(ours, family.block.format(layer) + theirs)
    return found
