"""The model of this folder in plain PyTorch, in one long file so that it needs no other: `load(folder)` opens it.

    model = load("path/of/this/folder")
    logits = model(tokens, images, image_rows)

`tokens` (B, T) int64 have `image_token` where vectors of an image go, `per_image` times for each image. `images` are
(n, channels, height, width), resized and normalized as `preprocessor_config.json` says, and `image_rows` (B, M) int64 the numbers
of each row's images in their order, -1 where a row has fewer. Modules have the names of the tensors in the safetensors files.
"""

import json
from collections.abc import Callable
from itertools import pairwise
from math import ceil, isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Table = dict[str, Any]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def load(folder: str | Path, dtype: torch.dtype | None = None) -> "Model | Vision":
    """The model of a folder in evaluation mode, in the dtype that it was stored in, or in `dtype`."""
    from safetensors.torch import load_file

    path = Path(folder)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    with torch.device("meta"):
        model = {"ForgeForCausalLM": Model, "Vision": Vision}[config["architectures"][0]](config)
    model.load_state_dict({name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}, assign=True)
    return model.eval()


class Model(nn.Module):
    """A decoder whose tokens are text and images. `config` is the content of `config.json`."""

    def __init__(self, config: Table) -> None:
        super().__init__()
        self.config = shape = config["model"]
        self.embed = nn.Embedding(shape["vocab_size"], shape["dim"])
        self.encoder: nn.Module | None = None if shape["encoder"] is None else Encoder(shape["encoder"])
        self.adapter: nn.Module | None = None if shape["adapter"] is None else adapter(shape["adapter"])
        self.blocks = nn.ModuleDict({str(layer): Block(shape, layer) for layer in range(shape["layers"])})
        self.norm = norm(shape, shape["dim"])
        self.head: nn.Module | None = None if shape["tied"] else linear(shape["dim"], shape["vocab_size"], False)

    def forward(
        self,
        tokens: Tensor,
        images: Tensor | None = None,
        image_rows: Tensor | None = None,
        prefix: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, vocab). `prefix` (B, T) bool marks what sees all of itself, where the model has a prefix; by default
        all up to the last image of a row.

        Raises:
            ValueError: a row has other placeholders than its images need.
        """
        shape = self.config
        x = self.embed(tokens)
        x = x * torch.tensor(shape["embed_multiplier"], dtype=x.dtype)
        kinds = torch.zeros_like(tokens)
        for place, (first, end) in enumerate(shape["ranges"], 1):
            kinds = kinds.masked_fill((tokens >= first) & (tokens < end), place)
        if images is not None and image_rows is not None and self.encoder is not None and self.adapter is not None:
            here = tokens == shape["image_token"]
            if not torch.equal(here.sum(1), (image_rows >= 0).sum(1) * shape["per_image"]):
                raise ValueError(f"each image needs {shape['per_image']} placeholders (id {shape['image_token']}) in its row")
            vectors = self.adapter(self.encoder(images.to(x.dtype)))
            x = x.masked_scatter(here.unsqueeze(-1), vectors[image_rows[image_rows >= 0]])
        visible = {window: self.visible(tokens, window, prefix) for window in {*shape["windows"]}}
        for layer, block in enumerate(self.blocks.values()):
            window = shape["windows"][layer]
            x = block(x, kinds, visible[window], angles(shape["rotary"][window is not None], tokens.shape[1], tokens.device))
        x = self.norm(x)
        logits = F.linear(x, self.embed.weight) if self.head is None else self.head(x)
        cap = shape["soft_cap"]
        return logits if cap is None else cap * (logits / cap).tanh()

    def visible(self, tokens: Tensor, window: int | None, prefix: Tensor | None) -> Tensor:
        """(B or 1, 1, T, T) bool: which keys a query sees."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        distance = places[:, None] - places
        seen = (distance >= 0) & (distance < (window or tokens.shape[1]))
        kind, here = self.config["image_attention"], tokens == self.config["image_token"]
        if kind == "causal" or self.config["image_token"] is None:
            return seen[None, None]
        if kind == "bidirectional_image":
            image = (here.cumsum(1) - 1) // self.config["per_image"]
            both = here[:, :, None] & here[:, None, :] & (image[:, :, None] == image[:, None, :])
        else:
            marked = here.flip(1).cummax(1).values.flip(1) if prefix is None else prefix
            both = marked[:, :, None] & marked[:, None, :]
        return (seen | both).unsqueeze(1)


class Each(nn.ModuleDict):
    """A module for the tokens of each modality."""

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        """(B, T, ...) -> (B, T, ...). `kinds` (B, T) is the place of each token's modality."""
        parts = [(kinds == place, module) for place, module in enumerate(self.values())]
        made = [(at, module(x[at])) for at, module in parts]
        found = made[0][1].new_zeros(*kinds.shape, *made[0][1].shape[1:])
        for at, part in made:
            found = found.index_put((at,), part)
        return found


def each(names: list[str], make: Callable[[], nn.Module]) -> nn.Module:
    return Each({name: make() for name in names}) if names else make()


def run(module: nn.Module, x: Tensor, kinds: Tensor) -> Tensor:
    return module(x, kinds) if isinstance(module, Each | ModalityExperts) else module(x)


class Block(nn.Module):
    """x + after(attention(before(x))), then the same with the feed-forward part."""

    def __init__(self, shape: Table, layer: int) -> None:
        super().__init__()
        names, placement = shape["modalities"] if shape["untied"] else [], shape["norm_placement"]

        def norm_of(wanted: bool) -> nn.Module | None:
            return each(names, lambda: norm(shape, shape["dim"])) if wanted else None

        self.multiplier = shape["residual_multiplier"]
        self.attention_norm = norm_of(placement != "post")
        self.attention = Attention(shape, names)
        self.attention_post_norm = norm_of(placement != "pre")
        self.mlp_norm = norm_of(placement != "post")
        sparse = shape["experts"] is not None and shape["experts"]["layers"][layer]
        self.mlp = ModalityExperts(shape) if sparse else each(shape["modalities"], lambda: MLP(shape, shape["ffn_dim"]))
        self.mlp_post_norm = norm_of(placement != "pre")

    def forward(self, x: Tensor, kinds: Tensor, visible: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """(B, T, dim) -> (B, T, dim)."""
        inner = x if self.attention_norm is None else run(self.attention_norm, x, kinds)
        inner = self.attention(inner, kinds, visible, turn)
        inner = inner if self.attention_post_norm is None else run(self.attention_post_norm, inner, kinds)
        x = x + inner * self.multiplier
        inner = x if self.mlp_norm is None else run(self.mlp_norm, x, kinds)
        inner = run(self.mlp, inner, kinds)
        inner = inner if self.mlp_post_norm is None else run(self.mlp_post_norm, inner, kinds)
        return x + inner * self.multiplier


class Attention(nn.Module):
    """softmax(q k^T * scale) v with rotary positions, over all tokens in their order."""

    def __init__(self, shape: Table, names: list[str]) -> None:
        super().__init__()
        self.shape = part = shape["attention"]
        dim, head_dim = shape["dim"], part["head_dim"]
        heads, kv_heads = part["heads"] * head_dim, part["kv_heads"] * head_dim
        self.q_proj = each(names, lambda: linear(dim, heads, part["qkv_bias"]))
        self.k_proj = each(names, lambda: linear(dim, kv_heads, part["qkv_bias"]))
        self.v_proj = each(names, lambda: linear(dim, kv_heads, part["qkv_bias"]))
        self.o_proj = each(names, lambda: linear(heads, dim, part["output_bias"]))
        kind = part["qk_norm"]
        widths = {"none": None, "head": (head_dim, head_dim), "full": (heads, kv_heads)}[kind]
        self.q_norm = None if widths is None else each(names, lambda: norm(shape, widths[0]))
        self.k_norm = None if widths is None else each(names, lambda: norm(shape, widths[1]))

    def forward(self, x: Tensor, kinds: Tensor, visible: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """(B, T, dim) -> (B, T, dim)."""
        q = rotated(self._normed(run(self.q_proj, x, kinds), self.q_norm, kinds), *turn)
        k = rotated(self._normed(run(self.k_proj, x, kinds), self.k_norm, kinds), *turn)
        v = run(self.v_proj, x, kinds).unflatten(-1, (-1, self.shape["head_dim"])).transpose(1, 2)
        scale, cap, groups = self.shape["scale"], self.shape["soft_cap"], q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if cap is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
        else:
            scores = cap * (q @ k.transpose(2, 3) * scale / cap).tanh()
            out = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
        return run(self.o_proj, out.transpose(1, 2).flatten(2), kinds)

    def _normed(self, x: Tensor, norm: nn.Module | None, kinds: Tensor) -> Tensor:
        """(B, T, heads * head_dim) -> (B, heads, T, head_dim)."""
        if norm is not None and self.shape["qk_norm"] == "full":
            x = run(norm, x, kinds)
        x = x.unflatten(-1, (-1, self.shape["head_dim"]))
        if norm is not None and self.shape["qk_norm"] == "head":
            x = run(norm, x, kinds)
        return x.transpose(1, 2)


def angles(rotary: Table, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin (T, width / 2) of every place."""
    places = torch.arange(length, device=device, dtype=torch.float32)
    turns = places[:, None] * torch.tensor(rotary["frequencies"], device=device, dtype=torch.float32)
    return turns.cos() * rotary["factor"], turns.sin() * rotary["factor"]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(B, heads, T, head_dim), its first dimensions turned, the first half of them against the second."""
    width = cos.shape[-1]
    first, second, still = x.split((width, width, x.shape[-1] - 2 * width), -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, still), -1).to(x.dtype)


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""

    def __init__(self, shape: Table, width: int) -> None:
        super().__init__()
        part, dim = shape["mlp"], shape["dim"]
        self.activation = ACTIVATIONS[part["activation"]]
        self.gate_proj = linear(dim, width, part["bias"]) if part["gated"] else None
        self.up_proj = linear(dim, width, part["bias"])
        self.down_proj = linear(width, dim, part["bias"])

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        up = self.up_proj(x)
        return self.down_proj(self.activation(up) if self.gate_proj is None else self.activation(self.gate_proj(x)) * up)


class ModalityExperts(nn.Module):
    """shared(x) + the experts of its modality for each token."""

    def __init__(self, shape: Table) -> None:
        super().__init__()
        part = shape["experts"]
        self.layers = Each({name: Experts(shape) for name in shape["modalities"]})
        self.shared = MLP(shape, part["shared"] * part["ffn_dim"]) if part["shared"] else None

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        """(B, T, dim) -> (B, T, dim)."""
        y = self.layers(x, kinds)
        return y if self.shared is None else y + self.shared(x)


class Experts(nn.Module):
    """The sum of the `top_k` experts of the largest softmax(W x), each times its probability."""

    def __init__(self, shape: Table) -> None:
        super().__init__()
        part = self.shape = shape["experts"]
        self.activation, gated = ACTIVATIONS[shape["mlp"]["activation"]], shape["mlp"]["gated"]
        count, width, dim = part["count"], part["ffn_dim"], shape["dim"]
        self.router = linear(dim, count, False)
        self.experts = nn.ParameterDict(
            {
                **({"gate_proj": torch.empty(count, width, dim)} if gated else {}),
                "up_proj": torch.empty(count, width, dim),
                "down_proj": torch.empty(count, dim, width),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, dim) -> (n, dim)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        chances = F.linear(x.to(wide), self.router.weight.to(wide)).softmax(-1)
        weights, chosen = chances.topk(self.shape["top_k"], -1)
        weights = weights / weights.sum(-1, keepdim=True) if self.shape["normalize"] else weights
        y = torch.zeros_like(x)
        for expert in range(self.shape["count"]):
            at, which = (chosen == expert).nonzero(as_tuple=True)
            part = x[at]
            hidden = F.linear(part, self.experts["up_proj"][expert])
            if "gate_proj" in self.experts:
                hidden = self.activation(F.linear(part, self.experts["gate_proj"][expert])) * hidden
            else:
                hidden = self.activation(hidden)
            out = F.linear(hidden, self.experts["down_proj"][expert]) * weights[at, which, None].to(x.dtype)
            y = y.index_add(0, at, out)
        return y


class Norm(nn.Module):
    """RMSNorm with `offset` added to its weight, or LayerNorm, in fp32."""

    def __init__(self, dim: int, eps: float, offset: int, centered: bool, bias: bool) -> None:
        super().__init__()
        self.eps, self.offset, self.centered = eps, offset, centered
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.centered:
            bias = None if self.bias is None else self.bias.to(wide.dtype)
            return F.layer_norm(wide, self.weight.shape, self.weight.to(wide.dtype), bias, self.eps).to(x.dtype)
        wide = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide * (self.weight.to(wide.dtype) + self.offset)).to(x.dtype)


def norm(shape: Table, dim: int) -> Norm:
    return Norm(dim, **shape["norm"])


def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias)


class Encoder(nn.Module):
    """A vision transformer over square images; with `features` images are features already."""

    def __init__(self, shape: Table) -> None:
        super().__init__()
        self.shape = shape
        if "features" in shape:
            return
        dim, eps = shape["dim"], shape["eps"]
        self.embed = PatchEmbedding(shape)
        self.entry_norm = nn.LayerNorm(dim, eps) if shape["entry_norm"] else None
        self.layers = nn.ModuleDict({str(layer): ImageBlock(shape) for layer in range(shape["blocks"])})
        self.norm = nn.LayerNorm(dim, eps) if shape["last_norm"] else None

    def forward(self, images: Tensor) -> Tensor:
        """(n, channels, height, width) -> (n, features, width)."""
        if "features" in self.shape:
            return images
        x = self.embed(images)
        x = x if self.entry_norm is None else self.entry_norm(x)
        states = [x]
        for layer in self.layers.values():
            x = layer(x)
            states.append(x)
        x = x if self.norm is None else self.norm(x)
        outputs = self.shape["outputs"]
        x = torch.cat([states[index] for index in outputs], -1) if outputs else x
        return x[:, 1:] if self.shape["class_token"] and not self.shape["class_feature"] else x


class PatchEmbedding(nn.Module):
    """A linear function of each patch's pixels, with its position; the class token before them."""

    def __init__(self, shape: Table) -> None:
        super().__init__()
        self.shape, dim, grid = shape, shape["dim"], shape["image_size"] // shape["patch_size"]
        self.proj = linear(shape["channels"] * shape["patch_size"] ** 2, dim, shape["patch_bias"])
        self.class_token = nn.Parameter(torch.empty(dim)) if shape["class_token"] else None
        rows = grid**2 + shape["class_token"]
        self.positions = nn.Parameter(torch.empty(rows, dim)) if shape["positions"] == "learned" else None

    def forward(self, images: Tensor) -> Tensor:
        """(n, channels, height, width) -> (n, tokens, dim), patches row by row."""
        size = self.shape["patch_size"]
        x = self.proj(F.unfold(images, size, stride=size).transpose(1, 2))
        if self.positions is None:
            x = x + sincos(isqrt(x.shape[1]), x.shape[2], x.device).to(x.dtype)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(len(x), 1, -1), x), 1)
        return x if self.positions is None else x + self.positions


def sincos(grid: int, dim: int, device: torch.device) -> Tensor:
    """(grid * grid, dim): sines and cosines of the column, then of the row."""
    frequencies = 10000.0 ** (-torch.arange(dim // 4, device=device, dtype=torch.float32) * 4 / dim)
    turns = torch.arange(grid, device=device, dtype=torch.float32)[:, None] * frequencies
    one = torch.cat((turns.sin(), turns.cos()), 1)
    return torch.cat((one.repeat(grid, 1), one.repeat_interleave(grid, 0)), 1)


class ImageBlock(nn.Module):
    """x + scale(attention(norm(x))), then the same with the feed-forward part."""

    def __init__(self, shape: Table) -> None:
        super().__init__()
        dim, eps = shape["dim"], shape["eps"]
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim, eps), nn.LayerNorm(dim, eps)
        self.attention = ImageAttention(dim, shape["heads"], shape["qkv_bias"])
        self.mlp = MLP({"dim": dim, "mlp": shape["mlp"]}, shape["ffn_dim"])
        self.attention_scale = Scale(dim) if shape["layer_scale"] else None
        self.mlp_scale = Scale(dim) if shape["layer_scale"] else None

    def forward(self, x: Tensor) -> Tensor:
        """(n, tokens, dim) -> the same."""
        inner = self.attention(self.attention_norm(x))
        x = x + (inner if self.attention_scale is None else self.attention_scale(inner))
        inner = self.mlp(self.mlp_norm(x))
        return x + (inner if self.mlp_scale is None else self.mlp_scale(inner))


class Scale(nn.Module):
    """x * weight."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return x * self.weight


class ImageAttention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v: each query sees every key."""

    def __init__(self, dim: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (linear(dim, dim, bias) for _ in range(3))
        self.o_proj = linear(dim, dim, True)

    def forward(self, x: Tensor) -> Tensor:
        """(n, tokens, dim) -> the same."""
        return attend(self, x, x)


def attend(part: Any, x: Tensor, seen: Tensor) -> Tensor:
    """(n, tokens, dim) -> the same, by the matrices and heads of `part`; `seen` (n, others, dim) is what is looked at."""
    made = ((part.q_proj, x), (part.k_proj, seen), (part.v_proj, seen))
    q, k, v = (layer(given).unflatten(-1, (part.heads, -1)).transpose(1, 2) for layer, given in made)
    return part.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Projection(nn.Module):
    """Matrices of the given widths with gelu between."""

    def __init__(self, widths: list[int], bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(at): linear(*sizes, bias) for at, sizes in enumerate(pairwise(widths))})

    def forward(self, x: Tensor) -> Tensor:
        """(..., first width) -> (..., last width)."""
        for name, layer in self.layers.items():
            x = layer(x if name == "0" else F.gelu(x))
        return x


class Pooled(nn.Module):
    """Features of each window of the grid become one: their mean, all of them side by side, or what the mean attends to."""

    def __init__(self, shape: Table) -> None:
        super().__init__()
        self.kind, self.window = shape["kind"], shape["window"]
        self.projection = Projection(shape["widths"], shape["bias"])
        if self.kind == "attention":
            inner = ImageAttention(shape["widths"][0], shape["heads"])
            self.heads = inner.heads
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = inner.q_proj, inner.k_proj, inner.v_proj, inner.o_proj

    def forward(self, x: Tensor) -> Tensor:
        """(n, features, width) -> (n, windows, dim)."""
        side, window = isqrt(x.shape[1]), self.window
        if self.kind == "average":
            image = x.transpose(1, 2).unflatten(2, (side, side))
            x = F.avg_pool2d(image, window, ceil_mode=True, count_include_pad=False).flatten(2).transpose(1, 2)
            assert x.shape[1] == ceil(side / window) ** 2
            return self.projection(x)
        rows = side // window
        cut = x.unflatten(1, (rows, window, rows, window)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        if self.kind == "shuffle":
            return self.projection(cut.flatten(2))
        flat = cut.flatten(0, 1)
        x = attend(self, flat.mean(1, keepdim=True), flat)
        return self.projection(x.unflatten(0, cut.shape[:2]).flatten(2))


class Perceiver(nn.Module):
    """Learned tokens that look at all features, layer by layer."""

    def __init__(self, shape: Table) -> None:
        super().__init__()
        dim = shape["widths"][-1]
        self.latents = nn.Parameter(torch.empty(shape["latents"], dim))
        self.entry = Projection(shape["widths"], True)
        self.layers = nn.ModuleDict(
            {str(at): PerceiverLayer(dim, shape["heads"], shape["ffn_dim"]) for at in range(shape["layers"])}
        )
        self.norm = nn.LayerNorm(dim, 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """(n, features, width) -> (n, latents, dim)."""
        features = self.entry(x)
        latents = self.latents.expand(len(x), -1, -1)
        for layer in self.layers.values():
            latents = layer(latents, features)
        return self.norm(latents)


class PerceiverLayer(nn.Module):
    """Attention of tokens to features, then a feed-forward part."""

    def __init__(self, dim: int, heads: int, ffn_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(dim, dim, False) for _ in range(4))
        self.latent_norm, self.feature_norm, self.mlp_norm = (nn.LayerNorm(dim, 1e-6) for _ in range(3))
        self.up_proj, self.down_proj = linear(dim, ffn_dim, False), linear(ffn_dim, dim, False)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Tokens (n, latents, dim) that look at `seen` (n, features, dim) -> (n, latents, dim)."""
        x = x + attend(self, self.latent_norm(x), self.feature_norm(seen))
        return x + self.down_proj(F.gelu(self.up_proj(self.mlp_norm(x))))


def adapter(shape: Table) -> nn.Module:
    """From features to vectors of the decoder's width."""
    if shape["kind"] == "projection":
        return Projection(shape["widths"], shape["bias"])
    return Perceiver(shape) if shape["kind"] == "perceiver" else Pooled(shape)


class Vision(nn.Module):
    """Encoder and adapter alone, for a model of text that looks at images by cross-attention."""

    def __init__(self, config: Table) -> None:
        super().__init__()
        self.encoder, self.adapter = Encoder(config["model"]["encoder"]), adapter(config["model"]["adapter"])

    def forward(self, images: Tensor) -> Tensor:
        """(n, channels, height, width) -> (n, per_image, dim): `cross_attention_states` of the model of text."""
        return self.adapter(self.encoder(images))


if __name__.startswith("transformers_modules."):  # `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`
    from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

    class ForgeConfig(PretrainedConfig):
        """The content of `config.json`."""

        model_type = "forge_standalone"

    class ForgeForCausalLM(PreTrainedModel, GenerationMixin):
        """`Model` as transformers opens it. Rows are whole: none is padded, and `generate` computes each anew, with no cache."""

        config_class = ForgeConfig
        base_model_prefix = "model"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = Model({"model": config.model})
            self.post_init()

        def forward(
            self,
            input_ids: Tensor,
            images: Tensor | None = None,
            image_rows: Tensor | None = None,
            attention_mask: Tensor | None = None,
            **given: Any,
        ) -> CausalLMOutput:
            """See `Model`.

            Raises:
                TypeError: an argument that would change something, which this model does not have.
                ValueError: `attention_mask` leaves tokens out.
            """
            # None and False ask for nothing, and so does return_dict = True. All else would be passed over.
            if wrong := [name for name, value in given.items() if value is not None and value is not (name == "return_dict")]:
                raise TypeError(f"{', '.join(wrong)}: this model takes input_ids, images and image_rows alone, with no cache")
            if attention_mask is not None and not bool(attention_mask.all()):
                raise ValueError("attention_mask leaves tokens out: this model takes rows of one length, without padding")
            return CausalLMOutput(logits=self.model(input_ids, images, image_rows))

        def prepare_inputs_for_generation(self, input_ids: Tensor, *_: Any, **kwargs: Any) -> Table:
            """All of each row: nothing of it is kept. By the name `kwargs` transformers lets arguments of `forward` pass."""
            return {"input_ids": input_ids} | {name: kwargs.get(name) for name in ("images", "image_rows", "attention_mask")}

        def _expand_inputs_for_generation(self, *sizes: Any, images: Tensor | None = None, **given: Any) -> Any:
            # Copies of a row name the same images. (transformers declares `self` here as a class that only checkers know.)
            tokens, found = super()._expand_inputs_for_generation(*sizes, **given)  # type: ignore[misc]
            return tokens, found | {"images": images}

        @classmethod
        def _supports_default_dynamic_cache(cls) -> bool:
            return False
