"""Commands on many runs: `sweep` trains variants of a recipe, `fit` fits a scaling law, `compare` plots runs together."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from forge_core.terminal import Console
    from forge_lab.sweep.grid import Sweep
    from forge_lab.sweep.results import Results


FAILED = 1


def sweep(
    context: typer.Context,
    grid: Annotated[Path, typer.Argument(help="A TOML file with a recipe and the keys to vary.", show_default=False)],
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Concurrent runs. Default: 1.", show_default=False)] = None,
    dry_run: Annotated[
        bool, typer.Option("--list", "--dry-run", help="List the points with parameters, tokens and FLOPs; start no run.")
    ] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print a script for sbatch: one job array over the points.")] = False,
    point: Annotated[
        int | None, typer.Option("--point", min=0, help="Train only this point, counted from 0.", show_default=False)
    ] = None,
    results: Annotated[bool, typer.Option("--results", help="Compare the existing results; start no run.")] = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory instead of sweeps/<name of GRID>.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train variants of a recipe: a grid, random points, or successive halving. Started again, it resumes.

    GRID.toml names a recipe and the keys to vary; any other key can be set by an override such as --optimizer.lr=1e-3:

    \b
        recipe = "debug"
        [vary]
        optimizer.lr = [1e-3, 3e-3, 1e-2]
        model.dim = [32, 64]
        [search]
        metric = "evaluation/held_out/loss"

    Every point is checked before the first one starts. Each point is an ordinary run in sweeps/<name>/points; index.html compares
    the points, and best.toml is the recipe of the best one. `forge-train fit sweeps/<name>` fits a scaling law to them.
    """
    from forge_core.terminal import Console
    from forge_lab.sweep.grid import read_sweep
    from forge_train.commands.options import require_single_process

    require_single_process("sweep")
    console = Console(as_json=as_json)
    _refuse_pairs({"--list": dry_run, "--slurm": slurm, "--point": point is not None, "--results": results})
    made = read_sweep(grid, context.args, directory)
    for warning in made.warnings:
        console.note(f"warning: {warning}")
    if slurm:
        from forge_lab.sweep.files import write_recipes
        from forge_lab.sweep.processes import script

        where = ["--dir", str(directory.resolve())] if directory is not None else []
        text = script(made, [*where, *context.args], jobs)
        write_recipes(made)
        (made.directory / "logs").mkdir(exist_ok=True)  # SLURM does not create the directory of the output files
        if as_json:
            console.document({"directory": str(made.directory), "points": len(made.points), "script": text})
        console.text(text.rstrip("\n"))
        return
    if dry_run:
        _list(made, console)
        return
    if results:
        _compare(made, console)
        return
    raise typer.Exit(_train(made, console, jobs or 1, point))


def _refuse_pairs(given: dict[str, bool]) -> None:
    from forge_core.errors import ForgeError

    chosen = [name for name, is_given in given.items() if is_given]
    if len(chosen) > 1:
        raise ForgeError(f"{' and '.join(chosen)} exclude each other; give only one")


def _list(made: "Sweep", console: "Console") -> None:
    """Prints the points with their sizes; starts none of them."""
    from forge_lab.figures import number
    from forge_train.plan import run_size

    sizes = {point.name: run_size(made.resolved[point.name].job) for point in made.points}
    total = sum(size.flops for size in sizes.values())
    if console.as_json:
        points = [
            {"point": index, "name": point.name, "values": dict(point.values), **vars(sizes[point.name])}
            for index, point in enumerate(made.points)
        ]
        console.document({"directory": str(made.directory), "points": points, "flops": total})
        return
    body = []
    for index, point in enumerate(made.points):
        size = sizes[point.name]
        body.append([index, point.name, made.steps(point), *map(number, (size.parameters, size.tokens, size.flops))])
    console.table(("point", "name", "steps", "parameters", "tokens", "FLOPs"), body)
    console.text(f"{len(made.points)} points, {number(total)} FLOPs in total, in {made.directory}; no run was started")


def _train(made: "Sweep", console: "Console", jobs: int, point: int | None) -> int:
    """Trains the points that have not ended; returns the exit code."""
    from forge_core.errors import ForgeError
    from forge_lab.sweep.execution import Executor, StopRequests, Task, slots, train
    from forge_lab.sweep.files import outcome_of, write_recipes
    from forge_lab.sweep.processes import LOST
    from forge_parallel import accelerator
    from forge_train.process.stop import REQUEUE

    def say(line: str) -> None:
        (console.note if console.as_json else console.text)(line)

    if point is not None and point >= len(made.points):
        raise ForgeError(f"--point {point}: the sweep has {len(made.points)} points, 0 to {len(made.points) - 1}")
    if point is not None and made.grid.search.kind == "halving":
        raise ForgeError("--point: search.kind = 'halving' compares all points after each rung; run the sweep without --point")
    places = slots(jobs if point is None else 1, made.grid.processes, accelerator.count())
    write_recipes(made)
    chosen = made.points if point is None else (made.points[point],)
    left = [one for one in chosen if not outcome_of(made.folder(one)).ended]
    if len(left) < len(chosen):
        say(f"{len(chosen) - len(left)} of {len(chosen)} points are already done")
    asked = StopRequests()
    with asked.listening():
        executor = Executor(made, places, say, asked)
        if point is None:
            train(made, executor, say)
        else:
            executor.run([Task(one) for one in left])
    if point is None or not left:
        _compare(made, console)
    elif console.as_json:
        from forge_lab.sweep.results import collect_results, line_of

        lines = [line_of(item, made.grid.search.metric) for item in collect_results(made).results if item.point in chosen]
        console.document({"page": None, "best": None, "points": lines})
    if asked.times:
        say(f"stopped by {asked.name}; start the same command again to continue")
        return REQUEUE
    failed = [one.name for one in chosen if outcome_of(made.folder(one)).status == "failed"]
    if failed:
        shown = ", ".join(failed[:5])
        console.note(f"{len(failed)} of {len(chosen)} points failed: {shown}; their output is in {made.directory / 'logs'}")
    if point is not None and failed and (code := outcome_of(made.folder(chosen[0])).code) in LOST:
        return code  # so that a scheduler starts the task again, possibly on another machine
    return FAILED if failed else 0


def _compare(made: "Sweep", console: "Console") -> "Results":
    """Writes and prints the current results."""
    from forge_lab.scaling.study import page_parts_in
    from forge_lab.sweep.results import collect_results, line_of, results_table, write_page, write_results

    made.directory.mkdir(parents=True, exist_ok=True)
    found = collect_results(made)
    write_results(made, found)
    page = write_page(made, found, page_parts_in(made.directory))
    metric = made.grid.search.metric
    if console.as_json:
        best = found.best.point.name if found.best else None
        console.document({"page": str(page), "best": best, "points": [line_of(item, metric) for item in found.results]})
        return found
    console.table(*results_table(found.results, metric))
    console.text(f"report: {page}")
    return found


def fit(
    places: Annotated[list[Path], typer.Argument(help="Directories of sweeps and of runs.", show_default=False)],
    metric: Annotated[
        str | None,
        typer.Option("--metric", help="Metric of the loss. Default: the sweep's, or evaluation/held_out/loss."),
    ] = None,
    parameters: Annotated[
        Literal["all", "blocks", "active"],
        typer.Option("--parameters", help="Parameters to count as N: all, those of the blocks, or those that one token uses."),
    ] = "all",
    budget: Annotated[
        list[float] | None,
        typer.Option("--budget", help="FLOPs for which to predict the best size; may be repeated.", show_default=False),
    ] = None,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Include runs before the end of their schedule.")] = False,
    resamples: Annotated[int, typer.Option("--resamples", min=100, help="Number of resamples for the intervals.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed of the resamples.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Directory for fit.json and fit.html. Default: the sweep's, or scaling."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit L(N, D) = E + A/N^alpha + B/D^beta to finished runs, with intervals, and predict compute-optimal sizes.

    Needs at least six runs, with three sizes and three numbers of tokens that vary independently. Also fits a power law of the
    compute to the best runs. Writes fit.json and fit.html.

    forge-train fit sweeps/ladder --budget 1e18 --budget 1e20
    """
    from forge_core.errors import ForgeError
    from forge_core.terminal import Console
    from forge_lab.scaling.runs import gather
    from forge_lab.scaling.study import study
    from forge_lab.sweep.files import SWEEP_FILE

    console = Console(as_json=as_json)
    if wrong := [value for value in budget or () if not 0 < value < float("inf")]:
        raise ForgeError(f"--budget {wrong[0]:g}: FLOPs must be a positive number, such as 1e18")
    given = gather(places, metric, parameters, unfinished)
    for name, why in given.left_out:
        console.note(f"left out: {name}: {why}")
    found = study(given, parameters, budget or (), resamples, seed)
    only = places[0] if len(places) == 1 and (places[0] / SWEEP_FILE).is_file() else None
    target = output or only or Path("scaling")
    pages = _write(found, target)
    if as_json:
        console.document(found)
    else:
        _show(found, console)
        console.text("wrote " + ", ".join(str(path) for path in pages))


def _write(found: dict[str, Any], target: Path) -> list[Path]:
    import json

    from forge_core.errors import ForgeError
    from forge_core.files import replace_file
    from forge_lab.scaling.study import LAW, PAGE, page_parts
    from forge_train.report.html import document

    pages = [target / LAW, target / PAGE]
    try:
        target.mkdir(parents=True, exist_ok=True)
        replace_file(pages[0], json.dumps(found, indent=1).encode())
        replace_file(pages[1], document("Scaling law", ["<h1>Scaling law</h1>", *page_parts(found)]).encode())
    except OSError as cause:
        raise ForgeError(f"{target} cannot be written: {cause.strerror}; choose another --output") from cause
    return pages


def _show(found: dict[str, Any], console: "Console") -> None:
    from forge_lab.figures import number
    from forge_lab.scaling.study import with_interval

    law, frontier = found["law"], found["frontier"]
    console.text(f"{found['formula']}, {len(found['runs'])} runs, N: {found['parameters_counted']} parameters, {found['flops']}")
    console.text(f"intervals: {found['intervals']['level']:.0%}, from {found['intervals']['resamples']} resamples of the runs")
    for name, item in law.items():
        console.text(f"  {name.replace('_', ' '):20} {with_interval(item)}")
    for warning in found["warnings"]:
        console.text(f"WARNING: {warning}")
    if "missing" in frontier:
        console.text(f"{frontier['formula']}: {frontier['missing']}")
    else:
        shown = ", ".join(f"{name} {with_interval(frontier[name])}" for name in ("E'", "k", "gamma"))
        console.text(f"{frontier['formula']}, fitted to {frontier['runs']} runs: {shown}")
    names = ("parameters", "tokens", "tokens_per_parameter", "loss")
    body = [[number(item["flops"]), *(with_interval(item[name]) for name in names)] for item in found["budgets"]]
    console.table(("FLOPs", *(name.replace("_", " ") for name in names)), body, title="Compute-optimal sizes")


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Directories of runs, or folders of runs: runs/demo runs/other.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="File of the page. Default: report.html in the only folder, otherwise here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write one offline page that compares several runs: overlaid curves, and a table of differences.

    The table lists the keys of the recipes, the machines and the versions that differ; everything else is as in the report of one
    run. Unfinished runs are compared up to their last step.

    forge-train compare runs/small runs/wide --out compared.html
    """
    from forge_core.errors import ForgeError
    from forge_core.terminal import Console
    from forge_lab.comparison import write_comparison
    from forge_train.report.page import directories_of

    if len(directories_of(runs)) < 2:
        raise ForgeError(f"{runs[0]} is one run, but a comparison needs two; use forge-train report for one run")
    path = write_comparison(runs, out)
    console = Console(as_json=as_json)
    if as_json:
        console.document({"report": str(path), "bytes": path.stat().st_size})
    console.text(f"wrote {path}")
