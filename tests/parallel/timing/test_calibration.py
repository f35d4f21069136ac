"""Fits find the constants behind made-up speeds; published runs are predicted within the error that Forge states."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from scipy.stats import spearmanr

from forge_core.errors import ForgeError
from forge_core.layout import Layout
from forge_parallel.dryrun.sharding import USABLE, Load, needs, options
from forge_parallel.timing import Efficiency, Observation, fit, rank_correlation, score
from forge_parallel.timing.step_time import FREE

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "timing"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """The script that scores published runs."""
    sys.path.insert(0, str(BENCHMARK))
    try:
        import score as script  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(BENCHMARK))
    return script


def test_a_fit_finds_constants() -> None:
    """Speeds of a made-up model that depends on two constants; others have no influence and stay."""
    truth = replace(Efficiency(), matmul=0.5, network=0.3)

    def speed(efficiency: Efficiency, compute: float, sent: float) -> float:
        return 1 / (compute / efficiency.matmul + sent / efficiency.network)

    runs = [
        Observation(f"{compute}, {sent}", speed(truth, compute, sent), lambda e, c=compute, s=sent: speed(e, c, s))
        for compute, sent in ((1, 0), (1, 1), (1, 3), (4, 1), (0.1, 2))
    ]
    found = fit(runs, Efficiency(), penalty=1e-4)
    assert score(runs, found).largest < 0.03
    assert found.matmul == pytest.approx(0.5, rel=0.05)
    assert found.network == pytest.approx(0.3, rel=0.05)
    assert all(getattr(found, name) == getattr(Efficiency(), name) for name in FREE if name not in ("matmul", "network"))
    assert found.error is None, "the error on other runs is that of other constants"


def test_a_single_odd_run_does_not_bend_the_fit() -> None:
    runs = [Observation(str(index), speed, lambda e: 10 * e.matmul) for index, speed in enumerate((5, 5, 5, 5, 1))]
    assert fit(runs, Efficiency(), penalty=1e-4).matmul == pytest.approx(0.5, rel=0.03)


def test_nothing_to_fit() -> None:
    with pytest.raises(ForgeError, match="no measured run"):
        fit([], Efficiency())
    for speed in (0.0, float("nan"), -1.0):
        with pytest.raises(ForgeError, match="is not a speed"):
            fit([Observation("run", speed, lambda e: 1.0)], Efficiency())


def test_rank_correlation_is_spearmans() -> None:
    for first, second in (([1, 2, 3, 4], [2, 1, 4, 3]), ([1, 1, 2, 5], [3, 2, 2, 1]), ([1, 2, 3], [10, 20, 30])):
        assert rank_correlation(first, second) == pytest.approx(spearmanr(first, second).statistic)
    with pytest.raises(ForgeError, match="one length"):
        rank_correlation([1], [1, 2])


def test_published_runs(benchmark: ModuleType) -> None:
    """The stated error is that on rows that the constants were not fitted to. FSDP alone is faster than tensor parallelism."""
    table = [row for row in benchmark.rows() if benchmark.safe(row)]
    held = [benchmark.observation(row) for row in table if not row.fitted]
    found, stated = score(held, Efficiency()), Efficiency().error
    assert stated is not None
    assert found.runs == stated.runs
    assert round(found.median, 3) == stated.median
    assert round(found.largest, 3) == stated.largest
    for model in ("llama3-8b", "dense-13b"):
        runs = [row for row in table if row.model == model and row.framework == "kempnerforge"]
        alone, split = (
            [row.modeled(Efficiency()).tokens_per_second for row in runs if (row.layout.tp > 1) is tp] for tp in (False, True)
        )
        assert min(alone) > max(split)
        named = {row.name: row for row in runs}.values()
        measured, modeled = zip(*((row.measured, row.modeled(Efficiency()).tokens_per_second) for row in named), strict=True)
        assert rank_correlation(measured, modeled) >= 0.9


def test_half_of_the_rows_is_held_out(benchmark: ModuleType) -> None:
    table = list(benchmark.rows())
    for framework in {row.framework for row in table} - {"torchtitan"}:
        fitted = [row.fitted for row in table if row.framework == framework]
        assert abs(sum(fitted) - sum(not one for one in fitted)) <= 2
    assert not any(row.fitted for row in table if row.framework == "torchtitan")


@pytest.mark.slow
def test_the_shipped_constants_are_the_fitted_ones(benchmark: ModuleType) -> None:
    fitted = benchmark.fitted(list(benchmark.rows()))
    for name in FREE:
        assert getattr(Efficiency(), name) == round(getattr(fitted, name), 3), name


def test_175b_accumulates_where_gradients_are_reduced_each_time(benchmark: ModuleType) -> None:
    """On 360 H200 with tp 4, whole gradients in fp32 take 163 GiB, so two micro-batches fit only with `each`."""
    from published import described  # type: ignore[import-not-found]

    place = Layout.parse("dp90tp4")
    load = Load(tokens=8 * 4096, micro_batches=2, compute="bf16", state="bf16", recompute="full")
    found = needs(described("dense-175b").blueprint, place, load)
    last, each = (options(found, (reduce,), (None,))[0].memory for reduce in ("last", "each"))
    usable = USABLE * 141 * 2**30
    assert last > 141 * 2**30
    assert each < usable
    assert found.gradients == pytest.approx(175.0e9 / 4 * 4, rel=0.01)
