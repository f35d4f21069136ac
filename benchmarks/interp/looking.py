"""What looking inside costs: taps that are off, one layer to disk, CKA in one pass, encoding of a recording.

    python benchmarks/interp/looking.py [--only taps,capture,cka,encode] [--rounds 15] [--threads 1]
    python benchmarks/interp/looking.py --smoke      # tiny sizes, two rounds: whether everything runs and both sides agree

- `taps`: a forward and backward of a decoder over the same one whose blocks pass values through nothing at all.
- `capture`: `record` of one layer's stream, to the disk and in its cache, over forwards of the same batches alone. Without the
  SHA-256 of the weights, which it makes once.
- `cka`: sums of one pass over the products X X' and Y Y' of all rows, equal to 1e-9; with the memory of each, in a process each.
- `encode`: ridge with a penalty for each voxel by leaving out each row, of three layers, over scikit-learn's `RidgeCV` with
  `alpha_per_target`, equal weights.

Sides take turns; a ratio is taken round by round, and its median and quartiles are given. With `--threads 1` a figure is the
thread's CPU time, which other work on the machine disturbs less; `capture` waits for the disk, and is wall time.
"""

import argparse
import importlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_interp import Moments, unbiased_cka
from forge_interp import store as recording
from forge_interp.neuro import ridge
from forge_models.components.decoder import DecoderConfig
from forge_models.generation import evaluating

TAPPED = (
    *("forge_models.blocks.attention", "forge_models.blocks.block", "forge_models.blocks.layers", "forge_models.decoder"),
    *("forge_models.blocks.block", "forge_models.blocks.moe.layer", "forge_models.blocks.moe.routers"),
)


def decoder(smoke: bool, **changes: Any) -> Any:
    sizes = {"dim": 64, "layers": 2} if smoke else {"dim": 256, "layers": 6}
    model = DecoderConfig(**{**sizes, "heads": 4, "vocab_size": 4096, "max_length": 512, **changes}).build()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


@contextmanager
def without_taps() -> Iterator[None]:
    """Blocks whose values pass through nothing."""
    plain = {"tap": lambda _, x: x, "scope": lambda *_: nullcontext(), "inside": lambda _, module, *given: module(*given)}
    found = [(module, name) for module in map(importlib.import_module, TAPPED) for name in plain if hasattr(module, name)]
    before = [getattr(module, name) for module, name in found]
    for module, name in found:
        setattr(module, name, plain[name])
    try:
        yield
    finally:
        for (module, name), value in zip(found, before, strict=True):
            setattr(module, name, value)


def taps(smoke: bool, rounds: int, clock: Callable[[], float]) -> str:
    model, tokens = decoder(smoke), torch.randint(0, 4096, (2, 32 if smoke else 256))

    def step() -> Tensor:
        model.zero_grad()
        loss = model(tokens).float().logsumexp(-1).mean()
        loss.backward()
        return loss.detach()

    def bare() -> Tensor:
        with without_taps():
            return step()

    assert torch.equal(step(), bare())
    return described("taps off over no taps, a step", ratios(step, bare, rounds, clock))


def capture(smoke: bool, rounds: int) -> list[str]:
    model = decoder(smoke, **({} if smoke else {"dim": 512, "layers": 8}))
    inputs = list(torch.randint(0, 4096, (8, 32) if smoke else (64, 256)))
    folder, layer = Path(tempfile.mkdtemp(dir=".")), f"blocks.{len(model.blocks) // 2}.residual"
    digest, recording.fingerprint = recording.fingerprint(model), lambda _: digest

    def stored() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        recording.record(model, inputs, folder, layer)

    def plain() -> None:
        with torch.no_grad(), evaluating(model):
            for at in range(0, len(inputs), 8):
                model(torch.stack(inputs[at : at + 8]))

    try:
        plain()
        found = ratios(stored, plain, rounds, time.perf_counter)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [described("one layer to disk over forwards", found)]


def rows_of(smoke: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(400 if smoke else 8192, 32 if smoke else 256, generator=generator) for _ in range(2))
    return x, y + x


def one_pass(x: Tensor, y: Tensor) -> Tensor:
    sums = Moments.of(x[:1024], y[:1024])
    for at in range(1024, len(x), 1024):
        sums = sums + Moments.of(x[at : at + 1024], y[at : at + 1024])
    return unbiased_cka(sums)


def naive(x: Tensor, y: Tensor) -> Tensor:
    """Of the products of all rows with all rows (Nguyen et al., 2021)."""
    n = len(x)
    k, l_ = ((one.double() @ one.double().T).fill_diagonal_(0) for one in (x, y))

    def hsic(a: Tensor, b: Tensor) -> Tensor:
        rest = a.sum() * b.sum() / ((n - 1) * (n - 2)) - 2 * (a.sum(0) @ b.sum(0)) / (n - 2)
        return ((a * b).sum() + rest) / (n * (n - 3))

    return hsic(k, l_) / (hsic(k, k) * hsic(l_, l_)).sqrt()


def cka(smoke: bool, rounds: int, clock: Callable[[], float]) -> list[str]:
    x, y = rows_of(smoke)
    torch.testing.assert_close(one_pass(x, y), naive(x, y), rtol=1e-9, atol=1e-12)
    title = f"CKA of {len(x):,} x {x.shape[1]}, one pass over naive: time"
    found = described(title, ratios(lambda: one_pass(x, y), lambda: naive(x, y), rounds, clock))
    held = []
    for side in ("one_pass", "naive"):
        command = [sys.executable, __file__, "--memory", side, *(["--smoke"] if smoke else [])]
        held.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    return [found, f"  memory beyond the rows: {held[0] / 1024:.0f} MiB over {held[1] / 1024:.0f} MiB"]


def memory(side: str, smoke: bool) -> None:
    """What one side adds to the peak of this process, in KiB."""
    x, y = rows_of(smoke)
    measured = {"one_pass": one_pass, "naive": naive}[side]
    measured(x[:64], y[:64])  # libraries are loaded
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _status("VmRSS")
    measured(x, y)
    print(_status("VmHWM") - before)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def encode(smoke: bool, rounds: int, clock: Callable[[], float], sizes: tuple[int, int, int]) -> list[str]:
    import numpy as np
    from sklearn.linear_model import RidgeCV

    rows, features, voxels = (60, 100, 50) if smoke else sizes
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(rows, features, generator=generator, dtype=torch.float64) for _ in range(3)]
    y = layers[1][:, :20] @ torch.randn(20, voxels, generator=generator, dtype=torch.float64)
    y += torch.randn(rows, voxels, generator=generator, dtype=torch.float64) * 4
    alphas = [10.0**power for power in range(-2, 7)]

    def ours() -> list[Tensor]:
        return [ridge(x, y, alphas=alphas, folds="leave_one_out").weight for x in layers]

    def theirs() -> list[Any]:
        return [RidgeCV(alphas=alphas, alpha_per_target=True).fit(x.numpy(), y.numpy()).coef_ for x in layers]

    for mine, other in zip(ours(), theirs(), strict=True):
        np.testing.assert_allclose(mine.T.numpy(), other, rtol=1e-5, atol=1e-8)
    title = f"encoding {voxels:,} voxels by {features:,} features of 3 layers, {rows:,} rows, over RidgeCV"
    return [described(title, ratios(ours, theirs, rounds, clock))]


def ratios(
    mine: Callable[[], Any], other: Callable[[], Any], rounds: int, clock: Callable[[], float]
) -> list[tuple[float, float]]:
    """(seconds, ratio) of each round; who begins changes."""
    found = []
    for number in range(rounds):
        taken = {}
        for side in (mine, other) if number % 2 else (other, mine):
            began = clock()
            side()
            taken[side] = clock() - began
        found.append((taken[mine], taken[mine] / taken[other]))
    return found


def described(title: str, found: list[tuple[float, float]]) -> str:
    low, middle, high = statistics.quantiles([ratio for _, ratio in found], n=4)
    return f"{title}: {middle:.3f} ({low:.3f} to {high:.3f}); {statistics.median(seconds for seconds, _ in found):.3f} s"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="taps,capture,cka,encode")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--features", type=int, default=4000)
    parser.add_argument("--voxels", type=int, default=10000)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--memory", default="")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.memory:
        memory(given.memory, given.smoke)
        return
    rounds = 2 if given.smoke else given.rounds
    clock = time.thread_time if given.threads == 1 else time.perf_counter
    sizes = (given.rows, given.features, given.voxels)
    for name in given.only.split(","):
        match name:
            case "taps":
                lines = [taps(given.smoke, rounds, clock)]
            case "capture":
                lines = capture(given.smoke, rounds)
            case "cka":
                lines = cka(given.smoke, rounds, clock)
            case "encode":
                lines = encode(given.smoke, min(rounds, 5), clock, sizes)
            case _:
                parser.error(f"--only {name}: taps, capture, cka, encode")
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
