"""A transformers model by its own tensor parallel plan: `torchrun --nproc-per-node 4 transformers_model.py dp2tp2`."""

import os
import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from forge_parallel import parallelize
from forge_parallel.transforms import Recompute

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=256,
    pad_token_id=None,
)


def train(layout: str, steps: int = 10) -> list[float]:
    """Losses of each step, of the whole batch of 8 rows."""
    # No rank ever holds the whole model: `LlamaForCausalLM.from_pretrained(...)` in place of the lambda starts from weights.
    model = parallelize(lambda: LlamaForCausalLM(CONFIG), layout, [Recompute()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        rows = torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(step))
        mine = rows.chunk(model.data_ranks)[model.data_rank]
        loss = model.module(input_ids=mine, labels=mine).loss
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
