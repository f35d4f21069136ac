"""`convert` and `generate` as a user calls them, on sharded runs, and starting a run from a folder."""

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from forge_core.config.layers import load_layers
from forge_core.config.tree import origin_at, plain
from forge_core.errors import ForgeError
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_models.components.converters import Hf
from forge_models.components.decoder import Decoder
from forge_models.generation import generate
from forge_models.hf.family import meaning_of
from forge_models.hf.reader import Folder
from forge_models.logits import logits_of
from forge_models.sampling import GREEDY, Sampling
from forge_parallel.gather import full
from forge_parallel.plan import Plan
from forge_parallel.realization import Blueprint, realize
from forge_parallel.topology import Topology
from forge_train import inference
from forge_train.cli import main
from forge_train.commands import convert as command
from forge_train.from_hf import filled
from forge_train.inference import Continuation
from forge_train.job import Job
from forge_train.loop import fit
from forge_train.start import fill_from
from forge_train.weights import ForgeWeights, locate
from harness.pool import World
from models.hf.zoo import random_model, saved, tokens
from train.runs import TINY, prepared

WORDS = TINY.replace("vocab_size = 61", "vocab_size = 300") + '\n[data.tokenizer]\nname = "bytes"\n'


def run(*arguments: str | Path) -> int:
    """Exit code of `forge-train`."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


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


def with_tokenizer(folder: Path) -> Path:
    """Adds a byte-level tokenizer of 97 tokens, of which 2 is the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate(["<pad>", "<s>", "</s>", *alphabet[:94]])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


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
        torch.testing.assert_close(ours(inputs), theirs(inputs).logits, rtol=1e-5, atol=1e-5)
    text = theirs.generate(inputs[:1, :4], max_new_tokens=28, do_sample=False, eos_token_id=None, pad_token_id=0)
    begun = Continuation(inference.loaded(folder), _Plain(), GREEDY, max_tokens=28)
    assert "".join(begun(" ".join(map(str, inputs[0, :4].tolist())))).split() == [str(token) for token in text[0, 4:].tolist()]


class _Plain:
    """Numbers in decimal, separated by spaces."""

    eos = None

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
    from forge_models.logits import fixed_tokens

    return fixed_tokens(weights.model)


def test_refusals_of_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(random_model("llama", {"num_hidden_layers": 1}), tmp_path / "source")
    for arguments, message in (
        (("--from", "hf", "--to", "hff"), "did you mean 'hf'"),
        (("--from", "hf", "--to", "forge", "--family", "llama"), "has no --family"),
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
    tree, faults = filled(load_layers(path, [], Job, registry).tree, registry)
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
    _, faults = filled(load_layers(path, [], Job, registry).tree, registry)
    assert "attention_dropout" in faults[0].message
    path.write_text("[model]\ndim = 64\n")
    tree = load_layers(path, [], Job, registry).tree
    assert filled(tree, registry) == (tree, [])


def test_a_folder_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    weights = Folder(saved(random_model("llama", {}), tmp_path / "source"))
    layout = Layout.of({}, 1)
    component = Decoder(dim=32, layers=3, heads=4, kv_heads=2, ffn_dim=40, vocab_size=97)
    topology = Topology.of(layout, torch.device("cpu"))
    with pytest.raises(ForgeError) as caught:
        realize(Blueprint.of(component.build), Plan.of([], layout), topology, lambda model: fill_from(weights, model))
    assert "blocks.0.mlp.up_proj.weight: shape (40, 32), in the weights (48, 32)" in str(caught.value)
    assert "blocks.3.attention.q_proj.weight: not in the model" in str(caught.value)


def _end_of_input() -> str:
    raise EOFError


def test_generate_speaks_with_a_runs_own_tokenizer(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=2", "--schedule.name=constant"])
    fit(training)
    from forge_data.tokenizers.bytes import ByteTokenizer

    coder = ByteTokenizer()
    ids = generate(training.model.part, [coder.encode("ab").tolist()], max_tokens=12, eos=coder.eos)[0]
    for place in ("run", "run/checkpoints", "run/checkpoints/step-00000002"):
        arguments = ("--prompt", "ab", "--temperature", "0", "--max-tokens", "12", "--json")
        assert run("generate", tmp_path / place, *arguments) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["text"] == coder.decode([token for token in ids if token != coder.eos])
        assert answer["tokens"] == len(ids)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("ab")
    assert run("generate", tmp_path / "run", "--file", prompt, "--temperature", "0", "--max-tokens", "12") == 0
    assert capsys.readouterr().out == f"ab{answer['text']}\n"
    assert run("generate", tmp_path / "run", "--file", prompt, "--prompt", "x") == 2
    capsys.readouterr()
    lines = iter(["ab"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or _end_of_input())
    assert run("generate", tmp_path / "run", "--temperature", "0", "--max-tokens", "12") == 0
    assert capsys.readouterr().out == f"ab{answer['text']}\n\n"
    for piped in (("--file", "-"), ()):
        monkeypatch.setattr("sys.stdin", io.StringIO("ab"))
        assert run("generate", tmp_path / "run", *piped, "--temperature", "0", "--max-tokens", "12") == 0
        assert capsys.readouterr().out == f"ab{answer['text']}\n"
    assert run("generate", tmp_path / "nowhere") == 2


SETTINGS = Sampling(repetition_penalty=1.2, temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=5)
OPTIONS = ("--repetition-penalty=1.2", "--temperature=0.9", "--top-k=40", "--top-p=0.9", "--min-p=0.01", "--seed=5")


def test_every_option_of_generate_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_tokenizer(saved(random_model("llama", {}), tmp_path / "source"))
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = [backend.encode("1A1").ids]
    model = inference.loaded(Folder(folder))

    def text(**other: Any) -> str:
        sampling = replace(SETTINGS, **other)
        return backend.decode(generate(model, prompt, sampling, max_tokens=15, eos=2)[0])  # type: ignore[arg-type]

    def spoken(*options: str) -> str:
        assert run("generate", folder, "--prompt", "1A1", "--max-tokens", "15", "--json", *OPTIONS, *options) == 0
        return json.loads(capsys.readouterr().out)["text"]

    expected = text()
    assert len(expected) > 5
    assert spoken() == spoken("--prefill=1") == expected
    assert spoken(f"--stop={expected[3:5]}", "--stop=never") == expected[:3]
    changes: dict[str, Any] = {"repetition_penalty": 3.0, "temperature": 0.1, "top_k": 1, "top_p": 0.01, "min_p": 0.9, "seed": 6}
    for name, value in changes.items():
        other = text(**{name: value})
        assert other != expected, f"the case does not show {name}"
        assert spoken(f"--{name.replace('_', '-')}={value}") == other
        capsys.readouterr()
    assert run("generate", tmp_path / "nowhere", "--temperature=-1") == 2
    assert "temperature -1.0 must be at least 0" in capsys.readouterr().err


def test_generate_shows_each_token_before_it_makes_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is only in a buffer of the process counts as not shown."""
    folder = with_tokenizer(saved(random_model("llama", {}), tmp_path / "source"))
    screen = io.BytesIO()
    lengths: list[int] = []

    def steps(*_: Any, **__: Any) -> Iterator[list[int]]:
        for token in (10, 11, 12):
            lengths.append(len(screen.getvalue()))
            yield [token]

    monkeypatch.setattr("forge_models.generation.stream", steps)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(screen)))  # type: ignore[type-var]
    assert run("generate", folder, "--prompt", "1A") == 0
    assert lengths == [2, 3, 4]
    assert screen.getvalue() == b"1A()*"


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "a1"}


@pytest.mark.parametrize(("launcher", "words"), [(TORCHRUN, "rank 1 of 2 (torchrun)"), (SRUN, "rank 0 of 4 (srun)")])
@pytest.mark.parametrize("command", ["generate", "convert"])
def test_commands_for_one_process_refuse_several(
    command: str,
    launcher: dict[str, str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    arguments = {"generate": (tmp_path,), "convert": (tmp_path, tmp_path / "target", "--from", "hf", "--to", "forge")}[command]
    assert run(command, *arguments) == 2
    said = capsys.readouterr().err
    assert f"{command} works on one process" in said
    assert words in said


def test_generate_reads_a_folder_with_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = random_model("llama", {"tie_word_embeddings": True})
    source = with_tokenizer(saved(reference, tmp_path / "source"))
    backend = Tokenizer.from_file(str(source / "tokenizer.json"))
    prompt = torch.tensor([backend.encode("1A").ids])
    assert prompt[0, 0] == 1, "the text begins with a token of its own, as with Llama"
    text = reference.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=2, pad_token_id=0)  # type: ignore[operator]
    expected = backend.decode(text[0, prompt.shape[1] :].tolist(), skip_special_tokens=True)
    assert run("generate", source, "--prompt", "1A", "--temperature", "0", "--max-tokens", "20", "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"] == expected
    (source / "tokenizer.json").unlink()
    assert run("generate", source, "--prompt", "1A") == 2
    assert "--tokenizer" in capsys.readouterr().err


def test_text_is_shown_only_when_it_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters of several bytes come whole, and nothing of a stop text is shown."""
    from forge_data.tokenizers.bytes import ByteTokenizer

    def steps(text: str) -> Iterator[list[int]]:
        return iter([[byte] for byte in text.encode()])

    def shown(text: str, *stops: str) -> list[str]:
        monkeypatch.setattr("forge_models.generation.stream", lambda *_, **__: steps(text))
        return list(Continuation(torch.nn.Module(), ByteTokenizer(), GREEDY, max_tokens=9, stops=stops)("x"))

    assert [piece for piece in shown("aé€b") if piece] == ["a", "é", "€", "b"]
    assert "".join(shown("one END two", "END")) == "one "
    assert "E" not in "".join(shown("one END two", "END"))
    assert "".join(shown("one ENX two", "END")) == "one ENX two"
    assert "".join(shown("aab", "aab")) == ""
    assert "".join(shown("ends in EN", "END")) == "ends in EN"


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

    Hf(max_shard_bytes=40_000).build().write(tmp_path / "target", Watched())  # type: ignore[arg-type]
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
