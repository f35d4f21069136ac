"""Opens stored weights, and loads them as a model on one process or sharded over ranks."""

from collections.abc import Collection, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from forge_ckpt.store.objects import is_url
from forge_core.config.tree import Table, build
from forge_core.errors import ForgeError
from forge_core.protocols.weights import Weights
from forge_core.registry import Registry
from forge_parallel import accelerator
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.realize import Blueprint, fill, realize
from forge_parallel.placement.boxes import local_box
from forge_parallel.placement.topology import Topology
from forge_train.formats.converters import format_of
from forge_train.formats.forge import table_of
from forge_train.plan import plan_of
from forge_train.recipe.load import Recipe, load_recipe


def open_weights(where: str | Path, registry: Registry, weights: str = "model") -> Weights:
    """Opens the weights of a run or a checkpoint (by path or URL), of a folder in the Hugging Face format, of a GGUF file, or of
    files that Forge wrote as safetensors, for `torch.distributed.checkpoint` or with `torch.save`.

    Args:
        where: path or URL.
        registry: where the converter is found.
        weights: weights of a checkpoint to open: `model`, or a set that a hook saved, such as `ema`.

    Raises:
        ForgeError: there are no such weights; see the converters.
    """
    path: Any = str(where) if is_url(where) else Path(where)
    kind = format_of(where)
    if kind != "forge" and weights != "model":
        what = "a Hugging Face folder" if kind == "hf" else f"of format {kind!r}"
        raise ForgeError(f"--weights {weights}: {path} is {what}, which has only one set of weights; remove the option")
    options = {} if weights == "model" else {"weights": weights}
    return registry.load("forge.converters", kind)(**options).build().read(path)


@torch.no_grad()
def load_model(weights: Weights, device: torch.device | None = None) -> Any:
    """Returns the whole model for inference, in the widest dtype among its weights: the module that its component builds."""
    from forge_models.hf.streamed_forward import buffers_of

    component: Any = weights.model
    place = device or torch.device(accelerator.kind())
    with torch.device("meta"):
        model = component.build()
    held = dict(model.named_buffers())  # buffers keep their dtypes
    dtype = _widest(weights, held)
    state = {name: value.to(place, copy=True) for name, value in buffers_of(weights, model, held).items()}
    ties = dict(model.specs().ties)
    for name in dict(model.named_parameters(remove_duplicate=False)):
        original = ties.get(name, name)
        if original not in state:
            state[original] = weights.read([original])[original].to(device=place, dtype=dtype, copy=True)
        state[name] = state[original]
    model.load_state_dict(state, assign=True)
    return model.eval()


def stored_parameters(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters of `load_model` sorted by name; only one is in memory at a time."""
    component: Any = weights.model
    with torch.device("meta"):
        model = component.build()
    dtype = _widest(weights, dict(model.named_buffers()))
    for name in sorted(dict(model.named_parameters())):
        yield name, weights.read([name])[name].to(dtype)


def _widest(weights: Weights, buffers: Collection[str]) -> torch.dtype:
    dtypes = [getattr(torch, entry.dtype) for name, entry in weights.tensors.items() if name not in buffers]
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32


_SECTIONS = ("parallel", "transforms", "precision")
"""Sections that an override may change; other sections have no effect."""

_COMPUTES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}


def recipe_to_generate(weights: Weights, overrides: Sequence[str], world: int, registry: Registry) -> Recipe:
    """Returns a recipe with only the weights' model, in their widest dtype, as on one process, and with the layout of
    `--parallel.AXIS=N`; by default, the model is sharded over data ranks.

    Raises:
        ForgeError: the model is a classifier, an override has faults or no effect, or the layout is refused.
    """
    if labels := getattr(weights.model, "labels", ()):
        raise ForgeError(
            f"{weights.facts.origin} is a classifier of {len(labels)} labels (model.labels) and predicts no next token; "
            "`forge-train evaluate` without --tasks computes its accuracy on labeled texts"
        )
    dtypes = [getattr(torch, stored.dtype) for stored in weights.tensors.values()]
    widest = reduce(torch.promote_types, (dtype for dtype in dtypes if dtype.is_floating_point), torch.bfloat16)
    compute = _COMPUTES.get(widest)
    if compute is None:
        raise ForgeError(
            f"{weights.facts.origin}: several processes cannot compute in {widest}; convert the weights with --dtype bf16"
        )
    longest, vocab_size = (getattr(weights.model, name, default) for name, default in (("max_length", 2048), ("vocab_size", 2)))
    length = longest // (2 * world) * 2 * world or longest
    values = {
        "model": table_of(weights.model, registry),
        "precision": {"compute": compute, "state": compute},
        # No batch is read, but checks need rows that every layout of this world can divide.
        "train": {"micro_batch": 1, "global_batch": 4 * world * world},
        "data": {"sequence_length": length, "sources": [{"name": "random", "vocab_size": vocab_size, "tokens": length + 1}]},
    }
    tree = build(values, (), lambda _: weights.facts.origin, Path.cwd())
    assert isinstance(tree, Table)
    recipe = load_recipe(tree, overrides, world, registry)
    for override in overrides:
        key = override.removeprefix("--").partition("=")[0]
        if override.startswith("--") and key.partition(".")[0] not in _SECTIONS:
            raise ForgeError(f"--{key} has no effect here: only [{'], ['.join(_SECTIONS)}] determine the layout; remove it")
    return recipe


def load_sharded_model(weights: Weights, recipe: Recipe, device: torch.device, registry: Registry) -> ParallelModel:
    """Collective: builds the model of a recipe over all ranks; each rank reads only its own shards of the weights.

    Raises:
        ForgeError: the weights do not fit the model.
    """
    job, layout = recipe.job, recipe.layout
    assert layout is not None
    precision = (job.precision.compute, job.precision.state)
    topology = Topology.of(layout, device)
    plan = plan_of(job, layout, registry)
    model = realize(Blueprint.of(job.model.build), plan, topology, lambda model: fill_from(weights, model), *precision)
    model.at_step(weights.facts.step, job.train.max_steps)
    return model


@torch.no_grad()
def fill_from(weights: Weights, model: ParallelModel) -> None:
    """Fills this rank's shards from stored weights, reads only these slices, and converts them to the dtype of the model's state.

    A buffer that the weights do not have, such as a counter of a run, is initialized as in a new run.

    Raises:
        ForgeError: names or shapes differ; the model is unchanged.
    """
    stored = weights.tensors
    fresh = {
        name: tensor for name, tensor in model.tensors() if name not in stored and not isinstance(tensor, torch.nn.Parameter)
    }
    pieces = [(name, model.piece(name, tensor)) for name, tensor in model.tensors() if name not in fresh]
    faults = [f"{name}: not in the weights" for name, _ in pieces if name not in stored]
    faults += [f"{name}: not in the model" for name in sorted(set(stored) - set(model.specs.tensors))]
    faults += [
        f"{name}: shape {piece.shape}, in the weights {stored[name].shape}"
        for name, piece in pieces
        if name in stored and stored[name].shape != tuple(piece.shape)
    ]
    if faults:
        listed = "\n  ".join(faults[:20])
        raise ForgeError(
            f"{weights.facts.origin} does not fit [model]; remove the keys of [model] that differ from these weights:\n  {listed}"
        )
    for name, piece in pieces:
        if piece.local.numel():
            piece.local.copy_(weights.box(name, piece.offset, tuple(piece.local.shape)))
    for name, tensor in fresh.items():
        fill(local_box(tensor), model.specs.tensors[name], name, 0)
