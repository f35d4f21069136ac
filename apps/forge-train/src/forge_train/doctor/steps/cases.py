"""The repository's own tests of GPUs, where they are at hand: then every report is a run of them."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import forge_train
from forge_train.doctor.step import Check, Settings, Skip
from forge_train.doctor.steps.measure import device

_TESTS = Path("tests/parallel/test_gpu.py")
_SECONDS = 1700


def examine_tests(_: Settings) -> Iterator[Check]:
    """The step."""
    if device().type == "cpu":
        raise Skip("no accelerator is seen", "see the step torch for the reason")
    root = next((folder for folder in Path(forge_train.__file__).parents if (folder / _TESTS).is_file()), None)
    if root is None or find_spec("pytest") is None or find_spec("hypothesis") is None:
        raise Skip(
            "the tests are not here", "clone the repository, pip install -e its packages, pytest and hypothesis, run it there"
        )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", "-p", "no:cacheprovider", str(root / "tests")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=_SECONDS, check=False)
    print(done.stdout)
    yield judge(done.returncode, done.stdout)


def judge(code: int, printed: str) -> Check:
    """From what pytest printed last."""
    told = next((line for line in reversed(printed.splitlines()) if re.search(r"\d+ (passed|failed|error|skipped)", line)), "")
    expected = "every test passes or is skipped"
    if code == 0:
        return Check("pytest -m gpu", "PASS", told, "", expected)
    failed = ", ".join(re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)[:10])
    return Check(
        "pytest -m gpu", "FAIL", f"{told} {failed}".strip() or f"exit code {code}", "", expected, "report it with this file"
    )
