"""Opens stored weights, and loads the whole model on one process."""

from collections.abc import Collection, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from forge_ckpt.store.objects import is_url
from forge_core.errors import ForgeError
from forge_core.protocols.weights import Weights
from forge_core.registry import Registry
from forge_parallel import accelerator

FOREIGN = "config.json"
DCP = ".metadata"
TORCH = (".pt", ".pth", ".bin")


def open_weights(where: str | Path, registry: Registry, weights: str = "model") -> Weights:
    """The weights at `where`: of a run or a checkpoint, by path or URL; a folder in the Hugging Face format; or what Forge wrote
    as safetensors, for `torch.distributed.checkpoint` or with `torch.save`.

    Args:
        weights: which ones of a checkpoint: the model's, or what a hook kept next to them, such as `ema`.

    Raises:
        ForgeError: there is nothing of that kind; see the converters.
    """
    path: Any = str(where) if is_url(where) else Path(where)
    kind = format_of(where)
    if kind != "forge" and weights != "model":
        what = "a Hugging Face folder" if kind == "hf" else f"of format {kind!r}"
        raise ForgeError(f"--weights {weights}: {path} is {what}, which has one set of weights; leave the option out")
    options = {} if weights == "model" else {"weights": weights}
    return registry.load("forge.converters", kind)(**options).build().read(path)


def format_of(where: str | Path) -> str:
    """The format of the weights at `where`, as its files say; `forge` for a run, a checkpoint and what is not there."""
    if is_url(where):
        return "forge"
    path = Path(where)
    marks = {"hf": (path / FOREIGN).is_file(), "safetensors": _is_plain(path), "dcp": (path / DCP).is_file()}
    marks["torch"] = (path.is_file() and path.suffix in TORCH) or (path / "model.pt").is_file()
    return next((kind for kind, found in marks.items() if found), "forge")


def _is_plain(path: Path) -> bool:
    return path.suffix == ".safetensors" if path.is_file() else any(path.glob("*.safetensors"))


@torch.no_grad()
def load_model(weights: Weights, device: torch.device | None = None) -> torch.nn.Module:
    """The whole model in the widest dtype among its weights, ready to run."""
    from forge_models.hf.streamed_forward import buffers_of

    component: Any = weights.model
    place = device or torch.device(accelerator.kind())
    with torch.device("meta"):
        model = component.build()
    held = dict(model.named_buffers())  # they keep the dtypes that they have
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
    """The parameters of `load_model` by name, in its order; one is in memory at a time."""
    component: Any = weights.model
    with torch.device("meta"):
        model = component.build()
    dtype = _widest(weights, dict(model.named_buffers()))
    for name in sorted(dict(model.named_parameters())):
        yield name, weights.read([name])[name].to(dtype)


def _widest(weights: Weights, buffers: Collection[str]) -> torch.dtype:
    dtypes = [getattr(torch, entry.dtype) for name, entry in weights.tensors.items() if name not in buffers]
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32
