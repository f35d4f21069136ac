"""A module of another code base, parallelized over ranks: the class that `parallelize` returns, and how it is built."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from forge_core.batch import Batch
from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.protocols.model import LossTerms
from forge_core.specs import Specs
from forge_parallel import accelerator
from forge_parallel.foreign.blocks import Seen, find_blocks, refuse_blocks, refuse_changes, refuse_compiled, watch
from forge_parallel.foreign.description import Example, describe, example_for, guessed, rules_of
from forge_parallel.foreign.pipeline import stage
from forge_parallel.foreign.state import equal, local_values, mark_shares, refuse_pickle
from forge_parallel.foreign.tensor_trace import follow
from forge_parallel.foreign.weights import Skeleton, of_builder, of_module, refuse_narrow
from forge_parallel.model.parallel_model import DTYPES, ParallelModel, gathered
from forge_parallel.model.plan import Order, Plan
from forge_parallel.model.realize import Blueprint, Restore, realize
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import OneForwardOneBackward
from forge_parallel.placement.boxes import local_box
from forge_parallel.placement.topology import Topology
from forge_parallel.step.pipeline import PipelineRunner
from forge_parallel.step.reduce import clip_grad_norm, squared_grad_norm, world_sum
from forge_parallel.step.step import after_backward, before_micro_batch, refresh
from forge_parallel.torch_private import BatchNorm, IncompatibleKeys, mark_as_partial, tree_map_only
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.rules import Rules
from forge_parallel.transforms.tensor.transform import TensorParallel

Inputs = Mapping[str, Any]
"""Keyword arguments of the module for one micro-batch."""

Loss = Callable[[Any, Any], Tensor]
"""(the module's output, the micro-batch or its target) -> sum over its valid tokens, a scalar with its graph."""


class ParallelizedModule(ParallelModel, nn.Module):
    """A parallelized module for a foreign training loop. It behaves like an `nn.Module` wherever that is the same in every
    layout.

    Parameters are this rank's shares (`DTensor`s if split) under the module's own names. `deepcopy` returns another model with
    the same weights, for example for a moving average; hooks registered after `parallelize` are not copied. Collective under a
    pipeline.

    Args:
        model: the parallelized model.
        again: builds another model from the same module and plan, and fills it with the given function.
    """

    __eq__ = nn.Module.__eq__  # type: ignore[assignment]
    __hash__ = nn.Module.__hash__  # type: ignore[assignment]
    __repr__ = nn.Module.__repr__

    def __init__(self, model: ParallelModel, again: Callable[[Restore], ParallelModel]) -> None:
        nn.Module.__init__(self)
        ParallelModel.__init__(self, **{field.name: getattr(model, field.name) for field in fields(ParallelModel)})
        self._again = again
        if self.topology.layout.world > 1:
            mark_shares(parameter for _, parameter in self.named_parameters())
            for part in self.parts:
                part.register_state_dict_post_hook(_mark_state)
        if self.cut is None:
            self._modules["module"] = self.parts[0]
            if self.topology.layout.world > 1:
                self.parts[0].__deepcopy__ = lambda memo: deepcopy(self, memo).module  # type: ignore[assignment]
            return
        self._modules.update({f"stage{stage}": part for stage, part in zip(self.cut.local, self.parts, strict=True)})
        mark_as_partial(
            self.everything.values(),
            PlanError(
                "torch.nn.utils.clip_grad_norm_ sees only one stage's gradients and would clip each pipeline stage by its own "
                "norm; write model.clip_grad_norm_(max_norm)"
            ),
        )

    @property
    def module(self) -> nn.Module:
        """The module that this rank runs; call it and `backward` on its loss as usual.

        Raises:
            PlanError: the layout has a pipeline, so no rank has the whole module.
        """
        return self.part

    @property
    def data_rank(self) -> int:
        """Index of the share of the data that this rank reads; ranks with the same index need the same data."""
        return self.topology.data_rank

    @property
    def data_ranks(self) -> int:
        """Number of shares into which the data is split."""
        return self.topology.data_size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module.

        Raises:
            PlanError: the layout has a pipeline, so no rank has the whole module; train with `step`.
        """
        if self.cut is not None:
            raise PlanError(
                f"layout {self.topology.layout} splits the model into {len(self.cut.placement)} pipeline stages, so no rank can "
                "call it alone; write model.step(batches, loss, tokens), or use a layout with pp = 1"
            )
        return self.parts[0](*args, **kwargs)

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's share of every parameter, frozen ones included, under the module's own names; tied ones once."""
        start, parameters = f"{prefix}." if prefix else "", dict(self.parameters_held())
        yield from ((start + name, parameter) for name, parameter in parameters.items())
        if not remove_duplicate:
            ties = self.specs.ties.items()
            yield from ((start + copy, parameters[original]) for copy, original in ties if original in parameters)

    def named_buffers(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the buffers of this rank's modules under the module's own names."""
        for part in self.parts:
            yield from part.named_buffers(prefix, True, remove_duplicate)

    def apply(self, fn: Callable[[nn.Module], None]) -> "ParallelizedModule":
        """Like `nn.Module.apply`, in a single process.

        Raises:
            PlanError: the layout has several ranks; `fn`, for example an initializer, would see shards instead of whole tensors.
        """
        if self.topology.layout.world > 1:
            raise PlanError(
                "apply: on several ranks, modules hold shards; call apply in the function that builds the module, or, if fn "
                "works on shards, write for part in model.parts: part.apply(fn)"
            )
        return super().apply(fn)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context around the backwards of a loop that accumulates gradients, as `DistributedDataParallel` has it.

        Gradients have the same values as with it, but every backward reduces them into this rank's shares, so that `zero_grad`
        removes all of them at any time. `step` reduces once for several micro-batches.

        Raises:
            PlanError: the layout has a pipeline, which accumulates in `step`.
        """
        if self.cut is not None:
            raise PlanError(
                "no_sync: a pipeline accumulates the gradients of its micro-batches itself; write "
                "model.step(batches, loss, tokens) with all micro-batches of an optimizer step"
            )
        return nullcontext()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses `torch.save(model)` on several ranks."""
        return refuse_pickle() if self.topology.layout.world > 1 else super().__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        """Called for an attribute that this module does not have: says where the original module's attributes are."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            parts = self.__dict__.get("parts", ())
            if not any(hasattr(part, name) for part in parts):
                raise
            if self.cut is None:
                where = f"the parallelized module has it: write model.module.{name}, or pass model.module"
            else:
                where = "in a pipeline each rank has some stages of the module: look at model.parts"
            raise AttributeError(f"{error}; {where}") from None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ParallelizedModule":
        """Called by `.to`, `.cuda`, `.half` and others: does nothing if nothing would change, otherwise refuses."""
        for name, tensor in self.tensors():
            local = local_box(tensor).local
            converted = fn(torch.empty(0, dtype=local.dtype, device=local.device))
            if converted.dtype != local.dtype or converted.device != local.device:
                raise PlanError(
                    f"{name} is {local.dtype} on {local.device} and cannot become {converted.dtype} on {converted.device}: the "
                    "module is already parallelized; use parallelize(..., device=..., state=..., compute=...)"
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelizedModule":
        copy = ParallelizedModule(self._again(self._copy_to), self._again)
        for original, copied in zip(self.modules(), copy.modules(), strict=True):
            copied.training = original.training
        memo[id(self)] = copy
        return copy

    @torch.no_grad()
    def _copy_to(self, other: ParallelModel) -> None:
        """Copies parameters and buffers into a model of the same layout."""
        for name, tensor in other.everything.items():
            if isinstance(tensor, nn.Parameter):
                local_box(tensor).local.copy_(local_box(self.everything[name]).local)
                tensor.requires_grad_(self.everything[name].requires_grad)
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            for here, there in zip(mine.modules(), theirs.modules(), strict=True):
                there._buffers.update({slot: None if b is None else b.clone() for slot, b in here._buffers.items()})

    def clip_grad_norm(self, limit: float) -> Tensor:
        """Collective: scales all gradients by min(1, limit / norm); returns the norm over all parameters and ranks."""
        (square,) = world_sum([squared_grad_norm(self)], self.topology)
        clip_grad_norm(self, square.sqrt(), limit)
        return square.sqrt()

    clip_grad_norm_ = clip_grad_norm
    """The name of FSDP's method in torch."""

    def mean(self, value: Tensor) -> float:
        """Collective: returns the mean over data ranks of a number that each computed from its share of the data, such as a
        loss."""
        (total,) = world_sum([self._counted(value.detach())], self.topology)
        return float(total) / self.data_ranks

    def step(
        self,
        batches: Sequence[Inputs],
        loss: Loss | None = None,
        tokens: Callable[[Inputs], Tensor] | None = None,
        *,
        targets: Sequence[Any] | None = None,
    ) -> Tensor:
        """Collective: runs forward and backward of several micro-batches; gradients are of the mean loss over all ranks' tokens.

        Args:
            batches: keyword arguments of the module, equally many batches on every rank. Under a pipeline the first stage gets
                one argument; others, such as `labels`, go to the last stage and must be in the `example` of `parallelize`.
            loss: (output, batch) -> sum over the batch's valid tokens, a scalar with its graph; `output` is the module's output,
                or under a pipeline its first tensor. By default the module returns its mean loss itself: a scalar, `.loss`,
                `["loss"]`, or the first scalar of a tuple.
            tokens: batch -> number of valid tokens, a scalar; by default every micro-batch counts as one token.
            targets: one per micro-batch, passed to `loss` instead of the batch.

        Returns:
            The mean loss per valid token over all ranks and micro-batches.

        Raises:
            PlanError: the module returns no loss, or the pipeline's example lacks an argument of the batch.
        """
        ones = torch.ones((), dtype=torch.float64, device=self.topology.device)
        counts = [ones if tokens is None else torch.as_tensor(tokens(batch)).to(ones) for batch in batches]
        scoring = _Scoring(batches, counts, loss, self._on_device(batches if targets is None else targets))
        (count,) = world_sum([self._counted(torch.stack(counts).sum(), first=True)], self.topology)
        # Gradients are averaged over data ranks, as loops outside Forge expect; the divisor turns the average into a sum.
        divisor = count.clamp(min=1) / self.data_ranks
        refresh(self)
        run = self._plain if self.cut is None else self._pipelined
        total = torch.zeros((), dtype=torch.float64, device=self.topology.device)
        for term in run(scoring, divisor):
            total += term.detach().double()
        after_backward(self)
        (summed,) = world_sum([self._counted(total)], self.topology)
        return summed / count.clamp(min=1)

    def _plain(self, scoring: "_Scoring", divisor: Tensor) -> Iterator[Tensor]:
        for number, batch in enumerate(scoring.batches):
            before_micro_batch(self, last=number == len(scoring.batches) - 1)
            with self.computing():
                value = scoring.sum(self.module(**batch), number)
                (value / divisor.to(value.dtype)).backward()
            yield value

    def _pipelined(self, scoring: "_Scoring", divisor: Tensor) -> Iterator[Tensor]:
        stage: Any = self.parts[0]
        split = [stage.split_inputs(batch) for batch in scoring.batches]
        scoring.last_stage = self._on_device([others for _, others in split])
        inputs = self._on_device([first for first, _ in split])
        numbered = [Batch(tokens, torch.tensor(number)) for number, tokens in enumerate(inputs)]
        yield from (term.sum for term in PipelineRunner(self, scoring).train(numbered, divisor))

    def _on_device(self, values: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(self.topology.device), values)

    def _counted(self, value: Tensor, first: bool = False) -> Tensor:
        """Returns the value on one of the ranks that read the same data, and 0 on the others. The rank is one with losses, or any
        (`first`)."""
        at = self.topology.coordinates
        is_counted = at["tp"] == 0 and (at["pp"] == 0 if first or self.cut is None else self.scores)
        return value if is_counted else torch.zeros_like(value)

    def state_dict(  # type: ignore[override]
        self, whole: bool = False, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Returns parameters and persistent buffers under the module's own names, tied ones under each name. By default this
        rank's shares (packed experts have a dimension for the packed matrices); with `whole`, which is collective, complete
        copies on the CPU of every rank (for small models and exports). As part of another module: `nn.Module.state_dict` of this
        rank."""
        if destination is not None or prefix:
            destination = {} if destination is None else destination
            return nn.Module.state_dict(self, destination=destination, prefix=prefix, keep_vars=keep_vars)
        tensors = dict(self.tensors())
        if whole:
            dtype = next((tensor.dtype for _, tensor, _ in self.trainable()), torch.float32)
            buffers = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items() if name not in self.shapes}
            state = {name: tensor.to(dtype) for name, tensor in gathered(self, tensors).items()} | self._of_all_stages(buffers)
        else:
            state = tensors if keep_vars else {name: tensor.detach() for name, tensor in tensors.items()}
            if self.topology.layout.world > 1:
                mark_shares(state.values())
        return state | {copy: state[original] for copy, original in self.specs.ties.items() if original in state}

    def _of_all_stages(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.cut is None:
            return buffers
        stages: list[Any] = [None] * self.topology.layout.pp
        dist.all_gather_object(stages, buffers, group=self.topology.group("pp"))
        return {name: tensor for stage in reversed(stages) for name, tensor in stage.items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # type: ignore[override]
        """Copies whole tensors into this rank's shares, by the module's own names. Every rank passes all tensors, or its own
        `state_dict()`, for example after `torch.distributed.checkpoint.load`; a tied one may be under any of its names. Returns
        missing and unexpected names, like `nn.Module.load_state_dict`.

        Raises:
            PlanError: names differ and `strict` is set, shapes differ, tied tensors differ, `assign` is set, or the state has
                shares that another rank saved.
        """
        if assign:
            raise PlanError("load_state_dict: assign=True would replace shards by whole tensors; leave it out")
        state = dict(state_dict)
        for copy, original in self.specs.ties.items():
            if copy in state and not equal(tied := state.pop(copy), state.setdefault(original, tied)):
                raise PlanError(f"load_state_dict: {copy} and {original} are tied, but have different values in the state")
        tensors = dict(self.tensors())
        unknown = sorted(set(state) - set(self.specs.tensors))
        own = set(state) <= set(tensors)  # the other stages' tensors are missing on purpose
        missing = sorted((set(tensors) if own else set(tensors) | set(self.shapes)) - set(state))
        if strict and unknown:
            raise PlanError(f"load_state_dict: the module has no {', '.join(unknown)}; remove them, or set strict=False")
        if strict and missing:
            raise PlanError(f"load_state_dict: the state lacks {', '.join(missing)}; add them, or set strict=False")
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()} | dict(self.shapes)
        for name, shape in shapes.items():
            if name in state and tuple(state[name].shape) != shape:
                there = tuple(state[name].shape)
                raise PlanError(f"load_state_dict: {name} has shape {shape} in the module, but {there} in the state")
        self.reshard()
        for name, tensor in tensors.items():  # in one order on all ranks, because reading a DTensor may be collective
            if name in state:
                local_box(tensor).local.copy_(local_values(name, state[name], tensor))
        return IncompatibleKeys(missing, unknown)


def _mark_state(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Marks shares in a state that torch collected, for example of a module that contains the parallelized one."""
    mark_shares(tensor for name, tensor in state.items() if name.startswith(prefix))


@dataclass
class _Scoring:
    """Computes the losses of a step; as the objective of a pipeline, it gets the index of a micro-batch in place of labels."""

    batches: Sequence[Inputs]
    counts: Sequence[Tensor]
    loss: Loss | None
    targets: Sequence[Any]
    last_stage: Sequence[Mapping[str, Any]] = ()

    def arguments(self, number: Tensor) -> Mapping[str, Any]:
        """Returns the arguments that the module's last stage receives besides the hidden states."""
        return self.last_stage[int(number)]

    def __call__(self, head: Any, hidden: Any, labels: Tensor) -> LossTerms:
        """Called by a pipeline: `hidden` is the module's output, `labels` the index of the micro-batch."""
        if self.loss is not None and not isinstance(hidden, Tensor):
            hidden = hidden[0]
        return LossTerms(self.sum(hidden, int(labels)), labels, {})

    def sum(self, output: Any, number: int) -> Tensor:
        """Returns the loss of a micro-batch, summed over its tokens."""
        if self.loss is not None:
            return self.loss(output, self.targets[number])
        mean = own_loss(output)
        return mean * self.counts[number].to(mean.dtype)


def own_loss(output: Any) -> Tensor:
    """Returns the loss in a module's output.

    Raises:
        PlanError: the output contains no loss.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    values = output if isinstance(output, tuple | list) else (output,)
    for value in (named, *values):
        if isinstance(value, Tensor) and value.dim() == 0:
            return value
    raise PlanError(
        f"step: the module's output ({type(output).__name__}) contains no loss; give loss=, or the labels that the module needs"
    )


def refuse_axes(layout: Layout) -> None:
    """Refuses layouts with an axis that foreign modules do not support.

    Raises:
        PlanError: cp, ep or etp is larger than 1.
    """
    for axis in ("cp", "ep", "etp"):
        if layout.size(axis) > 1:
            raise PlanError(
                f"parallelize: {axis} = {layout.size(axis)} is not supported for foreign modules; use dp, hsdp, tp and pp"
            )


def lay_out(
    source: nn.Module | Callable[[], nn.Module],
    layout: Layout,
    transforms: Iterable[Any] = (),
    *,
    tp_plan: Mapping[str, str] | None = None,
    blocks: Sequence[str] | None = None,
    pipeline: Pipeline | None = None,
    device: torch.device | str | None = None,
    compute: str = "fp32",
    state: str = "fp32",
    seed: int = 0,
    example: Example | None = None,
) -> ParallelizedModule:
    """Collective: parallelizes a module; see `parallelize`.

    Raises:
        PlanError: the module or layout is not supported; the error names the reason.
        LayoutError: the layout's number of ranks differs from the world size.
    """
    refuse_axes(layout)
    place = torch.device(device) if device is not None else accelerator.current()
    topology = Topology.of(layout, place)
    skeleton = of_module(source, place) if isinstance(source, nn.Module) else of_builder(source, seed)
    refuse_compiled(skeleton.module)
    prepare(skeleton.module)
    refuse_narrow(skeleton, DTYPES[compute])
    _lie_in_order(skeleton.module)
    chosen = _transforms(skeleton, layout, transforms, tp_plan, example)
    if layout.data > 1:
        refuse_batch_statistics(skeleton.module)
    recomputes = any(transform.order == Order.RECOMPUTE for transform in chosen)
    seen = watch(skeleton.module, example) if layout.data > 1 or layout.pp > 1 or recomputes else None
    specs = describe(skeleton.module, _blocks(skeleton.module, layout, chosen, blocks, seen))
    if layout.pp > 1:
        on_input(skeleton.module, example, lambda given: stage(skeleton.module, list(specs.blocks), given))
        specs = skeleton.module.specs()  # type: ignore[operator]
        staged = (*specs.blocks, *specs.exit)
        refuse_changes(skeleton.module, staged, seen, "a pipeline stage needs the gradient of its unmodified input")
        pipeline = pipeline or Pipeline(OneForwardOneBackward().build())
    plan = Plan.of(chosen, layout, pipeline)
    hollow = skeleton.hollow()

    def realized(module: nn.Module, fill: Restore) -> ParallelModel:
        model = realize(Blueprint(module, specs), plan, topology, fill, compute, state, average=True)
        if compute != state:
            for part in model.parts:
                if not isinstance(part, FSDPModule):  # FSDP casts parameters itself
                    part.register_forward_pre_hook(partial(_must_be_cast, model.compute))
        return model

    again = _copied(hollow)
    return ParallelizedModule(realized(hollow, skeleton.fill), lambda fill: realized(deepcopy(again()), fill))


def _lie_in_order(module: nn.Module) -> None:
    """Makes parameters contiguous, which FSDP requires. Tied ones stay tied."""
    contiguous: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for slot, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_contiguous():
                part._parameters[slot] = contiguous.setdefault(
                    id(parameter), nn.Parameter(parameter.detach().contiguous(), parameter.requires_grad)
                )


def _blocks(
    module: nn.Module, layout: Layout, transforms: Iterable[Any], given: Sequence[str] | None, seen: Seen | None
) -> Sequence[str]:
    """Returns the blocks in forward order. Without blocks, the whole module is sharded as one unit."""
    sharded = layout.data > 1
    blocks = find_blocks(module, seen) if given is None else given
    refuse_blocks(module, blocks, seen, sharded and layout.pp == 1)
    needing = [transform.name for transform in transforms if transform.order in (Order.RECOMPUTE, Order.COMPILE)]
    needing += ["pp"] if layout.pp > 1 else []
    if needing and not blocks:
        raise PlanError(
            f"parallelize: {needing[0]} needs blocks, but the module has no list of two or more modules of one class; give the "
            "paths of the blocks in forward order, blocks=[...]"
        )
    if sharded:
        refuse_changes(module, blocks, seen, "FSDP2 needs a block's unmodified inputs to detect the end of its backward")
    if any(transform.order == Order.RECOMPUTE for transform in transforms):
        refuse_changes(module, blocks, seen, "recomputation runs a block again with the same inputs", later=True)
    return blocks


def on_input(module: nn.Module, example: Example | None, follows: Callable[[Example], Any]) -> Any:
    """Returns `follows(example)`; without an example, with a guess, which the error mentions if a forward fails."""
    if example is not None:
        return follows(example)
    guess = example_for(module)
    try:
        return follows(guess)
    except PlanError as refusal:
        if refusal.__cause__ is None:
            raise
        raise PlanError(f"{refusal}; {guessed(module, guess)}") from refusal.__cause__


def _copied(hollow: nn.Module) -> Callable[[], nn.Module]:
    """Returns a function that returns a copy of a meta module, made before the module is parallelized and its classes change.

    Raises:
        PlanError: when the function is called, if the module cannot be copied.
    """
    try:
        copy = deepcopy(hollow)
    except Exception as error:  # noqa: BLE001 (a module may hold anything, and only `deepcopy` needs the copy)
        cause = error

        def refuse() -> nn.Module:
            raise PlanError(f"deepcopy: {type(hollow).__name__} cannot be copied ({cause}); build the module again") from cause

        return refuse
    return lambda: copy


def _transforms(
    skeleton: Skeleton, layout: Layout, given: Iterable[Any], tp_plan: Mapping[str, str] | None, example: Example | None
) -> list[Any]:
    built = [one.build() if callable(getattr(one, "build", None)) else one for one in given]
    names = {transform.name for transform in built}
    if layout.dp_shard * layout.dp_replicate > 1 and "shard" not in names:
        built.append(FullyShard())
    if layout.tp > 1 and "tensor" not in names:
        plan = tp_plan if tp_plan is not None else getattr(skeleton.module, "_tp_plan", None)
        if not plan:
            raise PlanError(
                f"parallelize: tp = {layout.tp} needs a plan of the layers to split; give one such as "
                "tp_plan={'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}"
            )
        rules = rules_of(skeleton.module, plan)
        summed = on_input(skeleton.module, example, lambda given: follow(skeleton.module, rules, given, layout.tp))
        rules = replace(rules, summed=rules.summed | summed)
        built.append(_PlannedTensor(sequence_parallel=False, planned=rules))
    return built


@dataclass(frozen=True, kw_only=True)
class _PlannedTensor(TensorParallel):
    """Splits the layers of a `tp_plan`."""

    planned: Rules

    def rules(self, specs: Specs, tp: int) -> Rules:
        return self.planned


def prepare(module: nn.Module) -> None:
    """Switches off the key-value cache of a transformers model, which recomputation would fill twice."""
    config = getattr(module, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]


def refuse_batch_statistics(module: nn.Module) -> None:
    """Refuses running statistics of batches: each data rank would keep those of its own rows, and ranks would diverge."""
    for path, part in module.named_modules():
        if isinstance(part, BatchNorm) and part.track_running_stats and not isinstance(part, nn.SyncBatchNorm):
            raise PlanError(
                f"parallelize: {path} ({type(part).__name__}) keeps running statistics, which would differ between data ranks; "
                "use SyncBatchNorm, track_running_stats=False, another norm, or one data rank"
            )


def _must_be_cast(compute: torch.dtype, module: nn.Module, _: Any) -> None:
    dtypes = {slot.dtype for part in module.modules() for slot in part._parameters.values() if slot is not None}
    if any(dtype.is_floating_point and dtype != compute for dtype in dtypes):
        raise PlanError(
            f"parallelize: on one data rank, parameters are {compute} only inside model.computing(); write "
            "`with model.computing():` around forward and backward, or use model.step"
        )
