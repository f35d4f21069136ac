"""`convert` of a run with images as a user calls it: what is written is compared with another program before it says done."""

import json
from pathlib import Path

import pytest
import torch

from forge_core.registry import Registry
from forge_train.inference.stored import open_weights
from forge_train.run.loop import fit
from models.hf.command_line import run
from train.runs import TINY, prepared
from vlm.encoders.test_published import clip, stored

pytest.importorskip("transformers")


def trained(folder: Path, fusion: str, *more: str) -> Path:
    """The directory of a run of three steps with a tower of CLIP."""
    stored(folder / "tower", clip())
    (folder / "tiny.toml").write_text(TINY)
    words = [f"--job.dir={folder / 'run'}", "--train.max_steps=3", "--model.name=vlm", "--model.max_length=64"]
    words += [f"--model.fusion.name={fusion}", f"--model.encoder={{name='clip', path='{folder / 'tower'}'}}", *more]
    training, _ = prepared(folder / "tiny.toml", words)
    fit(training)
    return folder / "run"


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a joint run, which tests read only."""
    return trained(tmp_path_factory.mktemp("joint"), "joint_decoder")


def test_a_joint_run_becomes_llava_and_comes_back(joint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", "--from", "forge", "--to", "hf", joint, tmp_path / "hf", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert "largest difference from the format's own library" in said["notes"][-1]
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "llava"
    assert run("convert", "--from", "hf", "--to", "forge", tmp_path / "hf", tmp_path / "back") == 0
    first, last = (open_weights(place, Registry()) for place in (joint, tmp_path / "back"))
    before, after = first.read(list(first.tensors)), last.read(list(last.tensors))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_folder_that_computes_something_else_is_moved_away(
    joint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison looks at images: a tower that differs is found."""
    from forge_models.hf.converter import HfConverter

    whole = HfConverter.reference

    def blind(self: HfConverter, path: Path, tokens: torch.Tensor, extras: dict[str, torch.Tensor]) -> torch.Tensor | str:
        return whole(self, path, tokens, {**extras, "images": -extras["images"]})

    monkeypatch.setattr(HfConverter, "reference", blind)
    assert run("convert", "--from", "forge", "--to", "hf", joint, tmp_path / "hf") != 0
    assert (tmp_path / "hf.refused").is_dir()
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("words", "family"),
    [
        pytest.param(("mot",), "forge_standalone", marks=pytest.mark.slow),
        pytest.param(
            ("moma", "--model.moe.experts=4", "--model.moe.kernel=loop"), "forge_standalone", marks=pytest.mark.slow, id="moma"
        ),
        pytest.param(("cross_attention", "--model.fusion.every=2"), "mllama_text_model", marks=pytest.mark.slow, id="mllama"),
    ],
)
def test_other_fusions_are_exported_and_come_back(
    words: tuple[str, ...], family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = trained(tmp_path, *words)
    asked = ["--family", family] if family == "forge_standalone" else []
    assert run("convert", "--from", "forge", "--to", "hf", *asked, directory, tmp_path / "hf", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert "largest difference from the format's own library" in said["notes"][-1]
    assert run("convert", "--from", "hf", "--to", "forge", tmp_path / "hf", tmp_path / "back") == 0
    first, last = (open_weights(place, Registry()) for place in (directory, tmp_path / "back"))
    after = last.read(list(last.tensors))
    assert after.keys() == first.tensors.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in first.read(list(after)).items())


def test_a_run_starts_from_a_llava_folder(joint: Path, tmp_path: Path) -> None:
    assert run("convert", "--from", "forge", "--to", "hf", joint, tmp_path / "hf") == 0
    words = [f"--job.dir={tmp_path / 'next'}", "--train.max_steps=3", "--model.name=vlm", "--model.max_length=64"]
    words += [f"--model.encoder={{name='clip', path='{tmp_path / 'hf'}'}}", "--model.fusion={name='joint_decoder'}"]
    words += [f"--start.weights={tmp_path / 'hf'}", "--start.exclude=['encoder.*']"]
    training, _ = prepared(joint.parent / "tiny.toml", words)
    wanted = open_weights(joint, Registry())
    found = {name: tensor for name, tensor in training.model.tensors() if name in wanted.tensors}
    read = wanted.read(list(found))
    assert len(found) == len(wanted.tensors)
    assert all(torch.equal(found[name], read[name]) for name in found)
