"""Writes weights as a folder in the Hugging Face format with a model card; the folder appears complete or not at all."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.files import publish, sync_path
from forge_core.protocols.weights import Weights
from forge_models.components.decoder import DecoderConfig
from forge_models.hf.card import card, usage_of
from forge_models.hf.config import CONFIG, Unsupported
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import Family, config_of, misfits
from forge_models.hf.names import TensorPlace, places_in
from forge_models.hf.reader import END, FLOATS, GENERATION, INDEX, PAD, SINGLE, TOKENIZER_FILES, TOKENS, tokenizer_of

if TYPE_CHECKING:
    from torch import Tensor


COMPARED = "Exported by Forge. Its logits were compared with those of the weights that it was made from."

ITEM = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}


def chosen(decoder: DecoderConfig, wanted: str | None, preferred: str = "") -> Family:
    """Returns the family that fully describes `decoder`: the wanted one, otherwise the preferred one if it does, or the first.

    Raises:
        Unsupported: no family does; names for each what it cannot describe.
    """
    if wanted is not None and wanted not in FAMILIES:
        raise Unsupported(f"family {wanted!r} is not known; known families: {', '.join(FAMILIES)}")
    order = [wanted] if wanted is not None else [*([preferred] if preferred in FAMILIES else []), *FAMILIES]
    reasons = []
    for name in dict.fromkeys(order):
        if not (found := misfits(FAMILIES[name], decoder)):
            return FAMILIES[name]
        reasons.append(f"{name}: {'; '.join(found)}")
    raise Unsupported("\n  ".join(["no Hugging Face family can describe this model:", *reasons]))


def write(path: Path, weights: Weights, *, family: str | None, tokenizer: Path | None, max_shard_bytes: int) -> None:
    """Writes weights, configuration, generation settings, tokenizer and a model card.

    MTP modules, which logits do not need, are left out; the card says so.

    Args:
        path: path of the new folder; an empty folder may exist.
        weights: the weights to write, in their dtypes.
        family: `model_type`; by default that of the weights' origin, otherwise the first that fits.
        tokenizer: folder whose tokenizer files are copied; by default that of `weights`.
        max_shard_bytes: maximum size of a file of tensors; a larger tensor has its own file.

    Raises:
        Unsupported: no family describes the model, or `path` is not empty.
    """
    if type(weights.model) is not DecoderConfig:  # a subclass has parts that no family describes
        raise Unsupported(f"a {type(weights.model).__name__} cannot be written as a decoder in the Hugging Face format")
    chosen_family = chosen(weights.model, family, weights.facts.family)
    config = config_of(chosen_family, weights.model)
    places = places_in(chosen_family, replace(weights.model, mtp=None))
    usage = usage_of("AutoModelForSequenceClassification" if weights.model.labels else "AutoModelForCausalLM")
    write_folder(path, weights, places, config, tokenizer=tokenizer, max_shard_bytes=max_shard_bytes, usage=usage)


def write_folder(
    path: Path,
    weights: Weights,
    places: Mapping[str, TensorPlace],
    config: Mapping[str, Any],
    *,
    tokenizer: Path | None,
    max_shard_bytes: int,
    usage: str = usage_of("AutoModelForCausalLM"),
    constants: "Mapping[str, Tensor] | None" = None,
    texts: Callable[[Path], None] | None = None,
    required: Sequence[str] = (),
) -> None:
    """Writes a folder of any kind of model, complete or not at all; see `write`.

    Args:
        path: path of the new folder.
        weights: the weights to write.
        places: where each tensor is written; the rest of a larger tensor is 0.
        config: keys of `config.json` that describe the model.
        tokenizer: folder whose tokenizer files are copied; by default that of `weights`.
        max_shard_bytes: maximum size of a file of tensors.
        usage: code that opens the folder, for the model card.
        constants: tensors by their stored name that the format requires but the model does not have.
        texts: writes further files into the folder.
        required: keys of token ids that may not be null; they are left out if unknown.

    Raises:
        Unsupported: `path` is not empty, `tokenizer` contains none, or a tensor has a dtype that cannot be written.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise Unsupported(f"{path} exists and is not an empty folder; choose another")
    if tokenizer is not None and tokenizer_of(tokenizer) is None:
        raise Unsupported(f"{tokenizer} contains no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}")
    if odd := sorted({weights.tensors[name].dtype for name, place in places.items() if not place.integers} - set(FLOATS)):
        raise Unsupported(f"tensors of dtype {', '.join(odd)} cannot be written; convert them to one of {', '.join(FLOATS)}")
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        _write_tensors(partial, weights, places, max_shard_bytes, constants or {})
        _write_texts(partial, weights, config, tokenizer or weights.facts.tokenizer, places, usage, required)
        if texts is not None:
            texts(partial)
        for file in partial.rglob("*"):
            sync_path(file)
        publish(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_tensors(
    folder: Path, weights: Weights, places: Mapping[str, TensorPlace], limit: int, constants: "Mapping[str, Tensor]"
) -> None:
    from safetensors.torch import save_file

    shards = list(_shards(weights, places, limit))
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        read = weights.read(shard)
        theirs = _theirs({ours: places[ours] for ours in shard}, read)
        if number == len(shards):
            theirs |= constants
        save_file(theirs, str(folder / file), metadata={"format": "pt"})
        files |= dict.fromkeys(theirs, file)
    if len(shards) > 1:
        total = sum(_bytes(weights, name) for name in places) + sum(tensor.nbytes for tensor in constants.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        write_json(folder / INDEX, index)


def _theirs(places: Mapping[str, TensorPlace], read: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """Returns a checkpoint's tensors from ours, with the parts of fused ones joined."""
    joined: dict[str, Tensor] = {}
    for ours, place in places.items():
        if place.fused is None:
            joined |= place.split(read[ours])
            continue
        whole = joined.setdefault(place.names[0], read[ours].new_zeros(place.theirs))
        if whole.dtype != read[ours].dtype:
            raise Unsupported(
                f"{place.names[0]} is fused from tensors of {whole.dtype} and {read[ours].dtype}; convert them to one dtype"
            )
        if place.rows:
            whole[list(place.rows)] = read[ours].reshape(-1, *place.theirs[1:])
        else:
            place.part(whole).copy_(read[ours])
    return joined


def _shards(weights: Weights, places: Mapping[str, TensorPlace], limit: int) -> Iterator[list[str]]:
    """Yields names in the model's order, in groups of at most `limit` bytes, except for single larger tensors."""
    whole: dict[str, list[str]] = {}
    for name, place in places.items():
        whole.setdefault(place.names[0], []).append(name)
    group: list[str] = []
    size = 0
    for names in whole.values():
        more = sum(_bytes(weights, name) for name in names)
        if group and size + more > limit:
            yield group
            group, size = [], 0
        group += names
        size += more
    yield group


def _bytes(weights: Weights, name: str) -> int:
    entry = weights.tensors[name]
    return prod(entry.shape) * ITEM[entry.dtype]


def _write_texts(
    folder: Path,
    weights: Weights,
    config: Mapping[str, Any],
    tokenizer: Path | None,
    places: Mapping[str, TensorPlace],
    usage: str,
    required: Sequence[str],
) -> None:
    tokens = special_tokens(weights, config["model_type"], tokenizer)
    tokens = {key: value for key, value in tokens.items() if value is not None or key not in required}
    classifies = "ForSequenceClassification" in config["architectures"][0]  # any class of transformers may have id2label
    if classifies and tokens.get(PAD) is None:
        # Without one, a classifier of transformers takes one text at a time. No text ends with the end of a document.
        end = tokens.get(END)
        tokens[PAD] = end[0] if isinstance(end, list) and end else end
    parameters = [name for name, place in places.items() if not place.buffer]
    dtypes = {weights.tensors[name].dtype for name in parameters}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    write_json(folder / CONFIG, {**config, **tokens, "torch_dtype": dtype})
    count = sum(prod(places[name].shape) for name in parameters)
    name, kind = config["architectures"][0], config["model_type"]
    text = card(weights, name, name, kind, dtype=dtype, count=count, usage=usage, origin=COMPARED)
    (folder / "README.md").write_text(text, encoding="utf-8")
    kept = tokenizer / GENERATION if tokenizer is not None else None
    if classifies:
        pass  # a classifier generates nothing
    elif kept is not None and kept.is_file():
        shutil.copyfile(kept, folder / GENERATION)
    else:
        ends = {END: list(weights.facts.ends)} if weights.facts.ends else {}
        write_json(folder / GENERATION, {"_from_model_config": True} | tokens | ends)
    if tokenizer is not None:
        for name in TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / name)


def special_tokens(weights: Weights, model_type: str, tokenizer: Path | None) -> dict[str, Any]:
    """Returns ids of special tokens: those stored with the weights, otherwise those that the tokenizer's folder names.

    Unknown ids are null. An absent key would have the default of transformers for the family: a `pad_token_id` outside the
    vocabulary, or a token whose embedding is not trained. So only keys that a folder of this family left out are left out.
    """
    ids_of_keys: dict[str, Any] = dict.fromkeys(TOKENS)
    if known := dict(weights.facts.special_tokens):
        return known if weights.facts.family == model_type else ids_of_keys | known
    if tokenizer is None:
        return ids_of_keys
    settings, ids = tokenizer / "tokenizer_config.json", _added(tokenizer)
    if not settings.is_file():
        return ids_of_keys
    named = json.loads(settings.read_text(encoding="utf-8"))
    for key in ("bos_token", "eos_token", "pad_token"):
        token = named.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if text in ids:
            ids_of_keys[f"{key}_id"] = ids[text]
    return ids_of_keys


def added_token(tokenizer: Path, number: int | None) -> str | None:
    """Returns the text that a tokenizer always encodes as this token; None if it is part of words, or unknown."""
    return next((text for text, each in _added(tokenizer).items() if each == number), None)


def _added(tokenizer: Path) -> dict[str, int]:
    """Returns the ids of the tokens that a tokenizer has besides those of its model, by text."""
    content = tokenizer / "tokenizer.json"
    if not content.is_file():
        return {}
    return {entry["content"]: entry["id"] for entry in json.loads(content.read_text(encoding="utf-8")).get("added_tokens", [])}


def write_json(path: Path, content: Any) -> None:
    """Writes indented JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
