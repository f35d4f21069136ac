"""The protocol of a fusion, the positions of image tokens in a row, and gradients of modules without input in a batch.

Positions of image tokens are computed from the ids of a row as integers on the device, so the host does not wait for them.
Modules without input in a batch, such as an encoder if no row has an image, run on a dummy input, because ranks that exchange
weights and gradients must run the same modules.

Images as tokens of the sequence, in one decoder (LLaVA, Liu et al., 2023).

Attention is causal, bidirectional within each image, or bidirectional within a prefix (PaliGemma, Beyer et al., 2024). The model
would see labels inside of a prefix; `seen_labels` finds them.
"""

from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from forge_core.batch import IGNORE
from forge_core.errors import DataError
from forge_models.autograd import attach
from forge_models.blocks.attention import mask as causal_mask
from forge_models.blocks.block import Block
from forge_models.blocks.cache import KVCache
from forge_models.shape import DecoderShape
from forge_models.torch_private import assert_async
from forge_vlm.context import FusionContext


class Inputs(NamedTuple):
    """Inputs of a fusion in one forward.

    Attributes:
        tokens: (B, T) ids.
        documents: (B, T) document numbers, or None if each row is one document.
        visual: (images, per_image, dim) vectors of the adapter; None on parts without an encoder, and outside of training if no
            row has an image.
        image_rows: (B, M) number of each image of a row, padded with -1; None if `visual` is None.
        cache: keys and values of a generation.
        prefix: (B, T) bool mask of tokens that see each other under a prefix mask; None: everything up to the last image of a
            document.
        present: (images, vectors) bool, False for vectors that are padding; None: no padding.
    """

    tokens: Tensor
    documents: Tensor | None
    visual: Tensor | None
    image_rows: Tensor | None
    cache: KVCache | None = None
    prefix: Tensor | None = None
    present: Tensor | None = None


class Fusion(Protocol):
    """Builds the blocks of a decoder. `in_stream`: whether image vectors replace their placeholders in the stream."""

    in_stream: bool

    def block(self, shape: DecoderShape, layer: int) -> nn.Module:
        """Returns the block of a layer; its `reads` are keys of the dict that `shared` returns."""
        ...

    def shared(self, inputs: Inputs) -> dict[str, Any]:
        """Returns values that all blocks of a forward share."""
        ...

    def seen(self, mask: Any, inputs: Inputs, window: int | None, x: Tensor) -> Any:
        """Returns the mask for an attention core, instead of `mask`."""
        ...


class FusionBase:
    """A fusion without shared values and with causal attention."""

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
    """Returns (B, T) int64: index of the feature vector at each position, among (images * per_image); -1 at other tokens.

    Args:
        tokens: (B, T) ids; the k-th placeholder of a row is token k % per_image of its image k // per_image.
        image_token: id of the placeholder.
        image_rows: (B, M) int64 number of each image of a row, padded with -1.
        per_image: number of feature vectors of an image.
        counts: (images,) number of vectors of each image that have a placeholder (always the first ones); None: all.
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
    """Returns the (B, M) counts of each row's images, padded with 0, from (images,) counts."""
    if not len(counts):
        return torch.zeros_like(image_rows)
    return counts[image_rows.clamp(min=0)].masked_fill(image_rows < 0, 0)


def image_blocks(tokens: Tensor, image_token: int, per_image: int) -> Tensor:
    """Returns (B, T) int64: for each placeholder the number of its image within the row; -1 at other tokens."""
    here = tokens == image_token
    return ((here.cumsum(1) - 1) // per_image).masked_fill(~here, -1)


def seen_images(tokens: Tensor, image_token: int, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (first, end), each (B, T) int64: a token sees images first .. end - 1 of its row, by their order in the row.

    A token sees the images of the last group of placeholders before it, never of a later one. Adjacent placeholders form one
    group. A document sees only its own images.
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
    """A batch whose numbers of placeholders and images disagree, or whose labels its model would see."""


def on_host(x: Tensor) -> bool:
    """Whether values can be read without waiting for a device."""
    return x.device.type == "cpu"


def check_placeholders(
    tokens: Tensor, image_token: int, image_rows: Tensor, per_image: int, counts: Tensor | None = None
) -> None:
    """Checks that the numbers of placeholders and images of a batch agree.

    For tensors on the CPU the error names the row. For tensors on a device the host does not wait: an assertion in a kernel ends
    the process.

    Raises:
        Misplaced: the numbers of a row on the CPU disagree.
    """
    if on_host(tokens):
        if fault := placeholder_fault(tokens, image_token, image_rows, per_image, counts):
            raise Misplaced(fault)
        return
    equal = (tokens == image_token).sum(1) == _placeholders_needed(image_rows, per_image, counts)
    assert_async(equal.all(), f"a row has more or fewer placeholders (id {image_token}) than its images need")


def _placeholders_needed(image_rows: Tensor, per_image: int, counts: Tensor | None) -> Tensor:
    """Returns the (B,) number of placeholders that each row needs."""
    return (image_rows >= 0).sum(1) * per_image if counts is None else _counts_in_rows(counts, image_rows).sum(1)


def placeholder_fault(tokens: Tensor, image_token: int, image_rows: Tensor, per_image: int, counts: Tensor | None = None) -> str:
    """Returns a message about the first row with a wrong number of placeholders; "" if there is none. Waits for the device."""
    placeholders = (tokens == image_token).sum(1)
    images, needed = (image_rows >= 0).sum(1), _placeholders_needed(image_rows, per_image, counts)
    wrong = (placeholders != needed).nonzero().flatten().tolist()
    if not wrong:
        return ""
    row = wrong[0]
    each = f"{per_image} tokens each" if counts is None else "a token for each patch"
    return (
        f"row {row} has {int(placeholders[row])} placeholders (id {image_token}) and {int(images[row])} images of {each}, "
        f"which need {int(needed[row])}; text must not contain that id: set model.image_token to an id that no text has"
    )


def with_zero_gradient(x: Tensor, *made: Tensor) -> Tensor:
    """Returns `x`. Its backward also runs the backward of `made` with a gradient of zero, so that the modules that computed them
    get a gradient of zero instead of None."""
    for each in made:
        if each.requires_grad:
            x = attach(x, each.sum(), each.new_zeros(()))
    return x


def no_tokens_of(x: Tensor) -> Tensor:
    """Returns an empty tensor (1, 0, ...) for `x` (B, T, ...), connected to its graph, because experts on other ranks send its
    gradient back. Its backward is free; that of an empty slice would fill a tensor as large as `x` with zeros."""
    return _NoTokens.apply(x)


class _NoTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.new_empty((1, 0, *x.shape[2:]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # type: ignore[override]
        del ctx, grads


ImageAttention = Literal["causal", "bidirectional_image", "prefix"]


def seen_with_images(
    mask: Any, kind: ImageAttention, context: FusionContext, inputs: Inputs, window: int | None, x: Tensor
) -> Any:
    """Returns the mask of an attention core, extended for images: (B, 1, T, S) bool, True = visible; for `causal` the mask
    unchanged.

    `bidirectional_image`: tokens of an image see the whole image (Gemma 3, 2025). `prefix`: tokens of the prefix see the whole
    prefix; by default it ends with the last image of a document.
    """
    if kind == "causal" or context.image_token is None:
        return mask
    tokens, documents, cache = inputs.tokens, inputs.documents, inputs.cache
    here = tokens == context.image_token
    length = tokens.shape[1]
    if cache is not None and (length == 1 or cache.extent != length):
        return mask  # images are in the first forward of a generation; later tokens see everything before them
    seen = mask if isinstance(mask, Tensor) else causal_mask(documents, length, window, x.device)
    if kind == "bidirectional_image":
        images = image_blocks(tokens, context.image_token, context.per_image)
        both = here[:, :, None] & (images[:, :, None] == images[:, None, :])
    else:
        prefix = prefix_of(tokens, context.image_token, documents, inputs.prefix)
        both = prefix[:, :, None] & prefix[:, None, :]
    if documents is not None:
        both &= documents[:, :, None] == documents[:, None, :]
    return seen | both.unsqueeze(1)


class JointFusion(FusionBase):
    """See `forge_vlm.components.fusions.JointDecoder`."""

    def __init__(self, context: FusionContext, *, image_attention: ImageAttention = "causal") -> None:
        super().__init__(context)
        self.image_attention: ImageAttention = image_attention

    def block(self, shape: DecoderShape, layer: int) -> nn.Module:
        """See `Fusion`."""
        return Block(shape, layer)

    def seen(self, mask: Any, inputs: Inputs, window: int | None, x: Tensor) -> Any:
        """See `Fusion`."""
        return seen_with_images(mask, self.image_attention, self.context, inputs, window, x)


def prefix_of(tokens: Tensor, image_token: int, documents: Tensor | None, given: Tensor | None) -> Tensor:
    """Returns the (B, T) bool mask of the prefix: `given` if set, else everything up to the last image of a document."""
    if given is not None:
        return given
    here = tokens == image_token
    return _up_to_last_image(here if documents is None else here & (documents >= 0), documents)


def seen_labels(labels: Tensor, prefix: Tensor, documents: Tensor | None) -> Tensor:
    """Returns the (B, T) bool mask of labels whose token is visible to its prediction: all in a prefix but the last."""
    both = prefix[:, :-1] & prefix[:, 1:]
    if documents is not None:
        both = both & (documents[:, :-1] == documents[:, 1:])
    seen = torch.zeros_like(prefix)
    seen[:, :-1] = both & (labels[:, :-1] != IGNORE)
    return seen


def _up_to_last_image(here: Tensor, documents: Tensor | None) -> Tensor:
    """Returns the (B, T) bool mask of positions with an image token at or after them in their document."""
    length = here.shape[1]
    places = torch.arange(length, device=here.device).expand_as(here)
    following = places.masked_fill(~here, length).flip(1).cummin(1).values.flip(1)
    followed = following < length
    if documents is None:
        return followed
    return followed & (documents.gather(1, following.clamp(max=length - 1)) == documents)
