"""Features of a model, or of stored activations, for the rows of a recording. What does not fit is refused before any forward."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_models.interp.listing import choose
from forge_models.interp.neuro.recording import Recording
from forge_models.interp.neuro.ridge import folds_of, lagged
from forge_models.interp.neuro.words import Pool, binned, pieces_of, token_words, word_features
from forge_models.interp.store.read import ActivationStore, is_store

Features = dict[str, Tensor]
"""By inner value (rows, width)."""


def check_design(recording: Recording, folds: int, lags: Sequence[int]) -> None:
    """Raises `InterpError` unless there are rows for nested folds, and for lags, which need rows in time."""
    rows = recording.data.shape[1]
    folds_of(rows - max(map(len, folds_of(rows, folds))), folds)
    lagged(torch.empty(rows, 0), lags)
    if lags != [0] and recording.stimuli:
        raise ForgeError("--lags go with rows in time, and each row of this recording is a stimulus read apart; leave them out")


def features_of(
    place: Path,
    recording: Recording,
    names: Sequence[str],
    *,
    weights: str,
    length: int | None,
    pool: Pool,
    tokenizer: Path | None,
    registry: Registry,
    note: Callable[[str], None],
) -> Features:
    """Of a folder that `probe` wrote, with a row for each row or word of the recording; or of a model, which reads its words or
    stimuli.

    Raises:
        ForgeError: before any forward, what does not fit.
    """
    if is_store(place):
        return _of_store(ActivationStore(place), recording, names)
    if not recording.words and not recording.stimuli:
        raise ForgeError(f"{place} is a model, and the recording has neither `words` nor `stimuli` for it to read; add them")
    return _of_model(place, recording, names, weights, length, pool, tokenizer, registry, note)


def _of_store(store: ActivationStore, recording: Recording, names: Sequence[str]) -> Features:
    from fnmatch import fnmatchcase

    wanted = [name for name in store.names if any(fnmatchcase(name, pattern) for pattern in names)]
    if not wanted:
        raise ForgeError(f"--names {' '.join(names)} match nothing in {store.folder}, which holds {', '.join(store.names)}")
    rows = recording.data.shape[1] if recording.onsets is None else len(recording.words)
    if store.rows != rows:
        what = "rows" if recording.onsets is None else "words"
        raise ForgeError(
            f"{store.folder} has {store.rows} rows and the recording {rows} {what}; capture one of each, as with --lines and "
            "--positions last"
        )
    return {name: _in_time(store.read(name).flatten(1).double(), recording) for name in wanted}


def _of_model(
    place: Path,
    recording: Recording,
    names: Sequence[str],
    weights: str,
    length: int | None,
    pool: Pool,
    tokenizer: Path | None,
    registry: Registry,
    note: Callable[[str], None],
) -> Features:
    from forge_models.interp.capture import capture
    from forge_models.interp.listing import taps
    from forge_train.inference.stored import load_model, open_weights
    from forge_train.inference.tokenizer import check_tokenizer, tokenizer_for

    opened = open_weights(place, registry, weights)
    component: Any = opened.model
    with torch.device("meta"):
        infos = choose(taps(component.build()), list(names))
    longest = int(getattr(component, "max_length", 512))
    size = min(longest, 512) if length is None else length
    if not 1 <= size <= longest:
        raise ForgeError(f"--length {size}: an input of {opened.facts.origin} has 1 to {longest} tokens")
    coder = tokenizer_for(opened, tokenizer, registry, note)
    check_tokenizer(coder, opened, lambda _: None)  # rows of the embedding without a token have no part in this
    begin = coder.prefix
    if recording.words:
        ids = coder.encode(" ".join(recording.words)).tolist()
        owners = [*[-1] * len(begin), *token_words(pieces_of(coder.decode, ids), recording.words)]
        note(f"{len(recording.words):,} words are {len(ids):,} tokens, read in windows of {size}")
        found = word_features(load_model(opened), [*begin, *ids], owners, len(recording.words), list(infos), size, pool)
        return {name: _in_time(value.double(), recording) for name, value in found.items()}
    inputs = [torch.tensor([*begin, *coder.encode(text).tolist()], dtype=torch.int64) for text in recording.stimuli]
    for number, row in enumerate(inputs):
        if not len(begin) < len(row) <= size:
            raise ForgeError(f"stimulus {number} has {len(row)} tokens; 1 to {size} are possible, see --length")
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


def _in_time(values: Tensor, recording: Recording) -> Tensor:
    if recording.onsets is None or recording.times is None:
        return values
    return binned(values, recording.onsets, recording.times)
