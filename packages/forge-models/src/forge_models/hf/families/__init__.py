"""The families that Forge reads and writes, one file each."""

from types import MappingProxyType

from forge_models.hf.families.deepseek_v3 import DEEPSEEK_V3
from forge_models.hf.families.gemma2 import GEMMA2
from forge_models.hf.families.gemma3 import GEMMA3
from forge_models.hf.families.llama import LLAMA
from forge_models.hf.families.mistral import MISTRAL
from forge_models.hf.families.mixtral import MIXTRAL
from forge_models.hf.families.olmo2 import OLMO2
from forge_models.hf.families.olmo3 import OLMO3
from forge_models.hf.families.olmoe import OLMOE
from forge_models.hf.families.phi3 import PHI3
from forge_models.hf.families.qwen2 import QWEN2
from forge_models.hf.families.qwen3 import QWEN3
from forge_models.hf.families.qwen3_moe import QWEN3_MOE
from forge_models.hf.families.stablelm import STABLELM

DENSE = (LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, OLMO3, GEMMA2, GEMMA3, STABLELM, PHI3)
SPARSE = (MIXTRAL, QWEN3_MOE, OLMOE, DEEPSEEK_V3)

FAMILIES = MappingProxyType({family.model_type: family for family in (*DENSE, *SPARSE)})
"""By `model_type`, in the order in which an export tries them."""
