"""Notes how much of its limit each comparison of a test used; on while the environment variable FORGE_MARGINS names a file.

Comparisons are found where they are made, not listed: `torch.testing.assert_close`, `numpy.testing.assert_allclose`,
`pytest.approx`, the parity gate, and those of `harness/closeness.py`. A line of the file is a test with the largest share
of a limit that one of its comparisons used. Shares above 1 are left out: such a comparison was meant to fail, or the test
did.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

# What torch.testing.assert_close takes where no limit is given, by the dtype's name: (rtol, atol).
_DEFAULTS = {"float16": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float32": (1.3e-6, 1e-5), "float64": (1e-7, 1e-7)}


class Margins:
    """A plugin of pytest that writes to `path`, one line a test."""

    def __init__(self, path: Path) -> None:
        self._path, self._worst, self._undo = path, 0.0, pytest.MonkeyPatch()

    def note(self, value: float, limit: float, what: str = "") -> None:
        """An error and the limit that it was held to."""
        if 0 < limit < float("inf") and value <= limit:
            self._worst = max(self._worst, value / limit)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._worst = 0.0
        try:
            yield
        finally:
            if self._worst > 0:
                with self._path.open("a") as file:
                    file.write(json.dumps([item.nodeid, self._worst]) + "\n")

    def pytest_configure(self) -> None:
        import numpy
        import torch

        from forge_parallel.verify.parity import Difference
        from forge_parallel.verify.proofs import TOLERANCE
        from harness import closeness

        assert_close, allclose, accepted = torch.testing.assert_close, numpy.testing.assert_allclose, Difference.accepted
        approx: Any = type(pytest.approx(1.0))
        equal = approx.__eq__

        def close(actual: Any, expected: Any, **options: Any) -> None:
            self._compare(actual, expected, options.get("rtol"), options.get("atol"))
            assert_close(actual, expected, **options)

        def numpy_close(actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 0, **options: Any) -> None:
            self._compare(torch.as_tensor(actual), torch.as_tensor(desired), rtol, atol)
            allclose(actual, desired, rtol=rtol, atol=atol, **options)

        def approximately(expected: Any, actual: Any) -> bool:
            if isinstance(actual, float):
                self.note(abs(actual - expected.expected), expected.tolerance)
            return equal(expected, actual)

        def passed(found: Difference, state: str) -> bool:
            limit = TOLERANCE[state]
            self.note(found.loss, min(limit, TOLERANCE["fp32"]))
            for error in (found.norm, found.gradients, *([found.weights] if state == "fp64" else [])):
                self.note(error, limit)
            return accepted(found, state)

        self._undo.setattr(torch.testing, "assert_close", close)
        self._undo.setattr(numpy.testing, "assert_allclose", numpy_close)
        self._undo.setattr(approx, "__eq__", approximately)
        self._undo.setattr(Difference, "accepted", passed)
        self._undo.setattr(closeness, "listeners", [self.note])

    def pytest_unconfigure(self) -> None:
        self._undo.undo()

    def _compare(self, actual: Any, expected: Any, rtol: float | None, atol: float | None) -> None:
        import torch

        if isinstance(expected, Mapping):
            actual, expected = [*actual.values()], [*expected.values()]
        if isinstance(expected, (list, tuple)):
            for one, other in zip(actual, expected, strict=False):
                self._compare(one, other, rtol, atol)
            return
        if not isinstance(expected, torch.Tensor) or not expected.is_floating_point() or not expected.numel():
            return
        if actual.shape != expected.shape or actual.is_meta:
            return
        if rtol is None or atol is None:
            rtol, atol = _DEFAULTS[str(expected.dtype).removeprefix("torch.")]
        one, other = actual.detach().double(), expected.detach().double()
        limits = atol + rtol * other.abs()
        used = ((one - other).abs() / limits)[limits > 0]
        if used.numel():
            self.note(float(used.nan_to_num(0.0).max()), 1.0)


def plugin() -> Margins | None:
    """The plugin where FORGE_MARGINS asks for it."""
    path = os.environ.get("FORGE_MARGINS")
    return Margins(Path(path)) if path else None
