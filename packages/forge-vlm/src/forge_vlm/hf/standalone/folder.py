"""Models that no class of transformers can hold, as a folder with its own code: `modeling_forge.py`, which needs only torch.

The code is run from the folder when it is compared, as one who downloads it runs it. It is never run from a folder that is read:
the key `forge` of `config.json` says which parts the model has, by names of a closed list.
"""

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.component import Component
from forge_core.protocols.weights import NO_EXTRAS, Weights
from forge_models.hf.config import CONFIG, Unsupported, read_config
from forge_models.hf.names import Place
from forge_models.hf.reader import GENERATION, CheckpointTensors, facts_in
from forge_models.hf.writer import write_folder, write_json
from forge_vlm.components.adapters import MLPConfig
from forge_vlm.components.encoders import Published, ViT
from forge_vlm.components.fusions import JointDecoder, MixtureOfTransformers
from forge_vlm.components.model import VLM
from forge_vlm.hf import processors
from forge_vlm.hf.standalone import plain, shapes
from forge_vlm.hf.text_and_vision import preprocessor_config, tower_config
from forge_vlm.images.processing import FILE

if TYPE_CHECKING:
    from torch import Tensor

MODEL_TYPE, ARCHITECTURE = "forge_standalone", "ForgeForCausalLM"
CODE = "modeling_forge.py"
DESCRIPTION = "forge"
"""Key of `config.json` with the parts of the model."""


USAGE = """import sys

sys.path.insert(0, "path/of/this/folder")
from modeling_forge import load

model = load("path/of/this/folder")
logits = model(tokens, images, image_rows)
"""
"""For the model card."""


class Standalone:
    """See `forge_core.protocols.weights.HfModel`."""

    def misfits(self, weights: Weights) -> list[str]:
        """See `HfModel`."""
        if type(weights.model) is not VLM:
            return [f"a {type(weights.model).__name__} is not a model 'vlm'"]
        return [*shapes.misfits(weights.model)]

    def read(self, path: Path, ignore: Sequence[str] = ()) -> Any:
        """See `HfModel`."""
        if ignore:
            raise Unsupported(f"{path}: {', '.join(ignore)}: no key of a folder of {MODEL_TYPE} can be left out")
        return StandaloneFolder(path)

    def write(self, path: Path, weights: Weights, *, tokenizer: Path | None, max_shard_bytes: int) -> None:
        """See `HfModel`."""
        model = weights.model
        assert isinstance(model, VLM)
        config = {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "auto_map": {"AutoConfig": "modeling_forge.ForgeConfig", "AutoModelForCausalLM": f"modeling_forge.{ARCHITECTURE}"},
            "model": shapes.shape_of(model),
            DESCRIPTION: plain.plain(model),
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
            texts=lambda folder: _texts(folder, model),
        )

    def reference(self, path: Path, tokens: "Tensor", extras: "Mapping[str, Tensor]" = NO_EXTRAS) -> "Tensor | str":
        """See `HfModel`: what the folder's code makes of its tensors. Code that is not ours is not run."""
        import torch

        if fault := foreign(path):
            return fault
        model = code_of(path).load(path, dtype=torch.float32)
        with torch.no_grad():
            return model(tokens, **extras)

    def examples(self, folder: Path) -> Iterable[Component]:
        """See `HfModel`."""
        sizes: dict[str, Any] = {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "vocab_size": 40}
        vision: dict[str, Any] = {"encoder": ViT(size=8, patch=4, dim=8, layers=1, heads=2), "adapter": MLPConfig()}
        yield VLM(**sizes, max_length=64, **vision, fusion=MixtureOfTransformers())
        yield VLM(**sizes, max_length=64, **vision, fusion=JointDecoder(image_attention="prefix"))


class StandaloneFolder(CheckpointTensors):
    """`Weights` of such a folder. Its code is not run."""

    def __init__(self, folder: Path) -> None:
        """Opens and checks everything but the values.

        Raises:
            Unsupported: a key, a tensor or a file that is not understood, missing, or left over.
        """
        values = read_config(folder)
        self.model: VLM = plain.component(values.get(DESCRIPTION), folder)
        if json.loads(json.dumps(shapes.shape_of(self.model))) != values.get("model"):
            raise Unsupported(f"{folder / CONFIG}: the keys 'model' and {DESCRIPTION!r} say different models")
        super().__init__(folder)
        places = places_of(self.model)
        self.match(places, set(self.names) - {place.names[0] for place in places.values()})
        self.facts = facts_in(folder, values, MODEL_TYPE, notes=(f"{CODE} was not run",))


def places_of(model: VLM) -> dict[str, Place]:
    """Global name -> place of every parameter: names are ours."""
    from forge_models.hf.names import shapes_of

    return {name: Place(shape, (name,)) for name, shape in shapes_of(model).items()}


def vision_keys(model: VLM) -> dict[str, Any]:
    """The key `vision_config` of a published tower, by which the folder can be an encoder's."""
    return {"vision_config": tower_config(model.vision)} if _published(model) else {}


def _texts(folder: Path, model: VLM) -> None:
    """The code, and settings of generation by which the placeholder of images is never chosen."""
    write_code(folder, model)
    if model.placeholder is not None:
        why = (
            f"transformers has no processor for {MODEL_TYPE}, whose code is in the folder; `modeling_forge` takes ids and pixels"
        )
        processors.tell(folder, processors.NONE.format(why=why))
        settings = json.loads((folder / GENERATION).read_text(encoding="utf-8"))
        never = settings.get("suppress_tokens") or []
        write_json(folder / GENERATION, settings | {"suppress_tokens": sorted({*never, model.placeholder})})


def write_code(folder: Path, model: VLM) -> None:
    """Adds the code, and the preprocessor where there is one."""
    shutil.copyfile(Path(__file__).with_name(CODE), folder / CODE)
    if model.images == "encoder" and hasattr(model.vision, "processing"):
        write_json(folder / FILE, preprocessor_config(model.vision.processing))


def foreign(folder: Path) -> str:
    """Why the code of a folder is not run: it is not ours; empty when it is."""
    if (folder / CODE).is_file() and (folder / CODE).read_bytes() == Path(__file__).with_name(CODE).read_bytes():
        return ""
    return f"{CODE} of the folder is not that of this version of Forge, and code of others is never run"


def code_of(folder: Path) -> Any:
    """The code of a folder that was just written, run from there."""
    name = f"modeling_forge_{abs(hash(folder))}"
    spec = importlib.util.spec_from_file_location(name, folder / CODE)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(found)
    finally:
        sys.dont_write_bytecode = written
    return found


def _published(model: VLM) -> bool:
    return model.images == "encoder" and isinstance(model.vision, Published)
