"""Runs with an adapter of a base in 8 or 4 bits: equal to runs on the rounded base, in every layout; their checkpoints and exports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_ckpt.checkpoint.locate import locate
from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_models.hf.streamed_forward import logits_of
from forge_models.lora_weights import MergedWeights
from forge_parallel.model.parallel_model import full
from forge_train.inference.stored import load_model, open_weights
from forge_train.recipe.load import load_recipe
from forge_train.run.loop import fit
from harness.pool import World
from models.hf.command_line import run as command
from models.hf.zoo import random_model, saved, tokens
from models.nf4 import rounded
from train.runs import prepared, train
from train.whole_runs.test_lora_run import RECIPE, trained, weights_of

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
FORMATS = ("nf4", "int8")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(random_model("llama", WIDE), tmp_path_factory.mktemp("base") / "hf")


@pytest.fixture
def recipe(base: Path, tmp_path: Path) -> Path:
    path = tmp_path / "lora.toml"
    path.write_text(RECIPE.format(base=base))
    return path


def rounded_base(base: Path, kind: str, folder: Path) -> Path:
    """A folder with the values of a format in place of the matrices of blocks, made by the reference of the tests."""
    folder.mkdir()
    (folder / "config.json").write_text((base / "config.json").read_text())
    tensors = load_file(base / "model.safetensors")
    blocks = {name for name, tensor in tensors.items() if "layers." in name and tensor.dim() == 2}
    assert len(blocks) == 7 * 2 or len(blocks) % 7 == 0
    tensors |= {name: rounded(tensors[name], kind) for name in blocks}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def quantized_to(kind: str) -> str:
    return f"--model.lora.base_format={kind}"


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("nf4", []),
        ("int8", []),
        ("nf4", ["--model.lora.dora=true"]),
        ("nf4", ['--model.lora.targets=["*.q_proj"]']),
        ("nf4", ["--precision.compute=bf16", "--precision.state=fp32"]),
        ("int8", ["--precision.compute=fp32", "--precision.state=fp32"]),
    ],
    ids=["nf4", "int8", "dora", "some", "bf16", "fp32"],
)
def test_a_run_equals_one_on_the_rounded_base(recipe: Path, base: Path, tmp_path: Path, kind: str, more: list[str]) -> None:
    """To the bit, forward and backward; all that is different is what the base takes."""
    plain = rounded_base(base, kind, tmp_path / "rounded")
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'a'}", quantized_to(kind), *more])
    expected, known = prepared(recipe, [f"--job.dir={tmp_path / 'b'}", f"--model.from_hf={plain}", *more])
    held = {name: tensor for name, tensor in weights_of(run).items() if name in run.model.specs.base}
    stored = {name: tensor for name, tensor in weights_of(expected).items() if name in expected.model.specs.base}
    matrices = {name for name in stored if name.startswith("blocks.") and stored[name].dim() == 2}
    assert set(held) == set(stored) | {f"{name}_scale" for name in matrices}
    values = sum(stored[name].numel() for name in matrices)
    rows = sum(len(stored[name]) for name in matrices)
    size = sum(held[name].nbytes for each in matrices for name in (each, f"{each}_scale"))
    assert size == (values // 2 + values // 64 * 4 if kind == "nf4" else values + rows * 4)
    fit(run)
    fit(expected)
    found = weights_of(run)
    assert all(torch.equal(found[name], tensor) for name, tensor in held.items())
    for name, tensor in weights_of(expected).items():
        if name not in matrices:
            assert torch.equal(found[name], tensor), name
    assert known.losses[-1] != known.losses[0]
