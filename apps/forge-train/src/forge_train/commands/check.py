"""`forge-train check RECIPE --world N`: every fault of a recipe, without torch."""

from typing import Annotated

import typer

from forge_train.commands.completion import Recipe


def check(
    context: typer.Context,
    recipe: Recipe,
    world: Annotated[int, typer.Option("--world", help="World size: the number of processes of the run.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a recipe for a world of N processes and report every fault; imports no torch."""
    from forge_core.registry import Registry
    from forge_core.terminal import Console
    from forge_train.recipe.load import load

    registry = Registry()
    console = Console(as_json=as_json)
    resolved = load(recipe, context.args, world, registry)
    warnings = list(resolved.warnings)
    if resolved.job.precision.compute == "bf16":
        from forge_core.machine import slow_bf16

        if slow := slow_bf16():
            warnings.append(f"precision.compute = 'bf16': {slow}; set 'fp32' to train on it")
    for warning in warnings:
        console.note(f"warning: {warning}")
    depends = list(getattr(resolved.job.model, "layout_dependent", ()))
    for key in depends:
        console.note(f"note: what {key} does depends on the number of ranks and on train.micro_batch")
    if as_json:
        console.document(
            {
                "ok": True,
                "recipe": recipe,
                "world": world,
                "layout": str(resolved.layout),
                "used": registry.used(resolved.used),
                "warnings": warnings,
                "layout_dependent": depends,
                "faults": [],
            }
        )
        return
    sizes = resolved.layout.sizes() if resolved.layout else {}
    console.text(f"{recipe}: no fault for {world} process{'es' if world != 1 else ''}")
    console.text("layout: " + ", ".join(f"{axis} {size}" for axis, size in sizes.items()))
    console.text(
        f"components: {len(resolved.used)} of " + ", ".join(sorted({e["distribution"] for e in registry.used(resolved.used)}))
    )
