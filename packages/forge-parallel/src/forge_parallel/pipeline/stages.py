"""A model cut into the parts that stages run: on the meta device, so that no rank ever holds the whole of it.

A part is the model with everything else removed: modules of other stages become None or leave their container, what stays
keeps its global name, and the part describes itself.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import nn

from forge_core.errors import PlanError
from forge_core.specs import Specs
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.split import split
from forge_parallel.placement.shares import mtp_refusal

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
