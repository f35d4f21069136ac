"""Results do not depend on the units of their inputs, and what has no result is refused: NaN, labels that are no classes, empty
folds, rows that do not vary."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr

from forge_interp import similarity
from forge_interp.methods.probes import dead_neurons, effective_rank, linear_probe, steering_vector
from forge_interp.methods.sae import train_sae
from forge_interp.neuro.dissimilarity import rdm, rdm_correlation
from forge_interp.neuro.encoding import (
    banded_ridge,
    correlations,
    decade,
    encode,
    encode_banded,
    mixes,
    noise_ceiling,
    normalized,
    ridge,
)
from forge_interp.similarity import KernelSums, Moments, gram, gram_cka, gram_cka_pairs, gram_rank
from forge_interp.store import ActivationStore, ActivationWriter
from forge_interp.tap_names import InterpError

UNITS = (1e-13, 1e9)
"""Femtotesla in tesla, and nanovolts for volts."""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def followed(rows: int = 60, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (rows, 7), and 4 channels that follow them, with an offset and very different sizes."""
    x = drawn(rows, 7, seed=seed) + 0.5
    y = x @ drawn(7, 4, seed=seed + 1) + drawn(rows, 4, seed=seed + 2) + 3
    return x, y * torch.tensor([1.0, 1e-3, 20.0, 1e-6], dtype=torch.float64)


def labels() -> torch.Tensor:
    return (torch.arange(60) * 7) % 3


def store(x: torch.Tensor, folder) -> ActivationStore:
    writer = ActivationWriter(folder, {}, {"x": {"alias": "", "shape": [x.shape[1]], "dtype": "float32"}})
    index = {name: torch.arange(len(x)) for name in ("input", "position", "token")}
    writer.add({"x": x.float()}, index, len(x))
    writer.close()
    return ActivationStore(folder)


MEASURES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "ridge": lambda x, y: correlations(ridge(x, y).predict(x), y),
    "ridge, each row held out": lambda x, y: correlations(ridge(x, y, folds="leave_one_out").predict(x), y),
    "encode": lambda x, y: encode(x, y, folds=3),
    "banded ridge": lambda x, y: correlations(
        banded_ridge(b := {"a": x[:, :3], "b": x[:, 3:]}, y, shares=mixes(2, 2), folds=3).predict(b), y
    ),
    "encode_banded": lambda x, y: encode_banded({"a": x[:, :3], "b": x[:, 3:]}, y, shares=mixes(2, 2), folds=3).r,
    "correlations": lambda x, y: correlations(x[:, :4], y),
    "noise ceiling": lambda x, y: noise_ceiling(torch.stack([y, y + y.std(0) * drawn(*y.shape, seed=9)])),
    "rdm": lambda x, y: rdm(y),
    "rsa": lambda x, y: torch.tensor(rdm_correlation(rdm(x, "euclidean"), rdm(y), samples=5)),
    "linear probe": lambda x, y: torch.tensor(linear_probe(x, labels())[2:]),
    "effective rank": lambda x, y: effective_rank(y),
    "cka": lambda x, y: similarity.cka(Moments.of(x, y)),
    "unbiased cka": lambda x, y: similarity.unbiased_cka(Moments.of(x, y)),
    "cca": lambda x, y: similarity.cca(Moments.of(x, y[:, [0, 2]])),
    "svcca": lambda x, y: similarity.svcca(Moments.of(x, y)),
    "procrustes": lambda x, y: similarity.procrustes(Moments.of(x, y), scaled=True),
    "rsa of moments": lambda x, y: similarity.rsa(Moments.of(x, y)),
    "gram cka": lambda x, y: gram_cka(gram(x), gram(y)),
    "gram rank": lambda x, y: gram_rank(gram(y)),
    "kernel cka": lambda x, y: KernelSums.of(x, y, lambda rows: rows @ rows.T).cka(),
}


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("unit", UNITS)
def test_trials_e1_no_measure_depends_on_the_units_of_its_inputs(name: str, unit: float) -> None:
    x, y = followed()
    measure = MEASURES[name]
    expected = measure(x, y)
    assert bool(expected.isfinite().all())
    for left, right in ((unit, 1.0), (1.0, unit), (unit, unit)):
        torch.testing.assert_close(measure(x * left, y * right), expected, rtol=1e-6, atol=1e-9)


def test_trials_e1_weak_channels_of_a_recording_are_predicted_as_well_as_strong_ones() -> None:
    """Against Pearson's r of scipy, for a recording in tesla; r was 0 below an absolute threshold."""
    x, y = followed()
    for power in (0, -6, -13, -20, 12):
        found = correlations(x[:, :4], y * 10.0**power)
        theirs = [pearsonr(x[:, channel], y[:, channel]).statistic for channel in range(4)]
        np.testing.assert_allclose(found.numpy(), theirs, rtol=1e-9)


@pytest.mark.parametrize("unit", UNITS)
def test_trials_e1_a_sparse_autoencoder_and_a_probe_do_not_depend_on_units(unit: float, tmp_path) -> None:
    x = drawn(400, 4)
    options = {"latents": 8, "k": 2, "steps": 60, "batch": 64}
    _, plain = train_sae(store(x, tmp_path / "plain"), "x", **options)
    sae, scaled = train_sae(store(x * unit, tmp_path / "scaled"), "x", **options)
    assert scaled.explained == pytest.approx(plain.explained, abs=1e-3) and scaled.l0 == pytest.approx(plain.l0, rel=0.02)
    assert bool(sae.decoder.isfinite().all())
    torch.testing.assert_close(steering_vector(x[:5] * unit, x[5:9] * unit) / unit, steering_vector(x[:5], x[5:9]))
    assert dead_neurons(x * unit * torch.tensor([1.0, 0, 1, 0])).tolist() == [False, True, False, True]


def test_the_decade_of_features_is_the_power_of_ten_nearest_to_their_variance() -> None:
    x = torch.tensor([[-1.0, -2.0], [1.0, 2.0]])  # variances 1 and 4
    assert decade(x) == 1.0 and decade(x * 10) == 100.0 and decade(x * 1e-13) == pytest.approx(1e-26)
    assert decade(torch.ones(3, 2)) == 1.0


def test_a_channel_that_does_not_vary_has_no_correlation_and_no_part_in_a_mean() -> None:
    x, y = followed()
    y = torch.cat([y, torch.full((60, 1), 0.1, dtype=torch.float64)], 1)  # 60 * 0.1 is not 6: rounding must not count as varying
    assert correlations(x[:, :5], y).isnan().tolist() == [False] * 4 + [True]
    assert correlations(torch.full((60, 1), 0.1), y[:, :1]).tolist() == [0.0]  # a constant prediction predicts nothing
    found = encode_banded({"a": x}, y, folds=3)
    assert found.r.isnan().tolist() == [False] * 4 + [True]
    half = y.clone()
    half[:20, 0] = 7.0  # constant in the first fold
    r = encode_banded({"a": x}, half, folds=3)
    assert bool(r.folds[0, 0].isnan()) and float(r.r[0]) == pytest.approx(float(r.folds[1:, 0].mean()))
    assert noise_ceiling(torch.stack([y, y]))[4] == 0 and normalized(torch.tensor([0.5]), torch.tensor([0.0])).isnan().all()


def test_trials_e2_values_that_are_not_finite_and_labels_that_are_no_classes_are_refused(tmp_path) -> None:
    x, y = followed()
    bad = x.clone()
    bad[7, 2] = math.nan
    for call in (
        lambda: linear_probe(bad, labels()),
        lambda: effective_rank(bad),
        lambda: ridge(bad, y),
        lambda: encode(x, torch.where(y > 0, y, math.inf)),
        lambda: rdm(bad),
        lambda: rdm_correlation(torch.where(torch.eye(60) > 0, math.nan, rdm(x)), rdm(x)),
        lambda: noise_ceiling(torch.stack([bad, bad])),
        lambda: similarity.cka(Moments.of(bad, y)),
        lambda: similarity.unbiased_cka(Moments.of(x, torch.full_like(y, math.inf))),
        lambda: train_sae(store(bad, tmp_path / "bad"), "x", latents=8, k=2, steps=2),
    ):
        with pytest.raises(InterpError, match=r"NaN or infinite|not finite"):
            call()
    with pytest.raises(InterpError, match="in row 7"):
        linear_probe(bad, labels())
    with pytest.raises(InterpError, match="label -100 of row 4 is not a class"):
        linear_probe(x, torch.where(torch.arange(60) == 4, -100, labels()))
    with pytest.raises(InterpError, match=r"labels are torch\.float64"):
        linear_probe(x, labels().double())
    with pytest.raises(InterpError, match="all rows are equal"):
        effective_rank(torch.full((5, 3), 0.1))


def test_trials_e3_rows_of_equal_distance_have_no_unbiased_cka() -> None:
    """HSIC1 of such rows with themselves is 0: the quotient was infinite."""
    simplex, other = torch.eye(6, dtype=torch.float64) * 0.3, drawn(6, 3)
    for left, right in ((simplex, other), (other, simplex)):
        with pytest.raises(InterpError, match="same distance from each other"):
            similarity.unbiased_cka(Moments.of(left, right))
        assert gram_cka(gram(left), gram(right)).isnan()
    assert gram_cka_pairs([gram(simplex), gram(other)], [gram(other)]).isnan().flatten().tolist() == [True, False]
    with pytest.raises(InterpError, match="all distances"):
        rdm_correlation(rdm(simplex, "euclidean"), rdm(other))


def test_trials_e3_folds_that_hold_nothing_or_everything_out_are_refused() -> None:
    x, y = followed()
    nothing = torch.tensor([], dtype=torch.int64)
    for folds in ([nothing], [torch.arange(60)], [torch.arange(5), nothing], [torch.tensor([60])], [torch.tensor([-1])], []):
        with pytest.raises(InterpError, match=r"fold"):
            ridge(x, y, folds=folds)
    mask = torch.arange(60) < 20
    torch.testing.assert_close(ridge(x, y, folds=[mask]).errors, ridge(x, y, folds=[torch.arange(20)]).errors)
