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
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_parallel.boxes import local_box
from forge_parallel.clipping import clip
from forge_parallel.foreign.describe import describe
from forge_parallel.foreign.styles import rules_of
from forge_parallel.foreign.weights import Skeleton, of_builder, of_module
from forge_parallel.gather import gathered
from forge_parallel.model import ParallelModel
from forge_parallel.plan import Plan
from forge_parallel.realization import Blueprint, realize
from forge_parallel.reduce import squared_norm, world_sum
from forge_parallel.topology import Topology
from forge_parallel.transforms.shard import Shard
from forge_parallel.transforms.tensor import Tensor as TensorParallel


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
        loss: Callable[[Any, Mapping[str, Tensor]], Tensor],
        tokens: Callable[[Mapping[str, Tensor]], Tensor],
    ) -> Tensor:
        """Forward and backward of several micro-batches; the gradient is that of the mean over the tokens of all ranks.

        Args:
            batches: keyword arguments of the module, as many on every rank.
            loss: (output, batch) -> sum over the batch's valid tokens, a scalar with its graph.
            tokens: batch -> number of its valid tokens, a scalar.

        Returns:
            The mean loss per valid token over all ranks and micro-batches.
        """
        counts = torch.stack([tokens(batch).to(self.topology.device, torch.float64) for batch in batches]).sum()
        (count,) = world_sum([self._counted(counts)], self.topology)
        divisor = count.clamp(min=1)
        total = torch.zeros((), dtype=torch.float64, device=self.topology.device)
        for index, batch in enumerate(batches):
            self.before_micro_batch(last=index == len(batches) - 1)
            with self.computing():
                found = loss(self.module(**batch), batch)
                # gradients are averaged over data ranks, as loops outside of Forge expect; here they are to be summed
                (found * (self.data_ranks / divisor).to(found.dtype)).backward()
            total += found.detach().double()
        self.after_backward()
        (whole,) = world_sum([self._counted(total)], self.topology)
        return whole / divisor

    def _counted(self, value: Tensor) -> Tensor:
        """One of the ranks that read the same data speaks for all."""
        return value if self.topology.coordinates["tp"] == 0 else torch.zeros_like(value)

    def state_dict(self, whole: bool = False) -> dict[str, Tensor]:
        """Parameters and persistent buffers under the module's own names: this rank's, or with `whole` complete copies on the
        host of every rank (small models, exports)."""
        mine = dict(self.tensors())
        if not whole:
            return mine
        full = gathered(self, {name: tensor for name, tensor, _ in self.trainable()})
        full |= gathered(self, {name: tensor for name, tensor in mine.items() if name in self.shapes and name not in full})
        typed = {name: tensor.to(mine[name].dtype) for name, tensor in full.items()}
        return {name: typed.get(name, tensor.detach().cpu()) for name, tensor in mine.items()}

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
            if state[name].shape != tensor.shape:
                raise PlanError(f"load_state_dict: {name} is {tuple(tensor.shape)} here and {tuple(state[name].shape)} there")
            box = local_box(tensor)
            box.local.copy_(box.within(state[name]))


def parallelize(
    source: nn.Module | Callable[[], nn.Module],
    layout: str | Layout,
    transforms: Iterable[Any] = (),
    *,
    tp_plan: Mapping[str, str] | None = None,
    blocks: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    compute: str = "fp32",
    state: str = "fp32",
    seed: int = 0,
) -> Parallelized:
    """Lays out a module over the ranks of the running process group.

    Args:
        source: a module, whose weights all ranks hold alike and which is consumed; or a function that builds one, whose
            parameters then never exist whole: they are drawn by the module's own initialiser.
        layout: such as "dp2tp2" or "hsdp2x4"; see `forge_core.layout.Layout.parse`.
        transforms: components or transforms beyond those that the axes ask for, such as `Recompute()` and `Compile()`.
        tp_plan: patterns of module paths -> styles; a transformers model brings its own.
        blocks: paths of the repeated blocks in forward order; found when there is one list of modules of one class.
        device: of this rank; by default the current CUDA device, or the CPU.
        compute: `bf16`, `fp32` or `fp64`, of forward and backward. With `bf16` on one data rank, span forward and backward
            by `with model.computing():`.
        state: `fp32`, `fp64` or `bf16`, of parameters, gradients and optimizer state.
        seed: of the initialiser.

    Raises:
        PlanError: what cannot be laid out, by name.
        LayoutError: the layout has another number of ranks than are running.
    """
    if isinstance(layout, str):
        layout = Layout.parse(layout)
    for axis in ("cp", "pp", "ep", "etp"):
        if layout.size(axis) > 1:
            raise PlanError(f"parallelize: {axis} = {layout.size(axis)} is not offered for foreign modules; use dp, hsdp and tp")
    place = torch.device(device) if device is not None else _default_device()
    topology = Topology.of(layout, place)
    skeleton = of_module(source) if isinstance(source, nn.Module) else of_builder(source, blocks, seed)
    chosen = _transforms(skeleton, layout, transforms, tp_plan)
    _prepare(skeleton.module)
    specs = describe(skeleton.module, blocks)
    model = realize(Blueprint(skeleton.module, specs), Plan.of(chosen, layout), topology, skeleton.fill, compute, state)
    return Parallelized(**{field.name: getattr(model, field.name) for field in fields(model)})


def _transforms(skeleton: Skeleton, layout: Layout, given: Iterable[Any], tp_plan: Mapping[str, str] | None) -> list[Any]:
    built = [one.build() if callable(getattr(one, "build", None)) else one for one in given]
    names = {transform.name for transform in built}
    if layout.dp_shard * layout.dp_replicate > 1 and "shard" not in names:
        built.append(Shard(average=True))
    if layout.tp > 1 and "tensor" not in names:
        plan = tp_plan if tp_plan is not None else getattr(skeleton.module, "_tp_plan", None)
        if not plan:
            raise PlanError(
                f"parallelize: tp = {layout.tp} needs to know what to cut, such as "
                "tp_plan={'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}"
            )
        built.append(TensorParallel(sequence=False, table=rules_of(skeleton.module, plan)))
    return built


def _prepare(module: nn.Module) -> None:
    """A transformers model in training must not fill its key-value cache: recomputation would fill it twice."""
    config = getattr(module, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
