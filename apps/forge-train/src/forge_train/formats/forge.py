"""The format `forge`: reads tensors of a checkpoint of any layout, and writes checkpoints with weights only."""

from collections.abc import Mapping, Sequence
from dataclasses import field, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from forge_ckpt.checkpoint import read, save
from forge_ckpt.checkpoint.locate import CheckpointLocation, locate
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.component import Component, Slot
from forge_core.config.tree import DEFAULT, Table, build, plain
from forge_core.config.validation import resolve
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Piece
from forge_core.protocols.weights import NO_EXTRAS, StoredTensor, Weights, WeightsInfo
from forge_core.redaction import refuse_redacted
from forge_core.registry import Registry
from forge_models.lora_weights import AdaptedWeights, check_hash, hash_of, names_of
from forge_train.formats.base import BASE, open_base
from forge_train.recipe.schema import Job

PREFIX = "model/"
TOKENIZER = "tokenizer"
"""Folder with the tokenizer's files, next to converted checkpoints."""
OF_THE_START = ("generation", "chat_template")
"""Keys of a checkpoint's metadata: settings of generation and the chat template of the weights that a run started from."""


def job_of(meta: Mapping[str, Any], registry: Registry, *sections: str, origin: str = "the checkpoint") -> Job:
    """Returns the job with some sections of a checkpoint's recipe, defaults elsewhere; `origin` names the checkpoint in errors.

    Raises:
        ConfigError: a component is not installed, has different keys now, or is a Python file that the user did not allow.
        CheckpointError: the checkpoint has no recipe, or the sections lack secrets that were removed.
    """
    config = meta.get("config")
    if not isinstance(config, Mapping) or "model" not in config:
        raise CheckpointError(f"{origin} has no recipe, so its tensors cannot be interpreted; choose a checkpoint of a run")
    chosen = {name: config[name] for name in sections if name in config}
    refuse_redacted(chosen, origin)
    tree = build(chosen, (), lambda _: origin, Path.cwd())
    assert isinstance(tree, Table)
    return resolve(Job, tree, registry).value


def with_rules_of_then(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the metadata of a checkpoint, where newer keys have the value that matches the behavior of older versions.

    Versions before `data.tokenizer.add_special_tokens` read documents without the tokenizer's prefix and suffix.
    """
    config = meta.get("config")
    data = config.get("data") if isinstance(config, Mapping) else None
    tokenizer = data.get("tokenizer") if isinstance(data, Mapping) else None
    if not isinstance(config, Mapping) or not isinstance(data, Mapping) or not isinstance(tokenizer, Mapping):
        return meta
    if str(tokenizer.get("name")).rpartition(":")[2] not in ("bpe", "sentencepiece") or "add_special_tokens" in tokenizer:
        return meta
    return {**meta, "config": {**config, "data": {**data, "tokenizer": {**tokenizer, "add_special_tokens": False}}}}


def table_of(component: Component, registry: Registry) -> dict[str, Any]:
    """Returns the table `[model]` that describes a model's component, with all its keys."""
    slot = Annotated[Component, Slot("forge.models")]
    schema = make_dataclass("Recipe", [("model", slot, field(default=component))], frozen=True)
    return plain(resolve(schema, Table({}, DEFAULT), registry).tree)["model"]


class ForgeWeights:
    """`Weights` of a checkpoint. Verifies only the bytes that it reads, before using them.

    Args:
        place: the checkpoint.
        registry: where the model is found.
        section: section of the tensors to read; tensors that it lacks, such as buffers, come from the section `model`.

    Raises:
        CheckpointError: the checkpoint does not have the section.
    """

    def __init__(self, place: CheckpointLocation, registry: Registry, section: str = "model") -> None:
        self.place = place
        self._store = place.store
        manifest = place.manifest()
        self.meta = with_rules_of_then(manifest.meta)
        origin = f"{place.store.root}/{place.name}"
        self.model: Component = job_of(self.meta, registry, "model", origin=origin).model
        self._stored = {name: name for name in manifest.index if name.startswith(PREFIX)}
        if section != "model":
            found = [name for name in manifest.index if name.startswith(f"{section}/") and PREFIX + _bare(name) in self._stored]
            if not found:
                raise CheckpointError(
                    f"{origin} has no weights {section!r}: the run had no hook that saves them; use --weights model"
                )
            self._stored |= {PREFIX + _bare(name): name for name in found}
        infos = {_bare(name): manifest.tensors[manifest.index[stored]] for name, stored in self._stored.items()}
        self.tensors: Mapping[str, StoredTensor] = {name: StoredTensor(info.shape, info.dtype) for name, info in infos.items()}
        kept = Path(place.store.root) / TOKENIZER
        self.facts = WeightsInfo(
            step=manifest.step,
            special_tokens=dict(self.meta.get("special_tokens", {})),
            ends=tuple(self.meta.get("ends", ())),
            notes=tuple(self.meta.get("notes", ())),
            tokenizer=kept if isinstance(place.store.root, Path) and kept.is_dir() else None,
            origin=origin,
            family=str(self.meta.get("family", "")),
            run=place.run,
            recipe=self.meta.get("config", {}),
            cursor=self.meta.get("cursor", {}),
        )

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Reads whole tensors from the files of all ranks."""
        return self._load({name: ((0,) * len(self.tensors[name].shape), self.tensors[name].shape) for name in names})

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> torch.Tensor:
        """Reads the slice of one tensor at `offset` with shape `extent`."""
        return self._load({name: (tuple(offset), tuple(extent))})[name]

    def _load(self, boxes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, torch.Tensor]:
        live = {name: torch.empty(extent, dtype=getattr(torch, self.tensors[name].dtype)) for name, (_, extent) in boxes.items()}
        pieces = [
            Piece(self._stored[PREFIX + name], self.tensors[name].shape, offset, live[name], False)
            for name, (offset, _) in boxes.items()
        ]
        wanted = {piece.name for piece in pieces}
        read.load(self._store, self.place.name, pieces, SingleProcessWorld(), select=wanted.__contains__)
        return live


def _bare(name: str) -> str:
    """Returns the name of a tensor without its section."""
    return name.partition("/")[2]


class ForgeConverter:
    """The converter `forge`: directories of checkpoints."""

    def __init__(self, weights: str = "model", base: str | None = None) -> None:
        self.weights, self.base = weights, base

    def read(self, path: Path | str) -> Weights:
        """Opens the newest checkpoint of a run or a directory, or one checkpoint, by path, mark or URL. The base of an adapter is
        opened as well.

        Raises:
            ForgeError: the base of an adapter is missing, or its hash differs.
        """
        registry = Registry()
        weights = ForgeWeights(locate(path), registry, self.weights)
        if BASE not in weights.meta:
            return weights
        job = job_of(weights.meta, registry, "model", "start", origin=weights.facts.origin)
        base = open_base(job.model, job.start, registry, self.base)
        check_hash(weights.meta[BASE], hash_of(base, names_of(job.model, base)), weights.facts.origin, base.facts.origin)
        return AdaptedWeights(base, weights, job.model)

    def write(self, path: Path, weights: Weights) -> None:
        """Writes a directory with one checkpoint of weights, whose recipe has only `[model]`.

        Raises:
            CheckpointError: `path` is not empty, or the checkpoint cannot be written.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError(f"{path} exists and is not an empty directory; choose another directory")
        path.mkdir(parents=True, exist_ok=True)
        meta = {
            "config": {"model": table_of(weights.model, Registry())},
            "tokens": 0,
            "cursor": {},
            "anchors": {},
            "hooks": [],
            "weights_only": True,
            "origin": weights.facts.origin,
            "family": weights.facts.family,
            "special_tokens": dict(weights.facts.special_tokens),
            "ends": list(weights.facts.ends),
            "notes": list(weights.facts.notes),
        }
        # Memory-mapped tensors are loaded only when their bytes are copied.
        pieces = (
            Piece(PREFIX + name, tuple(tensor.shape), (0,) * tensor.dim(), tensor, True)
            for name, tensor in weights.read(list(weights.tensors)).items()
        )
        save.save(LocalStore(path), pieces, meta, weights.facts.step, SingleProcessWorld())
        if weights.facts.tokenizer is not None:
            copy_tokenizer(weights.facts.tokenizer, path / TOKENIZER)

    def reference(self, path: Path, tokens: torch.Tensor, extras: Mapping[str, torch.Tensor] = NO_EXTRAS) -> str:
        """Returns why there is no reference: no other library reads this format."""
        return "this is Forge's format"


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the files of a tokenizer, and the generation settings, which refer to its ids."""
    from shutil import copyfile

    from forge_models.hf.reader import GENERATION, TOKENIZER_FILES

    target.mkdir(parents=True, exist_ok=True)
    for name in (*TOKENIZER_FILES, GENERATION):
        if (source / name).is_file():
            copyfile(source / name, target / name)


class Cast:
    """`Weights` in another dtype. Buffers, such as counters and routing biases, keep their dtype."""

    def __init__(self, weights: Weights, dtype: str) -> None:
        self._weights, self._dtype = weights, getattr(torch, dtype)
        self.model, self.facts = weights.model, weights.facts
        with torch.device("meta"):
            component: Any = weights.model
            self._kept = frozenset(dict(component.build().named_buffers()))
        self.tensors: Mapping[str, StoredTensor] = {
            name: entry if name in self._kept else replace(entry, dtype=dtype) for name, entry in weights.tensors.items()
        }

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Reads whole tensors and converts them."""
        return {name: self._rounded(name, tensor) for name, tensor in self._weights.read(names).items()}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> torch.Tensor:
        """Reads a slice of one tensor and converts it."""
        return self._rounded(name, self._weights.box(name, offset, extent))

    def _rounded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if name in self._kept else tensor.to(self._dtype)
