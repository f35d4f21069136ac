"""The selective state space of Mamba-2 (Dao and Gu, 2024, "Transformers are SSMs"), computed in chunks.

A state S (state width x head width) decays with each token, which then adds its value along its key, and is read along its query
(in the paper: x, B and C; the step is Delta, and g = Delta A):

    S <- exp(g) S + step k v^T
    o = S^T q + skip v

Within a chunk that starts with the state S, with c the running sum of g, D_ij = exp(c_i - c_j) for j <= i and W = step V,
everything is a matrix product:

    O = exp(c) Q S + (Q K^T * D) W + skip V
    S' = exp(c_last) S + K^T (exp(c_last - c) W)

The second term of S' does not depend on S, so the chain of states is elementwise. The backward keeps the outputs, and computes
states and factors again. With dW the gradient of W and O' the outputs without the skip, the gradient of c is O' dO - W dW, summed
over the width; what the next state adds belongs to c_last.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_models.blocks.chunks import CHUNK, Chunks, chunked, document_runs, log_decay_gradient, split, to_rows


def state_space(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    step: Tensor,
    skip: Tensor,
    *,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Returns the outputs (B, T, heads, head width) in the dtype of `v`, and the state after the last token.

    Computes in fp32, or in fp64 for fp64. Each group of q and k serves heads / groups consecutive heads.

    Args:
        q: (B, T, groups, state width) C of the paper.
        k: (B, T, groups, state width) B of the paper.
        v: (B, T, heads, head width) x of the paper.
        g: (B, T, heads) logarithms of the decay, at most 0.
        step: (B, T, heads) step sizes; with g = 0, a step of 0 leaves the state as it is.
        skip: (heads,) factor on `v` in the output.
        documents, state, chunk: see `gated_delta_rule`.

    Raises:
        ValueError: the groups do not divide the heads.
    """
    heads, groups = v.shape[2], k.shape[2]
    if heads % groups:
        raise ValueError(f"{groups} groups do not divide {heads} heads; choose numbers of which one divides the other")
    wide = torch.promote_types(v.dtype, torch.float32)
    if state is None:
        state = v.new_zeros(v.shape[0], heads, k.shape[-1], v.shape[-1], dtype=wide)
    runs = None if documents is None else document_runs(documents)
    given = (*(x.to(wide) for x in (q, k, v, g, step, skip, state)), runs, min(chunk, v.shape[1]))
    if torch.compiler.is_compiling():  # one operator of the graph, so that its size does not depend on the length
        out, after = torch.ops.forge_models.state_space(*given)
    else:
        out, after = _Scan.apply(*given)
    return out.to(v.dtype), after


def _side_by_side(x: Tensor) -> Tensor:
    """(G, r, N, C, width) -> (G, N, C, r * width): heads of one group side by side, for one product with its keys."""
    return x.permute(0, 2, 3, 1, 4).flatten(3)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """(G, N, C, r * width) -> (G, r, N, C, width)."""
    return x.unflatten(-1, (heads, -1)).permute(0, 3, 1, 2, 4)


def _chained(added: Tensor, first: Tensor, keep: Tensor, reverse: bool = False) -> Tensor:
    """Replaces what each chunk adds to a state by the state before it, in place; returns the state after the last one.

    Args:
        added: (G, N, width, r * head width).
        first: (G, width, r * head width) state before the first chunk.
        keep: (G, r, N, 1, 1) decay over each chunk.
        reverse: whether the chain begins with the last chunk.
    """
    heads, count = keep.shape[1], added.shape[1]
    state = first.clone()
    for n in reversed(range(count)) if reverse else range(count):
        before = state
        factors = keep[:, :, n].transpose(1, 2)  # (G, 1, r, 1)
        state = (before.unflatten(-1, (heads, -1)) * factors).flatten(2).add_(added[:, n])
        added[:, n] = before
    return state


def _states(parts: Chunks, written: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the states before each chunk, (G, N, dk, r * dv), and the last one, (G, dk, r * dv)."""
    size = written.shape[-2]
    added = parts.qk[..., size:, :].transpose(-1, -2) @ _side_by_side(written * parts.write)
    groups, heads = written.shape[:2]
    first = state.reshape(groups, heads, *state.shape[2:]).transpose(1, 2).flatten(2)
    return added, _chained(added, first, parts.keep)


def _weights(parts: Chunks) -> Tensor:
    """Returns Q K^T * D, (G, r, N, C, C)."""
    size = parts.v.shape[-2]
    return (parts.qk[..., :size, :] @ parts.qk[..., size:, :].transpose(-1, -2)).unsqueeze(1) * parts.decay


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor, skip: Tensor, state: Tensor, documents: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """Returns outputs and the state after the last token."""
    parts = split(q, k, v, g, step, documents, chunk)
    heads, size = parts.v.shape[1], parts.v.shape[-2]
    written = parts.v * parts.beta
    states, last = _states(parts, written, state)
    out = _weights(parts) @ written
    out.addcmul_(parts.read, _by_head(parts.qk[..., :size, :] @ states, heads))
    out.addcmul_(parts.v, _of_heads(skip, parts))
    after = last.unflatten(-1, (heads, -1)).transpose(1, 2).reshape(state.shape)
    return to_rows(out, v.shape[0], v.shape[1]).contiguous(), after


def _of_heads(skip: Tensor, parts: Chunks) -> Tensor:
    """(heads,) -> (G, r, 1, 1, 1)."""
    groups, heads = parts.v.shape[:2]
    return skip.view(-1, heads).repeat(groups * heads // len(skip), 1)[..., None, None, None]


def _backward(grads: Sequence[Tensor], kept: Sequence[Tensor], documents: Tensor | None, chunk: int) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k, v, g, step, skip and the first state; `kept` has outputs and last state, then these."""
    grad, state_grad = grads
    out, _, q, k, v, g, step, skip, state = kept
    parts = split(q, k, v, g, step, documents, chunk)
    groups, heads, _, size, _ = parts.v.shape
    rows, length, key_heads = v.shape[0], v.shape[1], k.shape[2]
    queries, keys = parts.qk[..., :size, :], parts.qk[..., size:, :]
    out_grad, written = chunked(grad, chunk, key_heads), parts.v * parts.beta
    states, last = _states(parts, written, state)
    read_grad, kept_values = _side_by_side(out_grad * parts.read), _side_by_side(written * parts.write)
    # the gradients of the states form the same chain, backwards
    next_grads = queries.transpose(-1, -2) @ read_grad
    state_grads = state_grad.reshape(groups, heads, *state_grad.shape[2:]).transpose(1, 2).flatten(2)
    first = _chained(next_grads, state_grads, parts.keep, reverse=True)
    after_each = torch.cat((states[:, 1:], last.unsqueeze(1)), 1)
    at_end = (after_each * next_grads).unflatten(-1, (heads, -1)).sum((2, 4)).transpose(1, 2)[..., None, None]
    del after_each
    written_grad = _weights(parts).transpose(-1, -2) @ out_grad
    written_grad.addcmul_(parts.write, _by_head(keys @ next_grads, heads))
    products = (out_grad @ written.transpose(-1, -2)).mul_(parts.decay).sum(1)
    query_grad = (products @ keys).add_(read_grad @ states.transpose(-1, -2))
    key_grad = (products.transpose(-1, -2) @ queries).add_(kept_values @ next_grads.transpose(-1, -2))
    factor = _of_heads(skip, parts)
    through = (out_grad * parts.v).sum(-1, keepdim=True)  # of the skip, which does not decay
    c_grad = (out_grad * chunked(out, chunk, key_heads) - written * written_grad).sum(-1, keepdim=True) - factor * through
    g_grad = log_decay_gradient(c_grad, at_end, parts.same)
    step_grad = (written_grad * parts.v).sum(-1, keepdim=True)
    value_grad = (written_grad * parts.beta).addcmul_(out_grad, factor)
    skip_grad = through.sum((2, 3, 4)).view(rows, -1).sum(0)
    found = (query_grad[:, None], key_grad[:, None], value_grad, g_grad, step_grad)
    dq, dk, dv, dg, dstep = (to_rows(x, rows, length) for x in found)
    first = first.unflatten(-1, (heads, -1)).transpose(1, 2).reshape(state.shape)
    return dq, dk, dv, dg.squeeze(-1), dstep.squeeze(-1), skip_grad, first


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        out, after = _forward(*given)
        *inputs, chunk = given
        ctx.save_for_backward(out, after, *inputs)
        ctx.chunk = chunk
        return out, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *kept, documents = ctx.saved_tensors
        return (*_backward(grads, kept, documents, ctx.chunk), None, None)


@torch.library.custom_op("forge_models::state_space", mutates_args=())
def _operator(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor, skip: Tensor, state: Tensor, documents: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """`_forward` as one operator of a compiled graph."""
    return _forward(q, k, v, g, step, skip, state, documents, chunk)


@_operator.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor, skip: Tensor, state: Tensor, documents: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    del q, k, g, step, skip, documents, chunk
    return v.new_empty(v.shape), state.new_empty(state.shape)


@torch.library.custom_op("forge_models::state_space_backward", mutates_args=())
def _backward_operator(grads: list[Tensor], kept: list[Tensor], documents: Tensor | None, chunk: int) -> list[Tensor]:
    """`_backward` as one operator."""
    return [grad.contiguous() for grad in _backward(grads, kept, documents, chunk)]


@_backward_operator.register_fake
def _(grads: list[Tensor], kept: list[Tensor], documents: Tensor | None, chunk: int) -> list[Tensor]:
    del grads, documents, chunk
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in kept[2:]]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *given, chunk = inputs
    ctx.save_for_backward(*output, *given)
    ctx.chunk = chunk


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    *kept, documents = ctx.saved_tensors
    return (*torch.ops.forge_models.state_space_backward(list(grads), kept, documents, ctx.chunk), None, None)


_operator.register_autograd(_differentiate, setup_context=_keep)
