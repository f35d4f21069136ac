"""Chunked loss head against cross-entropy on whole logits: time and peak memory of one forward and backward.

    python benchmarks/models/loss_head.py --vocab 4096 32000 128000 --dtype fp32 bf16

Times: both sides alternate in one process; the figure that counts is the ratio, given with the spread of the pairs.
Memory: each side runs alone in a process of its own; peak of resident memory over what it held before the first forward.
Linux only (it reads /proc).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_models.blocks.head import ChunkedCrossEntropy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def naive(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """What most code does: whole logits, upcast, cross-entropy."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor, rows: int | None = None) -> Tensor:
    """Forge's loss head."""
    return ChunkedCrossEntropy(rows)(hidden, weight, labels, 0.0, None)[0]


SIDES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"naive": naive, "chunked": chunked}


def problem(rows: int, dim: int, vocab: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states as a norm leaves them and a head as it starts."""
    torch.manual_seed(0)
    hidden = torch.randn(rows, dim).to(DTYPES[dtype]).requires_grad_()
    weight = (torch.randn(vocab, dim) * 0.02).to(DTYPES[dtype]).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (rows,))


def run(side: str, hidden: Tensor, weight: Tensor, labels: Tensor) -> float:
    """Seconds of one forward and backward."""
    hidden.grad = weight.grad = None
    start = time.perf_counter()
    (SIDES[side](hidden, weight, labels) / len(labels)).backward()
    return time.perf_counter() - start


def peak(side: str, rows: int, dim: int, vocab: int, dtype: str) -> float:
    """MiB of resident memory that one forward and backward adds at its peak. Call in a fresh process."""
    arguments = problem(rows, dim, vocab, dtype)
    run(side, *problem(64, dim, 128, dtype))  # thread pools and kernels are there now
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _status("VmRSS")
    run(side, *arguments)
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


def compare(rows: int, dim: int, vocab: int, dtype: str, repeats: int) -> dict[str, object]:
    """One line of the table."""
    arguments = problem(rows, dim, vocab, dtype)
    for side in SIDES:
        run(side, *arguments)
    pairs = [(run("naive", *arguments), run("chunked", *arguments)) for _ in range(repeats)]
    ratios = sorted(ours / theirs for theirs, ours in pairs)
    memory = {}
    for side in SIDES:
        command = [sys.executable, __file__, "--peak", side, "--rows", str(rows), "--dim", str(dim)]
        out = subprocess.run([*command, "--vocab", str(vocab), "--dtype", dtype], capture_output=True, text=True, check=True)
        memory[side] = float(out.stdout)
    return {
        "vocab": vocab,
        "dtype": dtype,
        "rows": rows,
        "dim": dim,
        "naive_ms": round(1e3 * statistics.median(theirs for theirs, _ in pairs), 1),
        "chunked_ms": round(1e3 * statistics.median(ours for _, ours in pairs), 1),
        "time_ratio": round(statistics.median(ratios), 3),
        "time_ratio_spread": [round(ratios[0], 3), round(ratios[-1], 3)],
        "naive_mib": round(memory["naive"]),
        "chunked_mib": round(memory["chunked"]),
        "memory_ratio": round(memory["chunked"] / memory["naive"], 3),
    }


def main() -> None:
    """Prints one JSON line per shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048, help="tokens")
    parser.add_argument("--dim", type=int, default=256, help="width of the hidden states")
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 32000, 128000])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peak", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        print(peak(options.peak, options.rows, options.dim, options.vocab[0], options.dtype[0]))
        return
    print(json.dumps({"torch": torch.__version__, "threads": options.threads, "repeats": options.repeats}))
    for vocab in options.vocab:
        for dtype in options.dtype:
            print(json.dumps(compare(options.rows, options.dim, vocab, dtype, options.repeats)), flush=True)


if __name__ == "__main__":
    main()
