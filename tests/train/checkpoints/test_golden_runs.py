"""A checkpoint of a run that an earlier Forge has trained goes on: with the losses and weights of a run from the start."""

import logging
import shutil
from pathlib import Path

import pytest
import torch

from forge_train.run.loop import fit
from train.runs import prepared

GOLDEN = Path(__file__).parent / "golden"
"""`checkpoints/` is what `forge-train run golden.toml --train.stop_at=3` left before saves in the background came."""


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
