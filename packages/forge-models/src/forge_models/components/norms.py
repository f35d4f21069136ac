"""Norms, chosen inside `[model]`: `norm = { name = "rmsnorm", eps = 1e-6 }`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt

from forge_core.component import IDENTITY, Component

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn


@dataclass(frozen=True, kw_only=True)
class RMSNorm(Component):
    """x / sqrt(mean(x^2) + eps) * (offset + weight), with statistics in fp32 (Zhang and Sennrich, 2019)."""

    key_class: ClassVar = IDENTITY

    eps: Annotated[float, Gt(0)] = 1e-5
    """Added to the mean square."""
    offset: Literal[0, 1] = 0
    """Added to the weight; with 1 (Gemma) weights start at zero, with 0 at one."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[RMSNorm]":
        """Both offsets."""
        return (cls(), cls(offset=1))

    def build(self, dim: int) -> "nn.Module":
        from forge_models.blocks import norm

        return norm.RMSNorm(dim, eps=self.eps, offset=self.offset)


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Component):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with statistics in fp32 (Ba et al., 2016)."""

    key_class: ClassVar = IDENTITY

    eps: Annotated[float, Gt(0)] = 1e-5
    """Added to the variance."""
    bias: bool = True
    """A learned bias is added."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[LayerNorm]":
        """With and without a bias."""
        return (cls(), cls(bias=False))

    def build(self, dim: int) -> "nn.Module":
        from forge_models.blocks import norm

        return norm.LayerNorm(dim, eps=self.eps, bias=self.bias)
