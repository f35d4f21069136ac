"""Models that no class of transformers can hold, as folders that classes of Forge open (`forge_vlm.hf.register`).

Tensors have the names of the model. The key `forge` of `config.json` says which parts the model has, by names of a closed list,
so that a folder never names code to run. Folders of earlier versions have the sizes of the model under `model` and its code in
`modeling_forge.py`; neither is read, and the code is never run.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.component import Component, class_name
from forge_core.protocols.weights import NO_EXTRAS, Weights
from forge_models.components.attentions import GQA
from forge_models.components.experts import SoftmaxTopKConfig
from forge_models.hf.config import Unsupported, read_config
from forge_models.hf.converter import opened
from forge_models.hf.names import TensorPlace, shapes_of
from forge_models.hf.reader import GENERATION, CheckpointTensors, facts_in
from forge_models.hf.writer import write_folder, write_json
from forge_vlm.components.adapters import MLPConfig
from forge_vlm.components.encoders import Published, ViT
from forge_vlm.components.fusions import JointDecoder, MixtureOfTransformers, MoMa
from forge_vlm.components.model import VLM
from forge_vlm.hf.component_tables import DESCRIPTION, MODEL_TYPE, known, model_of, table_of
from forge_vlm.hf.processors import NONE, tell
from forge_vlm.hf.text_and_vision import preprocessor_config, tower_config
from forge_vlm.images.processing import FILE

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURE = "ForgeForImageTextToText"
USAGE = """from transformers import AutoModelForImageTextToText

from forge_vlm.hf import register  # pip install "forge-vlm[transformers]"

register()
model = AutoModelForImageTextToText.from_pretrained("path/of/this/folder")
logits = model(tokens, images=images, image_rows=image_rows).logits
"""
"""For the model card."""


class AutoModelFormat:
    """See `forge_core.protocols.weights.HfModel`."""

    def misfits(self, weights: Weights) -> list[str]:
        """See `HfModel`."""
        if type(weights.model) is not VLM:
            return [f"a {type(weights.model).__name__} is not a model 'vlm'"]
        return [*misfits(weights.model)]

    def read(self, path: Path, ignore: Sequence[str] = ()) -> Any:
        """See `HfModel`."""
        if ignore:
            raise Unsupported(f"{path}: {', '.join(ignore)}: no key of a folder of {MODEL_TYPE} can be left out")
        return StoredModel(path)

    def write(self, path: Path, weights: Weights, *, tokenizer: Path | None, max_shard_bytes: int) -> None:
        """See `HfModel`."""
        model = weights.model
        assert isinstance(model, VLM)
        config = {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "tie_word_embeddings": model.tied_embeddings,
            DESCRIPTION: table_of(model),
            **vision_keys(model),
        }
        write_folder(
            path,
            weights,
            places_of(model),
            config,
            tokenizer=tokenizer,
            max_shard_bytes=max_shard_bytes,
            usage=USAGE,
            texts=lambda folder: _write_texts(folder, model),
        )

    def reference(self, path: Path, tokens: "Tensor", extras: "Mapping[str, Tensor]" = NO_EXTRAS) -> "Tensor | str":
        """See `HfModel`: what transformers makes of the folder with the classes of Forge."""
        import torch

        try:
            from forge_vlm.hf.auto_model import register
        except ImportError:
            return "transformers is not installed"
        register()
        model = opened(path, "AutoModelForImageTextToText")
        with torch.no_grad():
            return model(tokens, **extras).logits

    def examples(self, folder: Path) -> Iterable[Component]:
        """See `HfModel`."""
        sizes: dict[str, Any] = {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "vocab_size": 40}
        vision: dict[str, Any] = {"encoder": ViT(size=8, patch=4, dim=8, layers=1, heads=2), "adapter": MLPConfig()}
        yield VLM(**sizes, max_length=64, **vision, fusion=MixtureOfTransformers())
        yield VLM(**sizes, max_length=64, **vision, fusion=JointDecoder(image_attention="prefix"))


class StoredModel(CheckpointTensors):
    """`Weights` of such a folder."""

    def __init__(self, folder: Path) -> None:
        """Opens and checks everything but the values.

        Raises:
            Unsupported: a key, a tensor or a file that is not understood, missing, or left over.
        """
        values = read_config(folder)
        self.model: VLM = model_of(values, folder)
        super().__init__(folder)
        places = places_of(self.model)
        self.match(places, set(self.names) - {place.names[0] for place in places.values()})
        self.facts = facts_in(folder, values, MODEL_TYPE)


def places_of(model: VLM) -> dict[str, TensorPlace]:
    """Global name -> place of every parameter: names are ours."""
    return {name: TensorPlace(shape, (name,)) for name, shape in shapes_of(model).items()}


def vision_keys(model: VLM) -> dict[str, Any]:
    """The key `vision_config` of a published tower, by which the folder can be an encoder's."""
    published = model.images == "encoder" and isinstance(model.vision, Published)
    return {"vision_config": tower_config(model.vision)} if published else {}


def write_preprocessor(folder: Path, model: VLM) -> None:
    """Writes how images are prepared, where the encoder says so."""
    if model.images == "encoder" and hasattr(model.vision, "processing"):
        write_json(folder / FILE, preprocessor_config(model.vision.processing))


def _write_texts(folder: Path, model: VLM) -> None:
    """The preprocessor, and settings of generation by which the placeholder of images is never chosen."""
    write_preprocessor(folder, model)
    if model.placeholder is not None:
        why = f"transformers has no processor for {MODEL_TYPE}; the model takes ids and pixels"
        tell(folder, NONE.format(why=why))
        settings = json.loads((folder / GENERATION).read_text(encoding="utf-8"))
        never = settings.get("suppress_tokens") or []
        write_json(folder / GENERATION, settings | {"suppress_tokens": sorted({*never, model.placeholder})})


def misfits(model: VLM) -> Iterator[str]:
    """One sentence for each option of the recipe that folders of this kind do not hold."""
    fusion = model.chosen_fusion
    if type(fusion) not in (JointDecoder, MixtureOfTransformers, MoMa):
        yield f"fusion = {type(fusion).__name__}: {MODEL_TYPE} holds JointDecoder, MixtureOfTransformers and MoMa"
    elif isinstance(fusion, MoMa) and fusion.routing != "token_choice":
        yield f"fusion.routing = {fusion.routing!r}: {MODEL_TYPE} holds token_choice"
    if not isinstance(model.shape.attention, GQA):
        yield f"attention = {type(model.shape.attention).__name__}: {MODEL_TYPE} holds GQA"
    for name in ("mlp", "norm"):
        if not known(getattr(model.shape, name)):
            yield f"{name} = {type(getattr(model.shape, name)).__name__} is not a part of {MODEL_TYPE}"
    if model.rope.scaling == "dynamic":
        yield f"rope.scaling = 'dynamic': {MODEL_TYPE} holds frequencies that do not change"
    if model.moe is not None and isinstance(fusion, JointDecoder):
        yield f"moe: {MODEL_TYPE} holds experts of each modality, for the fusions mot and moma"
    elif model.moe is not None:
        if not isinstance(model.moe.router, SoftmaxTopKConfig | None):
            yield f"moe.router = {type(model.moe.router).__name__}: {MODEL_TYPE} holds SoftmaxTopK"
        if model.moe.capacity is not None:
            yield f"moe.capacity = {model.moe.capacity}: {MODEL_TYPE} drops no token"
    yield from vision_misfits(model)


def vision_misfits(model: VLM) -> Iterator[str]:
    """Those of encoder and adapter."""
    if model.images == "tokens":
        return
    if model.frame_time is not None:
        yield f"frame_time: {MODEL_TYPE} has no times of frames; train without it, and let sources write timestamps"
    if not known(model.vision):
        yield f"encoder = {type(model.vision).__name__} is not a part of {MODEL_TYPE}"
    elif getattr(getattr(model.vision, "shape", None), "flexible", 0):
        yield f"encoder.patches = {model.vision.shape.flexible}: {MODEL_TYPE} holds square images"
    if not known(model.chosen_adapter):
        yield f"adapter = {class_name(model.chosen_adapter)} is not a part of {MODEL_TYPE}"
