"""kill -9 and power loss at every operation of a save: the old checkpoint or the new one, whole."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from ckpt.ranks import blank, digest, equal, sample, whole
from forge_ckpt.checkpoint.read import load, newest
from forge_ckpt.checkpoint.save import save
from forge_ckpt.format import tensor_bytes as layout
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld

EXPECTED: dict[str, set[tuple[int | None, int | None]]] = {
    "first": {(None, None), (100, 1)},
    "next": {(100, 1), (200, 2)},
    "again": {(100, 1), (100, 2)},
    "back": {(300, 3), (100, 1), (200, 2)},
    "frozen": {(100, 1), (200, 2)},
    "rules": {(250, 3), (350, 2)},
}


@pytest.fixture(scope="module")
def reports() -> Iterator[dict[str, Any]]:
    """What the driver saw; one process for all scenarios, because starting torch takes longer than all its saves."""
    memory = Path("/dev/shm")  # a killed process does not lose what it wrote, so memory serves, and fsync is free there
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name("crash_driver.py"), directory, *EXPECTED],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert done.returncode == 0, done.stderr
    yield json.loads(done.stdout)


@pytest.mark.parametrize("scenario", EXPECTED)
def test_fault_1_and_6_kill_before_every_operation(reports: dict[str, Any], scenario: str) -> None:
    report = reports[scenario]
    outcomes = report["outcomes"]
    assert len(outcomes) == report["total"] + 1 > 20  # a kill before each operation, and one run without
    digests = {seed: digest(list(sample(seed).values())) for seed in (1, 2, 3)}
    order = []
    for outcome in outcomes:
        state = (outcome["step"], outcome.get("seed"))
        assert state in EXPECTED[scenario], outcome
        # nothing half-written or half-removed ever has a checkpoint's name, looked at or not
        assert outcome["skipped"] == [] and outcome["broken"] == [], outcome
        if outcome["step"] is not None:
            assert outcome["digest"] == digests[outcome["seed"]], outcome
        left = [name for name in outcome["then"] if name.startswith(("step", "."))]
        assert left == ["step-00000400"], outcome  # the next save works and sweeps what was left
        if not order or order[-1] != state:
            order.append(state)
    assert len(order) == len(EXPECTED[scenario])  # each state in one run of points: no way back to an older one


def test_fault_11_a_kill_in_retention_leaves_what_the_rules_keep(reports: dict[str, Any]) -> None:
    """Of 128, 200 and 250 the rules `every = 200` and `log_spaced = 0` keep 128 and 200; the newest is 350."""
    outcomes = reports["rules"]["outcomes"]
    for outcome in outcomes:
        assert {128, 200} <= set(outcome["held"]) and set(outcome["held"]) & {250, 350}, outcome
    assert outcomes[0]["held"] == [250, 200, 128] and outcomes[-1]["held"] == [350, 200, 128]
    assert any(outcome["held"] == [350, 250, 200, 128] for outcome in outcomes), "the old one goes after the commit"


class Disk:
    """What a disk holds after power loss: contents that were fsynced, names whose directory was fsynced.

    A probe of the store sees names change; only a real `os.fsync` makes something durable here, as it is on the real disk
    in that moment. Directories are dictionaries of names; files are lists whose last entry is the durable content.
    """

    def __init__(self, real: Path, out: Path) -> None:
        self.real, self.out = real, out
        self.volatile: dict[str, Any] = {}
        self.durable: dict[int, dict[str, Any]] = {id(self.volatile): {}}
        self.pending: tuple[str, str] | None = None
        self.images: list[Path] = []
        self.operations: list[tuple[str, str]] = []
        self.gone: list[Any] = []  # kept, because an id must not be used again

    def __call__(self, operation: str, path: str) -> None:
        self.finish()
        self.photograph()
        self.operations.append((operation, path))
        self.pending = (operation, path)

    def fsync(self, descriptor: int) -> None:
        """Stands in for `os.fsync`."""
        self.finish()
        path = Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(self.real).as_posix()
        node = self.node("" if path == "." else path)
        if isinstance(node, list):
            node.append((self.real / path).read_bytes())
        else:
            self.durable[id(node)] = dict(node)

    def node(self, path: str) -> Any:
        found = self.volatile
        for part in path.split("/") if path else ():
            found = found[part]
        return found

    def finish(self) -> None:
        """Carries out the operation announced last."""
        if self.pending is None:
            return
        (operation, path), self.pending = self.pending, None
        if operation in ("rename", "link"):
            source, target = path.split(" -> ")
            parent, _, name = source.rpartition("/")
            moved = self.node(parent).pop(name) if operation == "rename" else self.node(source)
            path = target
        parent, _, name = path.rpartition("/")
        if operation in ("rename", "link"):
            self.node(parent)[name] = moved
        elif operation in ("mkdir", "create") and path:
            self.node(parent)[name] = {} if operation == "mkdir" else []
            self.durable.setdefault(id(self.node(path)), {})
        elif operation in ("unlink", "rmdir"):
            self.gone.append(self.node(parent).pop(name))

    def photograph(self) -> None:
        """Two disks that power loss may leave: names only as fsynced, and all names but contents only as fsynced."""
        for kind in ("strict", "eager"):
            image = self.out / f"{len(self.images):04d}-{kind}"
            self.lay_out(self.volatile, image, kind)
            self.images.append(image)

    def lay_out(self, node: Any, at: Path, kind: str) -> None:
        if isinstance(node, list):
            at.write_bytes(node[-1] if node else b"")
            return
        at.mkdir(parents=True)
        for name, child in (self.durable[id(node)] if kind == "strict" else node).items():
            self.lay_out(child, at / name, kind)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc to see what is synchronized")
def test_fault_16_power_loss_at_every_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "CHUNK_BYTES", 500)
    (tmp_path / "images").mkdir()
    disk = Disk(tmp_path / "real", tmp_path / "images")
    monkeypatch.setattr(os, "fsync", disk.fsync)
    store = LocalStore(tmp_path / "real", probe=disk)
    frozen = replace(whole({"model/frozen": torch.arange(300.0)})[0], frozen=True)
    save(store, [*whole(sample(1)), frozen], {"seed": 1}, 100, SingleProcessWorld(), keep=1)
    first = len(disk.images)
    save(store, [*whole(sample(2)), frozen], {"seed": 2}, 200, SingleProcessWorld(), keep=1)
    assert "link" in dict(disk.operations)
    disk.finish()
    disk.photograph()
    for (operation, path), following in itertools.pairwise(disk.operations):
        if operation == "rename":  # before anything builds on the new name
            assert following == ("fsync", ""), path
    states = []
    for image in disk.images:
        survivor = LocalStore(image)
        found = newest(survivor, SingleProcessWorld())
        if found is not None:
            live = blank({**sample(), "model/frozen": frozen.local})
            seed = load(survivor, found, whole(live), SingleProcessWorld())["seed"]
            assert (
                equal(live, {**sample(seed), "model/frozen": frozen.local}) and found.step == 100 * seed and found.skipped == ()
            ), image
        states.append(found.step if found else None)
        shutil.rmtree(image)
    assert states[-2:] == [200, 200]  # a save that returned is durable
    assert states[first : first + 2] == [100, 100] and None not in states[first:]
    for kind in (0, 1):  # and never goes back
        seen = [step or 0 for step in states[kind::2]]
        assert seen == sorted(seen)
    assert len(states) > 80
