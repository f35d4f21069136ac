"""What a fusion is, where the tokens of images stand in a row, and modules that have no input in a batch."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from forge_core.errors import DataError
from forge_models.generation.cache import KVCache
from forge_models.moe.losses import attach
from forge_models.shape import DecoderShape
from forge_models.torch_private import assert_async
from forge_vlm.context import FusionContext


class Inputs(NamedTuple):
    """What a forward tells a fusion.

    Attributes:
        tokens: (B, T) ids.
        documents: (B, T), or None when each row is one document.
        visual: (images, per_image, dim) vectors of the adapter; None on parts that have no encoder, and where nothing is trained
            and no row has an image.
        image_rows: (B, M) number of each image of a row, -1 where it has fewer; None with `visual`.
        cache: of a generation.
        present: (images, vectors) bool, False for vectors that are padding; None: there are none.
        prefix: (B, T) bool, what sees each other under a mask with a prefix; None: all up to the last image of a document.
    """

    tokens: Tensor
    documents: Tensor | None
    visual: Tensor | None
    image_rows: Tensor | None
    cache: KVCache | None = None
    prefix: Tensor | None = None
    present: Tensor | None = None


class Fusion(Protocol):
    """Gives a decoder its blocks. `in_stream`: vectors of images take the places of their placeholders in the stream."""

    in_stream: bool

    def block(self, shape: DecoderShape, layer: int) -> nn.Module:
        """A block; its `reads` are keys of what `shared` returns."""
        ...

    def shared(self, inputs: Inputs) -> dict[str, Any]:
        """What the blocks of a forward share."""
        ...

    def seen(self, mask: Any, inputs: Inputs, window: int | None, x: Tensor) -> Any:
        """What an attention core is given in the place of its `mask`."""
        ...


class FusionBase:
    """A fusion that shares nothing and leaves attention causal."""

    in_stream = True

    def __init__(self, context: FusionContext) -> None:
        self.context = context

    def shared(self, inputs: Inputs) -> dict[str, Any]:
        """See `Fusion`."""
        del inputs
        return {}

    def seen(self, mask: Any, inputs: Inputs, window: int | None, x: Tensor) -> Any:
        """See `Fusion`."""
        del inputs, window, x
        return mask


def feature_places(tokens: Tensor, image_token: int, image_rows: Tensor, per_image: int, counts: Tensor | None = None) -> Tensor:
    """(B, T) int64: which of the (images * per_image) feature vectors stands at each place; -1 where there is none.

    Args:
        tokens: (B, T) ids; the k-th placeholder of a row is token k % per_image of its image k // per_image.
        image_token: id of the placeholder.
        image_rows: (B, M) int64 number of each image of a row, -1 where a row has fewer.
        per_image: feature vectors of an image.
        counts: (images,) how many of them have a placeholder, the first ones of an image; None: all.
    """
    here = tokens == image_token
    order = (here.cumsum(1) - 1).clamp(min=0)
    if counts is not None:
        each = _counts_in_rows(counts, image_rows)
        ends = each.cumsum(1)
        slot = torch.searchsorted(ends, order, right=True).clamp(max=image_rows.shape[1] - 1)
        image = image_rows.gather(1, slot)
        within = order - (ends - each).gather(1, slot)
        return (image * per_image + within).masked_fill(~here | (image < 0), -1)
    slot = (order // per_image).clamp(max=image_rows.shape[1] - 1)
    image = image_rows.gather(1, slot)
    return (image * per_image + order % per_image).masked_fill(~here | (image < 0), -1)


def _counts_in_rows(counts: Tensor, image_rows: Tensor) -> Tensor:
    """(B, M): of (images,) numbers those of each row's images, 0 where a row has fewer."""
    if not len(counts):
        return torch.zeros_like(image_rows)
    return counts[image_rows.clamp(min=0)].masked_fill(image_rows < 0, 0)


def image_blocks(tokens: Tensor, image_token: int, per_image: int) -> Tensor:
    """(B, T) int64 number of the image inside its row that each placeholder belongs to, -1 elsewhere."""
    here = tokens == image_token
    return ((here.cumsum(1) - 1) // per_image).masked_fill(~here, -1)


def seen_images(tokens: Tensor, image_token: int, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """(first, end), each (B, T) int64: a token sees images first .. end - 1 of its row, by their order in the row.

    It sees the images of the last group of placeholders before it, from each one's place on and never before it; neighboring
    placeholders are one group. A document sees its images only.
    """
    here = tokens == image_token
    end = here.cumsum(1)
    starts = here.clone()
    starts[:, 1:] &= ~here[:, :-1]
    begins = torch.zeros_like(here)
    begins[:, 0] = True
    if documents is not None:
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    before = end - here.long()
    first = before.masked_fill(~(starts | begins), -1).cummax(1).values
    return first, end


class Misplaced(DataError, ValueError):
    """A batch whose placeholders are not as many as its images need, or with labels that its model would see."""


def on_host(x: Tensor) -> bool:
    """Whether a look at the values waits for nothing."""
    return x.device.type == "cpu"


def check_placeholders(
    tokens: Tensor, image_token: int, image_rows: Tensor, per_image: int, counts: Tensor | None = None
) -> None:
    """Refuses a batch whose placeholders are not as many as its images need.

    On the host it says which row; on a device, for which the host does not wait, the kernel that looks ends the process.

    Raises:
        Misplaced: on the host.
    """
    if on_host(tokens):
        if fault := placeholder_fault(tokens, image_token, image_rows, per_image, counts):
            raise Misplaced(fault)
        return
    equal = (tokens == image_token).sum(1) == _placeholders_needed(image_rows, per_image, counts)
    assert_async(equal.all(), f"placeholders (id {image_token}) are not as many as the images of a row need")


def _placeholders_needed(image_rows: Tensor, per_image: int, counts: Tensor | None) -> Tensor:
    """(B,) placeholders of each row."""
    return (image_rows >= 0).sum(1) * per_image if counts is None else _counts_in_rows(counts, image_rows).sum(1)


def placeholder_fault(tokens: Tensor, image_token: int, image_rows: Tensor, per_image: int, counts: Tensor | None = None) -> str:
    """How the numbers of placeholders and images disagree, naming the row; empty when they do not. It waits for the device."""
    found = (tokens == image_token).sum(1)
    images, needed = (image_rows >= 0).sum(1), _placeholders_needed(image_rows, per_image, counts)
    wrong = (found != needed).nonzero().flatten().tolist()
    if not wrong:
        return ""
    row = wrong[0]
    each = f"{per_image} tokens each" if counts is None else "a token for each patch"
    return (
        f"row {row} has {int(found[row])} placeholders (id {image_token}) and {int(images[row])} images of {each}, "
        f"which need {int(needed[row])}; text may not hold that id: set model.image_token to "
        "one that it never has"
    )


def with_zero_gradient(x: Tensor, *made: Tensor) -> Tensor:
    """`x` itself; its backward also runs that of `made`, with a gradient of zero: what made them has one, not none."""
    for each in made:
        if each.requires_grad:
            x = attach(x, each.sum(), each.new_zeros(()))
    return x


def no_tokens_of(x: Tensor) -> Tensor:
    """(1, 0, ...) of (B, T, ...). It has a gradient where `x` has one, since experts on other ranks send it back, and that costs
    nothing: a slice of `x` would fill as much as `x` with zeros."""
    return _NoTokens.apply(x)


class _NoTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.new_empty((1, 0, *x.shape[2:]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # type: ignore[override]
        del ctx, grads
