"""The tensors of one checkpoint, read a box at a time."""

from collections.abc import Callable, Iterator, Sequence
from math import prod

import numpy as np
import torch

from forge_ckpt.errors import Damaged
from forge_ckpt.format.elements import CHUNK_BYTES, DTYPES
from forge_ckpt.format.manifest import TensorInfo
from forge_ckpt.ranks.world import SingleProcessWorld
from forge_ckpt.saving.locate import AnyStore
from forge_ckpt.saving.resume import fill
from forge_ckpt.store.verify import agreed_fault, open_manifest
from forge_ckpt.transfer.turns import DoubleBuffer
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Piece


class StoredTensors:
    """Tensors of a checkpoint, all of which are verified when it is opened.

    Attributes:
        manifest: of the whole checkpoint.
        tensors: those that `select` accepts, by name.

    Raises:
        Damaged: what was read is not what was written.
        CheckpointError: it cannot be read.
    """

    def __init__(self, store: AnyStore, name: str, select: Callable[[str], bool] | None = None) -> None:
        self._store, self.name = store, name
        self.origin = f"{store.root}/{name}"
        try:
            self.manifest = open_manifest(store, name)[0]
        except OSError as cause:
            raise CheckpointError(f"{self.origin} cannot be read: {cause}") from cause
        chosen = [at for at, info in enumerate(self.manifest.tensors) if select is None or select(info.name)]
        self.tensors: dict[str, TensorInfo] = {self.manifest.tensors[at].name: self.manifest.tensors[at] for at in chosen}
        fault = agreed_fault(store, name, self.manifest, SingleProcessWorld(), np.array(chosen, dtype=np.int64))
        if fault:
            raise Damaged(f"{self.origin} is damaged: {fault}")

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> torch.Tensor:
        """The box of a tensor that begins at `offset`."""
        info = self.tensors[name]
        live = torch.empty(tuple(extent), dtype=DTYPES[info.dtype])
        with DoubleBuffer(CHUNK_BYTES) as turns:
            fill(self._store, self.name, self.manifest, Piece(name, info.shape, tuple(offset), live, owned=False), turns)
        return live

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        shape = self.tensors[name].shape
        return self.box(name, (0,) * len(shape), shape)


def boxes(shape: Sequence[int], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, extent) of boxes that cover a shape once, in the order of its elements; none has more than `most` elements."""
    if not prod(shape):
        return
    if not shape:
        yield (), ()
        return
    row, rest = prod(shape[1:]), (0,) * (len(shape) - 1)
    if row <= most:
        rows = most // row
        for start in range(0, shape[0], rows):
            yield (start, *rest), (min(rows, shape[0] - start), *shape[1:])
        return
    for start in range(shape[0]):
        for offset, extent in boxes(shape[1:], most):
            yield (start, *offset), (1, *extent)
