"""The format `safetensors`: tensors under the names of the model, and a description of the model."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch

from forge_core.component import Component
from forge_core.errors import ForgeError
from forge_core.files import publish, sync_path
from forge_core.protocols.weights import NO_EXTRAS, StoredTensor, Weights, WeightsInfo
from forge_core.registry import Registry
from forge_models.hf.reader import DTYPES, INDEX, SINGLE
from forge_train.formats.forge import TOKENIZER, copy_tokenizer, job_of, table_of
from forge_train.recipe.load import load_recipe

DESCRIPTION = "forge"
"""Key of a file's metadata with the description of the model, as JSON."""

_DTYPES = DTYPES | {"I8": "int8", "I16": "int16", "U16": "uint16", "U32": "uint32", "U64": "uint64", "C64": "complex64"}
_DTYPES |= {"F8_E8M0": "float8_e8m0fnu"}


class PlainWeights:
    """`Weights` of safetensors files. Files are memory-mapped, so only requested tensors are read.

    Args:
        path: a file, or a folder of files.
        recipe: recipe with the `[model]` of the tensors; by default the description in the files.
        prefix: prefix of the names to read; tensors with other names are left out, with a note.
        origin: name of the weights in messages; by default `path`.
        left: number of tensors that were left out before.

    Raises:
        ForgeError: there are no tensors, a file is damaged, or tensors do not fit the model (one error lists them).
    """

    def __init__(
        self, path: Path, recipe: str | None = None, prefix: str = "", origin: Path | None = None, left: int = 0
    ) -> None:
        origin = origin or path
        found, texts = open_tensors(path)
        self._places = {name.removeprefix(prefix): place for name, place in found.items() if name.startswith(prefix)}
        left += len(found) - len(self._places)
        if not self._places:
            raise ForgeError(f"{origin} has no tensor{f' whose name begins with {prefix!r}' if prefix else ''}")
        if len(texts) > 1:
            raise ForgeError(f"{path}: the files belong to different models; keep the files of one model in the folder")
        description = _parsed(texts.pop(), path) if texts else None
        self.tensors: Mapping[str, StoredTensor] = {name: stored_tensor(*place) for name, place in self._places.items()}
        self.model = model_of(description, recipe, origin)
        check_fit(self.model, self.tensors, origin)
        notes = (f"{left} tensors whose names do not begin with {prefix!r} were left out",) if left else ()
        folder = path if path.is_dir() else path.parent
        self.facts = facts_of(description, origin, folder / TOKENIZER, notes)

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Returns whole tensors, memory-mapped from the files."""
        return {name: handle.get_tensor(stored) for name in names for handle, stored in [self._places[name]]}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> torch.Tensor:
        """Reads the slice of one tensor at `offset` with shape `extent`."""
        handle, stored = self._places[name]
        if not offset:
            return handle.get_tensor(stored)
        return handle.get_slice(stored)[tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))]


class PlainConverter:
    """The converter `safetensors`."""

    def __init__(self, *, max_shard_bytes: int, recipe: str | None, prefix: str) -> None:
        self.max_shard_bytes, self.recipe, self.prefix = max_shard_bytes, recipe, prefix

    def read(self, path: Path) -> PlainWeights:
        """Opens a file or a folder; see `PlainWeights`."""
        return PlainWeights(path, self.recipe, self.prefix)

    def write(self, path: Path, weights: Weights) -> None:
        """Writes a folder with `model.safetensors`, or with shards and their index, named as in other libraries.

        Raises:
            ForgeError: `path` exists and is not an empty folder.
        """
        from safetensors.torch import save_file

        metadata = {"format": "pt", DESCRIPTION: json.dumps(describe(weights))}
        with new_folder(path, weights) as folder:
            shards = list(_shards(weights.tensors, self.max_shard_bytes))
            files: dict[str, str] = {}
            for number, names in enumerate(shards, 1):
                file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                tensors = {self.prefix + name: tensor.contiguous() for name, tensor in weights.read(names).items()}
                save_file(tensors, str(folder / file), metadata=metadata)
                files |= dict.fromkeys(tensors, file)
            if len(shards) > 1:
                total = sum(_bytes(entry) for entry in weights.tensors.values())
                index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
                (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def reference(self, path: Path, tokens: torch.Tensor, extras: Mapping[str, torch.Tensor] = NO_EXTRAS) -> str:
        """Returns why there is no reference: the format has only tensors."""
        return "safetensors files have no model to run"


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if not found:
        raise ForgeError(f"{path} is neither a safetensors file nor a folder with safetensors files; check the path")
    if (path / INDEX).is_file():
        try:
            named = set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise ForgeError(f"{path / INDEX} is not a valid safetensors index: {cause!r}; restore it") from cause
        if odd := sorted(named ^ {file.name for file in found}):
            raise ForgeError(
                f"these files are only in the folder or only in {path / INDEX}: {', '.join(odd[:5])}; restore or remove them"
            )
    return found


def open_tensors(path: Path) -> tuple[dict[str, tuple[Any, str]], set[str]]:
    """Opens a file or a folder of files. Returns the open file and name of each tensor, and the descriptions in the files.

    Raises:
        ForgeError: there are no files, one is damaged, or two have a tensor of the same name.
    """
    places: dict[str, tuple[Any, str]] = {}
    texts: set[str] = set()
    for handle in map(_opened, _files(path)):
        if (text := (handle.metadata() or {}).get(DESCRIPTION)) is not None:
            texts.add(text)
        for name in handle.keys():  # noqa: SIM118 (a handle does not iterate)
            if places.setdefault(name, (handle, name))[0] is not handle:
                raise ForgeError(f"{path}: tensor {name} is in two files; keep the files of one model in the folder")
    return places, texts


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(file), framework="pt").__enter__()
    except (SafetensorError, OSError) as cause:
        raise ForgeError(f"{file} cannot be read as safetensors: {cause}") from cause


def _parsed(text: str, path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise ForgeError(f"{path}: the description {DESCRIPTION!r} is not JSON: {cause}; pass --recipe") from cause
    if not isinstance(found, dict):
        raise ForgeError(f"{path}: the description {DESCRIPTION!r} is not a JSON object")
    return found


def stored_tensor(handle: Any, name: str) -> StoredTensor:
    """Returns shape and dtype of a tensor in an open file.

    Raises:
        ForgeError: the dtype is not supported.
    """
    entry = handle.get_slice(name)
    dtype = str(entry.get_dtype())
    if dtype not in _DTYPES:
        raise ForgeError(f"tensor {name}: dtype {dtype} is not supported; convert it to a supported dtype")
    return StoredTensor(tuple(entry.get_shape()), _DTYPES[dtype])


def _bytes(entry: StoredTensor) -> int:
    return prod(entry.shape) * getattr(torch, entry.dtype).itemsize


def _shards(tensors: Mapping[str, StoredTensor], limit: int) -> Iterator[list[str]]:
    """Yields the names in order, in groups of at most `limit` bytes; a larger tensor is a group of its own."""
    group: list[str] = []
    size = 0
    for name, entry in tensors.items():
        if group and size + _bytes(entry) > limit:
            yield group
            group, size = [], 0
        group.append(name)
        size += _bytes(entry)
    yield group


_SHOWN = 20


def describe(weights: Weights) -> dict[str, Any]:
    """Returns the model and the facts of weights as JSON, to be stored with the tensors."""
    facts = weights.facts
    return {
        "model": table_of(weights.model, Registry()),
        "step": facts.step,
        "special_tokens": dict(facts.special_tokens),
        "ends": list(facts.ends),
        "family": facts.family,
        "origin": facts.origin,
        "notes": list(facts.notes),
    }


def model_of(description: Mapping[str, Any] | None, recipe: str | None, origin: Path) -> Component:
    """Returns the model of a recipe if one is given, else that of a description.

    Raises:
        ForgeError: there is neither, or the description names a Python file that the user did not allow.
    """
    if recipe is not None:
        return load_recipe(recipe, registry=Registry()).job.model
    if description is None or "model" not in description:
        raise ForgeError(f"{origin} has no description of the model of its tensors; pass --recipe with a [model] that fits")
    return job_of({"config": {"model": description["model"]}}, Registry(), "model", origin=str(origin)).model


def facts_of(description: Mapping[str, Any] | None, origin: Path, tokenizer: Path, notes: tuple[str, ...] = ()) -> WeightsInfo:
    """Returns the facts in a description; `tokenizer` is the folder of the tokenizer's files, which may not exist."""
    facts = description or {}
    return WeightsInfo(
        step=facts.get("step", 0),
        special_tokens=dict(facts.get("special_tokens", {})),
        ends=tuple(facts.get("ends", ())),
        family=facts.get("family", ""),
        origin=str(origin),
        tokenizer=tokenizer if tokenizer.is_dir() else None,
        notes=(*facts.get("notes", ()), *notes),
    )


def check_fit(component: Any, tensors: Mapping[str, StoredTensor], origin: Path) -> None:
    """Compares names and shapes of tensors with the model. Buffers may be missing; they are initialized as in a new run. Those
    that a new run draws, such as a router's table of token ids, may not, because other random values are another model.

    Raises:
        ForgeError: tensors are missing, unexpected or of another shape; the error lists the first 20 of each kind.
    """
    with torch.device("meta"):
        module: torch.nn.Module = component.build()
    specs: Any = module.specs()  # type: ignore[operator] (a model of Forge has it)
    ties = dict(specs.ties)
    parameters = {name: tuple(tensor.shape) for name, tensor in module.named_parameters() if name not in ties}
    held = parameters | {name: tuple(tensor.shape) for name, tensor in module.named_buffers()}
    needed = [name for name in held if name in parameters or (name in specs.tensors and specs.tensors[name].init.drawn)]
    kinds = [
        [
            f"{name}: shape {entry.shape}, in the model {held[name]}"
            for name, entry in tensors.items()
            if name in held and entry.shape != held[name]
        ],
        [f"{name}: missing" for name in needed if name not in tensors],
        [f"{name}: not in the model" for name in tensors if name not in held],
    ]
    if any(kinds):
        listed = [line for faults in kinds for line in _cut(faults)]
        raise ForgeError("\n  ".join([f"the tensors in {origin} do not fit the model:", *listed]))


def _cut(faults: list[str]) -> list[str]:
    more = len(faults) - _SHOWN
    return faults if more <= 0 else [*faults[:_SHOWN], f"and {more} more: {faults[-1].rpartition(': ')[2]}"]


@contextmanager
def new_folder(path: Path, weights: Weights) -> Iterator[Path]:
    """Yields a temporary folder; after the `with` block, adds the tokenizer's files and renames it to `path`. After an error,
    the folder is removed.

    Raises:
        ForgeError: `path` exists and is not an empty folder.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ForgeError(f"{path} exists and is not an empty folder; choose another folder")
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        if weights.facts.tokenizer is not None:
            copy_tokenizer(weights.facts.tokenizer, partial / TOKENIZER)
        for file in [*partial.rglob("*"), partial]:
            sync_path(file)
        publish(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
