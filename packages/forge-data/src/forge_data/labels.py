"""The one label shift: logits at position t are scored against the token after it.

No label crosses a document border: the last token of a document predicts nothing. Where documents end in an
end-of-document token, the token before it predicts it, and it predicts nothing itself.
"""

import numpy as np

from forge_core.batch import IGNORE


def shift(windows: np.ndarray, rows: np.ndarray, columns: np.ndarray, tokens: np.ndarray, labels: np.ndarray) -> None:
    """Writes model inputs and labels of a set of windows.

    Args:
        windows: (N, T + 1) token ids: each row's tokens and the one after them, any integer dtype.
        rows, columns: (K,) int64, document ends inside the windows: token `columns - 1` of the window is the last of
            its document, 1 <= column <= T.
        tokens: (N, T) int64, written.
        labels: (N, T) int64, written; `IGNORE` where there is nothing to predict.
    """
    np.copyto(tokens, windows[:, :-1], casting="same_kind" if windows.dtype != np.uint64 else "unsafe")
    np.copyto(labels, windows[:, 1:], casting="same_kind" if windows.dtype != np.uint64 else "unsafe")
    labels[rows, columns - 1] = IGNORE
