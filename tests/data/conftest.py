"""Small stores that tests write and read."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from forge_data.sources.store_writer import StoreWriter

EOS = 0
MakeStore = Callable[..., Path]


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    """`make_store(name, documents, ...)` writes documents of token ids, each followed by EOS."""

    def make(name: str, documents: Sequence[Sequence[int]], *, dtype: str = "uint16", shard_tokens: int = 1 << 20) -> Path:
        with StoreWriter(tmp_path / name, dtype=dtype, source=name, shard_tokens=shard_tokens) as writer:
            for document in documents:
                writer.add(np.array([*document, EOS]), np.array([len(document) + 1]))
            writer.commit()
        return tmp_path / name

    return make


@pytest.fixture
def numbered(make_store: MakeStore) -> Callable[[str, int], Path]:
    """A store whose token at stream position p is p mod 60000 + 1, except where a document ends."""

    def make(name: str, tokens: int, document: int = 37) -> Path:
        stream = np.arange(tokens) % 60_000 + 1
        pieces = [stream[start : start + document - 1] for start in range(0, tokens, document)]
        return make_store(name, [piece.tolist() for piece in pieces if len(piece)])

    return make
