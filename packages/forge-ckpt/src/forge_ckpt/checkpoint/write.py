"""Writes a checkpoint: the files of all ranks, a manifest that covers every tensor exactly once, then one rename. Needs no torch.

Until the rename, earlier checkpoints are unchanged; after it, the new checkpoint is complete and durable. All ranks exchange
their results before anything is committed.
"""

import errno
import json
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from forge_ckpt.checkpoint.retention import RetentionPolicy, retain, sweep
from forge_ckpt.checkpoint.verification import hidden_file
from forge_ckpt.format.codec import check_meta, encode
from forge_ckpt.format.names import (
    LATEST,
    MANIFEST,
    SAVING,
    SUPERSEDED,
    check_mark,
    committed,
    free_name,
    next_name,
    point,
    pointed,
    rank_file,
)
from forge_ckpt.format.rank_files import RankFile, RankTable, find_frozen, join, pack, put_frozen, unpack
from forge_ckpt.world import describe_error, from_rank_0
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Store, World
from forge_core.terminal import size

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Draft:
    """The contribution of one rank to a checkpoint.

    Attributes:
        table: table of the rank's tensors, and of the boxes that it writes.
        file: bytes of the boxes; None if the rank writes no boxes.
        frozen: bytes of the last `table.frozen` boxes, which have a second file; None without frozen boxes.
        error: why the rank cannot save; if set, the save fails on all ranks.
    """

    table: RankTable
    file: RankFile | None = None
    frozen: RankFile | None = None
    error: str | None = None


def lengths_of(draft: Draft) -> tuple[list[int], list[int]]:
    """Returns the bytes of each piece in the draft's file, and in its file of frozen pieces."""
    moving, frozen = (list(file.lengths) if file is not None else [] for file in (draft.file, draft.frozen))
    return moving, frozen


@dataclass(frozen=True)
class SaveRequest:
    """The arguments of a save, apart from tensors; those of rank 0 are used.

    Attributes:
        step: the optimizer step; saving a step again creates a new generation that replaces the old one.
        meta: JSON to store with the tensors (configuration, cursor, counters, ...).
        keep: number of checkpoints to keep, or rules (`retention.retain`); 0 keeps all.
        spare: steps whose checkpoints are always kept.
        marks: steps by name of the mark, a file that names the checkpoint of the step; these checkpoints are kept too.
    """

    step: int
    meta: Mapping[str, Any]
    keep: int | RetentionPolicy = 0
    spare: Collection[int] = ()
    marks: Mapping[str, int] = field(default_factory=dict)


def write(store: Store, draft: Draft, order: SaveRequest, world: World, may: Callable[[], None] | None = None) -> str:
    """Collective: writes a checkpoint. Returns its directory name on every rank when it is durable.

    Checkpoints of later steps, from before the run went back to an earlier step, are renamed, not removed.

    Args:
        store, draft, order, world: the store, this rank's draft, the arguments of the save, and the ranks.
        may: called on rank 0 before any change, and before the commit; raises an error if this job may not write.

    Raises:
        CheckpointError: the save failed; the message is equal on all ranks and names the first cause. Nothing was committed,
            earlier checkpoints are intact, and the new files were removed.
    """
    # Each phase ends with a collective that every rank reaches, even after an error. Otherwise the other ranks would wait
    # forever.
    repeated = getattr(store, "retries", 0)
    table, step, error, before = draft.table, order.step, draft.error, None
    try:
        if world.rank == 0:
            _check_step(step)
            for mark in order.marks:
                check_mark(mark)
            check_meta(dict(order.meta))
        before = None if error else find_frozen(store, draft.frozen, world.rank)
    except Exception as cause:  # noqa: BLE001 (every rank must learn of it)
        error = error or describe_error(cause)
    new = table.bytes - (table.frozen_bytes if before else 0)
    intent = {"error": error, "step": step, "bytes": new, "digest": table.digest}
    intents = [json.loads(payload) for payload in world.gather(json.dumps(intent).encode())]  # none on other ranks than 0
    fault, needed = _fault(step, intents), sum(entry["bytes"] for entry in intents)
    refusal = partial(_refusal, step, store)

    def begin() -> dict[str, Any]:
        if fault:
            raise CheckpointError(fault)
        # Of the ranks with one signature, the first one sends it: often rank 0, whose table does not travel.
        signers = {entry["digest"]: rank for rank, entry in reversed([*enumerate(intents)])}
        return _open(store, step, needed, may) | {"signers": signers}

    opening = from_rank_0(world, begin, lambda cause: fault or refusal(0, cause, needed))
    temporary = opening["temporary"]

    reply = b""
    try:
        if draft.file is not None:
            store.write(f"{temporary}/{rank_file(world.rank)}", draft.file)
            table = replace(table, checksum=b"".join(draft.file.checksums))
        if draft.frozen is not None:
            put_frozen(store, draft.frozen, before, temporary, world.rank)
            table = replace(table, checksum=table.checksum + b"".join(draft.frozen.checksums))
        reply = b"=" + pack(table, with_signature=opening["signers"][table.digest] == world.rank)
    except Exception as cause:  # noqa: BLE001 (a store is a plugin and may raise anything; every rank must learn of it)
        reply = b"!" + _describe(cause, store, table.bytes).encode()
    replies = world.gather(reply)
    errors = [packed[1:].decode() if packed[:1] == b"!" else None for packed in replies]

    def commit() -> str:
        try:
            if failure := _first_failure(step, errors):
                raise CheckpointError(failure)
            manifest = join(
                unpack([packed[1:] for packed in replies]), step=step, generation=opening["generation"], meta=order.meta
            )
            _await_files(store, temporary, manifest.files)
            store.write(f"{temporary}/{MANIFEST}", [encode(manifest)])
            if may is not None:
                may()
            return _commit(store, temporary, step)
        except Exception:
            _discard(store, temporary)
            raise

    def describe(cause: Exception) -> str:
        return str(cause) if any(errors) else refusal(0, cause, 0)

    name = from_rank_0(world, commit, describe)
    _tidy(store, world, name, order)
    if (count := getattr(store, "retries", 0) - repeated) > 0:
        _log.warning("%s: %d operations of the store failed once and were repeated on rank %d", name, count, world.rank)
    return name


def _open(store: Store, step: int, needed: int, may: Callable[[], None] | None) -> dict[str, str]:
    """On rank 0, before any rank writes: removes leftovers, checks the free space, names the temporary directory."""
    if may is not None:
        may()
    sweep(store)
    free = store.free()
    if free is not None and needed > free:
        raise OSError(errno.ENOSPC, "No space left on device")
    generation = secrets.token_hex(16)
    return {"generation": generation, "temporary": f"{SAVING}step-{step:08d}-{generation}"}


def _commit(store: Store, temporary: str, step: int) -> str:
    """Commits the checkpoint by a rename; first renames checkpoints of later steps."""
    names = list(store.list())
    for entry in committed(names):
        if entry.step > step:
            aside = free_name(f"{SUPERSEDED}{entry.name}", names)
            _log.warning("%s is later than step %d, to which this run went back: renamed to %s", entry.name, step, aside)
            store.rename(entry.name, aside)
    name = next_name(step, names)
    store.rename(temporary, name)
    return name


def _tidy(store: Store, world: World, name: str, order: SaveRequest) -> None:
    """Collective: updates `latest` and other marks after the commit, then applies the rules of retention. A checkpoint that a
    mark named before may be removed, unless the new step of the mark was not saved. Faults are only warnings, because the
    checkpoint is committed."""
    spare = {*order.spare, *order.marks.values()}
    if world.rank == 0:
        mark = LATEST
        try:
            point(store, mark, name)
            names = {entry.step: entry.name for entry in reversed(committed(store.list()))}
            for mark, step in order.marks.items():
                before = pointed(store, mark)
                if step in names and before != names[step]:
                    point(store, mark, names[step])
                elif step not in names:
                    spare |= {entry.step for entry in committed([before or ""])}
        except (OSError, CheckpointError) as cause:
            _log.warning("%s is committed, but %r could not be updated: %s", name, mark, cause)
    try:
        retain(store, world, order.keep, spare)
    except (OSError, CheckpointError) as cause:
        _log.warning("%s is committed, but older checkpoints could not be removed: %s", name, cause)


def _await_files(store: Store, temporary: str, files: Iterable[tuple[str, int]]) -> None:
    """Waits until rank 0 sees all files at their full length.

    Raises:
        CheckpointError: a file is missing or too short.
    """
    if hidden := hidden_file(store, temporary, files):
        raise CheckpointError(
            f"{hidden.name} has {hidden.found} bytes on rank 0, expected {hidden.length}: all ranks must see the same directory"
        )


def _discard(store: Store, temporary: str) -> None:
    try:
        store.remove(temporary)
    except (OSError, CheckpointError) as cause:  # the next save removes it
        _log.warning("%s could not be removed: %s", temporary, cause)


def _fault(step: int, intents: list[dict[str, Any]]) -> str:
    """Returns why the save must not begin; empty if it may."""
    if failure := _first_failure(step, [entry["error"] for entry in intents]):
        return failure
    steps = sorted({entry["step"] for entry in intents})
    return f"ranks save different steps: {steps}" if len(steps) > 1 else ""


def _first_failure(step: int, errors: list[str | None]) -> str:
    """Returns the error of the first failing rank; empty if none has failed."""
    failed = [(rank, error) for rank, error in enumerate(errors) if error]
    if not failed:
        return ""
    return _failed(step, *failed[0], f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else "")


def _refusal(step: int, store: Store, rank: int, cause: Exception, needed: int) -> str:
    return _failed(step, rank, _describe(cause, store, needed))


def _failed(step: int, rank: int, error: str, others: str = "") -> str:
    return f"the checkpoint of step {step} was not saved: rank {rank}: {error}{others}; earlier checkpoints are unchanged"


def _check_step(step: object) -> None:
    if type(step) is not int or not 0 <= step < 10**18:
        raise CheckpointError(f"step must be an integer from 0 to 10**18 - 1, got {step!r}")


def _describe(cause: Exception, store: Store, needed: int) -> str:
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        free = store.free()
        need = f"needs {size(needed)}, " if needed else ""
        return f"no space left: {need}free {size(free) if free is not None else 'unknown'}"
    return describe_error(cause)
