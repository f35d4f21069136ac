"""Adapters of image-text classes of transformers: equal to the peft library on the same class, resumed, and exported."""

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
from forge_models.components.lora import LoRAConfig
from forge_models.hf.streamed_forward import fixed_rows, logits_of
from forge_models.lora_weights import MergedWeights
from forge_parallel.model.parallel_model import full
from forge_train.formats.forge import Cast
from forge_train.inference.stored import open_weights
from forge_train.run.loop import fit
from harness.closeness import wide
from models.hf.command_line import run as command
from train.runs import prepared
from train.whole_runs.test_lora_of_classes import theirs, with_constants_of
from train.whole_runs.test_lora_run import BETAS, Watched, exactly, trained, weights_of
from vlm.hf import image_text_walk as walk
from vlm.hf.image_text_folder import folder_of, recipe_of, records_of

EXACT = ["--precision.compute=fp64", "--precision.state=fp64", "--train.grad_clip=none", "--optimizer.weight_decay=0"]
EXACT += ["--model.lora.rank=4", "--model.lora.alpha=12", "--checkpoint.every=2"]
TEXT = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
"""For peft, what `blocks.*` is for Forge: the layers of the text model."""
TOWER = ["blocks.*.q_proj", "*.vision_tower.*.v_proj", "*.multi_modal_projector.linear_1"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder and recipe of a kind."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(kind: str) -> tuple[Path, Path]:
        if kind not in made:
            path = tmp_path_factory.mktemp(kind)
            folder = folder_of(path / "base", kind)
            made[kind] = folder, recipe_of(path / "recipe.toml", folder, records_of(path / "data"))
        return made[kind]

    return get


def of_peft(folder: Path, targets: str) -> Any:
    """The base in fp64 with an adapter of the peft library."""
    import transformers

    loaded = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    with wide():  # rotary positions would be rounded to fp32
        model = type(loaded)._from_config(loaded.config, dtype=torch.float64)
    model.load_state_dict(loaded.state_dict())
    with warnings.catch_warnings():  # of versions of transformers
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model.train(), peft.LoraConfig(r=4, lora_alpha=12, target_modules=targets))


def images_of(folder: Path, batch: Batch) -> dict[str, torch.Tensor]:
    """Arguments of transformers: tiles of one image after the other, and where they are for Gemma."""
    config = json.loads((folder / "config.json").read_text())
    marks = (batch.tokens == config.get("image_token_id", config.get("image_token_index"))).long()
    given = {"token_type_ids": marks} if config["model_type"] == "gemma3" else {}
    return given | ({"pixel_values": batch.extras["images"].double()} if batch.extras else {})


class Seen(Watched):
    """A step that keeps its batches, whose rows have padding behind their one document."""

    def __call__(self, batches: Any, **more: Any) -> Any:
        self.batches.append(list(batches))
        return self.step(batches, **more)


CASES = [
    pytest.param("llava", [], TEXT, id="llava"),
    pytest.param("gemma3", ['--model.lora.targets=["all-linear"]'], TEXT, id="gemma3", marks=pytest.mark.slow),
    pytest.param(
        "llava", [f"--model.lora.targets={json.dumps(TOWER)}"],
        r".*(language_model.*\.q_proj|vision_tower.*\.v_proj|projector\.linear_1)", id="tower", marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "ours", "targets"), CASES)
def test_twenty_steps_equal_those_of_peft(sources: Any, tmp_path: Path, kind: str, ours: list[str], targets: str) -> None:
    folder, recipe = sources(kind)
    run, recorder = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=20", *EXACT, *ours])
    batches: list[list[Batch]] = []
    run.training.step = Seen(run.step, batches)  # type: ignore[assignment]
    run.model.part.forward = exactly(run.model.part.forward)
    model = of_peft(folder, targets)
    with_constants_of(model.base_model.model, run.model.part)
    parameters = dict(model.named_parameters())
    assert {theirs(name) for name, _, _ in run.model.trainable()} == {n for n, p in parameters.items() if p.requires_grad}
    with torch.no_grad():
        for name, tensor, _ in run.model.trainable():
            parameters[theirs(name)].copy_(full(tensor))
    fit(run)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **BETAS)
    for step, parts in enumerate(batches):
        count = sum(int((part.labels != -100).sum()) for part in parts)
        optimizer.zero_grad()
        total = 0.0
        for part in parts:
            with wide():
                logits = model(input_ids=part.tokens, use_cache=False, **images_of(folder, part)).logits
                loss = F.cross_entropy(logits.flatten(0, 1), part.labels.flatten(), ignore_index=-100, reduction="sum") / count
                loss.backward()
            total += loss.item()
        optimizer.step()
        assert total == pytest.approx(recorder.losses[step], rel=1e-9)
    assert len(batches) == 20 and abs(recorder.losses[-1] - recorder.losses[0]) > 1e-3
    for name, tensor, _ in run.model.trainable():
        assert torch.allclose(full(tensor), parameters[theirs(name)], rtol=1e-7, atol=1e-9), name


@pytest.mark.slow
def test_a_checkpoint_has_the_adapter_alone_and_exports_compute_the_same(
    sources: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    folder, recipe = sources("gemma3")
    run, before = trained(recipe, tmp_path / "run", *EXACT, "--train.max_steps=2")
    after = weights_of(run)
    adapter = {name for name in after if "lora_" in name}
    assert {name for name in after if not torch.equal(after[name], before[name])} == adapter
    manifest = locate(tmp_path / "run").manifest()
    assert {info.name.partition("/")[2] for info in manifest.tensors if info.name.startswith("model/")} == adapter
    assert manifest.meta["base"]["tensors"] == len(load_file(folder / "model.safetensors"))
    resumed, _ = trained(recipe, tmp_path / "run", *EXACT)
    whole, _ = trained(recipe, tmp_path / "whole", *EXACT)
    assert all(torch.equal(tensor, weights_of(whole)[name]) for name, tensor in weights_of(resumed).items())

    weights = open_weights(tmp_path / "run", Registry())
    ids, extras = fixed_rows(weights.model)
    assert "images" in extras
    exact = logits_of(weights, ids, torch.float64, extras)
    merged = logits_of(MergedWeights(Cast(weights, "float64")), ids, torch.float64, extras)
    assert float((exact - merged).abs().max()) < 1e-5
    given = {"pixel_values": extras["images"].double(), "token_type_ids": (ids == 260).long()}
    assert int(given["token_type_ids"].sum()) == 4 * len(extras["images"])

    assert command("convert", tmp_path / "run", tmp_path / "merged", "--to", "hf") == 0
    assert "merged into its base" in capsys.readouterr().out
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    with torch.no_grad():
        assert float((loaded(input_ids=ids, **given).logits - exact).abs().max()) < 1e-4
    transformers.AutoProcessor.from_pretrained(tmp_path / "merged", local_files_only=True)

    assert command("convert", tmp_path / "run", tmp_path / "adapter", "--to", "peft") == 0
    assert "adapter: largest difference from the format's own library" in capsys.readouterr().out
    base = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        opened = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
        assert float((opened(input_ids=ids, **given).logits - exact).abs().max()) < 1e-4
    begun, _ = prepared(recipe, [f"--job.dir={tmp_path / 'next'}", *EXACT, f"--model.lora.from_adapter={tmp_path / 'adapter'}"])
    found = {name: tensor for name, tensor in weights_of(begun).items() if "lora_" in name}
    assert found and all(torch.equal(tensor, weights_of(whole)[name]) for name, tensor in found.items())


def adapted(kind: str, *targets: str) -> set[str]:
    model = walk.component(kind, lora=LoRAConfig(targets=targets)).build()
    return {name.removesuffix(".lora_a") for name, _ in model.named_parameters() if name.endswith("lora_a")}


def test_a_tower_has_adapters_only_if_a_target_names_it() -> None:
    """CLIP and Llama both have a `q_proj`."""
    text = "model.language_model.layers."
    assert adapted("llava", "q_proj") == {f"{text}{index}.self_attn.q_proj" for index in range(2)}
    assert adapted("llava", "blocks.1.mlp.*") == {f"{text}1.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert all(name.startswith(text) for name in adapted("llava", "all-linear"))
    tower = "model.vision_tower.encoder.layers."
    assert adapted("llava", "*.vision_tower.*.q_proj") == {f"{tower}{index}.self_attn.q_proj" for index in range(3)}
    assert adapted("llava", "*.1.self_attn.q_proj", "*multi_modal_projector*") == {
        f"{text}1.self_attn.q_proj", "model.multi_modal_projector.linear_1", "model.multi_modal_projector.linear_2"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"targets": ("*.vision_tower.*.w1",)}, r"'\*\.vision_tower\.\*\.w1' matches no matrix"),
        ({"targets": ("out_proj",)}, r"'out_proj' matches no matrix"),
        ({"base_format": "nf4"}, r"model.lora.base_format = 'nf4' is for the families"),
        ({"train": ("head",)}, r"model.lora.train = \['head'\] is for the families"),
    ],
)
def test_adapters_that_cannot_be_are_refused(keys: dict[str, Any], match: str) -> None:
    with pytest.raises(ForgeError, match=match):
        walk.component("llava", lora=LoRAConfig(**keys)).build()
