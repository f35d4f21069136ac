"""What the hardware allows a preset, on paper: the time of a token by what bounds each part, and tokens/s of their sum.

    python benchmarks/gpu/roofline.py [PRESET...]      # needs no GPU; seconds

Nothing here was measured on a GPU by us. Work is counted: products and attention in FLOPs (`forge_models.flops`, causal), passes
over memory in bytes, exchanges in bytes on the wire. Rates are those that others have measured: 80.3 % of the bf16 peak and
73.4 % of the float8 peak in the best matrix products, attention as FlashAttention-3 reports for rows of 4k to 8k, 85 % of the
memory's bandwidth, 80 % of a link's. Products of experts are as fast as their rows allow: groups of a thousand rows reach about
two thirds of what large ones do.

Parts are added, which is the pessimistic end: kernels do not overlap. Exchanges are shown apart, for they can be hidden behind
products; the range of tokens/s is with all and with none of them hidden.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from forge_core.registry import Registry
from forge_models.flops import count_flops
from forge_models.shape import DecoderShape
from forge_train.recipe.load import load_recipe
from forge_train.recipe.schema import Job


@dataclass(frozen=True)
class Gpu:
    """Rates that are reached: operations and bytes a second."""

    bf16: float = 0.803 * 989e12
    float8: float = 0.734 * 1979e12
    attention: float = 450e12  # forward and backward together, heads of 128, causal
    memory: float = 0.85 * 3.35e12
    link: float = 0.8 * 450e9  # of one direction, to the other GPUs of a node


GPUS = {"h100": Gpu(), "h200": Gpu(memory=0.85 * 4.8e12)}
PRESETS = {"8b-h100": (8, 6_667), "8b-h200": (1, 13_000), "8b-h200-fp8": (1, 13_000), "30b-a3b-8xh100": (8, 12_500)}
"""World, and the tokens/s of a GPU to be beaten: what torchtitan publishes (compiled, bf16); a fourth more than the 10,471 that
are published for one H200; a little more than the 12,040 that NeMo AutoModel publishes."""

EXPERTS = 2 / 3
"""Of the rate of a large product, what a product in groups of about a thousand rows reaches."""


@dataclass(frozen=True)
class Part:
    """A part of the time of a token on one GPU, in seconds, and what bounds it."""

    name: str
    seconds: float
    bound: str
    hidden: bool = False


def parts(job: Job, gpu: Gpu, world: int) -> Iterator[Part]:
    """The time of a token of a step, part by part."""
    shape = job.model.shape
    counts, length, tokens = count_flops(shape), job.data.sequence_length, job.train.micro_batch * job.data.sequence_length
    blocks, head = counts.matrix - shape.vocab_size * shape.dim, shape.vocab_size * shape.dim
    experts = shape.layers * shape.moe.top_k * 3 * shape.dim * shape.moe.ffn_dim if shape.moe else 0
    policy = getattr(job.transforms.get("recompute"), "policy", "none")
    rate, kind = (gpu.float8, "float8") if "float8" in job.transforms else (gpu.bf16, "bf16")
    yield Part(f"products of blocks ({kind})", 6 * (blocks - experts) / rate, "FLOPs")
    if experts:
        yield Part("products of experts", 6 * experts / (EXPERTS * rate), "FLOPs, short groups")
    yield Part("products of the head", 6 * head / gpu.bf16, "FLOPs")
    attention = counts.training(length, causal=True) - 6 * counts.matrix
    yield Part("attention", attention / gpu.attention, "FLOPs")
    if policy == "full":
        again = 2 * (blocks - experts) / rate + 2 * experts / (EXPERTS * rate) + attention / 3 / gpu.attention
        yield Part("recomputation of blocks", again, "FLOPs")
    yield Part("norms, rotation, activation, residuals", _passes(shape, policy) / gpu.memory, "memory")
    if "float8" in job.transforms:
        yield Part("casts to float8", _casts(shape) / gpu.memory, "memory")
    yield Part(
        "logits and their derivative", 10 * shape.vocab_size / gpu.memory, "memory, fused; eager passes take 44 bytes a logit"
    )
    sparse = counts.idle + experts
    step = {"bf16": 14, "fp32": 28}[job.precision.state] * counts.parameters / (job.train.global_batch * length)
    yield Part("optimizer", step / gpu.memory, "memory, once a step: weights, gradients, moments are read, three written")
    held = counts.parameters - sparse + sparse / job.parallel.ep
    yield Part("sum of gradients", 3 * 2 * held / gpu.memory / tokens, "memory, once a micro-batch")
    if shape.moe:
        rows = shape.moe.top_k * shape.dim * 2 * shape.layers
        yield Part("dispatch and combine", 3 * 4 * rows / gpu.memory, "memory")
        travels = (6 if policy == "full" else 4) * rows * (1 - 1 / job.parallel.ep)
        yield Part("exchange of tokens", travels / gpu.link, "links", hidden=True)
    if world > 1:
        travels = (2 + 2 + 4) * (counts.parameters - sparse) * (1 - 1 / world)  # gathered twice in bf16, summed in fp32
        yield Part("exchange of weights and gradients", travels / gpu.link / tokens, "links", hidden=True)


def _passes(shape: DecoderShape, policy: str) -> float:
    """Bytes a token: fused kernels read and write each tensor once, forward, and about twice as much backward."""
    width = shape.moe.top_k * shape.moe.ffn_dim if shape.moe else shape.ffn_dim
    heads = (shape.heads + shape.kv_heads) * shape.head_dim
    forward = 2 * (8 * shape.dim + 2 * heads + 3 * width) * shape.layers
    return forward * (4 if policy == "full" else 3.3 if policy == "selective" else 3)


def _casts(shape: DecoderShape) -> float:
    """Bytes a token: each input of a product and each gradient of an output is read in bf16 and written in one byte, twice
    (its transpose is needed too), after a pass that finds its largest element."""
    inputs = 2 * shape.dim + shape.heads * shape.head_dim + shape.ffn_dim
    outputs = (shape.heads + 2 * shape.kv_heads) * shape.head_dim + 2 * shape.dim + 2 * shape.ffn_dim
    return (2 + 2 + 1 + 1) * (inputs + outputs) * shape.layers


def main() -> None:
    """Prints a table for each preset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", metavar="PRESET", help=f"of {', '.join(PRESETS)}; all of them when none is given")
    registry = Registry()
    for name in parser.parse_args().presets or PRESETS:
        world, wanted = PRESETS[name]
        loaded = load_recipe(name, world=world, registry=registry)
        gpu = GPUS["h200" if "h200" in name else "h100"]
        found = list(parts(loaded.job, gpu, world))
        total, shown = sum(part.seconds for part in found), sum(part.seconds for part in found if not part.hidden)
        print(f"\n{name} on {world} GPU{'s' if world > 1 else ''}")
        for part in sorted(found, key=lambda part: -part.seconds):
            print(f"  {part.name:42}{part.seconds * 1e6:8.2f} us  {part.seconds / shown:6.1%}  {part.bound}")
        verdict = "allowed" if wanted <= 1 / shown else "not allowed by these rates"
        print(f"  tokens/s of a GPU: {1 / total:,.0f} to {1 / shown:,.0f}; wanted: {wanted:,}, {verdict}")


if __name__ == "__main__":
    main()
