"""Names of kernels that a recipe may ask for."""

from typing import Literal

AttentionKernel = Literal["auto", "sdpa", "flex", "varlen"]
ExpertKernel = Literal["auto", "grouped", "loop"]
