"""Reads and writes the weights of a class of transformers, under the names that its folders have.

Most tensors of a folder have the name that the module has. transformers converts the others when it loads a folder: it renames
them, stacks the matrices of experts, or splits fused ones. `CausalLMFolder` uses the same conversions, tensor by tensor. It
reads only the box that a rank holds where a tensor is only renamed, and of a stack only the entries in the box. `FolderTensors`
converts back.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forge_core.protocols.weights import StoredTensor, Weights
from forge_models.hf.card import usage_of
from forge_models.hf.causal_lm_anatomy import read_settings, tied
from forge_models.hf.config import Unsupported, read_config
from forge_models.hf.names import DERIVED, TensorPlace
from forge_models.hf.reader import FLOATS, TOKENS, CheckpointTensors, facts_in
from forge_models.hf.writer import write_folder

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Conversion:
    """Some tensors of a folder that become some tensors of the model.

    Attributes:
        sources: stored names, each with the pattern of the converter that matched it.
        converter: transformers' converter; None if a tensor is only renamed.
        name: the name under which the converter was found.
    """

    sources: tuple[tuple[str, str], ...]
    converter: Any
    name: str

    def convert(self, tensors: "Mapping[str, Tensor]", module: Any) -> "dict[str, Tensor]":
        """Returns the model's tensors from those of the folder by stored name."""
        if self.converter is None:
            return {self.name: tensors[self.sources[0][0]]}
        converter = deepcopy(self.converter)
        for stored, pattern in self.sources:
            converter.add_tensor(self.name, stored, pattern, tensors[stored])
        made = converter.convert(self.name, model=module, config=module.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def entries(self, first: int, count: int) -> "Conversion":
        """Returns the conversion of `count` entries of a stack, from `first` on."""
        chosen = [each[first : first + count] for each in self._by_pattern().values()]
        return Conversion(tuple(source for sources in chosen for source in sources), self.converter, self.name)

    def is_stack(self, length: int, module: Any) -> bool:
        """Whether entry i of the `length` entries of the result is made of the i-th tensor of each pattern and of no other, as in
        a stack of experts. Small tensors of equal numbers show it."""
        if self.converter is None or any(len(sources) != length for sources in self._by_pattern().values()):
            return False
        marked = {
            stored: torch.full((4, 4), float(index))
            for sources in self._by_pattern().values()
            for index, (stored, _) in enumerate(sources)
        }
        try:
            made = self.convert(marked, module)
        except Exception:  # noqa: BLE001  # the code of any class, which may need the real sizes
            return False
        found = made.get(self.name)
        if found is None or len(made) != 1 or len(found) != length:
            return False
        return all(bool((found[index] == index).all()) for index in range(length))

    def _by_pattern(self) -> dict[str, list[tuple[str, str]]]:
        found: dict[str, list[tuple[str, str]]] = {}
        for source in self.sources:
            found.setdefault(source[1], []).append(source)
        return found


class CausalLMFolder(CheckpointTensors):
    """`Weights` of a folder with a class of transformers."""

    def __init__(self, folder: Path, model: Any) -> None:
        """Opens the folder for `model`, a `TransformersConfig`, and checks names, shapes and dtypes.

        Raises:
            Unsupported: tensors are missing, unexpected, of another shape, or quantized; names all of them.
        """
        super().__init__(folder)
        self.model = model
        values = read_config(folder)
        self.module = model.hollow()
        wanted = _wanted(self.module)
        conversions, left = _conversions(self.module, sorted(self.names), wanted)
        ties = tied(self.module)
        faults = [f"{name}: unexpected for {type(self.module).__name__}" for name in left if name not in ties]
        self._made: dict[str, Conversion] = {}
        self._stacks: dict[str, bool] = {}
        tensors: dict[str, StoredTensor] = {}
        for conversion in conversions:
            entries = {stored: self._stored(stored) for stored, _ in conversion.sources}
            odd = [
                f"{name}: dtype {entry.dtype} is not implemented" for name, entry in entries.items() if entry.dtype not in FLOATS
            ]
            faults += odd
            if odd:
                continue
            hollow = {
                name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
                for name, entry in entries.items()
            }
            for name, tensor in conversion.convert(hollow, self.module).items():
                if name in ties:
                    continue
                self._made[name] = conversion
                tensors[name] = StoredTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        faults += [f"{name}: missing" for name in wanted if name not in tensors and name not in ties]
        faults += [
            f"{name}: shape {tensors[name].shape}, but config.json requires {shape}"
            for name, shape in wanted.items()
            if name in tensors and tensors[name].shape != shape
        ]
        if faults:
            more = [f"and {len(faults) - 20} more"] if len(faults) > 20 else []
            raise Unsupported("\n  ".join([f"the tensors in {folder} do not fit:", *faults[:20], *more]))
        for copy, original in ties.items():
            if copy in self.names:
                self.check_tie(copy, original)
        self.tensors = tensors
        self.facts = facts_in(folder, values, str(values.get("model_type")))

    def read(self, names: Sequence[str]) -> "dict[str, Tensor]":
        """Returns whole tensors by global name."""
        found: dict[str, Tensor] = {}
        for name in names:
            if name not in found:
                conversion = self._made[name]
                made = conversion.convert({stored: self.whole(stored) for stored, _ in conversion.sources}, self.module)
                found |= {other: tensor for other, tensor in made.items() if other in names}
        return found

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> "Tensor":
        """Returns the box of one tensor that begins at `offset`. Of a stack, only the entries of the box are read; another tensor
        that is converted is read whole."""
        box = tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))
        conversion = self._made[name]
        if box and extent[0] and self._is_stack(name):
            some = conversion.entries(offset[0], extent[0])
            made = some.convert({stored: self.whole(stored) for stored, _ in some.sources}, self.module)
            return made[name][(slice(None), *box[1:])]
        if conversion.converter is not None or not box:
            return self.read([name])[name][box]
        return self._slice(conversion.sources[0][0])[box]

    def _is_stack(self, name: str) -> bool:
        if name not in self._stacks:
            self._stacks[name] = self._made[name].is_stack(self.tensors[name].shape[0], self.module)
        return self._stacks[name]


def _wanted(module: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor that a checkpoint of the module has, by name; tied copies included."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _conversions(module: Any, stored: Sequence[str], wanted: Mapping[str, Any]) -> tuple[list[Conversion], list[str]]:
    """Returns how stored tensors become those of the module, and the stored names that nothing uses."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(module)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = module.base_model_prefix
    found: dict[str, list[tuple[str, str]]] = {}
    used: dict[str, Any] = {}
    left = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)  # type: ignore[arg-type]
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target not in wanted:
            if not name.endswith(DERIVED) and not _is_ignored(module, name):
                left.append(name)
            continue
        found.setdefault(target, []).append((name, pattern or name))
        used[target] = None if pattern is None else by_pattern[pattern]
    return [Conversion(tuple(sources), used[target], target) for target, sources in found.items()], left


def _is_ignored(module: Any, name: str) -> bool:
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


class FolderTensors:
    """`Weights` under the names and in the layout of a folder, from weights under those of the module."""

    def __init__(self, weights: Weights) -> None:
        model: Any = weights.model
        self.model, self.facts = weights.model, weights.facts
        self._weights = weights
        self._module = model.hollow()
        self.architecture = type(self._module).__name__
        self._groups: dict[str, tuple[str, ...]] = {}
        tensors: dict[str, StoredTensor] = {}
        for names in _groups(list(weights.tensors)):
            hollow = {
                name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
                for name, entry in weights.tensors.items()
                if name in names
            }
            for stored, tensor in self._reverted(hollow).items():
                self._groups[stored] = names
                tensors[stored] = StoredTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        self.tensors: Mapping[str, StoredTensor] = tensors

    def read(self, names: Sequence[str]) -> "dict[str, Tensor]":
        """Returns whole tensors by their names in the folder."""
        found: dict[str, Tensor] = {}
        for group in dict.fromkeys(self._groups[name] for name in names):
            made = self._reverted(self._weights.read(list(group)))
            found |= {name: tensor.contiguous().clone() for name, tensor in made.items() if name in names}
        return found

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> "Tensor":
        """Returns the box of one tensor that begins at `offset`."""
        box = tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))
        return self.read([name])[name][box]

    def _reverted(self, tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._module, dict(tensors))


_LAYER = re.compile(r"^(.*?\.\d+)\.")


def _groups(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields the names of each layer, and every name outside of layers: conversions combine tensors of one layer only."""
    layers: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.match(name)
        layers.setdefault(match[1] if match else name, []).append(name)
    yield from (tuple(group) for group in layers.values())


def write(
    path: Path,
    weights: Weights,
    *,
    tokenizer: Path | None,
    max_shard_bytes: int,
    usage: str = usage_of("AutoModelForCausalLM"),
    texts: Callable[[Path], None] | None = None,
) -> None:
    """Writes weights as a folder that `from_pretrained` of transformers loads; see `forge_models.hf.writer.write_folder`.

    Raises:
        Unsupported: `path` is not empty, or a tensor has a dtype that cannot be written.
    """
    model: Any = weights.model
    config = read_settings(model.config, model.settings)
    config = {key: value for key, value in config.items() if key not in ("torch_dtype", "dtype", "_name_or_path")}
    folder = FolderTensors(weights)
    places = {name: TensorPlace(entry.shape, (name,)) for name, entry in folder.tensors.items()}
    config["architectures"] = [folder.architecture]
    options: dict[str, Any] = {"tokenizer": tokenizer, "max_shard_bytes": max_shard_bytes, "usage": usage, "texts": texts}
    write_folder(path, folder, places, config, **options, required=TOKENS)  # the configuration has those that the weights lack
