"""Predicts brain recordings from activations and compares them, in fp64. Voxels and electrodes are columns.

from forge_interp.neuro import encode, rdm, rdm_correlation

r = encode(features, recording)  # of (rows, features) and (rows, voxels): (voxels,) correlations with held-out rows
agreement = rdm_correlation(rdm(features), rdm(recording)).correlation
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_interp.neuro.dissimilarity import rdm as rdm
    from forge_interp.neuro.dissimilarity import rdm_correlation as rdm_correlation
    from forge_interp.neuro.encoding import Banded as Banded
    from forge_interp.neuro.encoding import EncodingScores as EncodingScores
    from forge_interp.neuro.encoding import Ridge as Ridge
    from forge_interp.neuro.encoding import banded_ridge as banded_ridge
    from forge_interp.neuro.encoding import encode as encode
    from forge_interp.neuro.encoding import encode_banded as encode_banded
    from forge_interp.neuro.encoding import lagged as lagged
    from forge_interp.neuro.encoding import noise_ceiling as noise_ceiling
    from forge_interp.neuro.encoding import normalized as normalized
    from forge_interp.neuro.encoding import ridge as ridge
    from forge_interp.neuro.recordings import Recording as Recording
    from forge_interp.neuro.recordings import Window as Window
    from forge_interp.neuro.recordings import read_recording as read_recording
    from forge_interp.neuro.recordings import token_words as token_words
    from forge_interp.neuro.recordings import word_features as word_features

_NAMES = {
    "dissimilarity": "rdm rdm_correlation",
    "encoding": "Banded EncodingScores Ridge banded_ridge encode encode_banded lagged noise_ceiling normalized ridge",
    "recordings": "Recording Window read_recording token_words word_features",
}
__getattr__, __dir__ = lazy_exports(__name__, {name: module for module, names in _NAMES.items() for name in names.split()})
