"""Averages the weights of several checkpoints in fp64, one tensor at a time."""

import tempfile
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from forge_ckpt.checkpoint.locate import new_store
from forge_ckpt.checkpoint.read import StoredTensors
from forge_ckpt.checkpoint.save import save
from forge_ckpt.format.tensor_bytes import DTYPES
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Piece

SECTION = "model/"
"""Prefix of the names of weights in a checkpoint."""


def normalized(weights: Sequence[float]) -> list[float]:
    """Returns the weights scaled to a sum of 1.

    Raises:
        CheckpointError: a weight is negative or not finite, or all are 0.
    """
    total = sum(weights)
    if not all(isfinite(weight) and weight >= 0 for weight in weights) or not (total > 0 and isfinite(total)):
        raise CheckpointError(f"weights {', '.join(map(str, weights))}: weights must be finite, not negative, and not all 0")
    return [weight / total for weight in weights]


def of_ema(count: int, decay: float) -> list[float]:
    """Returns the shares of checkpoints, oldest first, in the average `e = decay * e + (1 - decay) * weights`, where e starts
    as the oldest checkpoint.

    Raises:
        CheckpointError: the decay is not between 0 and 1.
    """
    if not 0 <= decay < 1:
        raise CheckpointError(f"decay {decay}: it must be at least 0 and less than 1")
    return [decay ** (count - 1), *((1 - decay) * decay ** (count - 1 - at) for at in range(1, count))]


def write_average(sources: Sequence[StoredTensors], shares: Sequence[float], output: str | Path) -> str:
    """Writes a checkpoint with only weights: the sum of share * weights, rounded to the dtype of the weights.

    Tensors of other types than floating point, such as counters, and the metadata, such as the recipe, are copied from the newest
    checkpoint; `averaged` in the metadata records the steps and shares. The average is first written to a temporary file next to
    `output`, or in the system's temporary directory, so that only a few copies of the largest tensor are in memory.

    Args:
        sources: checkpoints, opened with the tensors of `SECTION`.
        shares: share of each source; the sum is 1.
        output: the directory of checkpoints to create, or its URL.

    Raises:
        CheckpointError: the checkpoints are of different models (the message lists all differences), or `output` exists. Nothing
            was written.
    """
    store = new_store(output)
    _check_alike(sources)
    newest = max(sources, key=lambda source: source.manifest.step)
    place = None
    if isinstance(store.root, Path):
        place = store.root.parent
        place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=f".{Path(output).name}.averaged-") as scratch:
        pieces = list(_pieces(sources, shares, newest, Path(scratch)))
        averaged = {"steps": [source.manifest.step for source in sources], "shares": list(shares)}
        meta = {**newest.manifest.meta, "hooks": [], "weights_only": True, "averaged": averaged}
        return save(store, pieces, meta, newest.manifest.step, SingleProcessWorld())


def _pieces(sources: Sequence[StoredTensors], shares: Sequence[float], newest: StoredTensors, scratch: Path) -> Iterator[Piece]:
    for number, (name, info) in enumerate(newest.tensors.items()):
        dtype = DTYPES[info.dtype]
        if info.bytes:
            flat = torch.from_file(str(scratch / f"{number}"), shared=True, size=info.bytes, dtype=torch.uint8)
            average = flat.view(dtype).view(info.shape)
        else:
            average = torch.empty(info.shape, dtype=dtype)
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            total = torch.zeros(info.shape, dtype=wide)
            for source, share in zip(sources, shares, strict=True):
                total.add_(source.whole(name).to(wide), alpha=share)
            average.copy_(total)
        else:
            average.copy_(newest.whole(name))
        yield Piece(name, info.shape, (0,) * len(info.shape), average, owned=True)


def _check_alike(sources: Sequence[StoredTensors]) -> None:
    first, faults = sources[0], []
    if not first.tensors:
        raise CheckpointError(f"{first.origin} has no weights: no tensor's name begins with {SECTION}")
    for other in sources[1:]:
        for name in {**first.tensors, **other.tensors}:
            one, two = first.tensors.get(name), other.tensors.get(name)
            if one is None or two is None:
                faults.append(f"{name}: only in {(first if two is None else other).origin}")
            elif (one.dtype, one.shape) != (two.dtype, two.shape):
                faults.append(f"{name}: {one.dtype} {list(one.shape)} and, in {other.origin}, {two.dtype} {list(two.shape)}")
        if _model(first) != _model(other):
            faults.append(f"[model] of the recipe differs in {other.origin}; `ckpt diff` shows how")
    if faults:
        raise CheckpointError("these checkpoints are of different models; nothing was written:\n  " + "\n  ".join(faults))


def _model(source: StoredTensors) -> Any:
    config = source.manifest.meta.get("config")
    return config.get("model") if isinstance(config, dict) else None
