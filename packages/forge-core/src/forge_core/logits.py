"""How much of the logits exists at a time, for every loss head that takes rows in chunks. Integers only."""

CHUNK = 2**25
"""Bytes of logits, in the dtype of the products, that a chunk may hold for a projection of any size."""

BLOCK = 2**20
"""Elements that are worked on at a time on a CPU: 4 MiB in fp32, which its cache holds through all passes over them."""

ACCELERATED = 2**26
"""The same on an accelerator: 256 MiB in fp32, so that a pass takes far longer than its launch."""


def chunk_rows(vocab: int, dim: int, itemsize: int) -> int:
    """Rows of a chunk of hidden states (rows, dim) whose logits have `vocab` elements of `itemsize` bytes.

    Each chunk reads the projection (vocab, dim) and adds to the sum of its gradient, so rows are what amortises that traffic:
    as many as `dim`, which makes a chunk's logits as large as the projection, and 256 at least.
    """
    return max(512 if 512 * vocab * itemsize <= CHUNK else 256, dim)


def block_rows(rows: int, width: int, device: str) -> int:
    """How many of `rows`, of `width` elements each, to work on at a time on a type of device: so much exists in fp32."""
    return max(1, min(rows, (BLOCK if device == "cpu" else ACCELERATED) // width))
