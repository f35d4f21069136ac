"""OLMo-3 (OLMo et al., 2025): OLMo-2 with three local layers to one global, whose angles alone are scaled."""

from forge_models.hf.families.olmo2 import OLMO2
from forge_models.hf.family import Family

OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults={**OLMO2.defaults, "sliding_window": 4096},
    parts=OLMO2.parts,
    placement="post",
    qk_norm="full",
    windows="layers",
    period=4,
    local_theta=500_000.0,
    theta=500_000.0,
)
