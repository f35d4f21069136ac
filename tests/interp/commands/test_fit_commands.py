"""`forge-train lens` and `sae`: what they write is what they said."""

from pathlib import Path

import pytest
import torch

from forge_core.registry import Registry
from forge_interp.methods.lens import TunedLens
from forge_interp.methods.sae import SAE, quality
from forge_interp.store import ActivationStore
from forge_train.inference.stored import load_model, open_weights
from interp.commands.commands import TEXT, refused, said


def test_a_lens_of_a_checkpoint_is_written(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lens.safetensors"
    options = ("--text", trained / "text.txt", "--length", 20, "--steps", 60, "--lr", 0.003)
    found = said(capsys, "lens", trained / "run", *options, "--output", file)
    assert [row["layer"] for row in found] == [0, 1]
    assert all(row["after"] < row["before"] for row in found)
    lens = TunedLens.load(file)
    assert [row["after"] for row in found] == pytest.approx(lens.after.tolist())
    model = load_model(open_weights(trained / "run", Registry()))
    ids = torch.tensor([list(TEXT.encode()[:20])])
    torch.testing.assert_close(lens.logits(model, ids)[-1, :, 0], model(ids)[:, -1])


def test_an_autoencoder_of_stored_activations_is_written(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("--names", "blocks.*.residual_after")
    said(capsys, "probe", trained / "run", "--text", trained / "text.txt", *names, "--output", tmp_path / "acts")
    options = ("--latents", 40, "--k", 4, "--steps", 200, "--batch", 64)
    file = tmp_path / "sae.safetensors"
    assert "has 2 inner values; choose one with --name" in refused(capsys, "sae", tmp_path / "acts", "--output", file)
    name = "blocks.1.residual_after"
    found = said(capsys, "sae", tmp_path / "acts", "--name", name, *options, "--output", file)
    store = ActivationStore(tmp_path / "acts")
    expected = quality(SAE.load(file), store, name, store.rows - round(0.1 * store.rows))
    assert (found["explained"], found["l0"], found["dead"], found["rows"]) == pytest.approx(tuple(expected))
    assert found["explained"] > 0.3
    with pytest.raises(SystemExit):
        from forge_train.cli import main

        main(["sae", str(tmp_path / "acts"), "--name", name, "--steps", "3", "--output", str(file)])
    assert "of 128 latents per token" in capsys.readouterr().out


def test_where_nothing_can_be_written_nothing_is_fitted(trained: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("forge_train.inference.stored.load_model", lambda _: pytest.fail("weights were loaded"))
    options = ("lens", trained / "run", "--text", trained / "text.txt", "--output")
    assert "must end in .safetensors" in refused(capsys, *options, tmp_path / "lens.pt")
    assert "is not a folder; create it" in refused(capsys, *options, tmp_path / "no" / "lens.safetensors")
