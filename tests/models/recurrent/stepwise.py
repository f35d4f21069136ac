"""The gated delta rule one token at a time, from its definition, for comparison."""

import torch
from torch import Tensor


def stepwise(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The outputs and the last state; arguments as of `gated_delta_rule`."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    outputs, rows = [], []
    for row in range(v.shape[0]):
        s = v.new_zeros(v.shape[2], k.shape[3], v.shape[3]) if state is None else state[row]
        for t in range(v.shape[1]):
            if documents is not None and t and documents[row, t] != documents[row, t - 1]:
                s = torch.zeros_like(s)
            s = g[row, t].exp()[:, None, None] * s
            error = v[row, t] - torch.einsum("hkv,hk->hv", s, k[row, t])
            s = s + torch.einsum("hk,hv->hkv", k[row, t], beta[row, t][:, None] * error)
            outputs.append(torch.einsum("hkv,hk->hv", s, q[row, t]))
        rows.append(s)
    return torch.stack(outputs).unflatten(0, (v.shape[0], -1)), torch.stack(rows)


def inputs(
    rows: int, length: int, key_heads: int = 2, heads: int = 4, widths: tuple[int, int] = (5, 3), seed: int = 0
) -> list[Tensor]:
    """q, k, v, g and beta in fp64, with gradients; k has length 1, g is below 0, beta within 0 and 2."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, k = normal(rows, length, key_heads, widths[0]), normal(rows, length, key_heads, widths[0])
    v, g = normal(rows, length, heads, widths[1]), -normal(rows, length, heads).exp()
    made = [q, k / k.norm(dim=-1, keepdim=True), v, g * 0.3, 2 * normal(rows, length, heads).sigmoid()]
    return [x.requires_grad_() for x in made]
