"""What lies in a folder beside what a model needs: a second copy, tensors and keys that are left out, settings of generation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_core.config.layers import load_layers
from forge_core.config.tree import plain
from forge_core.errors import ConfigError, DataError
from forge_core.protocols.weights import WeightsInfo
from forge_core.registry import Registry
from forge_models.generation import generate
from forge_models.hf.config import Unsupported
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import decoder_of, misfits
from forge_models.hf.reader import Folder
from forge_train.formats.forge import ForgeWeights, locate
from forge_train.inference.stored import load_model
from forge_train.inference.tokenizer import check_tokenizer, tokenizer_for
from forge_train.recipe.load import fill_from_hf
from forge_train.recipe.schema import Job
from forge_train.run.weights import InitialWeights
from models.hf.command_line import run, with_tokenizer
from models.hf.published import folder_of, reference, spread
from models.hf.zoo import CASES, SIZES, random_model, saved, tokens

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def configure(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return with_tokenizer(saved(random_model("llama", {"num_hidden_layers": 2}), tmp_path / "source"))


def test_w12_weights_held_twice_are_refused(llama: Path) -> None:
    names = list(load_file(llama / SINGLE))
    (llama / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, SINGLE)}))
    assert Folder(llama).tensors, "an index of the single file is no second copy"
    save_file({name: torch.zeros(1) for name in names}, llama / "model-00001-of-00001.safetensors")
    (llama / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}))
    with pytest.raises(Unsupported, match=rf"Delete {SINGLE} if the shards are right, otherwise {INDEX}"):
        Folder(llama)


def test_w12_a_soft_cap_of_scores_that_transformers_does_not_apply_is_refused(tmp_path: Path) -> None:
    kind, keys = CASES["gemma3"]
    values = SIZES | keys | {"model_type": kind, "final_logit_softcapping": 4.0}
    theirs, capped = (spread(reference(values | {"attn_logit_softcapping": cap})) for cap in (None, 1.0))
    with torch.no_grad():
        expected = theirs(tokens()).logits
        assert torch.equal(expected, capped(tokens()).logits)
    folder = folder_of(theirs, values | {"attn_logit_softcapping": 1.0}, tmp_path / "source")
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping: 1\.0 is not implemented"):
        Folder(folder)
    opened = Folder(folder, ["attn_logit_softcapping"])
    assert opened.facts.notes == ("attn_logit_softcapping of config.json was ignored, as asked for",)
    ours: Any = opened.model.build().double()
    ours.load_state_dict(opened.read(list(opened.tensors)), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(tokens()), expected, rtol=1e-5, atol=1e-5)
    gemma2 = decoder_of(FAMILIES["gemma2"], SIZES | CASES["gemma2"][1], "here")
    assert any("attention" in fault for fault in misfits(FAMILIES["gemma3_text"], gemma2))


def test_w12_tensors_of_multi_token_prediction_are_named_when_they_are_left_out(tmp_path: Path) -> None:
    kind, keys = CASES["deepseek_v3"]
    source = saved(random_model(kind, keys | {"num_hidden_layers": 2}), tmp_path / "source")
    assert Folder(source).facts.notes == ()
    tensors = load_file(source / SINGLE)
    save_file(tensors | {f"model.layers.2.{name}.weight": torch.zeros(3) for name in ("eh_proj", "enorm")}, source / SINGLE)
    (note,) = Folder(source).facts.notes
    assert note.startswith(
        "2 tensors of multi-token prediction were skipped (model.layers.2.eh_proj.weight, model.layers.2.enorm"
    )


def test_p2_code_of_the_author_is_not_run_and_that_is_said(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (llama / "modeling_mine.py").write_text("raise SystemExit('this code was run')")
    configure(llama, auto_map={"AutoModelForCausalLM": "modeling_mine.LlamaForCausalLM"})
    assert run("convert", "--from", "hf", "--to", "forge", llama, llama.parent / "forge") == 0
    assert (
        "the code that auto_map names was not run; LlamaForCausalLM is read as transformers defines it" in capsys.readouterr().out
    )


def test_p1_an_ignored_key_is_recorded(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(llama, something_new=5)
    arguments = ("convert", "--from", "hf", "--to", "forge", llama, llama.parent / "forge")
    assert run(*arguments) == 2
    assert "something_new: 5 is not known for this family" in capsys.readouterr().err
    assert run(*arguments, "--ignore", "something_old") == 2
    assert "something_old: cannot be ignored, because the file has no such key" in capsys.readouterr().err
    assert run(*arguments, "--ignore", "something_new") == 0
    note = "something_new of config.json was ignored, as asked for"
    assert note in capsys.readouterr().out
    assert ForgeWeights(locate(llama.parent / "forge"), Registry()).facts.notes == (note,)
    assert run("convert", "--from", "forge", "--to", "hf", llama.parent / "forge", llama.parent / "back") == 0
    assert note in (llama.parent / "back" / "README.md").read_text()
    capsys.readouterr()
    assert run("convert", "--from", "forge", "--to", "hf", "--ignore", "x", llama.parent / "forge", llama.parent / "more") == 2
    assert "does not support --ignore" in capsys.readouterr().err


def test_p1_a_recipe_names_the_keys_that_it_ignores(llama: Path, tmp_path: Path) -> None:
    configure(llama, something_new=5)
    recipe = tmp_path / "recipe.toml"
    registry = Registry()
    recipe.write_text(f'[model]\nfrom_hf = "{llama}"\n')
    _, faults = fill_from_hf(load_layers(recipe, [], Job, registry).tree, registry)
    assert "something_new: 5 is not known" in faults[0].message
    assert "model.from_hf_ignore" in faults[0].hint
    recipe.write_text(f'[model]\nfrom_hf = "{llama}"\nfrom_hf_ignore = ["something_new"]\n')
    tree, faults = fill_from_hf(load_layers(recipe, [], Job, registry).tree, registry)
    assert faults == []
    model = plain(tree)["model"]
    assert model["dim"] == 32
    assert model["from_hf_ignore"] == ["something_new"]
    component = decoder_of(FAMILIES["llama"], SIZES, "here")
    component = type(component)(**{**vars(component), "from_hf": str(llama), "from_hf_ignore": ("something_new",)})
    weights = InitialWeights(Job(model=component), registry)
    with pytest.raises(AttributeError):
        weights(None)  # type: ignore[arg-type]
    assert weights.notes == [f"{llama}: something_new of config.json was ignored, as asked for"]
    with pytest.raises(ValueError, match="from_hf_ignore needs from_hf"):
        type(component)(from_hf_ignore=("x",))


@pytest.mark.parametrize("several", [False, True])
def test_w12_generation_ends_where_its_settings_say(llama: Path, several: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Meta's chat models end with other ids than config.json names; the file wins, also behind a conversion."""
    folder = Folder(llama)
    coder = tokenizer_for(folder, None, Registry(), lambda _: None)
    prompt = [*coder.prefix, *coder.encode("1A").tolist()]
    made = generate(load_model(folder), [prompt], max_tokens=12)[0]  # type: ignore[arg-type]
    end = next(token for token in made[3:] if token not in made[:3])
    ends = [96, end] if several else end
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "temperature": 0.6}))
    assert run("convert", "--from", "hf", "--to", "forge", llama, llama.parent / "forge") == 0
    for place in (llama, llama.parent / "forge"):
        capsys.readouterr()
        assert run("generate", place, "--prompt", "1A", "--temperature", "0", "--max-tokens", "12", "--json") == 0
        assert json.loads(capsys.readouterr().out)["tokens"] == made.index(end) + 1


@pytest.mark.parametrize("ends", ["2", 2.5, True, -1, [2, "3"]])
def test_w12_ids_are_whole_numbers(llama: Path, ends: Any) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(Unsupported, match=r"generation_config\.json: eos_token_id .*expected a token id or a list"):
        Folder(llama)
    (llama / "generation_config.json").unlink()
    configure(llama, eos_token_id=ends)
    with pytest.raises(Unsupported, match=r"config\.json: eos_token_id"):
        Folder(llama)


def test_w12_a_folder_without_a_tokenizer_keeps_its_settings_of_generation(tmp_path: Path) -> None:
    source = saved(random_model("llama", {"num_hidden_layers": 1}), tmp_path / "source")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert run("convert", "--from", "hf", "--to", "hf", source, tmp_path / "target") == 0
    assert Folder(tmp_path / "target").facts.ends == (5, 7)


def test_w12_a_tokenizer_with_fewer_ids_is_said_and_with_more_refused() -> None:
    class Weights:
        model, tensors = decoder_of(FAMILIES["llama"], SIZES, "here"), {}
        facts = WeightsInfo(origin="here")

    class Tokenizer:
        vocab_size = 90

    said: list[str] = []
    check_tokenizer(Tokenizer(), Weights(), said.append)  # type: ignore[arg-type]
    assert said == ["the tokenizer has 90 ids; the last 7 of the model's 97 ids are padding"]
    Tokenizer.vocab_size = 97
    check_tokenizer(Tokenizer(), Weights(), said.append)  # type: ignore[arg-type]
    assert len(said) == 1
    Tokenizer.vocab_size = 98
    with pytest.raises(DataError, match="the tokenizer has 98 ids, but here has 97; pass another tokenizer"):
        check_tokenizer(Tokenizer(), Weights(), said.append)  # type: ignore[arg-type]
