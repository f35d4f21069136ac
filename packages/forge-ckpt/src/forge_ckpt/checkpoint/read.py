"""Finds the checkpoint to resume from, verifies it, and loads it on any layout; reads boxes of stored tensors."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from forge_ckpt.checkpoint.locate import AnyStore, resolve
from forge_ckpt.checkpoint.verification import agreed_fault, hidden_file, open_manifest
from forge_ckpt.format.codec import decode
from forge_ckpt.format.manifest import CHUNK_BYTES, Manifest, TensorInfo, meeting
from forge_ckpt.format.names import DAMAGED, SUPERSEDED, committed, free_name
from forge_ckpt.format.tensor_bytes import DTYPES, DoubleBuffer, copy_box, dtype_name
from forge_ckpt.world import SingleProcessWorld, describe_error, from_rank_0
from forge_core.errors import CheckpointError, Damaged, NewerFormat
from forge_core.protocols.checkpoint import Piece, Store, World

_log = logging.getLogger(__name__)
_SHOWN = 30
Select = Callable[[str], bool] | None


class SkippedCheckpoint(NamedTuple):
    """A skipped checkpoint and the reason; `name` is its current name. Only damaged checkpoints are renamed."""

    name: str
    reason: str
    damaged: bool = False


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint whose every byte was verified.

    Attributes:
        name: directory of the checkpoint in the store.
        manifest: description of the checkpoint; `manifest.meta` is the trainer's metadata.
        skipped: newer checkpoints that were not usable.
    """

    name: str
    manifest: Manifest
    skipped: tuple[SkippedCheckpoint, ...] = ()

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def meta(self) -> Mapping[str, Any]:
        return self.manifest.meta


ResumePolicy = Literal["auto", "never", "require"] | int
"""How a start resumes; a number is a step."""


def newest(store: Store, world: World, policy: ResumePolicy = "auto", *, aside: bool = True) -> VerifiedCheckpoint | None:
    """Collective: returns the newest checkpoint that passes verification, the same on every rank.

    Rank 0 lists the checkpoints. Damaged ones are renamed to `damaged-...`, never removed, and listed in `skipped` and the log.

    Args:
        policy: `auto` returns None if nothing was ever saved; `require` raises an error in this case; `never` always returns
            None. A number selects the checkpoint of this step and no other.
        aside: whether to rename damaged checkpoints. A job that does not own the store yet passes False, and calls `set_aside`
            after it has taken the store.

    Raises:
        CheckpointError: checkpoints exist, but none is usable (a run must not start over silently); or the checkpoint of the
            given step is missing or damaged.
        NewerFormat: a later version of forge-ckpt wrote the newest checkpoint.
    """
    if policy == "never":
        return None
    if isinstance(policy, int):
        name = resolve(store, policy, world)
        try:
            return VerifiedCheckpoint(name, _verified(store, name, world))
        except Damaged as cause:
            raise Damaged(f"{name} is damaged: {cause}. Resume from another step") from cause
    names = from_rank_0(world, lambda: list(store.list()))
    skipped: list[SkippedCheckpoint] = []
    for entry in committed(names):
        try:
            manifest = _verified(store, entry.name, world)
            return VerifiedCheckpoint(entry.name, manifest, set_aside(store, world, skipped) if aside else tuple(skipped))
        except Damaged as cause:
            if world.rank == 0:
                _log.warning("%s is damaged and was skipped: %s", entry.name, cause)
            skipped.append(SkippedCheckpoint(entry.name, str(cause), damaged=True))
        except NewerFormat:
            raise
        except CheckpointError as cause:  # temporarily unreadable, so it is not renamed
            if world.rank == 0:
                _log.warning("%s could not be read and was skipped: %s", entry.name, cause)
            skipped.append(SkippedCheckpoint(entry.name, str(cause)))
    spoiled = (set_aside(store, world, skipped) if aside else skipped) or _spoiled_before(names)
    if spoiled:
        reasons = "\n  ".join(f"{entry.name}: {entry.reason}" for entry in spoiled[:_SHOWN])
        raise CheckpointError(
            f"no usable checkpoint found:\n  {reasons}\nTo start over, move these directories away "
            "or set checkpoint.resume = 'never'"
        )
    if policy == "require":
        raise CheckpointError("checkpoint.resume = 'require', but no checkpoint was ever saved here; check the run's directory")
    return None


def newest_that(store: Store, world: World, accept: Callable[[Manifest], bool]) -> VerifiedCheckpoint | None:
    """Collective: returns the newest checkpoint that passes verification and `accept`, the same on every rank, or None.

    Renames nothing. It finds the checkpoint to which a later start can go back.
    """
    for entry in committed(from_rank_0(world, lambda: list(store.list()))):
        try:
            manifest = _opened(store, entry.name, world)
            if accept(manifest) and agreed_fault(store, entry.name, manifest, world) is None:
                return VerifiedCheckpoint(entry.name, manifest)
        except CheckpointError:
            continue
    return None


def set_aside(store: Store, world: World, skipped: Iterable[SkippedCheckpoint]) -> tuple[SkippedCheckpoint, ...]:
    """Collective: renames damaged checkpoints to `damaged-...`. Returns all skipped checkpoints with their current names."""
    renamed = []
    for entry in skipped:
        name = from_rank_0(world, partial(_quarantine, store, entry.name)) if entry.damaged else entry.name
        if name != entry.name and world.rank == 0:
            _log.warning("%s was renamed to %s", entry.name, name)
        renamed.append(entry._replace(name=name))
    return tuple(renamed)


def _spoiled_before(names: Iterable[str]) -> list[SkippedCheckpoint]:
    """Returns the checkpoints that earlier starts and saves renamed; they show that the run has a history."""
    reasons = {DAMAGED: "found damaged earlier", SUPERSEDED: "left behind when the run went back to an earlier step"}
    return [SkippedCheckpoint(name, reason) for name in names for prefix, reason in reasons.items() if name.startswith(prefix)]


def load(
    store: Store,
    which: VerifiedCheckpoint | str | int,
    pieces: Iterable[Piece],
    world: World,
    *,
    strict: bool = True,
    select: Select = None,
) -> Mapping[str, Any]:
    """Collective: fills live tensors from a checkpoint of any layout. Returns the checkpoint's `meta`.

    All data that any rank reads are verified before any rank changes a tensor.

    Args:
        which: result of `newest`, a directory name, or a step.
        pieces: the boxes on this rank, owned or not; all are filled.
        strict: whether tensors of the checkpoint that no rank loads are an error.
        select: considers only tensors, live and stored, whose name it accepts (weights only: `lambda n: n.startswith("model/")`).

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or does not match the pieces; one error lists every missing or
            unexpected name, shape and dtype. No rank has changed a tensor.
    """
    name = which.name if isinstance(which, VerifiedCheckpoint) else resolve(store, which, world)
    manifest = _opened(store, name, world)
    live: list[Piece] = []
    error = None
    try:
        live = [piece for piece in pieces if select is None or select(piece.name)]
    except Exception as cause:  # noqa: BLE001 (the caller's pieces may raise anything; every rank must learn of it)
        error = f"rank {world.rank}: {describe_error(cause)}"
    wanted = _fitting(manifest, live, error, world, strict, select, name)
    fault = agreed_fault(store, name, manifest, world, wanted)
    if fault:
        raise Damaged(f"{name} is damaged; nothing was loaded: {fault}")
    try:
        with DoubleBuffer(CHUNK_BYTES) as turns:
            for piece in live:
                fill(store, name, manifest, piece, turns)
    except Exception as cause:  # noqa: BLE001 (as above)
        error = describe_error(cause)
    # Also a barrier: no rank continues, or removes files, while another rank is still reading.
    for rank, failed in enumerate(world.all_gather((error or "").encode())):
        if failed:
            raise CheckpointError(
                f"{name} was verified, but could not be read on rank {rank}: {failed.decode()}; "
                "some tensors are overwritten already: load a checkpoint again before you use them"
            )
    return manifest.meta


def _verified(store: Store, name: str, world: World) -> Manifest:
    manifest = _opened(store, name, world)
    fault = agreed_fault(store, name, manifest, world)
    if fault:
        raise Damaged(fault)
    return manifest


def _opened(store: Store, name: str, world: World) -> Manifest:
    """Collective: returns rank 0's manifest on every rank, after every rank sees the files.

    Raises:
        CheckpointError: a rank does not see the same files as rank 0 in time; this does not prove damage.
    """
    kinds = {"damaged": Damaged, "newer": NewerFormat, "error": CheckpointError}
    reply = b""
    if world.rank == 0:
        try:
            reply = b"=" + open_manifest(store, name)[1]
        except Damaged as cause:
            reply = b"damaged:" + str(cause).encode()
        except NewerFormat as cause:
            reply = b"newer:" + f"{name}: {cause}".encode()
        except (OSError, CheckpointError) as cause:
            reply = b"error:" + f"{name} cannot be read: {cause}".encode()
    reply = world.broadcast(reply if world.rank == 0 else None)
    if reply[:1] != b"=":
        kind, _, text = reply.decode().partition(":")
        raise kinds[kind](text)
    manifest = decode(reply[1:])
    hidden = hidden_file(store, name, manifest.files, absent=(OSError, CheckpointError)) if world.rank else None
    seen = f"{hidden.found} bytes" if hidden and hidden.found is not None else "nothing"
    said = f"rank {world.rank} sees {seen} of {hidden.name}, rank 0 {hidden.length} bytes" if hidden else ""
    if said := next((text.decode() for text in world.all_gather(said.encode()) if text), ""):
        raise CheckpointError(f"{name} cannot be read: {said}; all ranks must see the same directory")
    return manifest


def _fitting(
    manifest: Manifest,
    live: list[Piece],
    error: str | None,
    world: World,
    strict: bool,
    select: Callable[[str], bool] | None,
    name: str,
) -> np.ndarray:
    """Collective: returns the indices of the tensors that at least one rank reads.

    Raises:
        CheckpointError: on every rank, with the mismatches of all ranks.
    """
    faults: dict[str, None] = {error: None} if error else {}
    wanted = np.zeros(len(manifest.tensors), dtype=np.uint8)
    for piece in live:
        index = manifest.index.get(piece.name)
        if index is None:
            faults[f"{piece.name}: not in the checkpoint"] = None
            continue
        wanted[index] = 1
        faults.update(dict.fromkeys(_misfits(manifest, index, piece)))
    reply = json.dumps(list(faults)).encode() + b"\n" + np.packbits(wanted).tobytes()
    replies = [payload.split(b"\n", 1) for payload in world.all_gather(reply)]
    merged = dict.fromkeys(fault for head, _ in replies for fault in json.loads(head))
    for _, bits in replies:
        wanted |= np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=len(wanted))
    if strict:
        for index in np.flatnonzero(wanted == 0).tolist():
            tensor = manifest.tensors[index].name
            if select is None or select(tensor):
                merged[f"{tensor}: in the checkpoint, but not in the model or optimizer"] = None
    if merged:
        listed = "\n  ".join(sorted(merged))
        raise CheckpointError(f"{name} does not match the model or optimizer; nothing was loaded:\n  {listed}")
    return np.flatnonzero(wanted)


def _misfits(manifest: Manifest, index: int, piece: Piece) -> list[str]:
    info, shape = manifest.tensors[index], tuple(int(size) for size in piece.shape)
    faults = []
    if shape != info.shape:
        faults.append(f"{piece.name}: shape {shape}, in the checkpoint {info.shape}")
    try:
        dtype = dtype_name(piece.local, piece.name)
    except CheckpointError as cause:
        return [*faults, str(cause)]
    if dtype != info.dtype:
        faults.append(f"{piece.name}: dtype {dtype}, in the checkpoint {info.dtype}")
    box = tuple(piece.local.shape)
    fits = len(box) == len(shape) == len(piece.offset) and all(
        low >= 0 and low + size <= whole for low, size, whole in zip(piece.offset, box, shape, strict=True)
    )
    if not fits:
        faults.append(f"{piece.name}: a box of {box} at {tuple(piece.offset)} is not inside shape {shape}")
    return faults


def fill(store: Store, name: str, manifest: Manifest, piece: Piece, turns: DoubleBuffer) -> None:
    """Copies the stored values of a piece's box into the live piece, without verification."""
    if not piece.local.numel():
        return
    columns, dims = manifest.pieces, len(piece.shape)
    order, borders = manifest.by_tensor
    index = manifest.index[piece.name]
    stored = order[borders[index] : borders[index + 1]]
    low = np.array(piece.offset, dtype=np.int64)
    high = low + np.array(piece.local.shape, dtype=np.int64)
    for at in stored[meeting(columns.offset[stored, :dims], columns.extent[stored, :dims], low, high)].tolist():
        box = columns.offset[at, :dims].tolist(), columns.extent[at, :dims].tolist()
        path = f"{name}/{manifest.files[int(columns.file[at])][0]}"
        copy_box(store, path, int(columns.start[at]), box, piece.local, [int(start) for start in piece.offset], turns)


def _quarantine(store: Store, name: str) -> str:
    """Renames a damaged checkpoint. If this fails, it keeps its name, and the next start verifies it again."""
    try:
        moved = free_name(f"{DAMAGED}{name}", store.list())
        store.rename(name, moved)
    except (OSError, CheckpointError) as cause:
        _log.warning("%s could not be renamed: %s", name, cause)
        return name
    return moved


class StoredTensors:
    """The tensors of a checkpoint; the constructor verifies all of them.

    Attributes:
        manifest: manifest of the whole checkpoint.
        tensors: tensors that `select` accepts, by name.

    Raises:
        Damaged: a file is damaged.
        CheckpointError: the checkpoint cannot be read.
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
        """Returns the box of a tensor that begins at `offset`."""
        info = self.tensors[name]
        live = torch.empty(tuple(extent), dtype=DTYPES[info.dtype])
        with DoubleBuffer(CHUNK_BYTES) as turns:
            fill(self._store, self.name, self.manifest, Piece(name, info.shape, tuple(offset), live, owned=False), turns)
        return live

    def whole(self, name: str) -> torch.Tensor:
        """Returns a whole tensor."""
        shape = self.tensors[name].shape
        return self.box(name, (0,) * len(shape), shape)


def boxes(shape: Sequence[int], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields (offset, extent) of boxes of at most `most` elements that cover a shape once, in the order of its elements."""
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
