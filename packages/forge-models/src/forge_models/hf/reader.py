"""Opens a folder in the Hugging Face format: the model from `config.json`, tensors from safetensors, one file or sharded."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.protocols.weights import StoredTensor, WeightsInfo
from forge_models.components.decoder import DecoderConfig
from forge_models.hf.config import CONFIG, Unsupported, read_config
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import Family, decoder_of
from forge_models.hf.labels import classifier_of
from forge_models.hf.layers import AUXILIARY, unused_loss
from forge_models.hf.mxfp4 import BLOCKS, QUANTIZATION, SCALES, PackedMatrices, packed_matrices
from forge_models.hf.names import DERIVED, FUSED, OUTSIDE, TensorPlace, mtp_layers, places_in

if TYPE_CHECKING:
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
END = "eos_token_id"
PAD = "pad_token_id"
TOKENS = ("bos_token_id", END, PAD)
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
"""Files of a tokenizer in such a folder."""

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}
"""safetensors' names of dtypes -> torch's."""

FLOATS = ("float64", "float32", "float16", "bfloat16")


def family_of(values: Mapping[str, Any], where: str) -> Family:
    """Returns the family of a configuration.

    Raises:
        Unsupported: the family is not implemented, or the model is not a causal language model.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise unknown_kind(values, where)
    family = FAMILIES[kind]
    architectures = values.get("architectures")
    known = [family.architecture, *filter(None, [classifier_of(kind, family.architecture)])]
    if architectures and architectures not in [[name] for name in known]:
        raise Unsupported(f"{where}: architectures {architectures} is not implemented; only {' and '.join(known)} are")
    return family


def unknown_kind(values: Mapping[str, Any], where: str, others: Iterable[str] = ()) -> Unsupported:
    """Returns the error for a `model_type` that is not implemented; `others` are implemented kinds outside this package."""
    code = " (the code that auto_map names is never run)" if values.get("auto_map") else ""
    known = ", ".join((*FAMILIES, *others))
    return Unsupported(f"{where}: model_type {values.get('model_type')!r} is not implemented{code}; implemented are {known}")


def read_model(folder: Path, ignore: Sequence[str] = ()) -> DecoderConfig:
    """Returns the decoder that a folder's `config.json` describes, without importing torch. Keys in `ignore` are skipped.

    Raises:
        ConfigError, Unsupported: keys are not understood; names all of them.
    """
    values = read_config(folder)
    where = str(folder / CONFIG)
    return decoder_of(family_of(values, where), values, where, ignore)


class CheckpointTensors:
    """Tensors of a folder by global name. Files are memory-mapped, so tensors are read only on demand.

    Attributes:
        folder: folder of the files.
        names: names of all tensors; if files have several names for a tensor, the one that places use.
    """

    def __init__(self, folder: Path, renamed: Callable[[str], str] = str) -> None:
        """Opens the files. `renamed` maps a tensor's name in a file to the name that places use.

        Raises:
            Unsupported: a file is missing, damaged, or does not match the index.
        """
        from safetensors import safe_open

        self.folder = folder
        self._files = located(folder)
        self._open: dict[str, Any] = {}
        for file in sorted(set(self._files.values())):
            try:
                self._open[file] = safe_open(str(folder / file), framework="pt")
            except Exception as cause:  # the library has its own error type for damage, and raises OSError and others
                raise Unsupported(f"{folder / file} cannot be read as safetensors: {cause}") from cause
        self._check_files()
        self.names = {renamed(name): name for name in self._files}
        if len(self.names) < len(self._files):
            raise Unsupported(f"{folder} has a tensor twice, under an older and a newer name; keep one of them")
        self._packed: dict[str, PackedMatrices] = {}
        self._places: Mapping[str, TensorPlace] = {}
        self.tensors: Mapping[str, StoredTensor] = {}

    def read(self, names: Sequence[str]) -> "dict[str, Tensor]":
        """Returns whole tensors by global name; those that are not stacked or transposed are memory-mapped."""
        return {name: self._places[name].join([self.whole(theirs) for theirs in self._places[name].names]) for name in names}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> "Tensor":
        """Returns the box of one tensor that begins at `offset`. Of a stack, only the entries' boxes are read."""
        import torch

        place = self._places[name]
        box = tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))
        if place.rows or place.reshaped or not place.shape:
            return self.read([name])[name][box]
        if not place.stacked:
            return place.box(self._slice(place.names[0]), box)
        entries = [self._slice(theirs)[box[1:]] for theirs in place.names[box[0]]]
        return torch.stack(entries) if entries else torch.empty(tuple(extent))

    def whole(self, theirs: str) -> "Tensor":
        """Returns a tensor by its name in `names`."""
        if (packed := self._packed.get(theirs)) is not None:
            return packed[tuple(slice(0, size) for size in packed.get_shape())]
        stored = self.names[theirs]
        return self._open[self._files[stored]].get_tensor(stored)

    def unpack(self) -> None:
        """Replaces tensors in MXFP4, which are two each, by one in bf16.

        Raises:
            Unsupported: there are none, or two do not fit.
        """
        self._packed = packed_matrices(self.names, self._slice)
        if not self._packed:
            raise Unsupported(f"{self.folder}: {QUANTIZATION} says MXFP4, but no tensor is in it; remove the key from {CONFIG}")
        for name in self._packed:
            del self.names[name + BLOCKS], self.names[name + SCALES]
            self.names[name] = name

    def match(self, wanted: Mapping[str, TensorPlace], left: Iterable[str]) -> None:
        """Assigns a stored tensor to every wanted one, after checking names and shapes. `left` are names of unexpected tensors.

        Raises:
            Unsupported: tensors are missing, unexpected, or have another shape or dtype than `wanted`; names all of them.
        """
        faults = [f"{theirs}: missing" for place in wanted.values() for theirs in place.names if theirs not in self.names]
        faults += [f"{name}: unexpected for the model that {CONFIG} describes" for name in sorted(left)]
        for place in wanted.values():
            stored = {theirs: self._stored(theirs) for theirs in place.names if theirs in self.names}
            for theirs, entry in stored.items():
                if entry.shape != place.theirs:
                    faults.append(f"{theirs}: shape {entry.shape}, but {CONFIG} requires {place.theirs}")
                if entry.dtype not in (("int64",) if place.integers else FLOATS):
                    faults.append(f"{theirs}: dtype {entry.dtype} is not implemented")
            if len({entry.dtype for entry in stored.values()}) > 1:
                faults.append(f"{place.names[0]} and those of other experts have different dtypes")
        if faults:
            more = [f"and {len(faults) - 20} more"] if len(faults) > 20 else []
            raise Unsupported("\n  ".join([f"the tensors in {self.folder} do not fit:", *faults[:20], *more]))
        self._places = wanted
        self.tensors = {name: StoredTensor(place.shape, self._stored(place.names[0]).dtype) for name, place in wanted.items()}

    def check_tie(self, head: str, embedding: str) -> None:
        """Checks a head that is stored although it is tied.

        Raises:
            Unsupported: its values differ from those of the embedding.
        """
        import torch

        if embedding not in self.names:
            return
        table, other = self.whole(embedding), self.whole(head)
        if table.dtype != other.dtype or not torch.equal(table, other):
            raise Unsupported(
                f"{self.folder}: tie_word_embeddings is true, but {head} differs from {embedding} and would not be used; "
                "set it to false, or remove the head"
            )

    def _slice(self, theirs: str) -> Any:
        if (packed := self._packed.get(theirs)) is not None:
            return packed
        stored = self.names[theirs]
        return self._open[self._files[stored]].get_slice(stored)

    def _stored(self, theirs: str) -> StoredTensor:
        entry = self._slice(theirs)
        dtype = str(entry.get_dtype())
        return StoredTensor(tuple(entry.get_shape()), DTYPES.get(dtype, dtype))

    def _check_files(self) -> None:
        """Checks that every file contains exactly the tensors that the index lists."""
        for file, handle in self._open.items():
            listed = {name for name, place in self._files.items() if place == file}
            held = set(handle.keys())
            if listed != held:
                raise Unsupported(
                    f"{self.folder / file} and the index differ about {_some(listed ^ held)}; copy the folder again"
                )


class Folder(CheckpointTensors):
    """`Weights` of a folder with a decoder."""

    def __init__(self, folder: Path, ignore: Sequence[str] = ()) -> None:
        """Opens the folder and checks everything except values. Keys of `config.json` in `ignore` are skipped.

        Raises:
            ConfigError, Unsupported: a key, tensor or file is not understood, missing, or unexpected.
        """
        values = read_config(folder)
        where = str(folder / CONFIG)
        self.family = family_of(values, where)
        self.model = decoder_of(self.family, values, where, ignore)
        super().__init__(folder, partial(self.family.spelled, self.model))
        if values.get(QUANTIZATION):
            self.unpack()
        mtp = mtp_layers(self.family, self.model, values)
        places = places_in(self.family, self.model, fused=any(name.endswith(FUSED) for name in self.names))
        self.match(places, self._left(places, mtp))
        self.facts = facts_in(folder, values, self.family.model_type, ignore, self._notes(values, mtp))

    def _notes(self, values: Mapping[str, Any], mtp: tuple[str, ...]) -> Iterator[str]:
        if values.get("auto_map"):
            yield f"the code that auto_map names was not run; {self.family.architecture} is read as transformers defines it"
        if AUXILIARY in self.family.defaults and (unused := unused_loss(values)):
            yield unused
        if left := [name for name in self.names if name.startswith(mtp)]:
            yield (
                f"{len(left)} tensors of multi-token prediction were skipped ({_some(left)}); logits do not need them, and "
                "[model.mtp] starts from new weights"
            )

    def _left(self, places: Mapping[str, TensorPlace], mtp: tuple[str, ...]) -> set[str]:
        """Returns the stored names that no place uses and that may not be skipped."""
        known = {theirs for place in places.values() for theirs in place.names}
        derived, skipped = (*DERIVED, *self.family.derived), (*mtp, *self.family.skipped(self.model))
        left = {name for name in set(self.names) - known if not name.endswith(derived) and not name.startswith(skipped)}
        named = {**OUTSIDE, **self.family.outside}
        if self.model.tied_embeddings and (head := named["head.weight"]) in left:
            left.remove(head)
            self.check_tie(head, named["embed.weight"])
        return left


def tokenizer_of(folder: Path) -> Path | None:
    """Returns the folder if it contains a tokenizer, otherwise None."""
    return folder if any((folder / name).exists() for name in TOKENIZER_FILES) else None


def facts_in(
    folder: Path, values: Mapping[str, Any], family: str, ignore: Sequence[str] = (), notes: Iterable[str] = ()
) -> WeightsInfo:
    """Returns what a folder states besides its weights; `values` are the keys of `config.json` with token ids.

    Raises:
        Unsupported: a token is not an id.
    """
    for key in TOKENS:
        ids_of(values, key, str(folder / CONFIG))
    return WeightsInfo(
        # null is kept, because it means that the model has no such token; an absent key has the default of the family.
        special_tokens={key: values[key] for key in TOKENS if key in values},
        ends=_ends(folder),
        tokenizer=tokenizer_of(folder),
        origin=str(folder),
        family=family,
        notes=(*(f"{key} of {CONFIG} was ignored, as asked for" for key in ignore), *notes),
    )


def ids_of(values: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    """Returns the token ids of a key: one, a list, or none.

    Raises:
        Unsupported: the value is something else.
    """
    value = values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise Unsupported(f"{where}: {key} {value!r}: expected a token id or a list of them")
    return tuple(ids)


def _ends(folder: Path) -> tuple[int, ...]:
    """Returns the ids that end generation, from the folder's generation settings; empty if these name none."""
    path = folder / GENERATION
    if not path.is_file():
        return ()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as cause:
        raise Unsupported(f"{path} is not JSON: {cause}") from cause
    return ids_of(values, END, str(path)) if isinstance(values, dict) else ()


def located(folder: Path) -> dict[str, str]:
    """Returns {name of every tensor: its file}."""
    if (folder / INDEX).is_file():
        try:
            places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            files = {str(name): str(file) for name, file in places.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise Unsupported(f"{folder / INDEX} is not an index of safetensors: {cause!r}") from cause
        if SINGLE not in files.values() and (folder / SINGLE).is_file():
            raise Unsupported(
                f"{folder} has weights twice: in {SINGLE}, which transformers reads, and in the shards of {INDEX}. "
                f"Delete {SINGLE} if the shards are right, otherwise {INDEX} and the shards"
            )
        for file in sorted(set(files.values())):
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise Unsupported(f"{folder / INDEX} names {file!r}, which is not a safetensors file of this folder; correct it")
            if not (folder / file).is_file():
                raise Unsupported(f"{folder / file} is missing, but {INDEX} names it; copy the file into the folder")
        return files
    if (folder / SINGLE).is_file():
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(folder / SINGLE), framework="pt") as handle:
                return dict.fromkeys(handle.keys(), SINGLE)
        except (SafetensorError, OSError) as cause:
            raise Unsupported(f"{folder / SINGLE} cannot be read as safetensors: {cause}") from cause
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickled:
        raise Unsupported(
            f"{folder} has pickled weights only ({_some(pickled)}), which are not read, because unpickling can run any code; "
            "convert them to safetensors with the tools of their origin"
        )
    raise Unsupported(f"{folder} has neither {SINGLE} nor {INDEX}; give a folder with safetensors")


def _some(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
