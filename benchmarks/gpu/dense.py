"""The 8.03 B Llama-3 shape on one CUDA GPU: tokens/s, peak memory and MFU over state precision, recomputation, compilation and
float8.

    python benchmarks/gpu/dense.py [--configurations all|NAME,NAME] [--seconds 540] [--out results.json]
    python benchmarks/gpu/dense.py --smoke     # every configuration on a CPU, a tiny shape, two steps: whether all of them run

Sequence 4096, 32,768 tokens an optimizer step, 10 steps after 5 of warm-up, random tokens. Each configuration is a process of
its own, so that one that runs out of memory costs nothing but its line. What does not fit into `--seconds` is named at the end.

Three MFU, since published ones differ: P parameters, E of them in the embedding, L layers, width D, sequence S;
    all        6 P + 12 L D S     every parameter, attention as if it were not causal
    no embed   6 (P - E) + 12 L D S   lookups are no products (the predecessor's figure of 57.8 % counts like this)
    causal     6 (P - E) + 6 L D S    and only the half of attention that is computed
divided by the dense bf16 peak of the GPU, float8 or not. Recomputed work never counts.

Each float8 configuration is compared with the bf16 one of the same name without it; the target is 1.25 times its tokens/s.
`world-of-one` goes through every transform of the plan on a single rank, where tensor, context and shard have nothing to do: it
should cost nothing against the configuration without them.
"""

import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from driver import drive, peak

LENGTH, TOKENS, WARM_UP, STEPS = 4096, 32768, 5, 10
PUBLISHED = 10_471
"""Tokens/s of the predecessor on one H200: full recomputation, all-bf16 state, compiled, micro-batch 4."""


@dataclass(frozen=True)
class Configuration:
    state: str
    recompute: str
    compiled: bool
    micro_batch: int
    budget: float = 1.0
    float8: str = "none"
    every_transform: bool = False

    @property
    def name(self) -> str:
        budget = f"-budget{self.budget}" if self.budget < 1 else ""
        float8 = f"-{self.float8}" if self.float8 != "none" else ""
        everything = "-world-of-one" if self.every_transform else ""
        compiled = "compiled" if self.compiled else "eager"
        return f"{self.state}-{self.recompute}-{compiled}-mb{self.micro_batch}{budget}{float8}{everything}"

    @property
    def baseline(self) -> "Configuration":
        """The same without float8, or with it already, without transforms that have nothing to do."""
        if self.every_transform:
            return replace(self, every_transform=False)
        return replace(self, float8="none")


CONFIGURATIONS = (
    Configuration("bf16", "full", True, 4),  # as published
    Configuration("bf16", "selective", True, 4),
    Configuration("bf16", "selective", True, 2),
    Configuration("bf16", "none", True, 2),
    Configuration("bf16", "none", True, 4, 0.5),
    Configuration("bf16", "none", True, 4, 0.7),
    Configuration("bf16", "full", False, 4),
    Configuration("bf16", "selective", False, 2),
    Configuration("bf16", "none", False, 1),
    Configuration("fp32", "full", True, 1),
    Configuration("bf16", "selective", True, 2, float8="tensorwise"),
    Configuration("bf16", "selective", True, 2, float8="rowwise"),
    Configuration("bf16", "full", True, 4, float8="tensorwise"),
    Configuration("bf16", "full", True, 4, float8="rowwise"),
    Configuration("bf16", "selective", True, 2, float8="tensorwise", every_transform=True),
)

NAMED = {configuration.name: configuration for configuration in CONFIGURATIONS}


def run(configuration: Configuration, smoke: bool = False) -> dict[str, Any]:
    """One configuration in this process; with `smoke` on a CPU, a tiny shape, and figures that mean nothing."""
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
    from forge_parallel.transforms.compile import Compile
    from forge_parallel.transforms.context.transform import ContextParallel
    from forge_parallel.transforms.float8.transform import Float8
    from forge_parallel.transforms.recompute import Recompute
    from forge_parallel.transforms.shard import FullyShard
    from forge_parallel.transforms.tensor.transform import TensorParallel

    torch.set_float32_matmul_precision("high")
    shape = DecoderConfig(dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=14336, vocab_size=128256, max_length=LENGTH)
    length, tokens_a_step, warm_up, steps, device = LENGTH, TOKENS, WARM_UP, STEPS, torch.device("cuda", 0)
    if smoke:
        shape = DecoderConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=64, vocab_size=256, max_length=32)
        length, tokens_a_step, warm_up, steps, device = 32, 256, 1, 1, torch.device("cpu")
    transforms = (
        [FullyShard().build(), TensorParallel().build(), ContextParallel().build()] if configuration.every_transform else []
    )
    if configuration.float8 != "none":
        emulate = "auto" if smoke else False  # a GPU without float8 is refused instead of measured
        transforms.append(Float8(recipe=configuration.float8, emulate=emulate).build())  # type: ignore[arg-type]
    if configuration.recompute != "none":
        transforms.append(Recompute(policy=configuration.recompute).build())  # type: ignore[arg-type]
    if configuration.compiled:
        transforms.append(Compile(budget=configuration.budget).build())
    layout = Layout()
    begun = time.perf_counter()
    plan = Plan.of(transforms, layout)
    model = realize(Blueprint.of(shape.build), plan, Topology(layout, device), 0, "bf16", configuration.state)
    if not smoke:
        torch.cuda.synchronize()
    built = time.perf_counter() - begun
    step, optimizer = Step(model, CrossEntropy().build()), AdamWConfig(lr=3e-4).build(model)
    rows = tokens_a_step // length
    generator = torch.Generator().manual_seed(0)

    def train() -> float:
        tokens = torch.randint(shape.vocab_size, (rows, length + 1), generator=generator)
        cut = [tokens[start : start + configuration.micro_batch] for start in range(0, rows, configuration.micro_batch)]
        start = time.perf_counter()
        result = step([Batch(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in cut])
        clip_grad_norm(model, result.norm, 1.0)
        optimizer.step(result.skip)
        optimizer.zero_grad()
        losses.append(result.numbers()["loss"])  # waits for the device
        return time.perf_counter() - start

    losses: list[float] = []
    first = train()
    for _ in range(warm_up - 1):
        train()
    if not smoke:
        torch.cuda.reset_peak_memory_stats()
    times = [train() for _ in range(steps)]
    rate = tokens_a_step / statistics.median(times)
    parameters = model.parameter_count()
    embedding = shape.vocab_size * shape.dim
    attention = shape.layers * shape.dim * length
    work = {
        "all": 6 * parameters + 12 * attention,
        "no embed": 6 * (parameters - embedding) + 12 * attention,
        "causal": 6 * (parameters - embedding) + 6 * attention,
    }
    gpu = "none" if smoke else torch.cuda.get_device_name()
    most = peak(gpu)
    return {
        "configuration": asdict(configuration),
        "tokens_per_second": rate,
        "spread": [tokens_a_step / max(times), tokens_a_step / min(times)],
        "over_published": rate / PUBLISHED,
        "peak_gib": 0.0 if smoke else torch.cuda.max_memory_allocated() / 2**30,
        "mfu": {name: rate * flops / most for name, flops in work.items()} if most else None,
        "parameters": parameters,
        "build_seconds": built,
        "first_step_seconds": first,
        "losses": [losses[0], losses[-1]],
        "gpu": gpu,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()},
    }


def line(name: str, results: Mapping[str, dict[str, Any]]) -> str:
    """One configuration; where the one that it is to be compared with has run, the ratio of their tokens/s."""
    result, other = results[name], NAMED[name].baseline.name
    mfu = " ".join(f"{value:5.1%}" for value in result["mfu"].values()) if result["mfu"] else "GPU unknown"
    speed = f"{result['tokens_per_second']:8,.0f} tokens/s ({result['over_published']:.2f} x published)"
    against = ""
    if other != name and "tokens_per_second" in results.get(other, {}):
        against = f"  {result['tokens_per_second'] / results[other]['tokens_per_second']:.2f} x without"
    return f"{name:56} {speed}  {result['peak_gib']:6.1f} GiB  MFU {mfu}{against}"


if __name__ == "__main__":
    drive(__doc__, __file__, NAMED, run, line, lambda result: f"loss {result['losses'][0]:.3f}")
