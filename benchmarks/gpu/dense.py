"""The 8.03 B Llama-3 shape on one CUDA GPU: tokens/s, peak memory and MFU over state precision, recomputation and compilation.

    python benchmarks/gpu/dense.py [--configurations all|NAME,NAME] [--seconds 540] [--out results.json]

Sequence 4096, 32,768 tokens an optimizer step, 10 steps after 5 of warm-up, random tokens. Each configuration is a process of
its own, so that one that runs out of memory costs nothing but its line. What does not fit into `--seconds` is named at the end.

Three MFU, since published ones differ: P parameters, E of them in the embedding, L layers, width D, sequence S;
    all        6 P + 12 L D S     every parameter, attention as if it were not causal
    no embed   6 (P - E) + 12 L D S   lookups are no products (the predecessor's figure of 57.8 % counts like this)
    causal     6 (P - E) + 6 L D S    and only the half of attention that is computed
divided by the dense bf16 peak of the GPU. Recomputed work never counts.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import which
from typing import Any

LENGTH, TOKENS, WARM_UP, STEPS = 4096, 32768, 5, 10
PUBLISHED = 10_471
"""Tokens/s of the predecessor on one H200: full recomputation, all-bf16 state, compiled, micro-batch 4."""
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 operations per second of the SXM parts; another GPU gets no MFU rather than a guess."""


@dataclass(frozen=True)
class Configuration:
    state: str
    recompute: str
    compiled: bool
    micro_batch: int
    budget: float = 1.0

    @property
    def name(self) -> str:
        budget = f"-budget{self.budget}" if self.budget < 1 else ""
        return f"{self.state}-{self.recompute}-{'compiled' if self.compiled else 'eager'}-mb{self.micro_batch}{budget}"


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
)


def run(configuration: Configuration) -> dict[str, Any]:
    """One configuration in this process."""
    import torch

    from forge_core.batch import Batch
    from forge_core.layout import Layout
    from forge_models.components.decoder import Decoder
    from forge_models.components.objectives import CrossEntropy
    from forge_parallel.clipping import clip
    from forge_parallel.components.optimizers import AdamW
    from forge_parallel.components.transforms import Compile, Recompute
    from forge_parallel.plan import Plan
    from forge_parallel.realization import Blueprint, realize
    from forge_parallel.step import Step
    from forge_parallel.topology import Topology

    torch.set_float32_matmul_precision("high")
    shape = Decoder(dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=14336, vocab_size=128256, max_length=LENGTH)
    transforms = []
    if configuration.recompute != "none":
        transforms.append(Recompute(policy=configuration.recompute).build())  # type: ignore[arg-type]
    if configuration.compiled:
        transforms.append(Compile(budget=configuration.budget).build())
    layout, device = Layout(), torch.device("cuda", 0)
    begun = time.perf_counter()
    plan = Plan.of(transforms, layout)
    model = realize(Blueprint.of(shape.build), plan, Topology(layout, device), 0, "bf16", configuration.state)
    torch.cuda.synchronize()
    built = time.perf_counter() - begun
    step, optimizer = Step(model, CrossEntropy().build()), AdamW(lr=3e-4).build(model)
    rows = TOKENS // LENGTH
    generator = torch.Generator().manual_seed(0)

    def train() -> float:
        tokens = torch.randint(shape.vocab_size, (rows, LENGTH + 1), generator=generator)
        cut = [tokens[start : start + configuration.micro_batch] for start in range(0, rows, configuration.micro_batch)]
        start = time.perf_counter()
        result = step([Batch(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in cut])
        clip(model, result.norm, 1.0)
        optimizer.step(result.skip)
        optimizer.zero_grad()
        losses.append(result.numbers()["loss"])  # waits for the device
        return time.perf_counter() - start

    losses: list[float] = []
    first = train()
    for _ in range(WARM_UP - 1):
        train()
    torch.cuda.reset_peak_memory_stats()
    times = [train() for _ in range(STEPS)]
    rate = TOKENS / statistics.median(times)
    parameters = model.parameter_count()
    embedding = shape.vocab_size * shape.dim
    attention = shape.layers * shape.dim * LENGTH
    work = {
        "all": 6 * parameters + 12 * attention,
        "no embed": 6 * (parameters - embedding) + 12 * attention,
        "causal": 6 * (parameters - embedding) + 6 * attention,
    }
    gpu = torch.cuda.get_device_name()
    peak = next((value for name, value in PEAK.items() if name in gpu), None)
    return {
        "configuration": asdict(configuration),
        "tokens_per_second": rate,
        "spread": [TOKENS / max(times), TOKENS / min(times)],
        "over_published": rate / PUBLISHED,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "mfu": {name: rate * flops / peak for name, flops in work.items()} if peak else None,
        "parameters": parameters,
        "build_seconds": built,
        "first_step_seconds": first,
        "losses": [losses[0], losses[-1]],
        "gpu": gpu,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()},
    }


def line(name: str, result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{name:32} {result['error']}"
    mfu = " ".join(f"{value:5.1%}" for value in result["mfu"].values()) if result["mfu"] else "GPU unknown"
    speed = f"{result['tokens_per_second']:8,.0f} tokens/s ({result['over_published']:.2f} x published)"
    return f"{name:32} {speed}  {result['peak_gib']:6.1f} GiB  MFU {mfu}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", default="all")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(run(Configuration(**json.loads(arguments.alone)))))
        return
    if which("nvidia-smi") is None or subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode:
        parser.exit(2, "this benchmark needs a CUDA GPU, and nvidia-smi shows none\n")
    named = {configuration.name: configuration for configuration in CONFIGURATIONS}
    chosen = list(named) if arguments.configurations == "all" else arguments.configurations.split(",")
    deadline, results, skipped = time.monotonic() + arguments.seconds, {}, []
    print(f"command: {' '.join(sys.argv)}", flush=True)
    for name in chosen:
        left = deadline - time.monotonic()
        if left < 45:
            skipped.append(name)
            continue
        command = [sys.executable, __file__, "--alone", json.dumps(asdict(named[name]))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left)
            error = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            results[name] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": error[0][:300]}
        except subprocess.TimeoutExpired:
            results[name] = {"error": "out of time"}
        print(line(name, results[name]), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps({"command": sys.argv, "results": results}, indent=1))
    if skipped:
        print(f"not run for want of time: {','.join(skipped)}")


if __name__ == "__main__":
    main()
