"""Experts on one CUDA GPU: TFLOP/s of a layer, grouped, as a loop, and of a dense one of equal active width; and training of two
models of 2.7 B parameters end to end over kernel, recomputation and compilation.

    python benchmarks/gpu/moe.py [--configurations all|NAME,NAME] [--seconds 540] [--out results.json]
    python benchmarks/gpu/moe.py --smoke     # every configuration on a CPU, tiny shapes, two steps: whether all of them run

Each configuration is a process of its own. What does not fit into `--seconds` is named at the end.

A layer is forward and backward of router, dispatch and experts in bf16 on one GPU, with tokens that a fresh router spreads almost
evenly. Its operations are those of the chosen experts alone, 6 * tokens * top_k * 3 * dim * ffn, so time spent on routing and on
moving tokens lowers the figure. The dense layer has a hidden width of top_k * ffn and the same operations. All sides take turns.

The models differ in their experts only: `fine` has 64 of width 512, of which a token uses 6, and 2 that all tokens use, `coarse`
8 of width 4096, of which a token uses 2. 4096 tokens a row, 32,768 an optimizer step, 10 steps after 5 of warm-up, random tokens.
MFU by the three definitions of `dense.py`, P being the parameters that one token uses:
    all        6 P + 12 L D S     every such parameter, attention as if it were not causal
    no embed   6 (P - E) + 12 L D S   lookups are no products
    causal     6 (P - E) + 6 L D S    and only the half of attention that is computed
divided by the dense bf16 peak of the GPU. Recomputed work never counts.
"""

import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from driver import drive, peak

LENGTH, TOKENS, WARM_UP, STEPS = 4096, 32768, 5, 10
PUBLISHED = """published for other shapes and more GPUs:
  MFU: predecessor 8.4 % (17.7 B, 16 experts, 8 H200, 4,608 tokens/s a GPU), 0.5 % (64 experts, EP 4, 276), 1.5 % (4 B, 32 H200);
       torchtitan 13.5 %, tuned 21 % (DeepSeek 16 B, B200); nanochat 35 %, its dense model 46 %
  TFLOP/s a GPU: Megatron-Bridge 121 (Qwen3-30B, 16 H100, 5,275 tokens/s), 153 (GPT-OSS 120 B), 233 (Qwen3-235B)"""


@dataclass(frozen=True)
class LayerOf:
    """A layer by the model whose shape it has."""

    like: str
    dim: int
    ffn: int
    experts: int
    top_k: int
    tokens: int = TOKENS
    compiled: bool = False

    @property
    def name(self) -> str:
        shape = f"{self.experts}-top{self.top_k}-ffn{self.ffn}"
        return f"layer-{self.like}-{shape}{'-compiled' if self.compiled else ''}"


@dataclass(frozen=True)
class Training:
    shape: str
    kernel: str
    recompute: str
    compiled: bool
    micro_batch: int
    state: str = "fp32"

    @property
    def name(self) -> str:
        compiled = "compiled" if self.compiled else "eager"
        return f"{self.shape}-{self.kernel}-{self.state}-{self.recompute}-{compiled}-mb{self.micro_batch}"


CONFIGURATIONS = (
    Training("fine", "grouped", "selective", True, 4),
    LayerOf("mixtral", 4096, 14336, 8, 2, 16384),
    LayerOf("qwen3", 2048, 768, 128, 8),
    LayerOf("deepseek-lite", 2048, 1408, 64, 6),
    LayerOf("deepseek-v3", 7168, 2048, 256, 8, 16384),
    # one active width, from coarse to fine
    LayerOf("granularity1", 2048, 5632, 8, 2),
    LayerOf("granularity4", 2048, 1408, 32, 8),
    LayerOf("granularity8", 2048, 704, 64, 16),
    LayerOf("granularity4", 2048, 1408, 128, 8),
    LayerOf("qwen3", 2048, 768, 128, 8, compiled=True),
    Training("fine", "grouped", "none", True, 2),
    Training("fine", "grouped", "none", True, 4),
    Training("fine", "grouped", "full", True, 8),
    Training("fine", "grouped", "none", False, 2),
    Training("fine", "grouped", "selective", False, 4),
    Training("fine", "grouped", "full", False, 8),
    Training("fine", "loop", "none", False, 2),
    Training("fine", "grouped", "selective", True, 4, "bf16"),
    Training("coarse", "grouped", "selective", True, 4),
    Training("coarse", "grouped", "none", True, 2),
    Training("coarse", "loop", "none", False, 2),
)

NAMED = {configuration.name: configuration for configuration in CONFIGURATIONS}


def run(configuration: LayerOf | Training, smoke: bool = False) -> dict[str, Any]:
    """One configuration in this process; with `smoke` on a CPU, a tiny shape, and figures that mean nothing."""
    import torch

    torch.set_float32_matmul_precision("high")
    made = layer(configuration, smoke) if isinstance(configuration, LayerOf) else training(configuration, smoke)
    gpu = "none" if smoke else torch.cuda.get_device_name()
    most = peak(gpu)
    mfu = {name: flops / most for name, flops in made["flops_per_second"].items()} if most else None
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    memory = 0.0 if smoke else torch.cuda.max_memory_allocated() / 2**30
    about = {"configuration": asdict(configuration), "gpu": gpu, "versions": versions}
    return about | made | {"mfu": mfu, "peak_gib": memory}


def layer(configuration: LayerOf, smoke: bool) -> dict[str, Any]:
    """Milliseconds and operations a second of each side."""
    import torch

    from forge_models.blocks.moe.layer import ExpertLayer
    from forge_models.components.decoder import DecoderConfig
    from forge_models.components.experts import MoEConfig
    from forge_models.components.layers import SwiGLU

    at, device, rounds = configuration, torch.device("cuda", 0), 20
    dim, ffn, tokens = at.dim, at.ffn, at.tokens
    if smoke:
        dim, ffn, tokens, device, rounds = 32, 16, 64, torch.device("cpu"), 2

    def context(width: int) -> Any:
        return DecoderConfig(dim=dim, layers=1, heads=1, ffn_dim=width, vocab_size=2).shape.context(0)

    def drawn(module: Any) -> Any:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, 0, 0.02)
        return module

    with device:
        torch.manual_seed(0)
        dense = drawn(SwiGLU().build(context(at.top_k * ffn)).bfloat16())
        experts = drawn(ExpertLayer(MoEConfig(experts=at.experts, top_k=at.top_k).shape(ffn), SwiGLU(), context(ffn)).bfloat16())
        x = torch.randn(1, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
        slope = torch.randn_like(x)
    grouped = torch.compile(experts, fullgraph=True) if at.compiled else experts

    def once(side: str) -> float:
        experts.experts.kernel = "loop" if side == "loop" else "grouped"
        for leaf in (x, *experts.parameters(), *dense.parameters()):
            leaf.grad = None
        if not smoke:
            torch.cuda.synchronize()
        start = time.perf_counter()
        forward = {"grouped": grouped, "loop": experts, "dense": dense}[side]
        y = forward(x)
        (y if side == "dense" else y[0]).backward(slope)
        if not smoke:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    sides = ("grouped", "dense") if at.compiled else ("grouped", "loop", "dense")
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(-3, rounds):  # three to warm up
        for side in sides if number % 2 else sides[::-1]:
            spent = once(side)
            if number >= 0:
                seconds[side].append(spent)
    work = 6.0 * tokens * at.top_k * 3 * dim * ffn
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    return {
        "milliseconds": {side: 1e3 * value for side, value in medians.items()},
        "flops_per_second": {side: work / value for side, value in medians.items()},
        "spread": {side: [1e3 * min(times), 1e3 * max(times)] for side, times in seconds.items()},
    }


def shape_of(name: str, kernel: Any, smoke: bool = False) -> Any:
    """The decoder `fine` or `coarse`."""
    from forge_models.components.decoder import DecoderConfig
    from forge_models.components.experts import MoEConfig, SigmoidTopKConfig

    dim, layers, length, vocab, unit = (64, 3, 32, 256, 16) if smoke else (1536, 16, LENGTH, 50304, 512)
    moe = MoEConfig(experts=64, top_k=6, shared=2, ffn_dim=unit, first_dense=1, kernel=kernel, router=SigmoidTopKConfig())
    if name == "coarse":
        moe = MoEConfig(experts=8, top_k=2, ffn_dim=8 * unit, kernel=kernel)
    head = 128 if not smoke else 16
    kept = {"heads": dim // head, "kv_heads": dim // head, "ffn_dim": 8 * unit, "vocab_size": vocab, "max_length": length}
    return DecoderConfig(dim=dim, layers=layers, moe=moe, **kept)


def work(shape: Any, length: int) -> dict[str, float]:
    """Operations a token, by definition of MFU."""
    from forge_models.flops import count_flops

    counts = count_flops(shape.shape)
    attention, products = shape.layers * shape.dim * length, counts.active - counts.embedding
    return {
        "all": 6.0 * counts.active + 12 * attention,
        "no embed": 6.0 * products + 12 * attention,
        "causal": 6.0 * products + 6 * attention,
    }


def training(configuration: Training, smoke: bool) -> dict[str, Any]:
    """Tokens a second of whole optimizer steps."""
    import torch

    from forge_core.batch import Batch
    from forge_core.layout import Layout
    from forge_models.blocks.moe.layer import ExpertLayer
    from forge_models.flops import count_flops
    from forge_models.objectives import CrossEntropy
    from forge_parallel.model.plan import Plan
    from forge_parallel.model.realize import Blueprint, realize
    from forge_parallel.optim.optimizers import AdamWConfig
    from forge_parallel.placement.topology import Topology
    from forge_parallel.step.reduce import clip_grad_norm
    from forge_parallel.step.step import Step
    from forge_parallel.transforms.compile import Compile
    from forge_parallel.transforms.recompute import Recompute

    shape = shape_of(configuration.shape, configuration.kernel, smoke)
    length, tokens_a_step, warm_up, steps, device = LENGTH, TOKENS, WARM_UP, STEPS, torch.device("cuda", 0)
    if smoke:
        length, tokens_a_step, warm_up, steps, device = 32, 256, 1, 1, torch.device("cpu")
    transforms = []
    if configuration.recompute != "none":
        transforms.append(Recompute(policy=configuration.recompute).build())  # type: ignore[arg-type]
    if configuration.compiled:
        transforms.append(Compile().build())
    layout = Layout()
    begun = time.perf_counter()
    plan = Plan.of(transforms, layout)
    model = realize(Blueprint.of(shape.build), plan, Topology(layout, device), 0, "bf16", configuration.state)
    built = time.perf_counter() - begun
    step, optimizer = Step(model, CrossEntropy().build()), AdamWConfig(lr=3e-4).build(model)
    rows, losses = tokens_a_step // length, []
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

    first = train()
    for _ in range(warm_up - 1):
        train()
    if not smoke:
        torch.cuda.reset_peak_memory_stats()
    times = [train() for _ in range(steps)]
    rate = tokens_a_step / statistics.median(times)
    loads = [part.totals.load for part in model.part.modules() if isinstance(part, ExpertLayer) and part.totals is not None]
    counts = count_flops(shape.shape)
    return {
        "tokens_per_second": rate,
        "spread": [tokens_a_step / max(times), tokens_a_step / min(times)],
        "flops_per_second": {name: rate * flops for name, flops in work(shape, length).items()},
        "parameters": counts.parameters,
        "active": counts.active,
        "busiest_over_mean_load": max(float(load.max() / load.mean()) for load in loads),
        "build_seconds": built,
        "first_step_seconds": first,
        "losses": [losses[0], losses[-1]],
    }


def line(name: str, results: Mapping[str, dict[str, Any]]) -> str:
    """One configuration."""
    result = results[name]
    if "milliseconds" in result:
        figures = [
            f"{side} {result['milliseconds'][side]:7.2f} ms {rate / 1e12:4.0f} TFLOP/s"
            for side, rate in result["flops_per_second"].items()
        ]
        over = result["milliseconds"]["dense"] / result["milliseconds"]["grouped"]
        return f"{name:56} {', '.join(figures)}; {over:.2f} x dense  {result['peak_gib']:6.1f} GiB"
    mfu = " ".join(f"{value:5.1%}" for value in result["mfu"].values()) if result["mfu"] else "GPU unknown"
    rate = result["flops_per_second"]["all"] / 1e12
    speed = f"{result['tokens_per_second']:8,.0f} tokens/s {rate:4.0f} TFLOP/s"
    load = f"busiest expert {result['busiest_over_mean_load']:.2f} x mean"
    return f"{name:56} {speed}  {result['peak_gib']:6.1f} GiB  MFU {mfu}  {load}"


def brief(result: dict[str, Any]) -> str:
    """What `--smoke` says."""
    return f"loss {result['losses'][0]:.3f}" if "losses" in result else "ran"


if __name__ == "__main__":
    drive(__doc__, __file__, NAMED, run, line, brief, PUBLISHED)
