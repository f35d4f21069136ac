"""Splits a model into pipeline stages on the meta device, synchronizes tied tensors of two stages, and joins stages for
generation.

A part is the model without the modules of other stages: these become None or are removed from their container. All other modules
keep their global names, and the part has its own specs. No rank ever holds the whole model.
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
"""Optimizer groups of tensors that every token is multiplied with. Looking up an embedding costs nothing."""


@dataclass(frozen=True)
class Follower:
    """A tied copy on another stage than its original; its value is copied from the original, and it is owned by no rank."""

    copy: str
    original: str
    copy_stage: int
    original_stage: int


@dataclass(frozen=True)
class StageSplit:
    """The assignment of modules to pipeline stages.

    Attributes:
        stages: for each stage, the paths of its modules: blocks, and on the first and last stage the entry and exit modules.
        placement: for each stage, its rank on the axis pp.
        rank: this rank on the axis pp.
        followers: tied copies on other stages than their originals.
    """

    stages: tuple[tuple[str, ...], ...]
    placement: tuple[int, ...]
    rank: int
    followers: tuple[Follower, ...]

    @classmethod
    def of(cls, module: nn.Module, specs: Specs, pipeline: Pipeline, ranks: int, rank: int) -> "StageSplit":
        """Splits a module with specs for rank `rank` of `ranks`.

        Raises:
            PlanError: the specs lack the modules before or after the blocks, a tensor belongs to no stage, there are too few
                blocks, or the schedule does not support the model's MTP depth.
        """
        if not (specs.blocks and specs.entry and specs.exit):
            if why := getattr(module, "no_stages", ""):  # a class of another library, which cannot describe itself
                raise PlanError(f"{why}; set parallel.pp = 1")
            raise PlanError(
                "a pipeline needs specs() with the modules before the blocks (`entry`), the blocks, and the modules after them "
                f"(`exit`), but they are {specs.entry}, {specs.blocks} and {specs.exit}; add the missing ones"
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
        tensors = module.state_dict(keep_vars=True)
        if lost := sorted(name for name in tensors if _stage_of(name, at) is None):
            raise PlanError(
                f"a pipeline cannot assign {', '.join(lost)} to a stage, because no block and no module of `entry` or `exit` "
                "contains them; add their modules to one of these in specs()"
            )
        followers = []
        for copy, original in specs.ties.items():
            copy_stage, original_stage = _stage_of(copy, at), _stage_of(original, at)
            if copy_stage is not None and original_stage is not None and copy_stage != original_stage:
                followers.append(Follower(copy, original, copy_stage, original_stage))
        return cls(tuple(stages), placement, rank, tuple(followers))

    @property
    def local(self) -> tuple[int, ...]:
        """The stages of this rank, in ascending order."""
        return tuple(stage for stage, rank in enumerate(self.placement) if rank == self.rank)

    @property
    def last(self) -> bool:
        """Whether this rank has the last stage, which computes the loss."""
        return self.placement[-1] == self.rank

    @property
    def copies(self) -> frozenset[str]:
        """Names of the tied copies on this rank that follow originals on other stages."""
        return frozenset(follower.copy for follower in self.followers if follower.copy_stage in self.local)

    def part(self, module: nn.Module, stage: int) -> tuple[nn.Module, Specs]:
        """Returns the part of `module` (on the meta device; not changed) that `stage` runs, and its specs."""
        part = deepcopy(module)
        for other, paths in enumerate(self.stages):
            for path in paths if other != stage else ():
                remove(part, path)
        for follower in self.followers:
            if follower.copy_stage == stage:
                path, _, slot = follower.copy.rpartition(".")
                parameter = part.get_parameter(follower.copy)
                setattr(part.get_submodule(path), slot, nn.Parameter(torch.empty_like(parameter), parameter.requires_grad))
        specs: Specs = part.specs()  # type: ignore[operator]
        elsewhere = {follower.copy for follower in self.followers}
        return part, replace(specs, ties={copy: original for copy, original in specs.ties.items() if copy not in elsewhere})


def _cost(module: nn.Module, specs: Specs, path: str) -> int:
    """Returns the multiplications per token in a module. All experts count; a head counts once per token that it scores."""
    parameters = module.get_submodule(path).named_parameters(remove_duplicate=False)
    return sum(p.numel() * _uses(f"{path}.{name}", specs) for name, p in parameters)


def _uses(name: str, specs: Specs) -> int:
    """Returns how often a token is multiplied with a tensor."""
    if name not in specs.ties and specs.tensors[name].group not in MULTIPLIED:
        return 0
    around = specs.modules.get(name.rpartition(".")[0])
    if around is None:
        return 1
    if around.inputs[0] == ("batch", "sequence"):  # an embedding, which is looked up
        return 0
    return 1 + specs.mtp_depth if around.outputs[0][-1] == "vocab" else 1


def _stage_of(name: str, at: Mapping[str, int]) -> int | None:
    """Returns the stage of the module that contains a tensor; None if there is none."""
    words = name.split(".")
    return next((at[path] for end in range(len(words), 0, -1) if (path := ".".join(words[:end])) in at), None)


def remove(part: nn.Module, path: str) -> None:
    """Takes a module out of a model; all other modules keep their names."""
    if callable(leave_out := getattr(part, "leave_out", None)):  # a foreign module removes its modules itself
        leave_out(path)
        return
    above, _, name = path.rpartition(".")
    parent = part.get_submodule(above)
    if isinstance(parent, nn.ModuleDict | nn.ModuleList | nn.Sequential):
        parent._modules.pop(name)  # not `del`, which would renumber the modules of a list
    else:
        setattr(parent, name, None)


Named = Mapping[str, torch.Tensor]
"""Global name -> tensor of this rank, tied copies included."""


@torch.no_grad()
def refresh(cut: StageSplit, tensors: Named, topology: Topology) -> None:
    """Collective over pp: copies the value of every original to its follower."""
    for follower in cut.followers:
        _move(
            cut,
            tensors,
            topology,
            (follower.original_stage, follower.copy_stage),
            lambda name=follower.original: _local(tensors[name]),
            lambda value, name=follower.copy: _local(tensors[name]).copy_(value),
            follower.copy,
        )


@torch.no_grad()
def add_gradients(cut: StageSplit, tensors: Named, topology: Topology) -> None:
    """Collective over pp: adds every follower's gradient to that of its original, and clears the follower's."""
    for follower in cut.followers:
        _move(
            cut,
            tensors,
            topology,
            (follower.copy_stage, follower.original_stage),
            lambda name=follower.copy: _taken(tensors[name]),
            lambda value, name=follower.original: _add(tensors[name], value),
            follower.original,
        )


def check(cut: StageSplit, tensors: Named, shapes: Mapping[str, tuple[int, ...]], topology: Topology) -> None:
    """Collective over pp: checks on all ranks that followers and originals are sharded in the same way.

    Raises:
        PlanError: a transform has sharded them differently.
    """
    for follower in cut.followers:
        boxes = torch.zeros(2, 3 * len(shapes[follower.original]), dtype=torch.int64, device=topology.device)
        rows = ((0, follower.copy, follower.copy_stage), (1, follower.original, follower.original_stage))
        for row, name, stage in rows:
            if stage in cut.local:
                box = local_box(tensors[name])
                boxes[row] = torch.tensor([*box.shape, *box.offset, *box.local.shape])
        dist.all_reduce(boxes, group=topology.group("pp"))
        if not torch.equal(boxes[0], boxes[1]):
            raise PlanError(
                f"{follower.copy} and {follower.original} are tied, but a transform sharded them differently; shard them alike, "
                "or untie them"
            )


def _move(
    cut: StageSplit,
    tensors: Named,
    topology: Topology,
    stages: tuple[int, int],
    give: Callable[[], torch.Tensor],
    take: Callable[[torch.Tensor], object],
    like: str,
) -> None:
    """Sends `give()` from the first stage's rank to `take` on the second stage's rank, in the local shape of tensor `like`."""
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
    """Returns and clears the local gradient; zeros if there is none."""
    gradient, tensor.grad = tensor.grad, None
    return torch.zeros_like(_local(tensor)) if gradient is None else _local(gradient)


def _add(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if not tensor.requires_grad:
        return
    if tensor.grad is None:
        tensor.grad = torch.zeros_like(tensor)
    _local(tensor.grad).add_(value)


class StagedModel(nn.Module):
    """The model that a rank of a pipeline calls to generate, with a cache: each stage takes the hidden states of the previous
    one, and all ranks get the logits.

    Every rank of a pipeline makes the same calls. Stages run one after the other, because each token depends on the previous one.
    Use it inside `ParallelModel.inference(whole_sequences=True)`.

    Args:
        parts: this rank's parts, in order.
        cut: the stages of the parts.
        topology: this rank's coordinates and process groups.
        compute: dtype of the hidden states between stages.
        needs: inputs of the parts from a batch, see `Specs.needs`.

    Raises:
        PlanError: the parts lack `new_cache`, `shape` or `cache_limit`, which generation needs.
    """

    def __init__(
        self, parts: Sequence[nn.Module], cut: StageSplit, topology: Topology, compute: torch.dtype, needs: Collection[str]
    ) -> None:
        super().__init__()
        first: Any = parts[0]
        if missing := [name for name in ("new_cache", "shape", "cache_limit") if not hasattr(first, name)]:
            raise PlanError(
                f"{type(first).__name__} has no {', '.join(missing)}, which generation needs; see forge_models.decoder"
            )
        self.parts = nn.ModuleDict({str(stage): part for stage, part in zip(cut.local, parts, strict=True)})
        self.shape = first.shape
        self.compute, self.device, self.needs = compute, topology.device, needs
        self.placement, self.rank, self.group = cut.placement, cut.rank, topology.group("pp")
        self.cache_limit = self._least([part.cache_limit for part in self._own().values()])

    def new_cache(self, batch: int, capacity: int) -> dict[int, Any]:
        """Returns an empty cache for each part: `batch` rows of up to `capacity` tokens."""
        return {stage: part.new_cache(batch, capacity) for stage, part in self._own().items()}

    @torch.no_grad()
    def forward(self, tokens: Tensor, *, positions: Tensor | None, cache: dict[int, Any], at: Tensor | None = None) -> Tensor:
        """Collective over pp: returns logits (B, T, vocab) of the tokens (B, T) that follow those in the cache, on every rank.

        Args:
            tokens: the same on all ranks.
            positions: (B, T); None: the positions after those in the cache.
            cache: from `new_cache`; extended by this call.
            at: (B,) index of one token per row; if given, only its logits are returned, (B, 1, vocab).
        """
        own, last = self._own(), len(self.placement) - 1
        stream, logits = (
            tokens,
            self._room((tokens.shape[0], tokens.shape[1] if at is None else 1, self.shape.vocab_size), wide=True),
        )
        for stage, rank in enumerate(self.placement):
            if rank == self.rank:
                inputs = {"tokens": tokens} if stage > 0 and "tokens" in self.needs else {}
                inputs |= {"at": at} if stage == last else {}
                stream = own[stage](stream, positions=positions, cache=cache[stage], **inputs)
            if stage == last:
                if rank == self.rank:
                    logits.copy_(stream)
            elif (there := self.placement[stage + 1]) != rank:
                if rank == self.rank:
                    dist.send(stream.contiguous(), group=self.group, group_dst=there)
                elif there == self.rank:
                    stream = self._room((*tokens.shape, *self.shape.stream))
                    dist.recv(stream, group=self.group, group_src=rank)
        dist.broadcast(logits, group=self.group, group_src=self.placement[-1])
        return logits

    def _own(self) -> dict[int, Any]:
        return {int(stage): part for stage, part in self.parts.items()}

    def _room(self, shape: tuple[int, ...], wide: bool = False) -> Tensor:
        dtype = torch.promote_types(self.compute, torch.float32) if wide else self.compute
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _least(self, limits: list[int | None]) -> int | None:
        """Collective over pp: returns the smallest limit of all stages, so that all ranks refuse the same texts."""
        none = torch.iinfo(torch.int64).max
        own = min((limit for limit in limits if limit is not None), default=none)
        smallest = torch.full((), own, dtype=torch.int64, device=self.device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN, self.group)
        return None if int(smallest) == none else int(smallest)
