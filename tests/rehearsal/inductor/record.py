"""Keeps what was compiled: the code that Inductor wrote, and what the assembler made of each kernel."""

import re
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from rehearsal.inductor.target import install


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture.

    Attributes:
        name: Inductor's.
        architecture: 90 is sm90.
        registers: of a thread.
        stack: bytes of a thread that lie in memory, because they found no register.
    """

    name: str
    architecture: int
    registers: int
    stack: int


@dataclass
class Record:
    """What was compiled.

    Attributes:
        code: of each graph.
        kernels: in the order of compilation.
        breaks: reasons for which a graph ended before its function did, with their counts.
    """

    code: list[str] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)

    def graphs(self) -> list[dict[str, Any]]:
        """Of each graph: what it is of, how many kernels a call launches, how many of its kernels compute in fp64, and how
        often it calls operators that are not compiled, by name."""
        return [_graph(code) for code in self.code]


def _graph(code: str) -> dict[str, Any]:
    kind = re.search(r"AOT ID: \['\d+_(\w+)'\]", code)
    kernels = re.findall(r"async_compile\.triton\('\w+', \'\'\'(.*?)\'\'\'", code, re.DOTALL)
    calls = Counter(re.findall(r"\b(?:extern_kernels|torch\.ops\.\w+|aten)\.(\w+)(?:\.\w+)?\(", code))
    return {
        "of": "?" if kind is None else kind.group(1),
        "launches": len(re.findall(r"^ +triton_\w+\.run\(", code, re.MULTILINE)),
        "with_fp64": sum(re.search(r"tl\.float64|\*fp64", kernel) is not None for kernel in kernels),
        "calls": dict(sorted(calls.items())),
    }


@contextmanager
def recorded(architectures: Sequence[int] = ()) -> Iterator[Record]:
    """Records until its end what is compiled. Each kernel becomes a cubin for the device and for `architectures`, with the first
    of the shapes that Inductor would have tried; none is launched.

    Raises:
        RuntimeError: a kernel has no cubin.
    """
    with warnings.catch_warnings(action="ignore"):  # the compiler's own imports warn
        yield from _recorded(architectures)


def _recorded(architectures: Sequence[int]) -> Iterator[Record]:
    import torch
    import triton
    from torch._dynamo.utils import counters
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime import triton_heuristics as heuristics
    from triton.backends.compiler import GPUTarget

    class Unlaunched(heuristics.CachingAutotunerPlugin):
        """Compiles a kernel; in place of its launch, all that it writes is zero: operators that run look up indices there."""

        def pre_compile(self, autotuner: Any) -> None:
            autotuner._precompile_config(autotuner.configs[0])

        def pre_dispatch(self, autotuner: Any, *args: Any, stream: Any, **kwargs: Any) -> None:
            for name, argument in zip(autotuner.fn.arg_names, args, strict=False):
                if "out_ptr" in name:
                    argument.zero_()

    install()
    compile_, record = triton.compile, Record()

    def compiled(source: Any, target: Any, options: Any) -> Any:
        for architecture in (*architectures, target.arch):
            found = compile_(source, target=GPUTarget("cuda", architecture, 32), options=options)
            record.kernels.append(_kernel(source.fn.__name__, architecture, found.asm.get("cubin", b"")))
        return found

    torch._dynamo.reset()
    counters.clear()
    with (
        mock.patch.object(heuristics, "get_caching_autotuner_plugins", lambda _: [Unlaunched()]),
        mock.patch.object(triton, "compile", compiled),
        mock.patch.object(GraphLowering, "save_output_code", staticmethod(record.code.append)),
    ):
        yield record
    record.breaks = dict(counters["graph_break"])


def _kernel(name: str, architecture: int, cubin: bytes) -> Kernel:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run((tool, "--dump-resource-usage", file.name), capture_output=True, text=True, check=False)
    numbers = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told.stdout))
    if not numbers:
        raise RuntimeError(f"{name} has no cubin for sm{architecture} ({len(cubin)} bytes): {told.stdout} {told.stderr}")
    return Kernel(name, architecture, int(numbers["REG"]), int(numbers["STACK"]) + int(numbers["LOCAL"]))
