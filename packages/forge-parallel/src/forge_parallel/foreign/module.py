"""A module of another code base, laid out over ranks: what `parallelize` returns, and how a module becomes one."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from forge_core.batch import Batch
from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.protocols.model import LossTerms
from forge_core.specs import Specs
from forge_parallel import accelerator
from forge_parallel.foreign.blocks import Seen, find_blocks, refuse_blocks, refuse_changes, watch
from forge_parallel.foreign.description import Example, describe, example_for, guessed, rules_of
from forge_parallel.foreign.pipeline import stage
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
"""Keyword arguments of the module, for one micro-batch."""

Loss = Callable[[Any, Any], Tensor]
"""(the module's output, the micro-batch or its target) -> sum over its valid tokens, a scalar with its graph."""


class ParallelizedModule(ParallelModel, nn.Module):
    """A laid out module for a loop that is not ours, used as a module wherever that means one thing in every layout.

    Parameters are this rank's shares (`DTensor`s where something is cut) under the module's own names. `deepcopy` gives another
    model with the same weights, such as for an average of them; hooks that were registered after the layout are not copied.
    Collective under a pipeline.

    Args:
        model: what was laid out.
        again: makes another one like it from the same module and plan, filled by the function that it is given.
    """

    __eq__ = nn.Module.__eq__  # type: ignore[assignment]
    __hash__ = nn.Module.__hash__  # type: ignore[assignment]
    __repr__ = nn.Module.__repr__

    def __init__(self, model: ParallelModel, again: Callable[[Restore], ParallelModel]) -> None:
        nn.Module.__init__(self)
        ParallelModel.__init__(self, **{field.name: getattr(model, field.name) for field in fields(ParallelModel)})
        self._again = again
        if self.cut is None:
            self._modules["module"] = self.parts[0]
            if self.topology.layout.world > 1:
                self.parts[0].__deepcopy__ = lambda memo: deepcopy(self, memo).module  # type: ignore[assignment]
            return
        self._modules.update({f"stage{stage}": part for stage, part in zip(self.cut.local, self.parts, strict=True)})
        mark_as_partial(
            self.everything.values(),
            PlanError(
                "torch.nn.utils.clip_grad_norm_ sees the gradients of one pipeline stage, and would clip each stage by its own "
                "norm; write model.clip_grad_norm_(max_norm)"
            ),
        )

    @property
    def module(self) -> nn.Module:
        """The module as this rank runs it; call it, and its loss's `backward`, as ever.

        Raises:
            PlanError: under a pipeline no rank has a single module.
        """
        return self.part

    @property
    def data_rank(self) -> int:
        """Which share of the data this rank has to read: ranks with the same one need the same data."""
        return self.topology.data_rank

    @property
    def data_ranks(self) -> int:
        """Into how many shares the data is cut."""
        return self.topology.data_size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module.

        Raises:
            PlanError: under a pipeline no rank has a single module; train with `step`.
        """
        if self.cut is not None:
            raise PlanError(
                f"layout {self.topology.layout} cuts the model into {len(self.cut.placement)} pipeline stages, which no rank "
                "calls alone; write model.step(batches, loss, tokens), or use a layout with pp = 1"
            )
        return self.parts[0](*args, **kwargs)

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's share of every parameter, frozen ones too, under the module's own names; a tied one once."""
        start, mine = f"{prefix}." if prefix else "", dict(self.parameters_held())
        yield from ((start + name, parameter) for name, parameter in mine.items())
        if not remove_duplicate:
            ties = self.specs.ties.items()
            yield from ((start + copy, mine[original]) for copy, original in ties if original in mine)

    def named_buffers(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers of this rank's modules under the module's own names."""
        for part in self.parts:
            yield from part.named_buffers(prefix, True, remove_duplicate)

    def apply(self, fn: Callable[[nn.Module], None]) -> "ParallelizedModule":
        """As `nn.Module.apply`, on one rank.

        Raises:
            PlanError: modules hold shards, which a function for whole modules, such as an initializer, does not know.
        """
        if self.topology.layout.world > 1:
            raise PlanError(
                "apply: modules hold this rank's shards; do so in the function that builds the module, or, where shards do not "
                "matter, for part in model.parts: part.apply(fn)"
            )
        return super().apply(fn)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ParallelizedModule":
        """What `.to`, `.cuda`, `.half` and their like call: nothing to do, or refused."""
        for name, tensor in self.tensors():
            held = local_box(tensor).local
            found = fn(torch.empty(0, dtype=held.dtype, device=held.device))
            if found.dtype != held.dtype or found.device != held.device:
                raise PlanError(
                    f"{name} is {held.dtype} on {held.device} and cannot become {found.dtype} on {found.device}: the module is "
                    "laid out, and may have optimizers; write parallelize(..., device=..., state=..., compute=...)"
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelizedModule":
        copy = ParallelizedModule(self._again(self._copy_to), self._again)
        for mine, theirs in zip(self.modules(), copy.modules(), strict=True):
            theirs.training = mine.training
        memo[id(self)] = copy
        return copy

    @torch.no_grad()
    def _copy_to(self, other: ParallelModel) -> None:
        """Fills a model of the same layout with this one's parameters and buffers."""
        for name, tensor in other.everything.items():
            if isinstance(tensor, nn.Parameter):
                local_box(tensor).local.copy_(local_box(self.everything[name]).local)
                tensor.requires_grad_(self.everything[name].requires_grad)
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            for here, there in zip(mine.modules(), theirs.modules(), strict=True):
                there._buffers.update({slot: None if b is None else b.clone() for slot, b in here._buffers.items()})

    def clip_grad_norm(self, limit: float) -> Tensor:
        """Scales all gradients by min(1, limit / norm); returns the norm over all parameters and ranks, equal on all of them."""
        (square,) = world_sum([squared_grad_norm(self)], self.topology)
        clip_grad_norm(self, square.sqrt(), limit)
        return square.sqrt()

    clip_grad_norm_ = clip_grad_norm
    """As torch's FSDP calls it."""

    def mean(self, value: Tensor) -> float:
        """The mean over data ranks of a number that each has from its own share of the data, such as a loss."""
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
        """Forward and backward of several micro-batches; the gradient is that of the mean over the tokens of all ranks.

        Args:
            batches: keyword arguments of the module, as many on every rank. Under a pipeline the first stage gets one of them;
                others, such as `labels`, go to the last stage, and have to be in `parallelize`'s `example`.
            loss: (output, batch) -> sum over the batch's valid tokens, a scalar with its graph; `output` is the module's, or
                under a pipeline its first tensor. By default the module returns its own mean loss: a scalar, `.loss`, `["loss"]`,
                or the first scalar of a tuple.
            tokens: batch -> number of its valid tokens, a scalar; by default every micro-batch counts as one.
            targets: one for each micro-batch, which `loss` gets in its place.

        Returns:
            The mean loss per valid token over all ranks and micro-batches.

        Raises:
            PlanError: the module returns no loss, or a pipeline does not know an argument of the module.
        """
        ones = torch.ones((), dtype=torch.float64, device=self.topology.device)
        counts = [ones if tokens is None else torch.as_tensor(tokens(batch)).to(ones) for batch in batches]
        scoring = _Scoring(batches, counts, loss, self._on_device(batches if targets is None else targets))
        (count,) = world_sum([self._counted(torch.stack(counts).sum(), first=True)], self.topology)
        # Gradients are averaged over data ranks, as loops outside of Forge expect; here they are to be summed.
        divisor = count.clamp(min=1) / self.data_ranks
        refresh(self)
        run = self._plain if self.cut is None else self._pipelined
        total = torch.zeros((), dtype=torch.float64, device=self.topology.device)
        for term in run(scoring, divisor):
            total += term.detach().double()
        after_backward(self)
        (whole,) = world_sum([self._counted(total)], self.topology)
        return whole / count.clamp(min=1)

    def _plain(self, scoring: "_Scoring", divisor: Tensor) -> Iterator[Tensor]:
        for number, batch in enumerate(scoring.batches):
            before_micro_batch(self, last=number == len(scoring.batches) - 1)
            with self.computing():
                found = scoring.sum(self.module(**batch), number)
                (found / divisor.to(found.dtype)).backward()
            yield found

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
        """One of the ranks that read the same data speaks for all: for losses one that has them, else (`first`) any."""
        at = self.topology.coordinates
        speaks = at["tp"] == 0 and (at["pp"] == 0 if first or self.cut is None else self.scores)
        return value if speaks else torch.zeros_like(value)

    def state_dict(  # type: ignore[override]
        self, whole: bool = False, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Parameters and persistent buffers under the module's own names, a tied one under each of its names: this rank's (packed
        experts with a dimension for what is packed), or with `whole` complete copies on the host of every rank (small models,
        exports; collective). As a part of another module, what `nn.Module` gives for the module of this rank."""
        if destination is not None or prefix:
            given = {} if destination is None else destination
            return nn.Module.state_dict(self, destination=given, prefix=prefix, keep_vars=keep_vars)
        mine = dict(self.tensors())
        if whole:
            dtype = next((tensor.dtype for _, tensor, _ in self.trainable()), torch.float32)
            buffers = {name: tensor.detach().cpu().clone() for name, tensor in mine.items() if name not in self.shapes}
            found = {name: tensor.to(dtype) for name, tensor in gathered(self, mine).items()} | self._of_all_stages(buffers)
        else:
            found = mine if keep_vars else {name: tensor.detach() for name, tensor in mine.items()}
        return found | {copy: found[original] for copy, original in self.specs.ties.items() if original in found}

    def _of_all_stages(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.cut is None:
            return buffers
        found: list[Any] = [None] * self.topology.layout.pp
        dist.all_gather_object(found, buffers, group=self.topology.group("pp"))
        return {name: tensor for stage in reversed(found) for name, tensor in stage.items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # type: ignore[override]
        """Takes whole tensors under the module's own names; every rank brings all of them. A tied one may be there under one of
        its names. Returns the missing and the unknown names, as `nn.Module` does.

        Raises:
            PlanError: names differ and `strict`, shapes differ, tied tensors differ, or `assign`.
        """
        if assign:
            raise PlanError("load_state_dict: assign = True would replace shards by whole tensors; leave it out")
        state = dict(state_dict)
        for copy, original in self.specs.ties.items():
            if copy in state and not torch.equal(tied := state.pop(copy), state.setdefault(original, tied)):
                raise PlanError(f"load_state_dict: {copy} and {original} are one parameter, and the state has two values for it")
        mine = dict(self.tensors())
        unknown = sorted(set(state) - set(self.specs.tensors))
        missing = sorted((set(mine) | set(self.shapes)) - set(state))
        if strict and unknown:
            raise PlanError(f"load_state_dict: the module has no {', '.join(unknown)}")
        if strict and missing:
            raise PlanError(f"load_state_dict: the state lacks {', '.join(missing)}")
        shapes = {name: tuple(tensor.shape) for name, tensor in mine.items()} | dict(self.shapes)
        for name, shape in shapes.items():
            if name in state and tuple(state[name].shape) != shape:
                raise PlanError(f"load_state_dict: {name} is {shape} here and {tuple(state[name].shape)} there")
        self.reshard()
        for name in mine.keys() & state.keys():
            box = local_box(mine[name])
            value = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
            box.local.copy_(box.within(value.reshape(box.shape)))
        return IncompatibleKeys(missing, unknown)


@dataclass
class _Scoring:
    """What a step makes of the module's outputs; the objective of a pipeline, for which the number of a batch stands for it."""

    batches: Sequence[Inputs]
    counts: Sequence[Tensor]
    loss: Loss | None
    targets: Sequence[Any]
    last_stage: Sequence[Mapping[str, Any]] = ()

    def arguments(self, number: Tensor) -> Mapping[str, Any]:
        """Of the module, that the last stage gets besides the hidden states."""
        return self.last_stage[int(number)]

    def __call__(self, head: Any, hidden: Any, labels: Tensor) -> LossTerms:
        """By a pipeline's names for the module's output and the number of the batch."""
        if self.loss is not None and not isinstance(hidden, Tensor):
            hidden = hidden[0]
        return LossTerms(self.sum(hidden, int(labels)), labels, {})

    def sum(self, output: Any, number: int) -> Tensor:
        """The loss of a micro-batch, summed over its tokens."""
        if self.loss is not None:
            return self.loss(output, self.targets[number])
        found = own_loss(output)
        return found * self.counts[number].to(found.dtype)


def own_loss(output: Any) -> Tensor:
    """The loss in a module's output.

    Raises:
        PlanError: there is none.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    of = output if isinstance(output, tuple | list) else (output,)
    for found in (named, *of):
        if isinstance(found, Tensor) and found.dim() == 0:
            return found
    raise PlanError(
        f"step: the module returned a {type(output).__name__} without a loss; give loss=, or the labels that it needs"
    )


def refuse_axes(layout: Layout) -> None:
    """
    Raises:
        PlanError: the layout has an axis along which foreign modules cannot be laid out.
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
    """Collective: see `parallelize`.

    Raises:
        PlanError: what cannot be laid out, by name.
        LayoutError: the layout has another number of ranks than are running.
    """
    refuse_axes(layout)
    place = torch.device(device) if device is not None else accelerator.current()
    topology = Topology.of(layout, place)
    skeleton = of_module(source, place) if isinstance(source, nn.Module) else of_builder(source, seed)
    prepare(skeleton.module)
    refuse_narrow(skeleton, DTYPES[compute])
    _lie_in_order(skeleton.module)
    chosen = _transforms(skeleton, layout, transforms, tp_plan, example)
    if layout.data > 1:
        refuse_batch_statistics(skeleton.module)
    recomputes = any(one.phase == Order.RECOMPUTE for one in chosen)
    seen = watch(skeleton.module, example) if layout.data > 1 or layout.pp > 1 or recomputes else None
    specs = describe(skeleton.module, _blocks(skeleton.module, layout, chosen, blocks, seen))
    if layout.pp > 1:
        on_input(skeleton.module, example, lambda given: stage(skeleton.module, list(specs.blocks), given))
        specs = skeleton.module.specs()  # type: ignore[operator]
        staged = (*specs.blocks, *specs.exit)
        refuse_changes(skeleton.module, staged, seen, "a stage of a pipeline takes the gradient of what it is handed")
        pipeline = pipeline or Pipeline(OneForwardOneBackward().build())
    plan = Plan.of(chosen, layout, pipeline)
    hollow = skeleton.hollow()

    def realized(module: nn.Module, fill: Restore) -> ParallelModel:
        model = realize(Blueprint(module, specs), plan, topology, fill, compute, state, average=True)
        if compute != state:
            for part in model.parts:
                if not isinstance(part, FSDPModule):  # which casts by itself
                    part.register_forward_pre_hook(partial(_must_be_cast, model.compute))
        return model

    again = _copied(hollow)
    return ParallelizedModule(realized(hollow, skeleton.fill), lambda fill: realized(deepcopy(again()), fill))


def _lie_in_order(module: nn.Module) -> None:
    """FSDP takes parameters only whose elements lie in memory in the order of their indices. Tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for slot, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_contiguous():
                part._parameters[slot] = made.setdefault(
                    id(parameter), nn.Parameter(parameter.detach().contiguous(), parameter.requires_grad)
                )


def _blocks(
    module: nn.Module, layout: Layout, transforms: Iterable[Any], given: Sequence[str] | None, seen: Seen | None
) -> Sequence[str]:
    """The blocks in the order of their use. Without any, the whole module is sharded as one."""
    sharded = layout.data > 1
    blocks = find_blocks(module, seen) if given is None else given
    refuse_blocks(module, blocks, seen, sharded and layout.pp == 1)
    needing = [one.name for one in transforms if one.phase in (Order.RECOMPUTE, Order.COMPILE)]
    needing += ["pp"] if layout.pp > 1 else []
    if needing and not blocks:
        raise PlanError(
            f"parallelize: {needing[0]} works on blocks, and there is no list of two or more modules of one class to take as "
            "such; give their paths in the order of their use, blocks=[...]"
        )
    if sharded:
        refuse_changes(module, blocks, seen, "FSDP2 watches a block's inputs for the end of its backward")
    if any(one.phase == Order.RECOMPUTE for one in transforms):
        refuse_changes(module, blocks, seen, "recomputation calls a block again with its inputs", later=True)
    return blocks


def on_input(module: nn.Module, example: Example | None, follows: Callable[[Example], Any]) -> Any:
    """What `follows` gives for the example, or for a guess: then a refusal says so, if a forward failed."""
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
    """Gives a copy of a module that is about to be laid out: it has no memory now, and its classes are its own.

    Raises:
        PlanError: when it is asked for a module that cannot be copied.
    """
    try:
        copy = deepcopy(hollow)
    except Exception as error:  # noqa: BLE001 (whatever a module holds, and only a copy needs it)
        cause = error

        def refuse() -> nn.Module:
            raise PlanError(f"deepcopy: {type(hollow).__name__} cannot be copied: {cause}") from cause

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
                f"parallelize: tp = {layout.tp} needs a plan of what to cut, such as "
                "tp_plan={'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}"
            )
        rules = rules_of(skeleton.module, plan)
        found = on_input(skeleton.module, example, lambda given: follow(skeleton.module, rules, given, layout.tp))
        rules = replace(rules, summed=rules.summed | found)
        built.append(_PlannedTensor(sequence_parallel=False, planned=rules))
    return built


@dataclass(frozen=True, kw_only=True)
class _PlannedTensor(TensorParallel):
    """Cuts what a `tp_plan` says."""

    planned: Rules

    def rules(self, specs: Specs, tp: int) -> Rules:
        return self.planned


def prepare(module: nn.Module) -> None:
    """A transformers model in training must not fill its key-value cache: recomputation would fill it twice."""
    config = getattr(module, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]


def refuse_batch_statistics(module: nn.Module) -> None:
    """Data ranks would each keep the statistics of their rows, and go apart."""
    for path, part in module.named_modules():
        if isinstance(part, BatchNorm) and part.track_running_stats and not isinstance(part, nn.SyncBatchNorm):
            raise PlanError(
                f"parallelize: {path} ({type(part).__name__}) keeps running statistics, and each data rank would keep those of "
                "its rows only; use SyncBatchNorm, track_running_stats=False or another norm, or one data rank"
            )


def _must_be_cast(compute: torch.dtype, module: nn.Module, _: Any) -> None:
    held = {slot.dtype for part in module.modules() for slot in part._parameters.values() if slot is not None}
    if any(dtype.is_floating_point and dtype != compute for dtype in held):
        raise PlanError(
            f"parallelize: on one data rank parameters are cast to {compute} for the span of a forward and its backward; write "
            "`with model.computing():` around both, or use model.step"
        )
