"""Rotary position embedding (Su et al., 2021), half-split: dimension i is rotated with dimension i + width / 2."""

from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_models.shape import Rope


class Rotation(NamedTuple):
    """cos and sin of every angle, fp32, (T, width / 2) or (B, 1, T, width / 2); computed once per forward for equal layers.
    `query_factor`, fp32, (T, 1) or (B, 1, T, 1), multiplies the query of every position; None: 1."""

    cos: Tensor
    sin: Tensor
    query_factor: Tensor | None = None


class Temperature(NamedTuple):
    """A factor on queries that grows with their position p: 1 + strength * ln(1 + floor((p + shift) / length))."""

    strength: float
    length: int
    shift: int = 0

    def factor(self, positions: Tensor) -> Tensor:
        """(...) integer positions -> (...) fp32."""
        return 1 + self.strength * ((positions + self.shift).to(torch.float32) / self.length).floor().log1p()


@dataclass(frozen=True)
class Rotary:
    """Converts positions to angles. Layers with equal `Rotary` objects share one rotation per forward.

    Attributes:
        width: number of rotated dimensions, the first ones of each head; even.
        rope: base and scaling.
        temperature: factor on queries; None: 1.
    """

    width: int
    rope: Rope
    temperature: Temperature | None = None

    def __call__(self, positions: Tensor, documents: Tensor | None = None) -> Rotation:
        """Returns the rotation of (T,) or (B, T) integer positions, in fp32.

        `dynamic` scaling depends on the length of each document, which is its largest position plus one, so that a packed
        document gets the same angles as alone. Each document must be a run of equal numbers in `documents`.
        """
        if self.rope.scaling == "dynamic":
            frequencies = self._dynamic(positions, documents)
        else:
            frequencies = frequencies_of(self.rope, self.width, positions.device)
        angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
        query_factor = None if self.temperature is None else self.temperature.factor(positions).unsqueeze(-1)
        if positions.dim() == 2:
            angles = angles.unsqueeze(1)
            query_factor = None if query_factor is None else query_factor.unsqueeze(1)
        factor = attention_factor(self.rope)
        cos, sin = angles.cos(), angles.sin()
        return Rotation(cos, sin, query_factor) if factor == 1 else Rotation(cos * factor, sin * factor, query_factor)

    def _dynamic(self, positions: Tensor, documents: Tensor | None) -> Tensor:
        """Returns frequencies (1 or T, width / 2) or (B, 1 or T, width / 2). If a sequence of length s is longer than the
        original n, theta grows to theta * (factor * s / n - (factor - 1))^(width / (width - 2))."""
        rope = self.rope
        assert rope.factor is not None and rope.original_max_length is not None
        if documents is None:
            longest = positions.amax(-1, keepdim=True)
        else:
            at = positions.expand(documents.shape).to(torch.int64)
            runs = (documents.diff(dim=-1, prepend=documents[:, :1]) != 0).cumsum(-1)
            longest = torch.zeros_like(at).scatter_reduce(-1, runs, at, "amax").gather(-1, runs)
        length = (longest + 1).clamp(min=rope.original_max_length).to(torch.float32)
        stretch = rope.factor * length / rope.original_max_length - (rope.factor - 1)
        theta = rope.theta * stretch ** (self.width / (self.width - 2))
        return 1.0 / theta.unsqueeze(-1) ** _exponents(self.width, positions.device)


def frequencies_of(rope: Rope, width: int, device: torch.device) -> Tensor:
    """Returns radians per position, (width / 2,) fp32, for a scaling that does not depend on the sequence length."""
    growth = rope.theta ** _exponents(width, device)
    plain = 1.0 / growth
    if rope.proportion != 1:
        turning = torch.arange(width // 2, device=device) < rope.proportion * width // 2
        plain = torch.where(turning, plain, 0.0)
    if rope.factor is None or rope.scaling == "none":
        return plain
    if rope.scaling == "linear":
        return plain / rope.factor
    assert rope.original_max_length is not None
    # Keep the order of operations: a difference of one bit in a frequency is 1e-4 radians at position 1000.
    if rope.scaling == "llama3":
        turns = rope.original_max_length / (2 * pi / plain)
        ramp = rope.high_freq_factor - rope.low_freq_factor
        over = turns - rope.low_freq_factor
        keep = (over / ramp).clamp(0, 1) if ramp else (over >= 0).to(over.dtype)
        return (1 - keep) * plain / rope.factor + keep * plain
    first, last = (_dimension(rope, width, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    last = last + 0.001 if first == last else last
    places = torch.arange(width // 2, dtype=torch.float32, device=device)
    keep = 1 - ((places - first) / (last - first)).clamp(0, 1)
    return 1.0 / (rope.factor * growth) * (1 - keep) + plain * keep


def attention_factor(rope: Rope) -> float:
    """Returns the factor by which YaRN multiplies cosines and sines; attention scores grow by its square."""
    if rope.scaling != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope, rope.mscale) / magnitude(rope, rope.mscale_all_dim)
    return magnitude(rope, 1.0)


def magnitude(rope: Rope, weight: float) -> float:
    """Returns 0.1 * weight * ln(factor) + 1, or 1 if nothing is stretched (Peng et al., 2023, section 3.4)."""
    factor = rope.factor or 1.0
    return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1.0


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates the first dimensions of `x` (B, heads, T, head_dim) by its positions; computes in fp32 and rounds once.

    The result and its gradient are stored as (B, T, heads, head_dim), the memory order of projections. Attention kernels keep
    the memory order of their inputs, so their output enters the next projection without a copy.
    """
    width = 2 * rotation.cos.shape[-1]
    if width < x.shape[-1]:
        turning, still = x.transpose(1, 2).split((width, x.shape[-1] - width), dim=-1)
        turned = rotate(turning.transpose(1, 2), rotation).transpose(1, 2)
        return torch.cat((turned, still), dim=-1).transpose(1, 2)
    cos, sin = rotation.cos, rotation.sin
    return _plain(x, cos, sin) if torch.compiler.is_compiling() else _Rotate.apply(x, cos, sin)


def _plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Computes the plain formula, which a compiler fuses."""
    first, second = x.transpose(1, 2).chunk(2, dim=-1)
    cos, sin = (angles.unsqueeze(1) if angles.dim() == 2 else angles.transpose(1, 2) for angles in (cos, sin))
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype).transpose(1, 2)


def _exponents(width: int, device: torch.device) -> Tensor:
    return torch.arange(0, width, 2, dtype=torch.float32, device=device) / width


def _dimension(rope: Rope, width: int, turns: float) -> float:
    """Returns the dimension, as a real number, that makes `turns` full turns over the original length."""
    assert rope.original_max_length is not None
    return width * log(rope.original_max_length / (turns * 2 * pi)) / (2 * log(rope.theta))


class _Rotate(torch.autograd.Function):
    """Rotation that saves only the angles and writes each half once; takes half the time of autograd's composition on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, cos.dtype))
    low, high = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=low).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=high).addcmul_(first, sin, value=direction)
    return out.to(x.dtype)
