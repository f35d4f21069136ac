"""Keys and values of earlier tokens, and states of recurrent layers, for generation."""

from collections.abc import Iterable

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer, (B, kv_heads, capacity, head_dim), after rotation, not repeated over query heads.

    The first forward allocates them with the dtype, device and number of heads with which the layer computes, because casts and
    shards of its weights determine these.
    """

    def __init__(self, owner: "KVCache") -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.index: Tensor | None = None
        """Keys of an indexer, (B, 1, capacity, head_dim)."""
        self.memory: tuple[Tensor, Tensor] | None = None
        """Keys and values of inputs outside the residual stream, such as images to which the layer attends."""
        self.recurrent: tuple[tuple[Tensor, ...] | None, Tensor | None] = (None, None)
        """Of a recurrent layer: the last inputs of its convolutions, (B, width - 1, channels) each, and its state after the last
        token of each row."""
        self._owner = owner

    def counts(self, length: int) -> Tensor:
        """Returns (B,), how many of the `length` tokens of the current forward a recurrent layer reads in each row; the rest is
        padding.

        Raises:
            ValueError: the tokens of a row do not follow those that the state has read.
        """
        return self._owner.counts(length)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores (B, kv_heads, T, head_dim) in the slots of the current forward; returns all slots in use."""
        self.k, keys = self._stored(self.k, k)
        self.v, values = self._stored(self.v, v)
        return keys, values

    def update_index(self, k: Tensor) -> Tensor:
        """Stores the keys of an indexer, (B, 1, T, head_dim), like `update`; returns all slots in use."""
        self.index, keys = self._stored(self.index, k)
        return keys

    def _stored(self, buffer: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the buffer with (B, heads, T, width) stored in the slots of the current forward, and its slots in use."""
        if buffer is None:
            batch, heads, _, width = x.shape
            # Zeros, not uninitialized memory: a masked slot contributes 0 * value, and 0 * NaN is NaN.
            buffer = x.new_zeros(batch, heads, self._owner.capacity, width)
        slots, extent = self._owner.slots, self._owner.extent
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        buffer[rows, :, slots] = x.transpose(1, 2)
        return buffer, buffer[:, :, :extent]


class KVCache:
    """A cache whose slots are positions: a query at position p sees slots 0 .. p of its row.

    So prompts of unequal length need no padding mask. Padding of a shorter row is stored in slots that no query of that row sees
    before its own later tokens replace it.
    """

    def __init__(self, layers: Iterable[str], batch: int, capacity: int, device: torch.device) -> None:
        self.layers = {name: LayerCache(self) for name in layers}
        self.batch = batch
        self.capacity = capacity
        self.extent = 0
        self.kept: dict[str, Tensor] = {}
        """State of a model between forwards, besides keys and values."""
        self.slots = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        self.lengths: list[int] | None = None
        """Number of tokens of each row that belong to its text, without padding; None: all. Recurrent layers do not read padding,
        and code that reads inner values skips it; attention does not need it."""
        self._read: Tensor | None = None
        self._counts: Tensor | None = None

    def advance(self, positions: Tensor | None, length: int) -> Tensor:
        """Begins a forward over `length` more tokens; returns their positions (B, T).

        `positions` must be below the number of slots in use after this call; None: the next positions of every row.

        Raises:
            ValueError: the cache is too small.
        """
        if self.extent + length > self.capacity:
            raise ValueError(
                f"the cache has a capacity of {self.capacity} tokens per row, but needs {self.extent} + {length}; "
                "create a larger one"
            )
        if positions is None:
            positions = torch.arange(self.extent, self.extent + length, device=self.slots.device).expand(self.batch, -1)
        if self._counts is not None:
            self._read = self._counts if self._read is None else self._read + self._counts
            self._counts = None
        self.extent += length
        self.slots = positions.to(torch.int64)
        return self.slots

    def counts(self, length: int) -> Tensor:
        """See `LayerCache.counts`; computed once per forward."""
        if self._counts is None:
            starts = self.slots[:, 0]
            counts = torch.full_like(starts, length)
            if self.lengths is not None:
                counts = (torch.tensor(self.lengths, device=starts.device) - starts).clamp(0, length)
            read = torch.zeros_like(starts) if self._read is None else self._read
            if bool(((counts > 0) & (starts != read)).any()):
                raise ValueError(
                    f"a recurrent layer has read {read.tolist()} tokens of the rows, but the next ones are at {starts.tolist()}; "
                    "it cannot go back or leave out tokens, so begin with a new cache"
                )
            self._counts = counts
        return self._counts

    def rewind(self, extent: int) -> None:
        """Makes the next forward begin at slot `extent`; later slots, such as rejected drafts, are overwritten."""
        self.extent = extent
