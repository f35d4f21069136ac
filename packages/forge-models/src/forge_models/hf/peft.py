"""The format `peft`: adapters of the peft library, with the module names of the base's Hugging Face folder.

A family may fuse projections, such as q, k and v, into one matrix. Their adapters are then written as one of several times the
rank: the rows of all A below each other, and a block-diagonal B.
"""

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from forge_core.component import Component
from forge_core.errors import ForgeError
from forge_core.files import publish, sync_path
from forge_core.protocols.weights import NO_EXTRAS, StoredTensor, Weights, WeightsInfo
from forge_core.registry import Registry
from forge_models.base_format import TUNED, Format
from forge_models.blocks.lora import FACTOR_A, FACTOR_B, MAGNITUDE
from forge_models.components.decoder import DecoderConfig
from forge_models.components.lora import LoRAConfig
from forge_models.components.transformers import TransformersConfig
from forge_models.hf.config import CONFIG
from forge_models.hf.peft_places import AdaptedModel, AdapterPlace, every_place, kind_of, places_of, whole_modules
from forge_models.hf.reader import DTYPES
from forge_models.hf.writer import write_json
from forge_models.lora_weights import AdaptedWeights, check_hash, hash_of, names_of
from forge_models.quantized_weights import DequantizedWeights

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
NAMES = {FACTOR_A: "lora_A.weight", FACTOR_B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
"""Our names of an adapter's parameters -> those of the peft library."""
HASH = "base_sha256"
"""Key of the safetensors metadata with the hash of the base, which the peft library ignores."""
FORMAT = "base_format"
"""Key of the safetensors metadata with the format in which the base was held in training (`LoRAConfig.base_format`)."""
FORMATS = ("full", *get_args(Format))
KNOWN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "layer_replication": (None,),
    "lora_bias": (False,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "use_qalora": (False,),
    "alora_invocation_tokens": (None,),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
"""Keys of `adapter_config.json` that change what an adapter computes, with the values that Forge supports."""


class PeftAdapter:
    """`Weights` of the adapter in a folder of the peft library, by the names of the model's parameters; without the base.

    Args:
        folder: folder with `adapter_config.json` and `adapter_model.safetensors`.
        model: model of the base; its `lora` is ignored.
        family: `model_type` of the base; empty for the first that describes the model.

    Raises:
        ForgeError: the folder is not an adapter, or one that Forge does not support.
    """

    def __init__(self, folder: Path, model: AdaptedModel, family: str = "") -> None:
        from safetensors import SafetensorError, safe_open

        self.folder, values = folder, read_settings(folder)
        plain = replace(model, lora=None)
        family = kind_of(plain, family)
        try:
            self._open = safe_open(str(folder / TENSORS), framework="pt")
        except (SafetensorError, OSError) as cause:
            raise ForgeError(f"{folder / TENSORS} cannot be read as safetensors: {cause}") from cause
        self._keys = set(self._open.keys())
        metadata = self._open.metadata() or {}
        self.hash, kind = metadata.get(HASH), metadata.get(FORMAT, "full")
        if kind not in FORMATS:
            raise ForgeError(f"{folder / TENSORS}: {FORMAT} {kind!r} is not known, only {', '.join(FORMATS)}")
        self._places = {
            name: place for name, place in every_place(plain, family).items() if self._key(place, FACTOR_A) in self._keys
        }
        self._whole = {
            name: key for name, module in whole_modules(plain, family).items() if (key := _whole_key(module)) in self._keys
        }
        self._check_whole(values, plain)
        slots = (FACTOR_A, FACTOR_B, *((MAGNITUDE,) if values.get("use_dora") else ()))
        known = {self._key(place, slot) for place in self._places.values() for slot in slots} | set(self._whole.values())
        if lost := sorted(self._keys ^ known):
            raise ForgeError(
                f"{folder / TENSORS} does not fit the model: {lost[0]} is missing there, or has no linear layer here"
            )
        self._rank = self._common_rank(values)
        # A module that fuses matrices has zeros for those without an adapter.
        self._places = {
            name: place for name, place in self._places.items() if self._own(place) is None or self._read(name, FACTOR_A).any()
        }
        whole: Any = tuple(part for part, name in TUNED.items() if name in self._whole)
        lora = LoRAConfig(
            rank=self._rank,
            alpha=float(values["lora_alpha"]),
            targets=tuple(self._places),
            rank_stabilized=bool(values.get("use_rslora")),
            dora=bool(values.get("use_dora")),
            base_format=kind,
            train=whole,
        )
        self.model: Component = replace(plain, lora=lora)
        dtypes = {self._slice(place, FACTOR_A).get_dtype() for place in self._places.values()}
        dtype = DTYPES.get(next(iter(dtypes)), "") if len(dtypes) == 1 else ""
        if not dtype:
            raise ForgeError(
                f"{folder / TENSORS} has tensors of {', '.join(sorted(map(str, dtypes)))}; convert them to one dtype"
            )
        tensors = {
            f"{name}.{slot}": StoredTensor(self._shape(place, slot), dtype)
            for name, place in self._places.items()
            for slot in slots
        }
        for name, key in self._whole.items():
            entry = self._open.get_slice(key)
            tensors |= {name: StoredTensor(tuple(entry.get_shape()), DTYPES.get(entry.get_dtype(), dtype))}
        self.tensors: Mapping[str, StoredTensor] = tensors
        self.facts = WeightsInfo(origin=str(folder), family=family)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns whole tensors."""
        return {
            name: self._open.get_tensor(self._whole[name]) if name in self._whole else self._read(*name.rpartition(".")[::2])
            for name in names
        }

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        """Returns a box of one tensor."""
        return self.read([name])[name][tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))]

    def _check_whole(self, values: Mapping[str, Any], plain: AdaptedModel) -> None:
        """
        Raises:
            ForgeError: `modules_to_save` names others than embedding and head, or these are tied.
        """
        held = {key.removeprefix(PREFIX).removesuffix(".weight") for key in self._whole.values()}
        for module in values.get("modules_to_save") or ():
            if not any(path == module or path.endswith(f".{module}") for path in held):
                raise ForgeError(
                    f"{self.folder / SETTINGS}: modules_to_save = {module!r} is not supported, only embedding and head of a "
                    "family that Forge implements; merge it with the peft library"
                )
        if held and getattr(plain, "tied_embeddings", False):
            raise ForgeError(
                f"{self.folder / SETTINGS}: modules_to_save is not supported with tied embeddings; merge it with the peft library"
            )

    def _key(self, place: AdapterPlace, slot: str) -> str:
        return f"{PREFIX}{place.module}.{NAMES[slot]}"

    def _slice(self, place: AdapterPlace, slot: str) -> Any:
        return self._open.get_slice(self._key(place, slot))

    def _common_rank(self, values: Mapping[str, Any]) -> int:
        """Returns the rank of every matrix.

        Raises:
            ForgeError: ranks differ, or a scale does.
        """
        rank = int(values["r"])
        for name, place in self._places.items():
            stored = self._slice(place, FACTOR_A).get_shape()[0]
            if stored not in (rank, rank * place.parts):
                raise ForgeError(
                    f"{self.folder}: the adapter of {place.module} has rank {stored}, but others have {rank}; Forge has one"
                )
            own, factor = _pattern(values, "alpha_pattern", place.module), stored / rank
            expected = float(values["lora_alpha"]) * (sqrt(factor) if values.get("use_rslora") else factor)
            if (own or float(values["lora_alpha"])) != expected and abs((own or 0) - expected) > 1e-9 * expected:
                raise ForgeError(f"{self.folder}: alpha_pattern gives {name} a scale of its own; Forge has one for all")
        return rank

    def _own(self, place: AdapterPlace) -> slice | None:
        """Returns the rows of A that belong to one of several fused matrices; None if all rows are for all of them."""
        apart = place.parts > 1 and self._slice(place, FACTOR_A).get_shape()[0] == self._rank * place.parts
        return slice(place.part * self._rank, (place.part + 1) * self._rank) if apart else None

    def _shape(self, place: AdapterPlace, slot: str) -> tuple[int, ...]:
        if slot == MAGNITUDE:
            return (place.rows,)
        return (self._rank, self._slice(place, FACTOR_A).get_shape()[1]) if slot == FACTOR_A else (place.rows, self._rank)

    def _read(self, name: str, slot: str) -> Tensor:
        place = self._places[name]
        whole = self._open.get_tensor(self._key(place, slot))
        rows = slice(place.first, place.first + place.rows)
        own = self._own(place) or slice(None)
        if slot == FACTOR_A:
            return whole[own].contiguous()
        found = whole[rows]
        if slot == FACTOR_B:
            others = torch.ones(whole.shape[1], dtype=torch.bool)
            others[own] = False
            if found[:, others].any():
                raise ForgeError(f"{self.folder}: the adapter of {place.module} mixes its fused matrices; Forge has one for each")
            found = found[:, own]
        return found[list(place.order)] if place.order else found.contiguous()


def _whole_key(module: str) -> str:
    """Returns the name of the weight of a module that an adapter has whole."""
    return f"{PREFIX}{module}.weight"


def _pattern(values: Mapping[str, Any], key: str, module: str) -> float | None:
    patterns = values.get(key) or {}
    return next((float(value) for name, value in patterns.items() if module == name or module.endswith(f".{name}")), None)


def read_settings(folder: Path) -> dict[str, Any]:
    """Returns the content of an adapter's `adapter_config.json`.

    Raises:
        ForgeError: it is missing, no JSON, or has a setting that Forge does not support.
    """
    path = folder / SETTINGS
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ForgeError(f"{path} cannot be read: {cause}; give the folder that the peft library wrote") from cause
    if not isinstance(values, dict) or not isinstance(values.get("r"), int) or "lora_alpha" not in values:
        raise ForgeError(f"{path} lacks r or lora_alpha, so it does not describe a LoRA adapter")
    for key, allowed in KNOWN.items():
        if key in values and values[key] not in allowed:
            raise ForgeError(
                f"{path}: {key} = {values[key]!r} is not supported, only {allowed[0]!r}; merge it with the peft library"
            )
    return values


class PeftConverter:
    """The converter `peft`."""

    def __init__(self, base: str | None = None, family: str | None = None) -> None:
        self.base, self.family = base, family

    def read(self, path: Path, model: AdaptedModel | None = None) -> AdaptedWeights:
        """Opens an adapter and its base.

        Args:
            path: folder of the adapter.
            model: model of the base, if it is a class of transformers that the base is to be opened with; by default the base is
                opened as every folder in the Hugging Face format.

        Raises:
            ForgeError: one of them is missing or not supported, or the adapter is one of another base.
        """
        folder = self._base_of(path, read_settings(path))
        if isinstance(model, TransformersConfig):
            base: Any = model.reopened(folder)
        else:
            base = Registry().load("forge.converters", "hf")().build().read(folder)
        if type(base.model) is not DecoderConfig and not isinstance(base.model, TransformersConfig):
            raise ForgeError(
                f"{folder}: adapters of a {type(base.model).__name__} are not supported, only those of text decoders and of "
                "classes of transformers"
            )
        adapter = PeftAdapter(path, base.model, base.facts.family)
        weights = AdaptedWeights(base, adapter, adapter.model)
        if adapter.hash is not None:
            identity = {"sha256": adapter.hash, "origin": "its base"}
            check_hash(identity, hash_of(base, names_of(adapter.model, base)), str(path), str(folder))
        return weights

    def write(self, path: Path, weights: Weights) -> None:
        """Writes the adapter alone, complete or not at all.

        Raises:
            ForgeError: the weights have no adapter, one of experts, or a base that is in no Hugging Face folder.
        """
        if not isinstance(weights, AdaptedWeights):
            raise ForgeError(f"{weights.facts.origin} has no adapter of its own; the format 'peft' is for runs with [model.lora]")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ForgeError(f"{path} exists and is not an empty folder; choose another")
        model: Any = weights.model
        if getattr(model, "labels", ()):
            raise ForgeError(
                f"{weights.facts.origin} is a classifier, whose head is not part of an adapter's folder; write the whole model "
                "with --merge --to hf"
            )
        folder = Path(self.base or weights.base.facts.origin)
        if not (folder / CONFIG).is_file():
            raise ForgeError(
                f"the base {weights.base.facts.origin} is not a folder in the Hugging Face format, which the peft library opens; "
                "convert it with --to hf, and name that folder with --base"
            )
        family = kind_of(replace(model, lora=None), self.family or weights.facts.family, self.family)
        places = places_of(model, family)
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        partial.mkdir(parents=True)
        try:
            self._write(partial, weights, places, family, folder.resolve())
            for file in partial.rglob("*"):
                sync_path(file)
            publish(partial, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _write(
        self, partial: Path, weights: AdaptedWeights, places: Mapping[str, AdapterPlace], family: str, folder: Path
    ) -> None:
        from safetensors.torch import save_file

        model: Any = weights.model
        lora: LoRAConfig = model.lora
        tensors: dict[str, Tensor] = {}
        wider: dict[str, int] = {}
        for module, fused in _by_module(places):
            tensors |= _fused(module, fused, weights, lora)
            if (parts := fused[0][1].parts) > 1:
                wider[module] = parts
        modules = whole_modules(replace(model, lora=None), family) if lora.train else {}
        modules = {name: modules[name] for name in lora.tuned}
        tensors |= {_whole_key(module): weights.read([name])[name].contiguous() for name, module in modules.items()}
        metadata = {"format": "pt", HASH: hash_of(weights.base, names_of(model, weights.base))}
        if weights.base_format != "full":
            metadata[FORMAT] = weights.base_format
        save_file(tensors, str(partial / TENSORS), metadata=metadata)
        scale = {parts: sqrt(parts) if lora.rank_stabilized else parts for parts in wider.values()}
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(folder),
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": 0.0,
            "target_modules": [module for module, _ in _by_module(places)],
            "rank_pattern": {module: parts * lora.rank for module, parts in wider.items()},
            "alpha_pattern": {module: lora.alpha * scale[parts] for module, parts in wider.items()},
            "use_rslora": lora.rank_stabilized,
            "use_dora": lora.dora,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "modules_to_save": [module.rpartition(".")[2] for module in modules.values()] or None,
            "inference_mode": True,
        }
        write_json(partial / SETTINGS, settings)

    def reference(self, path: Path, tokens: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS) -> Tensor | str:
        """Returns the logits of the peft library in fp32, or a text that says why they are not available."""
        try:
            import peft
        except ImportError:
            return "peft is not installed"
        from forge_models.hf.converter import opened, other_reader

        def adapted(model: Any) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the two libraries may be of different years
                return peft.PeftModel.from_pretrained(model, str(path)).eval()

        folder = self._base_of(path, read_settings(path))
        if extras:
            logits = getattr(other_reader(folder), "library_logits", None)
            if logits is None:
                return f"the inputs of {folder} in transformers are not known"
            return logits(folder, tokens, extras, adapted)
        with tempfile.TemporaryDirectory() as place:
            if (base := self._rounded(path, folder)) is not None:
                folder = Path(place) / "base"
                Registry().load("forge.converters", "hf")().build().write(folder, base)
            model = opened(folder, "AutoModelForCausalLM")
        if isinstance(model, str):
            return model
        with torch.no_grad():
            return adapted(model)(input_ids=tokens).logits

    def _rounded(self, path: Path, folder: Path) -> Weights | None:
        """Returns the values of the base in `folder` that the adapter at `path` was trained with; None if they are those of the
        folder."""
        from safetensors import safe_open

        if FORMAT not in (safe_open(str(path / TENSORS), framework="pt").metadata() or {}):
            return None
        base: Any = Registry().load("forge.converters", "hf")().build().read(folder)
        return DequantizedWeights(base, PeftAdapter(path, base.model, base.facts.family).model)

    def _base_of(self, path: Path, values: Mapping[str, Any]) -> Path:
        name = self.base or values.get("base_model_name_or_path")
        if name is None or not (Path(name) / CONFIG).is_file():
            raise ForgeError(
                f"{path} is an adapter of {name!r}, which is not a folder in the Hugging Face format here; name the folder of "
                "its base with --base"
            )
        return Path(name)


def _by_module(places: Mapping[str, AdapterPlace]) -> "Iterator[tuple[str, list[tuple[str, AdapterPlace]]]]":
    """Yields the modules of the format, each with the names and places of the adapted matrices in it."""
    grouped: dict[str, list[tuple[str, AdapterPlace]]] = {}
    for name, place in places.items():
        grouped.setdefault(place.module, []).append((name, place))
    yield from grouped.items()


def _fused(module: str, fused: Sequence[tuple[str, AdapterPlace]], weights: Weights, lora: LoRAConfig) -> dict[str, Tensor]:
    """Returns the tensors of a module's adapter by their names in the format.

    Raises:
        ForgeError: DoRA adapts only some of the matrices that the module fuses.
    """
    first, rank = fused[0][1], lora.rank
    if lora.dora and len(fused) < first.parts:
        raise ForgeError(
            f"{module} fuses {first.parts} matrices, but [model.lora] adapts {len(fused)} of them; with dora, adapt all or none"
        )
    slots = (FACTOR_A, FACTOR_B, *((MAGNITUDE,) if lora.dora else ()))
    read = weights.read([f"{name}.{slot}" for name, _ in fused for slot in slots])
    made: dict[str, Tensor] = {}
    for name, place in fused:
        a, b = read[f"{name}.{FACTOR_A}"], read[f"{name}.{FACTOR_B}"]
        own, rows = slice(place.part * rank, (place.part + 1) * rank), slice(place.first, place.first + place.rows)
        back = torch.tensor(place.order).argsort() if place.order else slice(None)
        made.setdefault(FACTOR_A, a.new_zeros(place.parts * rank, a.shape[1]))[own] = a
        made.setdefault(FACTOR_B, b.new_zeros(place.total, place.parts * rank))[rows, own] = b[back]
        if lora.dora:
            magnitude = read[f"{name}.{MAGNITUDE}"]
            made.setdefault(MAGNITUDE, magnitude.new_zeros(place.total))[rows] = magnitude[back]
    return {f"{PREFIX}{module}.{NAMES[slot]}": tensor.contiguous() for slot, tensor in made.items()}
