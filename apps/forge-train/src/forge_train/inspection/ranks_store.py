"""A folder of stored activations that several ranks write: files of each, and one manifest, which rank 0 keeps."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from forge_core.protocols.checkpoint import World
from forge_models.interp.store import MANIFEST, Manifest, ShardWriter
from forge_models.interp.taps import InterpError


class RanksStore:
    """Collective: opens a new or empty folder, or goes on with that of the same capture. Each rank writes a block of neighboring
    inputs; all know how far each block has come.

    Args:
        folder: all ranks see it.
        facts: as `StoreWriter`.
        taps: as `StoreWriter`.
        shard_bytes: a rank's shard is closed before it grows beyond.
        world: of all ranks.
        inputs: number of them.

    Raises:
        InterpError: on all ranks alike, a folder with another capture, a complete one, or one that some rank does not see.
    """

    def __init__(
        self, folder: Path, facts: dict[str, Any], taps: dict[str, Any], shard_bytes: int, world: World, inputs: int
    ) -> None:
        self._world, self._fault, self._named = world, "", 0
        self._manifest: Manifest | None = None
        entries: dict[str, Any] = {}
        with self.faults_said():
            if world.rank == 0:
                self._manifest = Manifest(folder, facts, taps, shard_bytes)
                entries = self._manifest.entries
        fault, entries = json.loads(world.broadcast(json.dumps([self._fault, entries]).encode() if world.rank == 0 else None))
        if fault:
            raise InterpError(fault)
        if not (folder / MANIFEST).is_file():
            self._fault = f"rank {world.rank} does not see {folder / MANIFEST}; choose a folder that all ranks see"
        self._stop_together()
        ends = [inputs * rank // world.size for rank in range(world.size + 1)]
        self._blocks = [range(*pair) for pair in pairwise(ends)]
        of = [[shard for shard in entries["shards"] if shard["inputs"][0] in block] for block in self._blocks]
        self._done = [max((shard["inputs"][1] for shard in of[rank]), default=ends[rank]) for rank in range(world.size)]
        mine = world.rank
        self._writer = ShardWriter(folder, f"shard-{mine:05d}-", taps, shard_bytes, self._blocks[mine].start, of[mine])

    def inputs_left(self, rank: int) -> range:
        """The inputs whose values a rank is still to get."""
        return range(self._done[rank], self._blocks[rank].stop)

    def unfinished(self) -> bool:
        """Whether any rank has inputs left: all go on until none has."""
        return any(self.inputs_left(rank) for rank in range(self._world.size))

    def written(self) -> int:
        """Number of inputs that this rank has."""
        return self._done[self._world.rank] - self._blocks[self._world.rank].start

    @contextmanager
    def faults_said(self) -> Iterator[None]:
        """What goes wrong inside is said when ranks agree the next time: they stop together, and none waits for another."""
        try:
            yield
        except InterpError as refusal:
            self._fault = self._fault or str(refusal)

    def add(self, values: dict[str, Tensor], index: dict[str, Tensor], inputs: int) -> None:
        """Rows of this rank's next inputs, as `StoreWriter.add`."""
        self._writer.add(values, index, inputs)

    def agree(self, writer: int, inputs: int) -> None:
        """Collective: tells all ranks what this one wrote, and for which rank it ran how many inputs.

        Raises:
            InterpError: on all ranks, what one of them met; what is stored is named by the manifest.
        """
        told = {"fault": self._fault, "shards": self._writer.shards[self._named :], "ran": [writer, inputs]}
        self._named = len(self._writer.shards)
        every = [json.loads(payload) for payload in self._world.all_gather(json.dumps(told).encode())]
        self._name([shard for one in every for shard in one["shards"]])
        if faults := [one["fault"] for one in every if one["fault"]]:
            raise InterpError(faults[0])
        for rank, count in dict(one["ran"] for one in every).items():  # ranks that share a model say the same
            self._done[rank] += count

    def close(self) -> None:
        """Collective: writes what is left, and marks the store as complete.

        Raises:
            InterpError: on all ranks, what one of them met.
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
        """A store is complete with every input once."""
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
        """Collective: raises `InterpError` on all ranks where one of them has a fault."""
        if faults := [found.decode() for found in self._world.all_gather(self._fault.encode()) if found]:
            raise InterpError(faults[0])
