"""Which random numbers a tensor begins with: a function of a seed and the tensor's global name, the same in every package.

A tensor is flattened and cut into blocks of `BLOCK` elements. Each block has its own counter-based stream, so that whoever holds
a part of a tensor draws only the blocks that it touches. On a CPU the stream is numpy's Philox, whose key is the tensor's and
whose counter is the block; on CUDA torch's Philox, seeded for each block. Each matrix of a stack is a tensor of its own.
"""

from hashlib import blake2b

BLOCK = 1 << 16
"""Elements drawn from one random stream."""


def key_of(seed: int, name: str) -> bytes:
    """Of a tensor's streams, 16 bytes."""
    return blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()


def philox(key: bytes, block: int) -> dict[str, int | list[int]]:
    """Arguments of `numpy.random.Philox` for a block; its numbers are `standard_normal(BLOCK, dtype=float32)`."""
    return {"key": int.from_bytes(key, "little"), "counter": [0, 0, block, 0]}


def device_seed(key: bytes, block: int) -> int:
    """Of a generator of torch on CUDA for a block; its numbers are `normal_` of `BLOCK` elements in fp32."""
    return int.from_bytes(blake2b(key + block.to_bytes(8, "little"), digest_size=8).digest(), "little") >> 1


def row_name(name: str, row: int) -> str:
    """Of a matrix in a stack."""
    return f"{name}[{row}]"
