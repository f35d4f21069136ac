"""Several residual streams instead of one: manifold-constrained hyper-connections (mHC; Xie et al., 2025), as in DeepSeek-V4.

A token has n streams x_1 ... x_n of width D, which begin as copies of its embedding. With s = x / rms(x), all n D numbers of the
token divided by their root mean square, each part f of a block (attention, or feed-forward layer, with its norms) has three
products W s of its own, scales a and biases b:

    pre  = sigmoid(a_1 W_1 s + b_1) + eps                   n numbers
    post = 2 sigmoid(a_2 W_2 s + b_2)                       n numbers
    mix  = sinkhorn(softmax(a_3 W_3 s + b_3) + eps)         n x n numbers

    x_k <- post_k f(sum over j of pre_j x_j) + sum over j of mix_jk x_j

`sinkhorn` divides columns by their sums + eps, then rows and columns in turn, so that in the end mix is close to a doubly
stochastic matrix, which does not make streams larger. Before the final norm, the streams are summed with weights like `pre`.
Weights are computed in fp32 or wider; products with `post` and `mix` have the dtype of the streams.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forge_core.specs import Init, TensorSpec
from forge_models.blocks.layers import unfilled
from forge_models.shape import DecoderShape


class StreamWeights(nn.Module):
    """Computes n weights `pre` for each token, and reads the input of a part of the model with them."""

    rows: tuple[int, ...]
    """Numbers of outputs of the matrices that `weight` contains, each of which has one scale."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        streams: Any = shape.streams
        self.count, self.eps, self.std = streams.count, streams.eps, shape.init_std
        self.norm_eps = streams.resolved_norm_eps(shape.norm)
        self.rows = self._rows()
        self.weight = unfilled(sum(self.rows), streams.count * shape.dim)
        self.bias = unfilled(sum(self.rows))
        self.scale = unfilled(len(self.rows))

    def _rows(self) -> tuple[int, ...]:
        return (self.count,)

    def forward(self, x: Tensor) -> Tensor:
        """Streams (B, T, n, D) -> their weighted sum (B, T, D)."""
        wide = _wide(x)
        return self._read(wide, *self._logits(wide)).to(x.dtype)

    def _logits(self, wide: Tensor) -> list[Tensor]:
        """Returns scale * (weight @ s) + bias, (B, T, rows) for each matrix."""
        flat = wide.flatten(2)
        # The root mean square is one number for each token, so the product is made first, of what the token has anyway.
        made = F.linear(flat, _wide(self.weight)) * (flat.square().mean(-1, keepdim=True) + self.norm_eps).rsqrt()
        parts = zip(made.split(self.rows, -1), _wide(self.scale), _wide(self.bias).split(self.rows), strict=True)
        return [part * scale + bias for part, scale, bias in parts]

    def _read(self, wide: Tensor, logits: Tensor) -> Tensor:
        pre = logits.sigmoid() + self.eps
        return (pre.unsqueeze(-2) @ wide).squeeze(-2)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs: biases start at zero and scales at one."""
        return {
            "weight": TensorSpec((None, None), Init("normal", self.std), "matrix", fused=self.rows if len(self.rows) > 1 else ()),
            "bias": TensorSpec((None,), Init("zeros"), "vector"),
            "scale": TensorSpec((None,), Init("ones"), "vector"),
        }


class StreamConnection(StreamWeights):
    """Reads the input of one part of a block from the streams, and adds the output of the part to them."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__(shape)
        streams: Any = shape.streams
        self.sinkhorn = streams.sinkhorn

    def _rows(self) -> tuple[int, ...]:
        return (self.count, self.count, self.count**2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Streams (B, T, n, D) -> the part's input (B, T, D), and post (B, T, n) and mix (B, T, n, n) for `joined`."""
        wide = _wide(x)
        pre, post, mix = self._logits(wide)
        mixing = doubly_stochastic(mix.unflatten(-1, (self.count, self.count)), self.sinkhorn, self.eps)
        return self._read(wide, pre).to(x.dtype), (2 * post.sigmoid()).to(x.dtype), mixing.to(x.dtype)


def joined(x: Tensor, added: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """Returns the streams (B, T, n, D) after a part whose output is `added` (B, T, D)."""
    return post.unsqueeze(-1) * added.unsqueeze(-2) + mix.transpose(-1, -2) @ x


def doubly_stochastic(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Returns nonnegative matrices (..., n, n) whose columns sum to one, and whose rows nearly do (Sinkhorn and Knopp, 1967)."""
    if torch.compiler.is_compiling():  # a compiler decides by itself what to keep
        return _normalized(logits.softmax(-1) + eps, iterations, eps)[-1][0]
    return _Sinkhorn.apply(logits, iterations, eps)


def _normalized(x: Tensor, iterations: int, eps: float) -> list[tuple[Tensor, Tensor, int]]:
    """Returns each step of the iteration: matrices, the sums by which they were divided, and the dimension of the sums."""
    steps = []
    for dim in (-2, *(-1, -2) * (iterations - 1)):
        sums = x.sum(dim, keepdim=True) + eps
        x = x / sums
        steps.append((x, sums, dim))
    return steps


class _Sinkhorn(torch.autograd.Function):
    """Keeps the logits only, and iterates again in the backward: autograd would keep the matrices of every iteration."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, eps: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.iterations, ctx.eps = iterations, eps
        return _normalized(logits.softmax(-1) + eps, iterations, eps)[-1][0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (logits,) = ctx.saved_tensors
        shares, grad = logits.softmax(-1), grads[0]
        # y = x / (sum(x) + eps): dx = (g - sum(g y)) / (sum(x) + eps)
        for x, sums, dim in reversed(_normalized(shares + ctx.eps, ctx.iterations, ctx.eps)):
            grad = (grad - (grad * x).sum(dim, keepdim=True)) / sums
        return shares * (grad - (grad * shares).sum(-1, keepdim=True)), None, None


def _wide(x: Tensor) -> Tensor:
    """Converts to fp32, or keeps a wider dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
