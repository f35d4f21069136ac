"""Rows of tokens in chunks, with the decays between the tokens of a chunk: what the recurrences of `delta_rule` and `state_space`
have in common.

With c the running sum of the logarithms g of the decay within a chunk, token j still counts exp(c_i - c_j) at token i >= j. At a
border of documents, all factors from one document to another are zero, so no number of a document enters the results or
gradients of another one.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64
"""Tokens of a chunk."""


def document_runs(documents: Tensor) -> Tensor:
    """Returns (B, T) int64, the number of borders at or before each position: equal within a document, never equal afterwards."""
    return F.pad((documents[:, 1:] != documents[:, :-1]).long().cumsum(1), (1, 0))


class Chunks(NamedTuple):
    """Inputs in chunks. G = B * key_heads, r = value heads per key head, N chunks of C tokens.

    Attributes:
        qk: (G, N, 2 C, dk) queries, then keys.
        v: (G, r, N, C, dv).
        beta: (G, r, N, C, 1).
        read: (G, r, N, C, 1) decay from the start of the chunk.
        write: (G, r, N, C, 1) decay to the end of the chunk.
        keep: (G, r, N, 1, 1) decay over the whole chunk.
        decay: (G, r, N, C, C) decay from token j to token i; 0 above the diagonal.
        same: (G, 1, N, C, C) whether two tokens have the same document; None without documents.
    """

    qk: Tensor
    v: Tensor
    beta: Tensor
    read: Tensor
    write: Tensor
    keep: Tensor
    decay: Tensor
    same: Tensor | None


def chunked(x: Tensor, chunk: int, groups: int) -> Tensor:
    """Turns (B, T, heads, width) -> (B * groups, heads / groups, N, C, width), contiguous, padded with zeros."""
    rows, length, _, width = x.shape
    x = F.pad(x, (0, 0, 0, 0, 0, -length % chunk)) if length % chunk else x
    x = x.unflatten(2, (groups, -1)).unflatten(1, (-1, chunk)).permute(0, 3, 4, 1, 2, 5)
    return x.reshape(rows * groups, x.shape[2], -1, chunk, width)


def to_rows(x: Tensor, rows: int, length: int) -> Tensor:
    """Turns (B * groups, heads / groups, N, C, width) -> (B, T, heads, width)."""
    x = x.unflatten(0, (rows, -1)).permute(0, 3, 4, 1, 2, 5)
    return x.reshape(rows, x.shape[1] * x.shape[2], -1, x.shape[-1])[:, :length]


def split(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Tensor | None, chunk: int) -> Chunks:
    """Returns the inputs of a recurrence in chunks of `chunk` tokens; the arguments are those of `gated_delta_rule`."""
    groups = k.shape[2]
    g = chunked(g[..., None], chunk, groups)
    hidden, same = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).triu(1), None
    if documents is None:
        c = g.cumsum(-2)
        read, write, keep = c.exp(), (c[..., -1:, :] - c).exp(), c[..., -1:, :].exp()
    else:
        # Padding behind the row continues its last document, so that the state after the row is that after its last token.
        padded = F.pad(documents, (0, -documents.shape[1] % chunk))
        padded[:, documents.shape[1] :] = documents[:, -1:]
        ids = padded.unflatten(1, (-1, chunk))
        before = torch.cat((padded[:, :1], padded[:, :-1]), 1).unflatten(1, (-1, chunk))[..., :1]  # last of the chunk before
        first, end = ids == before, ids == ids[..., -1:]
        same = (ids[..., :, None] == ids[..., None, :]).repeat_interleave(groups, 0)[:, None]
        hidden = hidden | ~same
        c = (~hidden).to(g.dtype) @ g  # sums of the own document only, so that its bits do not depend on others
        read, write = (
            c.exp() * _of_heads(first, groups),
            (c[..., -1:, :] - c).masked_fill(~_of_heads(end, groups), float("-inf")).exp(),
        )
        keep = read[..., -1:, :]
    decay = (c - c.transpose(-1, -2)).masked_fill_(hidden, float("-inf")).exp_()
    qk = torch.cat((chunked(q, chunk, groups), chunked(k, chunk, groups)), -2).squeeze(1)
    return Chunks(qk, chunked(v, chunk, groups), chunked(beta[..., None], chunk, groups), read, write, keep, decay, same)


def _of_heads(mask: Tensor, groups: int) -> Tensor:
    """(B, N, n) -> (B * groups, 1, N, n, 1)."""
    return mask.repeat_interleave(groups, 0)[:, None, :, :, None]


def scores(parts: Chunks) -> tuple[Tensor, Tensor]:
    """Returns Q K^T and K K^T, (G, 1, N, C, C) each."""
    chunk = parts.v.shape[-2]
    products = (parts.qk @ parts.qk[..., chunk:, :].transpose(-1, -2)).unsqueeze(1)
    return products[..., :chunk, :], products[..., chunk:, :]


def joined(x: Tensor) -> Tensor:
    """Turns (G, r, n, dv) -> (G, n, r * dv): value heads of one key head side by side, for one product with its keys."""
    return x.transpose(1, 2).flatten(2)


def apart(x: Tensor, heads: int) -> Tensor:
    """Turns (G, n, r * dv) -> (G, r, n, dv)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def log_decay_gradient(c_grad: Tensor, at_end: Tensor, same: Tensor | None) -> Tensor:
    """Returns the gradient of g, (G, r, N, C, 1).

    Args:
        c_grad: (G, r, N, C, 1) gradient of the running sums c.
        at_end: (G, r, N, 1, 1) what the state after the chunk adds to that of the last sum.
        same: see `Chunks`.
    """
    size = c_grad.shape[-2]
    # g_t is part of c_i for all later i of its chunk; across a border of documents its effect is zero.
    later = torch.ones(size, size, dtype=c_grad.dtype, device=c_grad.device).triu()
    return later @ c_grad + at_end if same is None else (later * same) @ c_grad + at_end * same[..., -1:]
