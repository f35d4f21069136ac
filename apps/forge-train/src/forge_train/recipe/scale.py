"""Sizes of a decoder and of its training, derived from a number of parameters by published laws. No torch.

    from forge_train.recipe.scale import Scale

    scale = Scale.of(1_300_000_000, vocab_size=32768)
    assert abs(scale.parameters / 1.3e9 - 1) < 0.05
    print(scale.layers, scale.dim, scale.tokens, scale.lr)

The laws, with N parameters, N1 of them outside of the embedding tables, L layers of width d, D tokens in rows of T tokens:

- depth and width: ln d = 5.039 + 0.0555 L (Levine et al., 2020), fitted to networks of 6 to 48 layers;
- tokens: D = 20 N (Hoffmann et al., 2022, table 3), fitted to 70M to 16B parameters;
- compute: C = M D with M = 6 N1 + 12 L d T (Bi et al., 2024, DeepSeek LLM, equation 2);
- learning rate 0.3118 C^-0.1250 and batch 0.2920 C^0.3271 in tokens (the same, equation 1), fitted to 1e17 to 2e19 FLOPs.

Beyond these ranges a law is extrapolated; `Scale.outside` says which ones.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, isfinite, log, log2

from forge_core.errors import ForgeError

SMALLEST, LARGEST = 10_000_000, 500_000_000_000
"""Numbers of parameters that can be asked for."""
TOLERANCE = 0.05
"""Largest difference between the model's parameters and the number asked for, relative to this number."""
CLOSE = 0.025
"""Shapes within this difference are preferred to shapes that are nearer to the law of depth."""

DEPTH_OFFSET, DEPTH_SLOPE = 5.039, 0.0555
"""ln d = DEPTH_OFFSET + DEPTH_SLOPE * L (Levine et al., 2020)."""
DEPTHS = (6, 48)
"""Depths of the networks to which this law was fitted."""
TOKENS_PER_PARAMETER = 20
"""Hoffmann et al., 2022: table 3 has 20 to 21 tokens for each parameter, all parameters counted."""
TRAINED = (70e6, 16e9)
"""Parameters of the models of Hoffmann et al."""
LR, LR_POWER = 0.3118, -0.1250
BATCH, BATCH_POWER = 0.2920, 0.3271
"""Bi et al., 2024, equation 1; the batch is in tokens."""
COMPUTE = (1e17, 2e19)
"""FLOPs of the runs to which these two laws were fitted."""

WARMUP = 2000
"""Steps of the warm-up in all runs of Bi et al.; at most a twentieth of a shorter run here."""
INIT_STD = 0.006
"""Initial standard deviation in all runs of Bi et al."""

FEWEST_STEPS = 20
"""Shortest run: each piece of its schedule has a step."""
UNTIED = 1_000_000_000
"""Models from this size on have a head of their own, and rows of 4,096 tokens."""


def read_count(text: str) -> int:
    """Reads a number such as `125m`, `1.3b`, `7e9` or `2,500,000`; k, m, b and t mean 1e3, 1e6, 1e9 and 1e12.

    Raises:
        ForgeError: the text is no positive number.
    """
    number = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)([kmbt]?)", text.strip().lower().replace(",", "").replace("_", ""))
    value = float(number[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[number[2]] if number else 0.0
    if not isfinite(value) or round(value) < 1:
        raise ForgeError(f"{text!r} is no number of parameters or tokens; write it as 125m, 1.3b or 7e9")
    return round(value)


def spell(number: float) -> str:
    """Returns a number with three digits and a suffix: `125M`, `1.31B`, `2.5T`; `read_count` reads it."""
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= scale * 0.9995:
            return f"{float(f'{number / scale:.3g}'):g}{suffix}"
    return f"{number:g}"


def read_parameters(text: str) -> int:
    """Reads a number of parameters for which the laws are used.

    Raises:
        ForgeError: the text is no number, or the number is out of range.
    """
    return _in_range(read_count(text))


def _in_range(parameters: int) -> int:
    if SMALLEST <= parameters <= LARGEST:
        return parameters
    raise ForgeError(
        f"--scale {spell(parameters)}: the laws are used for {spell(SMALLEST)} to {spell(LARGEST)} parameters; for a smaller "
        "model leave --scale out, or set the sizes in [model]"
    )


def optimal_width(layers: float) -> float:
    """Returns the width at which a network of `layers` layers is as wide as it should be (Levine et al., 2020)."""
    return exp(DEPTH_OFFSET + DEPTH_SLOPE * layers)


def optimal_tokens(parameters: int) -> int:
    """Returns the tokens of compute-optimal training (Hoffmann et al., 2022)."""
    return TOKENS_PER_PARAMETER * parameters


def flops_per_token(non_embedding: int, layers: int, dim: int, length: int) -> int:
    """Returns forward and backward FLOPs of a token, without those of the vocabulary (Bi et al., 2024, equation 2)."""
    return 6 * non_embedding + 12 * layers * dim * length


def optimal_lr(compute: float) -> float:
    """Returns the peak learning rate of AdamW for a run of `compute` FLOPs (Bi et al., 2024, equation 1)."""
    return LR * compute**LR_POWER


def optimal_batch(compute: float) -> float:
    """Returns the tokens of a batch for a run of `compute` FLOPs (Bi et al., 2024, equation 1)."""
    return BATCH * compute**BATCH_POWER


@dataclass(frozen=True)
class DenseShape:
    """Sizes of a decoder of the Llama family.

    Attributes:
        dim: width; a multiple of 64, from 1,024 on of 256, from 2,048 on of 512, and from 8,192 on of 1,024, so that the heads of
            larger models divide over 4 or 8 GPUs.
        layers: number of blocks.
        head_dim: 64 for widths below 1,024, else 128.
        kv_heads: for widths from 1,024 on 8 or 4, whichever first divides the heads (Ainslie et al., 2023); else all heads.
        ffn_dim: 8/3 of the width, rounded to a multiple of 64, or 256 for widths from 1,024 on.
        tied: whether the head shares the embedding table.
    """

    dim: int
    layers: int
    vocab_size: int
    tied: bool

    @property
    def head_dim(self) -> int:
        return 64 if self.dim < 1024 else 128

    @property
    def heads(self) -> int:
        return self.dim // self.head_dim

    @property
    def kv_heads(self) -> int:
        return next((groups for groups in (8, 4) if self.dim >= 1024 and self.heads % groups == 0), self.heads)

    @property
    def ffn_dim(self) -> int:
        multiple = 64 if self.dim < 1024 else 256
        return round(8 * self.dim / 3 / multiple) * multiple

    @property
    def block(self) -> int:
        """Parameters of a block: attention, three matrices of the feed-forward layer, two norms."""
        attention = 2 * self.dim * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.dim * self.ffn_dim + 2 * self.dim

    @property
    def embeddings(self) -> int:
        """Parameters of the embedding table and of the head."""
        return self.vocab_size * self.dim * (1 if self.tied else 2)

    @property
    def non_embedding(self) -> int:
        """Parameters of the blocks and of the last norm."""
        return self.layers * self.block + self.dim

    @property
    def parameters(self) -> int:
        """All parameters; a tied table counts once."""
        return self.embeddings + self.non_embedding

    @property
    def distance(self) -> float:
        """Distance of the width from the one that the law of depth gives for these layers, as a logarithm."""
        return abs(log(self.dim) - DEPTH_OFFSET - DEPTH_SLOPE * self.layers)


def shape_of(parameters: int, vocab_size: int) -> DenseShape:
    """Returns the decoder with this number of parameters whose width is the nearest to the law of depth.

    Raises:
        ForgeError: the vocabulary takes so many parameters that no decoder of 6 or more layers has this number.
    """
    shapes = [shape for shape in _shapes(parameters, vocab_size) if _error(shape, parameters) <= TOLERANCE]
    if not shapes:
        raise ForgeError(
            f"--scale {spell(parameters)}: with a vocabulary of {vocab_size:,} ids, no decoder of at least {DEPTHS[0]} layers "
            "has this number of parameters; ask for more, or choose a tokenizer with fewer ids"
        )
    return min(shapes, key=lambda shape: (_error(shape, parameters) > CLOSE, shape.distance))


def _shapes(parameters: int, vocab_size: int) -> Iterator[DenseShape]:
    """Yields for each width the decoder whose number of parameters is the nearest."""
    tied = parameters < UNTIED
    for dim in (*range(64, 1024, 64), *range(1024, 2048, 256), *range(2048, 8192, 512), *range(8192, 65537, 1024)):
        empty = DenseShape(dim, 0, vocab_size, tied)
        layers = round((parameters - empty.parameters) / empty.block)
        if layers >= DEPTHS[0]:
            yield DenseShape(dim, layers, vocab_size, tied)


def _error(shape: DenseShape, parameters: int) -> float:
    return abs(shape.parameters / parameters - 1)


def batch_of(sequences: float, ranks: int, most: int) -> tuple[int, int]:
    """Returns the sequences of a batch over all ranks, and of a micro-batch.

    The batch is the power of two, or three times one, that is the nearest to `sequences`: such a batch divides over many numbers
    of GPUs. If it does not divide over `ranks`, it is the nearest multiple of `ranks`.

    Args:
        sequences: wanted sequences of a batch.
        ranks: number of processes.
        most: most sequences of a micro-batch.

    Raises:
        ForgeError: the batch has too few sequences for so many ranks.
    """
    sizes = [factor << power for factor in (1, 3) for power in range(64)]
    whole = min(sizes, key=lambda size: abs(log2(size / sequences)))
    if whole % ranks:
        whole = ranks * max(1, round(sequences / ranks))
    if whole > 1.5 * max(sequences, 1):
        fewer = max(1, int(1.5 * max(sequences, 1)))
        raise ForgeError(
            f"--gpus {ranks}: every GPU needs a sequence of each batch, but the best batch has {round(sequences):,}; use at most "
            f"{fewer:,} GPUs, or raise --tokens"
        )
    rows = whole // ranks
    return whole, max(size for size in range(1, most + 1) if rows % size == 0)


@dataclass(frozen=True)
class Scale:
    """A decoder, and how long and with what it is trained.

    Attributes:
        wish: number of parameters that was asked for.
        shape: the decoder's sizes.
        length: tokens of a row: 2,048, or 4,096 from a billion parameters on.
        tokens: tokens of the run.
        compute: FLOPs of the run, without those of the vocabulary.
        lr: peak learning rate, rounded to two digits.
        batch: tokens of a batch by the law, before it is rounded to whole sequences.
    """

    wish: int
    shape: DenseShape
    length: int
    tokens: int
    compute: float
    lr: float
    batch: float

    @classmethod
    def of(cls, parameters: int, vocab_size: int, tokens: int | None = None) -> "Scale":
        """Derives everything from a number of parameters.

        Args:
            parameters: all parameters, from 10 million to 500 billion.
            vocab_size: number of token ids.
            tokens: tokens of the run; by default 20 for each parameter.

        Raises:
            ForgeError: the number is out of this range, or the vocabulary too large for it.
        """
        shape = shape_of(_in_range(parameters), vocab_size)
        length = 4096 if parameters >= UNTIED else 2048
        tokens = optimal_tokens(shape.parameters) if tokens is None else tokens
        compute = float(flops_per_token(shape.non_embedding, shape.layers, shape.dim, length)) * tokens
        return cls(parameters, shape, length, tokens, compute, float(f"{optimal_lr(compute):.1e}"), optimal_batch(compute))

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return self.shape.parameters

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return self.shape.layers

    @property
    def dim(self) -> int:
        """Width of the model."""
        return self.shape.dim

    @property
    def sequences(self) -> float:
        """Sequences of a batch by the law."""
        return self.batch / self.length

    @property
    def outside(self) -> tuple[str, ...]:
        """Laws that are extrapolated here, each with its fitted range."""
        notes: list[str] = []
        low, high = DEPTHS
        if self.layers > high:
            notes.append(
                f"depth: {self.layers} layers; Levine et al. trained {low} to {high}, and project to 1 trillion parameters"
            )
        if not TRAINED[0] <= self.parameters <= TRAINED[1]:
            notes.append(
                f"tokens: {spell(self.parameters)} parameters; Hoffmann et al. trained 70M to 16B, and confirmed 20 tokens for "
                "each parameter at 70B"
            )
        if not COMPUTE[0] <= self.compute <= COMPUTE[1]:
            notes.append(
                f"learning rate and batch: {self.compute:.1e} FLOPs; Bi et al. fitted 1e17 to 2e19, and used the laws up to 1e24"
            )
        return tuple(notes)
