"""Attention in chunks (Llama 4): a position attends to the earlier positions of its own chunk, counted from the start of its
document.

A chunk is to its layer what a document is to others, so that every kernel and every kind of context parallelism applies: chunks
have numbers of their own, which take the place of those of documents.
"""

from typing import Any

import torch
from torch import Tensor

from forge_models.shape import AttentionChunk

CHUNK = "chunk"
"""First part of the key that layers with chunks of one size share."""


def chunk_of(attention: Any) -> AttentionChunk | None:
    """Returns the size of the chunks of an attention module; None if it has none."""
    size = getattr(attention, CHUNK, None)
    return None if size is None else AttentionChunk(size)


def chunk_numbers(documents: Tensor | None, positions: Tensor, size: int, longest: int, rows: int) -> Tensor:
    """Returns the number of each token's chunk, (B, T) int64, different for chunks of different documents of a row.

    Args:
        documents: (B, T) document of each token; None: each row is one document.
        positions: (T,) or (B, T) position of each token in its document, in any order.
        size: number of positions of a chunk.
        longest: maximum length of a document.
        rows: B.
    """
    parts = torch.div(positions.to(torch.int64), size, rounding_mode="floor")
    if documents is None:
        return parts.expand(rows, -1)
    return documents.to(torch.int64) * -(-longest // size) + parts
