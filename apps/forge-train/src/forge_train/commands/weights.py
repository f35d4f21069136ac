"""`forge-train convert|upcycle SOURCE`: converts weights to another format, or a dense model to one with experts."""

import tempfile
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forge_core.terminal import Console

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.protocols.weights import Converter, Weights
    from forge_core.registry import Registry


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TOLERANCE = 1e-4
"""Largest allowed difference from another library's fp32 logits, relative to the largest logit."""


def convert(
    source: Annotated[str, typer.Argument(help="The weights to convert: a path, or the URL of a checkpoint.")],
    target_: Annotated[str, typer.Argument(metavar="TARGET", help="The folder to create; for gguf, a file.")],
    from_: Annotated[str | None, typer.Option("--from", help="Format of SOURCE. Default: detected from its files.")] = None,
    to: Annotated[str, typer.Option("--to", help="Format of TARGET.")] = ...,  # type: ignore[assignment]  # required
    dtype: Annotated[str | None, typer.Option(help="Data type to write: fp32, bf16 or fp16. Default: unchanged.")] = None,
    family: Annotated[str | None, typer.Option(help="Model family to write, such as llama or llava.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder to copy tokenizer files from.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="A key of config.json to ignore; may be given several times.")] = None,
    max_shard_bytes: Annotated[int | None, typer.Option(help="Maximum size of one tensor file, in bytes.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe with the [model] of the tensors in SOURCE.")] = None,
    prefix: Annotated[str | None, typer.Option(help="Text before each name in SOURCE, such as `model.`.")] = None,
    names: Annotated[
        str | None, typer.Option(help="Whose names SOURCE has: kempnerforge or torchtitan (dcp), nanogpt (torch).")
    ] = None,
    to_prefix: Annotated[str | None, typer.Option(help="Text before each name in TARGET.")] = None,
    quantization: Annotated[str | None, typer.Option(help="Quantization of matrices (gguf): none or q8_0.")] = None,
    pre_tokenizer: Annotated[
        str | None, typer.Option(help="Name of the rule that splits text into words (gguf); `none` leaves the tokenizer out.")
    ] = None,
    unsafe_pickle: Annotated[
        bool,
        typer.Option("--unsafe-pickle", help="Also unpickle objects other than tensors: this can run any code."),
    ] = False,
    weights: Annotated[str, typer.Option(help="Weights to use: `model`, or `ema` for the average of hook ema.")] = "model",
    base: Annotated[str | None, typer.Option(help="Where the base of an adapter is. Default: where its run had it.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter into its base; `--to hf` always does.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Convert weights between formats, read the result again, and compare its logits.

    Formats are plugins of the group forge.converters. Forge has `hf`, `gguf`, `peft` for adapters, `forge`, and
    `safetensors`, `dcp` and `torch`, which store tensors under their names in the model.
    """
    from dataclasses import replace

    from forge_ckpt.store.objects import is_url
    from forge_core.errors import ForgeError
    from forge_core.registry import Registry
    from forge_models.lora_weights import MergedWeights
    from forge_train.commands.options import require_single_process
    from forge_train.formats.converters import format_of
    from forge_train.formats.forge import Cast, ForgeWeights
    from forge_train.inference.tokenizer import write_tokenizer
    from forge_train.report.card import base_of, history_of

    require_single_process("convert")
    if is_url(target_):
        raise ForgeError(
            f"{target_}: weights can only be written to a local folder; write them there, then copy the folder to the URL"
        )
    from_ = from_ or format_of(source)
    if is_url(source) and from_ != "forge":
        raise ForgeError(f"{source}: format {from_!r} can only be read from a local folder; copy the weights to one first")
    target = Path(target_)
    place: Any = source if is_url(source) else Path(source)
    console, registry = Console(as_json=as_json), Registry()
    if dtype is not None and dtype not in DTYPES:
        raise ForgeError(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}")
    given = _given(family=family, max_shard_bytes=max_shard_bytes, tokenizer=tokenizer and str(tokenizer), prefix=to_prefix)
    given |= _given(quantization=quantization, pre_tokenizer=pre_tokenizer)
    read = _given(recipe=recipe, prefix=prefix, names=names, ignore=tuple(ignore) if ignore else None)
    if unsafe_pickle:
        read["unsafe_pickle"] = True
    if recipe is not None and "recipe" in _options(registry, to):
        given["recipe"] = recipe  # for reading the result
    if base is not None:
        # A run's adapter that is written for the peft library needs the base in the folder that peft will open.
        takers = [options for options, kind in ((given, to), (read, from_)) if "base" in _options(registry, kind)]
        if not takers:
            raise ForgeError(f"--base names the base of an adapter, and neither {from_!r} nor {to!r} has adapters; remove it")
        takers[0]["base"] = base
    if to == "peft" and (merge or dtype is not None):
        raise ForgeError(f"--to peft writes the adapter as it was trained; remove {'--merge' if merge else '--dtype'}")
    reader = converter(registry, from_, read | ({} if weights == "model" else {"weights": weights}))
    writer = converter(registry, to, given)
    origin = reader.read(place)
    notes = [*origin.facts.notes, f"{source}: {compared(reader, place, origin)}"]
    trained = getattr(origin, "adapter", origin)  # of an adapter and its base, what the run has trained
    if merge or (to == "hf" and getattr(origin.model, "lora", None) is not None):
        origin, unmerged = MergedWeights(origin), origin
        notes.append(merging(unmerged, origin))
    converted = origin if dtype is None else Cast(origin, DTYPES[dtype])
    if isinstance(trained, ForgeWeights):
        converted.facts = replace(converted.facts, history=history_of(trained), base=base_of(trained.facts.recipe))
    with tempfile.TemporaryDirectory() as folder:
        if tokenizer is None and write_tokenizer(origin, Path(folder), registry, notes.append):
            converted.facts = replace(converted.facts, tokenizer=Path(folder))
        writer.write(target, converted)
    try:
        # A folder of a known family would be read as a decoder, with other names than those of a class of transformers.
        reopened = getattr(converted.model, "reopened", None) if to == "hf" else None
        if to == "peft":
            again = writer.read(target, converted.model)  # type: ignore[call-arg]  # with the class of its base
        else:
            again = writer.read(target) if reopened is None else reopened(target)
        stored = getattr(writer, "stored", None)
        expected = converted if stored is None else stored(converted)
        same(expected, again)
        lost = rounded(converted, expected)
        if lost:
            notes.append(f"{target}: the format's rounding changes logits by up to {lost:.1e} of the largest logit")
        notes.append(f"{target}: {compared(writer, target, again)}")
    except BaseException:
        aside = target.with_name(f"{target.name}.refused")
        if not aside.exists():
            target.rename(aside)
            console.note(f"the converted weights failed the comparison and were moved to {aside}")
        raise
    result = {"source": source, "target": str(target), "tensors": len(again.tensors), "logits": "equal", "notes": notes}
    if as_json:
        console.document(result)
    same_as = f"the rounded weights of {source}" if lost else source
    console.text(f"{target}: {len(again.tensors)} tensors; read again, its logits are bitwise equal to those of {same_as}")
    for note in notes:
        console.text(f"  {note}")


def merging(weights: "Weights", merged: "Weights") -> str:
    """Compares the logits of an adapter and its base with those of the merged model, and returns the result as text."""
    difference = float((_logits(weights) - _logits(merged)).abs().max())
    return (
        f"the adapter was merged into its base; largest difference of a logit {difference:.1e}, from rounding in the base's dtype"
    )


def _given(**options: Any) -> dict[str, Any]:
    """Returns the options that are set."""
    return {name: value for name, value in options.items() if value is not None}


def converter(registry: "Registry", name: str, options: dict[str, Any]) -> "Converter":
    """Returns the converter of a format.

    Raises:
        ForgeError: the format does not support an option.
    """
    from forge_core.errors import ForgeError

    known = _options(registry, name)
    component = registry.load("forge.converters", name)
    if unknown := sorted(set(options) - known):
        flags = ", ".join(f"--{option.replace('_', '-')}" for option in unknown)
        raise ForgeError(f"format {name!r} does not support {flags}")
    return component(**options).build()


def _options(registry: "Registry", name: str) -> set[str]:
    from forge_core.trust import trust_name

    trust_name(name)  # the user typed the name, so its Python file may run
    return {item.name for item in fields(registry.load("forge.converters", name))}


def same(weights: "Weights", again: "Weights") -> None:
    """Compares the logits of the source weights with those of the written weights.

    Raises:
        ForgeError: the logits differ in any bit, or are not finite.
    """
    import torch

    from forge_core.errors import ForgeError

    expected, found = _logits(weights), _logits(again)
    if not torch.isfinite(expected).all():
        raise ForgeError(f"the logits of {weights.facts.origin} are not finite; the conversion cannot be checked")
    if expected.shape != found.shape or not torch.equal(expected, found):
        raise ForgeError("the logits of the written weights differ from those of the source; please report this")


def rounded(weights: "Weights", stored: "Weights") -> float:
    """Returns the largest difference that rounding makes to logits, relative to the largest logit."""
    if stored is weights:
        return 0.0
    expected, found = _logits(weights), _logits(stored)
    return float((expected - found).abs().max() / expected.abs().max().clamp(min=1e-30))


def compared(converter: "Converter", path: Path, weights: "Weights") -> str:
    """Compares logits with the format's own library, and returns the result as text.

    Raises:
        ForgeError: the logits differ by more than `TOLERANCE`.
    """
    from forge_core.errors import ForgeError
    from forge_models.hf.streamed_forward import fixed_rows

    reference = converter.reference(path, *fixed_rows(weights.model))
    if isinstance(reference, str):
        return f"not compared with another library: {reference}"
    ours = _logits(weights)
    error = float((ours - reference).abs().max() / reference.abs().max().clamp(min=1e-30))
    if not error <= TOLERANCE:
        raise ForgeError(f"the logits of {path} differ from the format's own library by {error:.1e} of the largest one")
    return f"largest difference from the format's own library {error:.1e} of the largest logit"


def _logits(weights: "Weights") -> "Tensor":
    from forge_models.hf.streamed_forward import fixed_rows, logits_of

    tokens, extras = fixed_rows(weights.model)
    return logits_of(weights, tokens, extras=extras)


def upcycle(
    source: Annotated[Path, typer.Argument(help="A run, a checkpoint, or a Hugging Face folder of a dense model.")],
    recipe: Annotated[str, typer.Argument(help="A TOML file or preset whose [model.moe] describes the new model.")],
    target: Annotated[Path, typer.Argument(help="The folder to create.")],
    to: Annotated[str, typer.Option("--to", help="Format of TARGET.")] = "hf",
    noise: Annotated[float, typer.Option(min=0.0, help="Noise added to experts, in standard deviations of each matrix.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of noise and routers.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Turn the feed-forward layers of a dense model into experts; without noise, the new model computes the same function.

    To train it, set `[model] from_hf` to TARGET (in the Hugging Face format).
    """
    from forge_core.errors import ForgeError
    from forge_core.registry import Registry
    from forge_core.terminal import Console
    from forge_core.trust import trust_name
    from forge_models.lora_weights import MergedWeights
    from forge_models.upcycle import Upcycled
    from forge_train.commands.options import require_single_process
    from forge_train.inference.stored import open_weights
    from forge_train.recipe.load import load_recipe

    require_single_process("upcycle")
    registry = Registry()
    model: Any = load_recipe(recipe, registry=registry).job.model
    if getattr(model, "moe", None) is None:
        raise ForgeError(f"{recipe} has no [model.moe], which defines the experts; add it")
    console, dense = Console(as_json=as_json), open_weights(source, registry)
    for note in dense.facts.notes:
        console.note(note)
    if getattr(dense.model, "lora", None) is not None:
        dense = MergedWeights(dense)
    weights = Upcycled(dense, model.moe, noise, seed)
    trust_name(to)
    registry.load("forge.converters", to)().build().write(target, weights)
    shape = weights.model.shape
    assert shape.moe is not None
    layers = sum(map(shape.has_experts, range(shape.layers)))
    if as_json:
        counts = {"layers": shape.layers, "layers_with_experts": layers, "experts": shape.moe.experts, "top_k": shape.moe.top_k}
        console.document({"target": str(target), **counts})
    console.text(
        f"{target}: {layers} of {shape.layers} layers with {shape.moe.experts} experts, {shape.moe.top_k} for each token"
    )
