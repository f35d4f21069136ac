"""`ckpt prune`: lists first, removes on request, spares what has a name, and leaves a directory that a job writes to alone."""

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ckpt.ranks import sample, whole
from forge_ckpt.checkpoint.fence import Fence, Owner
from forge_ckpt.checkpoint.retention import SECONDS, bury
from forge_ckpt.checkpoint.save import save
from forge_ckpt.commands import app
from forge_ckpt.format.names import OWNER, committed, marked, point
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld

STEPS = (100, 200, 300, 400, 500)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in STEPS:
        save(LocalStore(tmp_path / "c"), whole(sample(step)), {SECONDS: 36.0 * step}, step, SingleProcessWorld())
    return tmp_path / "c"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["prune", *map(str, arguments)])


def held(root: Path) -> list[int]:
    return [entry.step for entry in committed(path.name for path in root.iterdir())]


def owned_by(root: Path, process: int, host: str) -> None:
    (root / OWNER).write_text(json.dumps({"mark": "m", "host": host, "process": process}))


def test_it_only_lists_without_yes(root: Path) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    result = run(root, "--last", 2, "--every", 200)
    assert result.exit_code == 0 and "nothing was removed" in result.stdout
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert "stays    last 2, mark latest" in lines["step-00000500"] and "every 200 steps" in lines["step-00000200"]
    assert "goes     no rule keeps it" in lines["step-00000100"] and "goes" in lines["step-00000300"]
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_it_removes_what_it_listed(root: Path) -> None:
    listed = json.loads(run(root, "--every", 200, "--hours", 4, "--json").stdout)
    result = run(root, "--every", 200, "--hours", 4, "--yes", "--json")
    rows = json.loads(result.stdout)
    assert result.exit_code == 0 and held(root) == [500, 400, 300, 200, 100][:2] + [200, 100]
    assert [row["removed"] for row in rows] == [not row["kept_by"] for row in listed]


def test_every_rule_and_mark_and_step_is_heard(root: Path) -> None:
    point(LocalStore(root), "best", "step-00000100")
    for arguments, left in (
        (("--last", 4), [500, 400, 300, 200, 100]),
        (("--last", 3, "--spare", 200), [500, 400, 300, 200, 100]),
        (("--hours", 1.5, "--spare", 200), [500, 300, 200, 100]),
        (("--log-spaced", 100), [500, 300, 200, 100]),
        (("--last", 1), [500, 100]),
    ):
        assert run(root, *arguments, "--yes").exit_code == 0
        assert held(root) == left, arguments
    assert marked(LocalStore(root)) == {"best": "step-00000100", "latest": "step-00000500"}


def test_fault_11_what_no_verified_one_is_newer_than_stays(root: Path) -> None:
    for step in (400, 500):
        file = root / f"step-{step:08d}/rank-00000.bin"
        file.write_bytes(b"\7" + file.read_bytes()[1:])
    result = run(root, "--last", 1, "--every", 200, "--yes")
    assert result.exit_code == 1 and held(root) == [500, 400, 300, 200]
    assert "could be verified" in next(line for line in result.stdout.splitlines() if line.startswith("step-00000300"))
    assert "removed" in next(line for line in result.stdout.splitlines() if line.startswith("step-00000100"))


def test_fault_14_a_directory_that_a_job_writes_to_is_left_alone(root: Path) -> None:
    Fence.take(LocalStore(root), SingleProcessWorld())
    result = run(root, "--last", 1, "--yes")
    assert result.exit_code == 2 and f"process {os.getpid()} on {socket.gethostname()} writes to" in result.output
    assert "--ended" not in result.output and run(root, "--last", 1, "--yes", "--ended").exit_code == 2
    assert held(root) == sorted(STEPS, reverse=True)
    assert run(root, "--last", 1).exit_code == 0, "looking is allowed"


def test_fault_14_a_job_of_another_host_is_asked_about(root: Path) -> None:
    owned_by(root, 17, "elsewhere")
    result = run(root, "--last", 4, "--yes")
    assert result.exit_code == 2 and "pass --ended once that job on elsewhere has ended" in result.output
    assert run(root, "--last", 4, "--yes", "--ended").exit_code == 0 and held(root) == [500, 400, 300, 200]
    gone = subprocess.Popen(["true"])
    gone.wait()
    owned_by(root, gone.pid, socket.gethostname())
    assert run(root, "--last", 3, "--yes").exit_code == 0 and held(root) == [500, 400, 300]
    (root / OWNER).write_bytes(b"{")
    assert "is damaged" in run(root, "--last", 1, "--yes").output and held(root) == [500, 400, 300]


def test_fault_14_a_job_that_starts_meanwhile_ends_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_ckpt.checkpoint import retention

    def buried(store: Any, name: str) -> None:
        bury(store, name)
        owned_by(root, os.getpid(), socket.gethostname())

    monkeypatch.setattr(retention, "bury", buried)
    result = run(root, "--last", 1, "--yes")
    assert result.exit_code == 2 and "a job has started" in result.output and held(root) == [500, 300, 200, 100]


def test_an_owner_of_another_user_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(process: int, signal: int) -> None:
        raise PermissionError

    owner = Owner("m", socket.gethostname(), 1)
    monkeypatch.setattr(os, "kill", refused)
    assert owner.has_ended() is False and Owner("m", "elsewhere", 1).has_ended() is None


def test_leftovers_of_an_interrupted_removal_go(root: Path) -> None:
    (root / ".removed-step-00000050").mkdir()
    (root / ".removed-step-00000050/rank-00000.bin").write_bytes(b"half")
    assert run(root, "--last", 9).exit_code == 0 and (root / ".removed-step-00000050").is_dir()
    assert run(root, "--last", 9, "--yes").exit_code == 0 and not (root / ".removed-step-00000050").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("{root}",), "no rule says which checkpoints to keep"),
        (("{root}/step-00000100", "--last", "1"), "is one checkpoint"),
        (("nowhere", "--last", "1"), "not a directory"),
    ],
)
def test_what_it_cannot_do_is_refused(root: Path, arguments: tuple[str, ...], why: str) -> None:
    result = run(*(argument.format(root=root) for argument in arguments), "--yes")
    assert result.exit_code == 2 and why in result.output and held(root) == sorted(STEPS, reverse=True)


def test_marks_are_not_other_files(root: Path) -> None:
    (root / "tokenizer").mkdir()
    (root / "notes").write_text("step-1")
    (root / "long").write_text("x" * 9999)

    class Careful(LocalStore):
        def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
            assert path != "long", "a large file is not read as a mark"
            return super().read(path, offset, length)

    assert marked(Careful(root)) == {"latest": "step-00000500"}
