"""A model cut into pipeline stages on the meta device, tensors that two stages share, and the staged model as one for
generation.

A part is the model with everything else removed: modules of other stages become None or leave their container, the rest keeps
its global name, and the part describes itself. No rank ever holds the whole model.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge_core.errors import PlanError
from forge_core.specs import Specs
from forge_parallel.pipeline.definition import Pipeline, split
from forge_parallel.placement.boxes import local_box
from forge_parallel.placement.shares import mtp_refusal
from forge_parallel.placement.topology import Topology

MULTIPLIED = frozenset({"matrix", "head", "router"})
"""Groups of tensors that every token is multiplied with. Looking up an embedding costs nothing."""


@dataclass(frozen=True)
class Follower:
    """A tied tensor whose copy is on another stage than the original: it follows the original's value and owns nothing."""

    copy: str
    original: str
    copy_stage: int
    original_stage: int


@dataclass(frozen=True)
class StageSplit:
    """Which modules are where.

    Attributes:
        stages: per stage the paths of its modules: blocks, and on the first and last one what enters and leaves.
        placement: per stage its rank on the axis pp.
        rank: this rank on the axis pp.
        followers: tied copies on other stages than their originals.
    """

    stages: tuple[tuple[str, ...], ...]
    placement: tuple[int, ...]
    rank: int
    followers: tuple[Follower, ...]

    @classmethod
    def of(cls, module: nn.Module, specs: Specs, pipeline: Pipeline, ranks: int, rank: int) -> "StageSplit":
        """Cuts a described module for rank `rank` of `ranks`.

        Raises:
            PlanError: the specs do not say what runs before and after the blocks, a tensor belongs to no stage, there are too
                few blocks, or the schedule does not support the model's MTP depth.
        """
        if not (specs.blocks and specs.entry and specs.exit):
            raise PlanError(
                "a pipeline needs specs() to name the modules before the first block (`entry`), the blocks, and those after the "
                f"last one (`exit`); they are {specs.entry}, {specs.blocks}, {specs.exit}"
            )
        if why := mtp_refusal(pipeline.schedule.name, pipeline.schedule.splits_backward, specs.mtp_depth):
            raise PlanError(why)
        placement = pipeline.placement(ranks)
        before, after = (sum(_cost(module, specs, path) for path in paths) for paths in (specs.entry, specs.exit))
        behind = tuple(f"{path}." for path in specs.exit)
        blocks = tuple(path for path in specs.blocks if not path.startswith(behind))
        sizes = split(pipeline.split, [_cost(module, specs, path) for path in blocks], before, after, len(placement))
        ends = [sum(sizes[: stage + 1]) for stage in range(len(sizes))]
        stages = [blocks[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        stages[0] = (*specs.entry, *stages[0])
        stages[-1] = (*stages[-1], *specs.exit)
        at = {path: stage for stage, paths in enumerate(stages) for path in paths}
        kept = module.state_dict(keep_vars=True)
        if lost := sorted(name for name in kept if _stage_of(name, at) is None):
            raise PlanError(
                f"{', '.join(lost)}: belongs to no block, and to no module of `entry` or `exit`, so a pipeline cannot place it; "
                "add its module to one of them in specs()"
            )
        followers = []
        for copy, original in specs.ties.items():
            one, other = _stage_of(copy, at), _stage_of(original, at)
            if one is not None and other is not None and one != other:
                followers.append(Follower(copy, original, one, other))
        return cls(tuple(stages), placement, rank, tuple(followers))

    @property
    def local(self) -> tuple[int, ...]:
        """The stages of this rank, ascending."""
        return tuple(stage for stage, rank in enumerate(self.placement) if rank == self.rank)

    @property
    def last(self) -> bool:
        """Whether this rank holds the last stage, where the loss is."""
        return self.placement[-1] == self.rank

    @property
    def copies(self) -> frozenset[str]:
        """Names of the followers on this rank."""
        return frozenset(one.copy for one in self.followers if one.copy_stage in self.local)

    def part(self, module: nn.Module, stage: int) -> tuple[nn.Module, Specs]:
        """The part of `module` (on meta, unchanged) that `stage` runs, and how it describes itself."""
        part = deepcopy(module)
        for other, paths in enumerate(self.stages):
            for path in paths if other != stage else ():
                _remove(part, path)
        for one in self.followers:
            if one.copy_stage == stage:
                path, _, slot = one.copy.rpartition(".")
                parameter = part.get_parameter(one.copy)
                setattr(part.get_submodule(path), slot, nn.Parameter(torch.empty_like(parameter), parameter.requires_grad))
        specs: Specs = part.specs()  # type: ignore[operator]
        elsewhere = {one.copy for one in self.followers}
        return part, replace(specs, ties={copy: original for copy, original in specs.ties.items() if copy not in elsewhere})


def _cost(module: nn.Module, specs: Specs, path: str) -> int:
    """Multiplications per token in one module, experts counted in full; those of a head once for every token that it scores."""
    found = module.get_submodule(path).named_parameters(remove_duplicate=False)
    return sum(p.numel() * _uses(f"{path}.{name}", specs) for name, p in found)


def _uses(name: str, specs: Specs) -> int:
    """How often a token is multiplied with a tensor."""
    if name not in specs.ties and specs.tensors[name].group not in MULTIPLIED:
        return 0
    around = specs.modules.get(name.rpartition(".")[0])
    if around is None:
        return 1
    if around.inputs[0] == ("batch", "sequence"):  # a tied copy that is looked up
        return 0
    return 1 + specs.mtp_depth if around.outputs[0][-1] == "vocab" else 1


def _stage_of(name: str, at: Mapping[str, int]) -> int | None:
    """The stage of the module that a tensor belongs to."""
    words = name.split(".")
    return next((at[path] for end in range(len(words), 0, -1) if (path := ".".join(words[:end])) in at), None)


def _remove(part: nn.Module, path: str) -> None:
    if callable(leave_out := getattr(part, "leave_out", None)):  # a module may know better how it does without another
        leave_out(path)
        return
    above, _, name = path.rpartition(".")
    parent = part.get_submodule(above)
    if isinstance(parent, nn.ModuleDict | nn.ModuleList | nn.Sequential):
        parent._modules.pop(name)  # not `del`, which would number the modules of a list anew
    else:
        setattr(parent, name, None)


Named = Mapping[str, torch.Tensor]
"""Tensors of this rank by global name, copies included."""


@torch.no_grad()
def refresh(cut: StageSplit, tensors: Named, topology: Topology) -> None:
    """Collective: gives every follower the value of its original; all ranks of pp enter."""
    for one in cut.followers:
        _move(
            cut,
            tensors,
            topology,
            (one.original_stage, one.copy_stage),
            lambda name=one.original: _local(tensors[name]),
            lambda value, name=one.copy: _local(tensors[name]).copy_(value),
            one.copy,
        )


@torch.no_grad()
def add_gradients(cut: StageSplit, tensors: Named, topology: Topology) -> None:
    """Collective: adds every follower's gradient to that of its original, and clears it; all ranks of pp enter."""
    for one in cut.followers:
        _move(
            cut,
            tensors,
            topology,
            (one.copy_stage, one.original_stage),
            lambda name=one.copy: _taken(tensors[name]),
            lambda value, name=one.original: _add(tensors[name], value),
            one.original,
        )


def check(cut: StageSplit, tensors: Named, shapes: Mapping[str, tuple[int, ...]], topology: Topology) -> None:
    """Collective: compares where copies and originals are cut; all ranks of pp enter, and all see the same.

    Raises:
        PlanError: a transform laid them out differently.
    """
    for one in cut.followers:
        boxes = torch.zeros(2, 3 * len(shapes[one.original]), dtype=torch.int64, device=topology.device)
        for row, name, stage in ((0, one.copy, one.copy_stage), (1, one.original, one.original_stage)):
            if stage in cut.local:
                box = local_box(tensors[name])
                boxes[row] = torch.tensor([*box.shape, *box.offset, *box.local.shape])
        dist.all_reduce(boxes, group=topology.group("pp"))
        if not torch.equal(boxes[0], boxes[1]):
            raise PlanError(f"{one.copy} and {one.original} are tied, but a transform laid them out differently")


def _move(
    cut: StageSplit,
    tensors: Named,
    topology: Topology,
    stages: tuple[int, int],
    give: Callable[[], torch.Tensor],
    take: Callable[[torch.Tensor], object],
    like: str,
) -> None:
    """Brings `give()` from the first stage's rank to `take` on the second's, where it looks as the tensor `like`."""
    source, target = (cut.placement[stage] for stage in stages)
    if source == target:
        if source == cut.rank:
            take(give())
        return
    if cut.rank not in (source, target):
        return
    group, device = topology.group("pp"), topology.device
    if cut.rank == source:
        dist.send(give().contiguous().to(device), dist.get_global_rank(group, target), group)
    else:
        here = _local(tensors[like])
        value = torch.empty_like(here, memory_format=torch.contiguous_format, device=device)
        dist.recv(value, dist.get_global_rank(group, source), group)
        take(value.to(here.device))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _taken(tensor: torch.Tensor) -> torch.Tensor:
    """The local gradient, which the tensor loses; zeros where there is none."""
    gradient, tensor.grad = tensor.grad, None
    return torch.zeros_like(_local(tensor)) if gradient is None else _local(gradient)


def _add(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if not tensor.requires_grad:
        return
    if tensor.grad is None:
        tensor.grad = torch.zeros_like(tensor)
    _local(tensor.grad).add_(value)


class StagedModel(nn.Module):
    """What a rank calls in the place of the whole model, with a cache: each stage takes the stream of the one before, and logits
    come to all ranks.

    Every rank of a pipeline makes the same calls. Stages wait for each other: text is made token by token, so there is nothing to
    run meanwhile. It stays usable as long as its model does, inside `ParallelModel.inference(whole_sequences=True)`.

    Args:
        parts: of this rank, in order.
        cut: which stages they are.
        topology: where this rank is.
        compute: dtype of the stream between stages.
        needs: what parts want to be told of a batch, as in `Specs.needs`.

    Raises:
        PlanError: the parts have no `new_cache`, `shape` and `cache_limit`, which generation needs.
    """

    def __init__(
        self, parts: Sequence[nn.Module], cut: StageSplit, topology: Topology, compute: torch.dtype, needs: Collection[str]
    ) -> None:
        super().__init__()
        first: Any = parts[0]
        if missing := [name for name in ("new_cache", "shape", "cache_limit") if not hasattr(first, name)]:
            raise PlanError(
                f"{type(first).__name__} has no {', '.join(missing)}, so it cannot generate; see forge_models.decoder"
            )
        self.parts = nn.ModuleDict({str(stage): part for stage, part in zip(cut.local, parts, strict=True)})
        self.shape = first.shape
        self.compute, self.device, self.needs = compute, topology.device, needs
        self.placement, self.rank, self.group = cut.placement, cut.rank, topology.group("pp")
        self.cache_limit = self._least([part.cache_limit for part in self._own().values()])

    def new_cache(self, batch: int, capacity: int) -> dict[int, Any]:
        """An empty cache for each part: `batch` rows of up to `capacity` tokens."""
        return {stage: part.new_cache(batch, capacity) for stage, part in self._own().items()}

    @torch.no_grad()
    def forward(self, tokens: Tensor, *, positions: Tensor | None, cache: dict[int, Any], at: Tensor | None = None) -> Tensor:
        """Collective over a pipeline: logits (B, T, vocab) of the tokens (B, T) that follow those in the cache, on every rank.

        Args:
            tokens: the same on all ranks.
            positions: (B, T); None = the cache's next ones.
            cache: from `new_cache`; it is extended.
            at: (B,) index of the one token per row whose logits are wanted, which are then (B, 1, vocab).
        """
        own, last = self._own(), len(self.placement) - 1
        stream, logits = (
            tokens,
            self._room((tokens.shape[0], tokens.shape[1] if at is None else 1, self.shape.vocab_size), wide=True),
        )
        for stage, rank in enumerate(self.placement):
            if rank == self.rank:
                given = {"tokens": tokens} if stage > 0 and "tokens" in self.needs else {}
                given |= {"at": at} if stage == last else {}
                stream = own[stage](stream, positions=positions, cache=cache[stage], **given)
            if stage == last:
                if rank == self.rank:
                    logits.copy_(stream)
            elif (there := self.placement[stage + 1]) != rank:
                if rank == self.rank:
                    dist.send(stream.contiguous(), group=self.group, group_dst=there)
                elif there == self.rank:
                    stream = self._room((*tokens.shape, self.shape.dim))
                    dist.recv(stream, group=self.group, group_src=rank)
        dist.broadcast(logits, group=self.group, group_src=self.placement[-1])
        return logits

    def _own(self) -> dict[int, Any]:
        return {int(stage): part for stage, part in self.parts.items()}

    def _room(self, shape: tuple[int, ...], wide: bool = False) -> Tensor:
        dtype = torch.promote_types(self.compute, torch.float32) if wide else self.compute
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _least(self, limits: list[int | None]) -> int | None:
        """Collective over a pipeline: the smallest limit of any stage, so that all ranks refuse the same texts."""
        none = torch.iinfo(torch.int64).max
        mine = min((limit for limit in limits if limit is not None), default=none)
        found = torch.full((), mine, dtype=torch.int64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN, self.group)
        return None if int(found) == none else int(found)
