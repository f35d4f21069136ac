"""`convert` as a user calls it, on sharded runs, and starting a run from a folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_ckpt.checkpoint.locate import locate
from forge_core.config.layers import load_layers
from forge_core.config.tree import origin_at, plain
from forge_core.errors import ForgeError
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_models.components.decoder import DecoderConfig
from forge_models.generation import GREEDY
from forge_models.hf.converter import HfConverter
from forge_models.hf.family import meaning_of
from forge_models.hf.reader import Folder
from forge_models.hf.streamed_forward import logits_of
from forge_parallel.model.parallel_model import full
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.topology import Topology
from forge_train.commands import weights as command
from forge_train.formats.forge import ForgeWeights
from forge_train.inference.continuation import Continuation
from forge_train.inference.stored import fill_from, load_model
from forge_train.recipe.load import fill_from_hf
from forge_train.recipe.schema import Job
from forge_train.run.loop import fit
from harness.closeness import assert_no_farther
from harness.pool import World
from models.hf.command_line import WORDS, run, with_tokenizer
from models.hf.zoo import exact_logits, random_model, saved, tokens
from train.runs import prepared


def trained(recipe: Path, overrides: list[str]) -> dict[str, torch.Tensor]:
    """The whole weights of a run of 20 steps; on every rank."""
    training, _ = prepared(recipe, overrides)
    fit(training)
    return {name: full(tensor) for name, tensor in training.model.tensors()}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(WORDS)
    return path


def test_a_run_on_4_processes_becomes_a_folder_after_training(world: World, recipe: Path, tmp_path: Path) -> None:
    overrides = [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=20", "--checkpoint.every=20"]
    weights = world.run(trained, 4, recipe, overrides)[0]
    assert run("ckpt", "convert", "--from", "forge", "--to", "hf", tmp_path / "run", tmp_path / "hf") == 0

    folder = Folder(tmp_path / "hf")
    read = folder.read(list(folder.tensors))
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    component = folder.model
    ours = component.build()
    ours.load_state_dict(weights)

    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    inputs = tokens(length=16)
    with torch.no_grad():
        assert_no_farther(ours(inputs), theirs(inputs).logits, exact_logits(theirs, inputs))
    text = theirs.generate(inputs[:1, :4], max_new_tokens=28, do_sample=False, eos_token_id=None, pad_token_id=0)
    begun = Continuation(load_model(folder), _Plain(), GREEDY, max_tokens=28)
    assert "".join(begun(" ".join(map(str, inputs[0, :4].tolist())))).split() == [str(token) for token in text[0, 4:].tolist()]


class _Plain:
    """Numbers in decimal, separated by spaces."""

    eos = None
    prefix = ()
    vocab_size = 61

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return "".join(f"{token} " for token in ids)


def test_there_and_back_is_bit_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = with_tokenizer(saved(random_model("qwen2", {"tie_word_embeddings": True}), tmp_path / "source"))
    assert run("convert", "--from", "hf", "--to", "forge", source, tmp_path / "forge") == 0
    assert "largest difference from the format's own library" in capsys.readouterr().out
    assert (
        run("convert", "--from", "forge", "--to", "hf", "--max-shard-bytes", "20000", tmp_path / "forge", tmp_path / "back") == 0
    )
    before, after = Folder(source), Folder(tmp_path / "back")
    assert meaning_of(before.model) == meaning_of(after.model)
    assert after.family.model_type == "qwen2"
    assert before.facts.special_tokens == after.facts.special_tokens
    old, new = before.read(list(before.tensors)), after.read(list(after.tensors))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert "Qwen2ForCausalLM" in (tmp_path / "back" / "README.md").read_text()

    assert run("convert", "--from", "hf", "--to", "hf", "--dtype", "bf16", source, tmp_path / "half") == 0
    half = Folder(tmp_path / "half")
    assert {entry.dtype for entry in half.tensors.values()} == {"bfloat16"}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert torch.equal(half.read(["embed.weight"])["embed.weight"], old["embed.weight"].bfloat16())


def test_a_conversion_that_went_wrong_is_not_called_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(random_model("llama", {"num_hidden_layers": 1}), tmp_path / "source")
    read = Folder.read
    monkeypatch.setattr(Folder, "reference", None, raising=False)

    def swapped(self: Folder, names: list[str]) -> dict[str, torch.Tensor]:
        found = read(self, names)
        if "blocks.0.mlp.up_proj.weight" in found and self.folder == source:
            swapped.calls += 1
            if swapped.calls == 3:  # what is written; the checks before it see the right one
                found["blocks.0.mlp.up_proj.weight"] = found["blocks.0.mlp.up_proj.weight"] * 1.001
        return found

    swapped.calls = 1  # type: ignore[attr-defined]
    monkeypatch.setattr(Folder, "read", swapped)
    with pytest.raises(ForgeError, match="differ from those of the source"):
        command.convert(source, tmp_path / "target", from_="hf", to="hf")
    assert not (tmp_path / "target").exists()
    assert (tmp_path / "target.refused").is_dir()


def test_a_mapping_that_differs_from_the_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(random_model("llama", {"num_hidden_layers": 1}), tmp_path / "source")
    monkeypatch.setattr(command, "_logits", lambda weights: logits_of(weights, command_tokens(weights)) + 0.01)
    with pytest.raises(ForgeError, match="format's own library"):
        command.convert(source, tmp_path / "target", from_="hf", to="forge")
    assert not (tmp_path / "target").exists()


def command_tokens(weights: Any) -> torch.Tensor:
    from forge_models.hf.streamed_forward import fixed_tokens

    return fixed_tokens(weights.model)


def test_refusals_of_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(random_model("llama", {"num_hidden_layers": 1}), tmp_path / "source")
    for arguments, message in (
        (("--from", "hf", "--to", "hff"), "did you mean 'hf'"),
        (("--from", "hf", "--to", "forge", "--family", "llama"), "does not support --family"),
        (("--from", "hf", "--to", "hf", "--family", "gemma2"), "gemma2: "),
        (("--from", "hf", "--to", "hf", "--dtype", "int8"), "--dtype int8"),
    ):
        assert run("convert", *arguments, source, tmp_path / "target") == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "target").exists()
    assert run("ckpt", "convert", "--from", "hf", "--to", "hf", source, source) == 2
    assert "not an empty folder" in capsys.readouterr().err


def realized(folder: Path) -> dict[str, torch.Tensor]:
    """A model on this rank's layout, started from a folder, gathered."""
    weights = Folder(folder)
    layout = Layout.of({"dp_shard": 2}, 2)
    shard = Registry().load("forge.transforms", "shard")().build()
    topology = Topology.of(layout, torch.device("cpu"))
    blueprint = Blueprint.of(weights.model.build)
    model = realize(blueprint, Plan.of([shard], layout), topology, lambda model: fill_from(weights, model))
    return {name: full(tensor) for name, tensor in model.tensors()}


def test_a_sharded_model_starts_from_a_folder(world: World, tmp_path: Path) -> None:
    folder = saved(random_model("gemma2", {"head_dim": 8}), tmp_path / "source")
    expected = Folder(folder).read(list(Folder(folder).tensors))
    for found in world.run(realized, 2, folder):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_from_hf_fills_the_keys_that_nobody_gave(tmp_path: Path) -> None:
    folder = saved(random_model("llama", {"rope_theta": 5e4}), tmp_path / "source")
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'[model]\nfrom_hf = "{folder}"\nmax_length = 128\nrope = {{ scaling = "linear", factor = 2.0 }}\nunknown = 1\n'
    )
    registry = Registry()
    tree, faults = fill_from_hf(load_layers(path, [], Job, registry).tree, registry)
    model = plain(tree)["model"]
    assert (model["name"], model["dim"], model["layers"], model["norm"]["eps"]) == ("decoder", 32, 4, 1e-6)
    assert model["max_length"] == 128
    assert model["rope"]["theta"] == 5e4
    assert model["rope"]["factor"] == 2.0
    assert origin_at(tree, "model.max_length").startswith(str(path))
    assert origin_at(tree, "model.dim") == f"{folder}/config.json"
    assert [fault.key for fault in faults] == ["model.unknown"]

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    _, faults = fill_from_hf(load_layers(path, [], Job, registry).tree, registry)
    assert "attention_dropout" in faults[0].message
    path.write_text("[model]\ndim = 64\n")
    tree = load_layers(path, [], Job, registry).tree
    assert fill_from_hf(tree, registry) == (tree, [])


def test_a_folder_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    weights = Folder(saved(random_model("llama", {}), tmp_path / "source"))
    layout = Layout.of({}, 1)
    component = DecoderConfig(dim=32, layers=3, heads=4, kv_heads=2, ffn_dim=40, vocab_size=97)
    topology = Topology.of(layout, torch.device("cpu"))
    with pytest.raises(ForgeError) as caught:
        realize(Blueprint.of(component.build), Plan.of([], layout), topology, lambda model: fill_from(weights, model))
    assert "blocks.0.mlp.up_proj.weight: shape (40, 32), in the weights (48, 32)" in str(caught.value)
    assert "blocks.3.attention.q_proj.weight: not in the model" in str(caught.value)


def test_a_run_on_text_takes_its_tokenizer_along(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    recipe = tmp_path / "text.toml"
    source = f'name = "text"\npath = "{tmp_path / "text"}"\n'
    random = 'name = "random"\nvocab_size = 300\ntokens = 4000\ndocument = 23\n'
    assert random in WORDS
    words = WORDS.replace(random, source).replace('name = "bytes"', 'name = "bpe"\nvocab_size = 300')
    recipe.write_text(words)
    training, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=2", "--schedule.name=constant"])
    fit(training)
    assert run("convert", "--from", "forge", "--to", "hf", tmp_path / "run", tmp_path / "hf") == 0

    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = training.data.tokenizer
    assert ours is not None
    assert theirs("the lazy fox")["input_ids"] == ours.encode("the lazy fox").tolist()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["eos_token_id"] == theirs.eos_token_id == ours.eos


def test_a_conversion_asks_for_a_shard_and_a_check_for_a_block_at_a_time(tmp_path: Path) -> None:
    folder = Folder(saved(random_model("llama", {"num_hidden_layers": 6}), tmp_path / "source"))
    asked: list[int] = []

    class Watched:
        model, tensors, facts = folder.model, folder.tensors, folder.facts

        def read(self, names: list[str]) -> dict[str, torch.Tensor]:
            found = folder.read(names)
            asked.append(sum(tensor.nbytes for tensor in found.values()))
            return found

    HfConverter(max_shard_bytes=40_000).build().write(tmp_path / "target", Watched())  # type: ignore[arg-type]
    assert max(asked) <= 40_000
    assert len(list((tmp_path / "target").glob("model-*.safetensors"))) == len(asked) > 2
    asked.clear()
    logits_of(Watched(), tokens())  # type: ignore[arg-type]
    block = sum(tensor.nbytes for tensor in folder.read([n for n in folder.tensors if n.startswith("blocks.0.")]).values())
    assert max(asked) == block
    assert len(asked) == 6 + 3


def test_the_newest_checkpoint_is_meant(recipe: Path, tmp_path: Path) -> None:
    training, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=5", "--checkpoint.every=2"])
    fit(training)
    assert locate(tmp_path / "run").name == "step-00000005"
    weights = ForgeWeights(locate(tmp_path / "run" / "checkpoints" / "step-00000002"), Registry())
    assert weights.facts.step == 2
    box = weights.box("embed.weight", (3, 2), (5, 7))
    assert torch.equal(box, weights.read(["embed.weight"])["embed.weight"][3:8, 2:9])
