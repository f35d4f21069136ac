"""The same trials on Forge, torchtitan, transformers and KempnerForge: does a framework notice what goes wrong?

    python benchmarks/trials/trials.py --torchtitan SITE --kempnerforge CHECKOUT [--out results.json]

A trial is a function of the same name in the files `of_FRAMEWORK.py`, in a CPU process of its own. It uses the framework's
own code and defaults, and returns an outcome and what was seen:

    right      the result is right
    refused    an error before anything wrong was used
    wrong      a result that is wrong, and no error
    not tried  the framework has no such feature, or its code does not run on a CPU; says which

`--torchtitan` is a folder with torchtitan and what it imports: `pip install --no-deps --target SITE torchtitan spmd_types tyro
docstring_parser shtab typeguard`. `--kempnerforge` is a checkout. Without them, their trials are not tried. What was found is in
docs/comparison.md, which `docs/_ext/trials_table.py` makes from the stored results.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

TRIALS = {
    "first_step": "Warm-up: the first batch changes the weights",
    "misspelled_key": "A misspelled key of the model is refused",
    "small_updates": "Fine-tuning weights stored in bf16 with a learning rate of 1e-5 changes them",
    "packed_documents": "Attention: a document does not see the one before it in its row",
    "recurrent_state": "Recurrent layers: a document does not see the one before it in its row",
    "missing_tensor": "Weights that lack a tensor are refused",
    "flipped_bit": "A checkpoint with one flipped bit is refused",
    "code_in_a_checkpoint": "A checkpoint that contains code does not run it",
}
"""Name of a trial -> what must hold."""

FRAMEWORKS = ("forge", "torchtitan", "transformers", "kempnerforge")
OUTCOMES = ("right", "refused", "wrong", "not tried")
Result = dict[str, str]


def outcome(kind: str, seen: str) -> Result:
    """Returns the result of a trial."""
    assert kind in OUTCOMES
    return {"outcome": kind, "seen": seen}


def not_tried(why: str) -> Result:
    """Returns the result of a trial that a framework offers no way to make."""
    return outcome("not tried", why)


def attempt(framework: str, trial: str, sites: dict[str, str]) -> Result:
    """Runs one trial in a process of its own."""
    if framework in ("torchtitan", "kempnerforge") and not sites.get(framework):
        return not_tried(f"no --{framework} was given")
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [sites.get(framework, ""), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-W", "ignore", __file__, "--alone", framework, trial]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise SystemExit(f"{framework}: {trial} ended with {done.returncode}:\n{done.stderr[-2000:]}") from None


def versions(sites: dict[str, str]) -> dict[str, str]:
    """Returns the version of each framework."""
    found: dict[str, str] = {}
    for name, package in (("forge", "forge-train"), ("transformers", "transformers"), ("torch", "torch")):
        found[name] = version(package)
    for name in ("torchtitan", "kempnerforge"):
        place = Path(sites.get(name) or "/nonexistent")
        try:
            found[name] = next(path.name.split("-")[1].removesuffix(".dist") for path in place.glob(f"{name}-*.dist-info"))
        except StopIteration:
            commit = subprocess.run(
                ["git", "-C", place, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
            )
            found[name] = commit.stdout.strip() or "unknown"
    return found


def main() -> None:
    """Makes all trials, prints a table and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchtitan", default="")
    parser.add_argument("--kempnerforge", default="")
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS))
    parser.add_argument("--trials", default=",".join(TRIALS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        framework, trial = arguments.alone
        sys.path.insert(0, str(Path(__file__).parent))
        function = getattr(importlib.import_module(f"of_{framework}"), trial)
        print(json.dumps(function()))
        return
    sites = {"torchtitan": arguments.torchtitan, "kempnerforge": arguments.kempnerforge}
    results: dict[str, Any] = {"versions": versions(sites), "trials": {}}
    for trial in arguments.trials.split(","):
        results["trials"][trial] = row = {}
        for framework in arguments.frameworks.split(","):
            row[framework] = attempt(framework, trial, sites)
            print(f"{trial:22} {framework:14} {row[framework]['outcome']:10} {row[framework]['seen']}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
