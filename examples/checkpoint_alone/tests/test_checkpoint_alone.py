"""Two processes save, one loads, goes on as if nothing had happened, and refuses a damaged file."""

import importlib.util
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from forge_ckpt import LocalStore, SingleProcessWorld, load, pieces
from forge_core import CheckpointError

PROGRAM = Path(__file__).parents[1] / "sharded.py"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("sharded", PROGRAM)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two processes."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, PROGRAM, "save", folder], capture_output=True, text=True, timeout=200)
    if "terminate called without an active exception" in done.stderr:
        warnings.warn("threads of gloo aborted the exit after the save", stacklevel=1)
    elif done.returncode:
        raise AssertionError(done.stderr[-3000:])
    return folder


def test_one_process_goes_on_where_two_have_been(program, saved: Path) -> None:
    model, optimizer, steps = program.load_from(saved)
    program.train(model, optimizer, steps, steps + 2)
    plain, other = program.build()
    program.train(plain, other, 0, steps + 2)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], parameter, rtol=1e-5, atol=1e-7)


def test_a_damaged_byte_is_detected_before_a_weight_changes(program, saved: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "checkpoints"))
    model, optimizer = program.build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    files = [path for path in copy.rglob("*") if path.is_file()]
    shard = max(files, key=lambda path: path.stat().st_size)
    whole = shard.read_bytes()
    shard.chmod(0o644)
    shard.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    world = SingleProcessWorld()
    with pytest.raises(CheckpointError, match=shard.name):
        load(LocalStore(copy), shard.parent.name, pieces(model, optimizer, world=world, fresh=True), world)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(CheckpointError, match="no usable checkpoint"):  # `newest` leaves damaged ones out
        program.load_from(copy)
