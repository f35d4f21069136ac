"""Reads the tensors of a published vision tower under the names of Forge's module, each only when requested.

`write_tower` writes a small tower with random weights in the Hugging Face format, for checks.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from forge_core.errors import ForgeError
from forge_core.protocols.weights import StoredTensor, WeightsInfo
from forge_models.hf.config import Unsupported
from forge_models.hf.reader import DTYPES, FLOATS, located
from forge_vlm.encoders.shape import VisionShape
from forge_vlm.encoders.towers import FAMILIES, GATED, Tower, TowerFamily
from forge_vlm.encoders.vit import VisionTransformer
from forge_vlm.images.processing import FILE

PREFIXES = (
    *("model.vision_tower.vision_model.", "model.vision_tower.", "vision_tower.vision_model.", "vision_tower.", "vision_model."),
    "",
)
"""Prefixes of tensor names of a vision tower: in a larger model, next to a text tower, and in most files of a tower alone."""
OTHER_TENSORS = ("text_model.*", "text_projection.*", "visual_projection.*", "logit_scale", "logit_bias", "classifier.*")
"""Patterns of tensors that do not belong to the vision tower."""
_DIM, _LAYERS, _FFN_DIM, _PATCH, _GRID, _CHANNELS = 16, 2, 32, 4, 2, 3
"""Sizes of the small tower of `write_tower`."""


class TensorSource(NamedTuple):
    """Source of one tensor of Forge's module: its name in the files, and the function to apply (None: used as stored)."""

    theirs: str
    shape: tuple[int, ...]
    change: Callable[[Tensor], Tensor] | None = None


class TowerWeights:
    """Weights of a tower, read from memory-mapped files in a folder.

    Attributes:
        tensors: shape and dtype of every parameter of the module, by its name there.
        facts: source of the weights, and the tensors of the folder that were left out.
    """

    def __init__(self, folder: Path, tower: Tower) -> None:
        """Opens the files and checks everything except the values.

        Raises:
            Unsupported: a tensor or a file is missing, unexpected or not supported.
        """
        self._folder, self._tower = folder, tower
        files = located(folder)
        self._files: dict[str, Any] = {}
        opened: dict[str, Any] = {}
        for theirs, file in files.items():
            try:
                if file not in opened:
                    opened[file] = safe_open(str(folder / file), framework="pt")
            except Exception as cause:  # the library raises its own type for damaged files, and OSError and others
                raise Unsupported(f"{folder / file} cannot be read as safetensors: {cause}") from cause
            self._files[theirs] = opened[file]
        self._prefix = next(prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in files))
        self._places = dict(self._all_places())
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(place.shape, self._dtype(place.theirs)) for name, place in self._places.items()
        }
        self.facts = WeightsInfo(origin=str(folder), family=tower.family.name, notes=tuple(self._checked()))

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns whole tensors, on the CPU."""
        return {name: self._whole(self._places[name]) for name in names}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        """Returns the slice of one tensor that begins at `offset`. Tensors with a change, such as positions, are read whole."""
        place = self._places[name]
        box = tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))
        if place.change is not None:
            return self._whole(place)[box]
        return self._files[place.theirs].get_slice(place.theirs)[box]

    def _whole(self, place: TensorSource) -> Tensor:
        stored = self._files[place.theirs].get_tensor(place.theirs)
        return stored if place.change is None else place.change(stored)

    def _all_places(self) -> Iterator[tuple[str, TensorSource]]:
        with torch.device("meta"):
            built = VisionTransformer(self._tower.shape)
        for name, parameter in built.named_parameters():
            rest, theirs = their_name(self._tower.family, self._tower.shape, name)
            yield name, TensorSource(self._prefix + theirs, tuple(parameter.shape), self._change(rest))

    def _change(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """Returns the function to apply to a stored tensor, by its name without the path of its block."""
        family, shape = self._tower.family, self._tower.shape
        if name == "embed.proj.weight":
            if family.columns:
                cut = (shape.dim, shape.patch_size, shape.patch_size, shape.channels)
                return lambda stored: stored.reshape(cut).permute(0, 3, 1, 2).flatten(1)
            return lambda stored: stored.flatten(1)
        if name == "embed.positions":
            return lambda stored: interpolate_positions(
                stored.reshape(-1, shape.dim), self._tower.grid, shape.grid, family.antialias
            )
        if name == "embed.class_token":
            return torch.flatten
        if shape.gated and name.startswith(("mlp.gate_proj", "mlp.up_proj")):
            half = slice(0, shape.ffn_dim) if name.startswith("mlp.gate_proj") else slice(shape.ffn_dim, None)
            return lambda stored: stored[half]
        return None

    def _dtype(self, theirs: str) -> str:
        if theirs not in self._files:
            raise Unsupported(f"{self._folder}: {theirs} is missing from the weights of a {self._tower.family.name} tower")
        dtype = str(self._files[theirs].get_slice(theirs).get_dtype())
        dtype = DTYPES.get(dtype, dtype)
        if dtype not in FLOATS:
            raise Unsupported(f"{self._folder}: {theirs} has the dtype {dtype}, which is not implemented")
        return dtype

    def _checked(self) -> Iterator[str]:
        """Yields notes about tensors that are left out. Raises `Unsupported` for unexpected tensors and wrong shapes."""
        family, shape, grid = self._tower.family, self._tower.shape, self._tower.grid
        faults: list[str] = []
        for name, place in self._places.items():
            stored = tuple(self._files[place.theirs].get_slice(place.theirs).get_shape())
            wanted = place.shape
            if name == "embed.positions":
                wanted = (grid**2 + shape.class_token, shape.dim)
            if shape.gated and place.theirs.rpartition(".")[0].endswith("weights_in"):
                wanted = (2 * wanted[0], *wanted[1:])
            fits = stored == wanted if place.change is None else prod(stored) == prod(wanted)
            if not fits:
                faults.append(f"{place.theirs}: shape {stored}, config.json means {wanted}")
        later = tuple(family.block.format(layer) for layer in range(shape.blocks, shape.layers))
        used, others = {place.theirs for place in self._places.values()}, 0
        for theirs in self._files:
            inside = theirs.removeprefix(self._prefix)
            around = "vision_tower." in self._prefix and not theirs.startswith(self._prefix)
            if around or any(fnmatchcase(theirs, pattern) for pattern in OTHER_TENSORS):
                others += 1
            elif theirs not in used and not inside.startswith((*family.left, *later)):
                faults.append(f"{theirs}: unexpected for the tower that config.json describes")
        if faults:
            listed = "\n  ".join(faults[:20])
            raise Unsupported(f"the tensors in {self._folder} do not fit:\n  {listed}")
        if others:
            yield f"{others} tensors outside of the vision tower were left out"
        if later:
            yield f"blocks {shape.blocks} to {shape.layers - 1} of the vision tower were left out; no feature needs them"
        if grid != shape.grid:
            yield f"positions of {grid} x {grid} patches were resized to {shape.grid} x {shape.grid}"


def their_name(family: TowerFamily, shape: VisionShape, name: str) -> tuple[str, str]:
    """Returns (name without the path of its block, name in the tower's files) of a parameter of Forge's module."""
    before, theirs, rest = "", family.names, name
    if name.startswith("layers."):
        _, number, rest = name.split(".", 2)
        before, theirs = family.block.format(number), {**family.inner, **(GATED if shape.gated else {})}
    full = theirs.get(rest)
    module, _, slot = rest.rpartition(".")
    return rest, before + (f"{theirs[module]}.{slot}" if full is None else full)


def interpolate_positions(positions: Tensor, old: int, new: int, antialias: bool) -> Tensor:
    """Resizes a position table (old * old, or one more, dim) to a grid of new x new patches. The row of a class token is kept."""
    if old == new:
        return positions
    first, table = positions[: len(positions) - old * old], positions[len(positions) - old * old :]
    image = table.float().unflatten(0, (old, old)).permute(2, 0, 1)[None]
    mode = "bilinear" if antialias else "bicubic"
    image = F.interpolate(image, size=(new, new), mode=mode, align_corners=False, antialias=antialias)
    return torch.cat((first, image[0].permute(1, 2, 0).flatten(0, 1).to(positions.dtype)))


def write_tower(folder: Path, name: str) -> None:
    """Writes a tower of a family: two blocks of width 16 over 2 x 2 patches.

    Raises:
        ForgeError: the family is not known.
    """
    import numpy as np
    from safetensors.numpy import save_file

    if name not in FAMILIES:
        raise ForgeError(f"{name!r} is not a family of vision towers; those are {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    config: dict[str, Any] = {
        "model_type": family.tower,
        "hidden_size": _DIM,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 2,
        "patch_size": _PATCH,
        **({"num_patches": _GRID**2} if "num_patches" in family.defaults else {"image_size": _GRID * _PATCH}),
        **({"mlp_ratio": _FFN_DIM // _DIM} if "mlp_ratio" in family.defaults else {"intermediate_size": _FFN_DIM}),
    }
    preprocessor = {"image_mean": [0.5] * _CHANNELS, "image_std": [0.5] * _CHANNELS, "resample": 3}
    draw = np.random.default_rng(0)
    tensors = {theirs: draw.normal(0, 0.1, shape).astype(np.float32) for theirs, shape in _example_shapes(name).items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / FILE).write_text(json.dumps(preprocessor), encoding="utf-8")
    save_file(tensors, str(folder / "model.safetensors"))


def _example_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of a vision tower alone, by their names in the files."""
    family = FAMILIES[name]
    pixels = (_PATCH, _PATCH, _CHANNELS)
    vectors = {"norm": (_DIM,), "entry_norm": (_DIM,), "embed.class_token": (_DIM,)}
    tables = {"embed.positions": (_GRID**2 + bool(family.shape.get("class_token")), _DIM)}
    matrices = {"mlp.up_proj": (_FFN_DIM, _DIM), "mlp.down_proj": (_DIM, _FFN_DIM)}
    shapes: dict[str, tuple[int, ...]] = {}

    def add(ours: str, theirs: str) -> None:
        if ours.endswith(("positions", "class_token", "scale.weight")):
            shapes[theirs] = vectors.get(ours) or tables.get(ours) or (_DIM,)
            return
        weight: tuple[int, ...] = (_DIM, _DIM)
        if ours == "embed.proj":
            weight = (_DIM, prod(pixels)) if family.columns else (_DIM, _CHANNELS, _PATCH, _PATCH)
        elif ours.endswith("norm"):
            weight = (_DIM,)
        shapes[f"{theirs}.weight"] = matrices.get(ours, weight)
        if ours != "embed.proj" or family.shape.get("patch_bias", True):
            shapes[f"{theirs}.bias"] = shapes[f"{theirs}.weight"][:1]

    for ours, theirs in family.names.items():
        unused = ours in ("embed.class_token", "entry_norm") and not family.shape.get("class_token")
        if not unused:
            add(ours, theirs)
    for layer in range(_LAYERS):
        for ours, theirs in family.inner.items():
            add(ours, family.block.format(layer) + theirs)
    return shapes
