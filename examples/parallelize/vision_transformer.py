"""A vision transformer of plain torch on several processes: `torchrun --nproc-per-node 4 vision_transformer.py dp2tp2`."""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from forge_parallel import parallelize
from forge_parallel.transforms import Recompute

SIZE, PATCH, WIDTH, HEADS, LAYERS, CLASSES = 16, 4, 64, 4, 3, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        # -1, because with tensor parallelism a rank has only some of the heads
        q, k, v = (layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class VisionTransformer(nn.Module):
    """Images (N, 3, SIZE, SIZE) -> logits (N, CLASSES)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(torch.zeros((SIZE // PATCH) ** 2, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


PLAN = {f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")} | {
    f"blocks.*.{name}": "rowwise" for name in ("o", "down")
}


def images_of(step: int, count: int = 16) -> tuple[Tensor, Tensor]:
    """Returns images with a bright quarter, and the number of the quarter."""
    draw = torch.Generator().manual_seed(step)
    images, labels = torch.randn(count, 3, SIZE, SIZE, generator=draw), torch.randint(CLASSES, (count,), generator=draw)
    half = SIZE // 2
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, half * (label // 2) :, half * (label % 2) :][:, :half, :half] += 2.0
    return images, labels


def train(layout: str, steps: int = 20) -> list[float]:
    """Losses of each step, of the whole batch of 16 images."""
    example = {"images": torch.empty(2, 3, SIZE, SIZE, device="meta")}  # tensor parallelism traces a forward of it
    model = parallelize(VisionTransformer, layout, [Recompute(policy="full")], tp_plan=PLAN, example=example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        images, labels = (whole.chunk(model.data_ranks)[model.data_rank] for whole in images_of(step))
        loss = F.cross_entropy(model.module(images), labels)
        loss.backward()
        model.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(model.mean(loss))
    return losses


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group()
    for step, loss in enumerate(train(sys.argv[1] if len(sys.argv) > 1 else "1")):
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"step {step} loss {loss:.5f}")
    if dist.is_initialized():
        dist.destroy_process_group()
