"""What a model passes through `tap`, found by running it without numbers, and names chosen by patterns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from forge_core.batch import MTPTargets
from forge_core.errors import ForgeError
from forge_core.protocols.model import LossTerms
from forge_models.generation.generate import evaluating
from forge_models.interp.names import alias_of, by_token, dims_by_token, inside, known, layer_of
from forge_models.interp.tap import listening, speaks


class InterpError(ForgeError):
    """A name, a selection or a value with which nothing can be captured or edited."""


def require_finite(what: str, x: Tensor) -> None:
    """Refuses values that are NaN or infinite: no measure of them means anything.

    Args:
        what: the noun for the message, in the plural, such as "activations".
        x: (rows, ...).

    Raises:
        InterpError: names how many there are, and the first row that has one.
    """
    finite = x.isfinite()
    if not bool(finite.all()):
        bad = (~finite).nonzero()
        raise InterpError(
            f"{what} hold {len(bad)} values that are NaN or infinite, the first in row {int(bad[0, 0])}; leave them out"
        )


@dataclass(frozen=True)
class TapInfo:
    """One inner value of a model.

    Attributes:
        name: its path.
        alias: its name in TransformerLens; empty where there is none.
        dims: its dimensions as a block passes it.
        shape: of one token, what is behind rows and positions.
        dtype: of its elements.
        editable: whether an edit changes what follows.
        partial: why it does not have a value for each token, and so cannot be selected; empty where it has.
    """

    name: str
    alias: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    editable: bool = True
    partial: str = ""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def heads(self) -> int | None:
        """Number of heads; None for a value that has none."""
        return self.shape[0] if {"heads", "kv_heads"} & set(dims_by_token(self.dims)) else None


def taps(model: nn.Module) -> dict[str, TapInfo]:
    """Every inner value of a decoder by name, in the order of a forward. Runs the model on the meta device: no memory, no time.

    Raises:
        InterpError: a part of a pipeline, or a model that is sharded.
    """
    _refuse_parts(model)
    shape: Any = model.shape
    found: dict[str, TapInfo] = {}

    def hear(name: str, x: Tensor) -> None:
        if not speaks(model):  # an encoder of images, whose tokens are others
            return
        entry = known(name)
        own = ("batch", "sequence", *("" for _ in x.shape[2:]))  # of a plugin's block
        dims = own if entry is None else entry.dims
        value = by_token(x, dims, 1)
        partial = ""
        if {"sequence", "tokens"}.isdisjoint(dims):
            partial = f"it is of {dims[2]}, not of tokens"
        elif value.shape[1] != tokens.shape[1]:
            partial = "it has the tokens of one modality; `modality` says which those are"
        editable = entry is None or entry.editable
        found[name] = TapInfo(name, alias_of(name), dims, tuple(value.shape[2:]), x.dtype, editable, partial)

    state = {
        name: torch.empty_like(value, device="meta") for name, value in chain(model.named_parameters(), model.named_buffers())
    }
    given = {name: value.to("meta") for name, value in getattr(model, "example_inputs", _tokens)().items()}
    tokens = given.pop("x")
    with evaluating(model), torch.no_grad(), _without_experts(model), listening(hear, alone=True):
        functional_call(model, state, (tokens,), given)
        if shape.mtp_depth:
            more = tokens.unsqueeze(2).expand(-1, -1, shape.mtp_depth)
            arguments: dict[str, Any] = {"labels": tokens, "objective": _no_loss, "mtp_targets": MTPTargets(more, more)}
            functional_call(model, state, (tokens,), given | arguments)
    return found


def choose(found: Mapping[str, TapInfo], names: str | Sequence[str], layers: Sequence[int] | None = None) -> dict[str, TapInfo]:
    """The inner values that patterns name, in the order of a forward.

    Args:
        found: those of the model.
        names: names, aliases, or patterns with `*`; with `layers` also what is behind `blocks.N.`, such as `attention.q`.
        layers: blocks, negative ones from the end; None = all.

    Raises:
        InterpError: a pattern matches nothing, with the nearest names, or nothing that each token has; a layer does not exist.
    """
    allowed = None if layers is None else _layers(found, layers)
    within = {name: one for name, one in found.items() if allowed is None or layer_of(name) in allowed}
    chosen = set()
    for pattern in [names] if isinstance(names, str) else names:
        matched = {
            name
            for name, one in within.items()
            if any(
                fnmatchcase(word, pattern) for word in (name, one.alias, *([inside(name)] if allowed is not None else [])) if word
            )
        }
        if (
            not matched
            and allowed is None
            and any(fnmatchcase(inside(name), pattern) for name in within if layer_of(name) is not None)
        ):
            raise InterpError(
                f"{pattern!r} is a name inside of a block; write 'blocks.*.{pattern}', or choose blocks with layers"
            )
        if not matched:
            raise InterpError(f"{pattern!r} matches no inner value of this model{_in(layers)}; {_near(pattern, within)}")
        of_tokens = {name for name in matched if not within[name].partial}
        if not of_tokens:
            name = min(matched)
            raise InterpError(f"{name} cannot be selected: {within[name].partial}")
        chosen |= of_tokens
    if not chosen:
        raise InterpError("names is empty; give one, such as 'blocks.*.residual'")
    return {name: one for name, one in within.items() if name in chosen}


def _layers(found: Mapping[str, TapInfo], layers: Sequence[int]) -> set[int]:
    count = 1 + max((layer for name in found if (layer := layer_of(name)) is not None), default=-1)
    for layer in layers:
        if not -count <= layer < count:
            raise InterpError(f"layer {layer} does not exist: this model has {count}, from 0 to {count - 1}")
    return {layer % count for layer in layers}


def _in(layers: Sequence[int] | None) -> str:
    return "" if layers is None else f" in layers {', '.join(map(str, layers))}"


def _near(pattern: str, found: Mapping[str, TapInfo]) -> str:
    words = [word for name, one in found.items() for word in (name, one.alias, inside(name)) if word]
    close = get_close_matches(pattern, dict.fromkeys(words), n=4, cutoff=0.4)
    return f"the nearest: {', '.join(close)}" if close else f"some: {', '.join(list(found)[:6])}"


def _refuse_parts(model: nn.Module) -> None:
    sharded = next(((name, value) for name, value in model.named_parameters() if hasattr(value, "placements")), None)
    if sharded is not None:
        name, value = sharded
        raise InterpError(
            f"parameter {name} is sharded ({getattr(value, 'placements', '')}): inner values are read from a whole model only; "
            "gather them with forge_train.inside.ranks.capture_sharded, or open a checkpoint on one process"
        )
    for part in ("shape", "embed", "norm", "head"):
        if getattr(model, part, None) is None:
            raise InterpError(
                f"{type(model).__name__} has no `{part}`: it is one part of a pipeline, or not a decoder of Forge; "
                "inner values are read from a whole decoder; forge_train.inside.ranks gathers those of stages"
            )


def _tokens() -> dict[str, Tensor]:
    return {"x": torch.zeros(1, 3, dtype=torch.int64)}


def _no_loss(_head: Any, hidden: Tensor, _labels: Tensor) -> LossTerms:
    zero = hidden.sum()
    return LossTerms(zero, zero, {})


@contextmanager
def _without_experts(model: nn.Module) -> Iterator[None]:
    """Experts that are not run: how many tokens each has is a number, and there are none."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "dispatch")]
    before = [layer.dispatch for layer in layers]
    for layer in layers:
        layer.dispatch = _nowhere
    try:
        yield
    finally:
        for layer, dispatch in zip(layers, before, strict=True):
            layer.dispatch = dispatch


def _nowhere(
    x: Tensor,
    _experts: Tensor,
    _weights: Tensor,
    _run: Any,
    _count: int,
    _slots: int | None = None,
    overlap_with: Callable[[], Tensor] | None = None,
) -> Tensor:
    return x if overlap_with is None else x + overlap_with()
