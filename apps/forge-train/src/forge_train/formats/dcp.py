"""The format `dcp`: checkpoints of `torch.distributed.checkpoint`, as torch itself, torchtitan and others load them.

Keys are the names of parameters at the top, as torchtitan has kept the model's part since its pull request 1347 of 2025; a
prefix such as `model.` is the layout of those who save `{"model": ...}`, as torchtitan did before. Names and orientation of
tensors are Forge's: a model of other names needs a mapping, or the format `hf`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import torch

from forge_core.protocols.weights import NO_EXTRAS, Weights
from forge_train.formats.folder import new_folder
from forge_train.formats.pickled import BytesWeights, place_in, read_pickled, write_sidecar
from forge_train.formats.plain import PlainWeights

METADATA = ".metadata"


class DcpConverter:
    """The converter `dcp`."""

    def __init__(self, *, recipe: str | None, prefix: str, unsafe_pickle: bool) -> None:
        self.recipe, self.prefix, self.unsafe_pickle = recipe, prefix, unsafe_pickle

    def read(self, path: Path) -> BytesWeights | PlainWeights:
        """Opens a checkpoint; see `read_pickled`."""
        return read_pickled(path, "dcp", path / METADATA, recipe=self.recipe, prefix=self.prefix, unsafe=self.unsafe_pickle)

    def write(self, path: Path, weights: Weights) -> None:
        """Writes a checkpoint of one rank, a tensor at a time, and `forge.json` next to it.

        Raises:
            ForgeError: `path` is taken.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        prefix = self.prefix
        failed: list[Exception] = []

        class OnDemand(DefaultSavePlanner):
            """Reads a tensor when its bytes are written."""

            def lookup_object(self, index: Any) -> torch.Tensor:
                name = index.fqn.removeprefix(prefix)
                try:
                    return weights.read([name])[name]
                except Exception as cause:
                    failed.append(cause)
                    raise

        outlines = {
            prefix + name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
            for name, entry in weights.tensors.items()
        }
        with new_folder(path, weights) as folder:
            with catch_warnings(action="ignore", category=UserWarning):  # that this is one process
                try:
                    made: Any = dcp.save(outlines, checkpoint_id=folder, planner=OnDemand(), no_dist=True)
                except dcp.CheckpointException:
                    if failed:
                        raise failed[0] from None
                    raise
            places = {}
            for index, info in made.storage_data.items():
                name = index.fqn.removeprefix(prefix)
                span = (info.offset, info.length)
                places[name] = place_in(folder / info.relative_path, span, "0", weights.tensors[name])
            write_sidecar(folder, weights, folder / METADATA, places)

    def reference(self, path: Path, tokens: torch.Tensor, extras: Mapping[str, torch.Tensor] = NO_EXTRAS) -> str:
        """The format has tensors and no model."""
        return "a distributed checkpoint has no model that could be run"
