"""Stores inner values of a model that is sharded over ranks: each rank writes its own files, and one manifest lists them all.

Each rank gets a contiguous block of inputs. Data ranks run rows of their blocks at the same time; ranks that share a model
replica run the rows of each other's blocks in turn, and the values of a row go to the rank that owns its block. A rank thus holds
one batch and one shard in memory, every rank writes, and rows are in the order of the inputs, as with one process.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forge_ckpt.world import ProcessGroupWorld, SingleProcessWorld
from forge_core.batch import IGNORE, PADDING, Batch
from forge_core.protocols.checkpoint import World
from forge_core.protocols.model import LossTerms
from forge_interp.captures import select_taps
from forge_interp.commands.ranks import GatheredValues, LocalShares, Shares
from forge_interp.store import MANIFEST, SHARD_BYTES, ActivationManifest, ShardWriter, check_inputs, facts_of, stored
from forge_interp.tap_names import InterpError, TapInfo
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step


class RanksStore:
    """Collective: opens a new or empty folder, or continues an unfinished store of the same capture. Each rank writes a
    contiguous block of inputs; all ranks know the progress of each block.

    Args:
        folder: folder on a file system that all ranks share.
        facts: as in `ActivationWriter`.
        taps: as in `ActivationWriter`.
        shard_bytes: maximum number of bytes of a shard.
        world: world of all ranks.
        inputs: number of inputs.

    Raises:
        InterpError: the folder has another capture or a complete store, or a rank cannot see the folder; raised on all ranks.
    """

    def __init__(
        self, folder: Path, facts: dict[str, Any], taps: dict[str, Any], shard_bytes: int, world: World, inputs: int
    ) -> None:
        self._world, self._fault, self._named = world, "", 0
        self._manifest: ActivationManifest | None = None
        entries: dict[str, Any] = {}
        with self.faults_said():
            if world.rank == 0:
                self._manifest = ActivationManifest(folder, facts, taps, shard_bytes)
                entries = self._manifest.entries
        fault, entries = json.loads(world.broadcast(json.dumps([self._fault, entries]).encode() if world.rank == 0 else None))
        if fault:
            raise InterpError(fault)
        if not (folder / MANIFEST).is_file():
            self._fault = f"rank {world.rank} cannot see {folder / MANIFEST}; choose a folder that all ranks share"
        self._stop_together()
        ends = [inputs * rank // world.size for rank in range(world.size + 1)]
        self._blocks = [range(*pair) for pair in pairwise(ends)]
        of = [[shard for shard in entries["shards"] if shard["inputs"][0] in block] for block in self._blocks]
        self._done = [max((shard["inputs"][1] for shard in of[rank]), default=ends[rank]) for rank in range(world.size)]
        mine = world.rank
        self._writer = ShardWriter(folder, f"shard-{mine:05d}-", taps, shard_bytes, self._blocks[mine].start, of[mine])

    def inputs_left(self, rank: int) -> range:
        """Returns the inputs whose values a rank has not stored yet."""
        return range(self._done[rank], self._blocks[rank].stop)

    def unfinished(self) -> bool:
        """Whether any rank has inputs left; all ranks continue until no rank has."""
        return any(self.inputs_left(rank) for rank in range(self._world.size))

    def written(self) -> int:
        """Number of inputs that this rank has stored."""
        return self._done[self._world.rank] - self._blocks[self._world.rank].start

    @contextmanager
    def faults_said(self) -> Iterator[None]:
        """Context in which an error is kept until the next `agree`, so that all ranks stop together."""
        try:
            yield
        except InterpError as refusal:
            self._fault = self._fault or str(refusal)

    def add(self, values: dict[str, Tensor], index: dict[str, Tensor], inputs: int) -> None:
        """Adds rows of this rank's next inputs, as `StoreWriter.add`."""
        self._writer.add(values, index, inputs)

    def agree(self, writer: int, inputs: int) -> None:
        """Collective: exchanges the shards that this rank wrote, and the number of inputs that it ran for rank `writer`.

        Raises:
            InterpError: a rank had an error; raised on all ranks, after the manifest lists the stored shards.
        """
        told = {"fault": self._fault, "shards": self._writer.shards[self._named :], "ran": [writer, inputs]}
        self._named = len(self._writer.shards)
        every = [json.loads(payload) for payload in self._world.all_gather(json.dumps(told).encode())]
        self._name([shard for one in every for shard in one["shards"]])
        if faults := [one["fault"] for one in every if one["fault"]]:
            raise InterpError(faults[0])
        for rank, count in dict(one["ran"] for one in every).items():  # ranks that share a model replica report the same number
            self._done[rank] += count

    def close(self) -> None:
        """Collective: writes the last shards and marks the store as complete.

        Raises:
            InterpError: a rank had an error, or an input was not stored; raised on all ranks.
        """
        with self.faults_said():
            self._writer.flush()
        self.agree(self._world.rank, 0)
        self._stop_together()
        with self.faults_said():
            if self._manifest is not None:
                self._refuse_gaps(self._manifest.entries["shards"])
                self._manifest.write(complete=True)
        self._stop_together()

    def _refuse_gaps(self, shards: list[dict[str, Any]]) -> None:
        """Checks that every input is stored exactly once; raises `InterpError` otherwise."""
        place = 0
        for first, last in (shard["inputs"] for shard in shards):
            if first != place:
                break
            place = last
        if place != self._blocks[-1].stop:
            raise InterpError(f"the values of input {place} were not stored; capture again into an empty folder")

    def _name(self, shards: list[dict[str, Any]]) -> None:
        if self._manifest is None or not shards:
            return
        self._manifest.add(shards)
        with self.faults_said():
            self._manifest.write()

    def _stop_together(self) -> None:
        """Collective: raises `InterpError` on all ranks if any of them has an error."""
        if faults := [found.decode() for found in self._world.all_gather(self._fault.encode()) if found]:
            raise InterpError(faults[0])


def record_sharded(
    model: ParallelModel,
    whole: nn.Module,
    inputs: Sequence[Tensor],
    folder: Path,
    names: str | Sequence[str],
    *,
    weights: str,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    positions: Any = "all",
    batch: int = 8,
    facts: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    report: Callable[[int], None] | None = None,
) -> None:
    """Collective: does what `forge_interp.store.record` does, for a model in any layout.

    Args:
        model: sharded model.
        whole: the same model on the meta device.
        inputs: (length,) token ids of each input, the same on all ranks.
        folder: folder on a file system that all ranks share.
        weights: identifier of the weights, such as `fingerprint_of`.
        batch: number of inputs per forward of a data rank.
        report: called with the number of inputs that this rank has stored.

    Raises:
        InterpError: the selection is invalid or has values that sharded forwards do not compute, the folder has another capture
            or is not visible to a rank, or a disk is full; raised on all ranks.
    """
    whole = in_dtype(whole, model.compute)
    infos = select_taps(whole, names, layers, heads)
    check_inputs(whole, inputs, positions)
    _refuse_unmade(infos)
    topology = model.topology
    length = _length(topology, max(map(len, inputs)), whole)
    world: World = ProcessGroupWorld(device=topology.device) if topology.size > 1 else SingleProcessWorld()
    writers, sharing = _sharing(topology)
    said = facts_of(weights, inputs, batch, layers, heads, positions) | {"layout": str(topology.layout), **(facts or {})}
    taps = {name: stored(one, heads) for name, one in infos.items()}
    store = RanksStore(folder, said, taps, shard_bytes, world, len(inputs))
    step, turn = Step(model, _no_loss), 0
    while store.unfinished():
        # Ranks that share a model replica choose the same rows, because each knows the progress of the others.
        left = [writer for writer in writers if store.inputs_left(writer)]
        writer, turn = left[turn % len(left)] if left else writers[0], turn + 1
        numbers = list(store.inputs_left(writer)[:batch])
        kept = LocalShares(Shares(model, infos, "all" if positions == "mean" else positions, [_samples(numbers, batch)]), heads)
        with kept.shares.heard_by(kept.hear):
            step.evaluate([_batch(inputs, numbers, batch, length)])
        with store.faults_said():
            found = kept.gathered(sharing)
            if numbers and writer == topology.rank:
                store.add(*_rows(found, inputs, numbers, positions), len(numbers))
        store.agree(writer, len(numbers))
        if report is not None:
            report(store.written())
    store.close()


def in_dtype(whole: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Returns a copy on the meta device in the compute dtype of the ranks, which is the dtype of the inner values."""
    whole = copy.deepcopy(whole)
    for parameter in whole.parameters():
        parameter.data = parameter.data.to(dtype)
    return whole


def _no_loss(head: Any, hidden: Tensor, labels: Tensor) -> LossTerms:
    """Objective of these forwards: a zero loss without logits."""
    del head, labels
    zero = hidden.new_zeros(())
    return LossTerms(zero, zero, {})


def _refuse_unmade(infos: Mapping[str, TapInfo]) -> None:
    """Checks that a forward with a loss computes all inner values; raises `InterpError` otherwise."""
    for name in infos:
        if name == "logits" or name.startswith("mtp."):
            raise InterpError(
                f"{name} is not computed on several ranks, which evaluate the loss without logits; choose names such as "
                "'blocks.*.residual_after', or run on one process"
            )


def _length(topology: Topology, longest: int, whole: Any) -> int:
    """Returns the padded number of tokens of a row, a multiple of 2 cp tp, so that all shares of a row have equal size."""
    parts = 2 * topology.layout.cp * topology.layout.tp
    length = -(-longest // parts) * parts
    if length > whole.shape.max_length:
        raise InterpError(
            f"an input has {longest} tokens, which layout {topology.layout} pads to {length}, more than max_length "
            f"{whole.shape.max_length}; use at most {whole.shape.max_length // parts * parts} tokens"
        )
    return length


def _sharing(topology: Topology) -> tuple[tuple[int, ...], World]:
    """Collective: returns the ranks that run the same rows as this one, in ascending order, and their world."""
    axes = tuple(axis for axis in ("pp", "cp", "tp") if topology.layout.size(axis) > 1)
    if not axes:
        return (topology.rank,), SingleProcessWorld()
    ranks = next(group for group in topology.layout.groups(axes) if topology.rank in group)
    return ranks, ProcessGroupWorld(topology.across(axes), topology.device)


def _samples(numbers: list[int], batch: int) -> list[int]:
    """Returns sample numbers padded to `batch` with negative numbers, which mark rows to discard."""
    return numbers + [-1 - row for row in range(batch - len(numbers))]


def _batch(inputs: Sequence[Tensor], numbers: list[int], batch: int, length: int) -> Batch:
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    documents = torch.full((batch, length), PADDING, dtype=torch.int32)
    for row, number in enumerate(numbers):
        tokens[row, : len(inputs[number])] = inputs[number].long()
        documents[row, : len(inputs[number])] = 0
    return Batch(tokens, torch.full_like(tokens, IGNORE), documents=documents)


def _rows(
    found: GatheredValues, inputs: Sequence[Tensor], numbers: list[int], positions: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the values (rows, ...) and the index columns (input, position, token) of the rows, as one process stores them."""
    tokens, values = found.tokens, {name: found[name] for name in found}
    if positions == "mean":
        of = tokens[:, 0] - numbers[0]
        index = {"input": torch.tensor(numbers)} | {name: torch.full((len(numbers),), -1) for name in ("position", "token")}
        return {name: _means(value, of, len(numbers)) for name, value in values.items()}, index
    if isinstance(positions, Sequence) and not isinstance(positions, str):  # in the order of `positions`
        ascending = sorted(set(positions))
        columns = torch.tensor([ascending.index(place) for place in positions])
        order = (torch.arange(len(numbers))[:, None] * len(ascending) + columns).flatten()
        tokens, values = tokens[order], {name: value[order] for name, value in values.items()}
    ids = torch.tensor([int(inputs[number][place]) for number, place in tokens.tolist()], dtype=torch.int64)
    return values, {"input": tokens[:, 0], "position": tokens[:, 1], "token": ids}


def _means(value: Tensor, of: Tensor, count: int) -> Tensor:
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    sums = wide.new_zeros(count, *wide.shape[1:]).index_add(0, of, wide)
    return (sums / torch.bincount(of, minlength=count).view(-1, *[1] * (value.dim() - 1))).to(value.dtype)
