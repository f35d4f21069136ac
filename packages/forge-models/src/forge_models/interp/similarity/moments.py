"""Sums of pairs of activations from which every linear measure follows exactly, in memory that does not grow with tokens.

With rows x_i (width p) and y_i (width q) of the same n tokens, a_i = |x_i|^2 and b_i = |y_i|^2, what is kept is n, the sums
of x, y, a, b, a^2, b^2, ab, ax, ay, bx, by, and the products X'X, Y'Y, X'Y; all in fp64. Sums of batches, ranks and splits are
added; their order changes the last bits only.

Rows are counted from an origin near their mean, which no measure depends on: the stream of a model has dimensions whose mean is
a thousand times their spread, and fourth powers of that would leave no digits. With x = x' + d the sums about another origin
follow: a' = a + 2 d x + |d|^2, and the others by multiplying out.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from forge_models.interp.listing import InterpError


@dataclass(frozen=True)
class Moments:
    """Sums over the rows of a pair (X, Y), counted from an origin. Make it with `of` or `zero`, and add.

    Attributes:
        x_origin: (p,); `y_origin` (q,). What is subtracted from every row.
        n: scalar, number of rows.
        x: (p,) sum of the rows of X, and so on for `y`.
        xx: (p, p) X'X; `yy` (q, q); `xy` (p, q) X'Y.
        a: scalar, sum of a; `b` of b; `aa`, `bb`, `ab` of their products.
        ax: (p,) sum of a x; `bx` (p,), `ay` (q,), `by` (q,).
    """

    x_origin: Tensor
    y_origin: Tensor
    n: Tensor
    x: Tensor
    y: Tensor
    xx: Tensor
    yy: Tensor
    xy: Tensor
    a: Tensor
    b: Tensor
    aa: Tensor
    bb: Tensor
    ab: Tensor
    ax: Tensor
    bx: Tensor
    ay: Tensor
    by: Tensor

    @classmethod
    def zero(cls, x_width: int, y_width: int, device: torch.device | str = "cpu") -> "Moments":
        """Of no rows."""
        return cls.of(*(torch.zeros(0, width, device=device) for width in (x_width, y_width)))

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> "Moments":
        """Of some rows: x (..., p) and y (..., q) of the same tokens, of any dtype.

        Raises:
            InterpError: they are not of the same tokens, or hold values that are not finite.
        """
        if x.shape[:-1] != y.shape[:-1] or x.dim() < 2:
            raise InterpError(f"x {tuple(x.shape)} and y {tuple(y.shape)} are not of the same tokens")
        x, y = (value.detach().reshape(-1, value.shape[-1]).double() for value in (x, y))
        x_mean, y_mean = (one.mean(0) if len(one) else one.new_zeros(one.shape[1]) for one in (x, y))
        x, y = x - x_mean, y - y_mean
        a, b = x.square().sum(1), y.square().sum(1)
        if not bool((a.sum() + b.sum()).isfinite()):
            raise InterpError("activations hold values that are not finite, and so would every similarity")
        return cls(
            x_origin=x_mean,
            y_origin=y_mean,
            n=torch.full((), len(x), dtype=torch.float64, device=x.device),
            x=x.sum(0),
            y=y.sum(0),
            xx=x.T @ x,
            yy=y.T @ y,
            xy=x.T @ y,
            a=a.sum(),
            b=b.sum(),
            aa=a @ a,
            bb=b @ b,
            ab=a @ b,
            ax=a @ x,
            bx=b @ x,
            ay=a @ y,
            by=b @ y,
        )

    def __add__(self, other: "Moments") -> "Moments":
        """Of the rows of both."""
        if self.xy.shape != other.xy.shape:
            raise InterpError(f"sums of widths {tuple(self.xy.shape)} and {tuple(other.xy.shape)} cannot be added")
        n = (self.n + other.n).clamp(min=1)
        mean = [getattr(self, one) * (self.n / n) + getattr(other, one) * (other.n / n) for one in _ORIGINS]
        left, right = self.about(*mean), other.about(*mean)
        return replace(left, **{name: getattr(left, name) + getattr(right, name) for name in _SUMS})

    def about(self, x_origin: Tensor, y_origin: Tensor) -> "Moments":
        """The same rows, counted from another origin."""
        m, d, e = self, self.x_origin - x_origin, self.y_origin - y_origin
        dd, ee, dx, ey = d @ d, e @ e, d @ self.x, e @ self.y
        return Moments(
            x_origin=x_origin,
            y_origin=y_origin,
            n=m.n,
            x=m.x + m.n * d,
            y=m.y + m.n * e,
            xx=_moved(m.xx, m.x, m.x, d, d, m.n),
            yy=_moved(m.yy, m.y, m.y, e, e, m.n),
            xy=_moved(m.xy, m.x, m.y, d, e, m.n),
            a=m.a + 2 * dx + m.n * dd,
            b=m.b + 2 * ey + m.n * ee,
            aa=m.aa + 4 * (d @ m.ax) + 2 * dd * m.a + 4 * (d @ m.xx @ d) + 4 * dd * dx + m.n * dd * dd,
            bb=m.bb + 4 * (e @ m.by) + 2 * ee * m.b + 4 * (e @ m.yy @ e) + 4 * ee * ey + m.n * ee * ee,
            ab=m.ab
            + (2 * (e @ m.ay) + ee * m.a + 2 * (d @ m.bx) + dd * m.b)
            + (4 * (d @ m.xy @ e) + 2 * ee * dx + 2 * dd * ey + m.n * dd * ee),
            ax=m.ax + m.a * d + 2 * (m.xx @ d) + 2 * dx * d + dd * m.x + m.n * dd * d,
            bx=m.bx + m.b * d + 2 * (m.xy @ e) + 2 * ey * d + ee * m.x + m.n * ee * d,
            ay=m.ay + m.a * e + 2 * (d @ m.xy) + 2 * dx * e + dd * m.y + m.n * dd * e,
            by=m.by + m.b * e + 2 * (m.yy @ e) + 2 * ey * e + ee * m.y + m.n * ee * e,
        )

    def reduced(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> "Moments":
        """Of the rows of all ranks: they agree on an origin, and exchange one fp64 vector.

        `sum_over_ranks` adds a vector up, such as `over(group)`.
        """
        origins = [self.n * getattr(self, name) for name in _ORIGINS]
        n, *sums = sum_over_ranks(torch.cat([self.n.reshape(1), *origins])).split([1, *map(len, origins)])
        here = self.about(*(one / n.clamp(min=1) for one in sums))
        parts = [getattr(here, name) for name in _SUMS]
        whole = sum_over_ranks(torch.cat([part.reshape(-1) for part in parts])).split([part.numel() for part in parts])
        return replace(here, **{name: new.view_as(old) for name, new, old in zip(_SUMS, whole, parts, strict=True)})

    def swapped(self) -> "Moments":
        """Of the pair (Y, X)."""
        other = {"x": "y", "y": "x", "xx": "yy", "yy": "xx", "a": "b", "b": "a", "aa": "bb", "bb": "aa"}
        other |= {"ax": "by", "by": "ax", "bx": "ay", "ay": "bx", "x_origin": "y_origin", "y_origin": "x_origin"}
        return replace(self, **{name: getattr(self, source) for name, source in other.items()}, xy=self.xy.T)

    def covariances(self) -> tuple[Tensor, Tensor, Tensor]:
        """Xc'Xc, Yc'Yc and Xc'Yc of the rows without their mean; not divided by n.

        Raises:
            InterpError: without rows.
        """
        if not float(self.n):
            raise InterpError("sums of no rows compare nothing")
        outer = ((self.x, self.x), (self.y, self.y), (self.x, self.y))
        sums = (self.xx, self.yy, self.xy)
        xx, yy, xy = (one - torch.outer(u, v) / self.n for one, (u, v) in zip(sums, outer, strict=True))
        return xx, yy, xy


_ORIGINS = ("x_origin", "y_origin")
_SUMS = tuple(field.name for field in fields(Moments) if field.name not in _ORIGINS)


def _moved(uv: Tensor, u: Tensor, v: Tensor, d: Tensor, e: Tensor, n: Tensor) -> Tensor:
    """Sum of (u + d)(v + e)'."""
    return uv + torch.outer(u, e) + torch.outer(d, v) + n * torch.outer(d, e)


def over(group: object | None = None) -> Callable[[Tensor], Tensor]:
    """Collective: adds a vector up over the ranks of a process group of torch.distributed; None = all."""

    def add(vector: Tensor) -> Tensor:
        from torch import distributed

        vector = vector.clone()
        distributed.all_reduce(vector, group=group)  # type: ignore[arg-type]
        return vector

    return add
