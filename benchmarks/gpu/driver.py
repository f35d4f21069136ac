"""Runs the configurations of a benchmark on one CUDA GPU, each in a process of its own, until time is up.

So one that runs out of memory costs nothing but its line, and none inherits what another allocated or compiled.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import which
from typing import Any

PEAK: Mapping[str, float] = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 operations per second of the SXM parts; another GPU gets no MFU rather than a guess."""

Result = dict[str, Any]


def peak(gpu: str) -> float | None:
    """Of the GPU of that name, where it is known."""
    return next((value for name, value in PEAK.items() if name in gpu), None)


def drive(
    doc: str | None,
    file: str,
    named: Mapping[str, Any],
    run: Callable[[Any, bool], Result],
    line: Callable[[str, Mapping[str, Result]], str],
    brief: Callable[[Result], str],
    heading: str = "",
) -> None:
    """The command line of a benchmark.

    Args:
        doc: what it says about itself.
        file: the script, which is run again for each configuration.
        named: configurations.
        run: (configuration, whether on a CPU and tiny) -> figures that JSON takes.
        line: (name, results so far) -> what is printed of a configuration.
        brief: what `--smoke` prints of one.
        heading: printed before the first result.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", default="all")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="whether every configuration runs, on a CPU; measures nothing")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(run(named[arguments.alone], False)))
        return
    chosen = list(named) if arguments.configurations == "all" else arguments.configurations.split(",")
    unknown = [name for name in chosen if name not in named]
    if unknown:
        parser.error(f"no configuration is called {', '.join(unknown)}; there are {', '.join(named)}")
    if arguments.smoke:
        import torch

        for name in chosen:
            torch.compiler.reset()  # a process of its own, as on a GPU, compiles for one configuration only
            print(f"{name:56} {brief(run(named[name], True))}", flush=True)
        return
    if which("nvidia-smi") is None or subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode:
        parser.exit(2, "this benchmark needs a CUDA GPU, and nvidia-smi shows none\n")
    deadline, results, skipped = time.monotonic() + arguments.seconds, {}, []
    print(f"command: {' '.join(sys.argv)}", *([heading] if heading else []), sep="\n", flush=True)
    for name in chosen:
        left = deadline - time.monotonic()
        if left < 45:
            skipped.append(name)
            continue
        results[name] = alone([sys.executable, file, "--alone", name], left)
        print(f"{name:56} {results[name]['error']}" if "error" in results[name] else line(name, results), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps({"command": sys.argv, "results": results}, indent=1))
    if skipped:
        print(f"not run for want of time: {','.join(skipped)}")


def alone(command: list[str], seconds: float) -> Result:
    """What the last line of a process says; `error` where it fails or takes longer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": "out of time"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    return {"error": (done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"])[0][:300]}
