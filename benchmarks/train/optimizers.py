"""Seconds of an optimizer's step, of every registered one, over that of a published implementation; in one process, in turns.

    python benchmarks/train/optimizers.py [--rounds 9] [--threads 1] [--sharded] [--smoke]

Both sides have the same weights and gradients of a small decoder in fp32. The other sides are torch's fused AdamW, torchao's
AdamW8bit (which compiles itself), lion-pytorch, schedulefree, and torch's Muon with its AdamW for embeddings, head and norms.
Without another side, ours is timed alone. A step of ours can leave everything as it is where a loss was not finite, which costs a
choice for each element.

With `--sharded` the parameters of AdamW are DTensors on a mesh of this one process. Their parts are whole, so the difference is
what a list of DTensors costs the host, and the first step, which derives placements, is shown by itself.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from forge_core.layout import Layout
from forge_core.protocols.model import NamedTensor
from forge_core.registry import Registry
from forge_models.components.decoder import DecoderConfig
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.topology import Topology

GROUP = "forge.optimizers"


def model_of(smoke: bool) -> ParallelModel:
    """A decoder with a gradient for every parameter."""
    sizes = {"dim": 64, "layers": 1, "vocab_size": 64} if smoke else {"dim": 384, "layers": 6, "vocab_size": 8192}
    decoder = DecoderConfig(**sizes, heads=4, max_length=128)  # type: ignore[arg-type]
    layout = Layout()
    model = realize(Blueprint.of(decoder.build), Plan.of([], layout), Topology(layout, torch.device("cpu")), 0, "fp32")
    for parameter in model.part.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return model


def sharded(model: ParallelModel) -> Any:
    """What an optimizer needs of a model whose parameters are sharded over the ranks of a process group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    named = []
    for name, tensor, group in model.trainable():
        parameter = torch.nn.Parameter(distribute_tensor(tensor.detach(), mesh, [Shard(0)]))
        assert tensor.grad is not None
        parameter.grad = distribute_tensor(tensor.grad, mesh, [Shard(0)])
        named.append(NamedTensor(name, parameter, group))
    return SimpleNamespace(trainable=lambda: named, parameter_count=model.parameter_count)


def theirs(name: str, named: Mapping[str, torch.Tensor]) -> Callable[[], object] | None:
    """The step of the other side; None without one."""
    parameters = list(named.values())
    try:
        if name == "adamw":
            return torch.optim.AdamW(parameters, lr=3e-4, fused=True).step
        if name == "adamw8bit":
            from torchao.optim import AdamW8bit

            return AdamW8bit(parameters, lr=3e-4).step
        if name == "lion":
            from lion_pytorch import Lion

            return Lion(parameters, lr=3e-4).step
        if name == "schedule_free_adamw":
            from schedulefree import AdamWScheduleFree

            optimizer = AdamWScheduleFree(parameters, lr=3e-4)
            optimizer.train()
            return optimizer.step
        if name == "muon":
            hidden = {name for name, each in named.items() if each.dim() == 2 and name.startswith("blocks.")}
            sides = (
                torch.optim.Muon([named[name] for name in hidden], lr=0.02),
                torch.optim.AdamW([each for name, each in named.items() if name not in hidden], fused=True),
            )
            return lambda: [side.step() for side in sides]
    except ImportError:
        pass
    return None


def seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sharded", action="store_true", help="time AdamW with sharded parameters (DTensors) instead")
    parser.add_argument("--smoke", action="store_true", help="run everything once, tiny; measure nothing")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    registry, rounds = Registry(), 1 if options.smoke else options.rounds
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {options.threads} threads, {rounds} rounds")
    if options.sharded:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name in ["adamw"] if options.sharded else sorted(registry.names(GROUP)):
        model, other = (sharded(each) if options.sharded else each for each in (model_of(options.smoke), model_of(options.smoke)))
        optimizer, skip = registry.load(GROUP, name)().build(model), torch.zeros(())
        rival = theirs(name, {item.name: item.tensor for item in other.trainable()})
        sides: dict[str, Callable[[], object]] = {"ours": lambda step=optimizer.step, skip=skip: step(skip)}
        if rival is not None:
            sides["theirs"] = rival
        times: dict[str, list[float]] = {side: [] for side in sides}
        first: dict[str, float] = {}
        for turn in range(rounds + 1):
            for side, step in sides.items():
                found = seconds(step)
                if turn:
                    times[side].append(found)
                else:  # makes what is kept
                    first[side] = found
        ours = statistics.median(times["ours"])
        line = f"{name:<20} {model.parameter_count():>10,} parameters  {1000 * ours:8.1f} ms"
        if rival is not None:
            ratios = [mine / their for mine, their in zip(times["ours"], times["theirs"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else (ratios[0],) * 3
            line += f"  {middle:.2f} ({low:.2f} to {high:.2f}) of theirs"
        if options.sharded:
            line += f"; first step {1000 * first['ours']:.1f} ms, theirs {1000 * first['theirs']:.1f} ms"
        print(line)
    if options.sharded:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
