"""`forge-train lens MODEL` and `forge-train sae STORE`: fits lenses and sparse autoencoders to inner values of a model."""

from math import prod
from pathlib import Path
from typing import Annotated

import typer

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


def lens(
    model: Annotated[Path, typer.Argument(help="A run, a checkpoint or a Hugging Face folder.", show_default=False)],
    text: Annotated[Path, typer.Option(help="A text file to run the model over.", show_default=False)],
    output: Annotated[Path, typer.Option(help="The .safetensors file to write.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of the fit.")] = 250,
    batch: Annotated[int, typer.Option(min=1, help="Inputs per step.")] = 8,
    lr: Annotated[float, typer.Option(min=0, help="Initial learning rate of Adam; it decays to zero.")] = 1e-3,
    length: Annotated[int | None, typer.Option(help="Tokens per input. Default: 512, or the model's maximum if smaller.")] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of inputs.")] = None,
    weights: Annotated[str, typer.Option(help="Weights to use: `model`, or `ema` for the average of hook ema.")] = "model",
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json or sentencepiece model to use instead.")] = None,
    as_json: _Json = False,
) -> None:
    """Fit a tuned lens: an affine map per layer, after which the model's head predicts the model's output.

    forge-train lens runs/demo --text book.txt --output lens.safetensors

    Shows, for each layer, the KL divergence of its prediction from the model's on held-out inputs, without the map (the logit
    lens) and with it. Runs on one process.
    """
    from forge_core.registry import Registry
    from forge_core.terminal import Console
    from forge_interp.commands.inputs import rows_of_text
    from forge_interp.methods.lens import tuned_lens
    from forge_train.commands.options import require_single_process
    from forge_train.inference.stored import load_model, open_weights

    require_single_process("lens")
    console, registry = Console(as_json=as_json), Registry()
    _writable(output)
    opened = open_weights(model, registry, weights)
    rows, facts = rows_of_text(opened, text, tokenizer, registry, console.note, length=length, limit=limit)
    found = tuned_lens(load_model(opened), rows, steps=steps, batch=batch, lr=lr)
    said = {"model": opened.facts.origin, "step": opened.facts.step, "set": weights, **facts}
    found.save(output, {name: str(value) for name, value in said.items()})
    console.note(f"wrote {output}")
    pairs = list(zip(found.before.tolist(), found.after.tolist(), strict=True))
    if as_json:
        console.document([{"layer": layer, "before": before, "after": after} for layer, (before, after) in enumerate(pairs)])
        return
    body = [(f"blocks.{layer}.residual", f"{before:.4f}", f"{after:.4f}") for layer, (before, after) in enumerate(pairs)]
    console.table(("KL to the model, nats", "logit lens", "tuned lens"), body)


def sae(
    store: Annotated[Path, typer.Argument(help="A folder that `probe` wrote.", show_default=False)],
    output: Annotated[Path, typer.Option(help="The .safetensors file to write.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="Inner value to use. Default: the only one in STORE.")] = None,
    latents: Annotated[int | None, typer.Option(min=1, help="Number of latents. Default: 8 times the width.")] = None,
    k: Annotated[int, typer.Option(min=1, help="Number of active latents per token.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 2000,
    batch: Annotated[int, typer.Option(min=1, help="Tokens per step.")] = 512,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of Adam; it decays to zero in the last fifth.")] = 1e-3,
    held_out: Annotated[float, typer.Option(min=0, max=1, help="Share of held-out tokens, at the end.")] = 0.1,
    as_json: _Json = False,
) -> None:
    """Train a sparse autoencoder on stored activations.

    \b
    forge-train probe runs/demo --names blocks.1.residual_after --text book.txt --output acts
    forge-train sae acts --output sae.safetensors --k 16

    Shows, for held-out tokens, the explained share of the variance, the mean number of active latents per token (L0), and the
    number of latents that are never active. Use `SAE.load(FILE).reconstruct` in `edit` with `replace`. Runs on one process.
    """
    from forge_core.errors import ForgeError
    from forge_core.terminal import Console
    from forge_interp.methods.sae import train_sae
    from forge_interp.store import ActivationStore
    from forge_train.commands.options import require_single_process

    require_single_process("sae")
    console, opened = Console(as_json=as_json), ActivationStore(store)
    _writable(output)
    if name is None and len(opened.names) > 1:
        raise ForgeError(f"{store} has {len(opened.names)} inner values; choose one with --name: {', '.join(opened.names)}")
    chosen = next(iter(opened.names)) if name is None else name
    width = prod(opened.read(chosen, 0, 0).shape[1:])
    count = 8 * width if latents is None else latents
    found, good = train_sae(opened, chosen, latents=count, k=min(k, count), steps=steps, batch=batch, lr=lr, held_out=held_out)
    found.save(output, {"name": chosen, "store": opened.manifest["facts"]})
    console.note(f"wrote {output}")
    if as_json:
        console.document({"name": chosen, "latents": count, "k": found.k, **good._asdict()})
        return
    console.text(
        f"{chosen}: {good.l0:.1f} of {count:,} latents per token explain {good.explained:.1%} of the variance of {good.rows:,} "
        f"held-out tokens; {good.dead:,} latents are never active"
    )


def _writable(output: Path) -> None:
    """Checks before the fit that the output can be written; raises `ForgeError` otherwise."""
    from forge_core.errors import ForgeError

    if output.suffix != ".safetensors" or output.is_dir():
        raise ForgeError(f"--output {output}: the name must end in .safetensors")
    if not output.absolute().parent.is_dir():
        raise ForgeError(f"--output {output}: {output.parent} is not a folder; create it, or choose another folder")
