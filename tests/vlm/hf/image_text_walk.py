"""Compares every image-text model of transformers that Forge knows how to give images with one process of transformers.

    PYTHONPATH=tests python -m vlm.hf.image_text_walk [MODEL_TYPE ...]

A class is built from a small configuration, and its weights are numbers that follow from their names. One step is compared, with
rows of text and rows with one image and with two: in one process with the class's own forward, its own loss of shifted labels and
torch's backward; on two ranks against one process, of which one has a micro-batch without an image; with a frozen vision tower;
with adapters against the peft library; and what it writes as a folder against what `from_pretrained` loads. The result is
`forge_vlm/hf/image_text_classes.json`, which `check` reads and docs/models/image-text.md shows.
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Mapping
from inspect import signature
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_core.batch import IGNORE, Batch
from forge_core.layout import Layout
from forge_core.protocols.weights import StoredTensor, WeightsInfo
from forge_models.components.lora import LoRAConfig
from forge_models.hf import causal_lm_weights
from forge_models.objectives import CrossEntropy
from forge_parallel.launch.local_processes import fork_local
from forge_parallel.model.parallel_model import ParallelModel, gathered
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_vlm.components.image_text import ImageTextConfig
from forge_vlm.hf.image_arguments import CROPS, FRAMED, KINDS, LINED, PATCHES, SHAPED, SIZED, TILES, WRAPPED
from forge_vlm.hf.image_text_classes import PATH
from models.hf.causal_lm_walk import Book, Found, _fill, _holds, _said, error, value_of
from vlm.hf.image_text_configs import IMAGE, SAME, small

LENGTH, MOST = 48, 24
LAYOUTS = {"dp": "dp2", "hsdp": "dp2"}
TOWERS = ("model.vision_tower.", "model.vision_model.", "model.visual.", "model.vision_encoder.", "vision_model.")
ROWS: tuple[tuple[int, ...], ...] = ((2,), (), (7, 30), (1,))
"""Tokens at which the images of each row begin."""

PATCHES_OF: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("cosmos3_edge", "gemma4", "hunyuan_vl", "hy_v4_vl", "lfm2_vl", "video_llama_3"), (12,)),
    **dict.fromkeys(("kimi_k25", "lighton_ocr", "llava_pixtral", "mistral3", "mistral_large4", "paddleocr_vl"), (3, 2, 2)),
    "inkling2": (4, 4, 3),
}
"""Shape in which a class takes a patch of 2 x 2 pixels; others take two frames of it in a row."""
FORMS = {**KINDS, "llava_pixtral": SIZED}
SIDES: Mapping[str, int] = {"got_ocr2": 16, "pp_chart2table": 16}
"""Width of a tile; 8 for others."""
TOKENS: Mapping[str, int] = dict.fromkeys(("deepseek_vl", "janus", "llava", "ovis2", "paligemma", "vipllava"), 16)
"""Placeholders of a tile or a cut image."""
PREFIX: Mapping[str, int] = {"paligemma": 6}
"""Number of tokens that are not learned, where it matters."""


def component(kind: str, **keys: Any) -> ImageTextConfig:
    """Returns the component of a small model."""
    return ImageTextConfig(**{"config": small(kind), "weights_from": "folder", "folder": "none", "patches": MOST, **keys})


def item(kind: str, row: int, number: int) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """Returns an image as items of Forge, as arguments of transformers, and its number of placeholders."""
    generator = torch.Generator().manual_seed(10 * row + number)
    odd, form = (row + number) % 2, FORMS[kind]
    if form == CROPS:
        height, width = (8, 16) if odd else (16, 8)
        pixels = torch.randn(3, 3, 8, 8, generator=generator)
        tokens = TOKENS.get(kind, 4 + 2 * height // 8 * (2 * width // 8 + 1))  # each row of patches ends with a token
        crops = torch.zeros(3, 3, 9, 8)
        crops[:, :, :8] = pixels
        crops[0, 0, 8, :4] = torch.tensor([height, width, tokens, 3.0])
        return [*crops], {"pixel_values": pixels[None], "image_sizes": torch.tensor([[height, width]])}, tokens
    if form in (TILES, WRAPPED):
        side = SIDES.get(kind, 8)
        pixels = torch.randn(3, side, side, generator=generator)
        return [pixels], {"pixel_values": pixels[None]}, TOKENS.get(kind, 4)
    rows, columns = (2, 4) if odd else (4, 6)
    shape = PATCHES_OF.get(kind, (24,))
    tokens = rows // 2 * (columns // 2 + (kind in LINED)) + 2 * (kind in FRAMED)
    if kind in ("inkling2", "llava_pixtral", "video_llama_3"):  # which merge no patches
        rows, columns = rows // 2, columns // 2
    patches = torch.randn(rows * columns, *shape, generator=generator)
    whole = torch.zeros(MOST + 1, prod(shape))
    whole[: len(patches)] = patches.flatten(1)
    whole[-1, :3] = torch.tensor([1.0, rows, columns])
    padded, grid = whole[None, :-1].clone(), torch.tensor([[rows, columns]])
    if form == PATCHES:
        given = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, rows, columns]])}
        given |= {"image_merge_sizes": torch.tensor([1])} if kind == "video_llama_3" else {}
    elif form == SIZED:
        lines = patches.view(rows, columns, 3, 2, 2)
        pixels = torch.zeros(1, 3, 8, 12)
        for line in range(rows):
            for column in range(columns):
                pixels[0, :, 2 * line : 2 * line + 2, 2 * column : 2 * column + 2] = lines[line, column]
        given = {"pixel_values": pixels, "image_sizes": 2 * grid}
    elif form == SHAPED:
        mask = (torch.arange(MOST) < rows * columns).long()[None]
        given = {"pixel_values": padded, "spatial_shapes": grid, "pixel_attention_mask": mask}
    else:
        places = torch.full((1, MOST, 2), -1)
        places[0, : rows * columns] = torch.tensor([[x, y] for y in range(rows) for x in range(columns)])
        given = {"pixel_values": padded, "image_position_ids": places}
    return [whole], given, tokens


def rows(kind: str) -> list[tuple[Batch, dict[str, Tensor]]]:
    """Returns one batch per row, with labels on some tokens that are no placeholders, and the arguments of transformers."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 90, (len(ROWS), LENGTH), generator=generator)
    labels = torch.randint(3, 90, (len(ROWS), LENGTH), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = IGNORE
    found = []
    for row, places in enumerate(ROWS):
        items, theirs = [], []
        for number, place in enumerate(places):
            one, given, count = item(kind, row, number)
            tokens[row, place : place + count] = IMAGE
            labels[row, place - 1 : place + count] = IGNORE
            items += one
            theirs.append(given)
        labels[row, : PREFIX.get(kind, 0)] = IGNORE
        labels[row, -1] = IGNORE  # which the shift of transformers cannot express
        extras = {"images": torch.stack(items), "image_rows": torch.arange(len(items))[None]} if items else {}
        whole = {name: torch.cat([each[name] for each in theirs]) for name in (theirs[0] if theirs else ())}
        if FORMS[kind] == WRAPPED and whole:
            whole["pixel_values"] = whole["pixel_values"][None]
        found.append((Batch(tokens[row : row + 1], labels[row : row + 1], extras=extras), whole))
    return found


def realized(model: ImageTextConfig, layout: str, recompute: bool = False, frozen: str = "") -> ParallelModel:
    """Collective: returns the model of a component in a layout; `frozen`: prefix of parameters that are not trained."""
    at = Layout.parse(layout)
    transforms: list[Any] = [FullyShard()] if at.data > 1 else []
    transforms += [TensorParallel(sequence_parallel=False)] if at.tp > 1 else []
    transforms += [Recompute(policy="full")] if recompute else []

    def make() -> Any:
        made = model.build()
        for name, parameter in made.named_parameters():
            if frozen and name.startswith(frozen):
                parameter.requires_grad_(False)
        return made

    return realize(Blueprint.of(make), Plan.of(transforms, at, None), Topology.of(at, torch.device("cpu")), _fill, "fp64", "fp64")


def step_of(kind: str, layout: str, together: int = 1, lora: bool = False, **options: Any) -> Found:
    """Collective: returns loss and gradients of one step in a layout; `together`: rows of a micro-batch."""
    model = realized(_adapted(kind) if lora else component(kind), layout, **options)
    share = len(ROWS) // model.topology.data_size
    mine = [batch for batch, _ in rows(kind)][model.topology.data_rank * share :][:share]
    joined = [_joined(mine[first : first + together]) for first in range(0, share, together)]
    result = Step(model, CrossEntropy())(joined)
    return result.numbers()["loss"], gathered(model, {name: tensor.grad for name, tensor, _ in model.trainable()})


def _joined(batches: list[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    most = max(len(batch.extras.get("images", ())) for batch in batches)
    items, numbers = [], torch.full((len(batches), most), -1)
    for row, batch in enumerate(batches):
        for number, one in enumerate(batch.extras.get("images", ())):
            numbers[row, number] = len(items)
            items.append(one)
    extras = {"images": torch.stack(items), "image_rows": numbers} if items else {}
    return Batch(torch.cat([b.tokens for b in batches]), torch.cat([b.labels for b in batches]), extras=extras)


def step_of_transformers(kind: str) -> Found:
    """Returns loss and gradients of the class's own forward with labels, which it shifts itself."""
    return _step(kind, _of_transformers(kind))


def step_of_peft(kind: str) -> Found:
    """Returns loss and gradients of adapters of the peft library of the layers that Forge gives one, by the names of Forge."""
    import peft

    with warnings.catch_warnings():  # of versions of transformers
        warnings.simplefilter("ignore")
        ours = {name for name in _adapted(kind).build().state_dict() if "lora_" in name}
        layers = sorted({name.rpartition(".")[0] for name in ours})
        model = peft.get_peft_model(_of_transformers(kind), peft.LoraConfig(r=4, lora_alpha=8, target_modules=layers))
    names = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            path, _, slot = name.removeprefix("base_model.model.").removesuffix(".default.weight").rpartition(".")
            names[name] = f"{path}.{slot.lower()}"
            parameter.data = value_of(names[name], tuple(parameter.shape), False)
    assert set(names.values()) == ours, "peft adapts other layers"
    loss, gradients = _step(kind, model)
    return loss, {names[name]: gradient for name, gradient in gradients.items()}


def _adapted(kind: str) -> ImageTextConfig:
    """Returns a component with adapters; in a model with experts, peft takes every feed-forward layer for one of them."""
    with torch.device("meta"):
        experts = bool(component(kind).build().stacks())
    return component(kind, lora=LoRAConfig(rank=4, alpha=8, targets=("*attn*",) if experts else ("all-linear",)))


def _of_transformers(kind: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    hollow: Any = Blueprint.of(component(kind).build)
    specs, attention = hollow.specs, hollow.module.config._attn_implementation
    known = CONFIG_MAPPING[SAME.get(kind, kind)].from_dict(json.loads(small(kind)))
    model: Any = _plain(AutoModelForImageTextToText.from_config(known, attn_implementation=attention)).double().train()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in specs.tensors and tensor.is_floating_point():
            tensor.data = value_of(name, tuple(tensor.shape), specs.tensors[name].init.kind == "ones")
    return model


def _step(kind: str, model: Any) -> Found:
    total, count = 0.0, sum(int((batch.labels != IGNORE).sum()) for batch, _ in rows(kind))
    for batch, given in rows(kind):
        labels = torch.full_like(batch.labels, IGNORE)
        labels[:, 1:] = batch.labels[:, :-1]
        own = {key: value.double() if value.is_floating_point() else value for key, value in given.items()}
        mean = model(input_ids=batch.tokens, labels=labels, use_cache=False, **own, **_marked(kind, model, batch)).loss
        loss = mean * int((labels != IGNORE).sum()) / count
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _plain(model: Any) -> Any:
    """Returns a model of transformers whose experts run one after the other, because its grouped products have no fp64."""
    for part in model.modules():
        if getattr(part, "config", None) is not None:
            part.config._experts_implementation = "eager"
    return model


def _marked(kind: str, model: Any, batch: Batch, learns: bool = True) -> dict[str, Tensor]:
    """Returns marks of the placeholders of images, or of tokens to learn, under the name by which a processor gives them."""
    takes = signature(type(model.get_base_model() if hasattr(model, "get_base_model") else model).forward).parameters
    marks = (batch.tokens == IMAGE).long()
    if kind == "paligemma":
        first = int((batch.labels[0] != IGNORE).nonzero()[0]) + 1 if learns else LENGTH
        marks = (torch.arange(LENGTH) >= first).long()[None]
    return {name: marks for name in ("token_type_ids", "mm_token_type_ids") if name in takes}


class Memory:
    """`Weights` in memory, of a class with numbers that follow from names."""

    def __init__(self, kind: str) -> None:
        self.model: Any = component(kind)
        self._model = realized(self.model, "dp1")
        self._values = {name: tensor.detach() for name, tensor in self._model.tensors()}
        self.tensors = {
            name: StoredTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._values.items()
        }
        self.facts = WeightsInfo(origin="the walk")

    def read(self, names: Any) -> dict[str, Tensor]:
        return {name: self._values[name] for name in names}

    def box(self, name: str, offset: Any, extent: Any) -> Tensor:
        return self._values[name][tuple(slice(a, a + n) for a, n in zip(offset, extent, strict=True))]

    def logits(self, batch: Batch) -> Tensor:
        with self._model.inference():
            return self._model.part(batch.tokens, **batch.extras)


def error_of_a_folder(kind: str) -> float:
    """Writes a folder; returns the largest difference of logits after `from_pretrained`, and 1 if reading it back differs."""
    from transformers import AutoModelForImageTextToText

    weights = Memory(kind)
    batch, given = rows(kind)[2]
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "folder"
        causal_lm_weights.write(path, weights, tokenizer=None, max_shard_bytes=10**9)
        model: Any = AutoModelForImageTextToText.from_pretrained(
            path, dtype=torch.float64, local_files_only=True, use_safetensors=True
        )
        _plain(model)
        folder = causal_lm_weights.CausalLMFolder(path, weights.model)
        back, ours = folder.read(list(folder.tensors)), weights.read(list(weights.tensors))
        if back.keys() != ours.keys() or any(not torch.equal(back[name], ours[name]) for name in ours):
            return 1.0
        own = {key: value.double() if value.is_floating_point() else value for key, value in given.items()}
        with torch.no_grad():
            theirs = model.eval()(input_ids=batch.tokens, use_cache=False, **own, **_marked(kind, model, batch, False)).logits
    found = weights.logits(batch)
    return float((theirs - found).abs().max() / found.abs().max())


def record_of(kind: str) -> dict[str, Any]:
    """Returns what holds for a class: True, or a text that says why not."""
    try:
        module: Any = Blueprint.of(component(kind).build).module
    except Exception as cause:
        return {"alone": _said(cause)}
    encoder = next(prefix for prefix in TOWERS if _has(module, prefix))
    record: dict[str, Any] = {"alone": _holds(lambda: error(step_of_transformers(kind), step_of(kind, "dp1")))}
    if record["alone"] is not True:
        return record
    alone = step_of(kind, "dp1")
    record["rows"] = _holds(lambda: error(alone, step_of(kind, "dp1", together=2)), why="rows of a batch change each other")
    record["folder"] = _holds(lambda: error_of_a_folder(kind))
    record["recompute"] = _holds(lambda: error(alone, step_of(kind, "dp1", recompute=True)))
    text = (alone[0], {name: value for name, value in alone[1].items() if not name.startswith(encoder)})
    record["frozen"] = _holds(lambda: error(text, step_of(kind, "dp1", frozen=encoder)))
    record["lora"] = _holds(lambda: error(step_of_peft(kind), step_of(kind, "dp1", lora=True)), why="it differs from peft")
    record["dp"] = _holds(lambda: fork_local(2, lambda: error(alone, step_of(kind, "dp2")), 120.0)[0])
    if record["dp"] is True:
        record["dp"] = _holds(
            lambda: fork_local(2, lambda: error(text, step_of(kind, "dp2", frozen=encoder, recompute=True)), 120.0)[0]
        )
    record["tp"] = _holds(lambda: fork_local(2, lambda: error(alone, step_of(kind, "tp2")), 120.0)[0])
    return record


def _has(module: Any, prefix: str) -> bool:
    return any(name.startswith(prefix) for name, _ in module.named_parameters())


def classes() -> dict[str, str]:
    """Returns the class of each model_type with an image-text model in transformers."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return dict(
        sorted(
            (config.model_type, model.__name__)
            for config, model in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.items()  # type: ignore[attr-defined]
            if model.__module__.startswith("transformers.")  # others may have been registered in this process
        )
    )


WHY: Mapping[str, str] = {
    **dict.fromkeys(
        ("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder"),
        "it has an encoder of text or a decoder that attends to an encoder, and Forge trains decoders",
    ),
    **dict.fromkeys(("apertus1p5", "chameleon", "emu3"), "it turns images into tokens of its vocabulary, in one way only"),
    **dict.fromkeys(("diffusion_gemma", "pi0"), "it is not trained by the prediction of the next token"),
    **dict.fromkeys(("fast_vlm", "gemma3n", "perception_lm"), "its vision tower is one of the timm library"),
    **dict.fromkeys(("instructblip", "instructblipvideo"), "its vision tower reads a text of its own"),
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), "it takes positions from the tokens around an image"),
    "ernie4_5_vl_moe": "a batch of text would not run the experts of images, so ranks would exchange other gradients",
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), "its processor numbers the images of a conversation"),
    "inkling2_loop": "its router computes in fp32 only, so it cannot be compared in fp64",
    "evolla": "it takes proteins, and no images",
    "mllama": "its images reach the text model by attention, and not in the place of tokens",
    "mistral4": "it takes no images; use [model] name = 'transformers'",
    "shieldgemma2": "it classifies images",
}
"""Why classes are not compared; others take images in a form that Forge does not make."""


def main() -> None:
    """Writes the records of the named model types, by default of all."""
    found = classes()
    book = Book(PATH, "kinds", list(found))
    for kind, name in found.items():
        if not sys.argv[1:] or kind in sys.argv[1:]:
            why = WHY.get(kind, "it takes images in a form that Forge does not make")
            record = {"class": name, **(record_of(kind) if kind in KINDS else {"alone": why})}
            book.keep(kind, record)
            print(kind, record, flush=True)


if __name__ == "__main__":
    main()
