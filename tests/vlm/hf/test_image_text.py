"""`[model] name = "transformers_image_text"`: a class's own forward with images, and what is refused."""

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from forge_core.errors import ConfigError, DataError
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_models.components.lora import LoRAConfig
from forge_models.hf.config import Unsupported
from forge_train.recipe.load import load_recipe
from forge_vlm.checks import image_text_classes_are_compared
from forge_vlm.components.image_text import ImageTextConfig
from forge_vlm.data.documents import BrokenRecord, Picture, Words
from forge_vlm.data.processor_inputs import ProcessorInputs
from forge_vlm.hf import image_text_classes
from models.hf.causal_lm_walk import CONSTRAINTS
from train.runs import prepared
from vlm.hf import image_text_walk as walk
from vlm.hf.image_text_folder import folder_of, processor_of, recipe_of, records_of

FAST = ("llava", "qwen2_5_vl")
"""The last layer of a tower unused; patches with positions on three axes. The others are slow."""
FORMS = ("gemma4", "llama4", "llava_next", "lfm2_vl", "llava_pixtral", "paligemma")
"""One class of each further form, among them one whose body is the class itself; three of them are slow."""


@pytest.mark.parametrize("kind", FAST)
def test_one_process_equals_the_class_itself(kind: str) -> None:
    ours = walk.step_of(kind, "dp1")
    assert walk.error(walk.step_of_transformers(kind), ours) < 5e-6
    assert walk.error(ours, walk.step_of(kind, "dp1", together=4)) < 5e-6


@pytest.mark.parametrize("kind", [*FORMS[:3], *(pytest.param(kind, marks=pytest.mark.slow) for kind in FORMS[3:])])
def test_every_form_of_images_equals_the_class_itself(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    if kind == "llama4":  # whose forward fails in transformers 5.24.0, because its text model returns none
        monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)
    assert walk.error(walk.step_of_transformers(kind), walk.step_of(kind, "dp1", together=2)) < 5e-6


@pytest.mark.slow
def test_pixtral_in_a_llava_holds_all_that_is_compared() -> None:
    """A llava whose tower takes images of any size, which the record of llava is not about."""
    assert all(value is True for value in walk.record_of("llava_pixtral").values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(walk.KINDS))
def test_every_class_is_as_recorded(kind: str) -> None:
    record = image_text_classes.records()["kinds"][kind]
    assert walk.record_of(kind) == {key: value for key, value in record.items() if key != "class"}


def test_every_class_of_transformers_has_a_record() -> None:
    import transformers

    document = image_text_classes.records()
    assert f"\ntransformers=={document['transformers']}\n" in CONSTRAINTS.read_text(), "run vlm.hf.image_text_walk"
    if transformers.__version__ != document["transformers"]:
        pytest.skip("the records are those of another version of transformers")
    assert {kind: one["class"] for kind, one in document["kinds"].items()} == walk.classes()


def test_the_page_shows_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "docs" / "_ext"))
    table = import_module("image_text_table")
    assert table.PAGE.read_text() == table.page(), "run `python docs/_ext/image_text_table.py`"


def test_images_change_the_logits_of_their_row_only() -> None:
    weights = walk.Memory("llava")
    batch = walk._joined([one for one, _ in walk.rows("llava")])
    other: Any = {**batch.extras, "images": batch.extras["images"].clone()}
    other["images"][0] += 1
    before = weights.logits(batch)
    after = weights.logits(walk.Batch(batch.tokens, batch.labels, extras=other))
    assert torch.equal(before[1:], after[1:])
    assert torch.equal(before[0, :2], after[0, :2])
    assert (before[0, 2:] - after[0, 2:]).abs().amax(-1).min() > 1e-6


@pytest.mark.parametrize("kind", FAST)
def test_a_batch_of_text_gives_the_parameters_of_the_tower_gradients_of_zero(kind: str) -> None:
    """Those that a batch with images gives a gradient, so that all ranks communicate alike; logits are those of the class."""
    batches = [one for one, _ in walk.rows(kind)]
    given = []
    for batch in (walk._joined(batches), walk.Batch(torch.full((1, 6), 5), None)):
        model: Any = walk.realized(walk.component(kind), "dp1")
        model.part(batch.tokens, **(batch.extras or {})).square().sum().backward()
        given.append({name: tensor.grad for name, tensor in model.tensors() if tensor.grad is not None})
    seeing, text = given
    assert seeing.keys() == text.keys()
    tower = [name for name in text if "vision" in name or "visual" in name]
    assert len(tower) > 5 and not any(text[name].any() for name in tower)
    assert any(seeing[name].any() for name in tower)


@pytest.mark.parametrize("change", ["fewer", "more", "swapped"])
def test_rows_with_other_numbers_of_placeholders_are_refused(change: str) -> None:
    """transformers counts those of the whole batch, and would take the image of another row."""
    weights = walk.Memory("llava")
    batch = walk._joined([one for one, _ in walk.rows("llava")])
    tokens, numbers = batch.tokens.clone(), batch.extras["image_rows"].clone()
    if change == "fewer":
        tokens[0, 2] = 5
    elif change == "more":
        tokens[1, 2] = walk.IMAGE
    else:
        numbers[[0, 1]] = numbers[[1, 0]]
    with pytest.raises(ValueError, match=r"a row has more or fewer placeholders than its images need: row \d"):
        weights.logits(walk.Batch(tokens, batch.labels, extras={**batch.extras, "image_rows": numbers}))


def test_a_patch_class_gets_the_grid_of_an_image_that_the_processor_makes() -> None:
    """Its processor needs torchvision for videos, so that its image processor stands for it."""
    from transformers import Qwen2VLImageProcessorPil

    arguments = walk.component("qwen2_5_vl", patches=64).image_arguments()
    images = Qwen2VLImageProcessorPil(patch_size=2, merge_size=2, min_pixels=16, max_pixels=256)

    class Processor:
        image_token = "<|image_pad|>"

        def __call__(self, images: Any, text: Any, **_: Any) -> dict[str, Any]:
            found = own(images=images, return_tensors="np")
            replacement = self.image_token * int(found["image_grid_thw"].prod() // 4)
            return {**found, "text_replacement_offsets": [[{"replacement": replacement}]], "input_ids": text}

    own = images
    image = Image.new("RGB", (12, 20), (9, 90, 200))
    made = ProcessorInputs(arguments, Processor()).made(image)
    theirs = own(images=[image], return_tensors="pt")
    given = arguments.arguments(torch.from_numpy(made.items), torch.float32)
    assert torch.equal(given["image_grid_thw"], theirs["image_grid_thw"])
    assert torch.equal(given["pixel_values"], theirs["pixel_values"])
    assert made.counts == [made.text.count("<|image_pad|>")] == arguments.counts(torch.from_numpy(made.items)).tolist()
    with pytest.raises(BrokenRecord, match=r"patches, but a batch has room for 24; raise model.patches"):
        ProcessorInputs(walk.component("qwen2_5_vl").image_arguments(), Processor()).made(image.resize((16, 16)))


def test_the_image_token_in_the_words_of_a_user_is_text() -> None:
    """Only the template may write the token of an image."""
    inputs = ProcessorInputs(walk.component("gemma3").image_arguments(), processor_of("gemma3"))
    parts = [Picture("a", token=True), Words("<start_of_image>", trusted=True), Words("see <start_of_image>", learned=False)]
    placed = list(inputs._placed(parts))
    assert [type(part).__name__ for part in placed] == ["Picture", "Words"]
    with pytest.raises(BrokenRecord, match=r"has 1 images, but the chat template writes '<start_of_image>' 2 times"):
        list(inputs._placed([*parts, Words("<start_of_image>", trusted=True)]))


REFUSED = {
    "unknown": ({"model_type": "unheard_of"}, "is not known to transformers"),
    "text": ({"model_type": "llama"}, "has no image-text model"),
    "form": ({"model_type": "aria"}, "takes images in a form that Forge does not make"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_class_that_is_not_known_is_refused_by_name(case: str) -> None:
    values, message = REFUSED[case]
    with pytest.raises(Unsupported, match=message), torch.device("meta"):
        ImageTextConfig(config=json.dumps(values), weights_from="draw").build()


def test_dropout_of_a_tower_is_refused() -> None:
    values = json.loads(walk.small("llava"))
    values["vision_config"]["attention_dropout"] = 0.1
    with pytest.raises(Unsupported, match=r"set attention_dropout = 0.0 in vision_config"), torch.device("meta"):
        ImageTextConfig(config=json.dumps(values), weights_from="draw").build()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folder and records."""
    path = tmp_path_factory.mktemp("image_text")
    return folder_of(path / "source", "llava"), records_of(path / "data", 3)


LAYOUTS = {
    "pp": ("--parallel.pp=2", r"parallel.pp: = 2, but a class with images is offered with data and tensor parallelism alone"),
    "cp": ("--parallel.cp=2", r"parallel.cp: = 2, but a class with images"),
    "packing": ("--data.packing=best_fit", r"data.packing: = 'best_fit', but a class with images counts positions"),
    "compile": ("--transforms.compile.mode=default", r"compile"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_check_refuses_what_no_comparison_has_shown(case: str, source: tuple[Path, Path], tmp_path: Path) -> None:
    option, message = LAYOUTS[case]
    recipe = recipe_of(tmp_path / "recipe.toml", *source)
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe, [option], 2, Registry())


def faults_of(kind: str, layout: str, **keys: Any) -> list[str]:
    job: Any = SimpleNamespace(model=walk.component(kind, **keys), data=None, hooks=())
    return [f"{fault.key}: {fault.message}" for fault in image_text_classes_are_compared(job, Layout.parse(layout))]


def test_what_a_class_lacks_is_refused_for_this_class(monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults_of("mistral3", "dp2tp2", lora=LoRAConfig()) == []
    (fault,) = faults_of("qwen3_vl", "tp2")
    assert fault.startswith("parallel.tp: = 2 is not for model_type 'qwen3_vl': tensor: the model's class comes with no plan")
    (fault,) = faults_of("mistral3", "cp2")
    assert fault.startswith("parallel.cp: = 2, but a class with images")
    kinds = image_text_classes.records()["kinds"]
    monkeypatch.setitem(kinds, "mistral3", {**kinds["mistral3"], "lora": "it differs from peft", "tp": "it differs"})
    assert faults_of("mistral3", "dp2") == []
    assert faults_of("mistral3", "tp2", lora=LoRAConfig()) == [
        "model.lora: is not for model_type 'mistral3': it differs from peft",
        "parallel.tp: = 2 is not for model_type 'mistral3': it differs",
    ]
    monkeypatch.setitem(kinds, "mistral3", {**kinds["mistral3"], "dp": "it differs"})
    assert "is refused: it differs" in faults_of("mistral3", "dp1")[0]
    assert image_text_classes.offer_refusal("aria", "lora") == "adapters have not been compared with the peft library"


def _without_processor(folder: Path, _records: Path) -> None:
    (folder / "processor_config.json").unlink()


def _one_image_less(_folder: Path, records: Path) -> None:
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    lines[1]["image"] = lines[1]["image"][:1]
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _other_size(folder: Path, _records: Path) -> None:
    path = folder / "processor_config.json"
    values = json.loads(path.read_text())
    values["image_processor"]["crop_size"] = {"height": 16, "width": 16}
    values["image_processor"]["size"] = {"shortest_edge": 16}
    path.write_text(json.dumps(values))


def _other_count(folder: Path, _records: Path) -> None:
    path = folder / "processor_config.json"
    values = json.loads(path.read_text())
    values["num_additional_image_tokens"] = 0
    path.write_text(json.dumps(values))


FAULTS: dict[str, tuple[Any, str, str]] = {
    "no processor": (_without_processor, "", "has no processor .*copy the processor of the model there"),
    "images": (_one_image_less, "", "has 2 <image> and 1 images"),
    "size": (_other_size, "", r"makes images of shape \(3, 16, 16\), but the model takes \(3, 8, 8\)"),
    "count": (_other_count, "", r"writes 15 tokens \d+, but the model makes 16 vectors"),
    "truncate": (lambda *_: None, 'too_long = "truncate"', "cannot be cut; set too_long = 'error' or 'skip'"),
    "long": (lambda *_: None, "", "tokens, images included, and a row has 32"),
    "tiling": (lambda *_: None, 'tiling = { name = "grid" }', "says how images are prepared, but the processor"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_bad_data_is_refused_with_what_to_do(case: str, tmp_path: Path) -> None:
    change, key, message = FAULTS[case]
    folder, records = folder_of(tmp_path / "source", "llava"), records_of(tmp_path / "data", 3)
    change(folder, records)
    recipe = recipe_of(tmp_path / "recipe.toml", folder, records)
    recipe.write_text(recipe.read_text().replace(f'template = "{folder}"', f'template = "{folder}"\n{key}'))
    length = ["--data.sequence_length=32"] if case == "long" else []
    with pytest.raises((DataError, ConfigError), match=message):
        prepared(recipe, [f"--job.dir={tmp_path / 'run'}", *length])


def test_rows_of_patches_are_not_read_beyond_an_image() -> None:
    arguments = walk.component("qwen2_vl").image_arguments()
    (item,), given, count = walk.item("qwen2_vl", 0, 1)
    item[-2] = np.nan
    found = arguments.arguments(item[None], torch.float64)
    assert torch.equal(found["pixel_values"], given["pixel_values"].double())
    assert arguments.counts(item[None]).tolist() == [count]
