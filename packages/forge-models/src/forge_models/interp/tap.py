"""Names for the inner values of a model, and the one function through which blocks pass them.

Names: `blocks.3.residual` (input of the block), `blocks.3.attention.q` and `.k` (after norm and rotation, (B, heads, T,
head_dim)), `blocks.3.attention.output` and `blocks.3.mlp.pre_activation`, with experts `blocks.3.router.logits` (N, experts);
`residual` is the stream after the last block.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Listener = Callable[[str, Tensor], Tensor | None]
"""Called with a full name and a value; returns a replacement, or None to leave the value as it is."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_scope: ContextVar[str | None] = ContextVar("scope", default=None)


def tap(name: str, x: Tensor) -> Tensor:
    """`x` itself without a listener. A compiled graph never holds a tap: see `listening`."""
    if torch.compiler.is_compiling():
        return x
    listener, scope = _listener.get(), _scope.get()
    if listener is None or scope is None:
        return x
    replacement = listener(scope + name, x)
    return x if replacement is None else replacement


@contextmanager
def scope(path: str) -> Iterator[None]:
    """Names inside begin with `path`. Recomputation in a backward runs outside of any scope and is not heard twice."""
    if torch.compiler.is_compiling() or _listener.get() is None:
        yield
        return
    token = _scope.set(path)
    try:
        yield
    finally:
        _scope.reset(token)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Passes every tapped value of the forwards inside to `listener`. Compiled blocks run eagerly meanwhile."""
    token = _listener.set(listener)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _listener.reset(token)
