"""How much of the logits exists at a time, for every loss head that takes rows in chunks. Integers only."""

CHUNK = 2**25
"""Bytes of one chunk's logits on a rank at most, in the dtype of the products, unless that is fewer than 256 rows."""

BLOCK = 2**20
"""Elements that are worked on at a time on a CPU: 4 MiB in fp32, which its cache holds through all passes over them."""


def chunk_rows(vocab: int, itemsize: int) -> int:
    """Rows of a chunk whose logits have `vocab` elements of `itemsize` bytes.

    256 rows keep the products with the projection bound by arithmetic, not by reading it once per chunk.
    """
    return 512 if 512 * vocab * itemsize <= CHUNK else 256


def block_rows(rows: int, width: int, device: str) -> int:
    """How many of `rows`, of `width` elements each, to work on at a time on a type of device."""
    return max(1, min(rows, BLOCK // width)) if device == "cpu" else rows
