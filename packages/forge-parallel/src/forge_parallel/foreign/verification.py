"""`verify_layout`: compares one training step of a module in a layout with one process.

Random numbers are seeded by the module that draws them, so that dropout is the same in both.
"""

import hashlib
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_parallel.accelerator import random_states_kept
from forge_parallel.foreign.description import Example, call, example_for, shares
from forge_parallel.foreign.module import ParallelizedModule, lay_out, prepare
from forge_parallel.launch.local_processes import fork_local
from forge_parallel.model.parallel_model import DTYPES, gathered
from forge_parallel.model.plan import Order
from forge_parallel.pipeline.definition import BALANCED, Pipeline
from forge_parallel.torch_private import tree_iter, tree_map_only
from forge_parallel.transforms.shard import FullyShard


class Draws:
    """Seeds all generators whenever a module is entered, by the module's path, the index of the share of rows, and `stream`.

    Args:
        seed: base seed.
        first: index of the share in the first forward.
        stream: ranks with different streams draw different numbers, as tp ranks do.
    """

    def __init__(self, seed: int, first: int, stream: int) -> None:
        self._mark, self._share = f"{seed}/{stream}", first - 1

    def attach(self, root: nn.Module) -> None:
        """Hooks every module of `root`, whose forward takes one share."""
        for path, part in root.named_modules():
            part.register_forward_pre_hook(partial(self._enter, path))

    def _enter(self, path: str, _: nn.Module, __: Any) -> None:
        self._share += path == ""
        digest = hashlib.blake2b(f"{self._mark}/{self._share}/{path}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "little")
        torch.manual_seed(seed)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed)  # type: ignore[attr-defined]


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Context that restores the states of all random generators."""
    numpy = sys.modules.get("numpy")
    python, theirs = random.getstate(), numpy.random.get_state() if numpy is not None else None  # type: ignore[attr-defined]
    try:
        with random_states_kept():
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(theirs)  # type: ignore[attr-defined]


TOLERANCES = {"fp64": 1e-6, "fp32": 2**-12, "bf16": 2**-4}
"""Dtypes of a probe step, widest first -> largest accepted error, relative to a tensor's largest element: about a thousand
roundings of fp32, and 16 of bf16. The fp64 value leaves room for modules that compute norms or softmax in fp32 in any dtype.
Errors of a wrong layout are larger."""

FLOOR = 0.1
"""Fraction of the model's largest gradient: the smallest scale for errors, for gradients that are zero except for rounding."""

AXES = ("dp_shard", "dp_replicate", "tp", "pp")

ADVICE = {
    "tp": "everything between a colwise and a rowwise layer must work on any part of the features; change tp_plan or set tp to 1",
    "pp": "blocks may depend on nothing but the hidden states that they receive; change the module, or set pp to 1",
    "dp_shard": "a forward must not modify buffers or depend on other ranks' rows; change the module, or use one data rank",
}

Loss = Callable[[Any, Any], Tensor]
"""(the module's output, its input rows) -> the mean loss of these rows, a scalar with its graph."""


@dataclass(frozen=True)
class _Probe:
    """The module to verify, and how it is parallelized and called."""

    source: nn.Module | Callable[[], nn.Module]
    transforms: tuple[Any, ...]
    options: Mapping[str, Any]
    pipeline: Pipeline | None
    example: Example | None
    loss: Loss | None
    seed: int
    width: str = "fp64"

    def whole(self, seed: int) -> nn.Module:
        """Returns the module for one process."""
        if isinstance(self.source, nn.Module):
            module = deepcopy(self.source)
        else:
            torch.manual_seed(seed)
            module = self.source()
        prepare(module)
        return module.to(DTYPES[self.width])

    def laid_out(self, layout: Layout, device: torch.device | str | None, draws: bool) -> ParallelizedModule:
        """Returns the module parallelized in a layout."""
        left_out = {Order.QUANTIZE, Order.COMPILE} | ({Order.RECOMPUTE} if draws else set())
        kept = [item for item in self.transforms if item.order not in left_out]
        chosen = [replace(item, offload=False) if isinstance(item, FullyShard) else item for item in kept]
        source, dtype = self.source, DTYPES[self.width]
        pipeline = self.pipeline and replace(self.pipeline, split=BALANCED)
        return lay_out(
            _buffers_in(dtype, deepcopy(source)) if isinstance(source, nn.Module) else lambda: _buffers_in(dtype, source()),
            layout,
            chosen,
            **self.options,
            pipeline=pipeline,
            device=device,
            compute=self.width,
            state=self.width,
            seed=self.seed,
            example=self.example,
        )


def verify_layout(
    source: nn.Module | Callable[[], nn.Module],
    layout: str | Layout,
    transforms: Iterable[Any] = (),
    *,
    tp_plan: Mapping[str, str] | None = None,
    blocks: Sequence[str] | None = None,
    pipeline: Pipeline | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    example: Example | None = None,
    loss: Loss | None = None,
    timeout: float = 600.0,
) -> str:
    """Collective: compares a step of `parallelize(source, layout, ...)` with one process. `source` is not changed.

    In a single process, each axis larger than 1 is verified with size 2 on two local processes, forked from this one, on the CPU.
    Under a launcher, all ranks call this and the layout itself is verified; rank 0 then holds the whole module temporarily.
    Compilation and float8 are left out, and so is recomputation if the module draws random numbers.

    Args:
        source: like `layout`, `transforms`, `tp_plan`, `blocks`, `pipeline`, `device` and `seed`, as for `parallelize`.
        example: the module's arguments. Data ranks share its rows (dimension 0); a layout with tp or pp needs two rows per data
            rank. By default rows that suit the module's first layer.
        loss: (output, rows) -> mean loss of these rows; by default the sum of all outputs with random factors. Under a pipeline
            the output is the module's first tensor.
        timeout: limit for the local processes together, in seconds.

    Returns:
        The dtype in which both sides computed: "fp64", or the widest one that the module supports, which is also warned about.
        Errors up to its value in `TOLERANCES` count as rounding.

    Raises:
        PlanError: the parameters or buffers that differ, and the axis; or an error of `parallelize`.
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    built = tuple(part.build() if callable(getattr(part, "build", None)) else part for part in transforms)
    options = {"tp_plan": tp_plan, "blocks": blocks}
    probe = _Probe(source, built, options, pipeline, example, loss, seed)
    together = dist.is_initialized() and dist.get_world_size() > 1
    axes = [axis for axis in AXES if layout.size(axis) > 1]
    width = "fp64"
    with random_numbers_kept():
        if together or not axes:
            width, faults = _faults(probe, layout, device)
            _raise(faults, layout, width)
        for axis in () if together else axes:
            pair = Layout.of({axis: 2, **({"dp_shard": 1} if axis != "dp_shard" else {})}, 2)
            (width, faults), _ = fork_local(2, lambda pair=pair: _faults(probe, pair, "cpu"), timeout)
            _raise(faults, pair, width)
    if width != "fp64" and (not dist.is_initialized() or dist.get_rank() == 0):
        warnings.warn(
            f"verify: the module does not compute in fp64, so both sides were compared in {width}, with errors up to "
            f"{TOLERANCES[width]:.2g} of a tensor's largest element accepted",
            stacklevel=2,
        )
    return width


def _raise(faults: list[str], layout: Layout, width: str) -> None:
    if faults:
        narrow = "" if width == "fp64" else f" (in {width}; the module does not compute in fp64)"
        axis = next((axis for axis in ("tp", "pp", "dp_shard", "dp_replicate") if layout.size(axis) > 1), None)
        more = f"; and {len(faults) - 4} more" if len(faults) > 4 else ""
        advice = "" if axis is None else f". Under {axis} {ADVICE.get(axis, ADVICE['dp_shard'])}"
        raise PlanError(f"verify: layout {layout} differs from one process{narrow}: {'; '.join(faults[:4])}{more}{advice}")


def _faults(probe: _Probe, layout: Layout, device: torch.device | str | None) -> tuple[str, list[str]]:
    """Collective: returns the dtype in which both sides computed, and the differences; the same on all ranks."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    each = 2 if layout.data == 1 or layout.pp > 1 else 1
    count = each * layout.data
    loss = probe.loss or (_first_projected if layout.pp > 1 else _projected)
    probe = probe if probe.example is not None else replace(probe, example=example_for(_outline(probe), count))
    assert probe.example is not None
    rows = shares(probe.example, count)
    width, draws, cause = _agreed(_tried(probe, rows, loss) if first else None)
    if width is None:
        raise PlanError(cause)
    probe, tolerance = replace(probe, width=width), TOLERANCES[width]
    rows = _floats_in(DTYPES[width], rows)
    model = probe.laid_out(layout, device, draws)
    start = model.state_dict(whole=True)
    mine = [_on(share, model.topology.device) for share in rows[model.data_rank * each :][:each]]
    if draws:
        for part in model.parts:
            Draws(probe.seed, model.data_rank * each, model.topology.coordinates["tp"]).attach(part)
    total = _step(model, mine, loss)
    gradients = gathered(model, {name: tensor.grad for name, tensor, _ in model.trainable()})
    buffers = _everyones({name: b.cpu() for part in model.parts for name, b in part.named_buffers()})
    faults: list[str] = []
    if first:
        faults += _initial(probe, start)
        whole = probe.whole(0)
        whole.load_state_dict(start, strict=False)
        expected = _alone(whole, rows, loss, Draws(probe.seed, 0, 0) if draws else None)
        faults += _compared(whole, expected, total, gradients, buffers, tolerance)
        if faults and draws:
            faults.insert(0, "its forward draws random numbers")
    return width, _agreed(faults)


def _step(model: ParallelizedModule, mine: list[Any], loss: Loss) -> float:
    """Collective: runs forward and backward of this rank's shares; returns the mean loss over all ranks."""
    if model.cut is not None:
        batches = [share if isinstance(share, Mapping) else {"input": share} for share in mine]
        unnamed = isinstance(mine[0], Tensor)
        return float(
            model.step(
                batches,
                lambda out, batch: loss(out, batch["input"] if unnamed else batch),
                lambda _: torch.ones((), dtype=torch.int64),
            )
        )
    losses = []
    for share in mine:
        value = loss(call(model.module, share), share)
        (value / len(mine)).backward()
        losses.append(value.detach())
    return model.mean(torch.stack(losses).mean())


def _alone(module: nn.Module, rows: list[Any], loss: Loss, draws: Draws | None) -> float:
    """Runs the same step in one process, one share after the other; returns the mean loss."""
    if draws is not None:
        draws.attach(module)
    total = 0.0
    for share in rows:
        value = loss(call(module, share), share)
        (value / len(rows)).backward()
        total += value.item() / len(rows)
    return total


def _tried(probe: _Probe, rows: list[Any], loss: Loss) -> tuple[str | None, bool, str]:
    """Returns the widest dtype in which one process can run a step, whether the loss changes with other random numbers, and the
    cause if no dtype works."""
    cause = ""
    for width in TOLERANCES:
        narrowed, share = replace(probe, width=width), _floats_in(DTYPES[width], rows[0])
        losses = []
        try:
            for seed in (1, 2):
                module = narrowed.whole(0)
                Draws(seed, 0, 0).attach(module)
                value = loss(call(module, share), share)
                losses.append(value.item())
            value.backward()
        except PlanError as refusal:
            return None, False, str(refusal)
        except Exception as error:  # noqa: BLE001 (a foreign module may raise anything)
            cause = f"verify: the module fails in one process, in {', '.join(TOLERANCES)}: {type(error).__name__}: {error}"
            continue
        return width, losses[0] != losses[1], ""
    return None, False, cause


def _initial(probe: _Probe, start: Mapping[str, Tensor]) -> list[str]:
    """Compares initial values with two builds in one process: elements equal in both are not random and must be equal here; for
    drawn elements, mean and standard deviation must agree."""
    if isinstance(probe.source, nn.Module):
        expected = dict(probe.whole(0).named_parameters())
        return [f"initial value of {name}" for name, value in expected.items() if not torch.equal(start[name].to(value), value)]
    # In fp64: in a narrow dtype, some drawn elements would be equal in both builds.
    one, other = (dict(replace(probe, width="fp64").whole(seed).named_parameters()) for seed in (1, 2))
    return [f"initial value of {name}" for name in one if not _alike(start[name], one[name].detach(), other[name].detach())]


def _alike(found: Tensor, one: Tensor, other: Tensor) -> bool:
    drawn = one != other
    if not torch.equal(found[~drawn], one[~drawn].to(found.dtype)):
        return False
    found = found.to(one)
    count = int(drawn.sum())
    if count < 16:
        return True
    near, spread = max(0.1, 8 / math.sqrt(count)), torch.cat([one[drawn], other[drawn]]).std()
    middle = torch.cat([one[drawn], other[drawn]]).mean()
    return bool((found[drawn].std() - spread).abs() <= near * spread and (found[drawn].mean() - middle).abs() <= near * spread)


def _compared(
    whole: nn.Module,
    expected: float,
    total: float,
    gradients: Mapping[str, Tensor],
    buffers: Sequence[Mapping[str, Tensor]],
    tolerance: float,
) -> list[str]:
    faults = []
    if not abs(total - expected) <= tolerance * max(abs(expected), tolerance):
        faults.append(f"the loss is {total:.9g} instead of {expected:.9g}")
    right = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    largest = max((float(gradient.abs().max()) for gradient in right.values() if gradient.numel()), default=0.0)
    for name, parameter in whole.named_parameters():
        one, other = right.get(name, torch.zeros_like(parameter)), gradients.get(name, torch.zeros_like(parameter))
        scale = max(float(one.abs().max()) if one.numel() else 0.0, FLOOR * largest)
        error = float((one - other).abs().max()) if one.numel() else 0.0
        if not error <= tolerance * scale:
            faults.append(f"the gradient of {name} is off by {error / scale if scale else error:.2g} of its largest element")
    theirs = dict(whole.named_buffers())
    for rank, held in enumerate(buffers):
        for name, buffer in held.items():
            if name in theirs and not torch.allclose(buffer.double(), theirs[name].double().cpu(), tolerance, tolerance, True):
                faults.append(f"buffer {name} has another value on rank {rank}")
    return faults


def _projected(output: Any, _: Any) -> Tensor:
    """Returns the mean of all outputs with random factors, so that every element matters, each differently."""
    leaves = tree_iter(list(output.values()) if isinstance(output, Mapping) else output)
    floats = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not floats:
        raise PlanError("verify: the module returns no floating-point tensor; give loss=")
    return torch.stack([_factors(leaf).mul(leaf).mean() for leaf in floats]).sum()


def _first_projected(output: Any, rows: Any) -> Tensor:
    return _projected(output if isinstance(output, Tensor) else output[0], rows)


def _factors(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(like.numel()), dtype=like.dtype).to(like.device)


def _outline(probe: _Probe) -> nn.Module:
    if isinstance(probe.source, nn.Module):
        return probe.source
    with torch.device("meta"):
        return probe.source()


def _buffers_in(dtype: torch.dtype, module: nn.Module) -> nn.Module:
    for part in module.modules():
        cast = {name: b.to(dtype) for name, b in part._buffers.items() if b is not None and b.is_floating_point()}
        part._buffers.update(cast)
    return module


def _floats_in(dtype: torch.dtype, values: Any) -> Any:
    return tree_map_only(Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, values)


def _on(share: Any, device: torch.device) -> Any:
    if isinstance(share, Tensor):
        return share.to(device)
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in share.items()}


def _agreed(value: Any) -> Any:
    """Collective: returns rank 0's value."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        box = [value]
        dist.broadcast_object_list(box, 0)
        return box[0]
    return value


def _everyones(value: Any) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    boxes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(boxes, value)
    return boxes
