"""Modules of somebody else: plain ones, and small models of transformers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, VOCAB = 8, 19


class Block(nn.Module):
    """A plain block of somebody else, with a non-persistent buffer that its constructor computes."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Plain(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_gather_output", "embed": "embedding_rowwise"}


def tied() -> Plain:
    return Plain(tied=True)


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 23, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "num_key_value_heads": 2, "pad_token_id": None, **changes}))


def llama_tied() -> nn.Module:
    return llama(tie_word_embeddings=True)


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=6))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 9, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return MixtralForCausalLM(MixtralConfig(**sizes, **experts, num_key_value_heads=2, head_dim=6))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "experts_implementation": "eager"}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=2, head_dim=6))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "tied": tied,
    "llama": llama,
    "llama, tied": llama_tied,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "qwen3 moe": qwen3_moe,
}
