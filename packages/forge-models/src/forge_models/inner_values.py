"""`tap`, through which blocks pass inner values, and its listeners. `forge_interp.tap_names` has the names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Listener = Callable[[str, Tensor], Tensor | None]
"""Function that is called with a full name and a value; returns a replacement, or None to keep the value."""

_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())
_scope: ContextVar[tuple[str, object] | None] = ContextVar("scope", default=None)


def tap(name: str, x: Tensor) -> Tensor:
    """Passes `x` to the listeners and returns it or its replacement. Compiled graphs contain no taps: see `listening`."""
    if torch.compiler.is_compiling():
        return x
    listeners = _listeners.get()
    if not listeners or (place := _scope.get()) is None:
        return x
    for listener in listeners:
        replacement = listener(place[0] + name, x)
        x = x if replacement is None else replacement
    return x


def tap_alike(name: str, x: Tensor, tokens: torch.Size) -> Tensor:
    """Taps a value that all tokens (B, T) share: listeners receive it expanded to (B, T, ...), and can replace it for some
    tokens. Returns `x` without a listener."""
    if torch.compiler.is_compiling() or not _listeners.get():
        return x
    return tap(name, x.expand(*tokens, *x.shape))


def show(name: str, make: Callable[[], Tensor]) -> None:
    """Taps a value that is computed for listeners only; replacements have no effect."""
    if not torch.compiler.is_compiling() and _listeners.get():
        tap(name, make())


@contextmanager
def scope(path: str, model: object) -> Iterator[None]:
    """Context in which names of taps begin with `path` and belong to `model`. Recomputation in a backward runs outside any scope,
    so its values are not tapped twice."""
    if torch.compiler.is_compiling() or not _listeners.get():
        yield
        return
    token = _scope.set((path, model))
    try:
        yield
    finally:
        _scope.reset(token)


def inside(part: str, module: Callable[..., T], *given: Any) -> T:
    """Calls a module in a scope whose path is extended by `part`, for blocks with several modules of one kind, whose taps would
    otherwise have the same names. Returns the module's result."""
    if torch.compiler.is_compiling() or not _listeners.get() or (place := _scope.get()) is None:
        return module(*given)
    token = _scope.set((f"{place[0]}{part}", place[1]))
    try:
        return module(*given)
    finally:
        _scope.reset(token)


@contextmanager
def listening(listener: Listener, alone: bool = False) -> Iterator[None]:
    """Context in which every tapped value of a forward is passed to `listener`. Compiled blocks run eagerly inside.

    Contexts nest: the outer listener receives a value first, and the inner one receives its replacement. Inside a context with
    `alone`, outer listeners receive nothing.
    """
    token = _listeners.set((listener,) if alone else (*_listeners.get(), listener))
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _listeners.reset(token)


def is_from(model: object) -> bool:
    """Whether the value passed to a listener belongs to `model`; other models may run inside the context."""
    place = _scope.get()
    return place is not None and place[1] is model


def is_listening(listener: Listener) -> bool:
    """Whether `listener` is active in this thread; forwards of other threads are not passed to it."""
    return any(one is listener for one in _listeners.get())
