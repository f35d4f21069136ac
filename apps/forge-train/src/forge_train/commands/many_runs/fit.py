"""`forge-train fit SWEEP|RUN...`: fits a scaling law to finished runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from forge_core.terminal import Console


def fit(
    places: Annotated[list[Path], typer.Argument(help="Directories of sweeps and of runs.", show_default=False)],
    metric: Annotated[
        str | None, typer.Option("--metric", help="The loss. Default: the sweep's metric, or evaluation/held_out/loss.")
    ] = None,
    parameters: Annotated[
        Literal["all", "blocks", "active"],
        typer.Option("--parameters", help="Which count as N: all, those without token table and head, or those a token uses."),
    ] = "all",
    budget: Annotated[
        list[float] | None,
        typer.Option("--budget", help="FLOPs to predict the best size for; may be given several times.", show_default=False),
    ] = None,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Count runs before the end of their schedule.")] = False,
    resamples: Annotated[int, typer.Option("--resamples", min=100, help="Resamples of the runs, for the intervals.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the resamples.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Directory for fit.json and fit.html. Default: the sweep's, or scaling."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit L(N, D) = E + A/N^alpha + B/D^beta to finished runs, with intervals, and predict compute-optimal sizes.

    Six runs at least, with three sizes and three numbers of tokens that vary apart. A power law of the compute is fitted through
    the best runs as well. Writes fit.json and fit.html.

    forge-train fit sweeps/ladder --budget 1e18 --budget 1e20
    """
    from forge_core.errors import ForgeError
    from forge_core.terminal import Console
    from forge_train.scaling.runs import gather
    from forge_train.scaling.study import study
    from forge_train.sweep.folders import SWEEP_FILE

    console = Console(as_json=as_json)
    if wrong := [value for value in budget or () if not 0 < value < float("inf")]:
        raise ForgeError(f"--budget {wrong[0]:g}: FLOPs are a positive number, such as 1e18")
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

    from forge_core.durable_files import replace_file
    from forge_core.errors import ForgeError
    from forge_train.report.page import document
    from forge_train.scaling.page import LAW, PAGE, parts

    pages = [target / LAW, target / PAGE]
    try:
        target.mkdir(parents=True, exist_ok=True)
        replace_file(pages[0], json.dumps(found, indent=1).encode())
        replace_file(pages[1], document("Scaling law", ["<h1>Scaling law</h1>", *parts(found)]).encode())
    except OSError as cause:
        raise ForgeError(f"{target} cannot be written: {cause.strerror}; choose another --output") from cause
    return pages


def _show(found: dict[str, Any], console: "Console") -> None:
    from forge_train.scaling.page import measured
    from forge_train.sweep.plot import number

    law, frontier = found["law"], found["frontier"]
    console.text(f"{found['formula']}, {len(found['runs'])} runs, N: {found['parameters_counted']} parameters, {found['flops']}")
    console.text(f"intervals: {found['intervals']['level']:.0%}, {found['intervals']['resamples']} resamples of the runs")
    for name, item in law.items():
        console.text(f"  {name.replace('_', ' '):20} {measured(item)}")
    for warning in found["warnings"]:
        console.text(f"WARNING: {warning}")
    if "missing" in frontier:
        console.text(f"{frontier['formula']}: {frontier['missing']}")
    else:
        shown = ", ".join(f"{name} {measured(frontier[name])}" for name in ("E'", "k", "gamma"))
        console.text(f"{frontier['formula']}, through {frontier['runs']} runs: {shown}")
    names = ("parameters", "tokens", "tokens_per_parameter", "loss")
    body = [[number(item["flops"]), *(measured(item[name]) for name in names)] for item in found["budgets"]]
    console.table(("FLOPs", *(name.replace("_", " ") for name in names)), body, title="Compute-optimal sizes")
