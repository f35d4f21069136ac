"""A vision-language model in the trainer: a run on text, weights of a published tower, what a recipe is refused for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_core.errors import ForgeError
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.topology import Topology
from forge_parallel.verify.proofs import features, unproven
from forge_train.recipe.load import load_recipe
from forge_train.run.weights import InitialWeights
from harness.siblings import fast
from train.runs import prepared
from vlm.encoders.test_published import siglip, stored

VIT = "{name='vit', size=8, patch=4, dim=16, layers=1, heads=2}"


def recipe(*words: str, world: int = 1, encoder: str = VIT) -> Any:
    fusion = [] if any("fusion" in word for word in words) else ["--model.fusion={name='mot'}"]
    return load_recipe("debug", ["--model.name=vlm", f"--model.encoder={encoder}", *fusion, *words], world, Registry()).job


def test_a_tower_in_a_run_has_the_weights_of_its_folder(tmp_path: Path) -> None:
    """And the rest is drawn, as without the tower's folder."""
    theirs = stored(tmp_path, siglip())
    job = recipe(encoder=f"{{name='siglip', path='{tmp_path}'}}")
    topology = Topology.of(Layout.parse("1"), torch.device("cpu"))
    source = InitialWeights(job, Registry())
    model = realize(Blueprint.of(job.model.build), Plan.of([], topology.layout, None), topology, source)
    weights = job.model.encoder.weights()
    read = weights.read(list(weights.tensors))
    found = dict(model.tensors())
    mine = {name.removeprefix("encoder."): tensor for name, tensor in found.items() if name.startswith("encoder.")}
    assert mine.keys() == read.keys()
    assert all(torch.equal(tensor.detach(), read[name]) for name, tensor in mine.items())
    assert theirs.config.hidden_size == job.model.encoder.width
    drawn = realize(Blueprint.of(job.model.build), Plan.of([], topology.layout, None), topology, job.job.seed)
    for name, tensor in drawn.tensors():
        if not name.startswith("encoder."):
            assert torch.equal(tensor, found[name]), name


@pytest.mark.parametrize(
    ("words", "pair"),
    [
        (("--model.fusion={name='cross_attention', every=2}", "--parallel.pp=2"), ("fusion_cross", "pp_1f1b")),
        (("--parallel.cp=2",), ("cp_ulysses", "fusion_mot")),
        (("--transforms.float8={}",), ("float8", "fusion_mot")),
    ],
)
def test_what_is_not_proven_is_named(words: tuple[str, ...], pair: tuple[str, str]) -> None:
    layout = Layout(**{word.partition(".")[2].partition("=")[0]: 2 for word in words if word.startswith("--parallel")})
    try:
        job = recipe(*words, "--train.global_batch=8", "--train.micro_batch=1", world=layout.world)
    except ForgeError as refused:
        assert pair[0] in str(refused) or "fusion" in str(refused), refused
        return
    found = [{use.name for use in uses} for uses in unproven(features(job, layout))]
    assert set(pair) in found


@pytest.mark.parametrize("fusion", fast("cross_attention", of=["joint_decoder", "cross_attention", "mot"]))
def test_a_plan_needs_no_values_of_tokens(fusion: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does a list of inner values; a blank image stands for those of a batch."""
    from forge_interp.tap_names import taps
    from forge_train.cli import main

    words = [
        f"--model.fusion={{name='{fusion}'}}",
        f"--model.encoder={VIT}",
        "--model.dim=32",
        "--model.layers=4",
        "--model.heads=4",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["plan", "debug", "--model.name=vlm", *words, "--model.vocab_size=300"])
    assert not ended.value.code
    assert "parameters" in capsys.readouterr().out
    job = recipe(f"--model.fusion={{name='{fusion}'}}", "--model.dim=32", "--model.layers=4", "--model.heads=4")
    assert any(name.startswith("blocks.3.") for name in taps(job.model.build()))


def test_a_model_with_images_is_not_written_as_a_text_model(tmp_path: Path) -> None:
    from forge_models.hf.config import Unsupported
    from forge_models.hf.writer import write

    weights = SimpleNamespace(model=recipe().model, facts=SimpleNamespace(family=None, tokenizer=None))
    with pytest.raises(Unsupported, match="a VLM cannot be written"):
        write(tmp_path / "out", weights, family=None, tokenizer=None, max_shard_bytes=10**9)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["sources", "evaluation"])
def test_a_text_model_is_refused_data_with_images(tmp_path: Path, where: str) -> None:
    """Also where the source is told how to prepare them; before anything of the run is written."""
    images = "{name='digits', placeholder=257, per_image=2, size=8, split='held_out'}"
    text = [f"--data.evaluation={{held_out={images}}}"] if where == "evaluation" else [f"--data.sources=[{images}]"]
    settings = [f"--job.dir={tmp_path / 'run'}", "--data.packing=best_fit", "--model.max_length=64", *text]
    with pytest.raises(ForgeError, match="the data have image_rows and images, which the model does not take"):
        prepared(Path("debug"), settings)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
