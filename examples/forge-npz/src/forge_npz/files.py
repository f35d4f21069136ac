"""Reads and writes the folders. NumPy has no bfloat16: such tensors are 16-bit integers, and `model.json` has their dtype."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from forge_core import ForgeError
from forge_core.protocols import StoredTensor, Weights
from forge_train.formats import check_fit, describe, facts_of, model_of, new_folder

FILE = "model.json"


class NpzFiles:
    """Implements `forge_core.protocols.Converter`."""

    def read(self, path: Path) -> "NpzWeights":
        return NpzWeights(path)

    def write(self, path: Path, weights: Weights) -> None:
        with new_folder(path, weights) as folder:  # renamed to `path` when it is complete
            for name in weights.tensors:  # one at a time, so that the memory of one tensor is enough
                tensor = weights.read([name])[name].contiguous()
                np.save(folder / f"{name}.npy", (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy())
            dtypes = {name: entry.dtype for name, entry in weights.tensors.items()}
            (folder / FILE).write_text(json.dumps({**describe(weights), "dtypes": dtypes}, indent=2) + "\n")

    def reference(self, path: Path, tokens: torch.Tensor, extras: Mapping[str, torch.Tensor] | None = None) -> str:
        return "NumPy has no model to run"


class NpzWeights:
    """Implements `forge_core.protocols.Weights`. Files are memory-mapped."""

    def __init__(self, folder: Path) -> None:
        try:
            described = json.loads((folder / FILE).read_text())
            self._dtypes: dict[str, str] = described["dtypes"]
            self._arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="c") for name in self._dtypes}
        except (OSError, ValueError, KeyError, TypeError) as cause:
            raise ForgeError(f"{folder} is no folder of converter npz: {cause}; check the path") from cause
        self.tensors = {name: StoredTensor(array.shape, self._dtypes[name]) for name, array in self._arrays.items()}
        self.model = model_of(described, None, folder)
        check_fit(self.model, self.tensors, folder)
        self.facts = facts_of(described, folder, folder / "tokenizer")

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self.box(name, (), ()) for name in names}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> torch.Tensor:
        within = tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))
        tensor = torch.from_numpy(self._arrays[name][within].copy())
        return tensor.view(torch.bfloat16) if self._dtypes[name] == "bfloat16" else tensor
