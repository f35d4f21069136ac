"""A model parallelized over ranks, and operations on the whole of it: compute dtype, freezing, temporary weights, full tensors.

`Context` is what a transform gets when it is applied: the specs of the part, this rank's topology, and dtypes.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from forge_core.errors import PlanError
from forge_core.protocols.checkpoint import Piece
from forge_core.protocols.model import NamedTensor
from forge_core.specs import Specs
from forge_parallel.model.plan import Plan
from forge_parallel.pipeline.stages import StagedModel, StageSplit, refresh
from forge_parallel.placement.boxes import local_box, owns
from forge_parallel.placement.topology import Topology
from forge_parallel.torch_private import look_at_parameters_again


@dataclass(frozen=True)
class Context:
    """One part of the model on one rank; see `forge_core.protocols.model.Context`."""

    specs: Specs
    topology: Topology
    compute: torch.dtype
    state: torch.dtype
    whole: Specs | None = None
    average: bool = False


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""dtypes by their names in a recipe."""


@contextmanager
def cast_parameters(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Context in which the floating-point parameters of `module` are replaced by casts to `dtype`; tied ones are cast once."""
    casts: dict[int, torch.Tensor] = {}
    swapped: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    try:
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                    if id(parameter) not in casts:
                        casts[id(parameter)] = parameter.to(dtype)
                    swapped.append((owner._parameters, name, parameter))
        for slots, name, parameter in swapped:
            slots[name] = casts[id(parameter)]  # type: ignore[assignment]  # a tensor whose graph leads to `parameter`
        yield
    finally:
        for slots, name, parameter in swapped:
            slots[name] = parameter


Averages = Callable[[], AbstractContextManager[Mapping[str, torch.Tensor]]]
"""See `forge_core.protocols.model.AveragingOptimizer.averaged`."""


@dataclass(frozen=True)
class ParallelModel:
    """A model parallelized over ranks, with all tensors initialized. Create it with `realize`.

    Attributes:
        parts: the modules that this rank runs, in order; more than one only with several pipeline stages per rank.
        contexts: what transforms got for each part.
        specs: specs of the whole model, by global name.
        shapes: global shape of every parameter of the whole model.
        plan: the transforms that were applied, in order.
        topology: this rank's coordinates and process groups.
        compute: dtype of parameters in forward and backward.
        cut: which pipeline stages the parts are; None without a pipeline.
        averages: contexts of optimizers that evaluate other weights than they train; added by `evaluate_with`.
    """

    parts: tuple[nn.Module, ...]
    contexts: tuple[Context, ...]
    specs: Specs
    shapes: Mapping[str, tuple[int, ...]]
    plan: Plan
    topology: Topology
    compute: torch.dtype
    cut: StageSplit | None = None
    averages: list[Averages] = field(default_factory=list)

    @cached_property
    def everything(self) -> Mapping[str, torch.Tensor]:
        """This rank's live parameters and persistent buffers by name, including tied copies on other pipeline stages.

        Collected while every parameter is sharded, because a module may later hold a gathered copy instead.
        """
        self.reshard()
        return dict(named for part in self.parts for named in (*part.named_parameters(), *_persistent_buffers(part)))

    @cached_property
    def _tensors(self) -> tuple[tuple[str, torch.Tensor], ...]:
        copies = self.cut.copies if self.cut is not None else frozenset()
        return tuple((name, tensor) for name, tensor in self.everything.items() if name not in copies)

    @cached_property
    def learns(self) -> frozenset[str]:
        """Names in `everything` that required a gradient when the model was created; a training stage may freeze some of them."""
        return frozenset(name for name, tensor in self.everything.items() if tensor.requires_grad)

    @cached_property
    def owned(self) -> frozenset[str]:
        """Names of the local parameters whose box this rank owns; other ranks may hold copies of them."""
        return frozenset(name for name, parameter in self.parameters_held() if owns(parameter, self.topology))

    @property
    def part(self) -> nn.Module:
        """The whole model on this rank.

        Raises:
            PlanError: the layout has a pipeline, so no rank holds the whole model; use `parts`.
        """
        if self.cut is not None:
            raise PlanError(
                f"layout {self.topology.layout} splits the model into {len(self.cut.placement)} pipeline stages, so no rank "
                "holds the whole model; use .parts, .whole() to generate, or a layout with pp = 1"
            )
        return self.parts[0]

    def whole(self) -> nn.Module:
        """Collective: returns the module that all ranks call with tokens and a cache to generate: the model, or all its
        stages."""
        if self.cut is None:
            return self.parts[0]
        return StagedModel(self.parts, self.cut, self.topology, self.compute, self.specs.needs)

    @property
    def scores(self) -> bool:
        """Whether this rank has the last pipeline stage, which computes losses."""
        return self.cut is None or self.cut.last

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields global name and live tensor of every local parameter and persistent buffer; tied ones once."""
        yield from self._tensors

    def trainable(self) -> list[NamedTensor]:
        """Returns every local parameter that requires a gradient, once."""
        return [item for item in self.trained_sometime() if item.tensor.requires_grad]

    def trained_sometime(self) -> list[NamedTensor]:
        """Like `trainable`, with the parameters that are trained only in other training stages."""
        return [
            NamedTensor(name, tensor, self.specs.tensors[name].group)
            for name, tensor in self.parameters_held()
            if name in self.learns
        ]

    def parameters_held(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields every local parameter, frozen ones included, once."""
        yield from ((name, tensor) for name, tensor in self._tensors if isinstance(tensor, nn.Parameter))

    def reshard(self) -> None:
        """Frees gathered parameters, so that modules hold this rank's shards."""
        for part in self.parts:
            if (copies := getattr(part, "gathered_copies", None)) is not None:
                copies.free()

    def evaluate_with(self, averages: Averages) -> None:
        """Adds a context that swaps in the weights used for evaluation and checkpoints; for optimizers."""
        self.averages.append(averages)

    @contextmanager
    def averaged(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Context in which parameters have the weights to evaluate, save and export. It yields the trained weights by name where
        they differ; these are restored afterwards, bit for bit."""
        with ExitStack() as stack:
            trained = [stack.enter_context(averages()) for averages in self.averages]
            yield {name: tensor for tensors in trained for name, tensor in tensors.items()}

    @contextmanager
    def inference(self, whole_sequences: bool = False) -> Iterator[None]:
        """Context for forwards without backward: evaluation mode, no gradients, compute dtype, and the weights that the optimizer
        evaluates. Collective under a pipeline, because tied copies on other stages get these weights as well.

        With `whole_sequences`, every rank has the whole residual stream, so that forwards may have any length.
        """
        training = [module for part in self.parts for module in part.modules() if module.training]
        with self.averaged():
            try:
                for part in self.parts:
                    part.eval()
                self._whole_sequences(whole_sequences)
                if self.cut is not None:
                    refresh(self.cut, self.everything, self.topology)
                with torch.no_grad(), self.computing():
                    yield
            finally:
                for module in training:
                    module.training = True
                self.leave_inference()

    def leave_inference(self) -> None:
        """Ends what `inference` begins, except for the modes of modules; without effect outside `inference`."""
        self._whole_sequences(False)
        self.reshard()

    def _whole_sequences(self, on: bool) -> None:
        for transform in self.plan.transforms:
            for part in self.parts:
                transform.whole_sequences(part, on)

    def pieces(self) -> Iterator[Piece]:
        """Yields the local boxes of all parameters and buffers as `model/<global name>`, for a checkpoint."""
        for name, tensor in self.tensors():
            yield self.piece(f"model/{name}", tensor)

    def piece(self, name: str, tensor: torch.Tensor) -> Piece:
        """Returns the local box of a tensor of the model or of the optimizer's state."""
        box, frozen = local_box(tensor), isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        return Piece(name, box.shape, box.offset, box.local, owns(tensor, self.topology) and box.local.numel() > 0, frozen)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context for forwards and backwards between which no parameter changes: parameters have the compute dtype, and those
        that several forwards need are gathered once."""
        with ExitStack() as spans:
            for part in self.parts:
                if not isinstance(part, FSDPModule):
                    spans.enter_context(cast_parameters(part, self.compute))
                if (copies := getattr(part, "gathered_copies", None)) is not None:
                    spans.enter_context(copies.kept())
            yield

    def at_step(self, step: int, steps: int) -> None:
        """Notifies parts whose loss changes over a run that optimizer step `step` of `steps` comes next."""
        for part in self.parts:
            if callable(tell := getattr(part, "at_step", None)):
                tell(step, steps)

    def parameter_count(self) -> int:
        """Collective: returns the number of parameters of the whole model, frozen ones included, tied ones once."""
        elements = sum(local_box(p).local.numel() for name, p in self.parameters_held() if name in self.owned)
        count = torch.tensor(elements, dtype=torch.int64, device=self.topology.device)
        return int(self.topology.all_reduce(count))


def _persistent_buffers(part: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    kept = part.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in part.named_buffers() if name in kept)


def freeze(model: ParallelModel, frozen: Collection[str]) -> None:
    """Freezes the parameters in `frozen`; all others that required a gradient when the model was created are trained.

    Modules inside a part whose parameters are all frozen run in evaluation mode, without dropout and without counting tokens per
    expert. The part itself stays in training mode, because collectives must not depend on what a stage contains.

    Args:
        model: between two steps, without gradients.
        frozen: global names of the whole model, the same on every rank. A tied copy is frozen with its original.
    """
    for name in model.learns:
        model.everything[name].requires_grad_(model.specs.ties.get(name, name) not in frozen)
    for part in model.parts:
        part.train()
        rest(part)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                look_at_parameters_again(module)


def rest(module: nn.Module) -> None:
    """Puts the outermost modules inside `module` whose parameters are all frozen into evaluation mode."""
    for child in module.children():
        parameters = list(child.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            child.eval()
        else:
            rest(child)


@contextmanager
def other_weights(model: ParallelModel, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Context in which parameters have `values`, by global name and sharded like the parameters, rounded to their dtype.
    Parameters without a value stay. Afterwards the original weights are restored, bit for bit. This rank's shards need twice the
    memory.

    Only for forwards without backward, and only when no backward is pending.
    """
    model.reshard()  # a gathered copy would still have the old values
    held = [(local_box(tensor).local, local_box(values[name]).local) for name, tensor in model.tensors() if name in values]
    own = [here.clone() for here, _ in held]
    try:
        for here, value in held:
            here.copy_(value)
        yield
    finally:
        model.reshard()
        for (here, _), original in zip(held, own, strict=True):
            here.copy_(original)


MOST_GATHERED = 1 << 22
"""Maximum number of elements that `gathered` sums in one collective. A larger tensor has one of its own."""


def gathered(model: ParallelModel, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Collective: returns full tensors on the host, by global name, of the model's parameters for which a rank passes a tensor.

    `tensors` are this rank's parameters, or their gradients, by global name. Each element comes from the rank that owns it.

    Raises:
        PlanError: an element is owned by no rank, or by several.
    """
    whole: dict[str, torch.Tensor] = {}
    for names in _batches({name: math.prod(shape) for name, shape in model.shapes.items()}):
        sizes = [math.prod(model.shapes[name]) for name in names]
        values = torch.zeros(sum(sizes), dtype=torch.float64, device=model.topology.device)
        owners = torch.zeros_like(values, dtype=torch.int32)
        for name, value, owned in zip(names, values.split(sizes), owners.split(sizes), strict=True):
            tensor = tensors.get(name)
            if tensor is not None and owns(tensor, model.topology):
                box = local_box(tensor)
                box.within(value.view(box.shape)).copy_(box.local)  # a layout may view one dimension as two
                box.within(owned.view(box.shape)).fill_(1)
        values, owners = (model.topology.all_reduce(each).cpu() for each in (values, owners))
        for name, value, owned in zip(names, values.split(sizes), owners.split(sizes), strict=True):
            if owned.numel() and not owned.any():
                continue
            if not (owned == 1).all():
                raise PlanError(f"{name}: elements are owned by {int(owned.min())} to {int(owned.max())} ranks instead of one")
            full = value.view(model.shapes[name])
            whole[name] = full.clone() if len(names) > 1 else full  # a view would keep all tensors of the batch
    return whole


def _batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yields lists of names in order, each with at most `MOST_GATHERED` elements or with a single tensor."""
    names: list[str] = []
    elements = 0
    for name, size in sizes.items():
        if names and elements + size > MOST_GATHERED:
            yield names
            names, elements = [], 0
        names.append(name)
        elements += size
    if names:
        yield names


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Collective: returns one full tensor, detached and copied to the host. All ranks of its mesh call this; shards must be
    even."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone().cpu()
