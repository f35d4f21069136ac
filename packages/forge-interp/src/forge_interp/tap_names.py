"""Inner values of a model: their names, dimensions and aliases, and their selection by patterns.

A name is a path: `blocks.3.attention.q`, `mtp.depths.1.residual`, `norm`. An alias is the name of the same values in
TransformerLens (Nanda and Bloom, 2022), such as `blocks.3.attn.hook_rot_q`; if there is none, the table has the reason. `taps`
lists the values that a model passes to `tap`, found by running the model on the meta device.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from forge_core.batch import MTPTargets
from forge_core.errors import ForgeError
from forge_core.protocols.model import LossTerms
from forge_models.generation import evaluating
from forge_models.inner_values import is_from, listening


class InterpError(ForgeError):
    """Error for a name, a selection or a value that cannot be captured or edited."""


def require_finite(what: str, x: Tensor) -> None:
    """Checks that all values are finite.

    Args:
        what: noun for the message, in the plural, such as "activations".
        x: (rows, ...) values.

    Raises:
        InterpError: values are NaN or infinite; the message has their number and the first row with one.
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
        name: path of the value.
        alias: name in TransformerLens; empty if there is none.
        dims: dimensions in the order in which a block passes the value.
        shape: shape for one token, without rows and positions.
        dtype: dtype of the elements.
        editable: whether an edit affects later computations.
        partial: reason why there is no value per token, so that it cannot be selected; empty if there is one.
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
        """Number of bytes of one token."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def heads(self) -> int | None:
        """Number of heads; None for a value that has none."""
        return self.shape[0] if {"heads", "kv_heads"} & set(dims_by_token(self.dims)) else None


def taps(model: nn.Module) -> dict[str, TapInfo]:
    """Returns every inner value of a decoder by name, in the order of a forward. Runs the model on the meta device.

    Raises:
        InterpError: the model is a pipeline stage or sharded.
    """
    _refuse_parts(model)
    shape: Any = model.shape
    found: dict[str, TapInfo] = {}

    def hear(name: str, x: Tensor) -> None:
        if not is_from(model):  # an image encoder, which has other tokens
            return
        entry = known(name)
        own = ("batch", "sequence", *("" for _ in x.shape[2:]))  # of a plugin's block
        dims = own if entry is None else entry.dims
        several = _has_streams(name, shape)
        if several:
            dims = (*STREAM[:2], "streams", STREAM[2])
        value = by_token(x, dims, 1)
        partial = ""
        if {"sequence", "tokens"}.isdisjoint(dims):
            partial = f"it is of {dims[2]}, not of tokens"
        elif value.shape[1] != tokens.shape[1]:
            partial = "it has the tokens of one modality; `modality` says which those are"
        editable = entry is None or entry.editable
        found[name] = TapInfo(name, "" if several else alias_of(name), dims, tuple(value.shape[2:]), x.dtype, editable, partial)

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
    """Returns the inner values that match patterns, in the order of a forward.

    Args:
        found: all inner values of the model.
        names: names, aliases, or patterns with `*`; with `layers` also the part after `blocks.N.`, such as `attention.q`.
        layers: numbers of blocks; negative ones count from the end; None = all.

    Raises:
        InterpError: a pattern matches nothing (the message has the nearest names) or only values that do not exist for each
            token, or a layer does not exist.
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


STREAM = ("batch", "sequence", "embed")
HIDDEN = ("batch", "sequence", "ffn")
HEADS = ("batch", "heads", "sequence", "head_dim")
KV_HEADS = ("batch", "kv_heads", "sequence", "head_dim")

_PATH = re.compile(r"(?P<place>blocks\.(?P<layer>\d+)\.|mtp\.depths\.\d+\.)?(?P<rest>.*)")


class Known(NamedTuple):
    """One kind of inner value.

    Attributes:
        says: description of the value.
        dims: dimensions in the order in which a block passes the value; "tokens" stands for rows and positions in one dimension.
        alias: name in TransformerLens, without the prefix `blocks.N.`; empty if TransformerLens has no such value.
        why: reason for an empty alias.
        editable: False if no later computation uses the value.
    """

    says: str
    dims: tuple[str, ...]
    alias: str = ""
    why: str = ""
    editable: bool = True


OUTSIDE = {
    "embeddings": Known("token vectors that enter the first block", STREAM, "hook_embed"),
    "residual": Known("the stream behind the last block", STREAM, why="it is hook_resid_post of the last block"),
    "norm": Known("the stream behind the final norm", STREAM, "unembed.hook_in"),
    "logits": Known("logits; not made where a loss is asked for", ("batch", "sequence", "vocab"), "unembed.hook_out"),
}
"""Names outside of blocks."""

_ROUTED = "TransformerLens keeps the probabilities of all experts before the choice"
_BEFORE = "TransformerLens has the value behind the norm only, here `added`"
_SHARED = "TransformerLens has no shared experts"
_LATENT = "TransformerLens has experts of the width of the stream only"

_NO_STATES = "TransformerLens has no recurrent layers"

_NO_LAYER_INPUTS = "TransformerLens has no per-layer embeddings"

INSIDE = {
    "residual": Known("the stream that enters the block", STREAM, "hook_resid_pre"),
    "attention.q_projected": Known("queries before norm and rotation", HEADS, "attn.hook_q"),
    "attention.k_projected": Known("keys before norm and rotation", KV_HEADS, "attn.hook_k"),
    "attention.latent": Known(
        "the latent of keys and values behind its norm", ("batch", "sequence", "latent"), why="TransformerLens has no latents"
    ),
    "attention.v": Known("values", KV_HEADS, "attn.hook_v"),
    "attention.q": Known("queries behind norm and rotation", HEADS, "attn.hook_rot_q"),
    "attention.k": Known("keys behind norm and rotation", KV_HEADS, "attn.hook_rot_k"),
    "attention.gate": Known("sigmoid of the gate on each head's output", HEADS, why="TransformerLens has no such gate"),
    "attention.beta": Known("step sizes of a recurrent layer", ("batch", "sequence", "state_heads"), why=_NO_STATES),
    "attention.log_decay": Known(
        "logarithms of the decay of a recurrent layer's states", ("batch", "sequence", "state_heads"), why=_NO_STATES
    ),
    "attention.log_decays": Known("logarithms of the decay of each channel of a recurrent layer's keys", HEADS, why=_NO_STATES),
    "attention.heads": Known("output of each head, before the output projection", HEADS, "attn.hook_z"),
    "attention.output": Known("output of the attention, before a norm behind it", STREAM, why=_BEFORE),
    "attention.added": Known("what the attention adds to the stream", STREAM, "hook_attn_out"),
    "residual_mid": Known("the stream between attention and feed-forward part", STREAM, "hook_resid_mid"),
    "mlp.pre_activation": Known("what enters the activation function: the gate, where there is one", HIDDEN, "mlp.hook_pre"),
    "mlp.linear": Known("what a gate is multiplied with", HIDDEN, "mlp.hook_pre_linear"),
    "mlp.hidden": Known("what enters the last matrix: the neurons", HIDDEN, "mlp.hook_post"),
    "router.logits": Known("a router's logits", ("tokens", "experts"), why=_ROUTED),
    "router.experts": Known("the experts of each token", ("tokens", "top_k"), "mlp.hook_expert_indices", editable=False),
    "router.weights": Known("weights of the chosen experts", ("tokens", "top_k"), why=_ROUTED),
    "experts.latent": Known(
        "what is sent to the chosen experts, in a space of their own", ("batch", "sequence", "latent"), why=_LATENT
    ),
    "shared.pre_activation": Known("as mlp.pre_activation, of the shared experts", HIDDEN, why=_SHARED),
    "shared.linear": Known("as mlp.linear, of the shared experts", HIDDEN, why=_SHARED),
    "shared.hidden": Known("as mlp.hidden, of the shared experts", HIDDEN, why=_SHARED),
    "shared.gate": Known("sigmoid of the gate on the shared experts' output", ("batch", "sequence", "gate"), why=_SHARED),
    "experts.latent_sum": Known("what the chosen experts add up to in this space", ("batch", "sequence", "latent"), why=_LATENT),
    "mlp.output": Known("output of the feed-forward part or the experts, before a norm behind it", STREAM, why=_BEFORE),
    "mlp.added": Known("what the feed-forward part adds to the stream", STREAM, "hook_mlp_out"),
    "layer_input.vector": Known(
        "the vector of each token for this layer", ("batch", "sequence", "layer_input"), why=_NO_LAYER_INPUTS
    ),
    "layer_input.added": Known("what this vector adds to the stream", STREAM, why=_NO_LAYER_INPUTS),
    "residual_after": Known("the stream that leaves the block", STREAM, "hook_resid_post"),
    "norm": Known("of a module for multi-token prediction: what the head scores", STREAM, why="not in TransformerLens"),
}
"""Names inside of a block, in the order of a forward."""


_IMAGES = "TransformerLens has no images"

WITH_IMAGES = {
    "modality": Known(
        "the modality of each token: 0 is text, then the others by name",
        ("batch", "sequence", "number"),
        why=_IMAGES,
        editable=False,
    ),
    "cross.attention.q": Known("queries of text to images", HEADS, why=_IMAGES),
    "cross.attention.k": Known("keys of images", ("batch", "kv_heads", "images", "head_dim"), why=_IMAGES),
    "cross.attention.gate": Known(
        "tanh of the gate, with which what a token sees of images is multiplied", ("batch", "sequence", "gate"), why=_IMAGES
    ),
    "cross.mlp.gate": Known("the same, of the feed-forward part behind it", ("batch", "sequence", "gate"), why=_IMAGES),
}
"""Names that only models with images have: outside of blocks, and inside."""


def known(name: str) -> Known | None:
    """Returns the kind of inner value of a full name, also for one of several modules of a block, such as `image.mlp.hidden`;
    None for a name from a plugin's block."""
    place, _, rest = _parts(name)
    table = (INSIDE if place else OUTSIDE) | WITH_IMAGES
    return table.get(rest, table.get(rest.partition(".")[2]) if place else None)


def _has_streams(name: str, shape: Any) -> bool:
    """Whether the value has all residual streams of a model with several."""
    return getattr(shape, "streams", None) is not None and inside(name) in ("residual", "residual_mid", "residual_after")


def alias_of(name: str) -> str:
    """Returns the name in TransformerLens; "" if it has no such value, such as in modules for multi-token prediction."""
    place, layer, rest = _parts(name)
    found = (INSIDE if place else OUTSIDE).get(rest)
    if found is None or not found.alias or (place and layer is None):
        return ""
    return place + found.alias


def layer_of(name: str) -> int | None:
    """Returns the number of the block, or None outside of the model's blocks."""
    return _parts(name)[1]


def inside(name: str) -> str:
    """Returns the name without its block, such as `attention.q`."""
    return _parts(name)[2]


def by_token(x: Tensor, dims: tuple[str, ...], rows: int) -> Tensor:
    """Converts a value from the order in which a block passes it to (B, T, ...); heads become dimension 2."""
    if dims[0] == "tokens":
        return x.unflatten(0, (rows, -1))
    return x.transpose(1, 2) if dims[1] != "sequence" else x


def as_passed(x: Tensor, dims: tuple[str, ...]) -> Tensor:
    """Inverts `by_token`."""
    if dims[0] == "tokens":
        return x.flatten(0, 1)
    return x.transpose(1, 2) if dims[1] != "sequence" else x


def dims_by_token(dims: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the dimensions other than rows and positions."""
    return tuple(dim for dim in dims if dim not in ("batch", "sequence", "tokens"))


def _parts(name: str) -> tuple[str, int | None, str]:
    found = _PATH.fullmatch(name)
    assert found is not None
    return found["place"] or "", None if found["layer"] is None else int(found["layer"]), found["rest"]


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
            "gather them with forge_interp.commands.ranks.capture_sharded, or open a checkpoint on one process"
        )
    for part in ("shape", "embed", "norm", "head"):
        if getattr(model, part, None) is None:
            raise InterpError(
                f"{type(model).__name__} has no `{part}`: it is one part of a pipeline, or not a decoder of Forge; "
                "inner values are read from a whole decoder; forge_interp.commands.ranks gathers those of stages"
            )


def _tokens() -> dict[str, Tensor]:
    return {"x": torch.zeros(1, 3, dtype=torch.int64)}


def _no_loss(_head: Any, hidden: Tensor, _labels: Tensor) -> LossTerms:
    zero = hidden.sum()
    return LossTerms(zero, zero, {})


@contextmanager
def _without_experts(model: nn.Module) -> Iterator[None]:
    """Context in which experts do not run, because the meta device has no values to count the tokens of each expert."""
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
