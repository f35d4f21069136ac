"""The one label shift: logits at position t are scored against the token after it.

No label crosses a document border: the last token of a document predicts nothing. Where documents end in an
end-of-document token, the token before it predicts it, and it predicts nothing itself.
"""

import numpy as np

from forge_core.batch import IGNORE
from forge_core.errors import DataError


def shift(
    windows: np.ndarray, rows: np.ndarray, columns: np.ndarray, tokens: np.ndarray, labels: np.ndarray, at: np.ndarray
) -> None:
    """Writes model inputs and labels of a set of windows.

    Args:
        windows: (N, T + 1) token ids: each row's tokens and the one after them, any integer dtype.
        rows, columns: (K,) int64, document ends inside the windows: token `columns - 1` of the window is the last of
            its document, 1 <= column <= T.
        tokens: (M, T) int64, of which rows `at` are written.
        labels: (M, T) int64, too; `IGNORE` where there is nothing to predict.
        at: (N,) int64, the row of each window.

    Raises:
        DataError: ids that are not integers, which would be rounded.
    """
    if windows.dtype.kind not in "ui":
        raise DataError(f"token ids must be integers, got {windows.dtype.name} from a source")
    tokens[at] = windows[:, :-1]
    labels[at] = windows[:, 1:]
    labels[at[rows], columns - 1] = IGNORE
