"""`ckpt average DIR STEP STEP ... --output DIR`: the average of several checkpoints' weights."""

from typing import Annotated

import typer

from forge_ckpt.commands.arguments import Directory, Foreign, opened, read_manifest, refuse
from forge_core.errors import CheckpointError, ForgeError


def average(
    directory: Directory,
    steps: Annotated[list[str], typer.Argument(metavar="STEP STEP ...", help="Two or more steps or names.")],
    output: Annotated[str, typer.Option(help="The directory of checkpoints to create, or its URL.")],
    weights: Annotated[str | None, typer.Option(help="A weight for each, with commas between. Default: all the same.")] = None,
    ema: Annotated[
        float | None, typer.Option(metavar="DECAY", help="An exponential moving average from the oldest step on instead.")
    ] = None,
    foreign: Foreign = False,
) -> None:
    """Average the weights of several checkpoints in fp64; `evaluate`, `generate` and `convert` take the result.

    It has no optimizer state: a run cannot go on from it.
    """
    from forge_ckpt.offline.average import SECTION, normalized, of_ema, write_average
    from forge_ckpt.offline.stored import StoredTensors

    if len(steps) < 2:
        refuse(CheckpointError("an average takes two checkpoints or more; give their steps"))
    if weights is not None and ema is not None:
        refuse(CheckpointError("--weights and --ema are two ways to average; leave one out"))
    store = opened(directory, foreign)[0]
    try:
        names = [read_manifest(store, step)[0] for step in steps]
        if len(set(names)) < len(names):
            raise CheckpointError(f"{', '.join(names)}: a checkpoint is given twice; give --weights instead")
        sources = [StoredTensors(store, name, lambda tensor: tensor.startswith(SECTION)) for name in names]
        if ema is not None:
            sources.sort(key=lambda source: source.manifest.step)
            shares = of_ema(len(sources), ema)
        else:
            shares = normalized(_numbers(weights, len(names)))
        name = write_average(sources, shares, output)
    except ForgeError as cause:
        refuse(cause)
    parts = ", ".join(f"{share:.4g} of step {source.manifest.step}" for source, share in zip(sources, shares, strict=True))
    typer.echo(f"{output.rstrip('/')}/{name}: {len(sources[0].tensors)} tensors, {parts}")


def _numbers(weights: str | None, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    try:
        found = [float(part) for part in weights.split(",")]
    except ValueError:
        raise CheckpointError(f"--weights {weights}: give numbers with commas between, such as 1,1,2") from None
    if len(found) != count:
        raise CheckpointError(f"--weights {weights}: {len(found)} numbers for {count} checkpoints")
    return found
