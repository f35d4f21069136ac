"""Retention on a store: which of damaged and sound checkpoints go, by what they record, and never the last good one."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt.ranks import sample, whole
from forge_ckpt.checkpoint.fence import Fence
from forge_ckpt.checkpoint.read import newest
from forge_ckpt.checkpoint.retention import SECONDS, RetentionPolicy, judged, retain
from forge_ckpt.checkpoint.save import save
from forge_ckpt.format.codec import decode, meta_of
from forge_ckpt.format.names import MANIFEST, committed
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError, Damaged, Superseded

WORLD = SingleProcessWorld()


def saved(root: Path, *steps: int, **more: Any) -> LocalStore:
    store = LocalStore(root)
    for step in steps:
        save(store, whole(sample(step)), {SECONDS: 9.0 * step}, step, WORLD, **more)
    return store


def held(store: LocalStore) -> list[int]:
    return [entry.step for entry in committed(store.list())]


def damage(root: Path, step: int) -> None:
    file = root / f"step-{step:08d}/rank-00000.bin"
    data = bytearray(file.read_bytes())
    data[3] ^= 4
    file.write_bytes(data)


def test_fault_11_retention_never_deletes_the_last_good(tmp_path: Path) -> None:
    """A rule keeps an old one that is sound; the newest that stays is damaged, and the newest good one is kept by no rule."""
    store = saved(tmp_path, 100, 150, 190, 195)
    damage(tmp_path, 195)
    assert retain(store, WORLD, RetentionPolicy(last=1, every=100)) == []
    assert held(store) == [195, 190, 150, 100]
    found = newest(store, WORLD)
    assert found is not None and found.step == 190
    saved(tmp_path, 210, keep=RetentionPolicy(last=1, every=100))
    assert held(store) == [210, 100], "a newer one that is verified lets them go"


def test_fault_11_what_goes_is_older_than_one_that_is_verified(tmp_path: Path) -> None:
    store = saved(tmp_path, 50, 100, 150, 190, 195)
    damage(tmp_path, 195)
    assert retain(store, WORLD, 1, spare=(150,)) == ["step-00000100", "step-00000050"]
    assert held(store) == [195, 190, 150]


def test_fault_11_only_damaged_ones_are_newer(tmp_path: Path) -> None:
    store = saved(tmp_path, 10, 20, 30, 40)
    for step in (20, 30, 40):
        damage(tmp_path, step)
    for keep in (1, 2, 3, RetentionPolicy(last=1, every=20, log_spaced=0, hours=0.01)):
        assert retain(store, WORLD, keep) == []
    found = newest(store, WORLD)
    assert found is not None and found.step == 10


def test_fault_13_no_clock_of_a_node_orders_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks that are a day off while they save, and times of files in the wrong order: the same checkpoints stay."""
    wall, kept = time.time, []
    for name, skews in {"right": (0, 0, 0, 0, 0), "wrong": (86400, -86400, 0, 86400, -86400)}.items():
        store = LocalStore(tmp_path / name)
        for step, skew in zip((100, 300, 500, 700, 900), skews, strict=True):
            monkeypatch.setattr(time, "time", lambda skew=skew: wall() + skew)
            saved(tmp_path / name, step)
            os.utime(tmp_path / name / f"step-{step:08d}", (wall() + skew, wall() + skew))
        assert len(retain(store, WORLD, RetentionPolicy(last=1, hours=1.0))) == 2
        kept.append(held(store))
    assert kept == [[900, 500, 100]] * 2  # 900 s, 4500 s and 8100 s of training


@pytest.mark.parametrize("recorded", [None, "9", True, -1.0, [], 1e999])
def test_a_time_that_is_not_one_counts_as_none(tmp_path: Path, recorded: Any) -> None:
    store = saved(tmp_path, 5, 6)
    if recorded != 1e999:
        save(store, whole(sample(7)), {SECONDS: recorded}, 7, WORLD)
    else:
        save(store, whole(sample(7)), {}, 7, WORLD)
    saved(tmp_path, 8)
    assert [verdict.entry.step for verdict in judged(store, RetentionPolicy(last=1, hours=1.0)) if verdict.kept_by] == [8, 5]


def test_a_manifest_that_cannot_be_read_now_stops_retention_by_hours(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)

    class Unreadable(LocalStore):
        def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
            if path.startswith("step-00000002"):
                raise OSError(5, "Input/output error")
            return super().read(path, offset, length)

    with pytest.raises(CheckpointError, match="Input/output error"):
        retain(Unreadable(tmp_path), WORLD, RetentionPolicy(last=1, hours=1.0))
    (tmp_path / "step-00000002" / MANIFEST).write_bytes(b"")  # one that is damaged has no time
    found = judged(LocalStore(tmp_path), RetentionPolicy(last=1, hours=1.0))
    assert [verdict.entry.step for verdict in found if verdict.kept_by] == [3, 1]


def test_a_job_that_is_overtaken_removes_nothing_more(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3, 4)
    fence = Fence.take(store, WORLD)
    calls = []

    def may() -> None:
        calls.append(1)
        if len(calls) == 2:
            Fence.take(LocalStore(tmp_path), WORLD)
        fence.may_write()

    with pytest.raises(CheckpointError, match="another job"):
        retain(store, WORLD, 1, may=may)
    assert held(store) == [4, 2, 1]
    assert issubclass(Superseded, CheckpointError)


def test_the_facts_of_a_manifest_are_those_of_a_whole_reading(tmp_path: Path) -> None:
    meta = {"meta": {"meta": ',"meta":{}'}, 'a,"meta":': 1, "text": 'é,"meta":{"x":1}', "list": [1.5, None]}
    save(LocalStore(tmp_path), whole({',"meta":{}': sample()["optimizer/step"]}), meta, 1, WORLD)
    data = (tmp_path / "step-00000001" / MANIFEST).read_bytes()
    assert meta_of(data) == decode(data).meta == meta
    for broken in (b"", data[:-5], data.replace(b"1.5", b"1.6")):
        with pytest.raises(Damaged):
            meta_of(broken)


@pytest.mark.parametrize("body", ["{}", '{"a":1,"meta":[]}', '{"a":1,"meta":' + "[" * 5000, '{"a":1,"meta":{"x":1,"x":2}}'])
def test_a_sealed_manifest_that_was_made_to_harm_has_no_facts(body: str) -> None:
    import xxhash

    rest = b'"manifest": ' + body.encode() + b"}\n"
    data = b'{"seal": "' + xxhash.xxh3_128_hexdigest(rest).encode() + b'",\n' + rest
    with pytest.raises(Damaged):
        meta_of(data)
