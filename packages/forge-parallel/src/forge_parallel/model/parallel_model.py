"""A model that is laid out over ranks, and what is done to it as a whole: compute dtype, freezing, temporary weights, whole
tensors.

`Context` is what a strategy may use when it is applied: the description of the part, the place of this rank, and number
formats.
"""

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
    """One part of the model on one rank, as `forge_core.protocols.topology.Context` describes it."""

    specs: Specs
    topology: Topology
    compute: torch.dtype
    state: torch.dtype
    whole: Specs | None = None
    average: bool = False


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""Names in a recipe."""


@contextmanager
def cast_parameters(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, floating parameters of `module` are their casts to `dtype`; a tied parameter is cast once."""
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
            slots[name] = casts[id(parameter)]  # type: ignore[assignment]  # a plain tensor with a graph to `parameter`
        yield
    finally:
        for slots, name, parameter in swapped:
            slots[name] = parameter


Averages = Callable[[], AbstractContextManager[Mapping[str, torch.Tensor]]]
"""As `forge_core.protocols.model.AveragingOptimizer.averaged`."""


@dataclass(frozen=True)
class ParallelModel:
    """A model laid out over ranks, with every tensor filled. Only `realize` makes one.

    Attributes:
        parts: what this rank runs, in order; one unless a pipeline is cut.
        contexts: what strategies were told about each part.
        specs: how the whole model describes itself, by global name.
        shapes: global shape of every parameter of the whole model.
        plan: what was applied, in order.
        topology: this rank's place.
        compute: dtype of parameters in forward and backward.
        cut: which stages the parts are; None without a pipeline.
        averages: of optimizers that evaluate other weights than they train; they put them there themselves (`evaluate_with`).
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
        """Live parameters and persistent buffers of this rank by name, tied copies on other stages included.

        Collected while every parameter is sharded: later a module may show a gathered copy in its place.
        """
        self.reshard()
        return dict(named for part in self.parts for named in (*part.named_parameters(), *_persistent_buffers(part)))

    @cached_property
    def _tensors(self) -> tuple[tuple[str, torch.Tensor], ...]:
        copies = self.cut.copies if self.cut is not None else frozenset()
        return tuple((name, tensor) for name, tensor in self.everything.items() if name not in copies)

    @cached_property
    def learns(self) -> frozenset[str]:
        """Names in `everything` that took a gradient when the model was made; a stage of training may freeze some for a while."""
        return frozenset(name for name, tensor in self.everything.items() if tensor.requires_grad)

    @property
    def part(self) -> nn.Module:
        """The whole model as this rank runs it.

        Raises:
            PlanError: under a pipeline no rank has a single module; use `parts`.
        """
        if self.cut is not None:
            raise PlanError(
                f"layout {self.topology.layout} cuts the model into {len(self.cut.placement)} pipeline stages, so no rank "
                "holds the whole model; use .parts, .whole() to generate, or a layout with pp = 1"
            )
        return self.parts[0]

    def whole(self) -> nn.Module:
        """Collective: what every rank calls with tokens and a cache to generate: the model, or its stages as one."""
        if self.cut is None:
            return self.parts[0]
        return StagedModel(self.parts, self.cut, self.topology, self.compute, self.specs.needs)

    @property
    def scores(self) -> bool:
        """Whether this rank has the last part, where losses are."""
        return self.cut is None or self.cut.last

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Global name and live tensor of every local parameter and persistent buffer; a tied copy is not repeated."""
        yield from self._tensors

    def trainable(self) -> list[NamedTensor]:
        """Every local parameter that takes a gradient, once."""
        return [item for item in self.trained_sometime() if item.tensor.requires_grad]

    def trained_sometime(self) -> list[NamedTensor]:
        """As `trainable`, with what takes a gradient in other stages of training only."""
        return [
            NamedTensor(name, tensor, self.specs.tensors[name].group)
            for name, tensor in self.parameters_held()
            if name in self.learns
        ]

    def parameters_held(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every local parameter, frozen ones too, once."""
        yield from ((name, tensor) for name, tensor in self._tensors if isinstance(tensor, nn.Parameter))

    def reshard(self) -> None:
        """Frees gathered parameters, so that the modules' parameters are this rank's shards."""
        for part in self.parts:
            if (copies := getattr(part, "gathered_copies", None)) is not None:
                copies.free()

    def evaluate_with(self, averages: Averages) -> None:
        """For optimizers: inference, and what is saved, has the weights that parameters hold inside of this context."""
        self.averages.append(averages)

    @contextmanager
    def averaged(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Inside, parameters hold the weights to evaluate, to save and to export. Gives, by name, those that are trained, where
        they are others; they are back afterwards, bit for bit."""
        with ExitStack() as stack:
            trained = [stack.enter_context(averages()) for averages in self.averages]
            yield {name: tensor for tensors in trained for name, tensor in tensors.items()}

    @contextmanager
    def inference(self, whole_sequences: bool = False) -> Iterator[None]:
        """Spans forwards without backward: evaluation mode, no gradients, compute precision, nothing left behind; with the
        weights that the optimizer evaluates. Collective under a pipeline: tied copies on other stages take these, too.

        With `whole_sequences` every rank has the whole residual stream, so that forwards may have any length.
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
        """Ends what `inference` begins besides modes of modules; does nothing outside of it."""
        self._whole_sequences(False)
        self.reshard()

    def _whole_sequences(self, on: bool) -> None:
        for transform in self.plan.transforms:
            for part in self.parts:
                transform.whole_sequences(part, on)

    def pieces(self) -> Iterator[Piece]:
        """The local boxes of all parameters and buffers under `model/<global name>`, for a checkpoint."""
        for name, tensor in self.tensors():
            yield self.piece(f"model/{name}", tensor)

    def piece(self, name: str, tensor: torch.Tensor) -> Piece:
        """The local box of a tensor of the model or of its optimizer's state."""
        box, frozen = local_box(tensor), isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        return Piece(name, box.shape, box.offset, box.local, owns(tensor, self.topology) and box.local.numel() > 0, frozen)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Spans forwards and backwards in which no parameter changes: they have the compute dtype inside, and what several
        forwards need is gathered once."""
        with ExitStack() as spans:
            for part in self.parts:
                if not isinstance(part, FSDPModule):
                    spans.enter_context(cast_parameters(part, self.compute))
                if (copies := getattr(part, "gathered_copies", None)) is not None:
                    spans.enter_context(copies.kept())
            yield

    def at_step(self, step: int, steps: int) -> None:
        """Tells parts whose loss changes over a run that optimizer step `step` of `steps` comes next."""
        for part in self.parts:
            if callable(tell := getattr(part, "at_step", None)):
                tell(step, steps)

    def parameter_count(self) -> int:
        """Collective: parameters of the whole model, frozen ones too, counted once over all ranks and ties."""
        owned = sum(local_box(p).local.numel() for _, p in self.parameters_held() if owns(p, self.topology))
        count = torch.tensor(owned, dtype=torch.int64, device=self.topology.device)
        return int(self.topology.all_reduce(count))


def _persistent_buffers(part: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    kept = part.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in part.named_buffers() if name in kept)


def freeze(model: ParallelModel, frozen: Collection[str]) -> None:
    """Of the parameters that took a gradient when the model was made, those in `frozen` take none from here on; all others do.

    Modules inside of a part that have nothing left to learn run as in evaluation: without dropout, and without counting what
    balances experts. The part itself does not, since what ranks exchange may not depend on what a stage has.

    Args:
        model: between two steps; it has no gradients.
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
    """Puts the outermost modules inside of `module` that have parameters, and none that takes a gradient, in evaluation mode."""
    for child in module.children():
        parameters = list(child.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            child.eval()
        else:
            rest(child)


@contextmanager
def other_weights(model: ParallelModel, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, parameters have `values`, by global name and laid out as they are, rounded to their dtype; afterwards their own,
    bit by bit. What has no value keeps its own. This rank holds its share of the parameters twice meanwhile.

    For forwards without backward: nothing of an earlier forward may be pending.
    """
    model.reshard()  # a gathered copy would still have the other values
    held = [(local_box(tensor).local, local_box(values[name]).local) for name, tensor in model.tensors() if name in values]
    own = [here.clone() for here, _ in held]
    try:
        for here, value in held:
            here.copy_(value)
        yield
    finally:
        model.reshard()
        for (here, _), kept in zip(held, own, strict=True):
            here.copy_(kept)


def gathered(model: ParallelModel, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Collective: global name -> whole tensor on the host, for every parameter of the model that some rank brings.

    `tensors` are this rank's parameters, or their gradients, by global name; all ranks enter. Each element comes from the
    one rank that owns it.

    Raises:
        PlanError: an element is owned by no rank, or by several.
    """
    whole: dict[str, torch.Tensor] = {}
    for name, shape in model.shapes.items():
        mine = tensors.get(name)
        value = torch.zeros(shape, dtype=torch.float64, device=model.topology.device)
        owned = torch.zeros_like(value, dtype=torch.int32)
        if mine is not None and owns(mine, model.topology):
            box = local_box(mine)
            box.within(value.view(box.shape)).copy_(box.local)  # a layout may see two dimensions in one
            box.within(owned.view(box.shape)).fill_(1)
        model.topology.all_reduce(owned)
        if owned.numel() and not owned.any():
            continue
        if not (owned == 1).all():
            raise PlanError(f"{name}: elements are owned by {int(owned.min())} to {int(owned.max())} ranks instead of one")
        whole[name] = model.topology.all_reduce(value).cpu()
    return whole


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Collective: the whole of one tensor, detached and copied, on the host. Ranks of its mesh enter; cuts must be even."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone().cpu()
