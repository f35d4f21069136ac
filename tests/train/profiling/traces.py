"""Traces in Chrome's format with known answers; times in microseconds, as torch writes them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_train.profiling.trace import Trace, read_trace

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def event(name: str, category: str, start: float, duration: float, lane: Any = (0, 7), **args: Any) -> dict[str, Any]:
    """One complete event."""
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": duration, "pid": lane[0], "tid": lane[1], "args": args}


def kernel(name: str, start: float, duration: float, stream: int = 7, **args: Any) -> dict[str, Any]:
    """Of a device."""
    return event(name, "kernel", start, duration, (0, stream), **args)


def host(name: str, start: float, duration: float, category: str = "cpu_op", thread: int = 100, **args: Any) -> dict[str, Any]:
    """Of a thread."""
    return event(name, category, start, duration, (1, thread), **args)


def window(start: float, duration: float) -> dict[str, Any]:
    """What the hook writes around the steps."""
    return host("forge/window", start, duration, "user_annotation")


def trace(folder: Path, events: Sequence[dict[str, Any]], **about: Any) -> Trace:
    """Written and read again."""
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": list(events), **({"forge": about} if about else {})}))
    return read_trace(path)
