"""Arrays that are used again once nobody else holds them: fresh memory costs more than filling it."""

import sys

import numpy as np


class Buffers:
    """Keeps the arrays it handed out and hands them out again when only this pool refers to them.

    A tensor made by `torch.from_numpy` refers to its array for as long as any view of it lives, so a batch that
    someone keeps is never overwritten.
    """

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        probe = [np.empty(0)]
        self._unused = _references(probe, 0)

    def take(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """An array of undefined content."""
        for index in range(len(self._arrays)):
            array = self._arrays[index]
            fits = array.shape == shape and array.dtype == dtype
            del array
            if fits and _references(self._arrays, index) == self._unused:
                return self._arrays[index]
        self._arrays.append(np.empty(shape, dtype=dtype))
        return self._arrays[-1]


def _references(arrays: list[np.ndarray], index: int) -> int:
    return sys.getrefcount(arrays[index])
