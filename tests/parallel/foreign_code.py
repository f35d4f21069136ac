"""The structures of well-known code bases in a few lines each, and small models of transformers: what `parallelize` has to lay
out, or to refuse with an action."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel import foreign_modules

WIDTH, HEADS, VOCAB, LENGTH = 16, 4, 20, 6
EACH = WIDTH // HEADS


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


def _angles(length: int, width: int) -> Tensor:
    return torch.outer(torch.arange(length).float(), 1.0 / 100 ** (torch.arange(0, width, 2).float() / width))


class NanoGPT(nn.Module):
    """As nanoGPT: a dictionary of modules, learned positions, one layer for queries, keys and values, a tied head, a loss."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, bias=False)
            self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)})

        def forward(self, x: Tensor) -> Tensor:
            rows, length, width = x.size()
            q, k, v = (
                part.view(rows, length, HEADS, width // HEADS).transpose(1, 2)
                for part in self.c_attn(self.ln_1(x)).split(width, dim=2)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, width))
            return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList(self.Block() for _ in range(2)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight  # type: ignore[assignment]

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer["drop"](self.transformer["wte"](idx) + self.transformer["wpe"](positions))
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class CastLinear(nn.Linear):
    """As nanochat's: weights are cast to the format of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(dtype=x.dtype))


class Nanochat(nn.Module):
    """As nanochat: functional norms, value embeddings, scalars per layer that mix in the first residual stream, capped logits."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_q, self.c_k, self.c_v, self.c_proj = (CastLinear(WIDTH, WIDTH, bias=False) for _ in range(4))

        def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
            rows, length, _ = x.shape
            q, k, v = (layer(x).view(rows, length, -1, EACH) for layer in (self.c_q, self.c_k, self.c_v))
            q, k = (F.rms_norm(_rotated(part, *angles), (EACH,)) for part in (q, k))
            y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
            return self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, -1))

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_fc, self.c_proj = CastLinear(WIDTH, 4 * WIDTH, bias=False), CastLinear(4 * WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.c_proj(F.relu(self.c_fc(x)).square())

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.mlp = Nanochat.Attention(), Nanochat.MLP()

        def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
            x = x + self.attn(F.rms_norm(x, (WIDTH,)), angles)
            return x + self.mlp(F.rms_norm(x, (WIDTH,)))

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(VOCAB, WIDTH), "h": nn.ModuleList(self.Block() for _ in range(2))})
        self.lm_head = CastLinear(WIDTH, VOCAB, bias=False)
        self.resid_lambdas, self.x0_lambdas = nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), 0.1))
        angles = _angles(LENGTH, EACH)[None, :, None, :]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        angles = self.cos[:, : idx.size(1)], self.sin[:, : idx.size(1)]
        x = x0 = F.rms_norm(self.transformer["wte"](idx), (WIDTH,))
        for index, block in enumerate(self.transformer["h"]):  # type: ignore[arg-type]
            x = block(self.resid_lambdas[index] * x + self.x0_lambdas[index] * x0, angles)
        logits = self.lm_head(F.rms_norm(x, (WIDTH,)))
        logits = 15 * torch.tanh(logits / 15)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LitGPT(nn.Module):
    """As litgpt: the head is registered first, queries, keys and values of a group lie together, norms in fp32, a gated MLP."""

    kv_heads = 2

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = LitGPT.Norm(), LitGPT.Norm()
            self.attn = nn.Linear(WIDTH, (HEADS + 2 * LitGPT.kv_heads) * EACH, bias=False)
            self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
            self.fc_1, self.fc_2, self.out = (nn.Linear(*sizes, bias=False) for sizes in ((WIDTH, 24), (WIDTH, 24), (24, WIDTH)))

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            rows, length, _ = x.shape
            group = HEADS // LitGPT.kv_heads
            qkv = self.attn(self.norm_1(x)).view(rows, length, LitGPT.kv_heads, group + 2, EACH).permute(0, 2, 3, 1, 4)
            q, k, v = qkv.split((group, 1, 1), dim=2)
            k, v = (part.expand(rows, LitGPT.kv_heads, group, length, EACH) for part in (k, v))
            q, k, v = (part.reshape(rows, -1, length, EACH) for part in (q, k, v))
            y = F.scaled_dot_product_attention(_rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(rows, length, WIDTH))
            return x + self.out(F.silu(self.fc_1(self.norm_2(x))) * self.fc_2(self.norm_2(x)))

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "h": nn.ModuleList(self.Block() for _ in range(2)),
                "ln_f": self.Norm(),
            }
        )
        self.register_buffer("cos", _angles(LENGTH, EACH).cos(), persistent=False)
        self.register_buffer("sin", _angles(LENGTH, EACH).sin(), persistent=False)

    def forward(self, idx: Tensor, input_pos: Tensor | None = None) -> Tensor:
        cos, sin = (table[: idx.size(1)] if input_pos is None else table[input_pos] for table in (self.cos, self.sin))
        x = self.transformer["wte"](idx)
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x, cos, sin)
        return self.lm_head(self.transformer["ln_f"](x))


class XTransformers(nn.Module):
    """As x-transformers: blocks are lists of a norm, a layer and a residual; heads are taken apart by their number; one table of
    relative positions is shared by all layers; memory tokens are parameters of the root."""

    class Attention(nn.Module):
        def __init__(self, bias: nn.Module) -> None:
            super().__init__()
            self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.rel_pos, self.heads = bias, HEADS

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                layer(x).reshape(*x.shape[:2], self.heads, layer.out_features // self.heads).transpose(1, 2)
                for layer in (self.to_q, self.to_k, self.to_v)
            )
            scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) / math.sqrt(q.shape[-1])
            out = torch.einsum("b h i j, b h j d -> b h i d", self.rel_pos(scores).softmax(-1), v)
            return self.to_out(out.transpose(1, 2).flatten(2))

    class Relative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2 * LENGTH + 8, HEADS)

        def forward(self, scores: Tensor) -> Tensor:
            place = torch.arange(scores.shape[-1], device=scores.device)
            return scores + self.table(place[:, None] - place[None] + LENGTH + 3).permute(2, 0, 1)

    class Residual(nn.Module):
        def forward(self, x: Tensor, residual: Tensor) -> Tensor:
            return x + residual

    def __init__(self) -> None:
        super().__init__()
        self.token_emb = nn.ModuleDict({"emb": nn.Embedding(VOCAB, WIDTH)})
        self.memory_tokens = nn.Parameter(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH))
        bias = self.Relative()
        layers: list[nn.Module] = []
        for _ in range(2):
            feed = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
            layers += [
                nn.ModuleList([nn.ModuleList([nn.LayerNorm(WIDTH), nn.Identity()]), layer, self.Residual()])
                for layer in (self.Attention(bias), feed)
            ]
        self.layers = nn.ModuleList(layers)
        self.norm, self.to_logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: Tensor, return_mems: bool = False) -> Any:
        x = torch.cat([self.memory_tokens.expand(x.shape[0], -1, -1), self.token_emb["emb"](x)], 1)
        for (before, after), layer, add in self.layers:  # type: ignore[misc]
            x = add(after(layer(before(x))), x)
        logits = self.to_logits(self.norm(x))[:, 2:]
        return (logits, x) if return_mems else logits


class Lingua(nn.Module):
    """As lingua: layers are registered before the table; heads are named; frequencies are a module; the head may be tied."""

    class Frequencies(nn.Module):
        angles: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", _angles(LENGTH, EACH), persistent=False)

        def forward(self, length: int) -> tuple[Tensor, Tensor]:
            return self.angles[:length].cos(), self.angles[:length].sin()

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.w1, self.w3, self.w2 = (nn.Linear(*sizes, bias=False) for sizes in ((WIDTH, 24), (WIDTH, 24), (24, WIDTH)))
            self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
            self.n_heads = HEADS

        def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
            rows, length, _ = x.shape
            normed = self.attention_norm(x)
            q, k, v = (
                layer(normed.view_as(x)).view(rows, length, self.n_heads, EACH).transpose(1, 2)
                for layer in (self.wq, self.wk, self.wv)
            )
            y = F.scaled_dot_product_attention(_rotated(q, *angles), _rotated(k, *angles), v, is_causal=True)
            x = x + self.wo(y.transpose(1, 2).contiguous().reshape(x.shape))
            return x + self.w2(F.silu(self.w1(self.ffn_norm(x))) * self.w3(self.ffn_norm(x)))

    def __init__(self) -> None:
        super().__init__()
        self.rope_embeddings = self.Frequencies()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.norm, self.output = nn.RMSNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, VOCAB, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, token_values: Tensor, target: Tensor | None = None) -> Tensor:
        x = self.tok_embeddings(token_values)
        angles = self.rope_embeddings(x.shape[1])
        for layer in self.layers:
            x = layer(x, angles)
        logits = self.output(self.norm(x))
        return logits if target is None else F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Vit(nn.Module):
    """As a ViT of timm: patches by a convolution, a class token and positions in the root, blocks in a Sequential, one layer for
    queries, keys and values that is viewed by its numbers, scales per layer."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.full((WIDTH,), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gamma

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2, self.ls1, self.ls2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Vit.Scale(), Vit.Scale()
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.fc1, self.act, self.drop, self.fc2 = nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            rows, length, width = x.shape
            q, k, v = self.qkv(self.norm1(x)).reshape(rows, length, 3, HEADS, EACH).permute(2, 0, 3, 1, 4).unbind(0)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width)
            x = x + self.ls1(self.drop(self.proj(y)))
            return x + self.ls2(self.fc2(self.drop(self.act(self.fc1(self.norm2(x))))))

    def __init__(self) -> None:
        super().__init__()
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.full((1, 5, WIDTH), 0.02))
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.Sequential(*(self.Block() for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_embd=WIDTH, n_head=HEADS, n_layer=2, vocab_size=VOCAB, n_positions=16, **rates))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 24}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes, **rates, vocab_size=VOCAB, max_position_embeddings=16))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": WIDTH, "d_kv": EACH, "d_ff": 24, "num_layers": 2, "num_heads": HEADS, "vocab_size": VOCAB}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
    sizes = {"d_model": WIDTH, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": VOCAB, "num_mel_bins": 4}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    places = {"max_source_positions": 6, "max_target_positions": 16}
    return WhisperForConditionalGeneration(WhisperConfig(**layers, **sizes, **tokens, **places, dropout=0.0))


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(hidden_size=WIDTH, num_hidden_layers=2, vocab_size=VOCAB, state_size=4))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 24}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**sizes, **rates, image_size=8, patch_size=4, num_labels=VOCAB))


@dataclass(frozen=True)
class Code:
    """A code base: what builds its module, what it is called with, and a plan that its users would write.

    Attributes:
        example: keyword arguments, 4 rows of each.
        plan: of tp; None for the model's own.
        close: largest error of a gradient; larger where a model computes in fp32 whatever its format is.
    """

    build: Callable[[], nn.Module]
    example: Mapping[str, Tensor]
    plan: Mapping[str, str] | None = None
    close: float = 1e-10


def _tokens(rows: int = 4) -> Tensor:
    return torch.randint(3, VOCAB - 1, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _colwise(prefix: str, *names: str) -> dict[str, str]:
    return {f"{prefix}.{name}": "colwise" for name in names}


def _rowwise(prefix: str, *names: str) -> dict[str, str]:
    return {f"{prefix}.{name}": "rowwise" for name in names}


IDS = {"input_ids": _tokens()}

CODES: dict[str, Code] = {
    "nanoGPT": Code(
        NanoGPT, {"idx": _tokens()}, {**_colwise("transformer.h.*", "mlp.c_fc"), **_rowwise("transformer.h.*", "mlp.c_proj")}
    ),
    "nanoGPT, attention": Code(
        NanoGPT, {"idx": _tokens()}, {**_colwise("transformer.h.*", "c_attn"), **_rowwise("transformer.h.*", "c_proj")}
    ),
    "nanochat": Code(
        Nanochat,
        {"idx": _tokens()},
        {
            **_colwise("transformer.h.*", "attn.c_q", "attn.c_k", "attn.c_v", "mlp.c_fc"),
            **_rowwise("transformer.h.*", "attn.c_proj", "mlp.c_proj"),
        },
    ),
    "litgpt": Code(
        LitGPT, {"idx": _tokens()}, {**_colwise("transformer.h.*", "fc_1", "fc_2"), **_rowwise("transformer.h.*", "out")}
    ),
    "litgpt, attention": Code(
        LitGPT, {"idx": _tokens()}, {**_colwise("transformer.h.*", "attn"), **_rowwise("transformer.h.*", "proj")}
    ),
    "x-transformers": Code(XTransformers, {"x": _tokens()}, {"layers.*.1.0": "colwise", "layers.*.1.2": "rowwise"}),
    "x-transformers, attention": Code(
        XTransformers, {"x": _tokens()}, {**_colwise("layers.*.1", "to_q", "to_k", "to_v"), **_rowwise("layers.*.1", "to_out")}
    ),
    "lingua": Code(Lingua, {"token_values": _tokens()}, {**_colwise("layers.*", "w1", "w3"), **_rowwise("layers.*", "w2")}),
    "lingua, attention": Code(
        Lingua, {"token_values": _tokens()}, {**_colwise("layers.*", "wq", "wk", "wv"), **_rowwise("layers.*", "wo")}
    ),
    "timm ViT": Code(Vit, {"x": _numbers(4, 3, 8, 8)}, {**_colwise("blocks.*", "fc1"), **_rowwise("blocks.*", "fc2")}),
    "timm ViT, attention": Code(
        Vit, {"x": _numbers(4, 3, 8, 8)}, {**_colwise("blocks.*", "qkv"), **_rowwise("blocks.*", "proj")}
    ),
    "Llama": Code(foreign_modules.llama, IDS),
    "Qwen3": Code(foreign_modules.qwen3, IDS),
    "Mixtral": Code(foreign_modules.mixtral, IDS, close=1e-6),
    "GPT-2": Code(gpt2, IDS, {"transformer.wte": "embedding_rowwise", "lm_head": "colwise_gather_output"}),
    "BERT": Code(
        bert, IDS, {**_colwise("bert.encoder.layer.*", "intermediate.dense"), **_rowwise("bert.encoder.layer.*", "output.dense")}
    ),
    "BERT, attention": Code(
        bert,
        IDS,
        {
            **_colwise("bert.encoder.layer.*.attention.self", "query", "key", "value"),
            **_rowwise("bert.encoder.layer.*.attention", "output.dense"),
        },
    ),
    "T5": Code(
        t5,
        {"input_ids": _tokens(), "decoder_input_ids": _tokens()},
        {**_colwise("*.block.*.layer.*", "DenseReluDense.wi"), **_rowwise("*.block.*.layer.*", "DenseReluDense.wo")},
    ),
    "T5, attention": Code(
        t5,
        {"input_ids": _tokens(), "decoder_input_ids": _tokens()},
        {**_colwise("*.block.*.layer.*.SelfAttention", *"qkv"), **_rowwise("*.block.*.layer.*.SelfAttention", "o")},
    ),
    "Whisper": Code(
        whisper,
        {"input_features": _numbers(4, 4, 12), "decoder_input_ids": _tokens()},
        {**_colwise("model.*.layers.*", "fc1"), **_rowwise("model.*.layers.*", "fc2")},
    ),
    "Whisper, attention": Code(
        whisper,
        {"input_features": _numbers(4, 4, 12), "decoder_input_ids": _tokens()},
        {
            **_colwise("model.*.layers.*.self_attn", "q_proj", "k_proj", "v_proj"),
            **_rowwise("model.*.layers.*.self_attn", "out_proj"),
        },
    ),
    "Mamba": Code(
        mamba,
        IDS,
        {"backbone.layers.*.mixer.in_proj": "colwise", "backbone.layers.*.mixer.out_proj": "rowwise"},
        close=1e-6,
    ),
    "ViT": Code(
        vit,
        {"pixel_values": _numbers(4, 3, 8, 8)},
        {**_colwise("vit.layers.*", "mlp.fc1"), **_rowwise("vit.layers.*", "mlp.fc2")},
    ),
}
