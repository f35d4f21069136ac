"""Runs that train embedding and head whole beside an adapter (`modules_to_save` of the peft library)."""

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from forge_ckpt.checkpoint.locate import locate
from forge_core.batch import Batch
from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_models import DecoderConfig
from forge_models.components.lora import LoRAConfig
from forge_models.flops import counts_of
from forge_models.hf.streamed_forward import logits_of
from forge_models.lora_weights import MergedWeights, set_adapter
from forge_parallel.model.parallel_model import full
from forge_train.inference.stored import load_model, open_weights
from forge_train.run.loop import fit
from harness.closeness import wide
from harness.pool import World
from models.hf.command_line import run as command
from models.hf.zoo import random_model, saved, tokens
from train.runs import prepared, train
from train.whole_runs.test_lora_run import BETAS, RECIPE, Watched, exactly, in_fp64, of_peft, theirs, trained, weights_of

TRAIN = '--model.lora.train=["embedding", "head"]'
SAVED = {"embed.weight": "model.embed_tokens", "head.weight": "lm_head"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(random_model("llama", {}), tmp_path_factory.mktemp("base") / "hf")


@pytest.fixture
def recipe(base: Path, tmp_path: Path) -> Path:
    path = tmp_path / "lora.toml"
    path.write_text(RECIPE.format(base=base))
    return path


def their_name(name: str) -> str:
    return f"base_model.model.{SAVED[name]}.modules_to_save.default.weight" if name in SAVED else theirs(name)


def test_twenty_steps_equal_those_of_peft(recipe: Path, base: Path, tmp_path: Path) -> None:
    run, recorder = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=20", TRAIN])
    batches: list[list[Batch]] = []
    run.training.step = Watched(run.step, batches)  # type: ignore[assignment]
    run.model.part.forward = exactly(run.model.part.forward)
    model = of_peft(base, modules_to_save=["embed_tokens", "lm_head"])
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # transformers trains no row of the padding token, which is a token of this data
    parameters = dict(model.named_parameters())
    names = {name for name, _, _ in run.model.trainable()}
    assert SAVED.keys() < names
    assert {their_name(name) for name in names} == {name for name, p in parameters.items() if p.requires_grad}
    with torch.no_grad():
        for name, tensor, _ in run.model.trainable():
            if name in SAVED:  # both start from the base
                assert torch.equal(full(tensor), parameters[their_name(name)])
            parameters[their_name(name)].copy_(full(tensor))
    fit(run)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **BETAS)
    for step, parts in enumerate(batches):
        rows, labels = (torch.cat([getattr(part, key) for part in parts]) for key in ("tokens", "labels"))
        with wide():
            loss = F.cross_entropy(model(input_ids=rows).logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(recorder.losses[step], rel=1e-10)
    for name, tensor, _ in run.model.trainable():
        assert torch.allclose(full(tensor), parameters[their_name(name)], rtol=1e-8, atol=1e-10), name


def test_the_checkpoint_has_them_and_resumes_to_the_bit(recipe: Path, tmp_path: Path) -> None:
    whole = train(recipe, [f"--job.dir={tmp_path / 'whole'}", TRAIN])
    train(recipe, [f"--job.dir={tmp_path / 'cut'}", "--train.stop_at=2", TRAIN])
    pieces = train(recipe, [f"--job.dir={tmp_path / 'cut'}", TRAIN])
    assert pieces["weights"] == whole["weights"] and pieces["losses"] == whole["losses"][2:]
    run, before = trained(recipe, tmp_path / "run", TRAIN)
    changed = {name for name, tensor in weights_of(run).items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "lora_" in name or name in SAVED}
    manifest = locate(tmp_path / "run").manifest()
    assert {info.name.partition("/")[2] for info in manifest.tensors if info.name.startswith("model/")} == changed
    trained(recipe, tmp_path / "plain", "--train.max_steps=2")
    assert manifest.meta["base"] == locate(tmp_path / "plain").manifest().meta["base"]  # it is the same base
    begun, _ = prepared(recipe, [f"--job.dir={tmp_path / 'b'}", f"--model.lora.from_adapter={tmp_path / 'run'}", TRAIN])
    assert all(torch.equal(tensor, weights_of(run)[name]) for name, tensor in weights_of(begun).items())
    with pytest.raises(ForgeError, match=r"the model has no embed\.weight, head\.weight.*model\.lora\.train"):
        prepared(recipe, [f"--job.dir={tmp_path / 'c'}", f"--model.lora.from_adapter={tmp_path / 'run'}"])
    with pytest.raises(ForgeError, match=r"it lacks embed\.weight, head\.weight"):
        prepared(recipe, [f"--job.dir={tmp_path / 'c'}", f"--model.lora.from_adapter={tmp_path / 'plain'}", TRAIN])
    weights, model = open_weights(tmp_path / "run", Registry()), load_model(open_weights(tmp_path / "run", Registry()))
    known = model(tokens())
    with pytest.raises(ForgeError, match="other matrices"):
        set_adapter(model, open_weights(tmp_path / "plain", Registry()))
    set_adapter(model, open_weights(tmp_path / "cut", Registry()))
    set_adapter(model, weights)
    assert torch.equal(model(tokens()), known)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [["embedding", "head"], ["head"]], ids=["both", "head"])
def test_exports_compute_the_same_merged_and_not(
    recipe: Path, base: Path, tmp_path: Path, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The peft library opens the adapter with its modules, and what it has saved is opened here."""
    trained(recipe, tmp_path / "run", f"--model.lora.train={json.dumps(parts)}")
    weights, ids = open_weights(tmp_path / "run", Registry()), tokens()
    exact = logits_of(weights, ids, torch.float64)
    assert float((exact - logits_of(MergedWeights(weights), ids, torch.float64)).abs().max()) < 1e-5
    assert command("convert", tmp_path / "run", tmp_path / "merged", "--to", "hf") == 0
    head = load_file(tmp_path / "merged/model.safetensors")["lm_head.weight"]
    assert not torch.equal(head, load_file(base / "model.safetensors")["lm_head.weight"])
    assert command("convert", tmp_path / "run", tmp_path / "adapter", "--to", "peft") == 0
    assert "adapter: largest difference from the format's own library" in capsys.readouterr().out
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["embed_tokens", "lm_head"][2 - len(parts) :]
    with warnings.catch_warnings():  # of versions of transformers
        warnings.simplefilter("ignore")
        model: Any = peft.PeftModel.from_pretrained(in_fp64(base), str(tmp_path / "adapter")).double().eval()
    with torch.no_grad(), wide():
        known = logits_of(weights, ids, torch.float64)
        assert float((model(input_ids=ids).logits - known).abs().max()) < 1e-10
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(tmp_path / "theirs")
    again = open_weights(tmp_path / "theirs", Registry())
    assert float((logits_of(again, ids, torch.float64) - exact).abs().max()) < 1e-10


def on_ranks(recipe: Path, overrides: list[str]) -> list[float]:
    run, recorder = prepared(recipe, overrides)
    fit(run)
    return recorder.losses


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp_shard", "tp", "pp"])
def test_a_layout_equals_one_process(world: World, recipe: Path, tmp_path: Path, layout: str) -> None:
    """A vocabulary of 97 rows is split unevenly, so tensors are compared after they were saved."""
    keys = [TRAIN, "--train.micro_batch=1"]
    losses = on_ranks(recipe, [f"--job.dir={tmp_path / 'alone'}", *keys])
    found = world.run(on_ranks, 2, recipe, [f"--job.dir={tmp_path / 'cut'}", f"--parallel.{layout}=2", *keys])
    assert [pytest.approx(losses, rel=1e-10)] * 2 == found
    alone, cut = (open_weights(tmp_path / name, Registry()) for name in ("alone", "cut"))
    assert alone.tensors.keys() == cut.tensors.keys() > SAVED.keys()
    for name, tensor in alone.read(list(alone.tensors)).items():
        assert torch.allclose(cut.read([name])[name], tensor, rtol=1e-8, atol=1e-10), name


def test_tied_embeddings_and_what_is_twice_are_refused(base: Path) -> None:
    with pytest.raises(ValueError, match=r"lora\.train = \['head'\] does not support tied_embeddings.*remove lora\.train"):
        DecoderConfig(dim=16, heads=4, tied_embeddings=True, lora=LoRAConfig(train=("head",)))
    with pytest.raises(ValueError, match="train names a part twice: head, head"):
        LoRAConfig(train=("head", "head"))


def test_flops_count_the_gradient_of_a_head() -> None:
    """Two multiply-adds for each weight and token, in one more product."""
    counts = [
        counts_of(DecoderConfig(dim=16, layers=2, heads=4, ffn_dim=24, vocab_size=40, lora=LoRAConfig(train=parts)))
        for parts in ((), ("embedding",), ("head",))
    ]
    plain, embedding, head = (count.training(32) for count in counts if count is not None)
    assert embedding == plain
    assert head - plain == pytest.approx(2 * 16 * 40)
