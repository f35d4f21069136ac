"""Two jobs on one store: the newer one writes, the older one changes nothing more and says why."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.ranks import ThreadRank, on_ranks, whole
from forge_ckpt.checkpoint.fence import Fence
from forge_ckpt.checkpoint.save import save
from forge_ckpt.format.names import OWNER
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError, Superseded

PIECES = whole({"w": torch.arange(6.0)})


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def saved(fence: Fence, step: int, store: LocalStore | None = None) -> str:
    return save(store or fence.store, PIECES, {}, step, SingleProcessWorld(), may=fence.may_write)


def test_fault_14_the_newest_owns_the_store(tmp_path: Path) -> None:
    older = Fence.take(LocalStore(tmp_path), SingleProcessWorld())
    older.check()
    assert not older.lost()
    newer = Fence.take(LocalStore(tmp_path), SingleProcessWorld())
    newer.check()
    assert older.lost()
    assert not newer.lost()
    with pytest.raises(Superseded, match=r"another job, process \d+ on .*job\.name"):
        older.check()
    assert Superseded.exit_code == 4


def test_fault_14_an_older_job_changes_nothing(tmp_path: Path) -> None:
    """Not even what looks like left-overs: it is what the newer job is writing."""
    older = Fence.take(LocalStore(tmp_path), SingleProcessWorld())
    saved(older, 5)
    newer = Fence.take(LocalStore(tmp_path), SingleProcessWorld())
    saved(newer, 3)
    (tmp_path / ".saving-step-00000004-of-the-newer").mkdir()
    (tmp_path / ".saving-step-00000004-of-the-newer" / "rank-00000.bin").write_bytes(b"half")
    before = files(tmp_path)
    with pytest.raises(CheckpointError, match="the checkpoint of step 6 was not saved: rank 0: another job"):
        saved(older, 6)
    assert files(tmp_path) == before
    assert saved(newer, 4) == "step-00000004"


def test_fault_14_a_job_that_is_overtaken_while_it_writes_does_not_commit(tmp_path: Path) -> None:
    def takes(operation: str, path: str) -> None:
        if operation == "create" and path.endswith("manifest.json"):
            Fence.take(LocalStore(tmp_path), SingleProcessWorld())

    older = Fence.take(LocalStore(tmp_path), SingleProcessWorld())
    with pytest.raises(CheckpointError, match="another job"):
        saved(older, 1, LocalStore(tmp_path, probe=takes))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["forge-checkpoints", OWNER]


def test_removed_checkpoints_end_a_job_too(tmp_path: Path) -> None:
    fence = Fence.take(LocalStore(tmp_path), SingleProcessWorld())
    (tmp_path / OWNER).unlink()
    assert fence.lost()
    with pytest.raises(Superseded, match="--fresh"):
        fence.check()


@pytest.mark.parametrize("content", [b"", b"\xff{", b"[]", b"3", b'"mark"', b"null", b"{}"], ids=repr)
def test_a_mark_that_cannot_be_read_ends_no_training_but_a_save(tmp_path: Path, content: bytes) -> None:
    fence = Fence.take(LocalStore(tmp_path), SingleProcessWorld())
    (tmp_path / OWNER).write_bytes(content)
    assert not fence.lost()
    with pytest.raises(CheckpointError, match="is damaged"):
        saved(fence, 1)


def test_fault_14_all_ranks_learn_of_it(tmp_path: Path) -> None:
    def older(world: ThreadRank) -> Any:
        fence = Fence.take(LocalStore(tmp_path), world)
        if world.rank == 0:
            Fence.take(LocalStore(tmp_path), SingleProcessWorld())
        return fence.mark, fence.lost(), _raised(fence)

    outcomes = on_ranks(3, older)
    assert len({mark for mark, _, _ in outcomes}) == 1
    assert [lost for _, lost, _ in outcomes] == [True, False, False], "rank 0 looks"
    assert {error for _, _, error in outcomes} == {Superseded}


def _raised(fence: Fence) -> type[Exception] | None:
    try:
        fence.check()
    except CheckpointError as cause:
        return type(cause)
    return None
