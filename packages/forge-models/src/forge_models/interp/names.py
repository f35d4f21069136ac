"""The names of inner values: what each is, its dimensions, and what TransformerLens calls it.

A name is a path: `blocks.3.attention.q`, `mtp.depths.1.residual`, `norm`. An alias is the name of the same numbers in
TransformerLens (Nanda and Bloom, 2022), such as `blocks.3.attn.hook_rot_q`; where there is none, the table says why.
"""

import re
from typing import NamedTuple

from torch import Tensor

STREAM = ("batch", "sequence", "embed")
HIDDEN = ("batch", "sequence", "ffn")
HEADS = ("batch", "heads", "sequence", "head_dim")
KV_HEADS = ("batch", "kv_heads", "sequence", "head_dim")

_PATH = re.compile(r"(?P<place>blocks\.(?P<layer>\d+)\.|mtp\.depths\.\d+\.)?(?P<rest>.*)")


class Known(NamedTuple):
    """One kind of inner value.

    Attributes:
        says: what it is.
        dims: in the order in which a block passes it; "tokens" are rows and positions in one.
        alias: what TransformerLens calls it, behind `blocks.N.` inside of a block; empty where it has none.
        why: why it has none.
        editable: False for what a block only shows.
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
    "shared.pre_activation": Known("as mlp.pre_activation, of the shared experts", HIDDEN, why=_SHARED),
    "shared.linear": Known("as mlp.linear, of the shared experts", HIDDEN, why=_SHARED),
    "shared.hidden": Known("as mlp.hidden, of the shared experts", HIDDEN, why=_SHARED),
    "mlp.output": Known("output of the feed-forward part or the experts, before a norm behind it", STREAM, why=_BEFORE),
    "mlp.added": Known("what the feed-forward part adds to the stream", STREAM, "hook_mlp_out"),
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
    """What a full name stands for, also that of one of several modules of a block, such as `image.mlp.hidden`; None for one of a
    plugin's block."""
    place, _, rest = _parts(name)
    table = (INSIDE if place else OUTSIDE) | WITH_IMAGES
    return table.get(rest, table.get(rest.partition(".")[2]) if place else None)


def alias_of(name: str) -> str:
    """What TransformerLens calls it; empty where it has no such value, such as inside of modules for multi-token prediction."""
    place, layer, rest = _parts(name)
    found = (INSIDE if place else OUTSIDE).get(rest)
    if found is None or not found.alias or (place and layer is None):
        return ""
    return place + found.alias


def layer_of(name: str) -> int | None:
    """The number of the block; None outside of the model's blocks."""
    return _parts(name)[1]


def inside(name: str) -> str:
    """The name without its block: `attention.q`."""
    return _parts(name)[2]


def by_token(x: Tensor, dims: tuple[str, ...], rows: int) -> Tensor:
    """(B, T, ...) of a value in the order in which a block passes it: heads become dimension 2."""
    if dims[0] == "tokens":
        return x.unflatten(0, (rows, -1))
    return x.transpose(1, 2) if dims[1] != "sequence" else x


def as_passed(x: Tensor, dims: tuple[str, ...]) -> Tensor:
    """The opposite of `by_token`."""
    if dims[0] == "tokens":
        return x.flatten(0, 1)
    return x.transpose(1, 2) if dims[1] != "sequence" else x


def dims_by_token(dims: tuple[str, ...]) -> tuple[str, ...]:
    """The dimensions behind rows and positions."""
    return tuple(dim for dim in dims if dim not in ("batch", "sequence", "tokens"))


def _parts(name: str) -> tuple[str, int | None, str]:
    found = _PATH.fullmatch(name)
    assert found is not None
    return found["place"] or "", None if found["layer"] is None else int(found["layer"]), found["rest"]
