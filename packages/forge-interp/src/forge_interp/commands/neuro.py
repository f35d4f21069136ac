"""`forge-train neuro encode|rsa PLACE`: predicts brain recordings from a model, and compares them with it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_core.terminal import Console

if TYPE_CHECKING:
    from torch import Tensor

    from forge_interp.neuro.recordings import Pool, Recording
    from forge_interp.store import ActivationStore

neuro = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Predict brain recordings, and compare them with models.",
)

_Place = Annotated[
    Path, typer.Argument(help="A run, a checkpoint or a Hugging Face folder; or a folder that `probe` wrote.", show_default=False)
]
_Target = Annotated[Path, typer.Option("--target", help="The recording: .npz, .h5, .hdf5 or .nwb.", show_default=False)]
_Series = Annotated[str | None, typer.Option(help="Path of the time series in an HDF5 file that has several.")]
_Names = Annotated[
    list[str] | None,
    typer.Option("--names", help="Inner values: a name, an alias or a pattern. Default: blocks.*.residual_after."),
]
_Length = Annotated[int | None, typer.Option(help="Tokens per forward. Default: 512, or the model's maximum if smaller.")]
_Pool = Annotated[str, typer.Option(help="Value of a word or stimulus: `last`, of its last token; `mean`, over its tokens.")]
_Weights = Annotated[str, typer.Option(help="Weights to use: `model`, or `ema` for the average of hook ema.")]
_Tokenizer = Annotated[Path | None, typer.Option(help="A tokenizer.json or sentencepiece model to use instead.")]
_Output = Annotated[Path | None, typer.Option(help="New folder for results.json, results.npz and layers.svg.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


@neuro.command()
def encode(
    place: _Place,
    target: _Target,
    names: _Names = None,
    series: _Series = None,
    lags: Annotated[str, typer.Option(help="Delays of the recording after the text, in rows, such as 1,2,3,4.")] = "0",
    folds: Annotated[int, typer.Option(min=2, help="Number of contiguous folds, each predicted from the others.")] = 5,
    rows: Annotated[
        bool, typer.Option("--rows", help="Choose penalties by leave-one-out instead of folds: faster, for independent rows.")
    ] = False,
    bands: Annotated[bool, typer.Option("--bands", help="Also fit all inner values together, with a penalty for each.")] = False,
    draws: Annotated[int, typer.Option(min=0, help="Number of random shares of the bands to try in addition.")] = 20,
    length: _Length = None,
    pool: _Pool = "last",
    weights: _Weights = "model",
    tokenizer: _Tokenizer = None,
    output: _Output = None,
    as_json: _Json = False,
) -> None:
    """Predict a recording from each inner value by ridge regression, and report the correlation on held-out rows.

    \b
    forge-train neuro encode runs/demo --target story.npz --lags 1,2,3,4 --output encoded
    forge-train neuro encode acts --target sentences.npz --bands

    A recording has `data` (rows, channels) or (repeats, rows, channels) in any unit. It also has `stimuli`, one text per row, or
    `words`: one per row, or with `onsets` and `times` in seconds. Penalties are chosen per channel by nested cross-validation.
    With repeats, r is also given relative to the noise ceiling. Constant channels have no r and are left out of means. Runs on
    one process.
    """
    from forge_interp.commands.inputs import integers
    from forge_interp.neuro.encoding import ALPHAS, encode_banded, lagged, mixes, noise_ceiling, normalized

    delays = integers("--lags", lags) or []
    recording, features, console = _opened(
        place,
        target,
        names,
        series,
        length,
        pool,
        weights,
        tokenizer,
        output,
        as_json,
        lambda recorded: check_design(recorded, folds, delays),
    )
    y = recording.mean
    inner: Literal["leave_one_out"] | None = "leave_one_out" if rows else None
    if len(set(delays)) != len(delays):
        raise ForgeError(f"--lags {lags} names a lag twice")
    design = {name: lagged(value, delays) for name, value in features.items()}
    scores = {name: encode_banded({name: value}, y, folds=folds, inner=inner) for name, value in design.items()}
    if bands and len(design) > 1:
        scores["all"] = encode_banded(design, y, shares=mixes(len(design), draws), folds=folds, inner=inner)
    ceiling = noise_ceiling(recording.data) if len(recording.data) > 1 else None
    arrays: dict[str, Any] = {} if ceiling is None else {"ceiling": ceiling}
    results = []
    for name, score in scores.items():
        arrays |= {f"r/{name}": score.r, f"folds/{name}": score.folds, f"alpha/{name}": score.alpha}
        ends = (score.alpha == min(ALPHAS)) | (score.alpha == max(ALPHAS))
        row: dict[str, Any] = {"name": name, **_summary(score.r), "at_grid_end": int(ends.any(0).sum())}
        if ceiling is not None:
            share = normalized(score.r, ceiling)
            arrays[f"normalized/{name}"] = share
            kept = share[share.isfinite()]
            row |= {"normalized": float(kept.mean()) if len(kept) else None, "channels": len(kept)}
        if name == "all":
            arrays["shares"] = score.shares
            row["shares"] = dict(zip(design, score.shares.mean(0).tolist(), strict=True))
        results.append(row)
    constant = int(next(iter(scores.values())).r.isnan().sum())
    if constant:
        console.note(f"{constant} of {y.shape[1]} channels are constant: their r is NaN, and the numbers below leave them out")
    if many := [row["name"] for row in results if row["at_grid_end"] > y.shape[1] / 2]:
        console.note(
            f"{', '.join(many)}: most channels chose the smallest or the largest penalty of the grid; little can be predicted, "
            "or there are too few rows"
        )
    facts = {
        "rows": len(y),
        "channels": y.shape[1],
        "constant_channels": constant,
        "lags": delays,
        "folds": folds,
        "results": results,
    }
    columns = ("mean", "median", "best")
    _write(output, facts, arrays, "r", columns, console, place, target)
    extra = () if ceiling is None else ("normalized",)
    _show(console, facts, (*columns, *extra))


@neuro.command()
def rsa(
    place: _Place,
    target: _Target,
    names: _Names = None,
    series: _Series = None,
    distance: Annotated[str, typer.Option(help="Distance of two conditions: correlation or euclidean.")] = "correlation",
    samples: Annotated[int, typer.Option(min=0, help="Number of resamples for the interval.")] = 1000,
    length: _Length = None,
    pool: _Pool = "last",
    weights: _Weights = "model",
    tokenizer: _Tokenizer = None,
    output: _Output = None,
    as_json: _Json = False,
) -> None:
    """Compare the distances between conditions in a model with those in a recording: representational similarity analysis.

    forge-train neuro rsa runs/demo --target sentences.npz --output similar

    A condition is a row of the recording: a stimulus, a word, or a row of stored activations. Runs on one process.
    """
    from forge_interp.neuro.dissimilarity import rdm
    from forge_interp.neuro.dissimilarity import rdm_correlation as compare

    if distance not in ("correlation", "euclidean"):
        raise ForgeError(f"--distance {distance}: choose correlation or euclidean")
    chosen: Any = distance

    def check(recorded: "Recording") -> None:
        if recorded.onsets is not None:
            raise ForgeError(
                "RSA compares conditions, but the rows of this recording are samples in time; average the samples of each word"
            )
        rdm(recorded.mean, chosen)

    recording, features, console = _opened(place, target, names, series, length, pool, weights, tokenizer, output, as_json, check)
    theirs = rdm(recording.mean, chosen)
    arrays, results = {"recording": theirs}, []
    for name, value in features.items():
        arrays[name] = rdm(value, chosen)
        score = compare(arrays[name], theirs, samples=samples)
        results.append({"name": name, "correlation": score.correlation, "low": score.low, "high": score.high})
    facts = {"conditions": len(theirs), "channels": recording.mean.shape[1], "distance": distance, "results": results}
    columns = ("correlation", "low", "high")
    _write(output, facts, arrays, "Spearman correlation", columns, console, place, target)
    _show(console, facts, columns)


def _opened(
    place: Path,
    target: Path,
    names: list[str] | None,
    series: str | None,
    length: int | None,
    pool: str,
    weights: str,
    tokenizer: Path | None,
    output: Path | None,
    as_json: bool,
    check: Any,
) -> "tuple[Recording, dict[str, Any], Console]":
    """Returns the recording, after checks, and the features of its rows."""
    from forge_interp.neuro.recordings import read_recording
    from forge_train.commands.options import require_single_process

    require_single_process("neuro")
    if pool not in ("last", "mean"):
        raise ForgeError(f"--pool {pool}: choose last or mean")
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ForgeError(f"--output {output} already exists; choose a new folder")
    console, recording = Console(as_json=as_json), read_recording(target, series)
    check(recording)
    options: dict[str, Any] = {"weights": weights, "length": length, "pool": pool, "tokenizer": tokenizer}
    wanted = names or ["blocks.*.residual_after"]
    return recording, features_of(place, recording, wanted, **options, registry=Registry(), note=console.note), console


def _summary(r: Any) -> dict[str, float | None]:
    """Returns mean, median and best over the channels that vary."""
    known = r[r.isfinite()]
    if not len(known):
        return dict.fromkeys(("mean", "median", "best"))
    return {"mean": float(known.mean()), "median": float(known.median()), "best": float(known.max())}


def _write(
    output: Path | None,
    facts: dict[str, Any],
    arrays: dict[str, Any],
    measure: str,
    columns: tuple[str, ...],
    console: Console,
    place: Path,
    target: Path,
) -> None:
    import json

    import numpy as np

    from forge_core.files import replace_file
    from forge_interp.heat_maps import write_heat_map

    if output is None:
        return
    names = [row["name"] for row in facts["results"]]
    values = [[row[column] for column in columns] for row in facts["results"]]
    try:
        output.mkdir(parents=True, exist_ok=True)
        np.savez(output / "results.npz", **{name: value.numpy() for name, value in arrays.items()})
        write_heat_map(output / "layers.svg", f"{measure}: {place.name} and {target.name}", values, names, columns)
        said = {"place": str(place), "target": str(target), **facts}
        replace_file(output / "results.json", json.dumps(said, indent=1).encode())
    except OSError as cause:
        raise ForgeError(f"{output} cannot be written: {cause.strerror}; choose another --output") from cause
    console.note(f"wrote {output}")


def _show(console: Console, facts: dict[str, Any], columns: tuple[str, ...]) -> None:
    if console.as_json:
        console.document(facts)
        return
    body = [
        (row["name"], *("-" if row[column] is None else f"{row[column]:.3f}" for column in columns)) for row in facts["results"]
    ]
    console.table(("", *columns), body)


Features: TypeAlias = "dict[str, Tensor]"
"""(rows, width) features by inner value."""


def check_design(recording: "Recording", folds: int, lags: Sequence[int]) -> None:
    """Checks that there are enough rows for nested folds, and that lags have rows in time; raises `InterpError` otherwise."""
    import torch

    from forge_interp.neuro.encoding import folds_of, lagged

    rows = recording.data.shape[1]
    folds_of(rows - max(map(len, folds_of(rows, folds))), folds)
    lagged(torch.empty(rows, 0), lags)
    if lags != [0] and recording.stimuli:
        raise ForgeError("--lags needs rows in time, but each row of this recording is a stimulus of its own; remove --lags")


def features_of(
    place: Path,
    recording: "Recording",
    names: Sequence[str],
    *,
    weights: str,
    length: int | None,
    pool: "Pool",
    tokenizer: Path | None,
    registry: Registry,
    note: Callable[[str], None],
) -> Features:
    """Returns features from a folder of `probe`, which has a row for each row or word of the recording, or from a model, which
    reads the words or stimuli.

    Raises:
        ForgeError: the arguments do not fit the recording; raised before any forward.
    """
    from forge_interp.store import ActivationStore, is_store

    if is_store(place):
        return _of_store(ActivationStore(place), recording, names)
    if not recording.words and not recording.stimuli:
        raise ForgeError(f"{place} is a model, but the recording has neither `words` nor `stimuli`; add the text that it reads")
    return _of_model(place, recording, names, weights, length, pool, tokenizer, registry, note)


def _of_store(store: "ActivationStore", recording: "Recording", names: Sequence[str]) -> Features:
    from fnmatch import fnmatchcase

    wanted = [name for name in store.names if any(fnmatchcase(name, pattern) for pattern in names)]
    if not wanted:
        raise ForgeError(f"--names {' '.join(names)} match nothing in {store.folder}, which has {', '.join(store.names)}")
    rows = recording.data.shape[1] if recording.onsets is None else len(recording.words)
    if store.rows != rows:
        what = "rows" if recording.onsets is None else "words"
        raise ForgeError(
            f"{store.folder} has {store.rows} rows, but the recording has {rows} {what}; capture one row for each, for "
            "example with --lines and --positions last"
        )
    return {name: _in_time(store.read(name).flatten(1).double(), recording) for name in wanted}


def _of_model(
    place: Path,
    recording: "Recording",
    names: Sequence[str],
    weights: str,
    length: int | None,
    pool: "Pool",
    tokenizer: Path | None,
    registry: Registry,
    note: Callable[[str], None],
) -> Features:
    import torch

    from forge_interp.captures import capture
    from forge_interp.neuro.recordings import pieces_of, token_words, word_features
    from forge_interp.tap_names import choose, taps
    from forge_train.inference.stored import load_model, open_weights
    from forge_train.inference.tokenizer import check_tokenizer, tokenizer_for

    opened = open_weights(place, registry, weights)
    component: Any = opened.model
    with torch.device("meta"):
        infos = choose(taps(component.build()), list(names))
    longest = int(getattr(component, "max_length", 512))
    size = min(longest, 512) if length is None else length
    if not 1 <= size <= longest:
        raise ForgeError(f"--length {size}: an input of {opened.facts.origin} must have 1 to {longest} tokens")
    coder = tokenizer_for(opened, tokenizer, registry, note)
    check_tokenizer(coder, opened, lambda _: None)  # unused rows of the embedding do not matter here
    begin = coder.prefix
    if recording.words:
        ids = coder.encode(" ".join(recording.words)).tolist()
        owners = [*[-1] * len(begin), *token_words(pieces_of(coder.decode, ids), recording.words)]
        note(f"{len(recording.words):,} words are {len(ids):,} tokens, read in windows of {size}")
        values = word_features(load_model(opened), [*begin, *ids], owners, len(recording.words), list(infos), size, pool)
        return {name: _in_time(value.double(), recording) for name, value in values.items()}
    inputs = [torch.tensor([*begin, *coder.encode(text).tolist()], dtype=torch.int64) for text in recording.stimuli]
    for number, row in enumerate(inputs):
        if not len(begin) < len(row) <= size:
            raise ForgeError(
                f"stimulus {number} has {len(row)} tokens, but 1 to {size} are allowed; shorten it, or raise --length"
            )
    model = load_model(opened)
    device = next(model.parameters()).device
    places = slice(len(begin), None) if pool == "mean" else "last"
    with torch.no_grad(), capture(model, list(infos), positions=places, device="cpu") as seen:
        for row in inputs:
            model(row[None].to(device))
    return {
        name: torch.stack(
            [value.flatten(0, value.dim() - 1 - len(one.shape)).double().mean(0).flatten() for value in seen.each(name)]
        )
        for name, one in infos.items()
    }


def _in_time(values: "Tensor", recording: "Recording") -> "Tensor":
    from forge_interp.neuro.recordings import binned

    if recording.onsets is None or recording.times is None:
        return values
    return binned(values, recording.onsets, recording.times)
