"""Sizes and options of a vision transformer with every default resolved.

Components create a shape; modules and readers of weights use it. Plain data: importing this module needs no torch.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Literal

Activation = Literal["gelu", "gelu_tanh", "gelu_quick"]
"""`gelu` is exact (with the error function); `gelu_quick` is x * sigmoid(1.702 x)."""
Positions = Literal["learned", "sincos"]


@dataclass(frozen=True, kw_only=True)
class VisionShape:
    """A vision transformer over square images, or over patches of images of any proportions.

    Attributes:
        image_size: height and width of an image in pixels; incomplete patches at the right and at the bottom are ignored.
        patch_size: height and width of a patch in pixels.
        channels: number of channels of an image.
        dim: width of the stream.
        layers: number of blocks of the whole transformer.
        heads: number of attention heads.
        ffn_dim: hidden width of the feed-forward part.
        eps: epsilon of the norms.
        activation: activation of the feed-forward part.
        gated: whether the feed-forward part is down(silu(gate(x)) * up(x)) instead.
        positions: position embedding: a learned table, or sines and cosines of rows and columns.
        class_token: whether a learned token comes before the patches.
        class_feature: whether the class token is one of the features.
        patch_bias: whether the projection of patches has a bias.
        qkv_bias: whether the projections to q, k and v have a bias.
        entry_norm: whether there is a norm before the first block.
        layer_scale: whether each part of a block is multiplied by a learned vector.
        outputs: numbers of blocks after which the stream is a feature, in order; empty: the normalized stream after the last
            block.
        final_norm: whether there is a norm after the last block.
        flexible: maximum number of patches of an image of any proportions (NaFlex); 0: images are squares of `image_size`.
        init_std: standard deviation of the initial matrices.
    """

    image_size: int
    patch_size: int
    channels: int
    dim: int
    layers: int
    heads: int
    ffn_dim: int
    eps: float = 1e-6
    activation: Activation = "gelu"
    gated: bool = False
    positions: Positions = "learned"
    class_token: bool = False
    class_feature: bool = False
    patch_bias: bool = True
    qkv_bias: bool = True
    entry_norm: bool = False
    layer_scale: bool = False
    outputs: tuple[int, ...] = ()
    final_norm: bool = True
    flexible: int = 0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.image_size < self.patch_size:
            raise ValueError(f"an image of {self.image_size} pixels has no patch of {self.patch_size}")
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} must be a multiple of heads {self.heads}")
        if self.flexible and (self.class_token or self.positions != "learned"):
            raise ValueError("images of any proportions need learned positions and no class token")
        if self.positions == "sincos" and self.dim % 4:
            raise ValueError(f"dim {self.dim} must be a multiple of 4 for positions 'sincos': sine and cosine of row and column")

    @property
    def grid(self) -> int:
        """Number of patches in a row, and in a column."""
        return self.image_size // self.patch_size

    @property
    def patch_dim(self) -> int:
        """Number of values in a patch."""
        return self.channels * self.patch_size**2

    @property
    def table(self) -> int:
        """Number of rows of the position table: one per patch of a square, and one for the class token."""
        return self.grid**2 + self.class_token

    @property
    def tokens(self) -> int:
        """Number of features of one image, including padding if images have any proportions."""
        return self.flexible or self.grid**2 + (self.class_token and self.class_feature)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the input for one image: channels, height and width, or patches and values in a patch."""
        return (self.flexible, self.patch_dim) if self.flexible else (self.channels, self.image_size, self.image_size)

    @property
    def width(self) -> int:
        """Width of a feature."""
        return self.dim * max(1, len(self.outputs))

    @property
    def blocks(self) -> int:
        """Number of blocks to build: blocks after the last output have no effect."""
        return max(self.outputs) if self.outputs else self.layers

    @property
    def last_norm(self) -> bool:
        """Whether the norm after the last block is built."""
        return self.final_norm and not self.outputs

    @property
    def output_std(self) -> float:
        """Standard deviation of the initial projections back to the stream, as in a decoder: init_std / sqrt(2 * layers)."""
        return self.init_std / sqrt(2 * self.layers)

    @property
    def patch_std(self) -> float:
        """Standard deviation of the initial projection of patches: pixels of variance 1 become features of variance 1."""
        return 1 / sqrt(self.patch_dim)


def hidden_states(wanted: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Resolves numbers of hidden states: 0 is before the first block, `layers` or -1 after the last block.

    Raises:
        ValueError: a hidden state does not exist.
    """
    for index in wanted:
        if not -layers - 1 <= index <= layers:
            raise ValueError(
                f"feature_layers {index} does not exist; the encoder has {layers} blocks: 0 is before the first block, "
                f"{layers} or -1 after the last block"
            )
    return tuple(index % (layers + 1) for index in wanted)
