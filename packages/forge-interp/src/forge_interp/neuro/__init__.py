"""Predicts brain recordings from activations and compares them, in fp64. Voxels and electrodes are columns.

    import torch
    from forge_interp.neuro import encode, rdm, rdm_correlation

    features = torch.randn(60, 8)  # (rows, features)
    recording = features @ torch.randn(8, 3) + 0.1 * torch.randn(60, 3)  # (rows, voxels)
    r = encode(features, recording)  # (voxels,): correlations with held-out rows
    assert r.shape == (3,)
    agreement = rdm_correlation(rdm(features), rdm(recording)).correlation

`read_recording` reads recordings from files. Importing this package imports no torch.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_interp.neuro.dissimilarity import rdm, rdm_correlation
    from forge_interp.neuro.encoding import (
        Banded,
        EncodingScores,
        Ridge,
        banded_ridge,
        encode,
        encode_banded,
        lagged,
        noise_ceiling,
        normalized,
        ridge,
    )
    from forge_interp.neuro.recordings import Recording, Window, read_recording, token_words, word_features

__all__ = [
    "Banded",
    "EncodingScores",
    "Recording",
    "Ridge",
    "Window",
    "banded_ridge",
    "encode",
    "encode_banded",
    "lagged",
    "noise_ceiling",
    "normalized",
    "rdm",
    "rdm_correlation",
    "read_recording",
    "ridge",
    "token_words",
    "word_features",
]
__getattr__, __dir__ = lazy_exports(__name__)
