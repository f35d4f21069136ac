"""Time and memory of `forge-train plan` for worlds of growing size.

    python benchmarks/parallel/plan_time.py [RECIPE] [--worlds 64,512] [--rounds 3] [--overrides --parallel.dp_replicate=8]

Each round is a process of its own; medians, and the largest peak of resident memory. The recipe's global batch is raised to
one sequence a rank where the world is larger than it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

CHILD = """
import resource, sys
from forge_train.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def measured(recipe: str, world: int, overrides: list[str]) -> tuple[float, float, dict]:
    """Seconds, MiB, and the plan."""
    arguments = ["plan", recipe, "--world", str(world), "--json", *overrides]
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return seconds, int(done.stderr.splitlines()[-1]) / 1024, json.loads(done.stdout)


def main() -> None:
    """One line per world."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="7b")
    parser.add_argument("--worlds", default="64,512,4096,16384")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--overrides", nargs=argparse.REMAINDER, default=[])
    options = parser.parse_args()
    print(f"{'ranks':>7} {'layout':>14} {'micro-batches':>13} {'seconds':>8} {'MiB':>7} {'calls a step':>13}")
    for world in map(int, options.worlds.split(",")):
        overrides = [*([f"--train.global_batch={world}"] if world > 512 else []), *options.overrides]
        rounds = [measured(options.recipe, world, overrides) for _ in range(options.rounds)]
        plan = rounds[0][2]
        calls = sum(flow["count"] for flow in plan["ranks"][0]["flows"])
        layout = "x".join(str(size) for size in plan["layout"].values() if size > 1)
        seconds, memory = statistics.median(r[0] for r in rounds), max(r[1] for r in rounds)
        count = plan["step"]["micro_batches"]
        print(f"{world:7,} {layout:>14} {count:13} {seconds:8.1f} {memory:7.0f} {calls:13,}", flush=True)


if __name__ == "__main__":
    main()
