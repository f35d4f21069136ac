"""`forge-train probe` and `similarity`, against the model itself."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_interp.captures import capture
from forge_interp.commands.similarity import Shortened, shortened
from forge_interp.heat_maps import heat_map, heat_map_png, write_heat_map
from forge_interp.similarity import Moments, cca, unbiased_cka
from forge_interp.store import ActivationStore
from forge_interp.tap_names import InterpError
from forge_models.components.experts import MoEConfig
from forge_train.cli import main
from forge_train.formats.forge import ForgeWeights
from forge_train.inference.stored import load_model, open_weights
from interp.commands.commands import TEXT, refused, said


def values(model: Any, length: int, name: str) -> torch.Tensor:
    """(tokens, width) of the text cut into inputs, one at a time."""
    ids = torch.tensor(list(TEXT.encode()))
    with torch.no_grad(), capture(model, name) as seen:
        for row in ids.split(length):
            model(row[None])
    return torch.cat([value[0] for value in seen.each(name)])


def test_a_recipe_is_listed_without_weights(capsys: pytest.CaptureFixture[str]) -> None:
    found = {one["name"]: one for one in said(capsys, "probe", "7b", "--list", "--model.layers=2")}
    assert found["blocks.1.residual"] == {
        "name": "blocks.1.residual",
        "alias": "blocks.1.hook_resid_pre",
        "shape": [4096],
        "dtype": "float32",
        "bytes_per_token": 4096 * 4,
    }
    assert "blocks.2.residual" not in found


def test_a_checkpoint_is_listed_as_a_table(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["probe", str(trained / "run"), "--list"])
    lines = capsys.readouterr().out.splitlines()
    assert "blocks.0.attention.q\tblocks.0.attn.hook_rot_q\t4 x 4\tfloat32\t64" in lines
    assert lines[-1].startswith("without an alias: ")


def test_a_capture_stores_what_the_model_computes(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, table = tmp_path / "acts", tmp_path / "acts.npz"
    arguments = ("probe", trained / "run", "--text", trained / "text.txt", "--names", "blocks.*.residual_after", "--length", 20)
    found = said(capsys, *arguments, "--output", store, "--export", table)
    model = load_model(open_weights(trained / "run", Registry()))
    kept = ActivationStore(store)
    assert (found["rows"], found["inputs"]) == (len(TEXT), -(-len(TEXT) // 20))
    assert found["bytes"] == len(TEXT) * 2 * 16 * 4
    assert table.is_file()
    for name in ("blocks.0.residual_after", "blocks.1.residual_after"):
        torch.testing.assert_close(kept.read(name), values(model, 20, name), rtol=1e-5, atol=1e-5)
    assert bytes(kept.read("token").tolist()).decode() == TEXT
    facts = kept.manifest["facts"]
    assert (facts["step"], facts["length"], facts["set"]) == (4, 20, "model")
    lines = said(capsys, *arguments, "--output", tmp_path / "lines", "--lines", "--positions", "last", "--limit", 3)
    assert (lines["inputs"], lines["rows"]) == (3, 3)
    assert "is complete already" in refused(capsys, *arguments, "--output", store)


def test_a_capture_beyond_the_budget_needs_yes(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("probe", trained / "run", "--text", trained / "text.txt", "--names", "*", "--budget", 1e-6)
    said_ = refused(capsys, *arguments, "--output", tmp_path / "acts")
    assert "GiB are more than --budget 1e-06; add --yes" in said_
    assert not (tmp_path / "acts").exists()
    assert said(capsys, *arguments, "--output", tmp_path / "acts", "--yes", "--limit", 1)["inputs"] == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--names", "blocks.0.resid"), "'blocks.0.resid' matches no inner value.*blocks.0.residual"),
        (("--names", "norm", "--heads", "0"), "norm has no heads"),
        (("--names", "norm", "--layers", "x"), "--layers x: write integers separated by commas"),
        (("--names", "norm", "--positions", "first"), "--positions first: write all, last, mean"),
        (("--names", "norm", "--positions", "900"), "position 900 is beyond input 0"),
        (("--names", "norm", "--length", "33"), "--length 33: an input of .* must have 1 to 32 tokens"),
    ],
)
def test_what_cannot_be_captured_is_refused(trained, tmp_path, capsys, arguments, match) -> None:
    import re

    options = ("--text", trained / "text.txt", "--output", tmp_path / "acts")
    assert re.search(match, refused(capsys, "probe", trained / "run", *options, *arguments).replace("\n", " "))
    assert not (tmp_path / "acts").exists()


def test_options_that_do_not_go_together_are_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--list does not run the model" in refused(capsys, "probe", trained / "run", "--list", "--names", "norm")
    assert "a capture needs --names" in refused(capsys, "probe", trained / "run")
    assert "has no effect on stored weights" in refused(capsys, "probe", trained / "run", "--list", "--model.layers=2")
    assert "has no effect on one process" in refused(capsys, "probe", trained / "run", "--model.layers=2")
    assert "for a model, add --text FILE" in refused(capsys, "similarity", trained / "run")
    assert "--measure cosine: choose one of" in refused(capsys, "similarity", trained / "run", "--measure", "cosine")
    assert "heat maps are .svg and .png" in refused(capsys, "similarity", trained / "run", "--output", "x.jpg")
    assert "--pairs needs --steps" in refused(capsys, "similarity", trained / "run", "--pairs")
    assert "--pairs needs --steps" in refused(capsys, "similarity", trained / "run", "--steps", "--pairs", "--output", "x.svg")
    assert "--steps needs exactly one run" in refused(capsys, "similarity", trained, trained, "--steps")


def test_layers_of_one_model_and_of_its_checkpoints_are_compared(trained, tmp_path, capsys) -> None:
    options = ("--text", trained / "text.txt", "--length", 20, "--limit", 100)
    found = said(capsys, "similarity", trained / "run", *options, "--output", tmp_path / "layers.svg")
    assert found["rows"] == found["columns"] == ["blocks.0.residual_after", "blocks.1.residual_after"]
    model = load_model(open_weights(trained / "run", Registry()))
    first, second = (values(model, 20, name) for name in found["rows"])
    expected = float(unbiased_cka(Moments.of(first, second)))
    assert found["values"][0][1] == pytest.approx(expected, abs=1e-6)
    assert found["values"][0][0] == pytest.approx(1)
    assert len(ET.parse(tmp_path / "layers.svg").getroot().findall(".//{*}rect")) == 4
    steps = said(capsys, "similarity", trained / "run", "--steps", *options, "--measure", "cca")
    names = sorted(path.name for path in (trained / "run" / "checkpoints").glob("step*"))
    assert steps["columns"] == names
    earlier = load_model(open_weights(trained / "run" / "checkpoints" / names[0], Registry()))
    for row, name in enumerate(steps["rows"]):
        pair = Moments.of(values(earlier, 20, name), values(model, 20, name))
        assert steps["values"][row][0] == pytest.approx(float(cca(pair)), abs=1e-5)
        assert steps["values"][row][-1] == pytest.approx(1)


def test_stores_of_other_tokens_are_not_compared(trained, tmp_path, capsys) -> None:
    arguments = ("probe", trained / "run", "--text", trained / "text.txt", "--names", "norm")
    for name, more in (("a", ()), ("b", ()), ("short", ("--length", 10))):
        said(capsys, *arguments, "--output", tmp_path / name, *more)
    same = said(capsys, "similarity", tmp_path / "a", tmp_path / "b")
    assert same["values"][0][0] == pytest.approx(1)
    assert "have different tokens" in refused(capsys, "similarity", tmp_path / "a", tmp_path / "short")


def test_a_heat_map_is_svg_with_a_cell_for_each_number() -> None:
    root = ET.fromstring(heat_map("a < b", [[0.0, 1.0], [-0.5, 0.25]], ["x", "y"], ["1", "2"]))
    cells = root.findall(".//{*}rect")
    assert [cell.get("fill") for cell in cells[:3]] == ["rgb(247,251,255)", "rgb(8,48,107)", "rgb(247,251,255)"]
    assert [title.text for title in root.findall(".//{*}title")][3] == "y, 2: 0.2500"
    with pytest.raises(ValueError, match="zip"):
        heat_map("", [[0.0]], ["x", "y"], ["1"])


def test_a_png_has_the_colors_of_the_numbers(tmp_path, monkeypatch) -> None:
    import sys
    from io import BytesIO

    from matplotlib.image import imread

    drawn = imread(BytesIO(heat_map_png("t", [[0.0, 1.0], [1.0, 0.0]], ["x", "y"], ["1", "2"])))
    colors = {tuple(round(float(part) * 255) for part in pixel[:3]) for pixel in drawn.reshape(-1, drawn.shape[-1])}
    assert {(247, 251, 255), (8, 48, 107)} <= colors
    with pytest.raises(ValueError, match="a number for each"):
        heat_map_png("", [[0.0]], ["x", "y"], ["1"])
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ForgeError, match="PNG pictures need matplotlib"):
        write_heat_map(tmp_path / "a.png", "", [[0.0]], ["x"], ["1"])


def test_pairs_of_layers_at_each_checkpoint_without_later_blocks(trained, tmp_path, capsys, monkeypatch) -> None:
    read, one = [], ForgeWeights.read
    monkeypatch.setattr(ForgeWeights, "read", lambda self, names: (read.extend(names), one(self, names))[1])
    names = ["blocks.0.residual", "blocks.0.residual_mid"]
    arguments = ("similarity", trained / "run", "--steps", "--pairs", "--text", trained / "text.txt", "--length", 20)
    found = said(capsys, *arguments, "--names", "blocks.0.residual*", "--output", tmp_path / "pairs.npz", "--limit", 100)
    assert not [name for name in read if name.startswith("blocks.1.")]
    assert any(name.startswith("blocks.0.") for name in read)
    assert found["names"] == ["blocks.0.residual", "blocks.0.residual_mid", "blocks.0.residual_after"]
    with np.load(tmp_path / "pairs.npz") as archive:
        kept = dict(archive)
    assert kept["values"].shape == (2, 3, 3)
    assert kept["checkpoints"].tolist() == found["checkpoints"]
    for number, name in enumerate(found["checkpoints"]):
        model = load_model(open_weights(trained / "run" / "checkpoints" / name, Registry()))
        expected = unbiased_cka(Moments.of(*(values(model, 20, one) for one in names)))
        assert found["values"][number][0][1] == pytest.approx(float(expected), abs=1e-6)
        assert kept["values"][number].tolist() == found["values"][number]


def test_a_model_is_shortened_only_where_that_changes_nothing(trained) -> None:
    opened = open_weights(trained / "run", Registry())
    for names, layers in (("blocks.0.residual", 1), ("blocks.*.residual", 2), ("norm", 2), (["norm", "blocks.0.residual"], 2)):
        assert shortened(opened, names).model.layers == layers
    sparse = Shortened(replace(opened.model, moe=MoEConfig(experts=4, first_dense=1)), opened)
    assert shortened(sparse, "blocks.0.residual").model.layers == 2  # one block alone would have no experts
    with pytest.raises(InterpError, match="matches no inner value"):
        shortened(opened, "blocks.7.residual")
