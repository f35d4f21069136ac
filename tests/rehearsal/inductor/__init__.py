"""The compiler for a GPU that is not there: dynamo, AOT autograd and Inductor run as on an H100, and Triton's own assembler
makes a cubin of every kernel. No kernel is launched, so no number that comes out means anything.

`target.py` says what Triton and torch ask of a GPU, `record.py` keeps what was compiled, `cases.py` has what Forge compiles.
"""

import importlib.util
import os
from pathlib import Path

from rehearsal import device

TRITON = "FORGE_REHEARSAL_TRITON"
"""The environment variable with the directory of Triton, where it is not installed with torch."""


class NoTriton(Exception):
    """The compiler has no Triton here; the message says where it may be."""


def environment(caches: Path) -> dict[str, str]:
    """Variables of a process that compiles for one device; caches of compilers go to a new directory.

    Raises:
        NoTriton: it is not installed.
        NoCompiler: the device cannot be built.
    """
    given = os.environ.get(TRITON, "")
    if not (Path(given) / "triton").is_dir() if given else importlib.util.find_spec("triton") is None:
        raise NoTriton(f"Triton is not installed, nor in the directory that {TRITON} names ({given or 'unset'})")
    variables = device.environment(devices=1)
    return {
        **variables,
        device.COMPILER: "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [variables["PYTHONPATH"], given])),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",  # a graph from a cache would bring no code to look at
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
