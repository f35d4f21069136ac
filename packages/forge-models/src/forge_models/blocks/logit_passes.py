"""Logits of a chunk of rows: the matrix product, the passes over the logits, and the number of rows in a chunk.

For the logits c of a row, its label y and its largest logit m, a first pass computes m, sum(exp(c - m)) and c[y]. These give a
factor f, and a second pass replaces the logits by the derivative of the loss, f * exp(c - m) - onehot(y), times the derivative
of the soft cap. If the target is spread over all words (label smoothing), the first pass also computes sum(c) and the number of
logits, and a `Target` replaces onehot(y).
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from forge_models.torch_private import onednn_product


class Chunk(NamedTuple):
    """Rows of logits and their labels.

    Attributes:
        products: (n, vocab) logits before the cap.
        labels: (n, 1) index of the label in this rank's vocabulary; 0 if another rank has it.
        mine: (n,) whether this rank's vocabulary has the label.
        soft_cap: see `LossHead`.
        spread: whether the target gives every word a probability.
    """

    products: Tensor
    labels: Tensor
    mine: Tensor
    soft_cap: float | None
    spread: bool = False


class Target(NamedTuple):
    """Target probabilities, each (n,): extra probability of the label, and of every word; both 0 for rows without a label."""

    label: Tensor
    word: Tensor


class Passes(Protocol):
    """Passes over one chunk: call `numbers`, then `differentiate` at most once."""

    def numbers(self) -> Tensor:
        """Returns (3, n): largest logit, sum of exponentials, and logit of the label (0 if another rank has it). If the target is
        spread, returns (5, n) with the sum of the logits and their number."""
        ...

    def differentiate(self, factor: Tensor, target: Target | None = None) -> None:
        """Replaces the logits by the derivative with `factor` (n,); without `target`, the target is the label alone."""
        ...


class InParts:
    """Passes without compilation, over few enough rows at a time that a CPU's cache holds them."""

    def __init__(self, chunk: Chunk, size: int, scratch: Tensor | None) -> None:
        """Processes `size` rows at a time, in `scratch` (size, vocab) or in place."""
        self._parts = list(zip(*(given.split(size) for given in chunk[:3]), strict=True))
        self._size, self._scratch, self._soft_cap, self._spread = size, scratch, chunk.soft_cap, chunk.spread
        self._held: list[_Block] = []

    def numbers(self) -> Tensor:
        self._held = [self._exponentiate(*part, keep=len(self._parts) == 1, spread=self._spread) for part in self._parts]
        return torch.cat([torch.stack((block.top, block.sum, block.chosen, *block.of_all)) for block in self._held], dim=1)

    def differentiate(self, factor: Tensor, target: Target | None = None) -> None:
        for at, (part, block, scale) in enumerate(zip(self._parts, self._held, factor.split(self._size), strict=True)):
            if len(self._parts) > 1:  # later parts have overwritten the scratch
                block = self._exponentiate(*part, keep=True)
            label = part[2].to(scale.dtype)
            if target is None:
                block.exponents.mul_(scale.unsqueeze(1)).scatter_add_(1, part[1], -label.unsqueeze(1))
            else:
                here = slice(at * self._size, at * self._size + len(scale))
                block.exponents.mul_(scale.unsqueeze(1)).sub_(target.word[here].unsqueeze(1))
                block.exponents.scatter_add_(1, part[1], -(label * target.label[here]).unsqueeze(1))
            if block.slope is not None:
                block.exponents.mul_(block.slope)
            if self._scratch is not None:
                part[0].copy_(block.exponents)

    def _exponentiate(self, products: Tensor, index: Tensor, mine: Tensor, keep: bool, spread: bool = False) -> "_Block":
        """Computes the block of `products` in the scratch or in place; without `keep`, only its per-row numbers are valid."""
        logits, slope = products if self._scratch is None else self._scratch[: len(products)].copy_(products), None
        if self._soft_cap is not None:
            bounded = logits.div_(self._soft_cap).tanh_()
            slope = 1 - bounded.square() if keep else None
            logits.mul_(self._soft_cap)
        chosen = logits.gather(1, index).squeeze(1) * mine
        top = logits.amax(dim=1)
        of_all = _of_all(logits) if spread else ()
        exponents = logits.sub_(top.unsqueeze(1)).exp_()
        return _Block(exponents, top, exponents.sum(dim=1), chosen, slope, of_all)


class _Block(NamedTuple):
    """Values of some rows of logits c with largest logit `top`: exp(c - top), their sum, the logit of the label (0 if another
    rank has it), the derivative of the cap, and, if the target is spread, the sum and number of the logits."""

    exponents: Tensor
    top: Tensor
    sum: Tensor
    chosen: Tensor
    slope: Tensor | None
    of_all: tuple[Tensor, ...]


class FusedPasses:
    """Compiled passes: the first reads the logits twice, the second once; neither allocates another tensor of their size."""

    def __init__(self, chunk: Chunk) -> None:
        """Processes all rows of `chunk` at once."""
        self._chunk, self._spread = chunk[:4], chunk.spread
        self._top: Tensor | None = None

    def numbers(self) -> Tensor:
        found = _compiled(_numbers_of_all if self._spread else _numbers)(*self._chunk)
        self._top = found[0]
        return found

    def differentiate(self, factor: Tensor, target: Target | None = None) -> None:
        if target is None:
            _compiled(_differentiate)(*self._chunk, self._top, factor)
        else:
            _compiled(_differentiate_target)(*self._chunk, self._top, factor, *target)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=True)


def _numbers(products: Tensor, index: Tensor, mine: Tensor, soft_cap: float | None) -> Tensor:
    logits, _ = _capped(products, soft_cap)
    top = logits.amax(1)
    chosen = logits.gather(1, index).squeeze(1) * mine
    return torch.stack((top, (logits - top.unsqueeze(1)).exp().sum(1), chosen))


def _differentiate(products: Tensor, index: Tensor, mine: Tensor, soft_cap: float | None, top: Tensor, factor: Tensor) -> None:
    logits, slope = _capped(products, soft_cap)
    label = (torch.arange(products.shape[1], device=products.device) == index) & mine.unsqueeze(1)
    derivative = (logits - top.unsqueeze(1)).exp() * factor.unsqueeze(1) - label.to(logits.dtype)
    products.copy_(derivative if slope is None else derivative * slope)


def _numbers_of_all(products: Tensor, index: Tensor, mine: Tensor, soft_cap: float | None) -> Tensor:
    return torch.cat((_numbers(products, index, mine, soft_cap), torch.stack(_of_all(_capped(products, soft_cap)[0]))))


def _differentiate_target(
    products: Tensor,
    index: Tensor,
    mine: Tensor,
    soft_cap: float | None,
    top: Tensor,
    factor: Tensor,
    on_label: Tensor,
    on_word: Tensor,
) -> None:
    logits, slope = _capped(products, soft_cap)
    label = (torch.arange(products.shape[1], device=products.device) == index) & mine.unsqueeze(1)
    target = on_word.unsqueeze(1) + label.to(logits.dtype) * on_label.unsqueeze(1)
    derivative = (logits - top.unsqueeze(1)).exp() * factor.unsqueeze(1) - target
    products.copy_(derivative if slope is None else derivative * slope)


def _of_all(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum and number of the logits of each row; ranks that share the vocabulary may have different numbers."""
    total = logits.sum(dim=1)
    return total, torch.full_like(total, logits.shape[1])


def _capped(products: Tensor, soft_cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Returns the capped logits in fp32 (fp64 if the input is fp64), and the derivative of the cap."""
    logits = products.to(torch.promote_types(products.dtype, torch.float32))
    if soft_cap is None:
        return logits, None
    bounded = (logits / soft_cap).tanh()
    return soft_cap * bounded, 1 - bounded.square()


TILE = 4096
"""Vocabulary entries per oneDNN product: oneDNN allocates its output, and at this size the heap serves the allocation."""

LEAST = 2**19
"""Minimum number of elements of a weight for which oneDNN is faster."""


def project(hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Writes hidden (rows, embed) @ weight.T (embed, vocab) to `out` and returns it.

    In fp32 on a CPU, oneDNN computes it tile by tile in two thirds of the time of MKL, torch's default (`benchmarks/LOG.md`).
    torch's FlopCounterMode counts 0 for these products; `forge_models.flops` counts from the model's shape.
    `torch.backends.mkldnn.enabled = False` disables them.
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


CHUNK_BYTES = 2**25
"""Maximum bytes of logits, in the dtype of the products, for which a chunk has at least 512 rows instead of 256."""

CPU_BLOCK = 2**20
"""Elements per block on a CPU: 4 MiB in fp32, which stay in its cache through all passes."""

ACCELERATOR_BLOCK = 2**26
"""Elements per block on an accelerator: 256 MiB in fp32, so that a pass takes far longer than its launch."""


def chunk_rows(vocab: int, dim: int, itemsize: int) -> int:
    """Returns the number of rows in a chunk of hidden states (rows, dim) whose logits have `vocab` elements of `itemsize` bytes.

    Each chunk reads the projection (vocab, dim) and adds to its gradient; more rows amortize this memory traffic. A chunk has
    `dim` rows, so that its logits are as large as the projection, but at least 256, or 512 if these fit into `CHUNK_BYTES`.
    """
    return max(512 if 512 * vocab * itemsize <= CHUNK_BYTES else 256, dim)


def block_rows(rows: int, width: int, device: str) -> int:
    """Returns how many of `rows`, each with `width` elements, to process at a time in fp32 on a device type."""
    return max(1, min(rows, (CPU_BLOCK if device == "cpu" else ACCELERATOR_BLOCK) // width))
