"""Checkpoints of every format that Forge has written are kept here, and load: in one process, and on ranks that cut otherwise.

One is added when the format gets a version, by the code before that: `save` of `state.full()` by two ranks, each with half of the
rows. None is ever written again.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import xxhash

from ckpt.golden.state import META, full
from ckpt.ranks import blank, equal, on_ranks, shards, whole
from forge_ckpt.checkpoint.read import load, newest
from forge_ckpt.format import codec
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import NewerFormat

HERE = Path(__file__).parent
KEPT = sorted(path.name for path in HERE.glob("version-*"))


@pytest.fixture
def store(tmp_path: Path, request: pytest.FixtureRequest) -> LocalStore:
    """A copy: of this user, and without a way to change what is kept."""
    return LocalStore(shutil.copytree(HERE / request.param, tmp_path / "c"))


@pytest.mark.parametrize("store", KEPT, indirect=True)
def test_fault_25_a_kept_checkpoint_loads_in_one_process(store: LocalStore) -> None:
    found = newest(store, SingleProcessWorld())
    assert found is not None and (found.step, found.skipped, found.meta) == (7, (), META)
    live = blank(full())
    assert load(store, found, whole(live), SingleProcessWorld()) == META
    assert equal(live, full())


@pytest.mark.parametrize("store", KEPT, indirect=True)
def test_fault_25_a_kept_checkpoint_loads_on_other_ranks(store: LocalStore) -> None:
    def loading(world):
        mine = [shards(name, torch.zeros_like(t), 1, 3)[world.rank] for name, t in full().items() if t.dim()]
        load(store, 7, mine, world, select=lambda name: name != "optimizer/step/all")
        return all(torch.equal(piece.local, shards(piece.name, full()[piece.name], 1, 3)[world.rank].local) for piece in mine)

    assert on_ranks(3, loading) == [True] * 3


def test_fault_25_every_version_up_to_the_one_that_is_written_is_kept(tmp_path: Path) -> None:
    written = {json.loads((HERE / name / "step-00000007/manifest.json").read_text())["manifest"]["version"] for name in KEPT}
    assert written == set(range(1, codec.VERSION + 1)) and [f"version-{version}" for version in sorted(written)] == KEPT


@pytest.mark.parametrize("store", KEPT[-1:], indirect=True)
def test_fault_25_later_versions_are_refused_by_number_and_cost_no_other_checkpoint(store: LocalStore) -> None:
    """Also where an earlier checkpoint is at hand: going back to it in silence would lose what the later version has trained."""
    later = store.root / "step-00000009"
    shutil.copytree(store.root / "step-00000007", later)
    body = json.loads((later / "manifest.json").read_text())["manifest"]
    rest = (
        b'"manifest": ' + json.dumps(body | {"version": codec.VERSION + 8, "step": 9, "what": "only they know"}).encode() + b"}\n"
    )
    (later / "manifest.json").write_bytes(b'{"seal": "' + xxhash.xxh3_128_hexdigest(rest).encode() + b'",\n' + rest)
    before = {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()}
    for policy in ("auto", "require", 9):
        with pytest.raises(NewerFormat, match=f"step-00000009.*format version {codec.VERSION + 8}"):
            newest(store, SingleProcessWorld(), policy)
    assert {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()} == before
    found = newest(store, SingleProcessWorld(), 7)
    assert found is not None and found.meta == META
