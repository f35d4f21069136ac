"""Store operations of a start and of the watch in worlds of growing size, counted in one process.

    python benchmarks/parallel/rendezvous.py [--worlds 64,1024,65536]

Rank 0 and the last rank run the code of a real start over a store that counts. The messages of all other ranks come from the same
code: each of them runs its part alone and gives up at its first poll. Operations in which a rank only asks again (a key that is
not there yet, a counter) depend on time, and are counted apart as polls. `large_worlds.py` draws the counts.

The last lines are what one operation costs the process that hosts a store, in processor time.
"""

import argparse
import contextlib
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from forge_core.errors import ForgeError
from forge_parallel.launch import hang_report
from forge_parallel.launch.environment import Launch
from forge_parallel.launch.hang_report import RankStatus
from forge_parallel.launch.meeting import Attendant, Device, Wait, _Guest, _Host, meet, surroundings
from forge_parallel.launch.watch import Watch
from forge_train.process.ranks import StartAgreement

CONTENT = {f"section.key_{number}": f"value {number}" for number in range(200)}
"""A recipe has about 200 keys."""


class CountingStore(dist.Store):
    """A store that counts what one rank asks of another store.

    Attributes:
        calls: operations with a result, by name.
        polls: operations that asked in vain: a key that is absent, or a counter.
        keys: keys in all operations with a result.
        bytes: bytes of keys and values of all operations.
    """

    def __init__(self, shared: dist.Store) -> None:
        super().__init__()
        self.shared, self.calls, self.polls, self.keys, self.bytes = shared, Counter[str](), 0, 0, 0

    def _count(self, name: str, keys: int, size: int) -> None:
        self.calls[name] += 1
        self.keys += keys
        self.bytes += size

    @property
    def total(self) -> int:
        return sum(self.calls.values())

    def set(self, key: str, value: Any) -> None:
        self._count("set", 1, len(key) + len(value))
        self.shared.set(key, value)

    def get(self, key: str) -> bytes:
        value = self.shared.get(key)
        self._count("get", 1, len(key) + len(value))
        return value

    def add(self, key: str, amount: int) -> int:
        if amount:
            self._count("add", 1, len(key) + 8)
        else:
            self.polls += 1
            self.bytes += len(key) + 8
        return self.shared.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        there = self.shared.check(keys)
        size = sum(map(len, keys))
        if there:
            self._count("check", len(keys), size)
        else:
            self.polls += 1
            self.bytes += size
        return there

    def compare_set(self, key: str, expected: str, new: str) -> bytes:
        value = self.shared.compare_set(key, expected, new)
        self._count("compare_set", 1, len(key) + len(expected) + len(new) + len(value))
        return value

    def append(self, key: str, value: str) -> None:
        self._count("append", 1, len(key) + len(value))
        self.shared.append(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self.shared.multi_get(keys)
        self._count("multi_get", len(keys), sum(map(len, keys)) + sum(map(len, values)))
        return values

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._count("multi_set", len(keys), sum(map(len, keys)) + sum(map(len, values)))
        self.shared.multi_set(keys, values)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._count("wait", len(keys), sum(map(len, keys)))
        self.shared.wait(keys, timeout)

    def has_extended_api(self) -> bool:
        return True


Counts = dict[str, CountingStore]
"""The stores of rank 0 and of another rank, by "rank 0" and "another"."""


def both(shared: dist.Store) -> Counts:
    return {"rank 0": CountingStore(shared), "another": CountingStore(shared)}


def in_threads(*bodies: Callable[[], Any]) -> list[Any]:
    """Runs bodies at the same time, and returns their results; raises the first error."""
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = bodies[number]()
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(bodies))]


def launch(rank: int, world: int) -> Launch:
    return Launch(rank, world, address="node0", port=29500, identity="SLURM job 7, step 0, restart 0")


def wait_of(rank: int, world: int) -> Wait:
    return Wait(launch(rank, world), 300.0, 300.0, lambda: False)


def attendant(rank: int, world: int) -> Attendant:
    device = Device(f"node{rank // 8}", "cuda", "NVIDIA H100 80GB HBM3", "9.0", 85_000_000_000)
    return Attendant(rank, world, launch(rank, world).identity, "small", f"node{rank // 8}", 4711 + rank % 8, device)


def meeting(world: int) -> Counts:
    """The meeting: rank 0 and the last rank come last, after the messages of all others."""
    shared = dist.HashStore()
    stores = both(shared)
    host = _Host(dist.PrefixStore("forge", stores["rank 0"]), attendant(0, world), wait_of(0, world), outlives=False)
    messages = dist.PrefixStore(host.me.number, dist.PrefixStore("forge", shared))
    for rank in range(1, world - 1):
        messages.set(f"came/{messages.add('came', 1)}", attendant(rank, world).as_text())
    last = _Guest(dist.PrefixStore("forge", stores["another"]), attendant(world - 1, world), wait_of(world - 1, world), False)
    content = [CONTENT, surroundings()]
    in_threads(lambda: host.hold(content), lambda: last.attend(content))
    return stores


def meeting_of_threads(world: int) -> list[CountingStore]:
    """A meeting in which every rank is a thread: the stores of all ranks."""
    shared = dist.HashStore()
    stores = [CountingStore(shared) for _ in range(world)]
    cpu = torch.device("cpu")

    def come(rank: int) -> None:
        meet(stores[rank], launch(rank, world), wait_of(rank, world), cpu, CONTENT, "small", outlives=False)

    in_threads(*((lambda rank=rank: come(rank)) for rank in range(world)))
    return stores


def phase(world: int) -> Counts:
    """One phase of the start, at whose end all ranks agree: rank 0 and the last rank come last."""
    shared = dist.HashStore()
    for rank in range(1, world - 1):
        with contextlib.suppress(ForgeError), StartAgreement(rank, world, shared, patience=-1.0).together("the model"):
            pass
    stores = both(shared)
    ranks = {0: stores["rank 0"], world - 1: stores["another"]}

    def run(rank: int) -> None:
        while rank and shared.add("start/0/the model/arrived", 0) < world - 1:
            time.sleep(0.001)
        with StartAgreement(rank, world, ranks[rank]).together("the model"):
            pass

    in_threads(*((lambda rank=rank: run(rank)) for rank in ranks))
    return stores


def phase_of_threads(world: int) -> list[CountingStore]:
    """A phase in which every rank is a thread."""
    shared = dist.HashStore()
    stores = [CountingStore(shared) for _ in range(world)]

    def run(rank: int) -> None:
        with StartAgreement(rank, world, stores[rank]).together("the model"):
            pass

    in_threads(*((lambda rank=rank: run(rank)) for rank in range(world)))
    return stores


class Waiting(Watch):
    """A watch whose training thread has been waiting for other ranks for `waited` seconds."""

    waited = 0.0
    _status: RankStatus | None = None

    def _sight(self) -> RankStatus:
        if self._status is None:
            self._status = super()._sight()
        return self._status._replace(waits=self.waited > 0, seconds=self.waited, where="loop.py:24 (fit)")


class Watches:
    """The watches of a world without their threads: rank 0's and the last one's have counting stores."""

    def __init__(self, world: int, patience: float = 30.0) -> None:
        self.world, self.shared = world, dist.HashStore()
        self.stores = both(self.shared)
        chosen = {0: self.stores["rank 0"], world - 1: self.stores["another"]}
        self.all = [Waiting(rank, world, chosen.get(rank, self.shared), patience) for rank in range(world)]
        self.first, self.last = self.all[0], self.all[-1]

    def count(self, body: Callable[[Watch], Any]) -> Counts:
        """Counts anew while rank 0, and then the last rank, runs `body`."""
        found = both(self.shared)
        for watch, store in ((self.first, found["rank 0"]), (self.last, found["another"])):
            watch._store = store
            for turn in (watch._reading, watch._judging, watch._giving_up):
                turn._store = store
            body(watch)
        return found


def watch(world: int) -> Iterator[tuple[str, Counts]]:
    """Yields what the watch costs in one look: while all work, while all wait, when all wait too long, and after an error."""
    watches = Watches(world)
    for each in watches.all:
        each._look()
    yield "look", watches.count(lambda each: each._look())
    for each in watches.all:
        each.waited = 16.0
        each._beat += 1
    yield "look, all wait", watches.count(lambda each: each._look())
    watches.first._read_at -= 10.0  # seconds ago
    for each in (watches.first, watches.last):
        each.waited = 31.0
    yield "look, all have waited for 30 s", watches.count(lambda each: each._look())
    for each in (watches.first, watches.last):
        each.waited = 601.0
    yield "look, all have waited for 600 s", watches.count(lambda each: each._look())
    broken = Watches(world, patience=0.5)  # so long ranks look for the cause
    for each in broken.all[1:-1]:
        each._look()
    yield "cause of a broken connection", broken.count(lambda each: each.explain(RuntimeError("gloo: Connection closed by peer")))


def report_file(world: int) -> int:
    """Returns the bytes of `hang.txt`: the stacks of all ranks."""
    told = f"{Watch()._sight()}\n{hang_report.stacks_of_all_threads()}"
    return world * len(told)


def gloo(world: int) -> list[CountingStore]:
    """A gloo group of threads: the stores of all ranks, of which each connects to every other one."""
    shared = dist.HashStore()
    stores = [CountingStore(shared) for _ in range(world)]

    def connect(rank: int) -> Any:
        return dist.ProcessGroupGloo(dist.PrefixStore("0", stores[rank]), rank, world, timedelta(seconds=60))

    groups = in_threads(*((lambda rank=rank: connect(rank)) for rank in range(world)))
    del groups
    return stores


def _serve(port: int, ready: Any, done: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    ready.send(store.port)
    while (asked := done.recv()) is not None:
        ready.send(time.process_time())
        del asked


def cost(count: int = 4096) -> dict[str, tuple[float, float]]:
    """Microseconds of one operation: processor time of the process that hosts the store, and wall time of the rank."""
    context = multiprocessing.get_context("spawn")
    ready, reading = context.Pipe()
    done, asking = context.Pipe()
    server = context.Process(target=_serve, args=(0, reading, asking))
    server.start()
    store = dist.PrefixStore("watch", dist.TCPStore("127.0.0.1", ready.recv(), is_master=False, wait_for_workers=False))
    status = "x" * 300
    keys = [f"rank/{rank}" for rank in range(count)]
    bodies: dict[str, tuple[int, Callable[[], Any]]] = {
        "set": (count, lambda: [store.set(key, status) for key in keys]),
        "get": (count, lambda: [store.get(key) for key in keys]),
        "check": (count, lambda: [store.check([key]) for key in keys]),
        "add": (count, lambda: [store.add("count", 1) for _ in keys]),
        "key of multi_get": (count, lambda: [store.multi_get(keys[at : at + 1024]) for at in range(0, count, 1024)]),
    }
    found = {}
    for name, (times, body) in bodies.items():
        done.send(True)
        processor, began = ready.recv(), time.perf_counter()
        body()
        store.check(["rank/0"])  # `set` does not wait for the store
        wall = time.perf_counter() - began
        done.send(True)
        found[name] = ((ready.recv() - processor) / times * 1e6, wall / times * 1e6)
    done.send(None)
    server.join()
    return found


def rows(world: int) -> Iterator[tuple[str, Counts]]:
    """Yields the counts of everything at the start and in the watch."""
    yield "meeting", meeting(world)
    yield "phase of the start", phase(world)
    yield from watch(world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="64,256,1024,4096,16384,65536")
    options = parser.parse_args()
    columns = f"{'rank 0: calls':>13} {'keys':>9} {'bytes':>13} {'another: calls':>14} {'keys':>7} {'bytes':>9}"
    print(f"{'ranks':>7}  {'what':32} {columns}")
    for world in map(int, options.worlds.split(",")):
        for name, counts in rows(world):
            first, other = counts["rank 0"], counts["another"]
            print(
                f"{world:7,}  {name:32} {first.total:13,} {first.keys:9,} {first.bytes:13,} "
                f"{other.total:14,} {other.keys:7,} {other.bytes:9,}",
                flush=True,
            )
    for name, (processor, wall) in cost().items():
        print(f"{name:18} {processor:6.1f} us of the process that hosts the store, {wall:6.1f} us of the rank")


if __name__ == "__main__":
    main()
