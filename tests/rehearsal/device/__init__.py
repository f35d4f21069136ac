"""A CUDA device made of host memory, for a torch without CUDA: `environment` is what a process needs that shall have one.

Tensors whose device is `cuda` hold real numbers in host memory; every operator runs the CPU's kernel on the same memory. So what
Forge does for `device.type == "cuda"` runs, and its numbers can be compared. `csrc` has the device, `cuda.py` what `torch.cuda`
says of it, `nccl.py` its collectives, `waits.py` counts where the host waits for it. Streams know what they have waited for
(`csrc/streams.h`), and a use of memory that should have waited and has not is an error (`csrc/races.h`).

Not rehearsed: kernels of CUDA (their dtypes, alignments and sums), the compiler: `torch.compile` gives back what it is given, but
for the processes of `rehearsal.inductor`, which launch nothing.
"""

import os
from pathlib import Path

from rehearsal.device.build import NoCompiler as NoCompiler
from rehearsal.device.build import library

LIBRARY = "FORGE_REHEARSAL_LIBRARY"
"""The environment variable with the path of the library; it is what turns the device on."""

DEVICES = "FORGE_REHEARSAL_DEVICES"
"""How many devices there are; 8 where it is not set."""

COMPILER = "FORGE_REHEARSAL_COMPILER"
"""Where it is set, `torch.compile` compiles."""


def environment(devices: int = 8) -> dict[str, str]:
    """Variables of a process that shall have CUDA devices; its Python loads them when torch is imported. Builds the library where
    that was not done before.

    Raises:
        NoCompiler: there is none, or it cannot build this.
    """
    tests = Path(__file__).parents[2]
    paths = [str(Path(__file__).parent / "start"), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        LIBRARY: str(library()),
        DEVICES: str(devices),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
