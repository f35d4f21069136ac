"""Logits of some rows, written to memory that is there already."""

import torch
from torch import Tensor

from forge_models.torch_private import onednn_product

TILE = 4096
"""Entries of the vocabulary at a time: what oneDNN returns is new memory, and small enough to come from the heap."""

LEAST = 2**19
"""Elements of a weight from which oneDNN gains."""


def project(hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """hidden (rows, embed) @ weight.T (embed, vocab), in `out`.

    In fp32 on a CPU it is by oneDNN, tile by tile, in two thirds of the time of MKL, which torch calls (`benchmarks/LOG.md`).
    torch's FlopCounterMode counts 0 for it; `forge_models.flops` counts by the model's shape.
    `torch.backends.mkldnn.enabled = False` turns it off.
    """
    if weight.numel() < LEAST or not _replaces_mkl(hidden):
        return torch.mm(hidden, weight.T, out=out)
    for part, rows in zip(out.split(TILE, dim=1), weight.split(TILE), strict=True):
        part.copy_(onednn_product(hidden, rows))
    return out


def _replaces_mkl(hidden: Tensor) -> bool:
    fp32 = hidden.device.type == "cpu" and hidden.dtype == torch.float32
    onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return fp32 and onednn and torch.backends.mkl.is_available()
