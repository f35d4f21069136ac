"""Reads inner values in the forwards of a context."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from forge_interp.selection import ForwardInputs, Picked, Positions, Selection, watched
from forge_interp.tap_names import InterpError, TapInfo, as_passed, by_token, choose, taps
from forge_models.inner_values import is_from, is_listening, listening


class Captured(Mapping[str, Tensor]):
    """Captured values by path or alias: `captured[name]` is from the latest forward; `each(name)` has all forwards.

    A value is (B, n, ...) for n positions of each row, with heads as dimension 2; the mean of positions has n = 1. If rows have
    different numbers of tokens, the value is (n, ...), row by row.

    Attributes:
        infos: inner values by name.
        tokens: for each forward (n, 2) int64: row of the batch and index in the row of each captured token.
    """

    def __init__(self, infos: Mapping[str, TapInfo]) -> None:
        self.infos = dict(infos)
        self.tokens: list[Tensor] = []
        self._values: dict[str, list[Tensor]] = {name: [] for name in infos}
        self._aliases = {one.alias: name for name, one in infos.items() if one.alias}

    def __getitem__(self, name: str) -> Tensor:
        found = self.each(name)
        if not found:
            raise InterpError(
                f"{name} was not passed: no forward ran inside of the context, it made a loss and no logits, or it had no images"
            )
        return found[-1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def each(self, name: str) -> list[Tensor]:
        """Returns the values of all forwards, the oldest first.

        Raises:
            InterpError: the name was not captured.
        """
        path = self._aliases.get(name, name)
        if path not in self._values:
            raise InterpError(f"{name} was not captured; captured: {', '.join(self._values)}")
        return self._values[path]

    def clear(self) -> None:
        """Forgets all values, so that memory stays bounded over many forwards."""
        self.tokens.clear()
        for values in self._values.values():
            values.clear()


@contextmanager
def capture(
    model: nn.Module,
    names: str | Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    positions: Positions = "all",
    documents: Sequence[int] | None = None,
    words: Tensor | None = None,
    every: int = 1,
    keep: Literal["copy", "graph"] = "copy",
    device: torch.device | str | None = None,
) -> Iterator[Captured]:
    """Context that reads inner values of every forward of `model`; the model computes the same bits. Contexts nest in any order.

    Args:
        model: a whole decoder, in training, evaluation or generation.
        names: paths, aliases or patterns, see `choose`.
        layers: numbers of blocks; negative ones count from the end; None = all.
        heads: numbers of heads; all selected values must then have heads. None = all.
        positions: positions to read, see `Positions`.
        documents: numbers of documents in the batch; None = all. Padding is never read.
        words: words for positions `last_of_word`, see `Selection`.
        every: reads each n-th forward, starting with the first.
        keep: `copy` has no gradient and never changes; `graph` is the value in the model's graph, with all tokens and heads, for
            `torch.autograd.grad`.
        device: device of the copies; None = the device of the model.

    Raises:
        InterpError: the selection is invalid; raised before any forward.
    """
    infos = select_taps(model, names, layers, heads)
    selection, captured, state = Selection(positions, documents, words), Captured(infos), RunningForward()
    chosen = None if heads is None else list(heads)
    if every < 1:
        raise InterpError(f"every {every} must be at least 1")
    if keep == "graph" and (chosen is not None or selection != Selection() or device is not None):
        raise InterpError("keep 'graph' is of all tokens and heads, where the model computes; choose among the gradients")

    def note(forward: ForwardInputs | None) -> None:
        if forward is not None and keep == "graph":
            refuse_recomputation(model)
        state.begin(selection, forward, reads=state.number % every == 0)
        if state.picked is not None:
            captured.tokens.append(state.picked.tokens())

    def hear(name: str, x: Tensor) -> Tensor | None:
        if name not in infos or not state.of_this(model, name):
            return None
        dims = infos[name].dims
        value = by_token(x, dims, state.rows)
        if keep == "graph":
            captured._values[name].append(value)
            return as_passed(value, dims)  # so that the graph continues from the kept value
        picked = state.of(name, value)
        if chosen is not None:
            value = value.index_select(2, torch.as_tensor(chosen, device=value.device))
        captured._values[name].append(_copy(picked.take(value), x, device))
        return None

    with listening_to(model, hear, note):
        yield captured


class RunningForward:
    """The current forward and its selected tokens."""

    def __init__(self) -> None:
        self.number = 0
        self.rows = 0
        self.reads = False
        self.running = False
        self.picked: Picked | None = None
        self._narrow: Picked | None = None

    def begin(self, selection: Selection, forward: ForwardInputs | None, reads: bool = True) -> None:
        """Begins a forward, or ends it if `forward` is None; raises `InterpError` if the forward lacks a selected token."""
        self.running, self.reads, self.picked, self._narrow = forward is not None, reads, None, None
        if forward is None:
            return
        self.number, self.rows = self.number + 1, len(forward.places)
        if reads:
            self.picked = selection.pick(forward)
            self._narrow = None if forward.at is None else _at(self.picked, forward)

    def of_this(self, model: nn.Module, name: str) -> bool:
        """Whether a value is from the model, in a forward that is read.

        Raises:
            InterpError: a part of the model was called instead of the whole model.
        """
        if is_from(model) and not self.running:
            raise InterpError(f"{name}: the model was not called as a whole, as generation with drafts does; generate without")
        return is_from(model) and self.reads

    def of(self, name: str, value: Tensor) -> Picked:
        """Returns the selected tokens of a value (B, T, ...)."""
        assert self.picked is not None
        if value.shape[1] == self.picked.mask.shape[1]:
            return self.picked
        if self._narrow is not None and value.shape[1] == 1:
            return self._narrow
        raise InterpError(
            f"{name} holds all {value.shape[1]} tokens of a cache, not the {self.picked.mask.shape[1]} of this forward; "
            "take attention.latent, or run without a cache"
        )


def _at(picked: Picked, forward: ForwardInputs) -> Picked:
    """Restricts `picked` to the one token of each row that has logits."""
    assert forward.at is not None
    mask = picked.mask.gather(1, forward.at.unsqueeze(1))
    return Picked(mask, torch.zeros_like(mask, dtype=torch.int64) if bool(mask.all()) else None, picked.mean)


def _copy(value: Tensor, source: Tensor, device: torch.device | str | None) -> Tensor:
    value = value.detach()
    if device is not None:
        value = value.to(device)
    shared = value.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return value.clone(memory_format=torch.contiguous_format) if shared else value.contiguous()


@contextmanager
def listening_to(
    model: nn.Module, hear: Callable[[str, Tensor], Tensor | None], note: Callable[[ForwardInputs | None], None]
) -> Iterator[None]:
    """Context in which `hear` receives inner values, and `note` the inputs of each forward of `model` and None after it; this
    thread only."""
    with listening(hear):
        handles = watched(model, note, lambda: is_listening(hear))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def select_taps(
    model: nn.Module, names: str | Sequence[str], layers: Sequence[int] | None, heads: Sequence[int] | None
) -> dict[str, TapInfo]:
    """Returns the selected inner values.

    Raises:
        InterpError: no inner value matches, or a matching value does not have these heads.
    """
    infos = choose(taps(model), names, layers)
    for one in infos.values() if heads is not None else ():
        if one.heads is None:
            raise InterpError(f"{one.name} has no heads; choose heads of attention.q, attention.heads and the like only")
        for head in heads or ():
            if not 0 <= head < one.heads:
                raise InterpError(f"head {head} of {one.name} does not exist: it has {one.heads}, from 0 to {one.heads - 1}")
    if heads is not None and not heads:
        raise InterpError("heads is empty; give one, or leave it out")
    return infos


def refuse_recomputation(model: nn.Module) -> None:
    """Checks that no block is recomputed: in the backward it would run without the edit, so gradients would be wrong.

    Raises:
        InterpError: gradients are enabled and the forward of a block is wrapped, as transforms.recompute does.
    """
    wrapped = next((name for name, module in model.named_modules() if "forward" in vars(module)), None)
    if wrapped is not None and torch.is_grad_enabled():
        raise InterpError(
            f"{wrapped or 'the model'} has a wrapped forward, as transforms.recompute and compile make one: what runs again in "
            "the backward is not edited; use torch.no_grad(), or a model without these transforms"
        )
