"""Changes inner values in the forwards of a context."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forge_interp.captures import RunningForward, listening_to, refuse_recomputation, select_taps
from forge_interp.selection import ForwardInputs, Positions, Selection
from forge_interp.tap_names import InterpError, TapInfo, as_passed, by_token

Edit = Callable[[str, Tensor, Tensor], Tensor]
"""(name, value (B, T, ...), selected tokens (B, T) bool) -> new value, of which only the selected tokens are used."""


@dataclass(frozen=True)
class AcrossRows:
    """An edit whose result depends on the other rows of the batch. Ranks with different rows gather them for it.

    Attributes:
        how: the edit.
    """

    how: Edit

    def __call__(self, name: str, x: Tensor, tokens: Tensor) -> Tensor:
        """Applies the edit; see `Edit`."""
        return self.how(name, x, tokens)


def zero() -> Edit:
    """Replaces values with zeros."""
    return lambda name, x, _: torch.zeros_like(_numbers(name, x))


def mean(values: Mapping[str, Tensor] | Tensor | None = None) -> Edit:
    """Replaces values with a mean: the given one (of one token's shape, or by name), or that of all selected tokens."""

    if values is not None:
        return lambda name, x, _: _given(name, values, x)
    return AcrossRows(lambda name, x, tokens: _numbers(name, x)[tokens].mean(0).expand_as(x))


def patch(source: Mapping[str, Tensor] | Tensor) -> Edit:
    """Replaces values with those of another run, such as `Captured`: (B, T, ...), or expandable to it, such as (1, T, ...)."""
    return AcrossRows(lambda name, x, _: _given(name, source, x))


def add(vector: Tensor, scale: float = 1.0) -> Edit:
    """Adds scale * vector; the vector has the shape of one token (steering: Turner et al., 2023)."""
    return lambda name, x, _: x + _given(name, vector, x) * scale


def project_out(directions: Tensor) -> Edit:
    """Removes the component in the span of directions (d,) or (k, d): x - x Q Q^T, where Q is an orthonormal basis.

    Raises:
        InterpError: the width of the directions differs from that of the value, or all directions are zero.
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
    """Context that edits inner values in every forward of `model`: in training, evaluation and generation. Selection works as in
    `capture`. An edit inside another one receives the result of the outer one; the model itself does not change.

    Args:
        how: result of `zero`, `mean`, `patch`, `add`, `project_out` or `replace`, or a function with the same signature.

    Raises:
        InterpError: the selection is invalid (raised before any forward), or `positions` is `mean`, which cannot be edited.
    """
    infos = select_taps(model, names, layers, heads)
    refuse_uneditable(infos, positions)
    selection, state = Selection(positions, documents, words), RunningForward()

    def note(forward: ForwardInputs | None) -> None:
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
    """Checks that the selected values can be edited; raises `InterpError` otherwise."""
    if positions == "mean":
        raise InterpError("positions 'mean' can be captured, not edited; use how = mean()")
    if shown := [name for name, one in infos.items() if not one.editable]:
        raise InterpError(f"{shown[0]} can be captured, not edited: nothing follows from it; edit router.logits")


def changed(name: str, value: Tensor, mask: Tensor, how: Edit, heads: Sequence[int] | None) -> Tensor:
    """Returns a value (B, T, ...), edited at the tokens of the mask (B, T) and in the given heads.

    Raises:
        InterpError: the result of the edit does not fit the value.
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
