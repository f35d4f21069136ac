"""What the head makes of the stream inside: the logit lens, and what each part adds to a logit."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.batch import IGNORE
from forge_models.interp.capture import capture
from forge_models.interp.listing import InterpError


@torch.no_grad()
def logit_lens(model: nn.Module, tokens: Tensor, positions: int | Sequence[int] = -1) -> Tensor:
    """(layers + 1, B, n, vocab): the model's final norm and head on the stream that enters each block, and on the last one, which
    gives the model's logits (nostalgebraist, 2020).

    Raises:
        InterpError: a position beyond the tokens.
    """
    decoder: Any = model
    with capture(model, ["blocks.*.residual", "residual"], positions=positions) as seen:
        model(tokens)
    return torch.stack([decoder.head(decoder.norm(stream)) for stream in seen.values()])


@torch.no_grad()
def lens_losses(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """(layers + 1,) fp64: mean negative log-likelihood of the labels under the logit lens, layer by layer; the last is the loss.

    Args:
        labels: (B, T), already shifted; -100 = no loss.
    """
    decoder: Any = model
    with capture(model, ["blocks.*.residual", "residual"]) as seen:
        model(tokens)
    losses = []
    for stream in seen.values():
        logits = decoder.head(decoder.norm(stream)).flatten(0, 1).double()
        losses.append(F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE))
    return torch.stack(losses)


class Attributed(NamedTuple):
    """What parts of a model add to a logit, or to a difference of logits.

    Attributes:
        names: of the parts: embeddings, then each head (`blocks.0.attention.heads.3`), what the attention's bias and norm
            add besides, and each feed-forward part.
        parts: (parts, B) what each adds; they sum to `total`.
        total: (B,) the logit, or the difference.
    """

    names: tuple[str, ...]
    parts: Tensor
    total: Tensor


@torch.no_grad()
def direct_logit_attribution(
    model: nn.Module, tokens: Tensor, right: Tensor, wrong: Tensor | None = None, position: int = -1
) -> Attributed:
    """Splits the logit of `right` (B,) at one position, or its difference to that of `wrong`, into what each part wrote
    (Elhage et al., 2021), with the scale of the final norm held fixed.

    Only what is linear is split: an RMSNorm or LayerNorm at the end, heads without a norm behind the attention, no cap on logits.

    Raises:
        InterpError: the model has a norm or a cap that does not split.
    """
    decoder: Any = model
    shape = decoder.shape
    if shape.soft_cap is not None:
        raise InterpError("a cap on logits is not linear, so a logit is not a sum over parts")
    names = ["embeddings", "*.attention.heads", "*.attention.added", "*.mlp.added", "residual", "norm"]
    with capture(model, names, positions=position) as seen:
        model(tokens)
    direction = decoder.head.weight[right]
    if wrong is not None:
        direction = direction - decoder.head.weight[wrong]
    stream = seen["residual"][:, 0].double()
    read, constant = _linear_norm(decoder.norm, stream, direction.double())
    kept: dict[str, Tensor] = {"embeddings": seen["embeddings"][:, 0]}
    for layer in range(shape.layers):
        added = seen[f"blocks.{layer}.attention.added"][:, 0]
        if shape.norm_placement == "pre":
            heads = seen[f"blocks.{layer}.attention.heads"][:, 0]
            weight = decoder.blocks[str(layer)].attention.o_proj.weight.unflatten(1, (heads.shape[1], -1))
            written = torch.einsum("bhd,ehd->hbe", heads, weight) * shape.residual_multiplier
            kept |= {f"blocks.{layer}.attention.heads.{head}": one for head, one in enumerate(written)}
            added = added - written.sum(0)  # the bias, where there is one, and rounding
        kept[f"blocks.{layer}.attention.added"] = added
        kept[f"blocks.{layer}.mlp.added"] = seen[f"blocks.{layer}.mlp.added"][:, 0]
    parts = torch.stack([(value.double() * read).sum(1) for value in kept.values()])
    if constant is not None:
        kept["norm"], parts = torch.empty(0), torch.cat([parts, constant[None]])
    return Attributed(tuple(kept), parts, (seen["norm"][:, 0].double() * direction.double()).sum(1))


def _linear_norm(norm: Any, stream: Tensor, direction: Tensor) -> tuple[Tensor, Tensor | None]:
    """(B, dim) r and (B,) c with direction . norm(x) = r . x + c where the norm's scale is that of `stream`."""
    weight = norm.weight.double() + getattr(norm, "offset", 0)
    read = direction * weight
    if getattr(norm, "bias", None) is None and not isinstance(norm, nn.LayerNorm) and type(norm).__name__ == "RMSNorm":
        return read * (stream.square().mean(1, keepdim=True) + norm.eps).rsqrt(), None
    if type(norm).__name__ != "LayerNorm":
        raise InterpError(f"the final norm is {type(norm).__name__}; a logit is split behind RMSNorm and LayerNorm only")
    read = read * (stream.var(1, unbiased=False, keepdim=True) + norm.eps).rsqrt()
    constant = None if norm.bias is None else direction @ norm.bias.double()
    return read - read.mean(1, keepdim=True), constant
