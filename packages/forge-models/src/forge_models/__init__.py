"""Decoder blocks, loss head and generation, free of parallel code."""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_models.decoder import Decoder as Decoder
    from forge_models.generation import Sampling as Sampling
    from forge_models.generation import generate as generate
    from forge_models.initial_weights import initialize as initialize
    from forge_models.inner_values import listening as listening
    from forge_models.inner_values import tap as tap

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Decoder": "decoder",
        "Sampling": "generation",
        "generate": "generation",
        "initialize": "initial_weights",
        "listening": "inner_values",
        "tap": "inner_values",
    },
)
