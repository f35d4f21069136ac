"""Reads brain recordings from files, maps tokens to words, and maps words to the times of a recording."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from forge_interp.captures import capture
from forge_interp.tap_names import InterpError
from forge_models.generation import evaluating

HDF5 = (".h5", ".hdf5", ".nwb")


@dataclass(frozen=True)
class Recording:
    """A recording and its stimulus.

    Attributes:
        data: (repeats, rows, channels) fp64; a row is a sample in time, a word or a stimulus.
        times: (rows,) start of each sample in seconds; None if rows are words or stimuli.
        words: words of the stimulus if it is one text.
        onsets: (words,) start of each word in seconds; None if each word has a row.
        stimuli: text of each row, if each row is an independent stimulus.
    """

    data: Tensor
    times: Tensor | None = None
    words: tuple[str, ...] = ()
    onsets: Tensor | None = None
    stimuli: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks that the parts are consistent; raises `InterpError` otherwise."""
        rows = self.data.shape[1]
        if not bool(self.data.isfinite().all()):
            at = (~self.data.isfinite()).nonzero()
            raise InterpError(
                f"data has {len(at)} values that are not finite, the first in row {int(at[0, 1])} of channel {int(at[0, 2])}; "
                "leave out these channels or rows"
            )
        if self.times is not None and len(self.times) != rows:
            raise InterpError(f"data has {rows} rows and times {len(self.times)}; each row has one")
        if self.words and self.stimuli:
            raise InterpError("a recording has words of one text, or stimuli that are read apart, not both")
        if self.stimuli and len(self.stimuli) != rows:
            raise InterpError(f"data has {rows} rows, and there are {len(self.stimuli)} stimuli; each row has one")
        if self.onsets is None:
            if self.words and len(self.words) != rows:
                raise InterpError(
                    f"data has {rows} rows, and there are {len(self.words)} words without onsets; give each word a row, or "
                    "onsets and times"
                )
            return
        if self.times is None or len(self.onsets) != len(self.words):
            raise InterpError(f"onsets go with words and times: {len(self.onsets)} onsets, {len(self.words)} words")

        check_times(self.onsets, self.times)
        if not bool((self.onsets.diff() >= 0).all()):
            raise InterpError("onsets must not decrease: words are in the order of the text")

    @property
    def mean(self) -> Tensor:
        """Returns the (rows, channels) mean over repeats."""
        return self.data.mean(0)


def read_recording(path: Path, series: str | None = None) -> Recording:
    """Reads a recording from a `.npz`, HDF5 or NWB file.

    A `.npz` or HDF5 file has the arrays of `Recording` by name; `data` is (rows, channels) or (repeats, rows, channels). An NWB
    file has a time series: a group with `data` (rows, ...) and `timestamps`, or with `starting_time` and its rate. The words of
    an NWB file are a table with `start_time` and `word`.

    Args:
        path: path of the file.
        series: path of the time series within a file that has several.

    Raises:
        InterpError: the file cannot be read, a part is missing, or the parts are inconsistent.
    """
    if path.suffix not in (".npz", *HDF5):
        raise InterpError(f"{path}: recordings are .npz, {', '.join(HDF5)} files")
    try:
        found = _npz(path) if path.suffix == ".npz" else _hdf5(path, series)
        if series is not None and path.suffix == ".npz":
            raise InterpError("a time series is chosen in HDF5 files only")
        return _recording(found)
    except (OSError, ValueError, KeyError) as cause:
        raise InterpError(f"{path} cannot be read: {cause}") from cause
    except InterpError as cause:
        raise InterpError(f"{path}: {cause}") from None


def _recording(found: Mapping[str, Any]) -> Recording:
    if "data" not in found:
        raise InterpError(f"it has no `data`, only {', '.join(sorted(found)) or 'nothing'}")
    data = _numbers("data", found["data"])
    if data.dim() not in (2, 3) or not data.numel():
        raise InterpError(f"data {tuple(data.shape)} must be (rows, channels) or (repeats, rows, channels)")
    times, onsets = (_numbers(name, found[name]) if name in found else None for name in ("times", "onsets"))
    for name, one in (("times", times), ("onsets", onsets)):
        if one is not None and (one.dim() != 1 or not bool(one.isfinite().all())):
            raise InterpError(f"{name} {tuple(one.shape)} must be finite seconds in one dimension")
    words, stimuli = (tuple(map(_text, found[name])) if name in found else () for name in ("words", "stimuli"))
    return Recording(data if data.dim() == 3 else data[None], times, words, onsets, stimuli)


def _npz(path: Path) -> dict[str, Any]:
    np = _library("numpy")
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _hdf5(path: Path, series: str | None) -> dict[str, Any]:
    h5py = _library("h5py")
    with h5py.File(path, "r") as file:
        if series is None and isinstance(file.get("data"), h5py.Dataset):
            return {name: value[()] for name, value in file.items() if isinstance(value, h5py.Dataset)}
        groups: dict[str, Any] = {}
        file.visititems(lambda name, one: groups.update({name: one}) if isinstance(one, h5py.Group) else None)
        found = {name: one for name, one in groups.items() if "data" in one and {"timestamps", "starting_time"} & set(one)}
        if series is not None and series.strip("/") not in found:
            raise InterpError(f"it has no time series {series}; it has {', '.join(found) or 'none'}")
        if series is None and len(found) != 1:
            raise InterpError(f"it has {len(found)} time series, choose one with --series: {', '.join(found) or 'none is there'}")
        chosen = found[series.strip("/")] if series is not None else next(iter(found.values()))
        values: dict[str, Any] = {"data": chosen["data"][()].reshape(len(chosen["data"]), -1)}
        values["times"] = chosen["timestamps"][()] if "timestamps" in chosen else _regular(chosen)
        for table in groups.values():
            if "start_time" in table and "word" in table:
                values |= {"words": table["word"][()], "onsets": table["start_time"][()]}
        return values


def _regular(series: Any) -> Any:
    np = _library("numpy")
    start = series["starting_time"]
    if "rate" not in start.attrs:
        raise InterpError(f"{series.name}/starting_time has no attribute `rate`, in samples a second")
    return float(start[()]) + np.arange(len(series["data"])) / float(start.attrs["rate"])


def _numbers(name: str, value: Any) -> Tensor:
    if value.dtype.kind not in "fiub":
        raise InterpError(f"{name} holds {value.dtype}, not numbers")
    return torch.from_numpy(value.astype("float64"))


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _library(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as cause:
        raise InterpError(f"this file needs {name}: pip install 'forge-interp[neuro]'") from cause


Pool = Literal["last", "mean"]
"""Pooling of the tokens of a word: the value of the last token, or the mean."""


def pieces_of(decode: Any, ids: Sequence[int], window: int = 16) -> list[str]:
    """Returns the text that each token adds. A character that spans several tokens is added by the last of them.

    Args:
        decode: function from ids to text, such as `decode` of a tokenizer.
        ids: token ids.
        window: number of preceding tokens to decode with each token, because its text depends on its neighbors.
    """
    pieces: list[str] = []
    for at in range(len(ids)):
        first = max(at - window, 0)
        before, here = (decode(list(ids[first:stop])).rstrip("\ufffd") for stop in (at, at + 1))
        pieces.append(here[len(before) :] if here.startswith(before) else "")
    return pieces


def token_words(pieces: Sequence[str], words: Sequence[str]) -> list[int]:
    """Returns the number of the word that each token is part of; -1 for a token outside of words, such as a comma.

    Args:
        pieces: text of each token.
        words: words in the order of the text, which has only spaces and punctuation between them.

    Raises:
        InterpError: a word does not follow the previous one in the text, or no token is left for it.
    """
    text, spans, at = "".join(pieces), [], 0
    for number, word in enumerate(words):
        start = text.find(word, at) if word.strip() else -1
        if start < 0 or any(letter.isalnum() for letter in text[at:start]):
            raise InterpError(f"word {number} {word!r} is not what the text goes on with: {text[at : at + 40]!r}")
        at = start + len(word)
        spans.append((start, at))
    found, at, word = [], 0, 0
    for piece in pieces:
        stop = at + len(piece)
        while word < len(spans) and spans[word][1] <= at:
            word += 1
        last = word
        while last + 1 < len(spans) and spans[last + 1][0] < stop:
            last += 1
        inside = word < len(spans) and spans[last][0] < stop and at < spans[last][1]
        found.append(last if inside else -1)
        at = stop
    if missing := sorted(set(range(len(words))) - set(found)):
        raise InterpError(f"word {missing[0]} {words[missing[0]]!r} shares its only token with the next one; join the two")
    return found


class Window(NamedTuple):
    """Tokens `start` to `stop - 1` of one forward. Values from `first` on are kept; the tokens before are context."""

    start: int
    stop: int
    first: int


def windows_of(count: int, size: int) -> Iterator[Window]:
    """Yields windows of `size` tokens that overlap by half, so that each token after the first window has at least size / 2
    tokens of context."""
    step = max(size // 2, 1)
    yield Window(0, min(size, count), 0)
    for first in range(size, count, step):
        stop = min(first + step, count)
        yield Window(max(stop - size, 0), stop, first)


@torch.no_grad()
def word_features(
    model: nn.Module, ids: Sequence[int], owners: Sequence[int], count: int, names: Sequence[str], size: int, pool: Pool = "last"
) -> dict[str, Tensor]:
    """Returns (words, width) fp32 inner values of a long text by name; heads are concatenated.

    Args:
        model: model to run.
        ids: tokens of the text.
        owners: word of each token, from `token_words`.
        count: number of words.
        names: inner values, see `choose`.
        size: number of tokens of a forward, see `windows_of`.
        pool: pooling of the tokens of a word.
    """
    device, sums = next(model.parameters()).device, dict[str, Tensor]()
    tokens, owner = torch.tensor(list(ids)), torch.tensor(list(owners))
    if pool == "last":  # keeps only the last token of each word
        last = {number: at for at, number in enumerate(owners)}
        owner = torch.tensor([number if last[number] == at else -1 for at, number in enumerate(owners)])
    seen_of = torch.bincount(owner[owner >= 0], minlength=count)
    with evaluating(model), capture(model, names, device="cpu") as seen:
        for window in windows_of(len(tokens), size):
            model(tokens[None, window.start : window.stop].to(device))
            place = owner[window.first : window.stop]
            kept = place >= 0
            for name, value in seen.items():
                rows = value[0, window.first - window.start :].flatten(1).float()
                sums.setdefault(name, torch.zeros(count, rows.shape[1])).index_add_(0, place[kept], rows[kept])
            seen.clear()
    return {name: total / seen_of[:, None] for name, total in sums.items()}


def binned(values: Tensor, onsets: Tensor, times: Tensor) -> Tensor:
    """Returns (samples, width): the mean of the words (words, width) that begin during each sample, or zeros if there are none.

    Args:
        values: (words, width) values.
        onsets: (words,) start of each word in seconds.
        times: (samples,) start of each sample in seconds; the last sample has the median duration.

    Raises:
        InterpError: the times do not increase, or a word lies outside of them.
    """
    check_times(onsets, times)
    place = torch.searchsorted(times, onsets, right=True) - 1
    total = values.new_zeros(len(times), values.shape[1]).index_add_(0, place, values)
    return total / torch.bincount(place, minlength=len(times)).clamp(min=1)[:, None]


def check_times(onsets: Tensor, times: Tensor) -> None:
    """Checks the arguments of `binned`; raises `InterpError` if they are invalid."""
    if len(times) < 2 or not bool((times.diff() > 0).all()):
        raise InterpError("times of a recording must increase from sample to sample")
    end = float(times[-1] + times.diff().median())
    outside = (onsets < times[0]) | (onsets >= end)
    if bool(outside.any()):
        number = int(outside.nonzero()[0])
        raise InterpError(
            f"word {number} begins at {float(onsets[number]):g} s, and the recording goes from {float(times[0]):g} to {end:g} s; "
            "cut the words, or shift their onsets"
        )
