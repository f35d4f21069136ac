"""`forge-train probe MODEL`: lists the inner values of a model, and stores them over a text."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from forge_core.registry import Registry
    from forge_core.terminal import Console
    from forge_parallel.launch.environment import Launch


def probe(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A run, a checkpoint or a Hugging Face folder; with --list also a recipe.", show_default=False)
    ],
    listing: Annotated[
        bool, typer.Option("--list", help="List inner values: name, alias, shape, dtype, bytes per token.")
    ] = False,
    names: Annotated[
        list[str] | None,
        typer.Option("--names", help="A name, an alias or a pattern such as 'blocks.*.residual'; may be given several times."),
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Blocks, such as 0,3,-1. Default: all.")] = None,
    heads: Annotated[str | None, typer.Option(help="Heads, such as 0,5, of values that have heads. Default: all.")] = None,
    positions: Annotated[str, typer.Option(help="Positions of an input: all, last, mean, or numbers such as 0,5.")] = "all",
    text: Annotated[Path | None, typer.Option(help="A text file to run the model over.")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of the text is an input.")] = False,
    length: Annotated[int | None, typer.Option(help="Tokens per input. Default: 512, or the model's maximum if smaller.")] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of inputs.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Inputs per forward.")] = 8,
    output: Annotated[Path | None, typer.Option(help="Folder to write; an interrupted capture in it continues.")] = None,
    budget: Annotated[float, typer.Option(help="Maximum size in GiB without --yes.")] = 1.0,
    yes: Annotated[bool, typer.Option("--yes", help="Store more than --budget.")] = False,
    export: Annotated[Path | None, typer.Option(help="Also write the values to this .npz, .parquet, .h5 or .zarr.")] = None,
    weights: Annotated[str, typer.Option(help="Weights to use: `model`, or `ema` for the average of hook ema.")] = "model",
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json or sentencepiece model to use instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Look inside a model: list the inner values between tokens and logits, and store the chosen ones over a text.

    \b
    forge-train probe 7b --list
    forge-train probe runs/demo --names 'blocks.*.residual_after' --positions last --text book.txt --output acts

    Writes safetensors and a manifest with the origin of each row. If a capture is interrupted, the same command continues it.
    For a model that is too large for one process, start it under torchrun with a layout (--parallel.tp=2); each process then
    writes its own files.
    """
    from forge_core.errors import ForgeError
    from forge_core.registry import Registry
    from forge_core.terminal import Console
    from forge_parallel.launch.environment import read_launcher
    from forge_train.commands.options import require_single_process
    from forge_train.process.ranks import on_ranks

    where, console, registry = read_launcher(os.environ), Console(as_json=as_json), Registry()
    if listing:
        require_single_process("probe --list")
        if names or text or output:
            raise ForgeError("--list does not run the model; remove --names, --text and --output")
        _list(model, context.args, registry, console)
        return
    if context.args and where.size == 1:
        raise ForgeError(f"{context.args[0]} has no effect on one process; use it under torchrun, or with --list and a recipe")
    if not names or text is None or output is None:
        raise ForgeError("a capture needs --names, --text FILE and --output FOLDER; --list shows the names")
    selection = {"names": list(names), "layers": layers, "heads": heads, "positions": positions}
    source = {"file": text, "lines": lines, "length": length, "limit": limit, "tokenizer": tokenizer}
    limits = {"budget": None if yes else budget, "batch": batch}

    def captured() -> None:
        from forge_interp.export import convert
        from forge_interp.store import ActivationStore

        asked = CaptureRequest(Path(model), weights, selection, source, output, limits, context.args)
        found = asked.store(where, registry, console.note if where.rank == 0 else lambda _: None)
        if export is not None and where.rank == 0:
            convert(ActivationStore(output), export)
            console.note(f"wrote {export}")
        if as_json and where.rank == 0:
            console.document(found)

    on_ranks(where, console, captured)


def _list(model: str, overrides: list[str], registry: "Registry", console: "Console") -> None:
    import torch

    from forge_core.errors import ForgeError
    from forge_interp.tap_names import known, taps
    from forge_train.inference.stored import open_weights
    from forge_train.recipe.load import load_recipe

    if Path(model).exists() and Path(model).suffix != ".toml":
        if overrides:
            raise ForgeError(f"{overrides[0]} has no effect on stored weights; remove it, or give a recipe")
        component: Any = open_weights(Path(model), registry).model
    else:
        component = load_recipe(model, overrides, None, registry).job.model
    with torch.device("meta"):
        built = component.build()
    every = taps(built)
    found = {name: one for name, one in every.items() if not one.partial}
    if console.as_json:
        console.document([_row(one) for one in found.values()])
        return
    rows = [
        (one["name"], one["alias"] or "-", " x ".join(map(str, one["shape"])), one["dtype"], f"{one['bytes_per_token']:,}")
        for one in map(_row, found.values())
    ]
    console.table(("name", "TransformerLens", "shape per token", "dtype", "bytes per token"), rows)
    reasons = {entry.why for name in found if (entry := known(name)) is not None and entry.why}
    console.text("without an alias: " + "; ".join(sorted(reasons)))
    for reason in sorted({one.partial for one in every.values()} - {""}):
        names = [name for name, one in every.items() if one.partial == reason]
        console.text(f"{', '.join(names)}: {reason}, so it cannot be captured")


def _row(one: Any) -> dict[str, Any]:
    dtype = str(one.dtype).removeprefix("torch.")
    return {"name": one.name, "alias": one.alias, "shape": one.shape, "dtype": dtype, "bytes_per_token": one.bytes_per_token}


class CaptureRequest(NamedTuple):
    """Options of a capture."""

    model: Path
    weights: str
    selection: dict[str, Any]
    source: dict[str, Any]
    output: Path
    limits: dict[str, Any]
    overrides: list[str]

    def store(self, where: "Launch", registry: "Registry", note: "Callable[[str], None]") -> dict[str, Any]:
        """Collective: runs the model over the text; returns a description of the stored values.

        Raises:
            ForgeError: the options do not fit the model (raised before any forward), or the folder or disk cannot be written.
        """
        from forge_interp.captures import select_taps
        from forge_interp.commands.inputs import integers, positions_of, rows_of_text
        from forge_interp.store import record
        from forge_train.inference.stored import load_model, open_weights

        opened = open_weights(self.model, registry, self.weights)
        layers, heads = (integers(f"--{name}", self.selection[name]) for name in ("layers", "heads"))
        positions = positions_of(self.selection["positions"])
        rows, facts = rows_of_text(opened, registry=registry, note=note, **self.source)
        facts |= {"model": opened.facts.origin, "step": opened.facts.step, "set": self.weights}
        names, chosen = self.selection["names"], {"layers": layers, "heads": heads, "positions": positions}
        if where.size == 1:
            loaded = load_model(opened)
            said = self._refuse_beyond_budget(select_taps(loaded, names, layers, heads), rows, heads, positions, note)
            record(loaded, rows, self.output, names, facts=facts, batch=self.limits["batch"], **chosen)
            return said
        import torch

        from forge_interp.commands.ranks_store import in_dtype, record_sharded
        from forge_interp.store import fingerprint_of
        from forge_parallel.launch import process_group
        from forge_train.inference.stored import load_sharded_model, recipe_to_generate, stored_parameters
        from forge_train.process.ranks import content_of

        resolved = recipe_to_generate(opened, self.overrides, where.size, registry)
        device = process_group.init_process_groups(
            where, resolved.job.parallel.timeout, content=lambda: content_of(resolved, registry)
        )
        laid = load_sharded_model(opened, resolved, device, registry)
        component: Any = opened.model
        with torch.device("meta"):
            whole = in_dtype(component.build(), laid.compute)
        said = self._refuse_beyond_budget(select_taps(whole, names, layers, heads), rows, heads, positions, note)
        told = fingerprint_of(stored_parameters(opened)) if where.rank == 0 else ""
        record_sharded(laid, whole, rows, self.output, names, weights=told, facts=facts, batch=self.limits["batch"], **chosen)
        return said

    def _refuse_beyond_budget(
        self, infos: Any, rows: Any, heads: list[int] | None, positions: Any, note: "Callable[[str], None]"
    ) -> dict[str, Any]:
        from forge_core.errors import ForgeError
        from forge_interp.commands.inputs import row_count
        from forge_interp.store import row_bytes

        count = row_count(rows, positions)
        size, budget = count * row_bytes(infos, heads), self.limits["budget"]
        note(f"{len(infos)} inner values for {count:,} tokens of {len(rows):,} inputs: {size / 2**20:,.1f} MiB in {self.output}")
        if budget is not None and size > budget * 2**30:
            raise ForgeError(
                f"{size / 2**30:.2f} GiB are more than --budget {budget:g}; add --yes, or choose fewer names, layers, heads "
                "or positions"
            )
        return {"store": str(self.output), "names": list(infos), "inputs": len(rows), "rows": count, "bytes": size}
