"""Rotary position embedding, set in `[model.rope]`; the same numbers mean the same as in a Hugging Face configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt, Le

from forge_core.component import IDENTITY

Scaling = Literal["none", "linear", "dynamic", "llama3", "yarn"]

READ_BY: Mapping[str, tuple[Scaling, ...]] = MappingProxyType(
    {
        "factor": ("linear", "dynamic", "llama3", "yarn"),
        "original_max_length": ("dynamic", "llama3", "yarn"),
        **dict.fromkeys(("low_freq_factor", "high_freq_factor"), ("llama3",)),
        **dict.fromkeys(("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"), ("yarn",)),
    }
)
"""Fields that only some scalings read."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Angles position / theta^(2i / width) (Su et al., 2021), and how they are stretched for longer sequences.

    `linear` divides all frequencies by `factor` (Chen et al., 2023); `dynamic` raises theta once a sequence is longer
    than `original_max_length`; `llama3` divides the low frequencies only (Llama 3.1); `yarn` ramps between the two
    (Peng et al., 2023).
    """

    key_class: ClassVar = IDENTITY

    theta: Annotated[float, Gt(0)] = 10000.0
    """Base of the angles."""
    local_theta: Annotated[float, Gt(0)] | None = None
    """Base of the angles of local (windowed) layers, which are then never scaled; as all other layers when absent."""
    partial: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of each head's width that turns; the rest carries no position."""
    scaling: Scaling = "none"
    """How frequencies are stretched."""
    factor: Annotated[float, Gt(0)] | None = None
    """Stretch; needed by every scaling."""
    original_max_length: Annotated[int, Gt(0)] | None = None
    """Tokens of a sequence before stretching; needed by `dynamic`, `llama3` and `yarn`."""
    low_freq_factor: Annotated[float, Gt(0)] = 1.0
    """`llama3`: waves longer than original_max_length / this are divided by `factor`."""
    high_freq_factor: Annotated[float, Gt(0)] = 4.0
    """`llama3`: waves shorter than original_max_length / this stay."""
    beta_fast: Annotated[float, Gt(0)] = 32.0
    """`yarn`: dimensions with more turns than this over original_max_length stay."""
    beta_slow: Annotated[float, Gt(0)] = 1.0
    """`yarn`: dimensions with fewer turns than this are divided by `factor`."""
    truncate: bool = True
    """`yarn`: the ramp begins and ends at whole dimensions."""
    attention_factor: Annotated[float, Gt(0)] | None = None
    """`yarn`: multiplies cosines and sines; 0.1 ln(factor) + 1 when absent."""
    mscale: float | None = None
    """`yarn`: with `mscale_all_dim`, the attention factor is the ratio of 0.1 m ln(factor) + 1 for both (DeepSeek)."""
    mscale_all_dim: float | None = None
    """`yarn`: see `mscale`; MLA also multiplies its scale by the square of 0.1 m ln(factor) + 1."""

    def __post_init__(self) -> None:
        if self.scaling != "none" and self.factor is None:
            raise ValueError(f"scaling {self.scaling!r} needs a factor")
        if self.scaling in ("dynamic", "llama3", "yarn") and self.original_max_length is None:
            raise ValueError(f"scaling {self.scaling!r} needs original_max_length, the tokens of a sequence before stretching")
        if self.scaling == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"high_freq_factor {self.high_freq_factor} must be above low_freq_factor {self.low_freq_factor}")
        for item in fields(self):
            readers = READ_BY.get(item.name, (self.scaling,))
            if self.scaling not in readers and getattr(self, item.name) != item.default:
                raise ValueError(f"{item.name} has no effect with scaling {self.scaling!r}; it belongs to {', '.join(readers)}")

    def of_layer(self, local: bool) -> "Rope":
        """The positions of a local or a global layer."""
        if not local or self.local_theta is None:
            return self
        return Rope(theta=self.local_theta, partial=self.partial)
