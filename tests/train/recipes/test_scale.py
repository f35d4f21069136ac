"""`--scale`: laws against the numbers that their papers print, and models with the number of parameters that was asked for."""

import re
from math import isclose, log
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.errors import ForgeError
from forge_models.components.decoder import DecoderConfig
from forge_train.recipe.scale import (
    LARGEST,
    SMALLEST,
    DenseShape,
    Scale,
    batch_of,
    flops_per_token,
    optimal_batch,
    optimal_lr,
    optimal_tokens,
    optimal_width,
    read_count,
    shape_of,
    spell,
)

PAGE = Path(__file__).parents[3] / "docs/concepts/scale.md"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("125m", 125_000_000), ("1.3b", 1_300_000_000), ("7e9", 7_000_000_000), ("1.5e+3", 1500), ("2T", 2_000_000_000_000)),
        *((" 10K ", 10_000), ("2,500,000", 2_500_000), ("1_000", 1000), ("0.1b", 100_000_000), ("7", 7)),
    ],
)
def test_a_number_is_read(text: str, number: int) -> None:
    assert read_count(text) == number


@pytest.mark.parametrize("text", ["", "m", "0", "-5m", "1.3bb", "1e999", "nan", "0.0001k", "12q", "1.2.3", "seven"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ForgeError, match=r"no number of parameters or tokens; write it as 125m"):
        read_count(text)


@pytest.mark.parametrize(
    ("number", "text"),
    [(1_311_872, "1.31M"), (999_999, "1M"), (2.5e12, "2.5T"), (1e9, "1B"), (125e6, "125M"), (1500, "1.5K"), (12, "12")],
)
def test_a_number_is_spelled_as_it_is_read(number: float, text: str) -> None:
    assert spell(number) == text and isclose(read_count(text), number, rel_tol=5e-3)


TABLE_3 = [
    (8, 512, 25.2e6, 352e6),
    (12, 768, 84.9e6, 963e6),
    (24, 1024, 302e6, 3.02e9),
    (24, 2048, 1.21e9, 9.66e9),
    (32, 4096, 6.44e9, 45.1e9),
    (40, 5120, 12.6e9, 85.6e9),
    (80, 8192, 64.4e9, 419e9),
]
"""Bi et al. (2024), table 3: layers, width, parameters outside of the embeddings, FLOPs of a token in rows of 4,096."""


@pytest.mark.parametrize(("layers", "dim", "parameters", "flops"), TABLE_3)
def test_flops_of_a_token_are_those_of_table_3(layers: int, dim: int, parameters: float, flops: float) -> None:
    exact = 12 * layers * dim**2
    assert isclose(exact, parameters, rel_tol=5e-3)
    assert isclose(flops_per_token(exact, layers, dim, 4096), flops, rel_tol=5e-3)


@pytest.mark.parametrize(("layers", "dim", "sequences", "lr"), [(30, 4096, 2304, 4.2e-4), (95, 8192, 4608, 3.2e-4)])
def test_learning_rate_and_batch_are_those_of_deepseek_llm(layers: int, dim: int, sequences: int, lr: float) -> None:
    """Table 2: DeepSeek LLM 7B and 67B, chosen by these laws, on 2 T tokens in rows of 4,096; the authors rounded both."""
    compute = flops_per_token(12 * layers * dim**2, layers, dim, 4096) * 2e12
    assert isclose(optimal_lr(compute), lr, rel_tol=0.03)
    assert isclose(optimal_batch(compute), sequences * 4096, rel_tol=0.1)


@pytest.mark.parametrize(
    ("parameters", "flops", "tokens"),
    [
        *((400e6, 1.92e19, 8.0e9), (1e9, 1.21e20, 20.2e9), (10e9, 1.23e22, 205.1e9), (67e9, 5.76e23, 1.5e12)),
        *((175e9, 3.85e24, 3.7e12), (280e9, 9.90e24, 5.9e12), (520e9, 3.43e25, 11.0e12)),
    ],
)
def test_tokens_are_those_of_chinchilla(parameters: float, flops: float, tokens: float) -> None:
    """Hoffmann et al. (2022), table 3, printed with two to four digits; and Chinchilla itself, 70B on 1.4 T tokens."""
    assert isclose(6 * parameters * tokens, flops, rel_tol=0.06), "the row itself"
    assert isclose(optimal_tokens(int(parameters)), tokens, rel_tol=0.11)
    assert optimal_tokens(70_000_000_000) == 1_400_000_000_000


def best_depth(non_embedding: float) -> float:
    """Depth at which 12 L d^2 has this number of parameters and d is the optimal width, by bisection."""
    low, high = 1.0, 200.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 12 * middle * optimal_width(middle) ** 2 < non_embedding else (low, middle)
    return low


def test_depth_and_width_are_those_that_levine_et_al_conclude() -> None:
    """Width 30K and depth 92 for a trillion parameters; GPT-3 is too deep, and smaller models of its kind are too shallow."""
    depth = best_depth(1e12)
    assert isclose(optimal_width(depth), 30_000, rel_tol=0.05) and isclose(depth, 92, rel_tol=0.05)
    assert best_depth(12 * 96 * 12288**2) < 96
    for layers, dim in ((12, 768), (24, 1024), (24, 1536), (24, 2048), (32, 2560), (32, 4096), (40, 5120)):
        assert best_depth(12 * layers * dim**2) > layers


def counted(shape: DenseShape) -> int:
    """Parameters by the closed form of the decoder, with the norms that it leaves out."""
    names = ("dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab_size")
    config = DecoderConfig(**{name: getattr(shape, name) for name in names}, tied_embeddings=shape.tied)
    assert config.shape.head_dim == shape.head_dim
    return config.shape.elements + (2 * shape.layers + 1) * shape.dim


VOCABULARIES = (320, 8192, 32768, 50304, 128256, 200064)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.floats(log(SMALLEST), log(LARGEST)), st.sampled_from(VOCABULARIES))
def test_a_model_has_the_parameters_that_were_asked_for(logarithm: float, vocab_size: int) -> None:
    wish = min(max(round(2.718281828459045**logarithm), SMALLEST), LARGEST)
    try:
        shape = shape_of(wish, vocab_size)
    except ForgeError as refusal:
        assert "vocabulary of 200,064 ids" in str(refusal) or "vocabulary of 128,256 ids" in str(refusal)
        assert 64 * vocab_size > 0.3 * wish, "the narrowest table takes a large part"
        return
    assert abs(counted(shape) / wish - 1) <= 0.05
    assert counted(shape) == shape.parameters and shape.embeddings + shape.non_embedding == shape.parameters
    assert shape.layers >= 6 and shape.dim % 64 == 0 and shape.ffn_dim % (64 if shape.dim < 1024 else 256) == 0
    assert shape.heads * shape.head_dim == shape.dim and shape.heads % shape.kv_heads == 0
    assert isclose(shape.ffn_dim, 8 / 3 * shape.dim, rel_tol=0.13)
    assert shape.tied == (wish < 1_000_000_000)
    if shape.dim >= 8192:
        assert shape.kv_heads == 8, "eight GPUs share heads evenly"
    elif shape.dim >= 2048:
        assert shape.heads % 4 == 0


@pytest.mark.parametrize(("wish", "vocab_size"), [(SMALLEST, 8192), (1_300_000_000, 32768), (LARGEST, 128256)])
def test_parameters_are_counted_as_the_decoder_has_them(wish: int, vocab_size: int) -> None:
    from forge_models.decoder import Decoder

    shape = shape_of(wish, vocab_size)
    names = ("dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab_size")
    config = DecoderConfig(**{name: getattr(shape, name) for name in names}, tied_embeddings=shape.tied)
    with torch.device("meta"):
        decoder = Decoder(config.shape)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == shape.parameters


@pytest.mark.parametrize("wish", [10_000_000, 42_000_000, 350_000_000, 2_700_000_000, 70_000_000_000])
def test_no_other_width_is_nearer_to_the_law_of_depth(wish: int) -> None:
    """By trying every pair of a width and a depth."""
    shape = shape_of(wish, 32768)
    assert abs(shape.parameters / wish - 1) <= 0.025
    for dim in (*range(64, 1024, 64), *range(1024, 2048, 256), *range(2048, 8192, 512), *range(8192, 16384, 1024)):
        for layers in range(6, 161):
            other = DenseShape(dim, layers, 32768, shape.tied)
            if abs(other.parameters / wish - 1) > 0.025 or other == shape:
                continue
            nearest = min(
                (layers + step for step in (-1, 1)), key=lambda n: abs(DenseShape(dim, n, 32768, shape.tied).parameters - wish)
            )
            if abs(other.parameters - wish) < abs(DenseShape(dim, nearest, 32768, shape.tied).parameters - wish):
                assert abs(log(dim / optimal_width(layers))) >= abs(log(shape.dim / optimal_width(shape.layers)))


def test_a_close_number_of_parameters_comes_before_the_law_of_depth() -> None:
    """A layer more or less of a shallow model changes it by several percent, so the nearest width may miss the number."""
    for wish in range(10_400_000, 12_200_000, 100_000):
        assert abs(shape_of(wish, 8192).parameters / wish - 1) <= 0.025


def test_narrow_shapes_that_fit_less_well_are_a_last_resort() -> None:
    """A vocabulary that takes almost everything leaves few widths; the closest of them is taken up to 5 %."""
    shapes = [shape_of(wish, 200064) for wish in range(14_000_000, 30_000_000, 500_000)]
    assert all(shape.dim == 64 for shape in shapes[:10])
    with pytest.raises(
        ForgeError, match=r"--scale 10M: with a vocabulary of 200,064 ids, no decoder .* choose a tokenizer with fewer"
    ):
        shape_of(SMALLEST, 200064)


@pytest.mark.parametrize("wish", [SMALLEST - 1, LARGEST + 1])
def test_sizes_beyond_the_laws_are_refused(wish: int) -> None:
    with pytest.raises(ForgeError, match=r"--scale .*: the laws are used for 10M to 500B parameters"):
        Scale.of(wish, 8192)


def test_a_scale_follows_from_the_laws() -> None:
    scale = Scale.of(125_000_000, 32768)
    assert scale.tokens == 20 * scale.parameters and scale.length == 2048
    assert scale.compute == flops_per_token(scale.shape.non_embedding, scale.layers, scale.dim, 2048) * scale.tokens
    assert isclose(scale.lr, optimal_lr(scale.compute), rel_tol=0.05) and scale.batch == optimal_batch(scale.compute)
    assert scale.sequences == scale.batch / 2048 and scale.outside == ()
    longer = Scale.of(125_000_000, 32768, 10 * scale.tokens)
    assert (longer.shape, longer.tokens) == (scale.shape, 10 * scale.tokens)
    assert isclose(longer.batch / scale.batch, 10**0.3271, rel_tol=1e-6) and longer.lr < scale.lr
    assert Scale.of(999_000_000, 32768).length == 2048 and Scale.of(1_000_000_000, 32768).length == 4096


def test_laws_beyond_their_range_are_named() -> None:
    small, large = Scale.of(SMALLEST, 8192).outside, Scale.of(LARGEST, 32768).outside
    assert [note.partition(":")[0] for note in small] == ["tokens", "learning rate and batch"]
    assert [note.partition(":")[0] for note in large] == ["depth", "tokens", "learning rate and batch"]


@pytest.mark.parametrize(
    ("sequences", "ranks", "most", "expected"),
    [
        *((131.0, 1, 8, (128, 8)), (131.0, 8, 8, (128, 8)), (131.0, 3, 8, (132, 4)), (90.0, 1, 8, (96, 8))),
        *((350.0, 8, 2, (384, 2)), (16.0, 1, 16, (16, 16)), (16.0, 3, 16, (15, 5)), (0.2, 1, 8, (1, 1)), (10.0, 12, 8, (12, 1))),
    ],
)
def test_a_batch_divides_over_ranks(sequences: float, ranks: int, most: int, expected: tuple[int, int]) -> None:
    assert batch_of(sequences, ranks, most) == expected


def test_too_many_gpus_for_a_batch_are_refused() -> None:
    with pytest.raises(ForgeError, match=r"--gpus 64: .* the best batch has 32; use at most 48 GPUs"):
        batch_of(32.0, 64, 8)
    assert batch_of(32.0, 48, 8)[0] == 48


def test_the_table_of_the_page_is_what_the_laws_give() -> None:
    rows = re.findall(r"^\| ([\d.]+[MB]) \| (\d.*) \|$", PAGE.read_text(), re.MULTILINE)
    rows = [row for row in rows if " against " not in row[1]]
    assert [row[0] for row in rows] == ["10M", "30M", "125M", "350M", "1.3B", "7B", "13B", "70B", "175B", "500B"]
    for wish, cells in rows:
        assert cells.split(" | ") == row_of(wish), wish


def test_the_page_compares_with_the_law_of_li_et_al() -> None:
    """Li et al. (2025), Step Law: 1.79 N1^-0.713 D^0.307 and 0.58 D^0.571."""
    rows = re.findall(r"^\| (\S+) \| (\S+) against (\S+) \| (\S+) against (\S+) \|$", PAGE.read_text(), re.MULTILINE)
    assert [row[0] for row in rows] == ["125M", "7B"]
    for wish, lr, other_lr, batch, other_batch in rows:
        scale = Scale.of(read_count(wish), 32768)
        assert (float(lr), batch) == (scale.lr, spell(scale.batch))
        assert float(other_lr) == float(f"{1.79 * scale.shape.non_embedding**-0.713 * scale.tokens**0.307:.1e}")
        assert other_batch == spell(0.58 * scale.tokens**0.571)


def row_of(wish: str) -> list[str]:
    """Cells of a row of the table, after the first one."""
    parameters = read_count(wish)
    scale = Scale.of(parameters, 8192 if parameters < 100_000_000 else 32768)
    sizes = (scale.layers, scale.dim, f"{scale.shape.heads} / {scale.shape.kv_heads}", scale.shape.ffn_dim)
    return [
        f"{scale.parameters:,}",
        *map(str, sizes),
        spell(scale.tokens),
        f"{scale.compute:.1e}",
        f"{scale.lr:g}",
        spell(scale.batch),
    ]
