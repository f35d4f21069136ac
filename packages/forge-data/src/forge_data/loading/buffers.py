"""Arrays that are used again when no other reference is left: fresh memory costs more than filling it."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np


class Buffers:
    """Keeps the arrays it handed out and hands them out again when only this pool refers to them.

    A tensor made by `torch.from_numpy` refers to its array for as long as any view of it lives, so a batch that
    someone keeps is never overwritten.
    """

    def __init__(self, make: Callable[[tuple[int, ...], Any], np.ndarray] = np.empty) -> None:
        """`make` gives a new array of a shape and dtype that owns its memory, or whose owner is not an array."""
        self._make = make
        self._arrays: list[np.ndarray] = []
        probe = [np.empty(0)]
        self._unused = _references(probe, 0)

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array of undefined content."""
        for index in range(len(self._arrays)):
            array = self._arrays[index]
            fits = array.shape == shape and array.dtype == dtype
            del array
            if fits and _references(self._arrays, index) == self._unused:
                return self._arrays[index]
        self._arrays.append(self._make(shape, dtype))
        return self._arrays[-1]

    def held(self) -> set[int]:
        """Identities of the arrays of this pool."""
        return {id(array) for array in self._arrays}

    def drop_others(self, shape: tuple[int, ...]) -> None:
        """Forgets arrays of another shape, when it will not be asked for again."""
        self._arrays = [array for array in self._arrays if array.shape == shape]


def _references(arrays: list[np.ndarray], index: int) -> int:
    return sys.getrefcount(arrays[index])
