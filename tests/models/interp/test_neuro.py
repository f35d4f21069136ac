"""Ridge against scikit-learn on the same folds, RSA against scipy; planted signals are found, and shuffled ones are not."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.linear_model import RidgeCV

from forge_models.interp.neuro.encoding import ALPHAS, correlations, encode, folds_of, lagged, noise_ceiling, normalized, ridge
from forge_models.interp.neuro.rdm import rdm, rdm_correlation
from forge_models.interp.taps import InterpError


def recording(rows=150, features=12, voxels=6, noise=1.0, seed=0):
    """Activations, voxels that follow the first of them to different degrees, the last two not at all."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator, dtype=torch.float64) * torch.linspace(0.5, 4, features) + 2
    weight = torch.randn(features, voxels, generator=generator, dtype=torch.float64)
    weight[:, -2:] = 0
    return x, x @ weight + noise * torch.randn(rows, voxels, generator=generator, dtype=torch.float64) * 4 + 3


@pytest.mark.parametrize("features", [12, 220])  # fewer and more than rows
def test_ridge_equals_scikit_learn_on_the_same_folds(features):
    x, y = recording(features=features, voxels=3)
    found = ridge(x, y, alphas=ALPHAS, folds=5)
    splits = [(np.setdiff1d(np.arange(150), rows.numpy()), rows.numpy()) for rows in folds_of(150, 5)]
    for voxel in range(y.shape[1]):
        theirs = RidgeCV(alphas=ALPHAS, cv=splits, scoring="neg_mean_squared_error").fit(x.numpy(), y[:, voxel].numpy())
        assert float(found.alpha[voxel]) == theirs.alpha_
        np.testing.assert_allclose(found.weight[:, voxel].numpy(), theirs.coef_, rtol=1e-7, atol=1e-9)
        assert float(found.bias[voxel]) == pytest.approx(theirs.intercept_, rel=1e-8)
        assert float(-found.errors[:, voxel].min()) == pytest.approx(theirs.best_score_, rel=1e-9)
        np.testing.assert_allclose(found.predict(x)[:, voxel].numpy(), theirs.predict(x.numpy()), rtol=1e-7)


def test_planted_signals_are_found_and_shuffled_ones_are_not():
    x, y = recording()
    found = encode(x, y)
    assert float(found[:4].min()) > 0.6
    assert float(found[4:].abs().max()) < 0.25
    shuffled = encode(x[torch.randperm(150, generator=torch.Generator().manual_seed(1))], y)
    assert float(shuffled.abs().max()) < 0.3


def test_held_out_rows_have_no_part_in_their_prediction():
    x, y = recording(rows=40, voxels=3)
    found = []
    for rows in folds_of(40, 2):
        inside = torch.tensor(np.setdiff1d(np.arange(40), rows.numpy()))
        theirs = [
            RidgeCV(alphas=ALPHAS, cv=[(np.setdiff1d(np.arange(20), one.numpy()), one.numpy()) for one in folds_of(20, 2)],
                    scoring="neg_mean_squared_error").fit(x[inside].numpy(), y[inside, voxel].numpy()).predict(x[rows].numpy())
            for voxel in range(3)
        ]  # fmt: skip
        found.append([np.corrcoef(one, y[rows, voxel].numpy())[0, 1] for voxel, one in enumerate(theirs)])
    torch.testing.assert_close(encode(x, y, alphas=ALPHAS, folds=2), torch.tensor(np.mean(found, axis=0)), rtol=0, atol=1e-7)


def test_delays_are_found_by_lags():
    x, _ = recording(features=3)
    y = torch.cat([torch.zeros(2, 1, dtype=torch.float64), (x - 2)[:-2, :1]])
    assert float(encode(x, y)) < 0.3
    assert float(encode(lagged(x - 2, [0, 2]), y)) > 0.99
    assert lagged(x, [1, 0])[5].tolist() == [*x[4].tolist(), *x[5].tolist()]
    assert not lagged(x, [3])[:3].any()
    with pytest.raises(InterpError, match="lag -1"):
        lagged(x, [-1])


def test_the_noise_ceiling_is_what_the_true_signal_reaches():
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(4000, 3, generator=generator, dtype=torch.float64) * torch.tensor([2.0, 1.0, 0.0])
    repeats = signal + torch.randn(4, 4000, 3, generator=generator, dtype=torch.float64)
    reached = correlations(signal[:, :2], repeats.mean(0)[:, :2])
    torch.testing.assert_close(noise_ceiling(repeats)[:2], reached, rtol=0, atol=0.01)
    assert float(noise_ceiling(repeats)[2]) < 0.25
    share = normalized(torch.tensor([0.3, 0.3, 0.3]), torch.tensor([0.6, 0.1, 0.09]))
    assert share[:2].tolist() == pytest.approx([0.5, 3.0])
    assert share[2].isnan()
    with pytest.raises(InterpError, match="needs two recordings"):
        noise_ceiling(repeats[:1])


def test_distances_and_rank_correlations_equal_those_of_numpy_and_scipy():
    x, y = recording(rows=14)
    np.testing.assert_allclose(rdm(x).numpy(), 1 - np.corrcoef(x.numpy()), atol=1e-12)
    one, other = (x[2] - x[9]).square().mean(), rdm(x, "euclidean")[2, 9]
    torch.testing.assert_close(one, other)
    rounded = (rdm(x) * 20).round()  # with ties
    upper = np.triu_indices(14, 1)
    expected = spearmanr(rounded.numpy()[upper], rdm(y).numpy()[upper]).statistic
    found = rdm_correlation(rounded, rdm(y), samples=200)
    assert found.correlation == pytest.approx(expected, rel=1e-12)
    assert found.low < found.correlation < found.high
    assert rdm_correlation(rdm(x), rdm(x), samples=20) == pytest.approx((1, 1, 1))


def test_what_does_not_fit_is_refused():
    x, y = recording(rows=20)
    with pytest.raises(InterpError, match=r"\(20, 12\) and recordings \(19, 6\)"):
        ridge(x, y[:19])
    with pytest.raises(InterpError, match="recordings hold 120 values that are NaN or infinite, the first in row 0"):
        ridge(x, y.clone().fill_(float("nan")))
    with pytest.raises(InterpError, match="alphas must be positive"):
        ridge(x, y, alphas=[0.0])
    with pytest.raises(InterpError, match="20 rows cannot be cut into 11 folds"):
        ridge(x, y, folds=11)
    with pytest.raises(InterpError, match="the same value everywhere"):
        rdm(torch.ones(4, 3))
    with pytest.raises(InterpError, match="three conditions"):
        rdm(torch.ones(2, 3))
    with pytest.raises(InterpError, match="not \\(n, n\\)"):
        rdm_correlation(rdm(x), rdm(x[:5]))
    with pytest.raises(InterpError, match="all distances"):
        rdm_correlation(torch.ones(4, 4), rdm(x[:4]))
