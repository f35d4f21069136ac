"""From tokens to words, and from words to the times of a recording."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from forge_models.generation.generate import evaluating
from forge_models.interp.capture import capture
from forge_models.interp.listing import InterpError

Pool = Literal["last", "mean"]
"""What a word has of its tokens: the last one's value, or their mean."""


def pieces_of(decode: Any, ids: Sequence[int], window: int = 16) -> list[str]:
    """What each token adds to the text. Tokens that end within a character add it where it is complete.

    Args:
        decode: ids -> text, as of a tokenizer.
        window: tokens before that are decoded with it: the text of a token depends on its neighbors.
    """
    pieces: list[str] = []
    for at in range(len(ids)):
        first = max(at - window, 0)
        before, here = (decode(list(ids[first:stop])).rstrip("\ufffd") for stop in (at, at + 1))
        pieces.append(here[len(before) :] if here.startswith(before) else "")
    return pieces


def token_words(pieces: Sequence[str], words: Sequence[str]) -> list[int]:
    """For each token the number of the word that it is a part of, -1 for one outside of words, such as a comma.

    Args:
        pieces: text of each token.
        words: in the order of the text; between two of them it has spaces and punctuation only.

    Raises:
        InterpError: a word is not in the text behind the one before it, or no token is left for it.
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
    """Tokens start to stop - 1 run together; those from `first` on are kept: the ones before are their context."""

    start: int
    stop: int
    first: int


def windows_of(count: int, size: int) -> Iterator[Window]:
    """Windows of `size` tokens that overlap by half: each token but those of the first window has size / 2 before it."""
    step = max(size // 2, 1)
    yield Window(0, min(size, count), 0)
    for first in range(size, count, step):
        stop = min(first + step, count)
        yield Window(max(stop - size, 0), stop, first)


@torch.no_grad()
def word_features(
    model: nn.Module, ids: Sequence[int], owners: Sequence[int], count: int, names: Sequence[str], size: int, pool: Pool = "last"
) -> dict[str, Tensor]:
    """By name (words, width) fp32: inner values of a long text, heads one after another.

    Args:
        ids: tokens of the text.
        owners: of `token_words`.
        count: number of words.
        names: inner values, see `choose`.
        size: tokens of a forward, see `windows_of`.
    """
    device, sums = next(model.parameters()).device, dict[str, Tensor]()
    tokens, owner = torch.tensor(list(ids)), torch.tensor(list(owners))
    if pool == "last":  # tokens of a word before its last one do not count
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
    """(samples, width): the mean of the words (words, width) that begin from a sample's time on and before the next one's; zeros
    where none does.

    Args:
        onsets: (words,) seconds.
        times: (samples,) seconds at which samples begin; the last one takes as long as the median one.

    Raises:
        InterpError: times that do not increase, or words outside of them.
    """
    check_times(onsets, times)
    place = torch.searchsorted(times, onsets, right=True) - 1
    total = values.new_zeros(len(times), values.shape[1]).index_add_(0, place, values)
    return total / torch.bincount(place, minlength=len(times)).clamp(min=1)[:, None]


def check_times(onsets: Tensor, times: Tensor) -> None:
    """Raises `InterpError` where `binned` would."""
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
