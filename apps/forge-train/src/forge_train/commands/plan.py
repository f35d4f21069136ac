"""`forge-train plan RECIPE --world N`: what a run would hold and exchange, from one process without memory for any tensor."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from forge_train.commands.completion import Recipe

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from forge_core.registry import Registry
    from forge_core.terminal import Console
    from forge_train.recipe.load import Resolved


def plan(
    context: typer.Context,
    recipe: Recipe,
    world: Annotated[int, typer.Option("--world", min=1, help="Number of processes, one for each GPU.")] = 1,
    per_node: Annotated[int, typer.Option("--per-node", min=1, help="Processes per node, for the map of ranks.")] = 8,
    ranks: Annotated[
        list[int] | None,
        typer.Option("--rank", help="A rank to show; may be given several times. Default: one per pipeline stage."),
    ] = None,
    device: Annotated[
        Literal["cpu", "a100", "h100", "h200", "b200"],
        typer.Option("--device", help="Whose attention to plan for; a GPU's keeps no scores or masks."),
    ] = "cpu",
    modules: Annotated[
        bool, typer.Option("--modules", help="Show each parameter instead: its path, classes, placement and bytes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, with bytes as integers.")] = False,
) -> None:
    """Show what a recipe would hold and exchange on N processes, before renting any.

    Draws which ranks form which group; then, per rank, bytes of parameters, gradients and optimizer state, of
    activations, and of every collective next to its lower bound. The recipe's own model, transforms and optimizer
    run for a step, on tensors without memory: no GPU, no data, a few hundred MiB, seconds to a minute.

    Try layouts before you rent: forge-train plan 7b --world 64 --device h100 --parallel.dp_replicate=8
    """
    from forge_core.errors import LayoutError
    from forge_core.registry import Registry
    from forge_core.terminal import Console
    from forge_train.commands.single_process import require_single_process
    from forge_train.recipe.load import load

    require_single_process("plan")
    registry = Registry()
    console = Console(as_json=as_json)
    resolved = load(recipe, context.args, world, registry, here=None)
    for warning in resolved.warnings:
        console.note(f"warning: {warning}")
    assert resolved.layout is not None, "a world was given"
    if outside := [rank for rank in ranks or () if not 0 <= rank < world]:
        raise LayoutError(f"--rank {outside[0]}: ranks of {world} processes are 0 to {world - 1}")
    chosen = tuple(dict.fromkeys(ranks or ()))
    if modules:
        _show_modules(resolved, registry, chosen, recipe, console, as_json)
        return
    from forge_parallel.dryrun.fake_world import ACCELERATORS
    from forge_train.plan.dry_run import planned

    found = planned(resolved.job, resolved.layout, registry, per_node, chosen, ACCELERATORS.get(device))
    if as_json:
        console.document({"recipe": recipe, **found.as_json()})
        return
    from forge_train.plan.terminal import draw

    draw(found, recipe, _terminal(160))


def _show_modules(
    resolved: "Resolved", registry: "Registry", ranks: tuple[int, ...], recipe: str, console: "Console", as_json: bool
) -> None:
    from dataclasses import asdict

    from forge_train.plan.dry_run import modules

    assert resolved.layout is not None
    held = modules(resolved.job, resolved.layout, registry, ranks)
    if as_json:
        shown = {str(rank): [asdict(parameter) for parameter in parameters] for rank, parameters in held.items()}
        console.document({"recipe": recipe, "layout": resolved.layout.sizes(), "parameters": shown})
        return
    from forge_train.plan.terminal import draw_modules

    draw_modules(held, _terminal(250))


def _terminal(width: int) -> "Terminal":
    """Where to draw: this terminal, or `width` characters where there is none."""
    from rich.console import Console as Terminal

    terminal = Terminal(markup=False, highlight=False)
    return terminal if terminal.is_terminal else Terminal(markup=False, highlight=False, width=width)
