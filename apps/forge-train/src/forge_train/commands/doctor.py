"""`forge-train doctor`: finds what is wrong or slow on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from forge_core.terminal import Console
    from forge_train.doctor.step import StepOutcome


def doctor(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A preset or a TOML file; 350m on a GPU, else debug.", show_default=False)] = "",
    acceptance: Annotated[bool, typer.Option("--acceptance", help="Run all steps, to accept a new node.")] = False,
    only: Annotated[str, typer.Option("--only", help="Steps, separated by commas: matmul,disk.", show_default=False)] = "",
    requires: Annotated[
        str | None,
        typer.Option(
            "--requires",
            help="Only check for these, separated by commas: torch, gpu, multi-node, slurm, wandb, hf.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for doctor.json and doctor.html; ./doctor with --acceptance.")
    ] = None,
    directory: Annotated[Path, typer.Option("--directory", help="Folder of future runs; its disk is measured.")] = Path(),
    minutes: Annotated[float, typer.Option("--minutes", min=0, help="Minutes of training; 0 skips it.")] = 0.0,
    compare: Annotated[
        Path | None, typer.Option("--compare", help="An earlier doctor.json: more than 3 % worse counts as slow.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Find what is wrong with this machine before a run does; with --acceptance, measure it.

    Exit code 0: no problem; 1: something is slower than expected; 2: something is wrong. Every finding says what to do.

    With --requires it only says whether this machine has what is named, for scripts and agent skills: exit code 0 if it has all
    of them, otherwise 2, with how to get what is missing.
    """
    from dataclasses import replace

    from forge_core.errors import ForgeError
    from forge_core.terminal import Console
    from forge_train.commands.options import require_single_process
    from forge_train.doctor.report import Report, read_report
    from forge_train.doctor.requirements import required
    from forge_train.doctor.runner import ACCEPTANCE, QUICK, chosen, examine_all
    from forge_train.doctor.step import DoctorSettings, exit_code
    from forge_train.doctor.torch_build import sees_gpu
    from forge_train.recipe.load import load_recipe

    console = Console(as_json=as_json)
    if requires is not None:
        others = {"--acceptance": acceptance, "--only": only, "--minutes": minutes, "--compare": compare, "--out": out}
        refused = [*filter(None, [recipe]), *context.args, *(option for option, given in others.items() if given)]
        if refused:
            raise ForgeError(f"--requires looks for what it names and reads no recipe; remove {', '.join(refused)}")
        report = Report("", None)
        found = examine_all(required(requires), DoctorSettings(""), lambda finished: _report_last(finished, report, console))
        if as_json:
            console.document(report.end())
        raise typer.Exit(exit_code(found))
    require_single_process("doctor")
    if not directory.is_dir():
        raise ForgeError(f"--directory {directory}: this folder does not exist; create it first")
    old = read_report(compare) if compare else None
    recipe = recipe or ("350m" if sees_gpu() else "debug")
    load_recipe(recipe, context.args)  # reports faults of the recipe once rather than in every step
    settings = DoctorSettings(recipe, tuple(context.args), str(directory.resolve()), minutes, acceptance)
    steps = chosen(ACCEPTANCE if acceptance or only else QUICK, only)
    steps = [replace(step, seconds=step.seconds + 60 * minutes) if step.name == "endurance" else step for step in steps]
    folder = out if out is not None else Path("doctor") if acceptance else None
    report = Report(recipe, folder)
    results = examine_all(steps, settings, lambda finished: _report_last(finished, report, console))
    document = report.end(old)
    if as_json:
        console.document(document)
    for line in document.get("regressions", []):
        console.text(f"worse than before: {line}")
    if folder is not None:
        console.text(f"report: {folder / 'doctor.html'}; to ask for help, attach {folder / 'doctor.json'} to the issue")
    raise typer.Exit(max(exit_code(results), 1 if document.get("regressions") else 0))


def _report_last(results: "list[StepOutcome]", report: Any, console: "Console") -> None:
    """Writes the report of all finished steps, and prints the result of the last one."""
    report.write(results)
    last = results[-1]
    console.text(f"{last.verdict:7}  {last.name} ({last.seconds:.0f} s)")
    for check in last.checks:
        expected = f" (expected: {check.expected})" if check.expected and check.verdict in ("SLOW", "FAIL") else ""
        console.text(f"  {check.verdict:7}  {check.name}: {check.value()}{expected}")
        if check.remedy and check.verdict != "PASS":
            console.text(f"           -> {check.remedy}")
