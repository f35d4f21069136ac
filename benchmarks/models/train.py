"""Training tokens per second of Forge's decoder, eager and compiled, against the same model in transformers under accelerate.

    python benchmarks/models/train.py [--shapes small-4k,small-32k,20m,125m] [--compute fp32,bf16] [--rounds 7]

Every side has fp32 masters, fused AdamW and clipping, the same tokens, and SDPA attention. Rounds alternate between the sides; a
figure is the ratio of step times round by round, so drift of the machine cancels. Peak memory is that of a process of its own
with one side. Needs `transformers` and `accelerate`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from forge_core.batch import Batch
from forge_core.layout import Layout
from forge_models.components.decoder import Decoder
from forge_models.components.objectives import CrossEntropy
from forge_parallel.clipping import clip
from forge_parallel.components.optimizers import AdamW
from forge_parallel.components.transforms import Compile
from forge_parallel.plan import Plan
from forge_parallel.realization import Blueprint, realize
from forge_parallel.step import Step
from forge_parallel.topology import Topology

SIDES = ("forge", "forge-compiled", "transformers")


@dataclass(frozen=True)
class Shape:
    dim: int
    layers: int
    heads: int
    ffn: int
    vocab: int
    rows: int
    length: int

    def batch(self) -> Batch:
        tokens = torch.randint(self.vocab, (self.rows, self.length + 1), generator=torch.Generator().manual_seed(1))
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


SHAPES = {
    "small-4k": Shape(256, 4, 4, 768, 4096, 8, 256),
    "small-32k": Shape(256, 4, 4, 768, 32000, 8, 256),
    "20m": Shape(384, 8, 6, 1024, 8192, 4, 512),
    "125m": Shape(768, 12, 12, 2048, 32000, 1, 512),
}


def forge(shape: Shape, compute: str, compiled: bool) -> Callable[[], float]:
    component = Decoder(
        dim=shape.dim,
        layers=shape.layers,
        heads=shape.heads,
        ffn_dim=shape.ffn,
        vocab_size=shape.vocab,
        max_length=shape.length,
    )
    layout, data = Layout(), shape.batch()
    plan = Plan.of([Compile().build()] if compiled else [], layout)
    model = realize(Blueprint.of(component.build), plan, Topology(layout, torch.device("cpu")), 0, compute)
    step, optimizer = Step(model, CrossEntropy().build()), AdamW().build(model)

    def one() -> float:
        result = step([data])
        clip(model, result.norm, 1.0)
        optimizer.step(result.skip)
        optimizer.zero_grad()
        return result.numbers()["loss"]

    return one


def rival(shape: Shape, compute: str) -> Callable[[], float]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        intermediate_size=shape.ffn,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.length,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    AcceleratorState._reset_state(True)  # it remembers the precision of the first one made in a process
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if compute == "bf16" else "no")
    model = LlamaForCausalLM(config)
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    model, optimizer = accelerator.prepare(model, adamw)
    data = shape.batch()

    def one() -> float:
        loss = model(input_ids=data.tokens, labels=data.tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return one


def made(side: str, shape: Shape, compute: str) -> Callable[[], float]:
    return rival(shape, compute) if side == "transformers" else forge(shape, compute, side == "forge-compiled")


def timed(one: Callable[[], float]) -> float:
    start = time.perf_counter()
    one()
    return time.perf_counter() - start


def compare(name: str, compute: str, rounds: int) -> None:
    shape = SHAPES[name]
    sides = {side: made(side, shape, compute) for side in SIDES}
    for one in sides.values():
        one()
        one()
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(rounds):
        order = list(SIDES) if number % 2 else list(reversed(SIDES))
        for side in order:
            times[side].append(timed(sides[side]))
    tokens = shape.rows * shape.length
    for side in SIDES:
        ratios = sorted(theirs / ours for ours, theirs in zip(times[side], times["transformers"], strict=True))
        quarter = len(ratios) // 4
        rate = tokens / statistics.median(times[side])
        spread = f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}"
        memory = peak(name, compute, side)
        ratio = f"{statistics.median(ratios):5.2f} x ({spread})"
        print(f"{name:10} {compute} {side:15} {rate:8,.0f} tokens/s   {ratio}   {memory:6.0f} MiB")
    sys.stdout.flush()


def peak(name: str, compute: str, side: str) -> float:
    """Peak resident memory of three steps in a fresh process, MiB."""
    command = [sys.executable, __file__, "--alone", json.dumps([name, compute, side, torch.get_num_threads()])]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="small-4k,small-32k,20m")
    parser.add_argument("--compute", default="fp32,bf16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        name, compute, side, threads = json.loads(arguments.alone)
        torch.set_num_threads(threads)
        one = made(side, SHAPES[name], compute)
        for _ in range(3):
            one()
        status = Path("/proc/self/status").read_text()  # getrusage would report the parent's peak, which survives exec
        print(int(status.split("VmHWM:")[1].split()[0]) / 1024)
        return
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds")
    print("x: transformers' step time over this side's, round by round (quartiles)")
    for name in arguments.shapes.split(","):
        for compute in arguments.compute.split(","):
            compare(name, compute, arguments.rounds)


if __name__ == "__main__":
    main()
