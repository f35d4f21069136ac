"""Where the time goes between the command and the end of the first step of `forge-train run debug`.

    python benchmarks/train/cold_start.py [RECIPE] [--rounds 3]

Each round is a fresh process in a fresh directory; the first one also tokenises. Medians over the rounds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise

STAGES = ("interpreter", "recipe", "torch", "trainer", "data and model", "first step")


def child(recipe: str) -> None:
    stamps = [float(sys.argv[3]), time.time()]
    import os

    from forge_core.registry import Registry
    from forge_train.directory import claim, run_directory
    from forge_train.process.ranks import JobRanks
    from forge_train.recipe.load import load_recipe

    registry = Registry()
    resolved = load_recipe(recipe, ["--train.max_steps=1", "--schedule.name=constant", "--hooks=[]"], 1, registry)
    directory = run_directory(resolved.job)
    claim(directory)
    stamps.append(time.time())

    stamps.append(time.time())
    from forge_train.run.loop import fit
    from forge_train.run.start import start_run

    stamps.append(time.time())
    run = start_run(resolved, JobRanks())
    stamps.append(time.time())
    fit(run)
    stamps.append(time.time())
    print(json.dumps([b - a for a, b in pairwise(stamps)]))
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="debug")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rounds = []
        for _ in range(arguments.rounds + 1):
            command = [sys.executable, __file__, "--child", arguments.recipe, str(time.time())]
            done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)
            rounds.append(json.loads(done.stdout.splitlines()[-1]))
    first, warm = rounds[0], [statistics.median(column) for column in zip(*rounds[1:], strict=True)]
    print(f"{'stage':16} {'first start':>12} {'later starts':>13}   seconds")
    for stage, cold, later in zip(STAGES, first, warm, strict=True):
        print(f"{stage:16} {cold:12.2f} {later:13.2f}")
    print(f"{'sum':16} {sum(first):12.2f} {sum(warm):13.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 3 and sys.argv[1] == "--child":
        child(sys.argv[2])
    else:
        main()
