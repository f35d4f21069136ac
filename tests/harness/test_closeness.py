"""The instrument itself: what it grants, what it sees, and what it writes down."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness import closeness
from harness.closeness import assert_no_farther, below, wide
from harness.machines import close
from harness.margins import Margins


def products(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(40, 40, generator=generator, dtype=torch.float64) for _ in "ab")
    return a.float().to(dtype) @ b.float().to(dtype)


def test_x1_another_order_of_a_sum_is_granted_and_a_wrong_element_is_not() -> None:
    exact, theirs = products(torch.float64), products(torch.float32)
    ours = theirs + 1e-7 * theirs * torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    assert_no_farther(ours, theirs, exact)
    ours[3, 4] += 1e-3
    with pytest.raises(AssertionError, match=r"logits is .* from fp64, theirs"):
        assert_no_farther(ours, theirs, exact, "logits")


def test_one_rounding_is_granted_where_theirs_is_exact_and_nan_never() -> None:
    exact = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert_no_farther(torch.nextafter(exact.float(), torch.tensor(9.0)), exact.float(), exact)
    for wrong in (exact.float() * (1 + 1e-6), exact.float() * float("nan")):
        with pytest.raises(AssertionError):
            assert_no_farther(wrong, exact.float(), exact)


def test_a_side_that_is_not_what_its_name_says_is_refused() -> None:
    fp32, fp64 = torch.ones(2), torch.ones(2, dtype=torch.float64)
    for sides in ((fp32, fp32, fp32), (fp64, fp32, fp64), (fp32, fp32, fp64[:1])):
        with pytest.raises(AssertionError):
            assert_no_farther(*sides)


def test_wide_reaches_what_a_module_computes_in_fp32_and_ends() -> None:
    x = torch.full((3,), 1 / 3, dtype=torch.float64)

    def island(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(3, dtype=torch.float32).cos() + x.float() + x.to(torch.float32) + x.softmax(0, torch.float32)
        return angles + torch.ones(3)

    with wide():
        inside = island(x)
    assert inside.dtype == torch.float64
    assert torch.equal(inside, torch.arange(3, dtype=torch.float64).cos() + x + x + x.softmax(0) + 1)
    assert island(x).dtype == torch.float32


def test_every_kind_of_comparison_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closeness, "listeners", [])
    margins, found = Margins(tmp_path / "margins"), []
    margins.note = lambda value, limit, what="": found.append(value / limit)  # type: ignore[method-assign]
    margins.pytest_configure()
    try:
        torch.testing.assert_close([torch.tensor([1.0, 2.0])], [torch.tensor([1.5, 2.0])], rtol=0, atol=1)
        assert pytest.approx(1.0, abs=1) == 1.25
        assert pytest.approx([2.0], abs=1) == [2.75]
        assert below(0.125, 1)
    finally:
        margins.pytest_unconfigure()
    assert found == [0.5, 0.25, 0.75, 0.125]
    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    assert len(found) == 4


def test_x1_what_is_close_under_one_condition_and_varies_is_listed() -> None:
    margins = {"here": {"a": 0.3, "b": 0.9, "c": 0.5}, "avx2": {"a": 0.99, "b": 0.9, "c": 0.6, "d": 0.7}}
    assert list(close(margins)) == ["0.99 of a limit: a (here 0.30, avx2 0.99)", "0.70 of a limit: d (avx2 0.70)"]


def test_neighbors_end_with_the_process_that_started_them() -> None:
    program = "import os\nfrom harness.machines import busy\nwith busy(1): os._exit(0)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, timeout=60)
    assert ended.returncode == 0  # and its output was closed by all who had it, which is what `run` waits for
