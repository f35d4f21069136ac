"""The random initial values of a tensor: a function of a seed and the tensor's global name, the same in every package.

A tensor is flattened and split into blocks of `BLOCK` elements. Each block has its own counter-based random stream, so a rank
that holds a part of a tensor draws only the blocks that overlap this part. On a CPU the stream is numpy's Philox with the
tensor's key and the block as counter; on CUDA it is torch's Philox, seeded for each block. Each matrix of a stack counts as a
separate tensor.
"""

from hashlib import blake2b

BLOCK = 1 << 16
"""Elements drawn from one random stream."""


def key_of(seed: int, name: str) -> bytes:
    """Returns the key of a tensor's random streams, 16 bytes."""
    return blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()


def philox(key: bytes, block: int) -> dict[str, int | list[int]]:
    """Returns the arguments of `numpy.random.Philox` for a block; its values are `standard_normal(BLOCK, dtype=float32)`."""
    return {"key": int.from_bytes(key, "little"), "counter": [0, 0, block, 0]}


def device_seed(key: bytes, block: int) -> int:
    """Returns the seed of torch's CUDA generator for a block; its values are `normal_` of `BLOCK` elements in fp32."""
    return int.from_bytes(blake2b(key + block.to_bytes(8, "little"), digest_size=8).digest(), "little") >> 1


def row_name(name: str, row: int) -> str:
    """Returns the name of a matrix in a stack."""
    return f"{name}[{row}]"
