"""Compares every image-text model of transformers that Forge knows how to give images with one process of transformers.

    PYTHONPATH=tests python -m vlm.hf.image_text_walk [MODEL_TYPE ...]

A class is built from a small configuration, and its weights are numbers that follow from their names. One step is compared, with
rows of text and rows with one image and with two: in one process with the class's own forward, its own loss of shifted labels and
torch's backward; on two ranks against one process, of which one has a micro-batch without an image; with a frozen vision tower;
and what it writes as a folder against what `from_pretrained` loads. The result is `forge_vlm/hf/image_text_classes.json`, which
`check` reads and docs/models/image-text.md shows.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_core.batch import IGNORE, Batch
from forge_core.layout import Layout
from forge_core.protocols.weights import StoredTensor, WeightsInfo
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
from forge_vlm.components.image_text import ImageTextConfig
from forge_vlm.hf.image_arguments import KINDS, PATCHES, WRAPPED
from forge_vlm.hf.image_text_classes import PATH
from models.hf.causal_lm_walk import Found, _fill, _holds, _said, error, value_of

VOCAB, LENGTH, IMAGE, MOST = 96, 48, 95, 24
LAYOUTS = {"dp": "dp2", "hsdp": "dp2"}
ROWS: tuple[tuple[int, ...], ...] = ((2,), (), (7, 30), (1,))
"""Tokens at which the images of each row begin."""

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 2,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
MERGING = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
VIDEO = {"video_token_id": 94, "vision_start_token_id": 92, "vision_end_token_id": 93}
CLIP = {**VISION, "model_type": "clip_vision_model"}
LLAMA = {**TEXT, "model_type": "llama"}
COHERE = {**TEXT, "model_type": "cohere2"}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "aya_vision": {
        "text_config": COHERE,
        "vision_config": VISION,
        "downsample_factor": 2,
        "adapter_layer_norm_eps": 1e-6,
        "alignment_intermediate_size": 16,
    },
    "cohere2_vision": {
        "text_config": COHERE,
        "vision_config": VISION,
        "downsample_factor": 2,
        "alignment_intermediate_size": 16,
    },
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 6, "query_pre_attn_scalar": 8},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
    },
    "glm4v": {
        "text_config": {**TEXT, **ROPE},
        "vision_config": {**MERGING, "out_hidden_size": 32, "image_size": 16},
        "video_token_id": 94,
        "image_start_token_id": 92,
        "image_end_token_id": 93,
    },
    "idefics3": {"text_config": LLAMA, "vision_config": VISION, "scale_factor": 2},
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**VISION, "image_size": [8, 8], "patch_size": [2, 2]},
        "downsample_ratio": 0.5,
        "image_seq_length": 4,
    },
    "llava": {"text_config": LLAMA, "vision_config": CLIP},
    "qwen2_5_vl": {
        "text_config": {**TEXT, **ROPE},
        "vision_config": {**MERGING, "out_hidden_size": 32, "window_size": 8, "fullatt_block_indexes": [1]},
        **VIDEO,
    },
    "qwen2_vl": {
        "text_config": {**TEXT, **ROPE},
        "vision_config": {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "patch_size": 2,
            "mlp_ratio": 2,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        **VIDEO,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, **ROPE},
        "vision_config": {
            **MERGING,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        **VIDEO,
    },
    "smolvlm": {"text_config": LLAMA, "vision_config": VISION, "scale_factor": 2},
    "vipllava": {"text_config": LLAMA, "vision_config": CLIP, "vision_feature_layers": [-1, -2]},
}
"""Small configurations by model_type."""


def small(kind: str) -> str:
    """Returns the content of config.json of a small model."""
    from transformers import CONFIG_MAPPING

    values = {"image_token_id": IMAGE, "image_token_index": IMAGE, **CONFIGS[kind]}
    full = CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(values))).to_dict()
    _without_dropout(full)
    return json.dumps(full, default=str)


def _without_dropout(values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            _without_dropout(value)
        elif "drop" in str(key) and isinstance(value, float):
            values[key] = 0.0


def component(kind: str, **keys: Any) -> ImageTextConfig:
    """Returns the component of a small model."""
    return ImageTextConfig(**{"config": small(kind), "weights_from": "folder", "folder": "none", "patches": MOST, **keys})


def item(kind: str, row: int, number: int) -> tuple[Tensor, dict[str, Tensor], int]:
    """Returns an image as an item of Forge, as arguments of transformers, and its number of placeholders."""
    generator = torch.Generator().manual_seed(10 * row + number)
    if KINDS[kind] != PATCHES:
        pixels = torch.randn(3, 8, 8, generator=generator)
        tokens = {"llava": 16, "vipllava": 16}.get(kind, 4)
        return pixels, {"pixel_values": pixels[None]}, tokens
    rows, columns = (2, 4) if (row + number) % 2 else (4, 6)
    patches = torch.randn(rows * columns, 3 * 2 * 2 * 2, generator=generator)
    whole = torch.zeros(MOST + 1, patches.shape[1])
    whole[: len(patches)] = patches
    whole[-1, :3] = torch.tensor([1.0, rows, columns])
    return whole, {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, rows, columns]])}, rows * columns // 4


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
            items.append(one)
            theirs.append(given)
        labels[row, -1] = IGNORE  # which the shift of transformers cannot express
        extras = {"images": torch.stack(items), "image_rows": torch.arange(len(items))[None]} if items else {}
        whole = {name: torch.cat([each[name] for each in theirs]) for name in (theirs[0] if theirs else ())}
        if KINDS[kind] == WRAPPED and whole:
            whole["pixel_values"] = whole["pixel_values"][None]
        found.append((Batch(tokens[row : row + 1], labels[row : row + 1], extras=extras), whole))
    return found


def realized(model: ImageTextConfig, layout: str, recompute: bool = False, frozen: str = "") -> ParallelModel:
    """Collective: returns the model of a component in a layout; `frozen`: prefix of parameters that are not trained."""
    at = Layout.parse(layout)
    transforms: list[Any] = [FullyShard()] if at.data > 1 else []
    transforms += [Recompute(policy="full")] if recompute else []

    def make() -> Any:
        made = model.build()
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(not (frozen and name.startswith(frozen)))
        return made

    return realize(Blueprint.of(make), Plan.of(transforms, at, None), Topology.of(at, torch.device("cpu")), _fill, "fp64", "fp64")


def step_of(kind: str, layout: str, together: int = 1, **options: Any) -> Found:
    """Collective: returns loss and gradients of one step in a layout; `together`: rows of a micro-batch."""
    model = realized(component(kind), layout, **options)
    share = len(ROWS) // model.topology.data_size
    mine = [batch for batch, _ in rows(kind)][model.topology.data_rank * share :][:share]
    joined = [_joined(mine[first : first + together]) for first in range(0, share, together)]
    result = Step(model, CrossEntropy())(joined)
    return result.numbers()["loss"], gathered(model, {name: tensor.grad for name, tensor, _ in model.trainable()})


def _joined(batches: list[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    items, numbers = [], torch.full((len(batches), 2), -1)
    for row, batch in enumerate(batches):
        for number, one in enumerate(batch.extras.get("images", ())):
            numbers[row, number] = len(items)
            items.append(one)
    extras = {"images": torch.stack(items), "image_rows": numbers} if items else {}
    return Batch(torch.cat([b.tokens for b in batches]), torch.cat([b.labels for b in batches]), extras=extras)


def step_of_transformers(kind: str) -> Found:
    """Returns loss and gradients of the class's own forward with labels, which it shifts itself."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    specs = Blueprint.of(component(kind).build).specs
    known = CONFIG_MAPPING[kind].from_dict(json.loads(small(kind)))
    model: Any = AutoModelForImageTextToText.from_config(known, attn_implementation="sdpa").double().train()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in specs.tensors and tensor.is_floating_point():
            tensor.data = value_of(name, tuple(tensor.shape), specs.tensors[name].init.kind == "ones")
    total, count = 0.0, sum(int((batch.labels != IGNORE).sum()) for batch, _ in rows(kind))
    for batch, given in rows(kind):
        labels = torch.full_like(batch.labels, IGNORE)
        labels[:, 1:] = batch.labels[:, :-1]
        marks = (batch.tokens == IMAGE).long()
        name = "token_type_ids" if kind == "gemma3" else "mm_token_type_ids" if KINDS[kind] == PATCHES else ""
        own = {key: value.double() if value.is_floating_point() else value for key, value in given.items()}
        more = {name: marks} if name else {}
        mean = model(input_ids=batch.tokens, labels=labels, use_cache=False, **own, **more).loss
        loss = mean * int((labels != IGNORE).sum()) / count
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


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
        folder = causal_lm_weights.CausalLMFolder(path, weights.model)
        back, ours = folder.read(list(folder.tensors)), weights.read(list(weights.tensors))
        if back.keys() != ours.keys() or any(not torch.equal(back[name], ours[name]) for name in ours):
            return 1.0
        marks = (batch.tokens == IMAGE).long()
        name = "token_type_ids" if kind == "gemma3" else "mm_token_type_ids" if KINDS[kind] == PATCHES else ""
        own = {key: value.double() if value.is_floating_point() else value for key, value in given.items()}
        with torch.no_grad():
            theirs = model.eval()(input_ids=batch.tokens, use_cache=False, **own, **({name: marks} if name else {})).logits
    found = weights.logits(batch)
    return float((theirs - found).abs().max() / found.abs().max())


def record_of(kind: str) -> dict[str, Any]:
    """Returns what holds for a class: True, or a text that says why not."""
    try:
        module: Any = Blueprint.of(component(kind).build).module
    except Exception as cause:
        return {"alone": _said(cause)}
    encoder = next(prefix for prefix in ("model.vision_tower.", "model.vision_model.", "model.visual.") if _has(module, prefix))
    record: dict[str, Any] = {"alone": _holds(lambda: error(step_of_transformers(kind), step_of(kind, "dp1")))}
    if record["alone"] is not True:
        return record
    alone = step_of(kind, "dp1")
    record["rows"] = _holds(lambda: error(alone, step_of(kind, "dp1", together=2)), why="rows of a batch change each other")
    record["folder"] = _holds(lambda: error_of_a_folder(kind))
    record["recompute"] = _holds(lambda: error(alone, step_of(kind, "dp1", recompute=True)))
    text = (alone[0], {name: value for name, value in alone[1].items() if not name.startswith(encoder)})
    record["frozen"] = _holds(lambda: error(text, step_of(kind, "dp1", frozen=encoder)))
    record["dp"] = _holds(lambda: fork_local(2, lambda: error(alone, step_of(kind, "dp2")), 120.0)[0])
    if record["dp"] is True:
        record["dp"] = _holds(
            lambda: fork_local(2, lambda: error(text, step_of(kind, "dp2", frozen=encoder, recompute=True)), 120.0)[0]
        )
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


def main() -> None:
    """Writes the records of the named model types, by default of all."""
    import transformers

    document = json.loads(PATH.read_text()) if PATH.exists() and sys.argv[1:] else {"kinds": {}}
    document["transformers"] = transformers.__version__
    for kind, name in classes().items():
        if not sys.argv[1:] or kind in sys.argv[1:]:
            why = "it takes images in a form that Forge does not make"
            document["kinds"][kind] = {"class": name, **(record_of(kind) if kind in KINDS else {"alone": why})}
            print(kind, document["kinds"][kind], flush=True)
            PATH.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
