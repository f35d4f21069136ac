"""`forge-train lionize`: AdamW settings translated to Lion's."""

import json
from typing import Annotated

import typer


def lionize(
    lr: Annotated[float, typer.Option(help="Learning rate that works with AdamW.", min=0.0)] = 3e-4,
    weight_decay: Annotated[float, typer.Option(help="Weight decay that works with AdamW.", min=0.0)] = 0.1,
    factor: Annotated[float, typer.Option(help="How much smaller Lion's rate is; the paper found 3 to 10.", min=1.0)] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Translate AdamW settings to Lion: a rate smaller by a factor, a decay larger by it, so their product stays."""
    settings = {"name": "lionize", "lr": lr / factor, "weight_decay": weight_decay * factor}
    if as_json:
        typer.echo(json.dumps(settings))
        return
    typer.echo("[optimizer]")
    for key, value in settings.items():
        typer.echo(f"{key} = {json.dumps(value)}")
