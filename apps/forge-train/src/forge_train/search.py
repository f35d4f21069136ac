"""Searches the layouts of a recipe for those with the shortest modeled step that fit into memory.

Every layout, micro-batch and memory option is priced in closed form. In the order of their modeled speed, each then has to pass
what a run has to pass: the memory of a rank (`forge_parallel.dryrun.sharding.needs`), and the recipe's own checks, those of
unproven combinations included. So the search offers nothing that `forge-train check` refuses. The best one also runs dry
(`forge_parallel.dryrun.estimate`), which counts its memory.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import product
from math import gcd
from time import monotonic
from typing import Any

from forge_core.errors import ConfigError, ForgeError
from forge_core.layout import DENSE, Layout, divisors
from forge_core.registry import Registry
from forge_parallel.dryrun.fake_world import Accelerator
from forge_parallel.dryrun.sharding import USABLE, Load, Needs, Units, needs, options, units_of
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import Interleaved, OneForwardOneBackward
from forge_parallel.timing.hardware import GIB, Hardware
from forge_parallel.timing.step_time import Efficiency, StepTime, predict
from forge_parallel.timing.work import StageBlocks, stages_of
from forge_parallel.verify.proofs import batches_of
from forge_train.plan import dry_run, first_ranks, largest_step
from forge_train.prediction import IMBALANCE, ModeledRecipe, execution_of
from forge_train.recipe.load import Recipe, load_recipe

MOST_CONTEXT = 8
"""Largest size of context parallelism that is tried."""

SHORTEST = 2048
"""Smallest number of tokens of a row that context parallelism leaves to a rank."""

LARGEST_MICRO_BATCH = 16

PIPELINE_MARGIN = 1.1
"""Factor of the estimated memory of a pipeline. Dry runs of 70b in 8 stages counted 77.5 to 78.2 GiB where estimates were below
72 GiB."""

Kind = tuple[int, int, int, int]
"""Sizes of pipeline, context, tensor and expert parallelism."""


@dataclass(frozen=True)
class Candidate:
    """A way to run the recipe.

    Attributes:
        layout: sizes of all axes.
        micro_batch: sequences per forward of a rank.
        recompute: `full`, `selective` or None.
        reduce, reshard: of `[transforms.shard]`.
        schedule: of the pipeline; empty without one.
        time: its modeled step; of a pipeline at least as short, unless `exact`.
        memory: bytes of the rank that holds most, as estimated; 0 until it is known.
        counted: whether a dry run counted `memory`.
    """

    layout: Layout
    micro_batch: int
    recompute: str | None
    reduce: str
    reshard: bool | None
    schedule: str
    time: StepTime
    memory: int = 0
    exact: bool = True
    counted: bool = False

    @property
    def kind(self) -> Kind:
        """The kind of its layout."""
        return self.layout.pp, self.layout.cp, self.layout.tp, self.layout.ep

    def overrides(self) -> list[str]:
        """Returns the candidate as overrides of a command line."""
        sizes = self.layout.sizes()
        keys = [f"--parallel.{axis}={sizes[axis]}" for axis in (*DENSE, "ep", "etp")]
        keys += [f"--train.micro_batch={self.micro_batch}"]
        keys += [f"--transforms.recompute.policy={self.recompute}" if self.recompute else "--transforms.recompute=none"]
        reshard = "none" if self.reshard is None else str(self.reshard).lower()
        keys += [f"--transforms.shard.reduce={self.reduce}", f"--transforms.shard.reshard={reshard}"]
        return keys + ([f"--parallel.pipeline.schedule.name={self.schedule}"] if self.schedule else [])

    def fragment(self) -> str:
        """Returns the candidate as lines of a recipe."""
        sizes = self.layout.sizes()
        lines = ["[parallel]", *(f"{axis} = {sizes[axis]}" for axis in (*DENSE, "ep") if sizes[axis] > 1 or axis == "dp_shard")]
        lines += ["", "[parallel.pipeline]", f'schedule = {{ name = "{self.schedule}" }}'] if self.schedule else []
        lines += ["", "[train]", f"micro_batch = {self.micro_batch}", "", "[transforms.shard]", f'reduce = "{self.reduce}"']
        lines += [] if self.reshard is None else [f"reshard = {str(self.reshard).lower()}"]
        lines += ["", "[transforms.recompute]", f'policy = "{self.recompute}"'] if self.recompute else []
        lines += [] if self.recompute else ["", "# without [transforms.recompute]"]
        return "\n".join(lines)

    def __str__(self) -> str:
        kept = {None: "", True: ", reshard", False: ", keep gathered"}[self.reshard]
        parts = [str(self.layout), f"micro-batch {self.micro_batch}", f"recompute {self.recompute or 'nothing'}"]
        return ", ".join([*parts, f"reduce {self.reduce}{kept}", *([self.schedule] if self.schedule else [])])

    def as_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return {
            "layout": self.layout.sizes(),
            "overrides": self.overrides(),
            "fragment": self.fragment(),
            "memory": self.memory,
            "memory_counted": self.counted,
            "modeled": self.time.as_json(),
        }


@dataclass(frozen=True)
class Rejected:
    """A candidate that is not offered, and why."""

    candidate: Candidate
    reason: str


@dataclass
class SearchResult:
    """The best candidates, and why others were not offered.

    Attributes:
        best: fastest first, one for each kind of layout (pipeline, context, tensor and expert parallelism). The memory of the
            first one is counted.
        rejected: faster candidates that do not fit or are refused, one for each kind of layout, fastest first.
        slower: for each other kind of layout its fastest candidate, which may not fit.
        refused: reason of `check` -> number of candidates.
        too_large: number of faster candidates that do not fit into memory.
        priced: number of candidates whose step was modeled.
        memory: bytes that a rank may hold.
        seconds: duration of the search.
    """

    memory: int
    best: list[Candidate] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    slower: list[Candidate] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    too_large: int = 0
    priced: int = 0
    seconds: float = 0.0


def search(
    recipe: str,
    overrides: Sequence[str],
    world: int,
    registry: Registry,
    hardware: Hardware,
    efficiency: Efficiency,
    *,
    memory: int | None = None,
    wanted: int = 5,
    imbalance: float = IMBALANCE,
    count: bool = True,
) -> SearchResult:
    """Returns the `wanted` fastest ways to run a recipe on `world` GPUs.

    Args:
        recipe, overrides: as for a run; their layout and memory options are replaced.
        world: number of GPUs.
        registry: where components are found.
        hardware: GPUs and links.
        efficiency: what they reach.
        memory: bytes that a rank may hold; by default nine tenths of the GPU's memory.
        wanted: number of candidates.
        imbalance: see `Execution`.
        count: whether a dry run counts the memory of the best candidate, so that it surely fits. This takes some seconds.

    Raises:
        ForgeError: the time cannot be modeled, or no candidate fits into `memory`; the message names the smallest one.
    """
    began = monotonic()
    bound = int(USABLE * hardware.memory) if memory is None else memory
    # A layout that is surely legal, only to read the rest of the recipe: the search replaces it.
    first = _readable(recipe, overrides, world, registry)
    modeled = ModeledRecipe(first.job)
    result = SearchResult(bound)
    pricing = _Pricing(first, modeled, world, hardware, efficiency, imbalance)
    candidates = [(one.time.seconds, number, one) for number, one in enumerate(pricing.candidates())]
    heapify(candidates)
    result.priced = len(candidates)
    if not candidates:
        raise ForgeError(f"no layout of {world} GPUs divides the {first.job.train.global_batch} sequences of train.global_batch")
    sizes = _Sizes(modeled, first.job)
    smallest, offered, said = None, set[Kind](), set[Kind]()
    # Factors of estimated memory that dry runs showed to be needed. What an estimate overlooks depends on what forwards keep.
    corrections = defaultdict[tuple[str | None, int], float](lambda: 1.0)
    while candidates:
        _, number, candidate = heappop(candidates)
        if len(result.best) >= wanted:
            if candidate.kind not in offered | said:
                said.add(candidate.kind)
                result.slower.append(candidate)
            continue
        if candidate.kind in offered:
            continue
        alike = candidate.recompute, candidate.layout.tp
        estimated = sizes.memory(candidate) * (PIPELINE_MARGIN if candidate.layout.pp > 1 else 1.0)
        held = candidate.memory or int(estimated * corrections[alike])
        candidate = replace(candidate, memory=held)
        if held <= bound and not candidate.exact:  # the bound is close, so few schedules have to be simulated
            candidate = pricing.exactly(candidate)
            heappush(candidates, (candidate.time.seconds, number, candidate))
            continue
        reason = ""
        if held > bound:
            result.too_large += 1
            reason = f"needs about {held / GIB:.1f} GiB of {bound / GIB:.1f} GiB"
        elif isinstance(loaded := _load(recipe, overrides, candidate, world, registry), str):
            reason = f"refused: {loaded}"
        elif count and not result.best:
            try:
                candidate = replace(candidate, memory=_counted(loaded, candidate.layout, registry, hardware, bound), counted=True)
            except ForgeError as refusal:  # of what a run builds after the checks
                reason = f"refused: {refusal}"
            else:
                if candidate.memory > bound:
                    corrections[alike] = max(corrections[alike], candidate.memory / estimated)
                    result.too_large += 1
                    reason = f"a dry run counts {candidate.memory / GIB:.1f} GiB of {bound / GIB:.1f} GiB"
        if reason.startswith("refused: "):
            refusal = reason.removeprefix("refused: ")
            result.refused[refusal] = result.refused.get(refusal, 0) + 1
        if smallest is None or candidate.memory < smallest.memory:
            smallest = candidate
        if not reason:
            result.best.append(candidate)
            offered.add(candidate.kind)
        elif candidate.kind not in said:
            said.add(candidate.kind)
            result.rejected.append(Rejected(candidate, reason))
    result.seconds = monotonic() - began
    if not result.best:
        raise ForgeError(_nothing(result, smallest, bound, world))
    return result


def _nothing(result: SearchResult, smallest: Candidate | None, bound: int, world: int) -> str:
    if smallest is not None and smallest.memory > bound:
        return (
            f"no layout of {world} GPUs fits into {bound / GIB:.1f} GiB for each rank: the smallest of {result.priced} needs "
            f"about {smallest.memory / GIB:.1f} GiB ({smallest}); use more GPUs, or GPUs with more memory"
        )
    reasons = "; ".join(f"{count} times: {reason}" for reason, count in result.refused.items())
    return f"every layout of {world} GPUs that fits into memory is refused: {reasons}"


def _readable(recipe: str, overrides: Sequence[str], world: int, registry: Registry) -> Recipe:
    """Returns the recipe in its own layout; if that does not fit `world`, without layout and checks.

    Raises:
        ConfigError: the recipe has faults that do not depend on the layout.
    """
    try:
        return load_recipe(recipe, overrides, world, registry, here=None)
    except ConfigError:
        return load_recipe(recipe, overrides, None, registry, here=None)


def _load(recipe: str, overrides: Sequence[str], candidate: Candidate, world: int, registry: Registry) -> Recipe | str:
    """Returns the recipe of a candidate, or why `check` refuses it."""
    try:
        return load_recipe(recipe, [*overrides, *candidate.overrides()], world, registry, here=None)
    except ConfigError as error:
        fault = error.faults[0]
        return f"{fault.key}: {fault.message}"


def _counted(recipe: Recipe, layout: Layout, registry: Registry, hardware: Hardware, bound: int) -> int:
    """Returns the largest peak of a rank in a dry run. Of a pipeline, the last and the first stage run: one has the head, the
    other keeps the activations of most micro-batches. The first one does not run if the last one needs more than `bound`."""
    stages, gpu = first_ranks(layout), Accelerator(hardware.name, hardware.memory)
    most = 0
    for rank in dict.fromkeys((stages[-1], stages[0])):
        (estimate,) = dry_run(recipe.job, layout, registry, hardware.per_node, (rank,), gpu).ranks
        most = max(most, sum(estimate.peak.values()))
        if most > bound:
            break
    return most


class _Pricing:
    """Models the step of every candidate."""

    def __init__(
        self, recipe: Recipe, modeled: ModeledRecipe, world: int, hardware: Hardware, efficiency: Efficiency, imbalance: float
    ) -> None:
        self._job, self._modeled, self._world = recipe.job, modeled, world
        self._hardware, self._efficiency = hardware, efficiency
        self._base = execution_of(recipe.job, Layout(dp_shard=world), imbalance)
        self._cuts: dict[tuple[int, str], tuple[Pipeline | None, tuple[StageBlocks, ...]] | None] = {}

    def candidates(self) -> Iterator[Candidate]:
        """Yields every candidate that divides the batch, the heads, the experts and the blocks."""
        batch, longest = largest_step(self._job)
        common = gcd(*batches_of(self._job).values())  # micro-batches divide the batches of all phases
        for layout in _layouts(self._modeled, self._world, self._hardware.per_node, longest):
            if common % layout.data:
                continue
            rows = common // layout.data
            for schedule in _schedules(layout, len(self._modeled.work.blocks)):
                cut = self._cut(layout.pp, schedule)
                if cut is None:
                    continue
                for micro_batch in (size for size in divisors(rows) if size <= LARGEST_MICRO_BATCH):
                    count = batch // layout.data // micro_batch
                    if cut[0] is not None and cut[0].schedule.refusal(layout.pp, count):
                        continue
                    for recompute, (reduce, reshard) in product((None, "selective", "full"), _sharding(layout, count)):
                        keys = layout, micro_batch, recompute, reduce, reshard, schedule
                        yield Candidate(*keys, self._time(*keys, exact=layout.pp == 1), exact=layout.pp == 1)

    def exactly(self, candidate: Candidate) -> Candidate:
        """Returns the candidate with the simulated schedule of its pipeline."""
        keys = (
            candidate.layout,
            candidate.micro_batch,
            candidate.recompute,
            candidate.reduce,
            candidate.reshard,
            candidate.schedule,
        )
        return replace(candidate, time=self._time(*keys, exact=True), exact=True)

    def _time(
        self, layout: Layout, rows: int, recompute: Any, reduce: Any, reshard: bool | None, schedule: str, *, exact: bool
    ) -> StepTime:
        cut = self._cut(layout.pp, schedule)
        assert cut is not None, "candidates can be cut"
        count = self._job.train.global_batch // (layout.data * rows)
        execution = replace(self._base, rows=rows, micro_batches=count, recompute=recompute, reduce=reduce, reshard=reshard)
        work, hardware, efficiency = self._modeled.work, self._hardware, self._efficiency
        return predict(work, cut[1], layout, execution, hardware, efficiency, cut[0], exact=exact)

    def _cut(self, ranks: int, schedule: str) -> tuple[Pipeline | None, tuple[StageBlocks, ...]] | None:
        """Returns a pipeline with its stages; None if the model cannot be cut into so many."""
        if (ranks, schedule) not in self._cuts:
            pipeline = SCHEDULES[schedule]
            try:
                self._cuts[ranks, schedule] = pipeline, stages_of(self._modeled.blueprint, pipeline, ranks)
            except ForgeError:
                self._cuts[ranks, schedule] = None
        return self._cuts[ranks, schedule]


def _layouts(modeled: ModeledRecipe, world: int, per_node: int, length: int) -> Iterator[Layout]:
    """Yields layouts: tensor parallelism within a node, the number of experts divided by `ep`, whole replicas of shards."""
    units, blocks = modeled.blueprint.specs.units, len(modeled.work.blocks)
    heads = units.get("heads", 1)
    experts = max((block.experts for block in modeled.work.blocks), default=0)
    for tp in divisors(per_node):
        if world % tp or heads % tp:
            continue
        for pp, cp in product(divisors(world // tp), divisors(MOST_CONTEXT)):
            if pp > blocks or world % (tp * pp * cp) or (cp > 1 and (length // cp < SHORTEST or not modeled.work.shares_rows)):
                continue
            data = world // (tp * pp * cp)
            for shard in divisors(data):
                # Replicas of less than a node only cost memory; of a node or more they keep gathers within it.
                if shard != data and shard * cp * tp < per_node:
                    continue
                for ep in divisors(experts) if experts else (1,):
                    if shard * cp * tp % ep == 0:
                        yield Layout(pp=pp, dp_replicate=data // shard, dp_shard=shard, cp=cp, tp=tp, ep=ep)


SCHEDULES: Mapping[str, Pipeline | None] = {
    "": None,
    "1f1b": Pipeline(OneForwardOneBackward().build()),
    "interleaved": Pipeline(Interleaved().build()),
}
"""Schedules that are tried; those that split backwards need more of a model, and are left to the user."""


def _schedules(layout: Layout, blocks: int) -> tuple[str, ...]:
    if layout.pp == 1:
        return ("",)
    return ("1f1b", "interleaved") if blocks >= 2 * layout.pp else ("1f1b",)


def _sharding(layout: Layout, micro_batches: int) -> tuple[tuple[str, bool | None], ...]:
    """Returns the values of `reduce` and `reshard` that differ in this layout."""
    if layout.dp_shard * layout.dp_replicate * layout.cp == 1:
        return (("last", None),)
    if layout.pp > 1:
        return (("last", None), ("last", True))
    reduces = ("last", "each") if micro_batches > 1 else ("last",)
    return tuple(product(reduces, (None, False)))


class _Sizes:
    """Memory of candidates; what does not depend on `reduce` and `reshard` is computed once."""

    def __init__(self, modeled: ModeledRecipe, job: Any) -> None:
        self._modeled, self._job = modeled, job
        self._known: dict[tuple[Any, ...], Needs] = {}
        self._units: dict[tuple[Any, ...], Units] = {}

    def memory(self, candidate: Candidate) -> int:
        """Returns the bytes of the rank that holds most."""
        layout, job = candidate.layout, self._job
        key = (layout, candidate.micro_batch, candidate.recompute, candidate.schedule)
        if key not in self._known:
            batch, length = largest_step(job)
            load = Load(
                tokens=candidate.micro_batch * length,
                micro_batches=batch // (layout.data * candidate.micro_batch),
                top_k=max((block.top_k for block in self._modeled.work.blocks), default=1) or 1,
                compute=job.precision.compute,
                state=job.precision.state,
                recompute=candidate.recompute,
                every=getattr(job.transforms.get("recompute"), "every", 1),
            )
            pipeline = SCHEDULES[candidate.schedule]
            cut = (layout.tp, layout.ep, layout.etp, layout.dp_shard * layout.cp, layout.pp, candidate.schedule)
            if cut not in self._units:
                self._units[cut] = units_of(self._modeled.blueprint, layout, load.top_k, pipeline)
            self._known[key] = needs(self._modeled.blueprint, layout, load, pipeline, self._units[cut])
        option = options(self._known[key], (candidate.reduce,), (candidate.reshard,))  # type: ignore[arg-type]
        return option[0].memory
