"""Limits that come from the numbers, so that they hold with every instruction set and every number of threads.

A sum in floating point depends on the order of its terms, and the order on the width of the vectors, on the library of
matrix products and on how many threads share the work. A fixed limit such as 1e-5 for fp32 holds on the machine where it
was chosen: the same test was off by 1.9e-5 on another. Two ways remain. Where both sides can compute in fp64 throughout,
compare them there: a defect is as large as before and the noise 1e9 times smaller (`wide`). Where the narrow format is what
is tested, measure both sides against fp64 and let ours be at most twice as far from it as theirs (`assert_no_farther`).

While `FORGE_MARGINS` names a file, `harness/margins.py` notes how much of its limit each comparison used.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

TIMES = 2.0
"""How much farther from the exact result than the other side ours may be."""

listeners: list[Callable[[float, float, str], None]] = []
"""Called with (value, limit, what) of every comparison made here."""


def below(value: float, limit: float, what: str = "") -> bool:
    """Whether a measured error is within its limit. Not a number is not."""
    for heard in listeners:
        heard(float(value), float(limit), what)
    return bool(value <= limit)


def assert_no_farther(ours: Tensor, theirs: Tensor, exact: Tensor, what: str = "") -> None:
    """`ours` is at most twice as far from `exact` as `theirs` is, each a tensor of the same shape, in the 2-norm.

    The norm averages the rounding of many elements, so its ratio of two sides hardly depends on luck, which a largest
    element does; a single wrong element still stands out, being thousands of times larger than rounding. Neither side can
    be asked for more than its format resolves, so one rounding of every element is granted. `exact` must come from fp64
    throughout: an error that it shares with `ours` would pass.
    """
    assert ours.shape == theirs.shape == exact.shape, (ours.shape, theirs.shape, exact.shape)
    assert exact.dtype == torch.float64, "the exact side is computed in fp64"
    assert ours.dtype != torch.float64, "in fp64 compare with a limit of 1e-10: there is nothing wider to measure against"
    off, other, scale = (float(x.detach().double().norm()) for x in (ours.double() - exact, theirs.double() - exact, exact))
    limit = TIMES * max(other, torch.finfo(ours.dtype).eps * scale)
    assert below(off, limit, what), (
        f"{what or 'ours'} is {off:.2e} from fp64, theirs {other:.2e}; at most {limit:.2e} are granted"
    )


class _Wide(TorchDispatchMode):
    """fp64 wherever an operator is asked for fp32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") == torch.float32:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


@contextmanager
def wide() -> Iterator[None]:
    """Everything made inside is fp64 where its code says fp32: angles of rotations, norms, softmax of routers and scores.

    With it a module of another library in fp64 computes in fp64 throughout, and is an exact reference.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)
