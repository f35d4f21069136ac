"""The base of an adapter: formats in which its matrices are held, and its parts that may be trained whole. Imports no torch."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Format = Literal["int8", "nf4"]
"""A format with fewer bits than the precision of a run; see `forge_models.blocks.quantized`."""

TUNED: Mapping[str, str] = MappingProxyType({"embedding": "embed.weight", "head": "head.weight"})
"""Parts of a decoder that can be trained whole, and the names of their parameters."""

NF4_BLOCK = 64
"""Number of values of a row that share a scale in `nf4`."""


def rows_refusal(name: str, inputs: int, kind: str) -> str:
    """Returns why the matrix `name`, whose rows have `inputs` values, cannot be held in a format; empty if it can."""
    if kind != "nf4" or not inputs % NF4_BLOCK:
        return ""
    return (
        f"base_format = 'nf4' needs rows of a multiple of {NF4_BLOCK} values, but those of {name} have {inputs}; use 'int8' or "
        "'full'"
    )
