"""`tap`, through which blocks pass inner values, and who listens to it. `forge_interp.tap_names` has the names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Listener = Callable[[str, Tensor], Tensor | None]
"""Called with a full name and a value; returns a replacement, or None to leave the value as it is."""

_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())
_scope: ContextVar[tuple[str, object] | None] = ContextVar("scope", default=None)


def tap(name: str, x: Tensor) -> Tensor:
    """`x` itself without a listener. A compiled graph never holds a tap: see `listening`."""
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
    """A value that all tokens (B, T) share: listeners hear it for each, (B, T, ...), and so may change it for some. `x` itself
    without a listener."""
    if torch.compiler.is_compiling() or not _listeners.get():
        return x
    return tap(name, x.expand(*tokens, *x.shape))


def show(name: str, make: Callable[[], Tensor]) -> None:
    """What nothing follows from, and is made for listeners only."""
    if not torch.compiler.is_compiling() and _listeners.get():
        tap(name, make())


@contextmanager
def scope(path: str, model: object) -> Iterator[None]:
    """Names inside begin with `path` and are of `model`. Recomputation in a backward runs outside of any scope: it is not heard
    twice."""
    if torch.compiler.is_compiling() or not _listeners.get():
        yield
        return
    token = _scope.set((path, model))
    try:
        yield
    finally:
        _scope.reset(token)


def inside(part: str, module: Callable[..., T], *given: Any) -> T:
    """What a module makes; the names of what it passes have `part` behind what the scope around it says. For blocks with several
    modules of one kind, whose values would have one name."""
    if torch.compiler.is_compiling() or not _listeners.get() or (place := _scope.get()) is None:
        return module(*given)
    token = _scope.set((f"{place[0]}{part}", place[1]))
    try:
        return module(*given)
    finally:
        _scope.reset(token)


@contextmanager
def listening(listener: Listener, alone: bool = False) -> Iterator[None]:
    """Passes every tapped value of the forwards inside to `listener`. Compiled blocks run eagerly meanwhile.

    Contexts nest: the outer listener hears a value first, and the inner one hears what the outer one made of it. Outer listeners
    do not hear what runs inside of one that is `alone`.
    """
    token = _listeners.set((listener,) if alone else (*_listeners.get(), listener))
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _listeners.reset(token)


def is_from(model: object) -> bool:
    """Whether the value that a listener is given is one of `model`: others may run inside of a context."""
    place = _scope.get()
    return place is not None and place[1] is model


def is_listening(listener: Listener) -> bool:
    """Whether `listener` listens in this thread: a forward of another one is none of its business."""
    return any(one is listener for one in _listeners.get())
