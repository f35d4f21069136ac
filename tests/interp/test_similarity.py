"""One-pass measures against the direct formulas, on whole matrices; over splits and ranks; and cases whose answer is known."""

import pytest
import torch
from scipy.stats import pearsonr
from sklearn.cross_decomposition import CCA

from forge_interp.similarity import (
    MEASURES,
    KernelSums,
    Moments,
    canonical_correlations,
    cca,
    cka,
    gram,
    gram_cka_pairs,
    over,
    procrustes,
    rbf,
    rsa,
    svcca,
    unbiased_cka,
)
from forge_interp.tap_names import InterpError
from harness.siblings import fast


def pair(rows=200, p=12, q=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, p, generator=generator, dtype=torch.float64) * torch.linspace(0.2, 3, p, dtype=torch.float64) + 0.7
    noise = torch.randn(rows, q, generator=generator, dtype=torch.float64)
    return x, x[:, :q] @ torch.randn(min(p, q), q, generator=generator, dtype=torch.float64) + 2 * noise - 1.3


def direct(x, y):
    """Every measure from whole matrices, as its paper writes it."""
    n = len(x)
    one, center = torch.ones(n, dtype=torch.float64), torch.eye(n, dtype=torch.float64) - 1 / n
    k, l_ = center @ x @ x.T @ center, center @ y @ y.T @ center
    found = {"biased_cka": (k * l_).sum() / (k.norm() * l_.norm())}

    def hsic(a, b):
        a, b = a - a.diag().diag(), b - b.diag().diag()
        rest = one @ a @ one * (one @ b @ one) / ((n - 1) * (n - 2)) - 2 / (n - 2) * (one @ a @ b @ one)
        return ((a @ b).trace() + rest) / (n * (n - 3))

    a, b = x @ x.T, y @ y.T
    found["cka"] = hsic(a, b) / (hsic(a, a) * hsic(b, b)).sqrt()
    xc, yc = x - x.mean(0), y - y.mean(0)

    def correlations(share):
        bases = []
        for one_side in (xc, yc):
            left, sizes, _ = torch.linalg.svd(one_side, full_matrices=False)
            shares = sizes.square().cumsum(0) / sizes.square().sum()
            bases.append(left[:, : int((shares < share).sum()) + 1] if share < 1 else left)
        return torch.linalg.svdvals(bases[0].T @ bases[1])

    found["cca"], found["svcca"] = correlations(1.0).mean(), correlations(0.99).mean()
    wide = max(x.shape[1], y.shape[1])  # zeros fill up the narrower side
    xw, yw = (torch.nn.functional.pad(side, (0, wide - side.shape[1])) for side in (xc, yc))
    u, _, vt = torch.linalg.svd(yw.T @ xw)
    found["procrustes"] = (xw - yw @ (u @ vt)).square().sum()
    upper = torch.triu_indices(n, n, 1)
    distances = [torch.cdist(side, side).square()[upper[0], upper[1]] for side in (x, y)]
    found["rsa"] = torch.tensor(pearsonr(*(one.numpy() for one in distances)).statistic)
    return found


@pytest.mark.parametrize(("rows", "p", "q"), [(200, 12, 7), (60, 5, 5), (150, 6, 11)])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_one_pass_equals_the_direct_formulas(rows, p, q, splits):
    x, y = pair(rows, p, q)
    moments = Moments.zero(p, q)
    for part in torch.arange(rows).tensor_split(splits * 3):
        moments = moments + Moments.of(x[part], y[part])
    expected = direct(x, y)
    for name, measure in MEASURES.items():
        torch.testing.assert_close(measure(moments), expected[name], rtol=0, atol=1e-9, msg=name)
    torch.testing.assert_close(procrustes(moments), expected["procrustes"], rtol=1e-9, atol=0)
    for name, measure in MEASURES.items():
        torch.testing.assert_close(measure(moments.swapped()), expected[name], rtol=0, atol=1e-9, msg=name)


def test_canonical_correlations_equal_those_of_scikit_learn():
    x, y = pair(150, 4, 3)
    found = canonical_correlations(Moments.of(x, y))
    fitted = CCA(n_components=3, scale=False, max_iter=5000, tol=1e-12).fit(x.numpy(), y.numpy())
    u, v = fitted.transform(x.numpy(), y.numpy())
    expected = torch.tensor([pearsonr(u[:, one], v[:, one]).statistic for one in range(3)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MEASURES)
def test_rotation_and_scale_change_nothing_and_independence_is_seen(name):
    x, _ = pair(400, 6, 3)
    x = (x - x.mean(0)) / x.std(0) * torch.tensor([3.0, 2.5, 2.0, 1.6, 1.3, 1.1], dtype=torch.float64)
    turn, _ = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64))
    for same in (x, x @ turn, x * -7.5, x @ turn * 0.01 + 5):
        assert float(MEASURES[name](Moments.of(x, same))) == pytest.approx(1, abs=1e-9)
    alone = torch.randn(400, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    assert abs(float(MEASURES[name](Moments.of(x, alone)))) < (0.03 if name in ("cka", "rsa") else 0.25)


def test_a_mean_that_is_far_larger_than_the_spread_costs_no_digits():
    """As the stream of a language model has it."""
    x, y = pair()
    expected = direct(x, y)
    far = torch.zeros(12, dtype=torch.float64).index_fill(0, torch.tensor([3]), 4000.0)
    moments = Moments.zero(12, 7)
    for part in torch.arange(200).split(64):
        moments = moments + Moments.of(x[part] + far, y[part] - 500)
    for name, measure in MEASURES.items():
        torch.testing.assert_close(measure(moments), expected[name], rtol=0, atol=1e-9, msg=name)


def test_the_unbiased_cka_of_independent_rows_is_zero_on_average_and_the_biased_one_is_not():
    found = []
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(20, 8, generator=generator, dtype=torch.float64) for _ in range(2))
        moments = Moments.of(x, y)
        found.append((float(unbiased_cka(moments)), float(cka(moments))))
    unbiased, biased = torch.tensor(found).mean(0)
    assert abs(float(unbiased)) < 0.02
    assert float(biased) > 0.2


def test_procrustes_of_a_turned_copy_is_zero_and_scaled_to_two_for_orthogonal_sides():
    x, _ = pair(100, 6, 3)
    turn, _ = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64))
    moments = Moments.of(x, x @ turn + 3)
    assert abs(float(procrustes(moments))) < 1e-9 * float(moments.a)
    assert abs(float(procrustes(Moments.of(x, x @ turn * 9), scaled=True))) < 1e-9
    u = torch.linalg.qr(torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
    u = u - u.mean(0)
    left = torch.linalg.qr(u)[0]
    assert float(procrustes(Moments.of(left[:, :2], left[:, 2:]), scaled=True)) == pytest.approx(2, abs=1e-9)


def test_sides_without_full_rank_are_compared_in_what_varies():
    x, y = pair(200, 4, 3)
    doubled = torch.cat([x, x[:, :2]], 1)
    torch.testing.assert_close(cca(Moments.of(doubled, y)), cca(Moments.of(x, y)), rtol=0, atol=1e-7)
    with pytest.raises(InterpError, match="5 rows are too few"):
        svcca(Moments.of(x[:5], y[:5]), explained=0.9999)


def test_all_pairs_of_products_are_what_each_pair_is_in_one_pass():
    (a, b), (c, d) = pair(40), pair(40, seed=3)
    found = gram_cka_pairs([gram(a), gram(b)], [gram(c), gram(d), gram(a), torch.zeros(40, 40)])
    for row, left in enumerate((a, b)):
        for column, right in enumerate((c, d, a)):
            expected = float(unbiased_cka(Moments.of(left, right)))
            assert float(found[row, column]) == pytest.approx(expected, abs=1e-10), (row, column)
    assert float(found[0, 2]) == pytest.approx(1)
    assert found[:, 3].isnan().all()


def test_what_cannot_be_compared_is_refused():
    x, y = pair(10, 3, 3)
    with pytest.raises(InterpError, match=r"x \(10, 3\) and y \(9, 3\) are not of the same tokens"):
        Moments.of(x, y[:9])
    with pytest.raises(InterpError, match="cannot be added"):
        Moments.zero(3, 3) + Moments.zero(3, 2)
    with pytest.raises(InterpError, match="of no rows"):
        cka(Moments.zero(3, 3))
    with pytest.raises(InterpError, match="needs 4 rows, and there are 3"):
        unbiased_cka(Moments.of(x[:3], y[:3]))
    with pytest.raises(InterpError, match="RSA needs 3 rows"):
        rsa(Moments.of(x[:2], y[:2]))
    for measure in (cka, unbiased_cka, cca, lambda moments: procrustes(moments, scaled=True)):
        with pytest.raises(InterpError, match="all rows of y are equal"):
            measure(Moments.of(x, torch.ones_like(y)))
    with pytest.raises(InterpError, match="not finite"):
        Moments.of(x, y.clone().fill_(float("nan")))
    with pytest.raises(InterpError, match="at least 4 rows"):
        KernelSums.of(x[:3], y[:3], rbf(1.0))


def summed(seed):
    """On every rank: its part of the rows, reduced."""
    import torch.distributed as dist

    x, y = pair(seed=seed)
    part = torch.arange(len(x)).tensor_split(dist.get_world_size())[dist.get_rank()]
    moments = Moments.of(x[part], y[part]).reduced(over())
    return {name: measure(moments) for name, measure in MEASURES.items()}


@pytest.mark.parametrize("ranks", fast(2, of=[2, 4]))
def test_ranks_give_the_same_values(world, ranks):
    expected = direct(*pair(seed=3))
    for found in world.run(summed, ranks, 3, timeout=60):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9, msg=name)


def test_kernel_cka_of_one_batch_is_the_formula_and_the_linear_kernel_is_the_linear_cka():
    x, y = pair(60, 5, 4)
    linear = KernelSums.of(x, y, lambda rows: rows @ rows.T)
    torch.testing.assert_close(linear.cka(), direct(x, y)["cka"], rtol=0, atol=1e-10)
    distances = torch.stack([(row - x).square().sum(1) for row in x])
    torch.testing.assert_close(rbf(2.0)(x), torch.exp(-distances / 8), rtol=1e-8, atol=1e-12)
    sums = [KernelSums.of(x[part], y[part], rbf(3.0), rbf(4.0)) for part in torch.arange(60).split(20)]
    together = sums[0] + sums[1] + sums[2]
    parts = torch.stack([torch.stack([one.xy, one.xx, one.yy]) for one in sums]).mean(0)
    torch.testing.assert_close(together.cka(), parts[0] / (parts[1] * parts[2]).sqrt())
    assert together.batches == 3
    assert float(KernelSums.of(x, x, rbf(3.0)).cka()) == pytest.approx(1)
    with pytest.raises(InterpError, match="do not vary"):
        KernelSums.of(x, torch.ones_like(y), rbf(3.0)).cka()
