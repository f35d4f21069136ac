"""Shares of an inner value: as bytes between ranks, and put together."""

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forge_models.interp.taps import InterpError


class Piece(NamedTuple):
    """What one rank has of a value in one forward.

    Attributes:
        tokens: (n, 2) int64 sample number and place.
        features: (k,) int64 which of the value's first dimension.
        value: (n, k, ...).
    """

    tokens: Tensor
    features: Tensor
    value: Tensor


def packed(pieces: Sequence[Piece]) -> bytes:
    """The pieces as bytes; what has no elements is left out."""
    kept = [piece for piece in pieces if piece.value.numel()]
    headers = [
        [list(piece.tokens.shape), len(piece.features), list(piece.value.shape), str(piece.value.dtype).removeprefix("torch.")]
        for piece in kept
    ]
    header = json.dumps(headers).encode()
    return b"".join(
        [len(header).to_bytes(8, "little"), header, *(_bytes(tensor) for piece in kept for tensor in piece)] if kept else []
    )


def unpacked(payload: bytes) -> Iterator[Piece]:
    """The pieces of `packed`."""
    if not payload:
        return
    size = int.from_bytes(payload[:8], "little")
    at = 8 + size
    for tokens, features, value, dtype in json.loads(payload[8:at]):
        parts = []
        for shape, kind in ((tokens, torch.int64), ([features], torch.int64), (value, getattr(torch, dtype))):
            length = torch.Size(shape).numel() * kind.itemsize
            parts.append(torch.frombuffer(bytearray(payload[at : at + length]), dtype=kind).view(shape))
            at += length
        yield Piece(*parts)


def assembled(name: str, pieces: Sequence[Piece], shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(n, 2) tokens in ascending order, and the value (n, *shape).

    Raises:
        InterpError: some rank had no share, or two had the same one.
    """
    tokens, back = torch.cat([piece.tokens for piece in pieces]).unique(dim=0, return_inverse=True)
    value = torch.empty(len(tokens), *shape, dtype=pieces[0].value.dtype)
    times = torch.zeros(len(tokens), shape[0], dtype=torch.int64)
    for piece, rows in zip(pieces, back.split([len(piece.tokens) for piece in pieces]), strict=True):
        place = (rows[:, None], piece.features[None])
        value[place] = piece.value
        times.index_put_(place, torch.ones((), dtype=torch.int64), accumulate=True)
    if not bool((times == 1).all()):
        raise InterpError(
            f"{name} did not come once from every rank that has a part of it (sample numbers given twice, or `alike` where rows "
            "differ?)"
        )
    return tokens, value


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
