"""Keys that stand for windows of tokens (DeepSeek-V4, 2026), and which of them a query sees.

A document is cut into windows of `rate` tokens, from its first token on; tokens after its last whole window belong to none. Token
j of a window has a vector c_j and a gate z_j, both linear in the input, and b_j is trained for each place of a window. The window
becomes one entry, which is rotated like its first token:

    norm(sum over j of c_j * softmax over j of (z_j + b_j))          (products per channel)

With an overlap, c, z and b have two halves. The sum is then over 2 `rate` terms: the second halves of the window, and the first
halves of the window before it in the document.

A query sees an entry if it is the last token of the window or a later one in the document.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.specs import Dim, Init, ModuleSpec, TensorSpec
from forge_models.blocks.attention import STREAM, mask, visible
from forge_models.blocks.chunks import document_runs
from forge_models.blocks.layers import Linear, linear_specs, unfilled
from forge_models.blocks.rope import Rotation
from forge_models.shape import BlockContext

LOW: tuple[Dim, ...] = ("batch", "sequence", None)


class Windows(NamedTuple):
    """What queries of a batch see: T queries, K keys, and S entries, of which some may be unused.

    Attributes:
        keys: (B or 1, 1, T, K) bool, True for keys that a query sees.
        entries: (B or 1, 1, T, S) bool, True for entries that a query sees; None in layers without entries.
        last: (B or 1, S) int64 index of the last token of the window of each entry, at most K - 1.
        begins: (B or 1, S) bool, whether the window is the first one of its document.
    """

    keys: Tensor
    entries: Tensor | None = None
    last: Tensor | None = None
    begins: Tensor | None = None

    def first(self, rate: int) -> Tensor:
        """Returns (B or 1, S), the index of the first token of each window of `rate` tokens."""
        assert self.last is not None
        return self.last + 1 - rate

    def seen(self, entries: Tensor | None = None) -> Tensor:
        """Returns (B or 1, 1, T, K + S): the keys that queries see, then the entries, or those of `entries` (B, T, S)."""
        shown = self.entries if entries is None else entries.unsqueeze(1)
        if shown is None:
            return self.keys
        rows = max(len(self.keys), len(shown))
        return torch.cat((self.keys.expand(rows, -1, -1, -1), shown.expand(rows, -1, -1, -1)), -1)


def windows_of(documents: Tensor | None, length: int, window: int | None, rate: int | None, device: Any) -> Windows:
    """Returns what queries of whole rows see.

    Args:
        documents: (B, T) document of each token, in runs of equal numbers; None: each row is one document.
        length: T.
        window: number of positions that a query sees, itself included; None: all.
        rate: tokens of an entry; None: there are no entries.
        device: device of the result.
    """
    keys = mask(documents, length, window, device)
    if rate is None:
        return Windows(keys)
    places, count = torch.arange(length, device=device), length // rate
    if documents is None:
        last = (torch.arange(count, device=device) + 1) * rate - 1
        return Windows(keys, (last <= places[:, None])[None, None], last[None], (last < rate)[None])
    runs = document_runs(documents)
    starts = torch.where(F.pad(runs.diff(dim=1), (1, 0), value=1) > 0, places, 0).cummax(1).values
    inside = places - starts  # position in the document
    ends = (inside + 1) % rate == 0
    # Entry e is the e-th window that ends in the row. Other tokens write to one more entry, which is cut off.
    numbers = torch.where(ends, ends.cumsum(1) - 1, count)
    last = torch.full((len(runs), count + 1), length, device=device).scatter_(1, numbers, places.expand_as(numbers))[:, :count]
    used, last = last < length, last.clamp(max=max(length - 1, 0))
    same = runs[:, :, None] == runs.gather(1, last)[:, None]
    entries = (same & used[:, None] & (last[:, None] <= places[:, None])).unsqueeze(1)
    return Windows(keys, entries, last, inside.gather(1, last) < rate)


def cached_windows(slots: Tensor, extent: int, window: int | None, rate: int | None) -> Windows:
    """Returns what queries at `slots` (B, T) see of the first `extent` slots of a cache; each row is one document."""
    keys = visible(slots[:, :, None] - torch.arange(extent, device=slots.device), window).unsqueeze(1)
    if rate is None:
        return Windows(keys)
    last = (torch.arange(extent // rate, device=slots.device) + 1) * rate - 1
    return Windows(keys, (last <= slots[:, :, None]).unsqueeze(1), last[None], (last < rate)[None])


def rotate_pairs(x: Tensor, rotation: Rotation, back: bool = False) -> Tensor:
    """Rotates the last dimensions of `x` (B, heads, T, width) by its positions, each even one with the odd one behind it; with
    `back` by the opposite angles. Computes in fp32 or wider, and rounds once."""
    turning = 2 * rotation.cos.shape[-1]
    still, pairs = x.split((x.shape[-1] - turning, turning), -1)
    first, second = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotation.cos, -rotation.sin if back else rotation.sin
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    return torch.cat((still, turned.to(x.dtype)), -1)


def rotation_at(rotation: Rotation, places: Tensor) -> Rotation:
    """Returns the rotation of the positions of tokens (B or 1, S), from that of all tokens of the rows."""
    cos, sin = rotation.cos, rotation.sin
    if cos.dim() == 2:  # of all rows
        cos, sin = (angles[places].unsqueeze(1) for angles in (cos, sin))
    else:
        index = places[:, None, :, None].expand(len(cos), 1, -1, cos.shape[-1])
        cos, sin = cos.gather(2, index), sin.gather(2, index)
    return Rotation(cos, sin)


class Compressor(nn.Module):
    """Makes one entry of each window; see the module docstring."""

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(self, context: BlockContext, width: int, rate: int, overlaps: bool) -> None:
        """`width` is that of an entry."""
        super().__init__()
        norm: Any = context.norm
        self.init_std, self.width, self.rate, self.overlaps = context.init_std, width, rate, overlaps
        outputs = 2 * width if overlaps else width
        self.kv_proj = Linear(context.dim, outputs)
        self.gate_proj = Linear(context.dim, outputs)
        self.position_bias = unfilled(rate * outputs)
        self.kv_norm: nn.Module = norm.build(width)

    def projected(self, x: Tensor) -> Tensor:
        """(B, T, dim) -> (B, T, 2 outputs): what entries are made of, vectors and then gates."""
        return torch.cat((self.kv_proj(x), self.gate_proj(x)), -1)

    def forward(self, made: Tensor, windows: Windows, rotation: Rotation) -> Tensor:
        """Results of `projected` of all tokens, (B, K, 2 outputs) -> entries (B, 1, S, width). `rotation` is that of entries."""
        wide = torch.promote_types(made.dtype, torch.float32)
        places = windows.first(self.rate).unsqueeze(-1) + torch.arange(self.rate, device=made.device)
        rows = torch.arange(len(made), device=made.device)[:, None, None]
        kv, gates = made[rows, places].to(wide).chunk(2, -1)  # (B, S, rate, outputs)
        gates = gates + self.position_bias.to(wide).view(self.rate, -1)
        if self.overlaps:
            assert windows.begins is not None
            hidden = windows.begins[:, :, None, None]
            kv, gates = _with_previous(kv, self.width), _with_previous(gates, self.width, hidden)
        pooled = (kv * gates.softmax(2)).sum(2).to(made.dtype)
        return rotate_pairs(self.kv_norm(pooled).unsqueeze(1), rotation)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the parameters, by name relative to this module, without those of its norm."""
        fused = (self.width, self.width) if self.overlaps else ()
        specs = {}
        for name in ("kv_proj", "gate_proj"):
            made = linear_specs(name, getattr(self, name), (None, "embed"), self.init_std)
            specs |= {path: TensorSpec(spec.dims, spec.init, spec.group, fused=fused) for path, spec in made.items()}
        return specs | {"position_bias": TensorSpec((None,), Init("zeros"), "vector")}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout of its layers, which every rank holds whole."""
        return {name: ModuleSpec((STREAM,), (LOW,)) for name in ("kv_proj", "gate_proj")}


def _with_previous(x: Tensor, width: int, hidden: Tensor | None = None) -> Tensor:
    """Returns (B, S, 2 rate, width) from (B, S, rate, 2 width): the first halves of the entry before, then the second halves.
    The former are -inf where `hidden` (B or 1, S, 1, 1)."""
    previous = F.pad(x[:, :-1, :, :width], (0, 0, 0, 0, 1, 0))[:, : x.shape[1]]
    if hidden is not None:
        previous = previous.masked_fill(hidden, float("-inf"))
    return torch.cat((previous, x[..., width:]), 2)
