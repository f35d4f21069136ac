"""Ridge against scikit-learn on the same folds, RSA against scipy; planted signals are found, and shuffled ones are not."""

import h5py
import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.linear_model import RidgeCV

from forge_interp.captures import capture
from forge_interp.neuro.dissimilarity import rdm, rdm_correlation
from forge_interp.neuro.encoding import (
    ALPHAS,
    banded_ridge,
    correlations,
    encode,
    encode_banded,
    folds_of,
    lagged,
    mixes,
    noise_ceiling,
    normalized,
    ridge,
)
from forge_interp.neuro.recordings import (
    Recording,
    binned,
    pieces_of,
    read_recording,
    token_words,
    windows_of,
    word_features,
)
from forge_interp.tap_names import InterpError


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
    with pytest.raises(InterpError, match="20 rows cannot make 11 folds"):
        ridge(x, y, folds=11)
    with pytest.raises(InterpError, match="the same value everywhere"):
        rdm(torch.ones(4, 3))
    with pytest.raises(InterpError, match="three conditions"):
        rdm(torch.ones(2, 3))
    with pytest.raises(InterpError, match="not \\(n, n\\)"):
        rdm_correlation(rdm(x), rdm(x[:5]))
    with pytest.raises(InterpError, match="all distances"):
        rdm_correlation(torch.ones(4, 4), rdm(x[:4]))


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("features", [9, 90])
def test_leaving_out_each_row_equals_scikit_learn(features):
    x, y = drawn(40, features) + 1, drawn(40, 5, seed=1)
    y[:, :3] += x[:, :3] * torch.tensor([3.0, 1.0, 0.3])
    found = ridge(x, y, alphas=ALPHAS, folds="leave_one_out")
    theirs = RidgeCV(alphas=ALPHAS, alpha_per_target=True).fit(x.numpy(), y.numpy())
    assert found.alpha.tolist() == theirs.alpha_.tolist()
    np.testing.assert_allclose(found.weight.T.numpy(), theirs.coef_, rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(found.bias.numpy(), theirs.intercept_, rtol=1e-7)
    np.testing.assert_allclose(-found.errors.amin(0).numpy(), theirs.best_score_, rtol=1e-8)


def test_bands_are_the_best_of_scikit_learns_fits_on_scaled_features():
    bands = {"a": drawn(60, 4), "b": drawn(60, 30, seed=1) * 3}
    y = torch.stack([bands["a"][:, 0], bands["b"][:, 0], bands["a"][:, 1] + bands["b"][:, 1]], 1) + drawn(60, 3, seed=2) * 0.5
    shares = mixes(2, draws=2)
    found = banded_ridge(bands, y, shares=shares, alphas=ALPHAS, folds=4)
    splits = [(np.setdiff1d(np.arange(60), rows.numpy()), rows.numpy()) for rows in folds_of(60, 4)]
    for voxel in range(3):
        fits = []
        for share in shares:
            x = np.concatenate([one.numpy() * np.sqrt(float(g)) for one, g in zip(bands.values(), share, strict=True)], 1)
            fit = RidgeCV(alphas=ALPHAS, cv=splits, scoring="neg_mean_squared_error").fit(x, y[:, voxel].numpy())
            fits.append((fit.best_score_, fit, share, x))
        _, fit, share, x = max(fits, key=lambda one: one[0])
        assert found.shares[voxel].tolist() == share.tolist()
        assert float(found.alpha[voxel]) == fit.alpha_
        np.testing.assert_allclose(found.predict(bands)[:, voxel].numpy(), fit.predict(x), rtol=1e-7, atol=1e-9)


def test_a_band_of_noise_is_left_out_and_shuffled_rows_are_not_predicted():
    bands = {"signal": drawn(120, 6), "noise": drawn(120, 80, seed=1) * 4}
    y = bands["signal"] @ drawn(6, 4, seed=2) + drawn(120, 4, seed=3)
    found = encode_banded(bands, y, shares=mixes(2, draws=4), folds=4)
    assert found.folds.shape == found.alpha.shape == (4, 4)
    torch.testing.assert_close(found.folds.mean(0), found.r)
    assert float(found.r.min()) > 0.6
    assert float(found.shares[:, 0].min()) > 0.7
    alone = encode_banded({"signal": bands["signal"]}, y, folds=4)
    torch.testing.assert_close(alone.r, encode(bands["signal"], y, folds=4))
    together = encode_banded(bands, y, shares=torch.full((1, 2), 0.5), folds=4)
    assert float((found.r - together.r).mean()) > 0.05  # one penalty for both drowns the signal
    order = torch.randperm(120, generator=torch.Generator().manual_seed(5))
    shuffled = encode_banded({name: x[order] for name, x in bands.items()}, y, shares=mixes(2, draws=4), folds=4)
    assert float(shuffled.r.abs().max()) < 0.35
    by_rows = encode_banded(bands, y, shares=mixes(2, draws=4), folds=4, inner="leave_one_out")
    assert float(by_rows.r.min()) > 0.6


def test_mixes_are_shares_with_each_band_alone():
    found = mixes(3, draws=50)
    assert found.shape == (54, 3)
    assert found[:4].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], pytest.approx([1 / 3] * 3)]
    torch.testing.assert_close(found.sum(1), torch.ones(54, dtype=torch.float64))
    assert float(found[4:].var(0).min()) > 0.03  # a flat Dirichlet distribution of 3 has 1 / 18
    assert mixes(1).tolist() == [[1.0]]


def test_bands_that_do_not_fit_are_refused():
    x, y = drawn(20, 3), drawn(20, 2)
    for bands, shares, match in (
        ({}, None, "at least one band"),
        ({"a": x, "b": x[:19]}, None, "of the same n times"),
        ({"a": x}, torch.ones(1, 2), r"\(candidates, 1 bands\)"),
        ({"a": x, "b": x}, torch.tensor([[1.0, -0.1]]), "not negative"),
        ({"a": x, "b": x}, torch.zeros(1, 2), "leaves out every band"),
    ):
        with pytest.raises(InterpError, match=match):
            banded_ridge(bands, y, shares=shares, folds=2)


def test_tokens_belong_to_the_word_that_their_letters_are_in():
    pieces = ["The", " cat", "'s", " mil", "ky", ",", " white", " paw", "."]
    words = ["The", "cat's", "milky", "white", "paw"]
    assert token_words(pieces, words) == [0, 1, 1, 2, 2, -1, 3, 4, -1]
    with pytest.raises(InterpError, match=r"word 1 'dog' is not what the text goes on with: .* cat"):
        token_words(pieces, ["The", "dog"])
    with pytest.raises(InterpError, match="word 1 'milky' is not what"):  # a word was left out
        token_words(pieces, ["The", "milky"])
    with pytest.raises(InterpError, match="word 0 'a' shares its only token"):
        token_words(["a b"], ["a", "b"])
    with pytest.raises(InterpError, match="word 1 ' ' is not"):
        token_words(pieces, ["The", " "])


def test_pieces_join_to_the_text_also_where_tokens_end_within_a_character():
    text = "Müde: 日本 ☃ end"
    ids = list(text.encode())
    pieces = pieces_of(lambda some: bytes(some).decode(errors="replace"), ids)
    assert "".join(pieces) == text
    assert pieces[1:3] == ["", "ü"]
    assert len(pieces) == len(ids)


def test_windows_keep_each_token_once_behind_half_a_window_of_context():
    for count, size in ((5, 8), (8, 8), (9, 8), (31, 8), (30, 7), (4, 1)):
        found = list(windows_of(count, size))
        assert [at for one in found for at in range(one.first, one.stop)] == list(range(count))
        assert all(one.stop - one.start <= size for one in found)
        assert all(one.first - one.start >= min(one.first, size // 2) for one in found)


@pytest.mark.parametrize("pool", ["last", "mean"])
def test_word_features_are_those_of_the_model_over_the_window(make, tokens, pool):
    model, ids = make(spread=5.0), tokens(1, 20)[0]
    owners = [0, 0, -1, 1, 2, 2, 2, *range(3, 16)]
    names = ["blocks.1.residual", "blocks.0.attention.heads"]
    found = word_features(model, ids.tolist(), owners, 16, names, 8, pool)
    with torch.no_grad(), capture(model, names) as seen:
        model(ids[None, :8])
        model(ids[None, 4:12])
    for name in names:
        first, second = (value[0].flatten(1) for value in seen.each(name))
        assert found[name].shape == (16, first.shape[1])
        expected = first[6] if pool == "last" else first[4:7].mean(0)
        torch.testing.assert_close(found[name][2], expected)
        torch.testing.assert_close(found[name][3], first[7])
        torch.testing.assert_close(found[name][4], second[4])  # token 8


def test_words_are_averaged_over_the_sample_in_which_they_begin():
    values = torch.arange(8.0).view(4, 2)
    times, onsets = torch.tensor([10.0, 12.0, 14.0]), torch.tensor([10.0, 11.9, 14.0, 15.9])
    assert binned(values, onsets, times).tolist() == [[1, 2], [0, 0], [5, 6]]
    for wrong in (9.9, 16.0):
        with pytest.raises(InterpError, match=f"word 1 begins at {wrong:g} s, and the recording goes from 10 to 16 s"):
            binned(values[:2], torch.tensor([10.0, wrong]), times)
    with pytest.raises(InterpError, match="must increase"):
        binned(values, onsets, torch.tensor([10.0, 10.0, 14.0]))


WORDS = np.array(["one", "two"])


def test_npz_and_hdf5_hold_the_same_recording(tmp_path):
    data, times = drawn(2, 4, 3).numpy(), np.arange(4) * 2.0
    parts = {"data": data, "times": times, "words": WORDS, "onsets": np.array([0.0, 3.0])}
    np.savez(tmp_path / "a.npz", **parts, remark=np.array("x"))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, value in parts.items():
            file[name] = value.astype("S") if name == "words" else value
    with h5py.File(tmp_path / "a.nwb", "w") as file:
        group = file.create_group("acquisition/bold")
        group["data"] = data[0]
        group["starting_time"] = 0.0
        group["starting_time"].attrs["rate"] = 0.5
        table = file.create_group("intervals/words")
        table["start_time"], table["word"] = [0.0, 3.0], ["one", "two"]
    for suffix in ("npz", "h5", "nwb"):
        found = read_recording(tmp_path / f"a.{suffix}")
        np.testing.assert_array_equal(found.data.numpy(), data[:1] if suffix == "nwb" else data)
        assert found.words == ("one", "two")
        assert found.times is not None
        assert found.onsets is not None
        assert (found.times.tolist(), found.onsets.tolist()) == (times.tolist(), [0.0, 3.0])
    torch.testing.assert_close(read_recording(tmp_path / "a.npz").mean, torch.from_numpy(data.mean(0)))
    with h5py.File(tmp_path / "a.nwb", "a") as file:
        group = file.create_group("processing/volume")
        group["data"], group["timestamps"] = np.arange(24.0).reshape(4, 2, 3), times
    with pytest.raises(InterpError, match=r"2 time series, choose one with --series: acquisition/bold, processing/volume"):
        read_recording(tmp_path / "a.nwb")
    found = read_recording(tmp_path / "a.nwb", "/processing/volume")
    assert found.data[0, 1].tolist() == [6, 7, 8, 9, 10, 11]
    with pytest.raises(InterpError, match=r"no time series eeg; it has acquisition/bold"):
        read_recording(tmp_path / "a.nwb", "eeg")


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({"wrong": np.ones(3)}, "no `data`, only wrong"),
        ({"data": np.ones(3)}, r"data \(3,\) must be"),
        ({"data": np.ones((0, 3))}, r"data \(0, 3\) must be"),
        ({"data": np.array([["a"]])}, "data holds <U1, not numbers"),
        ({"data": np.array([[1.0, 2], [3, np.nan]])}, "1 values that are not finite, the first in row 1 of channel 1"),
        ({"data": np.ones((3, 2)), "times": np.arange(4.0)}, "3 rows and times 4"),
        ({"data": np.ones((3, 2)), "words": WORDS}, "3 rows, and there are 2 words without onsets"),
        ({"data": np.ones((3, 2)), "stimuli": WORDS}, "3 rows, and there are 2 stimuli"),
        ({"data": np.ones((2, 2)), "stimuli": WORDS, "words": WORDS}, "not both"),
        ({"data": np.ones((2, 2)), "words": WORDS, "onsets": np.zeros(2)}, "onsets go with words and times"),
        (
            {"data": np.ones((3, 2)), "words": WORDS, "onsets": np.zeros(3), "times": np.arange(3.0)},
            "3 onsets, 2 words",
        ),
        (
            {"data": np.ones((3, 2)), "words": WORDS, "onsets": np.array([1.0, 0.5]), "times": np.arange(3.0)},
            "onsets must not decrease",
        ),
        (
            {"data": np.ones((3, 2)), "words": WORDS, "onsets": np.array([1.0, 7]), "times": np.arange(3.0)},
            "word 1 begins at 7 s",
        ),
        ({"data": np.ones((2, 2)), "times": np.array([0.0, np.inf])}, r"times \(2,\) must be finite"),
        ({"data": np.array([[None]], dtype=object)}, "cannot be read: Object arrays"),
    ],
)
def test_recordings_that_do_not_fit_are_refused(tmp_path, parts, match):
    np.savez(tmp_path / "a.npz", **parts)
    with pytest.raises(InterpError, match=match):
        read_recording(tmp_path / "a.npz")


def test_files_that_are_no_recordings_are_refused(tmp_path):
    with pytest.raises(InterpError, match=r"recordings are .npz, .h5, .hdf5, .nwb files"):
        read_recording(tmp_path / "a.mat")
    for suffix in ("npz", "h5"):
        with pytest.raises(InterpError, match="cannot be read"):
            read_recording(tmp_path / f"a.{suffix}")
        (tmp_path / f"a.{suffix}").write_bytes(b"nothing")
        with pytest.raises(InterpError, match="cannot be read"):
            read_recording(tmp_path / f"a.{suffix}")
    np.savez(tmp_path / "b.npz", data=np.ones((2, 2)))
    with pytest.raises(InterpError, match="in HDF5 files only"):
        read_recording(tmp_path / "b.npz", "bold")
    with h5py.File(tmp_path / "c.nwb", "w") as file:
        group = file.create_group("bold")
        group["data"], group["starting_time"] = np.ones((2, 2)), 0.0
    with pytest.raises(InterpError, match="bold/starting_time has no attribute `rate`"):
        read_recording(tmp_path / "c.nwb")
    assert Recording(torch.ones(1, 2, 2)).times is None
