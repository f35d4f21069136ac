"""Selects tokens of a forward: all, the last, their mean, a list, the last of each word, or those of some documents."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from forge_core.batch import PADDING
from forge_interp.tap_names import InterpError

Positions = Literal["all", "last", "mean", "last_of_word"] | int | Sequence[int] | slice
"""`last`: the last token of a row that is not padding. `mean`: the mean over tokens, a single position. Integers count from 0,
negative ones from the end of the row; in generation they are positions in the whole text. Padding is left out; it is known from
the documents or the mask of a forward, and in generation from the lengths of the prompts and the rows that have stopped."""


def mask_argument(tokens: Tensor, token_mask: Tensor | None) -> dict[str, Tensor]:
    """Returns the keyword argument with which a model leaves out padding; none without a mask.

    Raises:
        InterpError: the mask is not (B, T) bool, as the tokens are (B, T).
    """
    if token_mask is None:
        return {}
    if token_mask.shape != tokens.shape or token_mask.dtype != torch.bool:
        raise InterpError(
            f"token_mask {tuple(token_mask.shape)} {token_mask.dtype} does not fit tokens {tuple(tokens.shape)}; give one bool "
            "for each token, False for padding"
        )
    return {"token_mask": token_mask.to(tokens.device)}


class ForwardInputs(NamedTuple):
    """Facts about a forward that are available before it begins.

    Attributes:
        places: (B, T) int64 position of each token in its row.
        documents: (B, T) document of each token; None = each row is one document.
        at: (B,) index of the only token of each row that has logits; None = all tokens have logits.
        cached: whether earlier tokens are in a cache.
        lengths: (B,) number of tokens of each row, including those in the cache; later tokens are padding. None = no row is
            padded, or padding is known from `documents` or `token_mask`.
        token_mask: (B, T) bool, False for padding, as in `Batch.token_mask`. None = no row is padded, or padding is known from
            `documents` or `lengths`.
    """

    places: Tensor
    documents: Tensor | None
    at: Tensor | None
    cached: bool
    lengths: Tensor | None = None
    token_mask: Tensor | None = None

    @classmethod
    def of(cls, args: tuple[Any, ...], given: Mapping[str, Any]) -> "ForwardInputs":
        """Builds the facts from the arguments of a decoder's call."""
        x: Tensor = args[0] if args else given["x"]
        cache, positions = given.get("cache"), given.get("positions")
        places = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        if cache is not None:
            places = places + cache.extent if positions is None else positions.to(torch.int64).expand(x.shape[0], -1)
        known = None if cache is None else cache.lengths
        lengths = None if known is None else torch.tensor(known, device=x.device)
        return cls(places, given.get("documents"), given.get("at"), cache is not None, lengths, given.get("token_mask"))

    def real(self) -> Tensor:
        """Returns the (B, T) bool mask of tokens that are not padding."""
        mask = torch.ones_like(self.places, dtype=torch.bool)
        if self.documents is not None:
            mask = self.documents != PADDING
        if self.token_mask is not None:
            mask = mask & self.token_mask
        return mask if self.lengths is None else mask & (self.places < self.lengths[:, None])

    def narrowed(self) -> "ForwardInputs":
        """Returns the facts about the one token of each row that has logits."""
        assert self.at is not None
        column = self.at.unsqueeze(1)
        documents = None if self.documents is None else self.documents.gather(1, column)
        token_mask = None if self.token_mask is None else self.token_mask.gather(1, column)
        return ForwardInputs(self.places.gather(1, column), documents, None, self.cached, self.lengths, token_mask)


class Picked(NamedTuple):
    """The selected tokens of one forward.

    Attributes:
        mask: (B, T) bool mask of the selected tokens.
        columns: (B, n) int64 indices in the requested order; None if rows have different numbers of tokens.
        mean: whether to take the mean over the tokens instead of each token.
    """

    mask: Tensor
    columns: Tensor | None
    mean: bool

    def take(self, x: Tensor) -> Tensor:
        """Selects from (B, T, ...): (B, n, ...), the mean (B, 1, ...), or (n, ...) if rows have different numbers of tokens."""
        if self.mean:
            weight = self.mask.reshape(*self.mask.shape, *[1] * (x.dim() - 2))
            wide = x.to(torch.promote_types(x.dtype, torch.float32)).masked_fill(~weight, 0)
            return (wide.sum(1, keepdim=True) / weight.sum(1, keepdim=True)).to(x.dtype)
        if self.columns is None:
            return x[self.mask]
        index = self.columns.reshape(*self.columns.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])
        return x.gather(1, index)

    def tokens(self) -> Tensor:
        """Returns (n, 2) int64: row of the batch and index in the row of each token, in the order of `take`, row by row."""
        if self.columns is None or self.mean:
            return self.mask.nonzero()
        rows = torch.arange(len(self.columns), device=self.columns.device).repeat_interleave(self.columns.shape[1])
        return torch.stack((rows, self.columns.flatten()), 1)


@dataclass(frozen=True)
class Selection:
    """Selection of tokens of a forward.

    Attributes:
        positions: see `Positions`.
        documents: numbers of documents, as in the argument of the forward; None = all, without padding.
        words: (B, T) integers, equal for the tokens of one word, negative for a token outside of words; for `last_of_word`.

    Raises:
        InterpError: `words` and `positions` contradict each other, or a list is empty.
    """

    positions: Positions = "all"
    documents: Sequence[int] | None = None
    words: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.positions == "last_of_word") != (self.words is not None):
            raise InterpError("words go with positions 'last_of_word', and it needs them: (B, T) integers, equal within a word")
        if isinstance(self.positions, str) and self.positions not in ("all", "last", "mean", "last_of_word"):
            raise InterpError(f"positions {self.positions!r}: all, last, mean, last_of_word, or integers")
        if isinstance(self.positions, Sequence) and not self.positions:
            raise InterpError("positions is an empty list; give one, or 'all'")

    def pick(self, forward: ForwardInputs) -> Picked:
        """Returns the selected tokens of one forward.

        Raises:
            InterpError: a position is beyond the row, a document does not exist, `words` has another shape, or no token is
                selected.
        """
        allowed = forward.real() & self._documents(forward)
        positions = [self.positions] if isinstance(self.positions, int) else self.positions
        if positions == "last_of_word":
            mask = allowed & self._word_ends(forward)
        elif positions == "last" and forward.at is not None:  # prompts of unequal length: their ends are known
            mask = torch.zeros_like(allowed).scatter_(1, forward.at.unsqueeze(1), True)
        elif positions == "last":
            mask = _last(allowed)
        elif isinstance(positions, slice):
            mask = allowed & self._sliced(forward, positions)
        elif isinstance(positions, str):
            mask = allowed
        else:
            return self._listed(forward, positions, allowed)
        if not forward.cached and not bool(mask.any(1).all() if positions in ("mean", "last") else mask.any()):
            raise InterpError(f"positions {self.positions!r}: a row has no token that is meant; see documents and words")
        unpadded = forward.documents is None and forward.lengths is None and forward.token_mask is None
        whole = positions in ("all", "mean") and self.documents is None and (unpadded or bool(mask.all()))
        if whole or (positions == "last" and bool(mask.any(1).all())):
            return Picked(mask, mask.nonzero()[:, 1].view(len(mask), -1), positions == "mean")
        return Picked(mask, None, positions == "mean")

    def _documents(self, forward: ForwardInputs) -> Tensor:
        if self.documents is None:
            return torch.ones_like(forward.places, dtype=torch.bool)
        if forward.documents is None:
            raise InterpError("documents are chosen, but this forward has none; pass documents to the model, or leave them out")
        wanted = torch.as_tensor(list(self.documents), device=forward.documents.device)
        found = torch.isin(forward.documents, wanted.to(forward.documents.dtype))
        if missing := [number for number in self.documents if not bool((forward.documents == number).any())]:
            raise InterpError(f"documents {missing} are not in this batch")
        return found

    def _word_ends(self, forward: ForwardInputs) -> Tensor:
        words = self.words
        assert words is not None
        if words.shape != forward.places.shape:
            raise InterpError(f"words {tuple(words.shape)} do not fit the tokens {tuple(forward.places.shape)} of this forward")
        words = words.to(forward.places.device)
        ends = torch.ones_like(words, dtype=torch.bool)
        ends[:, :-1] = words[:, 1:] != words[:, :-1]
        if forward.documents is not None:  # a word ends with its document
            ends[:, :-1] |= forward.documents[:, 1:] != forward.documents[:, :-1]
        if forward.token_mask is not None:  # and before padding
            ends[:, :-1] |= ~forward.token_mask[:, 1:]
        return ends & (words >= 0)

    def _sliced(self, forward: ForwardInputs, positions: slice) -> Tensor:
        start, stop, step = positions.start or 0, positions.stop, positions.step or 1
        if start < 0 or step < 1 or (stop is not None and stop <= start):
            raise InterpError(f"positions {positions}: a slice begins at 0 or later, ends behind its start and goes forward")
        places = forward.places
        if not forward.cached and start >= places.shape[1]:
            raise InterpError(f"positions {positions} begin behind the {places.shape[1]} tokens of a row")
        return (places >= start) & ((places - start) % step == 0) & (places < (stop if stop is not None else 2**62))

    def _listed(self, forward: ForwardInputs, positions: Sequence[int], allowed: Tensor) -> Picked:
        length = forward.places.shape[1]
        if forward.cached:
            if negative := [place for place in positions if place < 0]:
                raise InterpError(f"position {negative[0]}: in generation the end is not known; count from 0, or use 'last'")
            mask = allowed & torch.isin(forward.places, torch.as_tensor(list(positions), device=allowed.device))
            return Picked(mask, None, False)
        for place in positions:
            if not -length <= place < length:
                raise InterpError(f"position {place} is beyond the {length} tokens of a row")
        columns = torch.as_tensor([place % length for place in positions], device=allowed.device)
        mask = torch.zeros_like(allowed)
        mask[:, columns] = True
        if not bool(allowed[:, columns].all()):
            mask &= allowed
            if not bool(mask.any()):
                raise InterpError(f"positions {list(positions)} are padding, or outside of the documents, in every row")
            return Picked(mask, None, False)
        return Picked(mask, columns.expand(len(allowed), -1), False)


def _last(allowed: Tensor) -> Tensor:
    """Returns the last True of each row."""
    behind = allowed.flip(1).cumsum(1).flip(1)
    return allowed & (behind == 1)


def watched(model: nn.Module, note: Callable[[ForwardInputs | None], None], active: Callable[[], bool]) -> list[Any]:
    """Registers hooks that call `note` with the `ForwardInputs` of every call of the model while `active()`, and with None after
    it.

    Returns the handles of the hooks.
    """

    def before(_module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        if active():
            note(ForwardInputs.of(args, given))

    def behind(*_: Any) -> None:
        if active():
            note(None)

    return [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(behind, always_call=True),
    ]
