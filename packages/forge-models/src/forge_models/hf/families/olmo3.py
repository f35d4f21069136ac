"""OLMo-3 (OLMo et al., 2025): OLMo-2 with three local layers to one global, whose angles alone are scaled."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import Decoder
from forge_models.hf.base import read_base, read_biases, read_heads, write_base, write_biases
from forge_models.hf.config import Keys
from forge_models.hf.families.olmo2 import Olmo2
from forge_models.hf.family import Family
from forge_models.hf.windows import read_period, write_local_layers


class Olmo3(Family):
    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    defaults: ClassVar = {**Olmo2.defaults, "sliding_window": 4096}
    parts: ClassVar = Olmo2.parts

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys, theta=500_000.0, local_theta=500_000.0) | read_heads(keys)
        attention = GQA(**read_biases(keys), qk_norm="full", **read_period(keys, 4))
        return fields | {"norm_placement": "post", "attention": attention}

    def write(self, decoder: Decoder) -> dict[str, Any]:
        return write_base(self, decoder) | write_biases(decoder) | write_local_layers(decoder)
