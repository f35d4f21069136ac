"""The gated delta rule (Yang et al., 2024, "Gated Delta Networks"), computed in chunks.

A state S (key width x value width) is a linear map from keys to values. Each token lets it decay, and moves the value that the
map gives for the token's key towards the token's value:

    S <- exp(g) S
    S <- S + beta k (v - S^T k)^T
    o = S^T q

Within a chunk that starts with the state S, with c the running sum of g and D_ij = exp(c_i - c_j) for j <= i, the errors
e_i = v_i - (prediction for k_i) solve a triangular system, and everything else is a matrix product:

    (I + strictly lower part of (K K^T * D) diag(beta)) E = V - exp(c) K S
    O = exp(c) Q S + (Q K^T * D) (beta E)
    S' = exp(c_last) S + K^T (exp(c_last - c) beta E)

So only the chain of states is sequential. The backward keeps E, the states at the starts of chunks and the inverse of the system,
and computes the rest again. With dV the gradient of the values, the gradient of c is O dO - V dV, summed over the width; what
the next state adds belongs to c_last.

At a border of documents, all factors D and exp(c) from one document to another are zero, so no number of a document enters the
results or gradients of another one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_models.blocks.chunks import CHUNK, apart, chunked, document_runs, joined, log_decay_gradient, scores, split, to_rows


def gated_delta_rule(
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

    Computes in fp32, or in fp64 for fp64. Each key head serves heads / key_heads consecutive value heads.

    Args:
        q: (B, T, key_heads, key width) queries, already scaled.
        k: (B, T, key_heads, key width) keys, usually of length 1.
        v: (B, T, heads, value width) values.
        g: (B, T, heads) logarithms of the decay, at most 0.
        beta: (B, T, heads) step sizes; 0 leaves the state as it is.
        documents: (B, T) document of each token, as runs of equal numbers; the state begins with zeros in each. None: each row is
            one document, which continues `state`.
        state: (B, heads, key width, value width) state before the first token; zeros if None. With `documents`, it belongs to
            the first one.
        chunk: maximum number of tokens of a chunk; changes the results only by rounding.

    Raises:
        ValueError: the key heads do not divide the value heads.
    """
    heads, key_heads = v.shape[2], k.shape[2]
    if heads % key_heads:
        raise ValueError(
            f"{key_heads} key heads do not divide {heads} value heads; choose numbers of which one divides the other"
        )
    wide = torch.promote_types(v.dtype, torch.float32)
    if state is None:
        state = v.new_zeros(v.shape[0], heads, k.shape[-1], v.shape[-1], dtype=wide)
    runs = None if documents is None else document_runs(documents)
    given = (q.to(wide), k.to(wide), v.to(wide), g.to(wide), beta.to(wide), state.to(wide), runs, min(chunk, v.shape[1]))
    if torch.compiler.is_compiling():  # one operator of the graph, so that its size does not depend on the length
        out, after = torch.ops.forge_models.gated_delta_rule(*given)[:2]
    else:
        out, after = _Rule.apply(*given)
    return out.to(v.dtype), after


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, documents: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns outputs, state after the last token, errors E, states (G, N, dk, r * dv), and inverses (G, r, N, C, C)."""
    parts = split(q, k, v, g, beta, documents, chunk)
    groups, heads, count, size, _ = parts.v.shape
    query_scores, key_scores = scores(parts)
    system = (key_scores * parts.decay).mul_(parts.beta.transpose(-1, -2))
    unit = torch.eye(size, dtype=v.dtype, device=v.device)
    inverse = torch.linalg.solve_triangular(system, unit.expand_as(system), upper=False, unitriangular=True)
    del system
    keys = parts.qk[..., size:, :]
    s = joined(state.reshape(groups, heads, *state.shape[2:]))
    states, errors = s.new_empty(groups, count, *s.shape[1:]), torch.empty_like(parts.v)
    for n in range(count):
        states[:, n] = s
        predicted = apart(keys[:, n] @ s, heads)
        error = inverse[:, :, n] @ (parts.v[:, :, n] - parts.read[:, :, n] * predicted)
        errors[:, :, n] = error
        written = joined(error * (parts.write[:, :, n] * parts.beta[:, :, n]))
        s = (s.unflatten(-1, (heads, -1)) * parts.keep[:, :, n].transpose(1, 2)).flatten(2)
        s = torch.baddbmm(s, keys[:, n].transpose(1, 2), written)
    out = (query_scores * parts.decay) @ (errors * parts.beta)
    seen = (parts.qk[..., :size, :] @ states).unflatten(-1, (heads, -1)).permute(0, 3, 1, 2, 4)
    out.addcmul_(parts.read, seen)
    after = apart(s, heads).reshape(state.shape)
    return to_rows(out, v.shape[0], v.shape[1]).contiguous(), after, errors, states, inverse


def _backward(
    grads: Sequence[Tensor], kept: Sequence[Tensor], documents: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v, g, beta and the first state; `kept` is what `_forward` returns, then q, k, v, g, beta."""
    grad, state_grad = grads
    out, after, errors, states, inverse, q, k, v, g, beta = kept
    parts = split(q, k, v, g, beta, documents, chunk)
    groups, heads, count, size, _ = parts.v.shape
    rows, length, key_heads = v.shape[0], v.shape[1], k.shape[2]
    query_scores, key_scores = scores(parts)
    out_grad = chunked(grad, chunk, key_heads)
    keys = parts.qk[..., size:, :]
    written = errors * parts.beta
    written_grad = (query_scores * parts.decay).transpose(-1, -2) @ out_grad
    value_grad = torch.empty_like(parts.v)
    qk_grad, at_end = torch.empty_like(parts.qk), parts.keep.new_empty(parts.keep.shape)
    s_grad = joined(state_grad.reshape(groups, heads, *state_grad.shape[2:]))
    s_next = joined(after.reshape(groups, heads, *after.shape[2:]))
    for n in reversed(range(count)):
        s, write, read = states[:, n], parts.write[:, :, n], parts.read[:, :, n]
        at_end[:, :, n] = (s_next * s_grad).unflatten(-1, (heads, -1)).sum((1, 3))[..., None, None]
        written_grad[:, :, n].addcmul_(write, apart(keys[:, n] @ s_grad, heads))
        reading = inverse[:, :, n].transpose(-1, -2) @ (written_grad[:, :, n] * parts.beta[:, :, n])
        value_grad[:, :, n] = reading
        # Queries and keys read the state with equal formulas, so their gradients are one product.
        both = torch.cat((joined(out_grad[:, :, n] * read), joined(reading * -read)), 1)
        torch.bmm(both, s.transpose(1, 2), out=(part := torch.empty_like(parts.qk[:, n])))
        part[:, size:].baddbmm_(joined(written[:, :, n] * write), s_grad.transpose(1, 2))
        qk_grad[:, n] = part
        s_grad = (s_grad.unflatten(-1, (heads, -1)) * parts.keep[:, :, n].transpose(1, 2)).flatten(2)
        s_grad = torch.baddbmm(s_grad, parts.qk[:, n].transpose(1, 2), both)
        s_next = s
    # errors and reading give the gradient of the system: D_ij = -reading_i e_j
    system = (value_grad @ errors.transpose(-1, -2)).neg_().mul_(parts.decay)
    system.diagonal(dim1=-2, dim2=-1).zero_()
    beta_grad = (written_grad * errors).sum(-1, keepdim=True)
    beta_grad += (system * key_scores).sum(-2).unsqueeze(-1)
    key_products = system.mul_(parts.beta.transpose(-1, -2)).sum(1)
    query_products = (out_grad @ written.transpose(-1, -2)).mul_(parts.decay).sum(1)
    queries = parts.qk[..., :size, :]
    qk_grad[..., :size, :] += query_products @ keys
    qk_grad[..., size:, :] += query_products.transpose(-1, -2) @ queries
    qk_grad[..., size:, :] += (key_products + key_products.transpose(-1, -2)) @ keys
    c_grad = (out_grad * chunked(out, chunk, key_heads) - parts.v * value_grad).sum(-1, keepdim=True)
    g_grad = log_decay_gradient(c_grad, at_end, parts.same)
    first = apart(s_grad, heads).reshape(state_grad.shape)
    grads = (qk_grad[:, None, :, :size], qk_grad[:, None, :, size:], value_grad, g_grad, beta_grad)
    dq, dk, dv, dg, dbeta = (to_rows(x, rows, length) for x in grads)
    return dq, dk, dv, dg.squeeze(-1), dbeta.squeeze(-1), first


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        out, after, *kept = _forward(*given)
        q, k, v, g, beta, _, documents, chunk = given
        ctx.save_for_backward(out, after, *kept, q, k, v, g, beta, documents)
        ctx.chunk = chunk
        return out, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *kept, documents = ctx.saved_tensors
        return (*_backward(grads, kept, documents, ctx.chunk), None, None)


@torch.library.custom_op("forge_models::gated_delta_rule", mutates_args=())
def _operator(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, documents: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`_forward` as one operator of a compiled graph, so that the size of the graph does not depend on the length."""
    out, after, errors, states, inverse = _forward(q, k, v, g, beta, state, documents, chunk)
    return out, after, errors, states, inverse.contiguous()


@_operator.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, documents: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    del q, g, beta, documents
    (rows, length, heads, width), key_heads = v.shape, k.shape[2]
    groups, shared, count = rows * key_heads, heads // key_heads, -(-length // chunk)
    errors, inverse = v.new_empty(groups, shared, count, chunk, width), v.new_empty(groups, shared, count, chunk, chunk)
    states = v.new_empty(groups, count, k.shape[-1], shared * width)
    return torch.empty_like(v), torch.empty_like(state), errors, states, inverse


@torch.library.custom_op("forge_models::gated_delta_rule_backward", mutates_args=())
def _backward_operator(grads: list[Tensor], kept: list[Tensor], documents: Tensor | None, chunk: int) -> list[Tensor]:
    """`_backward` as one operator: `grads` of outputs and state, then what the forward kept and its inputs."""
    return [grad.contiguous() for grad in _backward(grads, kept, documents, chunk)]


@_backward_operator.register_fake
def _(grads: list[Tensor], kept: list[Tensor], documents: Tensor | None, chunk: int) -> list[Tensor]:
    del documents, chunk
    return [*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in kept[5:]), torch.empty_like(grads[1])]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, g, beta, _, documents, chunk = inputs
    ctx.save_for_backward(*output, q, k, v, g, beta, documents)
    ctx.chunk = chunk


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    *kept, documents = ctx.saved_tensors
    return (*torch.ops.forge_models.gated_delta_rule_backward(list(grads[:2]), kept, documents, ctx.chunk), None, None)


_operator.register_autograd(_differentiate, setup_context=_keep)
