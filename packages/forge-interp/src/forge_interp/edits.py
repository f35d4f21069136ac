"""Changes inner values in the forwards of a context."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forge_interp.captures import RunningForward, listening_to, refuse_recomputation, select_taps
from forge_interp.selection import Forward, Positions, Selection
from forge_interp.tap_names import InterpError, TapInfo, as_passed, by_token

Edit = Callable[[str, Tensor, Tensor], Tensor]
"""(name, value (B, T, ...), tokens (B, T) bool that are meant) -> what takes its place; of other tokens it is not used."""


@dataclass(frozen=True)
class AcrossRows:
    """An edit whose result depends on the other rows of the batch. Ranks that have different rows bring them together for it.

    Attributes:
        how: the edit.
    """

    how: Edit

    def __call__(self, name: str, x: Tensor, tokens: Tensor) -> Tensor:
        """As an `Edit`."""
        return self.how(name, x, tokens)


def zero() -> Edit:
    """Replaces values with zeros."""
    return lambda name, x, _: torch.zeros_like(_numbers(name, x))


def mean(values: Mapping[str, Tensor] | Tensor | None = None) -> Edit:
    """A mean: given (one token's, or by name), or by default that of the tokens that are meant, over rows and positions."""

    if values is not None:
        return lambda name, x, _: _given(name, values, x)
    return AcrossRows(lambda name, x, tokens: _numbers(name, x)[tokens].mean(0).expand_as(x))


def patch(source: Mapping[str, Tensor] | Tensor) -> Edit:
    """The values of another run, such as `Captured`: (B, T, ...), or one that can be expanded to it, such as (1, T, ...)."""
    return AcrossRows(lambda name, x, _: _given(name, source, x))


def add(vector: Tensor, scale: float = 1.0) -> Edit:
    """Adds scale * vector, of one token's shape (steering: Turner et al., 2023)."""
    return lambda name, x, _: x + _given(name, vector, x) * scale


def project_out(directions: Tensor) -> Edit:
    """Removes the component in the span of directions (d,) or (k, d): x - x Q Q^T, Q an orthonormal basis.

    Raises:
        InterpError: the directions do not have the width of the value, or hold no direction.
    """
    basis = torch.atleast_2d(directions).double()
    _, sizes, right = torch.linalg.svd(basis, full_matrices=False)
    kept = right[sizes > sizes.max() * (torch.finfo(directions.dtype).eps * max(basis.shape))]
    if not len(kept) or not bool(sizes.max() > 0):
        raise InterpError("project_out: all directions are zero")

    def put(name: str, x: Tensor, _: Tensor) -> Tensor:
        if _numbers(name, x).shape[-1] != kept.shape[1]:
            raise InterpError(f"project_out: directions of width {kept.shape[1]} do not fit {name}, of width {x.shape[-1]}")
        wide = kept.to(x.device, torch.promote_types(x.dtype, torch.float32))
        return x - ((x.to(wide.dtype) @ wide.T) @ wide).to(x.dtype)

    return put


def replace(function: Callable[[Tensor], Tensor]) -> Edit:
    """Replaces values with the result of a function, such as the reconstruction of a sparse autoencoder."""
    return lambda _, x, __: function(x)


@contextmanager
def edit(
    model: nn.Module,
    names: str | Sequence[str],
    how: Edit,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    positions: Positions = "all",
    documents: Sequence[int] | None = None,
    words: Tensor | None = None,
) -> Iterator[None]:
    """Changes inner values in every forward of `model` inside: in training, evaluation and generation. Selections are those of
    `capture`. An edit inside another one works on what the outer one made; afterwards the model is as before.

    Args:
        how: one of `zero`, `mean`, `patch`, `add`, `project_out`, `replace`, or a function like theirs.

    Raises:
        InterpError: before a forward, what cannot be selected; or the mean of positions, which is one place that is not there.
    """
    infos = select_taps(model, names, layers, heads)
    refuse_uneditable(infos, positions)
    selection, state = Selection(positions, documents, words), RunningForward()

    def note(forward: Forward | None) -> None:
        if forward is not None:
            refuse_recomputation(model)
        state.begin(selection, forward)

    def hear(name: str, x: Tensor) -> Tensor | None:
        if name not in infos or not state.of_this(model, name):
            return None
        dims = infos[name].dims
        value = by_token(x, dims, state.rows)
        mask = state.of(name, value).mask
        if not bool(mask.any()):
            return None
        return as_passed(changed(name, value, mask, how, heads), dims)

    with listening_to(model, hear, note):
        yield


def refuse_uneditable(infos: Mapping[str, TapInfo], positions: object) -> None:
    """Raises `InterpError` for what can be captured only."""
    if positions == "mean":
        raise InterpError("positions 'mean' can be captured, not edited; use how = mean()")
    if shown := [name for name, one in infos.items() if not one.editable]:
        raise InterpError(f"{shown[0]} can be captured, not edited: nothing follows from it; edit router.logits")


def changed(name: str, value: Tensor, mask: Tensor, how: Edit, heads: Sequence[int] | None) -> Tensor:
    """(B, T, ...) of a value (B, T, ...), edited where the mask (B, T) says so, in these heads.

    Raises:
        InterpError: what the edit makes does not fit.
    """
    chosen = None if heads is None else list(heads)
    part = value if chosen is None else value[:, :, chosen]
    made = how(name, part, mask)
    if made.shape != part.shape or made.is_floating_point() != part.is_floating_point():
        raise InterpError(f"{name}: the edit made {tuple(made.shape)} {made.dtype} of {tuple(part.shape)} {part.dtype}")
    made = torch.where(mask.reshape(*mask.shape, *[1] * (part.dim() - 2)), made.to(part.dtype), part)
    if chosen is None:
        return made
    return value.index_copy(2, torch.as_tensor(chosen, device=value.device), made)


def _numbers(name: str, x: Tensor) -> Tensor:
    if not x.is_floating_point():
        raise InterpError(f"{name} holds integers; use replace with a function that makes integers of them")
    return x


def _given(name: str, given: Mapping[str, Tensor] | Tensor, x: Tensor) -> Tensor:
    value = given if isinstance(given, Tensor) else given[name]
    try:
        return value.to(x.device, x.dtype).expand_as(_numbers(name, x))
    except RuntimeError:
        raise InterpError(f"{name}: a value of shape {tuple(value.shape)} cannot take the place of {tuple(x.shape)}") from None
