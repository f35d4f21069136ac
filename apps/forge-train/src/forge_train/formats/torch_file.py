"""The format `torch`: a file of `torch.save` with one table of tensors."""

from collections.abc import Mapping
from pathlib import Path

import torch

from forge_core.protocols.weights import NO_EXTRAS, Weights
from forge_train.formats.folder import new_folder
from forge_train.formats.pickled import BytesWeights, place_in, read_pickled, write_sidecar
from forge_train.formats.plain import PlainWeights

FILE = "model.pt"


class TorchConverter:
    """The converter `torch`."""

    def __init__(self, *, recipe: str | None, prefix: str, unsafe_pickle: bool) -> None:
        self.recipe, self.prefix, self.unsafe_pickle = recipe, prefix, unsafe_pickle

    def read(self, path: Path) -> BytesWeights | PlainWeights:
        """Opens a file of any name, or a folder with `model.pt`; see `read_pickled`."""
        file = path / FILE if path.is_dir() else path
        return read_pickled(
            file.parent if path.is_dir() else path,
            "torch",
            file,
            recipe=self.recipe,
            prefix=self.prefix,
            unsafe=self.unsafe_pickle,
        )

    def write(self, path: Path, weights: Weights) -> None:
        """Writes a folder with `model.pt`, `{name: tensor}`, and `forge.json` next to it. All weights are in memory at once.

        Raises:
            ForgeError: `path` is taken.
        """
        with new_folder(path, weights) as folder:
            state = {self.prefix + name: tensor.clone() for name, tensor in weights.read(list(weights.tensors)).items()}
            torch.save(state, folder / FILE)
            span = (0, (folder / FILE).stat().st_size)
            places = {
                name: place_in(folder / FILE, span, str(number), weights.tensors[name])
                for number, name in enumerate(weights.tensors)
            }
            write_sidecar(folder, weights, folder / FILE, places)

    def reference(self, path: Path, tokens: torch.Tensor, extras: Mapping[str, torch.Tensor] = NO_EXTRAS) -> str:
        """The format has tensors and no model."""
        return "a file of tensors has no model that could be run"
