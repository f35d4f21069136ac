"""Can this process compile for its accelerator? It is tried with a function of one line, before anything depends on it."""

import os
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import torch

from forge_core.errors import PlanError
from forge_parallel.accelerator import CPU, name
from forge_parallel.torch_private import detect_fake_mode


def require_compiler(device: torch.device, key: str) -> None:
    """Compiles and runs a function on an accelerator, once in a process: what is missing shows here, and not in the first step,
    in the middle of the compiler. `key` is what asks for it in a recipe. A dry run compiles nothing, and is not refused.

    Raises:
        PlanError: it does not compile, or not run; says what is missing, where that can be seen.
    """
    if device.type == CPU.type or detect_fake_mode() is not None:
        return
    if fault := _fault(device):
        raise PlanError(f"{key} needs a compiler for {name(device)}, and there it fails: {fault}")


@cache
def _fault(device: torch.device) -> str:
    try:
        torch.compile(_one_more, fullgraph=True)(torch.zeros(4, device=device))
    except Exception as cause:  # noqa: BLE001 (the compiler raises what its parts raise)
        told = next((line for line in str(cause).splitlines() if line.strip()), "")
        return f"{type(cause).__name__}: {told.strip()[:200]}. {missing_for_compiler()}"
    return ""


def _one_more(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def missing_for_compiler() -> str:
    """What the compiler lacks in this environment, as far as it can be seen without it."""
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton, in the version that this torch requires (pip show torch)"
    compiler = os.environ.get("CC")
    if which(compiler) is None if compiler else not (which("gcc") or which("clang")):
        named = f"CC names {compiler!r}, which is not there" if compiler else "there is neither gcc nor clang on the path"
        return f"Triton needs a C compiler, and {named}: install gcc, or set CC to one"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Triton needs the headers of Python: install python3-dev (or python3-devel), or take a Python that brings them"
    return "TORCH_LOGS=inductor tells more; without it, leave out what has to be compiled"
