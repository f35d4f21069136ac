"""A checkpoint of a run that an earlier Forge has trained goes on: with the losses and weights of a run from the start."""

import json
import logging
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forge_train.run.loop import fit
from train.runs import prepared

GOLDEN = Path(__file__).parent / "golden"
"""`checkpoints/` is what `forge-train run golden.toml --train.stop_at=3` left before saves in the background came."""

GOLDEN_MOE = Path(__file__).parent / "golden_moe"
"""A run directory with experts, Muon, a mixture and hooks that have states, before components, hooks and packages were renamed.
`expected.json` has the rows of tokens and the losses of steps 4 to 6, as that version trained them."""


def trained(directory: Path) -> tuple[int, list[float], dict[str, torch.Tensor]]:
    """Where the run began, its losses, and its weights and optimizer state."""
    run, recorder = prepared(GOLDEN / "golden.toml", [f"--job.dir={directory}"])
    begun = run.state.step
    fit(run)
    tensors = dict(run.model.tensors())
    for state, named in run.optimizer.state().items():
        tensors |= {f"{state}/{name}": tensor for name, tensor in named.items()}
    return begun, recorder.losses, {name: tensor.detach().clone() for name, tensor in tensors.items()}


def test_fault_25_a_run_of_an_earlier_version_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(GOLDEN / "checkpoints", tmp_path / "old" / "checkpoints")
    with caplog.at_level(logging.WARNING):
        begun, losses, weights = trained(tmp_path / "old")
    assert caplog.messages == []
    none, expected, whole = trained(tmp_path / "new")
    assert (begun, none) == (3, 0)
    assert losses == pytest.approx(expected[3:], rel=1e-4), "the machine that trained the first steps may have rounded otherwise"
    assert weights.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-2, atol=1e-4)
    assert (tmp_path / "old" / "checkpoints" / "step-00000006").is_dir()


def stored_tensors(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of a checkpoint of one rank: the file has the bytes of one tensor after the other, as the manifest lists
    them."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())["manifest"]
    content, offset = bytearray((checkpoint / "rank-00000.bin").read_bytes()), 0
    for tensor in manifest["tensors"]:
        dtype, count = getattr(torch, tensor["dtype"]), math.prod(tensor["shape"])
        yield tensor["name"], torch.frombuffer(content, dtype=dtype, count=count, offset=offset).reshape(tensor["shape"])
        offset += count * dtype.itemsize
    assert offset == len(content)


def test_a_run_of_before_the_restructuring_resumes_bit_for_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(GOLDEN_MOE, tmp_path / "run")
    with caplog.at_level(logging.INFO):
        run, recorder = prepared(GOLDEN_MOE / "golden.toml", [f"--job.dir={tmp_path / 'run'}"])
    assert run.state.step == 3 and run.state.tokens == 96
    told = next(line for line in caplog.messages if line.startswith("resuming after step 3"))
    assert [line.split()[0] for line in told.splitlines()[1:]] == ["job.dir", "train.stop_at"]
    assert not any("dropped" in line or "dist" in line for line in caplog.messages)
    with run.saves.content.pieces() as pieces:
        restored = {piece.name: piece.local.clone() for piece in pieces}
    stored = dict(stored_tensors(tmp_path / "run" / "checkpoints" / "step-00000003-g2"))
    assert restored.keys() == stored.keys() and any(name.startswith("ema/") for name in stored)
    for name, tensor in stored.items():
        assert torch.equal(restored[name], tensor), name
    fit(run)
    expected = json.loads((GOLDEN_MOE / "expected.json").read_text())
    assert recorder.samples == expected["samples"]
    assert recorder.losses == pytest.approx(expected["losses"], rel=1e-4), "processors round differently"
    assert run.state.cursor == expected["cursor"]
