"""Training tokens per second of Forge's decoder, eager and compiled, against the same model in another trainer.

    python benchmarks/models/train.py [--shapes small-4k,small-32k,20m,125m,wide-20m] [--compute fp32,bf16] [--rounds 7]
    python benchmarks/models/train.py --rival torchtitan --shapes small-4k,small-32k --compute bf16

`20m` and `125m` are the presets of these names, at their sequence length. The rival is transformers under accelerate, eager, or
torchtitan (0.2.2), compiled (`rivals.py`). Every side begins with the same weights and tokens, which its first loss shows, and
has fp32 masters, fused AdamW, clipping and SDPA attention. Each side is a process of its own; steps alternate between them, and a
figure is the ratio of step times round by round, so drift of the machine cancels. Peak memory is that of the process. Needs
`transformers` and `accelerate`, or `torchtitan==0.2.2` and `triton`, which it imports.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import rivals
import torch

from forge_core.batch import Batch
from forge_core.layout import Layout
from forge_models.components.decoder import DecoderConfig
from forge_models.objectives import CrossEntropy
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.placement.topology import Topology
from forge_parallel.step.reduce import clip_grad_norm
from forge_parallel.step.step import Step
from forge_parallel.transforms.compile import Compile
from forge_train import presets

RIVALS = {rival.__name__: rival for rival in (rivals.transformers, rivals.torchtitan)}
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Shape:
    decoder: DecoderConfig
    rows: int

    def batch(self) -> Batch:
        size = (self.rows, self.decoder.max_length + 1)
        tokens = torch.randint(self.decoder.vocab_size, size, generator=torch.Generator().manual_seed(1))
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def preset(name: str, rows: int) -> Shape:
    model: dict[str, Any] = tomllib.loads(getattr(presets, name).read_text())["model"]
    assert model.pop("name") == "decoder"
    return Shape(DecoderConfig(**model), rows)


def small(vocab: int) -> Shape:
    return Shape(DecoderConfig(dim=256, layers=4, heads=4, ffn_dim=768, vocab_size=vocab, max_length=256), 8)


SHAPES: dict[str, Callable[[], Shape]] = {
    "small-4k": lambda: small(4096),
    "small-32k": lambda: small(32000),
    "20m": lambda: preset("20m", 2),
    "125m": lambda: preset("125m", 1),
    "wide-20m": lambda: Shape(DecoderConfig(dim=384, layers=8, heads=6, ffn_dim=1024, vocab_size=8192, max_length=512), 4),
}


def realized(shape: Shape, compute: str, compiled: bool = False) -> ParallelModel:
    layout = Layout()
    plan = Plan.of([Compile().build()] if compiled else [], layout)
    return realize(Blueprint.of(shape.decoder.build), plan, Topology(layout, torch.device("cpu")), 0, compute)


def forge(shape: Shape, compute: str, compiled: bool) -> Callable[[], float]:
    model, data = realized(shape, compute, compiled), shape.batch()
    step, optimizer = Step(model, CrossEntropy().build()), AdamWConfig().build(model)

    def one() -> float:
        result = step([data])
        clip_grad_norm(model, result.norm, 1.0)
        optimizer.step(result.skip)
        optimizer.zero_grad()
        return result.numbers()["loss"]

    return one


def rival(name: str, shape: Shape, compute: str) -> Callable[[], float]:
    weights = {name: tensor.detach() for name, tensor in realized(shape, "fp32").part.named_parameters()}
    one = RIVALS[name](shape.decoder, weights, shape.batch(), compute)
    del weights
    RESET.write_text("5")  # the peak shall be of training alone
    return one


def work(name: str, compute: str, side: str, threads: int) -> None:
    """A side's process: prints its first loss, for each line that comes the seconds of a step, at last its peak memory in MiB."""
    torch.set_num_threads(threads)
    shape = SHAPES[name]()
    one = rival(side, shape, compute) if side in RIVALS else forge(shape, compute, side == "forge-compiled")
    loss = one()
    one()
    print(loss, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        one()
        print(time.perf_counter() - start, flush=True)
    status = STATUS.read_text()  # getrusage would report the parent's peak, which survives exec
    print(int(status.split("VmHWM:")[1].split()[0]) / 1024)


class Side:
    """A side's process, seen from the one that compares."""

    def __init__(self, name: str, compute: str, side: str, threads: int, stack: ExitStack) -> None:
        command = [sys.executable, __file__, "--worker", json.dumps([name, compute, side, threads])]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._process = stack.enter_context(process)
        assert process.stdin is not None and process.stdout is not None
        self._asks: IO[str] = process.stdin
        self._answers: IO[str] = process.stdout
        self.loss = self._number()
        self.times: list[float] = []

    def step(self) -> None:
        print(file=self._asks, flush=True)
        self.times.append(self._number())

    def peak(self) -> float:
        self._asks.close()
        return self._number()

    def _number(self) -> float:
        line = self._answers.readline()
        if not line:
            raise SystemExit("a side ended; its error stands above")
        return float(line)


def compare(name: str, compute: str, rival: str, rounds: int, threads: int) -> None:
    shape = SHAPES[name]()
    with ExitStack() as stack:
        sides = {side: Side(name, compute, side, threads, stack) for side in (rival, "forge", "forge-compiled")}
        first = sides[rival]
        for label, side in sides.items():
            if not math.isclose(side.loss, first.loss, rel_tol=1e-5 if compute == "fp32" else 1e-3):
                raise SystemExit(f"{name} {compute}: the first loss of {label} is {side.loss}, of {rival} {first.loss}")
        for number in range(rounds):
            for label in sides if number % 2 else reversed(sides):
                sides[label].step()
        for label, side in sides.items():
            ratios = sorted(theirs / ours for ours, theirs in zip(side.times, first.times, strict=True))
            quarter = len(ratios) // 4
            rate = shape.rows * shape.decoder.max_length / statistics.median(side.times)
            ratio = f"{statistics.median(ratios):5.2f} x ({ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f})"
            print(f"{name:10} {compute} {label:15} {rate:8,.0f} tokens/s   {ratio}   {side.peak():6.0f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="small-4k,small-32k,20m,125m")
    parser.add_argument("--compute", default="fp32,bf16")
    parser.add_argument("--rival", default="transformers", choices=RIVALS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*json.loads(arguments.worker))
        return
    if unknown := set(arguments.shapes.split(",")) - set(SHAPES):
        parser.error(f"no shape {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds")
    print(f"x: step time of {arguments.rival} over this side's, round by round (quartiles)")
    for name in arguments.shapes.split(","):
        for compute in arguments.compute.split(","):
            compare(name, compute, arguments.rival, arguments.rounds, arguments.threads)


if __name__ == "__main__":
    main()
