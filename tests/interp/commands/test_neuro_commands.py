"""`forge-train neuro`: signals that were planted from the model's own values are found where they were planted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from forge_core.registry import Registry
from forge_interp.captures import capture
from forge_train.inference.stored import load_model, open_weights
from interp.commands.commands import refused, said

SENTENCES = [
    f"{a} {b} {c}" for a in ("A cat", "The old dog", "Some") for b in ("saw", "likes", "is") for c in ("it", "me", "no one")
]
WORDS = [f"{word}{number}" for number in range(20) for word in ("so", "it", "went", "on")]


def stream(run: Path, texts: list[str], layer: int) -> np.ndarray:
    """(texts, width) what leaves a block at the last letter of each text alone."""
    model, rows = load_model(open_weights(run, Registry())), []
    with torch.no_grad(), capture(model, f"blocks.{layer}.residual_after", positions="last") as seen:
        for text in texts:
            model(torch.tensor([list(text.encode())]))
        rows = [value[0, 0] for value in seen.each(f"blocks.{layer}.residual_after")]
    return torch.stack(rows).double().numpy()


def planted(x: np.ndarray, noise: float, channels: int = 6) -> np.ndarray:
    generator = np.random.default_rng(0)
    signal = (x - x.mean(0)) / x.std(0) @ generator.standard_normal((x.shape[1], channels))
    signal /= signal.std(0)
    return signal + noise * generator.standard_normal((2, *signal.shape))


@pytest.fixture(scope="module")
def sentences(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two repeats of what follows block 1 at the end of each sentence."""
    file = tmp_path_factory.mktemp("recordings") / "sentences.npz"
    np.savez(file, data=planted(stream(trained / "run", SENTENCES, 1), 0.2), stimuli=np.array(SENTENCES))
    return file


def test_a_planted_recording_is_predicted_and_a_shuffled_one_is_not(trained, sentences, tmp_path, capsys) -> None:
    arguments = ("neuro", "encode", trained / "run", "--target", sentences, "--folds", 3, "--bands", "--draws", 2)
    found = said(capsys, *arguments, "--output", tmp_path / "encoded")
    results = {one["name"]: one for one in found["results"]}
    assert list(results) == ["blocks.0.residual_after", "blocks.1.residual_after", "all"]
    assert results["blocks.1.residual_after"]["mean"] > 0.8
    assert results["blocks.1.residual_after"]["mean"] > results["blocks.0.residual_after"]["mean"]
    assert 0.8 < results["blocks.1.residual_after"]["normalized"] < 1.05
    assert results["all"]["shares"]["blocks.1.residual_after"] > 0.5
    with np.load(tmp_path / "encoded" / "results.npz") as archive:
        kept = dict(archive)
    assert kept["r/all"].shape == kept["ceiling"].shape == (6,)
    assert kept["shares"].shape == (6, 2)
    assert json.loads((tmp_path / "encoded" / "results.json").read_text())["results"] == found["results"]
    assert "<svg" in (tmp_path / "encoded" / "layers.svg").read_text()
    assert "choose a new folder" in refused(capsys, *arguments, "--output", tmp_path / "encoded")
    with np.load(sentences) as archive:
        data = archive["data"][:, np.random.default_rng(3).permutation(len(SENTENCES))]
    np.savez(tmp_path / "shuffled.npz", data=data, stimuli=np.array(SENTENCES))
    other = said(capsys, "neuro", "encode", trained / "run", "--target", tmp_path / "shuffled.npz", "--folds", 3, "--rows")
    assert max(abs(one["mean"]) for one in other["results"]) < 0.3


def test_stored_activations_give_what_the_model_gives(trained, sentences, tmp_path, capsys) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(SENTENCES))
    options = ("--text", tmp_path / "lines.txt", "--lines", "--positions", "last", "--names", "blocks.*.residual_after")
    said(capsys, "probe", trained / "run", *options, "--output", tmp_path / "acts")
    for command, value in (("encode", "mean"), ("rsa", "correlation")):
        one, other = (
            said(capsys, "neuro", command, place, "--target", sentences)["results"]
            for place in (trained / "run", tmp_path / "acts")
        )
        assert [row["name"] for row in one] == [row["name"] for row in other]
        for mine, theirs in zip(one, other, strict=True):
            assert mine[value] == pytest.approx(theirs[value], abs=1e-4)
    words, times = np.array([f"w{number}" for number in range(27)]), np.arange(54.0)
    timed = {"data": np.random.default_rng(0).standard_normal((54, 2)), "words": words, "onsets": times[::2], "times": times}
    np.savez(tmp_path / "timed.npz", **timed)
    in_time = said(capsys, "neuro", "encode", tmp_path / "acts", "--target", tmp_path / "timed.npz", "--lags", "1,2")
    assert (in_time["rows"], in_time["lags"]) == (54, [1, 2])
    np.savez(tmp_path / "short.npz", data=np.ones((9, 2)) * np.arange(9)[:, None])
    assert "has 27 rows, but the recording has 9 rows" in refused(
        capsys, "neuro", "encode", tmp_path / "acts", "--target", tmp_path / "short.npz", "--folds", 2
    )


def test_rsa_is_the_rank_correlation_of_distances(trained, sentences, tmp_path, capsys) -> None:
    found = said(capsys, "neuro", "rsa", trained / "run", "--target", sentences, "--samples", 50, "--output", tmp_path / "rsa")
    with np.load(sentences) as archive:
        data, upper = archive["data"].mean(0), np.triu_indices(len(SENTENCES), 1)
    theirs = 1 - np.corrcoef(data)[upper]
    for layer, one in enumerate(found["results"]):
        mine = 1 - np.corrcoef(stream(trained / "run", SENTENCES, layer))[upper]
        assert one["correlation"] == pytest.approx(spearmanr(mine, theirs).statistic, abs=1e-4)
        assert one["low"] < one["correlation"] < one["high"]
    with np.load(tmp_path / "rsa" / "results.npz") as archive:
        assert archive["recording"].shape == (27, 27)


def test_words_are_found_at_their_times_and_with_the_delay_of_the_recording(trained, tmp_path, capsys) -> None:
    arguments = ("--length", 32, "--folds", 2, "--names", "blocks.1.residual_after")
    features: dict[str, Any] = {}
    ids, size = list(" ".join(WORDS).encode()), 32
    model = load_model(open_weights(trained / "run", Registry()))
    ends = np.cumsum([len(word) + 1 for word in WORDS]) - 2
    with torch.no_grad(), capture(model, "blocks.1.residual_after") as seen:
        for end in ends:  # the window that keeps a word's last letter
            first = 0 if end < size else (end - size) // 16 * 16 + size
            stop = size if end < size else min(first + 16, len(ids))
            model(torch.tensor([ids[max(stop - size, 0) : stop]]))
            features.setdefault("rows", []).append(seen["blocks.1.residual_after"][0, end - max(stop - size, 0)])
    x = torch.stack(features["rows"]).double().numpy()
    signal = planted(np.repeat(x, 1, 0), 0.05)[0]
    samples = 2 * len(WORDS)  # a word begins in every other one, and is recorded two samples later
    delayed = 0.05 * np.random.default_rng(1).standard_normal((samples, 6))
    delayed[2::2] += signal[:-1]
    onsets = np.arange(len(WORDS)) * 0.5
    np.savez(tmp_path / "words.npz", data=signal, words=np.array(WORDS))
    np.savez(tmp_path / "story.npz", data=delayed, words=np.array(WORDS), onsets=onsets + 0.1, times=np.arange(samples) * 0.25)
    per_word = said(capsys, "neuro", "encode", trained / "run", "--target", tmp_path / "words.npz", *arguments)
    assert per_word["results"][0]["mean"] > 0.9
    story = ("neuro", "encode", trained / "run", "--target", tmp_path / "story.npz", *arguments)
    assert said(capsys, *story)["results"][0]["mean"] < 0.65
    assert said(capsys, *story, "--lags", "0,2")["results"][0]["mean"] > 0.85


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--folds", 14), "cannot make 14 folds"),
        (("--folds", 13), "24 rows cannot make 13 folds"),
        (("--folds", 3, "--lags", "27"), "lag 27: lags are 0 to 26"),
        (("--folds", 3, "--lags", "0,1"), "a stimulus of its own; remove --lags"),
        (("--folds", 3, "--lags", "x"), "--lags x: write integers"),
        (("--folds", 3, "--pool", "first"), "--pool first: choose last or mean"),
        (("--folds", 3, "--names", "blocks.0.resid"), "matches no inner value"),
        (("--folds", 3, "--length", 99), "--length 99: an input of"),
        (("--folds", 3, "--length", 3), "stimulus 0 has"),
        (("--folds", 3, "--series", "x"), "in HDF5 files only"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_forward(trained, sentences, capsys, monkeypatch, arguments, match) -> None:
    import re

    monkeypatch.setattr("forge_train.inference.stored.load_model", lambda _: pytest.fail("weights were loaded"))
    said_ = refused(capsys, "neuro", "encode", trained / "run", "--target", sentences, *arguments)
    assert re.search(match, said_.replace("\n", " "))


def test_rsa_of_samples_in_time_and_models_without_a_text_are_refused(trained, tmp_path, capsys) -> None:
    rows = np.random.default_rng(0).standard_normal((8, 3))
    np.savez(tmp_path / "t.npz", data=rows, words=np.array(["a"]), onsets=np.zeros(1), times=np.arange(8.0))
    assert "RSA compares conditions" in refused(capsys, "neuro", "rsa", trained / "run", "--target", tmp_path / "t.npz")
    np.savez(tmp_path / "n.npz", data=rows)
    assert "neither `words` nor `stimuli`" in refused(
        capsys, "neuro", "encode", trained / "run", "--target", tmp_path / "n.npz", "--folds", 2
    )
    assert "--distance cosine" in refused(capsys, "neuro", "rsa", trained, "--target", tmp_path / "n.npz", "--distance", "cosine")
