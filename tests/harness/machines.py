"""Runs the tests that compare numbers as other machines would, and lists what is close to its limit.

`python -m harness.machines [--only CONDITION]... [PYTEST ARGUMENTS]`, which is what `nox -s machines` does. Each condition is
one run of pytest with other instruction sets, other numbers of threads, or a busy neighbor. Tests are chosen by what they
are, not by a list: those of modules that compare floating-point numbers carry the marker `numbers` (tests/conftest.py).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

CLOSE = 1 / 1.5
"""Share of a limit from which a comparison is listed."""
FOLDERS = ("tests/models", "tests/parallel", "tests/train", "tests/repository")
NOTHING_CHOSEN = 5  # pytest's exit code


@dataclass(frozen=True)
class Condition:
    """One run of the tests: what is set in its environment, threads of a process, and busy processes next to it."""

    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    busy: int = 0


AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
SSE4 = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
CONDITIONS = {
    "here": Condition(),
    "avx2": Condition(AVX2),
    "sse4": Condition(SSE4),
    "threads-2": Condition(threads=2),
    "threads-3": Condition(threads=3),
    "avx2-threads-3": Condition(AVX2, threads=3),
    "load": Condition(busy=2),
}


def main() -> None:
    """Exit code 1 when a test failed under some condition; being close to a limit is not a failure."""
    parser = argparse.ArgumentParser(prog="machines", description=__doc__)
    parser.add_argument("--only", action="append", choices=CONDITIONS, help="this condition; may be given more than once")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which a condition is given up")
    options, arguments = parser.parse_known_args()
    codes, margins = {}, {}
    for name in options.only or CONDITIONS:
        print(f"== {name}", flush=True)
        codes[name], margins[name] = run(CONDITIONS[name], arguments, options.seconds)
    for line in close(margins):
        print(line)
    for name, code in codes.items():
        print(f"== {name}: {'passed' if code in (0, NOTHING_CHOSEN) else f'exit code {code}'}, {len(margins[name])} tests noted")
    sys.exit(any(code not in (0, NOTHING_CHOSEN) for code in codes.values()))


def run(condition: Condition, arguments: list[str], seconds: float) -> tuple[int, dict[str, float]]:
    """Exit code of pytest and, by test, the largest share of a limit that was used. Folders among `arguments` replace ours."""
    given = [] if any(Path(argument.partition("::")[0]).exists() for argument in arguments) else FOLDERS
    with tempfile.TemporaryDirectory(prefix="forge-machines-") as directory, busy(condition.busy):
        noted = Path(directory) / "margins"
        environment = {
            **os.environ,
            **condition.environment,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(condition.threads),
            "FORGE_TEST_THREADS": str(condition.threads),
            "OMP_WAIT_POLICY": "passive",  # threads that wait by turning take the cores from those that work
            "FORGE_MARGINS": str(noted),
            "TORCHINDUCTOR_CACHE_DIR": directory,  # code that was made for another instruction set does not compile
        }
        which = "numbers and not gpu and not slow and not slurm and not rehearsal"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which]
        process = subprocess.Popen([*command, *arguments, *given], env=environment)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait(60)
        return code, read(noted)


def read(path: Path) -> dict[str, float]:
    """What `margins` wrote."""
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(json.loads(line) for line in lines)


def close(margins: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Lines about tests that used more than `CLOSE` of a limit under some condition, the closest first.

    What is the same under several conditions does not depend on the machine, such as a statistic of fixed random numbers.
    """
    tests = {test for found in margins.values() for test in found}
    shares = {test: {name: found[test] for name, found in margins.items() if test in found} for test in tests}
    for test, found in sorted(shares.items(), key=lambda item: (-max(item[1].values()), item[0])):
        largest, smallest = max(found.values()), min(found.values())
        if largest >= CLOSE and (len(found) == 1 or largest - smallest > 1e-3):
            each = ", ".join(f"{name} {share:.2f}" for name, share in found.items())
            yield f"{largest:.2f} of a limit: {test} ({each})"


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that compute nothing, as neighbors on the same cores; they end with this one, however it ends."""
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(100000))"
    neighbors = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(count)]
    try:
        yield
    finally:
        for neighbor in neighbors:
            neighbor.kill()
            neighbor.wait()


if __name__ == "__main__":
    main()
