"""Retention: what each rule keeps, against definitions written out here; on a store, damaged checkpoints and the last good."""

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from ckpt.ranks import sample, whole
from forge_ckpt.checkpoint.fence import Fence
from forge_ckpt.checkpoint.read import newest
from forge_ckpt.checkpoint.retention import SECONDS, RetentionPolicy, judge, judged, retain
from forge_ckpt.checkpoint.save import save
from forge_ckpt.format.codec import decode, meta_of
from forge_ckpt.format.names import MANIFEST, Committed, committed, step_name
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError, Damaged, Superseded

STEPS = some.lists(some.integers(0, 5000), min_size=1, max_size=40, unique=True).map(sorted)
RULES = some.fixed_dictionaries(
    {
        "last": some.integers(1, 4),
        "every": some.sampled_from([0, 1, 7, 100]),
        "log_spaced": some.none() | some.integers(0, 300),
        "hours": some.sampled_from([0.0, 0.5, 3.0]),
    }
)


def entries(steps: list[int]) -> list[Committed]:
    return committed(map(step_name, steps))


def seconds(steps: list[int]) -> dict[str, float]:
    """Of a run with 9 s a step."""
    return {step_name(step): 9.0 * step for step in steps}


def kept(steps: list[int], policy: RetentionPolicy, **more: Any) -> set[int]:
    return {found.entry.step for found in judge(entries(steps), policy, seconds(steps), **more) if found.kept_by}


def pruned_on_the_way(steps: list[int], policy: RetentionPolicy) -> set[int]:
    """What is left when a run prunes after each save."""
    held: list[int] = []
    for step in steps:
        held = sorted(kept([*held, step], policy))
    return set(held)


def by_definition(steps: list[int], rules: dict[str, Any]) -> set[int]:
    wanted = set(steps[-rules["last"] :])
    if rules["every"]:
        wanted |= {step for step in steps if step % rules["every"] == 0}
    if rules["log_spaced"] is not None:
        starts = [rules["log_spaced"], *(rules["log_spaced"] + 2**k for k in range(14))]
        for low, high in zip(starts, [*starts[1:], math.inf], strict=True):
            wanted |= set([step for step in steps if low <= step < high][:1])
    if rules["hours"]:
        for window in range(int(5000 * 9 / 3600 / rules["hours"]) + 1):
            low, high = window * rules["hours"] * 3600, (window + 1) * rules["hours"] * 3600
            wanted |= set([step for step in steps if low <= 9 * step < high][:1])
    return wanted


@settings(max_examples=150, deadline=None)
@given(STEPS, RULES)
def test_rules_keep_what_their_definitions_say_and_add_up(steps: list[int], rules: dict[str, Any]) -> None:
    assert kept(steps, RetentionPolicy(**rules)) == by_definition(steps, rules)


@settings(max_examples=100, deadline=None)
@given(STEPS, RULES)
def test_one_at_a_time_or_all_at_once_is_the_same(steps: list[int], rules: dict[str, Any]) -> None:
    rules["last"] = 1  # a run that keeps more has pruned what was among the last ones then; the end is the same
    assert pruned_on_the_way(steps, RetentionPolicy(**rules)) == kept(steps, RetentionPolicy(**rules))


@settings(max_examples=150, deadline=None)
@given(STEPS, some.integers(0, 300))
def test_log_spaced_is_few_and_leaves_no_hole(steps: list[int], start: int) -> None:
    left = pruned_on_the_way(steps, RetentionPolicy(last=1, log_spaced=start))
    reach = max(2, steps[-1])
    assert len(left) <= 1 + 2 + math.log2(reach)  # one is the newest
    for step in steps:
        if step > start:
            assert any(start + (step - start) / 2 < found <= step for found in left), step
    if start in steps:
        assert start in left


def test_log_spaced_of_a_run_that_saves_each_step() -> None:
    assert pruned_on_the_way(list(range(1001)), RetentionPolicy(last=1, log_spaced=0)) == {
        0,
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        256,
        512,
        1000,
    }
    assert len(kept(list(range(100_000)), RetentionPolicy(last=1, log_spaced=0))) == 19


def test_nothing_goes_without_a_limit() -> None:
    assert kept([1, 2, 3], RetentionPolicy()) == {1, 2, 3} == kept([1, 2, 3], RetentionPolicy(every=100))


def test_of_a_step_the_last_generation_counts() -> None:
    found = judge(committed(["step-00000002", "step-00000001-g2", "step-00000001"]), RetentionPolicy(last=2))
    assert [(verdict.entry.name, verdict.kept_by, verdict.why) for verdict in found[1:]] == [
        ("step-00000001-g2", ("last 2",), "no rule keeps it"),
        ("step-00000001", (), "replaced by step-00000001-g2"),
    ]


def test_verdicts_name_every_rule() -> None:
    policy = RetentionPolicy(last=1, every=64, log_spaced=0, hours=0.25)
    found = judge(entries([64, 100]), policy, seconds([64, 100]), spare={64: "mark best"})
    assert found[0].kept_by == ("last 1", "first after 0.25 h of training")
    assert found[1].kept_by == ("every 64 steps", "first from step 64", "first after 0 h of training", "mark best")
    assert judge(entries([1, 2]), RetentionPolicy(last=1), spare=(1,))[1].kept_by == ("spared",)


def test_a_checkpoint_without_a_time_has_no_window() -> None:
    names = [step_name(step) for step in (1, 2, 3)]
    found = judge(entries([1, 2, 3]), RetentionPolicy(last=1, hours=1.0), {names[1]: 10.0})
    assert [verdict.entry.step for verdict in found if verdict.kept_by] == [3, 2]


@pytest.mark.parametrize("rules", [{"last": -1}, {"every": -1}, {"log_spaced": -1}, {"hours": -1.0}, {"hours": math.nan}])
def test_rules_are_not_negative(rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not be negative"):
        RetentionPolicy(**rules)


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
