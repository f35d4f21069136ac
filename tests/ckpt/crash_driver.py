"""Kills a save before every operation it does to the disk; run as a light process of its own, prints JSON.

    python crash_driver.py DIRECTORY SCENARIO...

Each point k: a fresh copy of the starting directory, a forked child that saves and is killed (SIGKILL) before its k-th
operation, then a search and a load as the next start would do, then one more save.
"""

import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from ckpt.ranks import blank, digest, sample, whole
from forge_ckpt.checkpoint.read import load, newest
from forge_ckpt.checkpoint.retention import RetentionPolicy
from forge_ckpt.checkpoint.save import save
from forge_ckpt.checkpoint.verification import agreed_fault, open_manifest
from forge_ckpt.format import tensor_bytes as layout
from forge_ckpt.format.names import committed
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Piece

# what is there before, the step that is saved, how many are kept
SCENARIOS: dict[str, tuple[list[tuple[int, int]], tuple[int, int], int | RetentionPolicy]] = {
    "first": ([], (100, 1), 1),
    "next": ([(100, 1)], (200, 2), 1),
    "again": ([(100, 1)], (100, 2), 1),
    "back": ([(100, 1), (300, 3)], (200, 2), 2),
    "frozen": ([(100, 1)], (200, 2), 1),
    "rules": ([(128, 1), (200, 1), (250, 3)], (350, 2), RetentionPolicy(last=1, every=200, log_spaced=0)),
}


def pieces(seed: int, path: Path) -> list[Piece]:
    """Of scenario `frozen` a tensor is the same in each state, and is stored once."""
    mine = whole(sample(seed))
    if path.parent.name != "frozen":
        return mine
    return [*mine, replace(whole({"model/frozen": torch.arange(5000.0)})[0], frozen=True)]


def write(
    path: Path,
    step: int,
    seed: int,
    keep: int | RetentionPolicy,
    probe: Callable[[str, str], None] = lambda operation, path: None,
) -> None:
    save(LocalStore(path, probe=probe), pieces(seed, path), {"seed": seed}, step, SingleProcessWorld(), keep=keep)


def killed_at(path: Path, point: int, step: int, seed: int, keep: int | RetentionPolicy) -> int | None:
    """Saves in a child; None when it was killed before operation `point`, else how many operations it did."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        done = 0

        def probe(operation: str, path: str) -> None:
            nonlocal done
            if done == point:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1

        write(path, step, seed, keep, probe)
        os.write(writer, str(done).encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    reported = os.read(reader, 100)
    os.close(reader)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return None
    if status != 0:
        raise SystemExit(f"the child failed with status {status}")
    return int(reported)


def is_whole(store: LocalStore, name: str) -> bool:
    try:
        return agreed_fault(store, name, open_manifest(store, name)[0], SingleProcessWorld()) is None
    except CheckpointError:
        return False


def outcomes_of(directory: Path, scenario: str) -> dict[str, object]:
    before, (step, seed), keep = SCENARIOS[scenario]
    start = directory / "start"
    for old_step, old_seed in before:
        write(start, old_step, old_seed, 0)
    start.mkdir(exist_ok=True, parents=True)
    outcomes = []
    for point in range(10_000):
        path = directory / "run"
        shutil.copytree(start, path)
        total = killed_at(path, point, step, seed, keep)
        store = LocalStore(path)
        found = newest(store, SingleProcessWorld())
        outcome: dict[str, object] = {"point": point, "step": None, "skipped": []}
        outcome["broken"] = [entry.name for entry in committed(store.list()) if not is_whole(store, entry.name)]
        if found is not None:
            live = blank(sample())
            known = lambda name: name != "model/frozen"  # noqa: E731 (`broken` looks at its bytes)
            meta = load(store, found, whole(live), SingleProcessWorld(), select=known)
            outcome |= {"step": found.step, "seed": meta["seed"], "digest": digest(list(live.values())), "skipped": found.skipped}
        outcome["held"] = [entry.step for entry in committed(store.list())]
        write(path, 400, 4, 1)
        outcome["then"] = list(store.list())
        outcomes.append(outcome)
        shutil.rmtree(path)
        if total is not None:
            return {"total": total, "outcomes": outcomes}
    raise SystemExit("the save never ends")


def main(directory: Path, scenarios: list[str]) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    layout.CHUNK_BYTES = 900  # several writes for one tensor
    json.dump({scenario: outcomes_of(directory / scenario, scenario) for scenario in scenarios}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
