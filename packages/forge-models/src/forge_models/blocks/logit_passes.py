"""The logits of a chunk of rows: their product, the passes over them, and how many rows a chunk has.

For logits c of a row, its label y and its largest logit m, a first pass computes m, sum(exp(c - m)) and c[y]. From them comes a
factor f, and a second pass replaces the logits by the derivative of the loss, f * exp(c - m) - onehot(y), times that of the soft
cap. Where the target is spread over all words, the first pass also computes sum(c) and the number of logits, and a `Target`
takes the place of onehot(y).
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
        products: (n, vocab), before the cap.
        labels: (n, 1) of words, 0 where it is not here.
        mine: (n,) whether they are here.
        soft_cap: see `LossHead`.
        spread: whether the target has a share of every word.
    """

    products: Tensor
    labels: Tensor
    mine: Tensor
    soft_cap: float | None
    spread: bool = False


class Target(NamedTuple):
    """What the softmax of each row is to be, (n,) each: of the label, and of every word; both 0 for rows without a label."""

    label: Tensor
    word: Tensor


class Passes(Protocol):
    """One chunk's: `numbers`, then at most once `differentiate`."""

    def numbers(self) -> Tensor:
        """(3, n): largest logit, sum of exponents, logit of the label or 0 where it is not here; (5, n) with the sum of logits
        and their number, where the target is spread."""
        ...

    def differentiate(self, factor: Tensor, target: Target | None = None) -> None:
        """Puts the derivative, with `factor` (n,), in the place of the logits; without `target` that of the label alone."""
        ...


class InParts:
    """Operator after operator over so few rows at a time that a cache holds them: for a CPU, and where nothing is compiled."""

    def __init__(self, chunk: Chunk, size: int, scratch: Tensor | None) -> None:
        """`size` rows at a time, in `scratch` (size, vocab) or in place."""
        self._parts = list(zip(*(given.split(size) for given in chunk[:3]), strict=True))
        self._size, self._scratch, self._soft_cap, self._spread = size, scratch, chunk.soft_cap, chunk.spread
        self._held: list[_Block] = []

    def numbers(self) -> Tensor:
        self._held = [self._exponentiate(*part, keep=len(self._parts) == 1, spread=self._spread) for part in self._parts]
        return torch.cat([torch.stack((block.top, block.sum, block.chosen, *block.of_all)) for block in self._held], dim=1)

    def differentiate(self, factor: Tensor, target: Target | None = None) -> None:
        for at, (part, block, scale) in enumerate(zip(self._parts, self._held, factor.split(self._size), strict=True)):
            if len(self._parts) > 1:  # the next one was worked out in the same memory
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
        """The block of `products`, worked out in the scratch or in place; without `keep` only its numbers a row are of use."""
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
    """Of some rows of logits c, each with its largest: exp(c - top), their sum, the logit of the label or 0 where it is
    another rank's, the derivative of the cap, and where the target is spread the sum and number of logits."""

    exponents: Tensor
    top: Tensor
    sum: Tensor
    chosen: Tensor
    slope: Tensor | None
    of_all: tuple[Tensor, ...]


class FusedPasses:
    """Both steps compiled: the first reads the logits twice, the second once; nothing more of their size is held."""

    def __init__(self, chunk: Chunk) -> None:
        """As that of `InParts`, all rows at a time."""
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
    """Of each row the sum of its logits, and how many they are: ranks that share the vocabulary need not have as many."""
    total = logits.sum(dim=1)
    return total, torch.full_like(total, logits.shape[1])


def _capped(products: Tensor, soft_cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Logits in fp32 (fp64 for fp64), and the derivative of the cap."""
    logits = products.to(torch.promote_types(products.dtype, torch.float32))
    if soft_cap is None:
        return logits, None
    bounded = (logits / soft_cap).tanh()
    return soft_cap * bounded, 1 - bounded.square()


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


CHUNK_BYTES = 2**25
"""Bytes of logits, in the dtype of the products, that a chunk may hold for a projection of any size."""

CPU_BLOCK = 2**20
"""Elements that are worked on at a time on a CPU: 4 MiB in fp32, which its cache holds through all passes over them."""

ACCELERATOR_BLOCK = 2**26
"""The same on an accelerator: 256 MiB in fp32, so that a pass takes far longer than its launch."""


def chunk_rows(vocab: int, dim: int, itemsize: int) -> int:
    """Rows of a chunk of hidden states (rows, dim) whose logits have `vocab` elements of `itemsize` bytes.

    Each chunk reads the projection (vocab, dim) and adds to the sum of its gradient, so rows are what amortises that traffic:
    as many as `dim`, which makes a chunk's logits as large as the projection, and 256 at least.
    """
    return max(512 if 512 * vocab * itemsize <= CHUNK_BYTES else 256, dim)


def block_rows(rows: int, width: int, device: str) -> int:
    """How many of `rows`, of `width` elements each, to work on at a time on a type of device: so much exists in fp32."""
    return max(1, min(rows, (CPU_BLOCK if device == "cpu" else ACCELERATOR_BLOCK) // width))
