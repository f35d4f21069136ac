"""Families that Forge reads and writes: one class for each `model_type`, one file for each organization."""

from types import MappingProxyType

from forge_models.hf.families.cohere import Cohere, Cohere2
from forge_models.hf.families.deepseek import DeepseekV3, DeepseekV32
from forge_models.hf.families.deepseek_v4 import DeepseekV4
from forge_models.hf.families.gemma import Gemma2, Gemma3
from forge_models.hf.families.gemma4 import Gemma4
from forge_models.hf.families.glm import Glm4Moe
from forge_models.hf.families.gpt2 import GPT2
from forge_models.hf.families.gpt_neox import GPTNeoX
from forge_models.hf.families.gpt_oss import GptOss
from forge_models.hf.families.granite import Granite
from forge_models.hf.families.kimi import KimiLinear
from forge_models.hf.families.llama import Llama
from forge_models.hf.families.llama4 import Llama4
from forge_models.hf.families.minimax import MiniMaxM2
from forge_models.hf.families.mistral import Ministral3, Mistral, Mixtral
from forge_models.hf.families.nemotron import NemotronH
from forge_models.hf.families.olmo import Olmo, Olmo2, Olmo3, Olmoe, OlmoHybrid
from forge_models.hf.families.phi3 import Phi3
from forge_models.hf.families.qwen import Qwen2, Qwen2Moe, Qwen3, Qwen3Moe, Qwen3Next
from forge_models.hf.families.qwen3_5 import Qwen35, Qwen35Moe
from forge_models.hf.families.smollm import SmolLM3
from forge_models.hf.families.stablelm import StableLM

DENSE = (
    Llama(),
    Mistral(),
    Qwen2(),
    Qwen3(),
    Olmo2(),
    Olmo3(),
    Gemma2(),
    Gemma3(),
    Gemma4(),
    StableLM(),
    Phi3(),
    SmolLM3(),
    Granite(),
    Olmo(),
    GPTNeoX(),
    OlmoHybrid(),
    Qwen35(),
    GPT2(),
    Cohere(),
    Cohere2(),
    Ministral3(),
)
SPARSE = (
    Mixtral(),
    Qwen3Moe(),
    Olmoe(),
    DeepseekV3(),
    Qwen2Moe(),
    Glm4Moe(),
    GptOss(),
    Qwen3Next(),
    MiniMaxM2(),
    Qwen35Moe(),
    DeepseekV32(),
    NemotronH(),
    KimiLinear(),
    Llama4(),
    DeepseekV4(),
)

FAMILIES = MappingProxyType({family.model_type: family for family in (*DENSE, *SPARSE)})
"""Families by `model_type`, in the order in which an export tries them."""
