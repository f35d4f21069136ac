"""One call that lays out somebody else's module: the short road for code bases that have a loop of their own.

    model = parallelize(lambda: MyModel(config), "dp2tp2", [Recompute(policy="full")], tp_plan={"blocks.*.up": "colwise", ...})
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs in loader:                        # other data on each of `model.data_ranks` ranks
        loss_of(model.module(**inputs)).backward()
        model.clip_grad_norm(1.0)
        optimizer.step(); optimizer.zero_grad()

Strategies are applied in the order of their phases whatever the order given, as everywhere in Forge.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from forge_core.batch import Batch
from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.protocols.model import LossTerms
from forge_core.specs import Specs
from forge_parallel.build.parallel_model import ParallelModel
from forge_parallel.build.plan import Plan
from forge_parallel.build.realize import Blueprint, realize
from forge_parallel.components.pipeline import OneForwardOneBackward
from forge_parallel.foreign.describe import describe
from forge_parallel.foreign.example import Example, example_for
from forge_parallel.foreign.following import follow
from forge_parallel.foreign.staged import stage
from forge_parallel.foreign.styles import rules_of
from forge_parallel.foreign.weights import Skeleton, of_builder, of_module
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.runner import Runner
from forge_parallel.placement.boxes import local_box
from forge_parallel.placement.topology import Topology
from forge_parallel.step.clipping import clip
from forge_parallel.step.reduce import squared_norm, world_sum
from forge_parallel.tensor.rules import Rules
from forge_parallel.tensor.transform import Tensor as TensorParallel
from forge_parallel.transforms.shard import Shard
from forge_parallel.verify.gather import gathered

Loss = Callable[[Any, Mapping[str, Tensor]], Tensor]
"""(the module's output, the batch) -> sum over the batch's valid tokens."""


@dataclass(frozen=True)
class Parallelized(ParallelModel):
    """A laid out module for a loop that is not ours."""

    @property
    def module(self) -> nn.Module:
        """The module as this rank runs it; call it, and its loss's `backward`, as ever.

        Raises:
            PlanError: under a pipeline there is no single module.
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

    def parameters(self) -> Iterator[nn.Parameter]:
        """What an optimizer takes: this rank's share of every trainable parameter, a tied one once."""
        yield from (tensor for _, tensor, _ in self.trainable())  # type: ignore[misc]

    def clip_grad_norm(self, limit: float) -> Tensor:
        """Scales all gradients by min(1, limit / norm); returns the norm over all parameters and ranks, equal on all of them."""
        (square,) = world_sum([squared_norm(self)], self.topology)
        clip(self, square.sqrt(), limit)
        return square.sqrt()

    def mean(self, value: Tensor) -> float:
        """The mean over data ranks of a number that each has from its own share of the data, such as a loss."""
        (total,) = world_sum([self._counted(value.detach())], self.topology)
        return float(total) / self.data_ranks

    def step(
        self,
        batches: Sequence[Mapping[str, Tensor]],
        loss: Loss,
        tokens: Callable[[Mapping[str, Tensor]], Tensor],
    ) -> Tensor:
        """Forward and backward of several micro-batches; the gradient is that of the mean over the tokens of all ranks.

        Args:
            batches: keyword arguments of the module, as many on every rank; a single one under a pipeline.
            loss: (output, batch) -> sum over the batch's valid tokens, a scalar with its graph; `output` is the module's, or
                under a pipeline its first tensor.
            tokens: batch -> number of its valid tokens, a scalar.

        Returns:
            The mean loss per valid token over all ranks and micro-batches.
        """
        counts = torch.stack([tokens(batch).to(self.topology.device, torch.float64) for batch in batches]).sum()
        (count,) = world_sum([self._counted(counts, first=True)], self.topology)
        # Gradients are averaged over data ranks, as loops outside of Forge expect; here they are to be summed.
        divisor = count.clamp(min=1) / self.data_ranks
        self.refresh()
        run = self._plain if self.cut is None else self._pipelined
        total = torch.zeros((), dtype=torch.float64, device=self.topology.device)
        for term in run(batches, loss, divisor):
            total += term.detach().double()
        self.after_backward()
        (whole,) = world_sum([self._counted(total)], self.topology)
        return whole / count.clamp(min=1)

    def _plain(self, batches: Sequence[Mapping[str, Tensor]], loss: Loss, divisor: Tensor) -> Iterator[Tensor]:
        for index, batch in enumerate(batches):
            self.before_micro_batch(last=index == len(batches) - 1)
            with self.computing():
                found = loss(self.module(**batch), batch)
                (found / divisor.to(found.dtype)).backward()
            yield found

    def _pipelined(self, batches: Sequence[Mapping[str, Tensor]], loss: Loss, divisor: Tensor) -> Iterator[Tensor]:
        def objective(head: Any, hidden: Tensor, labels: Tensor) -> LossTerms:  # noqa: ARG001
            """A pipeline's names for the output and the batch's number."""
            return LossTerms(loss(hidden, batches[int(labels)]), labels, {})

        inputs = [self._only_input(batch) for batch in batches]
        numbered = [Batch(tokens, torch.tensor(number)) for number, tokens in enumerate(inputs)]
        yield from (term.sum for term in Runner(self, objective).train(numbered, divisor))

    def _only_input(self, batch: Mapping[str, Tensor]) -> Tensor:
        if len(batch) != 1:
            raise PlanError(
                f"a pipeline hands one input through foreign modules, but a batch has {', '.join(sorted(batch))}; give what the "
                "loss needs by closure, or set pp to 1"
            )
        return next(iter(batch.values())).to(self.topology.device)

    def _counted(self, value: Tensor, first: bool = False) -> Tensor:
        """One of the ranks that read the same data speaks for all: for losses one that has them, else (`first`) any."""
        at = self.topology.coordinates
        speaks = at["tp"] == 0 and (at["pp"] == 0 if first or self.cut is None else self.scores)
        return value if speaks else torch.zeros_like(value)

    def state_dict(self, whole: bool = False) -> dict[str, Tensor]:
        """Parameters and persistent buffers under the module's own names: this rank's (packed experts with a dimension for what
        is packed), or with `whole` complete copies on the host of every rank (small models, exports)."""
        mine = dict(self.tensors())
        if not whole:
            return mine
        full = gathered(self, mine)
        dtype = next((tensor.dtype for _, tensor, _ in self.trainable()), torch.float32)
        buffers = {name: tensor.detach().cpu() for name, tensor in mine.items() if name not in self.shapes}
        return {name: tensor.to(dtype) for name, tensor in full.items()} | buffers

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes whole tensors under the module's own names; every rank brings all of them.

        Raises:
            PlanError: names or shapes differ.
        """
        mine = dict(self.tensors())
        known = set(self.shapes) | set(mine)
        if unknown := sorted(set(state) - known - set(self.specs.ties)):
            raise PlanError(f"load_state_dict: the module has no {', '.join(unknown)}")
        if missing := sorted(set(mine) - set(state)):
            raise PlanError(f"load_state_dict: the state lacks {', '.join(missing)}")
        for name, tensor in mine.items():
            shape = self.shapes.get(name, tuple(tensor.shape))
            if tuple(state[name].shape) != shape:
                raise PlanError(f"load_state_dict: {name} is {shape} here and {tuple(state[name].shape)} there")
            box = local_box(tensor)
            box.local.copy_(box.within(state[name].reshape(box.shape)))


def parallelize(
    source: nn.Module | Callable[[], nn.Module],
    layout: str | Layout,
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
    verify: bool = False,
) -> Parallelized:
    """Lays out a module over the ranks of the running process group.

    Args:
        source: a module, whose weights all ranks hold alike and which is consumed; or a function that builds one, whose
            parameters then exist whole one at a time: what its constructors do to them is recorded and replayed.
        layout: such as "dp2tp2" or "hsdp2x4"; see `forge_core.layout.Layout.parse`.
        transforms: components or transforms beyond those that the axes ask for, such as `Recompute()` and `Compile()`.
        tp_plan: patterns of module paths -> styles; a transformers model brings its own.
        blocks: paths of the repeated blocks in forward order; found when there is one list of modules of one class.
        pipeline: schedule and split where the layout has pp; by default 1f1b, balanced by parameters. Train with `.step` then.
        device: of this rank; by default the current CUDA device, or the CPU.
        compute: `bf16`, `fp32` or `fp64`, of forward and backward. With `bf16` on one data rank, span forward and backward
            by `with model.computing():`.
        state: `fp32`, `fp64` or `bf16`, of parameters, gradients and optimizer state.
        seed: of a builder's random numbers.
        example: what the module is called with, a tensor or its keyword arguments, a few rows; needed with tp or pp unless the
            module begins with an embedding or a linear layer that is its only input.
        verify: first compare a probe step with one process, as `forge_parallel.verify_layout` does. Do so once for every module.

    Raises:
        PlanError: what cannot be laid out, by name.
        LayoutError: the layout has another number of ranks than are running.
    """
    if isinstance(layout, str):
        layout = Layout.parse(layout)
    for axis in ("cp", "ep", "etp"):
        if layout.size(axis) > 1:
            raise PlanError(
                f"parallelize: {axis} = {layout.size(axis)} is not offered for foreign modules; use dp, hsdp, tp and pp"
            )
    if verify:
        from forge_parallel.foreign.verification import verify_layout

        options = {"tp_plan": tp_plan, "blocks": blocks, "pipeline": pipeline, "device": device}
        transforms = list(transforms)
        verify_layout(source, layout, transforms, **options, seed=seed, example=example)
    place = torch.device(device) if device is not None else _default_device()
    topology = Topology.of(layout, place)
    skeleton = of_module(source) if isinstance(source, nn.Module) else of_builder(source, seed)
    prepare(skeleton.module)
    chosen = _transforms(skeleton, layout, transforms, tp_plan, example)
    if layout.data > 1:
        refuse_batch_statistics(skeleton.module)
    specs = describe(skeleton.module, blocks)
    if layout.pp > 1:
        stage(skeleton.module, list(specs.blocks), example_for(skeleton.module) if example is None else example)
        specs = skeleton.module.specs()  # type: ignore[operator]
        pipeline = pipeline or Pipeline(OneForwardOneBackward().build())
    plan = Plan.of(chosen, layout, pipeline)
    model = realize(Blueprint(skeleton.hollow(), specs), plan, topology, skeleton.fill, compute, state)
    if compute != state:
        for part in model.parts:
            if not isinstance(part, FSDPModule):  # which casts by itself
                part.register_forward_pre_hook(partial(_must_be_cast, model.compute))
    return Parallelized(**{field.name: getattr(model, field.name) for field in fields(model)})


def _transforms(
    skeleton: Skeleton, layout: Layout, given: Iterable[Any], tp_plan: Mapping[str, str] | None, example: Example | None
) -> list[Any]:
    built = [one.build() if callable(getattr(one, "build", None)) else one for one in given]
    names = {transform.name for transform in built}
    if layout.dp_shard * layout.dp_replicate > 1 and "shard" not in names:
        built.append(_AveragingShard())
    if layout.tp > 1 and "tensor" not in names:
        plan = tp_plan if tp_plan is not None else getattr(skeleton.module, "_tp_plan", None)
        if not plan:
            raise PlanError(
                f"parallelize: tp = {layout.tp} needs to know what to cut, such as "
                "tp_plan={'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}"
            )
        _refuse_dropout(skeleton.module)
        rules = rules_of(skeleton.module, plan)
        sample = example_for(skeleton.module) if example is None else example
        rules = replace(rules, summed=rules.summed | follow(skeleton.module, rules, sample))
        built.append(_PlannedTensor(sequence_parallel=False, planned=rules))
    return built


@dataclass(frozen=True, kw_only=True)
class _AveragingShard(Shard):
    """Gradients are averaged, as loops outside of Forge expect."""

    average = True


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


def _refuse_dropout(module: nn.Module) -> None:
    """Ranks of tp hold the same residual stream only as long as they draw the same numbers, which nobody sees to."""
    found = [path for path, part in module.named_modules() if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0]
    settings = vars(getattr(module, "config", object())) if hasattr(module, "config") else {}
    found += [f"config.{key}" for key, value in settings.items() if "drop" in key and isinstance(value, float) and value > 0]
    if found:
        raise PlanError(
            f"parallelize: {', '.join(found[:3])} drops numbers at random, and tp ranks would drop different ones; set it to 0, "
            "or set tp to 1"
        )


def refuse_batch_statistics(module: nn.Module) -> None:
    """Data ranks would each keep the statistics of their own rows, and go apart."""
    for path, part in module.named_modules():
        if (
            isinstance(part, nn.modules.batchnorm._NormBase)
            and part.track_running_stats
            and not isinstance(part, nn.SyncBatchNorm)
        ):
            raise PlanError(
                f"parallelize: {path} ({type(part).__name__}) keeps running statistics, and each data rank would keep those of "
                "its own rows; use SyncBatchNorm, track_running_stats=False or another norm, or one data rank"
            )


def _must_be_cast(compute: torch.dtype, module: nn.Module, _: Any) -> None:
    held = {slot.dtype for part in module.modules() for slot in part._parameters.values() if slot is not None}
    if any(dtype.is_floating_point and dtype != compute for dtype in held):
        raise PlanError(
            f"parallelize: on one data rank parameters are cast to {compute} for the span of a forward and its backward; write "
            "`with model.computing():` around both, or use model.step"
        )


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
