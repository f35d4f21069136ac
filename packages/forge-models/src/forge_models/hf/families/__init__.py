"""The families that Forge reads and writes, one file each."""

from types import MappingProxyType

from forge_models.hf.families.deepseek_v3 import DeepseekV3
from forge_models.hf.families.gemma2 import Gemma2
from forge_models.hf.families.gemma3 import Gemma3
from forge_models.hf.families.llama import Llama
from forge_models.hf.families.mistral import Mistral
from forge_models.hf.families.mixtral import Mixtral
from forge_models.hf.families.olmo2 import Olmo2
from forge_models.hf.families.olmo3 import Olmo3
from forge_models.hf.families.olmoe import Olmoe
from forge_models.hf.families.phi3 import Phi3
from forge_models.hf.families.qwen2 import Qwen2
from forge_models.hf.families.qwen3 import Qwen3
from forge_models.hf.families.qwen3_moe import Qwen3Moe
from forge_models.hf.families.stablelm import StableLM

DENSE = (Llama(), Mistral(), Qwen2(), Qwen3(), Olmo2(), Olmo3(), Gemma2(), Gemma3(), StableLM(), Phi3())
SPARSE = (Mixtral(), Qwen3Moe(), Olmoe(), DeepseekV3())

FAMILIES = MappingProxyType({family.model_type: family for family in (*DENSE, *SPARSE)})
"""By `model_type`, in the order in which an export tries them."""
