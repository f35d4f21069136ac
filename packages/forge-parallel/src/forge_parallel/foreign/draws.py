"""Random numbers that depend on where in a module they are drawn, so that two forms of it can be compared while it drops out."""

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from forge_parallel.accelerator import random_states_kept


class Draws:
    """Seeds every generator whenever a module is entered: by its path, the number of the share of rows, and `stream`.

    Args:
        seed: of all of them.
        first: number of the share with which the first forward is called.
        stream: ranks with different streams draw different numbers, as tp ranks do.
    """

    def __init__(self, seed: int, first: int, stream: int) -> None:
        self._mark, self._share = f"{seed}/{stream}", first - 1

    def attach(self, root: nn.Module) -> None:
        """Hooks every module of `root`, one forward of which is one share."""
        for path, part in root.named_modules():
            part.register_forward_pre_hook(partial(self._enter, path))

    def _enter(self, path: str, _: nn.Module, __: Any) -> None:
        self._share += path == ""
        digest = hashlib.blake2b(f"{self._mark}/{self._share}/{path}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "little")
        torch.manual_seed(seed)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed)  # type: ignore[attr-defined]


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Generators are afterwards as they were before."""
    numpy = sys.modules.get("numpy")
    python, theirs = random.getstate(), numpy.random.get_state() if numpy is not None else None  # type: ignore[attr-defined]
    try:
        with random_states_kept():
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(theirs)  # type: ignore[attr-defined]
