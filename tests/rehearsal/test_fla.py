"""The kernels of flash-linear-attention give the values, states and gradients of plain torch, with documents, in fp32."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rehearsal.inductor import TRITON

pytestmark = pytest.mark.rehearsal
PLACES = (TRITON, "FORGE_REHEARSAL_FLA")
"""Environment variables with the directories of Triton and of fla-core, which are not installed with torch."""


def test_kernels_equal_plain_torch() -> None:
    places = [os.environ[name] for name in PLACES if os.environ.get(name)]
    missing = [name for name in ("triton", "fla") if not any(Path(place, name).is_dir() for place in places)]
    if absent := [name for name in missing if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{' and '.join(absent)} not installed, nor in the directories that {' and '.join(PLACES)} name")
    tests = str(Path(__file__).parents[1])
    variables = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([tests, *places])}
    command = (sys.executable, "-m", "rehearsal.interpreted_kernels")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 8
    assert all(error < 2e-5 for error in errors.values()), errors
