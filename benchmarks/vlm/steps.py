"""Processor time of a training step of each fusion, over that of a text decoder of the same shape on as many tokens; in turns.

    python benchmarks/vlm/steps.py [--rounds 9] [--threads 1] [--rows 4] [--length 256] [--smoke]

Forward and backward in fp32 in one process. Rows hold two images each; the text side has rows of as many tokens. `encoder`
is encoder and adapter alone, forward and backward, and is counted to the text side, so the ratio is what the fusion itself
costs. `no image` has rows without one: what belongs to images then runs on next to nothing, so that ranks exchange the same; its
time, floating-point operations of products and number of operators stand over those of the text decoder. The text side of
MoMa has experts of the same shape.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_testing.modules import on_meta
from forge_vlm import VLM, CrossAttention, JointDecoder, MixtureOfTransformers, MLPConfig, MoMa, ViT

IMAGES = 2
"""In each row."""


def component_of(name: str, smoke: bool) -> VLM:
    """A fusion around one shape. Experts are as wide as the feed-forward part, and a token takes one: equal work per token."""
    size: dict[str, Any] = {"dim": 32, "layers": 2} if smoke else {"dim": 256, "layers": 6}
    sizes = {**size, "heads": 4, "vocab_size": 2048, "max_length": 512, "ffn_dim": 3 * size["dim"]}
    encoder = ViT(size=32, patch=8, dim=size["dim"], layers=2, heads=4)
    fusion = {"joint": JointDecoder(), "cross": CrossAttention(every=2), "mot": MixtureOfTransformers(), "moma": MoMa()}[name]
    moe = MoEConfig(experts=4, top_k=1) if name == "moma" else None
    return VLM(**sizes, encoder=encoder, adapter=MLPConfig(), fusion=fusion, moe=moe)


def filled(component: Any) -> Any:
    """A module with random weights."""
    module = on_meta(component.build).to_empty(device="cpu").train()
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor, 0, 0.02)
        else:
            tensor.zero_()
    return module


def rows(model: Any, count: int, length: int, images: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Tokens with the placeholders of some images, and the images."""
    tokens = torch.randint(1, 2000, (count, length))
    context = model.context
    for image in range(images):
        start = 4 + image * (context.per_image + 8)
        tokens[:, start : start + context.per_image] = context.image_token
    if not images:
        return tokens, {}
    numbers = torch.arange(count * images).reshape(count, images)
    return tokens, {"images": torch.randn(count * images, *model.image_shape), "image_rows": numbers}


def step(model: Any, tokens: torch.Tensor, given: dict[str, torch.Tensor]) -> None:
    """Forward and backward."""
    logits = model(tokens, **given)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    model.zero_grad(set_to_none=True)


def seen(model: Any, images: torch.Tensor) -> None:
    """Encoder and adapter, forward and backward."""
    model.adapter(model.encoder(images)).sum().backward()
    model.zero_grad(set_to_none=True)


def in_turns(sides: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of the processor of each side in every round, one after the other: a machine that does other work counts less."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            begin = time.process_time()
            side()
            if number:  # the first round warms up
                found[name].append(time.process_time() - begin)
    return found


class Operators(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def counted(side: Callable[[], None]) -> tuple[int, int]:
    """Floating-point operations of products, and operators."""
    with FlopCounterMode(display=False) as products:
        side()
    with Operators() as operators:
        side()
    return products.get_total_flops(), operators.count


def spread(ratios: list[float]) -> str:
    """Median, smallest and largest."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens of a row, at most 512")
    parser.add_argument("--smoke", action="store_true", help="small sizes, one round")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    rounds = 1 if asked.smoke else asked.rounds
    count, length = (2, 64) if asked.smoke else (asked.rows, asked.length)
    print(f"{platform.machine()}, torch {torch.__version__}, {asked.threads} threads, {rounds} rounds, {count} x {length} tokens")
    for name in ("joint", "cross", "mot", "moma"):
        component = component_of(name, asked.smoke)
        keys = {item: getattr(component, item) for item in ("dim", "layers", "heads", "vocab_size", "max_length", "ffn_dim")}
        model, text = filled(component), filled(DecoderConfig(**keys, moe=component.moe))
        tokens, given = rows(model, count, length, IMAGES)
        plain = torch.randint(1, 2000, (count, length))
        sides: dict[str, Callable[[], None]] = {
            "fusion": lambda model=model, tokens=tokens, given=given: step(model, tokens, given),
            "text": lambda text=text, plain=plain: step(text, plain, {}),
            "encoder": lambda model=model, given=given: seen(model, given["images"]),
            "no image": lambda model=model, plain=plain: step(model, plain, {}),
        }
        found = in_turns(sides, rounds)
        median = {side: statistics.median(times) for side, times in found.items()}
        pairs = list(zip(*found.values(), strict=True))
        whole = [(text_ + encoder) / fusion for fusion, text_, encoder, _ in pairs]
        without = [no_image / text_ for _, text_, _, no_image in pairs]
        print(
            f"{name:6} fusion {median['fusion'] * 1e3:8.1f} ms  text {median['text'] * 1e3:8.1f}  encoder "
            f"{median['encoder'] * 1e3:7.1f}  (text + encoder) / fusion {spread(whole)}"
        )
        (products, operators), (of_text, others) = counted(sides["no image"]), counted(sides["text"])
        print(
            f"{'':6} no image {median['no image'] * 1e3:6.1f} ms  no image / text {spread(without)}  products "
            f"{products / of_text:.4f}  operators {operators} / {others}"
        )


if __name__ == "__main__":
    main()
