"""What a fusion is to the model around it."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from forge_models.blocks.cache import KVCache
from forge_models.shape import DecoderShape
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


class Plain:
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
