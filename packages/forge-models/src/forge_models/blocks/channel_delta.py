"""The delta rule whose decay differs by channel (Kimi Delta Attention; Kimi Team, 2025, "Kimi Linear"), computed in chunks.

With g a vector over the channels of a key, each token computes

    S <- diag(exp(g)) S
    S <- S + beta k (v - S^T k)^T
    o = S^T q

Within a chunk that starts with the state S, with c the running sums of g, and for x = q and x = k

    X_ij = sum over channels of x_i k_j exp(c_i - c_j), for j <= i

the errors e_i = v_i - (prediction for k_i) solve a triangular system, as in `delta_rule`:

    (I + strictly lower part of K diag(beta)) E = V - (k exp(c)) S
    O = (q exp(c)) S + Q (beta E)
    S' = diag(exp(c_last)) S + (k exp(c_last - c))^T (beta E)

exp(-c_j) alone could overflow, so X is computed in blocks of rows: with r the sums before a block, columns before it are a
product of x_i exp(c_i - r) with k_j exp(r - c_j), both at most 1 in size, and columns of the block itself are summed from their
definition.

The backward keeps E, the states at the starts of chunks and the inverse of the system. As c_i and c_j enter with q_i or k_i and
with k_j, the gradient of c is x dx for each x that is read as a row, minus that for each k that is read as a column.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forge_models.blocks.chunks import CHUNK, chunked, document_runs, to_rows

BLOCK = 16
"""Rows of a block."""


def channel_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Returns the outputs (B, T, heads, value width) in the dtype of `v`, and the state after the last token.

    Computes in fp32, or in fp64 for fp64.

    Args:
        q: (B, T, heads, key width) queries, already scaled.
        k: (B, T, heads, key width) keys, usually of length 1.
        v: (B, T, heads, value width) values.
        g: (B, T, heads, key width) logarithms of the decay, at most 0.
        beta: (B, T, heads) step sizes; 0 leaves the state as it is.
        documents, state, chunk: see `gated_delta_rule`.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1], dtype=wide)
    runs = None if documents is None else document_runs(documents)
    given = (*(x.to(wide) for x in (q, k, v, g, beta, state)), runs, min(chunk, v.shape[1]))
    if torch.compiler.is_compiling():  # one operator of the graph, so that its size does not depend on the length
        out, after = torch.ops.forge_models.channel_delta_rule(*given)[:2]
    else:
        out, after = _Rule.apply(*given)
    return out.to(v.dtype), after


class _Parts(NamedTuple):
    """Inputs in chunks. G = B * heads, N chunks of C tokens.

    Attributes:
        q, k: (G, N, C, dk).
        v: (G, N, C, dv).
        beta: (G, N, C, 1).
        c: (G, N, C, dk) running sums of g within the document and the chunk.
        read: (G, N, C, dk) decay from the start of the chunk.
        write: (G, N, C, dk) decay to the end of the chunk.
        same: (G, N, C, C) whether two tokens have the same document; None without documents.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    c: Tensor
    read: Tensor
    write: Tensor
    same: Tensor | None


def _split(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Tensor | None, chunk: int) -> _Parts:
    heads = k.shape[2]
    q, k, v, g, beta = (chunked(x, chunk, heads).squeeze(1) for x in (q, k, v, g, beta[..., None]))
    if documents is None:
        c = g.cumsum(-2)
        return _Parts(q, k, v, beta, c, c.exp(), (c[..., -1:, :] - c).exp(), None)
    # Padding behind the row continues its last document, so that the state after the row is that after its last token.
    padded = F.pad(documents, (0, -documents.shape[1] % chunk))
    padded[:, documents.shape[1] :] = documents[:, -1:]
    before = torch.cat((padded[:, :1], padded[:, :-1]), 1).unflatten(1, (-1, chunk))[..., :1]  # last of the chunk before
    ids = padded.unflatten(1, (-1, chunk))
    ids, before = ids.repeat_interleave(heads, 0), before.repeat_interleave(heads, 0)
    same = ids[..., :, None] == ids[..., None, :]
    c = same.tril().to(g.dtype) @ g  # sums of the own document only, so that its bits do not depend on others
    read = c.exp() * (ids == before).unsqueeze(-1)
    write = (c[..., -1:, :] - c).masked_fill(~same[..., -1, :, None], float("-inf")).exp()
    return _Parts(q, k, v, beta, c, read, write, same)


class _Block(NamedTuple):
    """Rows `rows` of a chunk: `left` (G, N, n, dk) and `right` (G, N, start, dk) are the two factors of the decay from earlier
    columns, and `near` (G, N, n, n, dk) is that between the rows themselves."""

    rows: slice
    left: Tensor
    right: Tensor
    near: Tensor


def _blocks(parts: _Parts) -> Iterator[_Block]:
    size, none = parts.c.shape[-2], float("-inf")
    for start in range(0, size, BLOCK):
        rows = slice(start, min(start + BLOCK, size))
        c = parts.c[..., rows, :]
        hidden = torch.ones(c.shape[-2], c.shape[-2], dtype=torch.bool, device=c.device).triu(1)
        if parts.same is not None:
            hidden = hidden | ~parts.same[..., rows, rows]
        near = (c.unsqueeze(-2) - c.unsqueeze(-3)).masked_fill_(hidden.unsqueeze(-1), none).exp_()
        if not start:
            yield _Block(rows, c[..., :0, :], c[..., :0, :], near)
            continue
        sums = parts.c[..., start - 1 : start, :]
        left, right = c - sums, sums - parts.c[..., :start, :]
        if parts.same is not None:  # the token before the block has to have the document of both
            left = left.masked_fill(~parts.same[..., rows, start - 1, None], none)
            right = right.masked_fill(~parts.same[..., start - 1, :start, None], none)
        yield _Block(rows, left.exp(), right.exp(), near)


def _scores(parts: _Parts) -> tuple[Tensor, Tensor]:
    """Returns X of q and of k, (G, N, C, C) each, zero above the diagonal."""
    size = parts.c.shape[-2]
    found = []
    for rows, left, right, near in _blocks(parts):
        both = torch.stack((parts.q[..., rows, :], parts.k[..., rows, :]), -3)  # (G, N, 2, n, dk)
        own = near * parts.k[..., None, rows, :]  # (G, N, i, j, dk)
        inside = (own @ both.permute(0, 1, 3, 4, 2)).permute(0, 1, 4, 2, 3)
        if rows.start:
            far = parts.k[..., : rows.start, :] * right
            inside = torch.cat(((both * left.unsqueeze(-3)) @ far.unsqueeze(-3).transpose(-1, -2), inside), -1)
        found.append(F.pad(inside, (0, size - rows.stop)))
    whole = torch.cat(found, -2)
    return whole[:, :, 0], whole[:, :, 1]


def _score_gradients(parts: _Parts, query_grad: Tensor, key_grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, of k as rows and of k as columns, (G, N, C, dk) each, from those of X."""
    rows_grad, columns = [], torch.zeros_like(parts.k)
    for rows, left, right, near in _blocks(parts):
        both = torch.stack((parts.q[..., rows, :], parts.k[..., rows, :]), -3)
        grads = torch.stack((query_grad[..., rows, :], key_grad[..., rows, :]), -3)  # (G, N, 2, n, C)
        inside = grads[..., rows]
        own = near * parts.k[..., None, rows, :]
        found = (inside.permute(0, 1, 3, 2, 4) @ own).transpose(2, 3)  # (G, N, i, 2, dk) -> (G, N, 2, i, dk)
        weighted = (inside.permute(0, 1, 3, 4, 2) @ both.transpose(2, 3)).mul_(near)  # (G, N, i, j, dk)
        columns[..., rows, :] += weighted.sum(-3)
        if rows.start:
            earlier, decayed = grads[..., : rows.start], both * left.unsqueeze(-3)
            far = (parts.k[..., : rows.start, :] * right).unsqueeze(-3)
            found = found + (earlier @ far) * left.unsqueeze(-3)
            columns[..., : rows.start, :] += (earlier.transpose(-1, -2) @ decayed).sum(-3) * right
        rows_grad.append(found)
    both_grad = torch.cat(rows_grad, -2)
    return both_grad[:, :, 0], both_grad[:, :, 1], columns


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, documents: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns outputs, state after the last token, errors (G, N, C, dv), states (G, N, dk, dv) and inverses (G, N, C, C)."""
    parts = _split(q, k, v, g, beta, documents, chunk)
    groups, count, size, _ = parts.v.shape
    query_scores, key_scores = _scores(parts)
    system = key_scores * parts.beta.transpose(-1, -2)
    unit = torch.eye(size, dtype=v.dtype, device=v.device)
    inverse = torch.linalg.solve_triangular(system, unit.expand_as(system), upper=False, unitriangular=True)
    s = state.reshape(groups, *state.shape[2:])
    states, errors = s.new_empty(groups, count, *s.shape[1:]), torch.empty_like(parts.v)
    read, write, keep = parts.k * parts.read, parts.k * parts.write, parts.read[..., -1, :, None]
    for n in range(count):
        states[:, n] = s
        errors[:, n] = error = inverse[:, n] @ (parts.v[:, n] - read[:, n] @ s)
        s = torch.baddbmm(keep[:, n] * s, write[:, n].transpose(1, 2), error * parts.beta[:, n])
    out = (parts.q * parts.read) @ states + query_scores @ (errors * parts.beta)
    out = to_rows(out.unsqueeze(1), v.shape[0], v.shape[1]).contiguous()
    return out, s.reshape(state.shape), errors, states, inverse.contiguous()


def _backward(grads: Sequence[Tensor], kept: Sequence[Tensor], documents: Tensor | None, chunk: int) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k, v, g, beta and the first state; `kept` is what `_forward` returns from the second on, then
    q, k, v, g and beta."""
    grad, state_grad = grads
    after, errors, states, inverse, q, k, v, g, beta = kept
    parts = _split(q, k, v, g, beta, documents, chunk)
    groups, count, size, _ = parts.v.shape
    out_grad = chunked(grad, chunk, k.shape[2]).squeeze(1)
    query_scores, key_scores = _scores(parts)
    written = errors * parts.beta
    written_grad = query_scores.transpose(-1, -2) @ out_grad
    value_grad, next_grads = torch.empty_like(parts.v), torch.empty_like(states)
    read, write, keep = parts.k * parts.read, parts.k * parts.write, parts.read[..., -1, :, None]
    query_read = parts.q * parts.read
    s_grad = state_grad.reshape(groups, *state_grad.shape[2:])
    for n in reversed(range(count)):
        next_grads[:, n] = s_grad
        written_grad[:, n] += write[:, n] @ s_grad
        value_grad[:, n] = reading = inverse[:, n].transpose(1, 2) @ (written_grad[:, n] * parts.beta[:, n])
        s_grad = torch.baddbmm(keep[:, n] * s_grad, query_read[:, n].transpose(1, 2), out_grad[:, n])
        s_grad = torch.baddbmm(s_grad, read[:, n].transpose(1, 2), reading, alpha=-1)
    # errors and value_grad give the gradient of the system: -reading_i e_j
    system = (value_grad @ errors.transpose(-1, -2)).neg_().tril_(-1)
    beta_grad = (written_grad * errors).sum(-1, keepdim=True) + (system * key_scores).sum(-2).unsqueeze(-1)
    products = (out_grad @ written.transpose(-1, -2)).tril_()
    q_grad, row_grad, column_grad = _score_gradients(parts, products, system * parts.beta.transpose(-1, -2))
    q_grad = q_grad + (out_grad @ states.transpose(-1, -2)) * parts.read
    row_grad = row_grad - (value_grad @ states.transpose(-1, -2)) * parts.read
    write_grad = (written @ next_grads.transpose(-1, -2)) * parts.write
    column_grad = column_grad + write_grad
    c_grad = parts.q * q_grad + parts.k * (row_grad - column_grad)
    last = after.reshape(groups, 1, *after.shape[2:])
    at_end = (torch.cat((states[:, 1:], last), 1) * next_grads).sum(-1).unsqueeze(-2)
    # g_t is part of c_i for all later i of its chunk; across a border of documents its effect is zero.
    later: Any = torch.ones(size, size, dtype=v.dtype, device=v.device).triu()
    if parts.same is None:
        g_grad = later @ c_grad + at_end
    else:
        g_grad = (later * parts.same) @ c_grad + at_end * parts.same[..., -1].unsqueeze(-1)
    found = (q_grad, row_grad + column_grad, value_grad, g_grad, beta_grad)
    dq, dk, dv, dg, dbeta = (to_rows(x.unsqueeze(1), v.shape[0], v.shape[1]) for x in found)
    return dq, dk, dv, dg, dbeta.squeeze(-1), s_grad.reshape(state_grad.shape)


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        out, *kept = _forward(*given)
        q, k, v, g, beta, _, documents, chunk = given
        ctx.save_for_backward(*kept, q, k, v, g, beta, documents)
        ctx.chunk = chunk
        return out, kept[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *kept, documents = ctx.saved_tensors
        return (*_backward(grads, kept, documents, ctx.chunk), None, None)


@torch.library.custom_op("forge_models::channel_delta_rule", mutates_args=())
def _operator(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, documents: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`_forward` as one operator of a compiled graph."""
    out, after, *kept = _forward(q, k, v, g, beta, state, documents, chunk)
    return out, after.clone(), *(x.contiguous() for x in kept)  # type: ignore[return-value]


@_operator.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, documents: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    del q, g, beta, documents
    rows, length, heads, width = v.shape
    groups, count = rows * heads, -(-length // chunk)
    errors, inverse = v.new_empty(groups, count, chunk, width), v.new_empty(groups, count, chunk, chunk)
    states = v.new_empty(groups, count, k.shape[-1], width)
    return v.new_empty(v.shape), state.new_empty(state.shape), errors, states, inverse


@torch.library.custom_op("forge_models::channel_delta_rule_backward", mutates_args=())
def _backward_operator(grads: list[Tensor], kept: list[Tensor], documents: Tensor | None, chunk: int) -> list[Tensor]:
    """`_backward` as one operator."""
    return [grad.contiguous() for grad in _backward(grads, kept, documents, chunk)]


@_backward_operator.register_fake
def _(grads: list[Tensor], kept: list[Tensor], documents: Tensor | None, chunk: int) -> list[Tensor]:
    del documents, chunk
    return [*(x.new_empty(x.shape) for x in kept[4:]), grads[1].new_empty(grads[1].shape)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, g, beta, _, documents, chunk = inputs
    ctx.save_for_backward(*output[1:], q, k, v, g, beta, documents)
    ctx.chunk = chunk


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    *kept, documents = ctx.saved_tensors
    return (*torch.ops.forge_models.channel_delta_rule_backward(list(grads[:2]), kept, documents, ctx.chunk), None, None)


_operator.register_autograd(_differentiate, setup_context=_keep)
