"""Keys and values of past tokens, for generation."""

from collections.abc import Iterable

import torch
from torch import Tensor


class LayerCache:
    """One layer's keys and values, (B, kv_heads, capacity, head_dim), after rotation, not repeated over query heads.

    They are allocated once, by the first forward: so their dtype, device and number of heads are those with which the
    layer computes, which casts and splits of its weights decide.
    """

    def __init__(self, owner: "KVCache") -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.memory: tuple[Tensor, Tensor] | None = None
        """Keys and values of what is not in the stream, such as images that it attends to."""
        self._owner = owner

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores (B, kv_heads, T, head_dim) in the slots of the running forward; returns every slot in use."""
        if self.k is None or self.v is None:
            batch, heads, _, head_dim = k.shape
            # Zeros, not empty memory: a masked slot still enters 0 * value, and 0 * NaN is NaN.
            self.k = k.new_zeros(batch, heads, self._owner.capacity, head_dim)
            self.v = v.new_zeros(batch, heads, self._owner.capacity, v.shape[-1])
        slots, extent = self._owner.slots, self._owner.extent
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        self.k[rows, :, slots] = k.transpose(1, 2)
        self.v[rows, :, slots] = v.transpose(1, 2)
        return self.k[:, :, :extent], self.v[:, :, :extent]


class KVCache:
    """A cache whose slot is the token's position: a query at position p sees slots 0 .. p of its row.

    So prompts of unequal length need no padding mask. What a shorter row writes past its end lies in slots that
    no query of that row sees before its own later tokens have replaced it.
    """

    def __init__(self, layers: Iterable[str], batch: int, capacity: int, device: torch.device) -> None:
        self.layers = {name: LayerCache(self) for name in layers}
        self.batch = batch
        self.capacity = capacity
        self.extent = 0
        self.kept: dict[str, Tensor] = {}
        """What a model keeps from one forward to the next besides keys and values."""
        self.slots = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        self.lengths: list[int] | None = None
        """Tokens of each row that belong to its text: what lies behind is padding. None = all. No result depends on them; what
        reads inner values leaves padding out."""

    def advance(self, positions: Tensor | None, length: int) -> Tensor:
        """Begins a forward over `length` more tokens; returns their positions (B, T).

        `positions` must lie below the number of slots in use after this call; None = the next ones for every row.

        Raises:
            ValueError: when the cache is too small.
        """
        if self.extent + length > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens a row; {self.extent} + {length} do not fit")
        if positions is None:
            positions = torch.arange(self.extent, self.extent + length, device=self.slots.device).expand(self.batch, -1)
        self.extent += length
        self.slots = positions.to(torch.int64)
        return self.slots

    def rewind(self, extent: int) -> None:
        """Has the next forward's slots begin at `extent`: what lies behind, such as rejected drafts, is written anew."""
        self.extent = extent
