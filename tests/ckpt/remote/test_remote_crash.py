"""kill -9 before every request that changes something in object storage: the old checkpoint or the new one, whole."""

from collections.abc import Iterator

import pytest

from ckpt.crash_driver import SCENARIOS, is_whole
from ckpt.ranks import blank, digest, sample, whole
from ckpt.remote.dying import Dying, Killed, dying, objects, put_back
from ckpt.test_crash import EXPECTED
from forge_ckpt.checkpoint.fence import Fence
from forge_ckpt.checkpoint.read import load, newest
from forge_ckpt.checkpoint.retention import RetentionPolicy
from forge_ckpt.checkpoint.save import save
from forge_ckpt.format import tensor_bytes as layout
from forge_ckpt.format.names import committed
from forge_ckpt.store.remote import RemoteStore
from forge_ckpt.world import SingleProcessWorld

URL = "dying://bucket/run/checkpoints"
ALONE = SingleProcessWorld()


@pytest.fixture(autouse=True)
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Dying]]:
    monkeypatch.setattr(layout, "CHUNK_BYTES", 900)  # several parts of one tensor
    with dying() as made:
        yield made


def write(step: int, seed: int, keep: int | RetentionPolicy) -> None:
    save(RemoteStore(URL, pause=0.0), whole(sample(seed)), {"seed": seed}, step, ALONE, keep=keep)


@pytest.mark.parametrize("torn", [False, True], ids=["atomic", "torn"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_fault_1_and_6_kill_before_every_request(system: type[Dying], scenario: str, torn: bool) -> None:
    before, (step, seed), keep = SCENARIOS[scenario]
    for old_step, old_seed in before:
        write(old_step, old_seed, 0)
    start, order = objects(), []
    digests = {seed: digest(list(sample(seed).values())) for seed in (1, 2, 3)}
    for point in range(1000):
        put_back(start)
        system.at, system.done, system.torn = point, 0, torn
        try:
            write(step, seed, keep)
            ended = True
        except Killed:
            ended = False
        system.at = None
        store = RemoteStore(URL)
        found = newest(store, ALONE)
        state = (None, None)
        assert all(is_whole(store, entry.name) for entry in committed(store.list())), point
        if found is not None:
            live = blank(sample())
            meta = load(store, found, whole(live), ALONE)
            state = (found.step, meta["seed"])
            assert digest(list(live.values())) == digests[meta["seed"]] and found.skipped == (), point
        assert state in EXPECTED[scenario], point
        held = {entry.step for entry in committed(store.list())}
        assert scenario != "rules" or ({128, 200} <= held and held & {250, 350}), point  # fault 11
        if not order or order[-1] != state:
            order.append(state)
        write(400, 4, 1)
        assert [name for name in RemoteStore(URL).list() if name.startswith(("step", "."))] == ["step-00000400"], point
        assert left_over() == set(), point
        if ended:
            break
    assert ended and point > 15
    assert len(order) == len(EXPECTED[scenario]), "no way back to an older one"


def left_over() -> set[str]:
    """Directories of data that no name leads to."""
    names = {path.split("/names/")[1]: data.decode().strip() for path, data in objects().items() if "/names/" in path}
    return {path.split("/data/")[1].partition("/")[0] for path in objects() if "/data/" in path} - set(names.values())


def test_fault_6_and_11_two_names_of_the_same_files(system: type[Dying]) -> None:
    """A job dies after a new name and before the old one has gone: removing one of them must not remove what the other has."""
    write(1, 1, 0)
    store = RemoteStore(URL)
    system.fails = staticmethod(lambda operation, path: stop() if operation == "delete" else None)
    with pytest.raises(Killed):
        store.rename("step-00000001", ".removed-step-00000001")
    system.fails = staticmethod(lambda operation, path: None)
    assert {"step-00000001", ".removed-step-00000001"} <= set(store.list())
    store.remove(".removed-step-00000001")
    assert ".removed-step-00000001" not in store.list() and is_whole(store, "step-00000001")
    store.remove("step-00000001")
    assert [path for path in objects() if "/data/" in path or "/names/" in path] == []


def stop() -> None:
    raise Killed


def test_fault_14_an_older_job_changes_nothing_in_object_storage() -> None:
    older = Fence.take(RemoteStore(URL), ALONE)
    save(older.store, whole(sample(1)), {}, 5, ALONE, may=older.may_write)
    newer = Fence.take(RemoteStore(URL), ALONE)
    before = objects()
    assert older.lost() and not newer.lost()
    with pytest.raises(Exception, match="rank 0: another job, process"):
        save(older.store, whole(sample(2)), {}, 6, ALONE, may=older.may_write)
    assert objects() == before
    assert save(newer.store, whole(sample(2)), {}, 6, ALONE, may=newer.may_write) == "step-00000006"
