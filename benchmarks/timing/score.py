"""Error of the time model on published runs, and constants fitted anew.

    python benchmarks/timing/score.py [TABLE] [--fit]

Prints each run with measured and modeled tokens per second of a GPU, then the median and the largest error for each framework,
on rows that constants were fitted to and on others, and the rank correlation for each model and kind of GPU. `--fit` fits the
constants to the rows marked `fit` first, starting from `START`, and prints them; without it the constants that Forge ships are
used.

A run that held more than nine tenths of its GPU's memory is listed but not scored: near the limit an allocator frees and
allocates memory again in every step, which no layout explains, and the planner offers no such layout.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from published import TABLE, Row, rows

from forge_parallel.dryrun.sharding import USABLE
from forge_parallel.timing.calibration import Observation, fit, rank_correlation, score
from forge_parallel.timing.hardware import GIB
from forge_parallel.timing.step_time import FREE, Efficiency

START = Efficiency(
    matmul=0.78,
    float8=0.55,
    experts=0.7,
    attention=0.5,
    memory=0.8,
    node=0.65,
    network=0.75,
    tensor=0.5,
    eager=3.5,
    contention=0.2,
)
"""What is known of such kernels and links without these runs."""


def observation(row: Row) -> Observation:
    """The run of a row, as a calibration takes it."""
    return Observation(row.name, row.measured, lambda efficiency: row.modeled(efficiency).tokens_per_second)


def safe(row: Row) -> bool:
    """Whether the run left a tenth of its GPU's memory free, as far as its source says. Sources write GB for GiB."""
    return row.memory is None or row.memory * GIB <= USABLE * row.hardware.memory


def fitted(table: Sequence[Row]) -> Efficiency:
    """Constants fitted to the rows marked `fit`."""
    return fit([observation(row) for row in table if row.fitted and safe(row)], START)


def report(table: Sequence[Row], efficiency: Efficiency) -> None:
    """Prints errors by run, by framework, and rank correlations."""
    errors = {id(row): observation(row).error(efficiency) for row in table}
    for row in table:
        split = "near limit" if not safe(row) else "fit" if row.fitted else "held"
        speed = row.measured * (1 + errors[id(row)])
        print(f"{split:10}  {row.framework:15}  {row.name:44}  {row.measured:9,.0f}  {speed:9,.0f}  {errors[id(row)]:+7.1%}")
    scored = [row for row in table if safe(row)]
    print(f"\n{'framework':15}  {'rows':4}  {'runs':>4}  {'median':>7}  {'largest':>7}")
    for framework in (*dict.fromkeys(row.framework for row in scored), "all"):
        for part, marked in (("fit", True), ("held", False)):
            some = [observation(row) for row in scored if row.fitted is marked and framework in (row.framework, "all")]
            if some:
                found = score(some, efficiency)
                print(f"{framework:15}  {part:4}  {found.runs:4}  {found.median:7.1%}  {found.largest:7.1%}")
    groups = defaultdict[tuple[str, str], list[Row]](list)
    for row in scored:
        groups[row.model, row.hardware.name].append(row)
    print("\nrank correlation of measured and modeled speed")
    for (model, gpu), members in groups.items():
        runs = defaultdict[str, list[Row]](list)  # a layout that was measured twice is one point
        for row in members:
            runs[f"{row.name} {row.execution}"].append(row)
        if len(runs) > 2:
            measured = [mean(row.measured for row in same) for same in runs.values()]
            modeled = [same[0].measured * (1 + errors[id(same[0])]) for same in runs.values()]
            print(f"{model:15}  {gpu:10}  {len(runs):2} layouts  {rank_correlation(measured, modeled):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", type=Path, default=TABLE)
    parser.add_argument("--fit", action="store_true")
    chosen = parser.parse_args()
    table = list(rows(chosen.table))
    efficiency = Efficiency()
    if chosen.fit:
        efficiency = fitted(table)
        print(*(f"{name} = {getattr(efficiency, name):.3f}" for name in FREE), sep="\n", end="\n\n")
    report(table, efficiency)


if __name__ == "__main__":
    main()
