"""`forge-train similarity PLACE...`: similarity of layers within a model, between two models, or over checkpoints of a run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_core.terminal import Console

if TYPE_CHECKING:
    import torch

    from forge_core.component import Component
    from forge_core.protocols.weights import StoredTensor, Weights, WeightsInfo
    from forge_interp.store import ActivationStore


def similarity(
    places: Annotated[
        list[Path],
        typer.Argument(
            help="Folders that `probe` wrote, or runs, checkpoints and Hugging Face folders with --text.", show_default=False
        ),
    ],
    names: Annotated[
        str, typer.Option("--names", help="Inner values to compare in models: a name, an alias or a pattern.")
    ] = "blocks.*.residual_after",
    text: Annotated[Path | None, typer.Option(help="A text file to run models over.")] = None,
    positions: Annotated[str, typer.Option(help="Positions of an input: all, last, mean, or numbers such as 0,5.")] = "all",
    length: Annotated[int | None, typer.Option(help="Tokens per input. Default: 512, or the model's maximum if smaller.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of inputs.")] = 32,
    steps: Annotated[bool, typer.Option("--steps", help="Compare each checkpoint of a run with the last one.")] = False,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="With --steps: compare all pairs within each checkpoint; --output is an .npz.")
    ] = False,
    measure: Annotated[str, typer.Option(help="cka (unbiased), biased_cka, cca, svcca or rsa.")] = "cka",
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json or sentencepiece model to use instead.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write a heat map to this .svg or .png file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Compare layers: all pairs within one model or between two models, or the checkpoints of a run with the last one.

    \b
    forge-train similarity runs/demo --text book.txt --output layers.svg
    forge-train similarity runs/demo --steps --text book.txt --measure svcca
    forge-train similarity runs/demo --steps --pairs --text book.txt --names 'blocks.[0-3].residual' --output layers.npz

    The measures are computed from fp64 sums over one pass, so they depend neither on batches nor on their order. Activations of
    models are written to a temporary folder: tokens x width x bytes per layer. Blocks after the last named one are not read.
    """
    from forge_interp.heat_maps import check_picture, write_heat_map
    from forge_interp.similarity import MEASURES
    from forge_train.commands.options import require_single_process

    require_single_process("similarity")
    console, registry = Console(as_json=as_json), Registry()
    if measure not in MEASURES:
        raise ForgeError(f"--measure {measure}: choose one of {', '.join(MEASURES)}")
    if pairs:
        if not steps or (output is not None and output.suffix != ".npz"):
            raise ForgeError("--pairs needs --steps, and an .npz file as --output")
    else:
        check_picture(output)
    wanted = _checkpoints(places) if steps else [(place.name, place) for place in places]
    options = {"file": text, "length": length, "limit": limit, "tokenizer": tokenizer}
    with _stores(wanted, names, positions, options, registry, console) as stores:
        if pairs:
            _pairs(stores, [label for label, _ in wanted], measure, output, console)
            return
        if len(stores) <= 2 and not steps:
            left, right = stores[0], stores[-1]
            values, rows, columns = between(left, right, measure), left.names, right.names
        else:
            values, rows, columns = to_the_last(stores, measure), stores[-1].names, tuple(label for label, _ in wanted)
    if output is not None:
        write_heat_map(output, f"{measure}: {' and '.join(dict.fromkeys(place.name for place in places))}", values, rows, columns)
        console.note(f"wrote {output}")
    if as_json:
        console.document({"measure": measure, "rows": rows, "columns": columns, "values": values})
    else:
        body = [(name, *(f"{value:.3f}" for value in line)) for name, line in zip(rows, values, strict=True)]
        console.table((measure, *columns), body)


def _pairs(stores: "list[ActivationStore]", labels: list[str], measure: str, output: Path | None, console: Console) -> None:
    """Compares all pairs within each store: (checkpoints, inner values, inner values); prints or writes the result."""

    for store in stores:
        refuse_other_tokens(store, stores[-1])
    values, names = [between(store, store, measure) for store in stores], stores[-1].names
    if output is not None:
        import numpy as np

        try:
            np.savez(output, values=np.array(values), checkpoints=np.array(labels), names=np.array(names))
        except OSError as cause:
            raise ForgeError(f"{output} cannot be written: {cause.strerror}; choose another --output") from cause
        console.note(f"wrote {output}")
    if console.as_json:
        console.document({"measure": measure, "checkpoints": labels, "names": names, "values": values})
        return
    others = [
        [value for row, line in enumerate(table) for column, value in enumerate(line) if row != column] or [1.0]
        for table in values
    ]
    body = [(label, f"{min(one):.3f}", f"{sum(one) / len(one):.3f}") for label, one in zip(labels, others, strict=True)]
    console.table((measure, "minimum over pairs", "mean over pairs"), body)


def _checkpoints(places: list[Path]) -> list[tuple[str, Path]]:
    """Returns (name, folder) of each checkpoint of one run, the oldest first."""
    from forge_ckpt.checkpoint.locate import store_of
    from forge_ckpt.format.names import committed

    if len(places) != 1:
        raise ForgeError("--steps needs exactly one run, or one directory of checkpoints")
    store, one = store_of(places[0])
    if not isinstance(store.root, Path):
        raise ForgeError(f"--steps reads checkpoints from a disk, but {places[0]} is a URL; copy them first")
    newest = {entry.step: entry.name for entry in reversed(committed(path.name for path in store.root.iterdir()))}
    if one is not None or len(newest) < 2:
        raise ForgeError(f"{places[0]} has fewer than two checkpoints; keep more with checkpoint.keep")
    return [(name, store.root / name) for _, name in sorted(newest.items())]


@contextmanager
def _stores(
    wanted: list[tuple[str, Path]], names: str, positions: str, options: dict[str, Any], registry: Registry, console: Console
) -> "Iterator[list[ActivationStore]]":
    """Context with the activations of each place: the stored ones, or those of its model over the text."""
    from tempfile import TemporaryDirectory

    from forge_interp.commands.inputs import positions_of, rows_of_text
    from forge_interp.store import ActivationStore, is_store, record
    from forge_train.inference.stored import load_model, open_weights

    with TemporaryDirectory() as scratch:
        found = []
        for number, (label, place) in enumerate(wanted):
            if is_store(place):
                found.append(ActivationStore(place))
                continue
            if options["file"] is None:
                raise ForgeError(f"{place} is not a folder that `probe` wrote; for a model, add --text FILE")
            opened = open_weights(place, registry)
            rows, facts = rows_of_text(opened, registry=registry, note=console.note, **options)
            console.note(f"{label}: {sum(map(len, rows)):,} tokens")
            folder = Path(scratch) / str(number)
            record(load_model(shortened(opened, names)), rows, folder, names, positions=positions_of(positions), facts=facts)
            found.append(ActivationStore(folder))
        yield found


ROWS = 4096
"""Number of rows in memory at a time."""
INDEX = ("input", "position", "token")


def between(left: "ActivationStore", right: "ActivationStore", measure: str) -> list[list[float]]:
    """Compares every inner value of one store with every one of the other.

    Raises:
        ForgeError: the stores have different tokens, or two values cannot be compared.
    """
    refuse_other_tokens(left, right)
    return [[similarity_of(left, mine, right, other, measure) for other in right.names] for mine in left.names]


def to_the_last(stores: "Sequence[ActivationStore]", measure: str) -> list[list[float]]:
    """Compares each inner value of every store with the same one of the last store."""
    last = stores[-1]
    for store in stores:
        refuse_other_tokens(store, last)
        if store.names != last.names:
            raise ForgeError(f"{store.folder} and {last.folder} have different inner values; capture the same ones in both")
    return [[similarity_of(store, name, last, name, measure) for store in stores] for name in last.names]


def similarity_of(left: "ActivationStore", mine: str, right: "ActivationStore", other: str, measure: str) -> float:
    """Compares one pair in one pass over the rows. All heads of a value are compared together."""
    from forge_interp.similarity import MEASURES, Moments

    moments: Moments | None = None
    for start in range(0, left.rows, ROWS):
        stop = min(start + ROWS, left.rows)
        sums = Moments.of(*(store.read(name, start, stop).flatten(1) for store, name in ((left, mine), (right, other))))
        moments = sums if moments is None else moments + sums
    if moments is None:
        raise ForgeError(f"{left.folder} has no rows")
    return float(MEASURES[measure](moments))


def refuse_other_tokens(left: "ActivationStore", right: "ActivationStore") -> None:
    """Checks that both stores have rows of the same tokens; raises `ForgeError` otherwise."""
    import torch

    if left is right:
        return
    if left.rows != right.rows or any(not torch.equal(a, b) for a, b in _index(left, right)):
        raise ForgeError(f"{left.folder} and {right.folder} have different tokens; capture both over the same text")


def _index(left: "ActivationStore", right: "ActivationStore") -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
    for name in INDEX:
        yield left.read(name), right.read(name)


class Shortened:
    """`Weights` for a component with fewer blocks. Tensors of the other blocks exist but are not requested."""

    def __init__(self, model: "Component", weights: "Weights") -> None:
        self.model, self._weights = model, weights
        self.tensors: Mapping[str, StoredTensor] = weights.tensors
        self.facts: WeightsInfo = weights.facts

    def read(self, names: Sequence[str]) -> "dict[str, torch.Tensor]":
        """Returns tensors as the weights of the whole model do."""
        return self._weights.read(names)

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> "torch.Tensor":
        """Returns tensors as the weights of the whole model do."""
        return self._weights.box(name, offset, extent)


def shortened(weights: "Weights", names: str | Sequence[str]) -> "Weights":
    """Returns the weights without the blocks that the selected inner values do not need; unchanged if one lies after all blocks,
    or if the model cannot be built with fewer blocks.

    Raises:
        InterpError: a pattern matches nothing.
    """
    import torch

    from forge_interp.tap_names import InterpError, choose, layer_of, taps

    component: Any = weights.model
    with torch.device("meta"):
        layers = [layer_of(name) for name in choose(taps(component.build()), names)]
    last = max((layer for layer in layers if layer is not None), default=0)
    if None in layers or not isinstance(getattr(component, "layers", None), int):
        return weights
    try:
        fewer = replace(component, layers=last + 1, **({"mtp": None} if hasattr(component, "mtp") else {}))
        with torch.device("meta"):
            found = choose(taps(fewer.build()), names)
    except (ValueError, InterpError):  # a key refers to a later block, or reserves experts for later ones
        return weights
    return Shortened(fewer, weights) if len(found) == len(layers) else weights
