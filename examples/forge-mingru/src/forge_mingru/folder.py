"""Folders in the Hugging Face format: `config.json` and files of safetensors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from forge_core import Component
from forge_core.protocols import Weights
from forge_mingru.component import MinGRUConfig
from forge_models.hf import CheckpointTensors, TensorPlace, Unsupported, facts_in, read_config, shapes_of, write_folder

MODEL_TYPE = "mingru"
SIZES = tuple(field.name for field in fields(MinGRUConfig))
USAGE = 'from forge_mingru.folder import MinGRUFolder\n\nweights = MinGRUFolder().read("path/of/this/folder")\n'


class MinGRUFolder:
    """Implements `forge_core.protocols.HfModel`."""

    def misfits(self, weights: Weights) -> list[str]:
        model = weights.model
        return [] if isinstance(model, MinGRUConfig) else [f"a {type(model).__name__} is not a model 'mingru'"]

    def read(self, path: Path, ignore: Sequence[str] = ()) -> Weights:
        return Stored(path)

    def write(self, path: Path, weights: Weights, *, tokenizer: Path | None, max_shard_bytes: int) -> None:
        model = weights.model
        assert isinstance(model, MinGRUConfig)
        config = {"architectures": ["MinGRU"], "model_type": MODEL_TYPE, **asdict(model)}
        write_folder(path, weights, places_of(model), config, tokenizer=tokenizer, max_shard_bytes=max_shard_bytes, usage=USAGE)

    def reference(self, path: Path, tokens: Tensor, extras: Mapping[str, Tensor] | None = None) -> str:
        return "no other library has this model"

    def examples(self, folder: Path) -> Iterable[Component]:
        yield MinGRUConfig(dim=16, layers=2, vocab_size=40)


class Stored(CheckpointTensors):
    """Implements `forge_core.protocols.Weights`."""

    def __init__(self, folder: Path) -> None:
        values: Mapping[str, Any] = read_config(folder)
        try:
            model = MinGRUConfig(**{name: values[name] for name in SIZES})
        except (KeyError, TypeError) as cause:
            raise Unsupported(f"{folder}: config.json lacks {cause}, a size of a model '{MODEL_TYPE}'") from cause
        super().__init__(folder)
        self.model: Component = model
        places = places_of(model)
        self.match(places, set(self.names) - set(places))
        self.facts = facts_in(folder, values, MODEL_TYPE)


def places_of(model: MinGRUConfig) -> dict[str, TensorPlace]:
    """Returns where each parameter is stored: under its name in the model."""
    return {name: TensorPlace(shape, (name,)) for name, shape in shapes_of(model).items()}
