"""Steps per second of Forge's step and update over a bare PyTorch loop with the same module, in one process.

    python benchmarks/train/step_rate.py [--rounds 15] [--threads 2]

Both sides run the same decoder with the same initial weights on the same tokens, fused AdamW and clipping; in bf16 the
bare loop uses autocast. They alternate step by step in one run; the figure is bare time / Forge time (1.00 = no overhead).
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch

from forge_core.batch import Batch
from forge_core.layout import Layout
from forge_models.components.decoder import DecoderConfig
from forge_models.objectives import CrossEntropy
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.placement.topology import Topology
from forge_parallel.step.reduce import clip_grad_norm
from forge_parallel.step.step import Step

DECODER = DecoderConfig(dim=256, layers=6, heads=8, kv_heads=4, vocab_size=4096, max_length=256, tied_embeddings=True)
ROWS, LENGTH = 8, 256


def batch() -> Batch:
    tokens = torch.randint(4096, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def ours(compute: str, data: Batch) -> Callable[[], float]:
    layout = Layout()
    model = realize(Blueprint.of(DECODER.build), Plan.of([], layout), Topology(layout, torch.device("cpu")), 0, compute)
    step, optimizer = Step(model, CrossEntropy().build()), AdamWConfig().build(model)

    def one() -> float:
        result = step([data])
        clip_grad_norm(model, result.norm, 1.0)
        optimizer.set_factor(1.0)
        optimizer.step(result.skip)
        optimizer.zero_grad()
        return result.numbers()["loss"]

    return one


def bare(compute: str, data: Batch) -> Callable[[], float]:
    layout = Layout()
    module = realize(Blueprint.of(DECODER.build), Plan.of([], layout), Topology(layout, torch.device("cpu")), 0).part
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    objective = CrossEntropy().build()

    def one() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=compute == "bf16"):
            terms = module(data.tokens, labels=data.labels, objective=objective)
        loss = terms.sum / terms.tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return one


def timed(one: Callable[[], float]) -> float:
    start = time.perf_counter()
    one()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {arguments.threads} threads, {arguments.rounds} rounds"
    )
    data = batch()
    for compute in ("fp32", "bf16"):
        left, right = ours(compute, data), bare(compute, data)
        for warm in (left, right, left, right):
            warm()
        pairs = []
        for index in range(arguments.rounds):
            order = (left, right) if index % 2 else (right, left)
            times = {one: timed(one) for one in order}
            pairs.append((times[left], times[right]))
        ratios = sorted(b / a for a, b in pairs)
        quarter = len(ratios) // 4
        rate = ROWS * LENGTH / statistics.median(a for a, _ in pairs)
        print(
            f"{compute}: bare / Forge median {statistics.median(ratios):.3f} "
            f"(quartiles {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}); Forge {rate:,.0f} tokens/s"
        )


if __name__ == "__main__":
    main()
