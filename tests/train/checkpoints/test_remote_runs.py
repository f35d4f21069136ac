"""Runs of two ranks whose checkpoints are behind a URL: killed before a commit, resumed, and the bits of a run on a disk."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_ckpt.checkpoint.locate import locate
from forge_core.errors import ForgeError
from forge_train.commands.weights import convert
from harness.s3 import BUCKET, Server, s3_server
from train.runs import TINY, prepared

URL = f"s3://{BUCKET}/runs"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as made:
        yield made


def begun(folder: Path, *more: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "tiny.toml").write_text(TINY)
    command = [sys.executable, "-m", "forge_train", "run", "tiny.toml", "--processes=2", *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def files(where: str | Path) -> dict[str, bytes]:
    """Tensor files of the newest checkpoint."""
    place = locate(where)
    names = [name for name in place.store.list(place.name) if name.endswith(".bin")]
    return {name: place.store.read(f"{place.name}/{name}") for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_fault_1_and_17_a_run_that_is_killed_between_data_and_commit_goes_on_from_s3(
    server: Server, tmp_path: Path, mode: str
) -> None:
    here = f"{URL}/{mode}"
    remote = ("--checkpoint.store.name=remote", f"--checkpoint.store.url={here}", f"--checkpoint.mode={mode}")
    run, commits = begun(tmp_path / "remote", *remote), []

    def kill(method: str, path: str) -> int | None:
        if method == "PUT" and path.endswith("/names/step-00000006"):
            commits.append(path)
            os.killpg(run.pid, signal.SIGKILL)
            return 503
        return None

    server.before = kill
    run.communicate(timeout=200)
    server.before = lambda method, path: None
    assert commits, "it had sent its data"
    store = locate(f"{here}/tiny").store
    drafts = [name for name in store.list() if name.startswith(".saving-")]
    assert [name for name in store.list() if name.startswith("step")] == ["step-00000003"]
    assert [store.list(name) for name in drafts] == [["manifest.json", "rank-00000.bin", "rank-00001.bin"]]
    again = begun(tmp_path / "remote", *remote)
    said, _ = again.communicate(timeout=200)
    assert again.returncode == 0 and f"resuming after step 3 from {here}/tiny/checkpoints" in said, said
    names = [name for name in store.list() if "step" in name]
    assert names == ["step-00000003", "step-00000006", "step-00000008"], "the draft was swept"
    assert not (tmp_path / "remote/runs/tiny/checkpoints").exists()

    plain = begun(tmp_path / "local")
    said, _ = plain.communicate(timeout=200)
    assert plain.returncode == 0, said
    assert files(f"{here}/tiny") == files(tmp_path / "local/runs/tiny") and len(files(f"{here}/tiny")) == 2


def recipe(folder: Path) -> Path:
    (folder / "tiny.toml").write_text(TINY)
    return folder / "tiny.toml"


def test_a_run_goes_on_from_a_url_and_fresh_is_refused_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from forge_train.directory import prepare_directory
    from forge_train.run.loop import fit

    folder = f"memory://{tmp_path.name}"
    given = [f"--job.dir={tmp_path / 'run'}", "--checkpoint.store.name=remote", f"--checkpoint.store.url={folder}"]
    run, _ = prepared(recipe(tmp_path), [*given, "--train.stop_at=4"])
    fit(run)
    run.saves.close()
    again, _ = prepared(recipe(tmp_path), given)
    assert again.state.step == 4 and not (tmp_path / "run/checkpoints").exists()
    again.saves.close()
    place = locate(f"{folder}/run")
    assert (place.name, place.store.root) == ("step-00000004", f"{folder}/run/checkpoints")
    with pytest.raises(ForgeError, match=rf"--fresh moves .* cannot move the checkpoints in {folder}/run/checkpoints.*job\.name"):
        prepare_directory(tmp_path / "run", place.store, True, print)
    convert(f"{folder}/run", str(tmp_path / "plain"), "forge", "forge")
    assert locate(tmp_path / "plain").name == "step-00000004"
    with pytest.raises(ForgeError, match="weights can only be written to a local folder"):
        convert(str(tmp_path / "plain"), f"{folder}/other", "forge", "forge")
    with pytest.raises(ForgeError, match="format 'hf' can only be read from a local folder"):
        convert(f"{folder}/run", str(tmp_path / "more"), "hf", "forge")
