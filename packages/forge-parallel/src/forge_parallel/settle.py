"""Keys of `[transforms.shard]` that say `auto`, settled: the same job with the values that they stand for.

What is chosen is what the other checks then see: a way to shard that no test has proven with the rest of the recipe is none to
choose from. It follows from the recipe, the layout and one number, the memory of a device, and so is the same on every rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.terminal import size
from forge_parallel import accelerator
from forge_parallel.checks import compositions_are_proven
from forge_parallel.dryrun.fake_world import ACCELERATORS
from forge_parallel.model.plan import Plan
from forge_parallel.placement.shares import apart
from forge_parallel.placement.topology import Topology
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.shard_choice import USABLE, Needs, Option, Reduce, choose, nominal, options
from forge_parallel.transforms.shard_needs import Described, Load, needs
from forge_parallel.verify.proofs import ParallelJob


@dataclass(frozen=True)
class Settled:
    """A job without `auto`, and why.

    Attributes:
        job: with the values that were chosen; the given one where nothing says `auto`, or nothing is sharded.
        chosen: what was chosen; None where there was nothing to choose.
        among: what could be chosen, the chosen one included.
        unproven: what could not, since no test proves it with the rest of the recipe.
        memory: of the device that it was chosen for, in bytes; None where none was known.
        before: how the run has summed gradients so far; None at its start, or in another layout.
    """

    job: Any
    chosen: Option | None = None
    among: tuple[Option, ...] = ()
    unproven: tuple[Option, ...] = ()
    memory: int | None = None
    before: Reduce | None = None

    def lines(self) -> list[str]:
        """What was chosen and why, for a person; empty where there was nothing to choose."""
        if self.chosen is None:
            return []
        found = [f"shard: chose {written(self.chosen)}, about {size(self.chosen.memory)}: {self._why()}"]
        found += [
            f"  {written(one)} would take about {size(one.memory)} and exchange {_compared(one, self.chosen)}"
            for one in self.among
            if one != self.chosen
        ]
        found += [f"  {written(one)} is left out: no test proves it with the rest of this recipe" for one in self.unproven]
        if self.before not in (None, self.chosen.reduce):
            found.append(f"  gradients were summed with reduce = {self.before!r} so far: last bits differ from here on")
        return found

    def as_json(self) -> dict[str, Any] | None:
        """The same as plain data, bytes as integers."""
        if self.chosen is None:
            return None
        lists = {name: [vars(one) for one in getattr(self, name)] for name in ("among", "unproven")}
        return {"chosen": vars(self.chosen), **lists, "memory": self.memory, "usable": self._usable()}

    def _usable(self) -> int | None:
        return None if self.memory is None else int(USABLE * self.memory)

    def _why(self) -> str:
        assert self.chosen is not None, "something was chosen"
        usable = self._usable()
        if usable is None or self.memory is None:
            return "no device is known, so what takes least memory"
        within = f"{size(usable)}, {100 * USABLE:.0f} % of a device's {size(self.memory)}"
        if self.chosen.memory > usable:
            return f"nothing fits into {within}, so what takes least memory"
        kept = " and sums as the run did so far" if self.chosen.reduce == self.before else ""
        return f"of what fits into {within}{kept}, it exchanges least"


def settled(
    job: ParallelJob,
    layout: Layout,
    describe: Callable[[], Described],
    memory: int | None = None,
    before: Reduce | None = None,
) -> Settled:
    """Chooses what `transforms.shard` leaves to be chosen.

    Args:
        job: has passed its checks.
        layout: where it runs.
        describe: makes the model on the meta device; called only if there is something to choose.
        memory: of a device, in bytes, the same number on every rank; None = not known.
        before: how the run has summed gradients in this layout so far.

    Raises:
        PlanError: no value is proven with the rest of the recipe, or the pipeline cannot be cut.
    """
    shard = job.transforms.get("shard")
    if not isinstance(shard, FullyShard) or "auto" not in (shard.reduce, shard.reshard):
        return Settled(job)
    once = layout.pp > 1 or _micro_batches(job, layout) == 1  # both values are the same then
    reduces: tuple[Reduce, ...] = (shard.reduce,) if shard.reduce != "auto" else ("last",) if once else ("last", "each")
    # Unset is what a layout does anyway; the other value of `reshard` is a feature, which has to be proven.
    reshards = (None, layout.pp > 1) if shard.reshard == "auto" else (shard.reshard,)
    described = describe()
    if layout.dp_shard * layout.dp_replicate * layout.cp == 1 and not apart(described.specs, layout) and not shard.offload:
        return Settled(_with(job, reduces[0], reshards[0]))
    found = options(_needs(job, layout, described), reduces, reshards)
    proven = tuple(one for one in found if not any(compositions_are_proven(_with(job, one.reduce, one.reshard), layout)))
    if not proven:
        raise PlanError(
            f"transforms.shard: 'auto' finds nothing to choose: no test proves {' or '.join(map(written, found))} "
            "with the rest of this recipe; see `forge-train check`"
        )
    chosen = choose(proven, memory, before)
    left_out = tuple(one for one in found if one not in proven)
    return Settled(_with(job, chosen.reduce, chosen.reshard), chosen, proven, left_out, memory, before)


def shared_memory(topology: Topology) -> int | None:
    """Collective: bytes of the smallest device of all ranks, as `plan --device` counts them; None on CPUs."""
    mine = accelerator.memory(topology.device)
    sizes = [one.memory for one in ACCELERATORS.values()]
    return None if mine is None else nominal(topology.least(mine), sizes)


def reduced_so_far(meta: Mapping[str, Any], layout: Layout) -> Reduce | None:
    """How a checkpoint's run summed gradients; None where it was laid out in another way, and its sums had another order."""
    return meta.get("reduce") if meta.get("layout") == str(layout) else None


def reduced_by(plan: Plan) -> Reduce | None:
    """How a plan sums gradients over micro-batches, for the checkpoint; None where no rank shares them."""
    return next((one.reduce for one in plan.transforms if isinstance(one, FullyShard) and one.reduce != "auto"), None)


def written(option: Option) -> str:
    """As a recipe says it."""
    reshard = "unset" if option.reshard is None else f"= {str(option.reshard).lower()}"
    return f"reduce = {option.reduce!r}, reshard {reshard}"


def _compared(one: Option, chosen: Option) -> str:
    less, more = sorted((one.traffic, chosen.traffic))
    return "as much" if less == more else f"{size(more - less)} {'less' if one.traffic == less else 'more'} in a step"


def _with(job: Any, reduce: Reduce, reshard: bool | None) -> Any:
    transforms: Mapping[str, Any] = job.transforms
    return replace(job, transforms={**transforms, "shard": replace(transforms["shard"], reduce=reduce, reshard=reshard)})


def _needs(job: ParallelJob, layout: Layout, described: Described) -> Needs:
    recompute = job.transforms.get("recompute")
    load = Load(
        tokens=job.train.micro_batch * job.data.sequence_length,
        micro_batches=_micro_batches(job, layout),
        top_k=getattr(getattr(job.model, "moe", None), "top_k", 1),
        compute=job.precision.compute,
        state=job.precision.state,
        recompute=getattr(recompute, "policy", None),
        every=getattr(recompute, "every", 1),
        offload=job.transforms["shard"].offload,
    )
    return needs(described, layout, load, job.parallel.pipeline.build() if layout.pp > 1 else None)


def _micro_batches(job: ParallelJob, layout: Layout) -> int:
    return max(1, job.train.global_batch // (layout.data * job.train.micro_batch))
