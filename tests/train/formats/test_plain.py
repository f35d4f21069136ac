"""Plain safetensors: read back by the library itself, and what does not fit is refused with all of it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_testing.modules import InMemory, small
from forge_train.formats.forge import ForgeConverter
from forge_train.formats.plain import PlainConverter
from forge_train.inference.stored import format_of, load_model, open_weights
from forge_train.run.loop import fit
from models.hf.command_line import run
from train.runs import TINY, prepared

RECIPE = """
[model]
name = "decoder"
dim = 16
layers = 2
heads = 4
kv_heads = 2
ffn_dim = 24
vocab_size = 32
max_length = 64
"""


def converter(limit: int = 5_000_000_000, recipe: Path | None = None, prefix: str = "") -> PlainConverter:
    return PlainConverter(max_shard_bytes=limit, recipe=recipe and str(recipe), prefix=prefix)


@pytest.fixture
def given() -> InMemory:
    return small()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def tensors(weights: Any) -> dict[str, torch.Tensor]:
    return weights.read(list(weights.tensors))


def alike(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_library_reads_the_models_own_names(given: InMemory, tmp_path: Path) -> None:
    converter().write(tmp_path / "one", given)
    assert alike(load_file(tmp_path / "one/model.safetensors"), tensors(given))
    converter(5000, prefix="net.").write(tmp_path / "many", given)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3 and all(file.stat().st_size < 10_000 for file in files)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors(given).values())
    found = {name: load_file(tmp_path / "many" / file)[name] for name, file in index["weight_map"].items()}
    assert alike({name.removeprefix("net."): tensor for name, tensor in found.items()}, tensors(given))
    assert alike(tensors(converter(prefix="net.").read(tmp_path / "many")), tensors(given))
    assert converter().read(tmp_path / "one" / "model.safetensors").facts.step == 7


def test_the_commands_go_there_and_back(given: InMemory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ForgeConverter().write(tmp_path / "forge", given)
    assert run("convert", "--from", "forge", "--to", "safetensors", tmp_path / "forge", tmp_path / "plain") == 0
    assert run("convert", "--from", "safetensors", "--to", "forge", tmp_path / "plain", tmp_path / "back") == 0
    assert "read again, its logits are bitwise equal to those of" in capsys.readouterr().out
    assert alike(tensors(open_weights(tmp_path / "back", Registry())), tensors(given))
    for path in (tmp_path / "plain", tmp_path / "plain/model.safetensors"):
        state = load_model(open_weights(path, Registry())).state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in tensors(given).items())
    assert run("evaluate", tmp_path / "plain", "--weights", "ema") == 2
    assert "which has only one set of weights" in capsys.readouterr().err


def test_a_run_with_frozen_tensors_that_checkpoints_share(tmp_path: Path) -> None:
    """What is in a file that two checkpoints have comes out as what moves does, also when the first of them is gone."""
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(TINY + '[[parameters.groups]]\nmatch = "blocks.1.*"\nfrozen = true\n')
    training, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=3", "--checkpoint.every=1"])
    fit(training)
    saved = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    (shared,) = (file for file in saved[-1].glob("*.bin") if file.name != "rank-00000.bin")
    assert shared.stat().st_nlink == len(saved) > 1
    shutil.rmtree(saved[0])
    assert run("convert", "--from", "forge", "--to", "safetensors", tmp_path / "run", tmp_path / "plain") == 0
    assert alike(load_file(tmp_path / "plain/model.safetensors"), dict(training.model.parameters_held()))


def test_files_of_others_need_a_recipe(given: InMemory, recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "theirs.safetensors"
    save_file({f"model.{name}": tensor.clone() for name, tensor in tensors(given).items()} | {"step": torch.ones(1)}, file)
    with pytest.raises(ForgeError, match="has no description of the model of its tensors; pass --recipe"):
        converter().read(file)
    found = converter(recipe=recipe, prefix="model.").read(file)
    assert alike(tensors(found), tensors(given))
    assert found.facts.notes == ("1 tensors whose names do not begin with 'model.' were left out",)
    with pytest.raises(ForgeError, match=r"has no tensor whose name begins with 'net\.'"):
        converter(recipe=recipe, prefix="net.").read(file)


def test_fault_22_everything_that_does_not_fit_is_listed_at_once(given: InMemory, recipe: Path, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in tensors(given).items()}
    names = list(state)
    del state[names[0]]
    state[names[1]] = torch.zeros(3, 3)
    state["extra"] = torch.zeros(1)
    save_file(state, tmp_path / "theirs.safetensors")
    with pytest.raises(ForgeError) as refusal:
        converter(recipe=recipe).read(tmp_path / "theirs.safetensors")
    for part in (f"{names[0]}: missing", f"{names[1]}: shape (3, 3), in the model", "extra: not in the model"):
        assert part in str(refusal.value)


def test_a_buffer_may_be_missing(tmp_path: Path) -> None:
    from forge_core.protocols.weights import StoredTensor
    from forge_train.formats.plain import check_fit

    class Component:
        def build(self) -> torch.nn.Module:
            module: Any = torch.nn.Linear(2, 2, bias=False)
            module.register_buffer("count", torch.zeros(()))
            module.specs = lambda: type("Specs", (), {"ties": {}, "tensors": {}})
            return module

    weight = {"weight": StoredTensor((2, 2), "float32")}
    check_fit(Component(), weight, tmp_path)
    check_fit(Component(), weight | {"count": StoredTensor((), "float32")}, tmp_path)
    with pytest.raises(ForgeError, match="count: shape"):
        check_fit(Component(), weight | {"count": StoredTensor((2,), "float32")}, tmp_path)


def test_files_that_contradict_each_other_are_refused(given: InMemory, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    converter(5000).write(folder, given)
    first = min(folder.glob("*.safetensors"))
    (folder / "copy.safetensors").write_bytes(first.read_bytes())
    with pytest.raises(ForgeError, match=r"only in .*: copy\.safetensors"):
        converter().read(folder)
    index = folder / "model.safetensors.index.json"
    index.unlink()
    with pytest.raises(ForgeError, match="is in two files"):
        converter().read(folder)
    (folder / "copy.safetensors").unlink()
    assert alike(tensors(converter().read(folder)), tensors(given)), "an index is not needed"
    first.unlink()
    with pytest.raises(ForgeError, match="missing"):
        converter().read(folder)
    index.write_text("[]")
    with pytest.raises(ForgeError, match="is not a valid safetensors index"):
        converter().read(folder)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '{"model": 3}', '{"model": {"name": "nothing"}}', "{}"])
def test_a_description_that_is_none_is_refused(given: InMemory, tmp_path: Path, text: str) -> None:
    save_file(tensors(given), tmp_path / "a.safetensors", metadata={"forge": text})
    with pytest.raises(ForgeError):
        converter().read(tmp_path / "a.safetensors")


def test_fault_49_code_that_a_description_names_is_not_run(
    given: InMemory, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    for model in ({"name": "./mine.py:Model"}, {"name": "decoder", "mlp": {"name": f"{tmp_path}/mine.py:Mlp"}}):
        save_file(tensors(given), tmp_path / "a.safetensors", metadata={"forge": json.dumps({"model": model})})
        with pytest.raises(ForgeError, match=r"mine\.py:M.*does not run unasked.*--trust-code [0-9a-f]{64}"):
            converter().read(tmp_path / "a.safetensors")
    assert alike(tensors(converter(recipe=recipe).read(tmp_path / "a.safetensors")), tensors(given))


def test_files_of_different_models_are_refused(given: InMemory, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors", metadata={"forge": "{}"})
    save_file({"b": torch.zeros(1)}, tmp_path / "b.safetensors", metadata={"forge": '{"model": {}}'})
    with pytest.raises(ForgeError, match="belong to different models"):
        converter().read(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ForgeError, match="cannot be read as safetensors"):
        converter().read(tmp_path / "a.safetensors")


def test_trials_e5_the_files_say_which_format_they_are(given: InMemory, tmp_path: Path) -> None:
    registry = Registry()
    for kind in registry.names("forge.converters"):
        if getattr(registry.load("forge.converters", kind), "adapters_only", False):
            continue
        path = tmp_path / (f"{kind}.pt" if kind == "torch" else kind)
        registry.load("forge.converters", kind)().build().write(path, given)
        assert format_of(path) == kind
        assert alike(tensors(open_weights(path, registry)), tensors(given))
    assert run("convert", "--to", "forge", tmp_path / "hf", tmp_path / "again") == 0


def test_trials_h_a_model_type_that_is_not_known_is_answered_with_all_that_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "reformer"}))
    with pytest.raises(ForgeError, match=r"'reformer' is not implemented; implemented are .*\bllama\b.*\bllava\b"):
        open_weights(tmp_path, Registry())
