"""What a save over many ranks costs rank 0 before and after the bytes: joining what all ranks say, and the record of it.

    python benchmarks/ckpt/plan.py [--tensors 200] [--ranks 64 1024] [--rounds 3] [--sides forge unchecked]

Ranks are coordinates, not processes. Each tensor is cut into as many slices as there are ranks. Both sides begin with the bytes
that ranks have sent and end with the bytes of the record: Forge's `unpack`, `join` (which proves that boxes cover every tensor
exactly) and `encode`; DCP's `pickle.loads` of every local plan, `DefaultSavePlanner.create_global_plan` (with its check of
overlaps), the places of the items, which its writer adds, and `pickle.dumps`. Local plans of DCP are of rank 0 by
`create_local_plan`, moved to the offsets of the other ranks; what travels between processes, and the write, are in neither
figure. `unchecked` is DCP without its check. Python collects no garbage meanwhile, which would take DCP far longer.
"""

import argparse
import gc
import os
import pickle
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge_ckpt.format.codec import encode
from forge_ckpt.format.manifest import TensorInfo
from forge_ckpt.format.rank_files import RankTable, join, pack, unpack
from forge_core.errors import CheckpointError

ROWS, COLUMNS = 8, 4096
"""Of the slice of one rank."""


def name_of(tensor: int) -> str:
    return f"model/blocks.{tensor}.attention.q_proj.weight"


def tables(tensors: int, ranks: int) -> list[bytes]:
    """What the ranks of Forge send."""
    infos = tuple(TensorInfo(name_of(tensor), "bfloat16", (ROWS * ranks, COLUMNS)) for tensor in range(tensors))
    offset, extent = np.zeros((tensors, 2), dtype=np.int64), np.full((tensors, 2), COLUMNS, dtype=np.int64)
    extent[:, 0] = ROWS
    head = RankTable(infos, np.arange(tensors), offset, extent, os.urandom(16 * tensors))
    plain = pack(head, False)
    start = len(plain) - len(head.checksum) - extent.nbytes - offset.nbytes
    found = [pack(head, True)]
    for rank in range(1, ranks):
        offset[:, 0] = ROWS * rank
        found.append(plain[:start] + offset.tobytes() + plain[start + offset.nbytes :])
    return found


def local_plan(tensors: int, ranks: int) -> SavePlan:
    """DCP's own for rank 0, of tensors that are sharded over all ranks."""
    mesh = DeviceMesh("cpu", list(range(ranks)))
    local = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="meta")
    state = {name_of(tensor): DTensor.from_local(local, mesh, [Shard(0)], run_check=False) for tensor in range(tensors)}
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    return planner.create_local_plan()


def plans(first: SavePlan, ranks: int) -> Iterator[bytes]:
    """What the ranks of DCP send."""
    for rank in range(ranks):
        yield pickle.dumps(replace(first, items=[_moved(item, rank) for item in first.items]))


def _moved(item: WriteItem, rank: int) -> WriteItem:
    assert item.tensor_data is not None
    offset = torch.Size((ROWS * rank, 0))
    chunk = ChunkStorageMetadata(offsets=offset, sizes=item.tensor_data.chunk.sizes)
    index = MetadataIndex(item.index.fqn, offset, item.index.index)
    return replace(item, index=index, tensor_data=replace(item.tensor_data, chunk=chunk))


def forge(payloads: list[bytes]) -> bytes:
    return encode(join(unpack(payloads), step=1, generation="0" * 32, meta={}))


def dcp(payloads: list[bytes]) -> bytes:
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, None, True)
    made, metadata = planner.create_global_plan([pickle.loads(payload) for payload in payloads])  # noqa: S301 (made here)
    places: dict[Any, Any] = {}
    for rank, plan in enumerate(made):
        for number, item in enumerate(plan.items):
            places[item.index] = _StorageInfo(f"__{rank}_0.distcp", number * ROWS * COLUMNS * 2, ROWS * COLUMNS * 2)
    metadata.storage_data = places
    return pickle.dumps(metadata)


def unchecked(payloads: list[bytes]) -> bytes:
    with patch("torch.distributed.checkpoint.default_planner._validate_global_plan", lambda *_: []):
        return dcp(payloads)


SIDES = {"forge": forge, "dcp": dcp, "unchecked": unchecked}


def timed(work: Callable[[list[bytes]], bytes], payloads: list[bytes]) -> tuple[float, int]:
    gc.collect()
    gc.disable()
    began = time.perf_counter()
    size = len(work(payloads))
    seconds = time.perf_counter() - began
    gc.enable()
    return seconds, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for ranks in options.ranks:
        payloads = {"forge": tables(options.tensors, ranks)}
        if set(options.sides) & {"dcp", "unchecked"}:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            payloads["dcp"] = payloads["unchecked"] = list(plans(local_plan(options.tensors, ranks), ranks))
            dist.destroy_process_group()
        medians = {}
        found: dict[str, list[tuple[float, int]]] = {side: [] for side in options.sides}
        for _ in range(options.rounds):
            for side in options.sides:
                try:
                    found[side].append(timed(SIDES[side], payloads[side]))
                except CheckpointError as refusal:
                    print(f"{options.tensors} tensors, {ranks} ranks, {side}: refused: {refusal}")
        for side, values in found.items():
            if values:
                seconds, sent = [value for value, _ in values], sum(map(len, payloads[side]))
                medians[side] = statistics.median(seconds)
                print(
                    f"{options.tensors} tensors, {ranks} ranks, {side}: {medians[side]:.3f} s ({min(seconds):.3f} to "
                    f"{max(seconds):.3f}), record {values[0][1] / 1e6:.1f} MB, sent to rank 0 {sent / 1e6:.1f} MB",
                    flush=True,
                )
        for side in medians.keys() - {"forge"} if "forge" in medians else ():
            print(f"  {side} takes {medians[side] / medians['forge']:.1f} times as long as forge", flush=True)


if __name__ == "__main__":
    main()
