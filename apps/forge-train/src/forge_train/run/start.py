"""From a recipe to a run, in five steps: `look`, `decide`, `build`, `confirm`, `take_over`.

Each step receives plain data and returns plain data, and `take_over` is the only one that writes: until then an older job of the
same directory goes on, and a start that is refused changes nothing but prepared data, which is named by its content.

Ranks refuse together: every block in `JobRanks.together` has one name per start and is entered by all ranks in the same order.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forge_ckpt.checkpoint.read import VerifiedCheckpoint
from forge_ckpt.checkpoint.retention import SECONDS
from forge_core.errors import ForgeError
from forge_core.machine import idle_accelerator, threads_per_process
from forge_core.protocols.data import Cursor, EvaluationSet, Stream
from forge_core.protocols.run import Tracker
from forge_data.loading.evaluation import evaluation
from forge_data.loading.items import names_of
from forge_data.loading.stream import open_stream
from forge_models.accelerator import has_flex
from forge_parallel.accelerator import name
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.stages import apply, stage_at
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step, StepTimer
from forge_train.directory import (
    CHECKPOINTS,
    elsewhere,
    keep_plugin_files,
    keep_recipe,
    prepare_directory,
    probe,
    refuse_fresh,
    remind,
    run_directory,
)
from forge_train.doctor.speed import bf16_remark
from forge_train.doctor.torch_build import faults
from forge_train.formats.base import BASE
from forge_train.plan import plan_of
from forge_train.process.ranks import JobRanks, rank_zero_first
from forge_train.process.restarts import is_automatic, note_start, refuse_without_progress
from forge_train.recipe.checks import flex_refusal
from forge_train.recipe.schema import Job
from forge_train.run.base import FrozenBase
from forge_train.run.checkpoints import Checkpoints, Restoration, build_hooks, changed_training, restore_hooks
from forge_train.run.micro_batch import read_note
from forge_train.run.reference import with_reference
from forge_train.run.resume import check_resume, check_without_checkpoint
from forge_train.run.run import Run
from forge_train.run.teacher import with_teacher
from forge_train.run.training import Decided, OptimizerSpec, State, Training, settings_in
from forge_train.run.weights import InitialWeights, facts_of_checkpoint, facts_of_start
from forge_train.starts import record_start
from forge_train.trackers import METRICS, JsonlTracker, SafeTracker

if TYPE_CHECKING:
    from forge_train.recipe.load import Recipe


@dataclass(frozen=True)
class Back:
    """Where a rollback leads.

    Attributes:
        step: step of the checkpoint.
        cursor: data position of this rank from there on.
        rollbacks: see `forge_train.run.health.Health`.
        lr_scale: see `forge_train.run.health.Health`.
    """

    step: int
    cursor: Cursor
    rollbacks: int
    lr_scale: float


@dataclass(frozen=True)
class Surroundings:
    """What a start finds: its directory, its data, and the checkpoint to resume from.

    Attributes:
        job: the recipe with the micro-batch that fits into memory.
        micro_batch_note: why that micro-batch is not the recipe's; empty if it is.
        directory: directory of the run.
        topology: this rank's place in the layout.
        data: training data.
        evaluations: held-out sets by name.
        checkpoints: the checkpoints of the run.
        policy: which checkpoint is resumed from: a step, or a value of `checkpoint.resume`.
        checkpoint: the checkpoint to resume from; None for a new run.
        automatic: whether a launcher has started the run again.
        fresh: whether earlier files of the directory are moved aside.
        back: where a rollback leads; None if there was none.
    """

    job: Job
    micro_batch_note: str
    directory: Path
    topology: Topology
    data: Stream
    evaluations: Mapping[str, EvaluationSet]
    checkpoints: Checkpoints
    policy: Any
    checkpoint: VerifiedCheckpoint | None
    automatic: bool
    fresh: bool
    back: Back | None


def start_run(recipe: "Recipe", ranks: JobRanks, *, fresh: bool = False, back: Back | None = None) -> Run:
    """Collective: builds the run of a recipe on this rank; the process group is open.

    Args:
        fresh: start at step 0, and move earlier files of the directory aside.
        back: continue from a checkpoint of this run with other data, after a rollback.

    Raises:
        ForgeError: directory, data, plan, checkpoint or a component do not fit.
    """
    ranks = ranks.again(back.rollbacks if back else 0)
    seen = look(recipe, ranks, fresh, back)
    decided = with_teacher(with_reference(decide(recipe, seen, ranks), seen.checkpoint, ranks), ranks)
    training = build(decided, seen, ranks)
    run = Run.of(decided, training, seen.checkpoints, ranks)
    trackers, dropped = confirm(run, seen)
    take_over(run, seen, trackers, dropped)
    return run


def look(recipe: "Recipe", ranks: JobRanks, fresh: bool, back: Back | None) -> Surroundings:
    """Collective: looks at machine, directory, data and checkpoints. Writes nothing but prepared data.

    Raises:
        ForgeError: the directory cannot be used, data cannot be opened, or no checkpoint is as `checkpoint.resume` requires.
    """
    assert recipe.layout is not None, "the recipe is resolved for a number of processes"
    job, directory = recipe.job, run_directory(recipe.job)
    topology, world = Topology.of(recipe.layout, ranks.device), ranks.world
    _set_threads(job, ranks)
    with ranks.together("the kernels"):
        _check_kernels(job, ranks.device)
    note = ""
    if not fresh:
        with ranks.together("the micro-batch that fits", collective=True):
            job, note = read_note(directory, job, world)
    with ranks.together("the directory and the data"), rank_zero_first(world):
        refuse_fresh(job, fresh)
        if world.rank == 0 or directory.is_dir():  # only rank 0 tries out a directory that does not exist
            probe(directory, fresh)
        shared: dict[str, Any] = {
            "workspace": directory / "data",
            "vocab_size": getattr(job.model, "vocab_size", None),
            "model": job.model,
            "pairs": getattr(job.objective, "pairs", False),
            "report": ranks.say,
        }
        data = open_stream(
            job.data,
            seed=job.job.seed,
            global_batch=job.train.global_batch,
            micro_batch=job.train.micro_batch,
            rank=topology.data_rank,
            ranks=topology.data_size,
            **shared,
        )
        evaluations = evaluation(job.data, tokenizer=data.tokenizer, **shared)
    policy = back.step if back else "never" if fresh else job.checkpoint.resume
    checkpoints = Checkpoints(job.checkpoint.store.build(directory / CHECKPOINTS), world, job.checkpoint.policy())
    with ranks.together("the newest checkpoint", collective=True):
        checkpoint = checkpoints.newest(policy)
    automatic = back is None and is_automatic(os.environ)
    with ranks.together("the progress"):
        if topology.rank == 0:
            refuse_without_progress(directory, checkpoint.step if checkpoint else 0, automatic)
    return Surroundings(
        job=job,
        micro_batch_note=note,
        directory=directory,
        topology=topology,
        data=data,
        evaluations=evaluations,
        checkpoints=checkpoints,
        policy=policy,
        checkpoint=checkpoint,
        automatic=automatic,
        fresh=fresh,
        back=back,
    )


def decide(recipe: "Recipe", seen: Surroundings, ranks: JobRanks) -> Decided:
    """Collective: decides everything on the meta device: plan, optimizer settings, schedule, hooks. Allocates and writes nothing.

    Raises:
        ForgeError: the recipe does not fit its model, its weights, its data, or the checkpoint to resume from.
    """
    job, layout, registry, checkpoint = seen.job, seen.topology.layout, recipe.registry, seen.checkpoint
    with ranks.together("the weights to start from"):
        origin = facts_of_checkpoint(checkpoint.meta) if checkpoint else facts_of_start(job, registry, seen.data.tokenizer)
    base = None
    if getattr(job.model, "lora", None) is not None:
        with ranks.together("the base of the adapter", collective=True):
            base = FrozenBase(job, registry, seen.checkpoints.world)
            if checkpoint:
                base.check(checkpoint.name, checkpoint.meta)
            origin = {**origin, BASE: base.identity}
    with ranks.together("the plan"):
        differences = check_resume(checkpoint, recipe, registry, seen.data) if checkpoint else check_without_checkpoint(recipe)
        blueprint = Blueprint.of(job.model.build)
        sources = [*getattr(seen.data, "sources", ()), *(getattr(each, "source", None) for each in seen.evaluations.values())]
        _check_inputs(blueprint, sources)
        settings = settings_in(job, blueprint)
        blueprint = apply(blueprint, settings)
        plan = plan_of(job, layout, registry)
        factor, objective = job.schedule.build(job.train.max_steps), job.objective.build()
        hooks = build_hooks(recipe, registry)
    return Decided(
        recipe=recipe,
        job=job,
        directory=seen.directory,
        topology=seen.topology,
        data=seen.data,
        evaluations=seen.evaluations,
        blueprint=blueprint,
        plan=plan,
        optimizer=OptimizerSpec(job.optimizer, settings),
        factor=factor,
        objective=objective,
        hooks=tuple(hooks),
        plugins=tuple(registry.used(recipe.used)),
        origin=origin,
        differences=differences,
        base=base,
    )


def build(decided: Decided, seen: Surroundings, ranks: JobRanks) -> Training:
    """Collective: allocates model and optimizer, and fills them: from the checkpoint, or with initial weights.

    Raises:
        ForgeError: the weights do not fit the model.
    """
    job, spec, topology, checkpoint = decided.job, decided.optimizer, decided.topology, seen.checkpoint
    state = State(0, 0, decided.data.start())
    with ranks.together("the model", collective=True):
        restoration = Restoration(seen.checkpoints, checkpoint, spec, decided.base) if checkpoint else None
        weights = restoration or InitialWeights(job, decided.recipe.registry, decided.base)
        model = realize(decided.blueprint, decided.plan, topology, weights, job.precision.compute, job.precision.state)
        optimizer = restoration.optimizer if restoration else spec.build(model)
    if isinstance(weights, InitialWeights):
        for note in weights.notes:
            ranks.say(note)
    times = StepTimer(topology.device)
    training = Training(
        model=model,
        optimizer=optimizer,
        factor=decided.factor,
        step=Step(model, decided.objective, phases=times),
        times=times,
        data=decided.data,
        evaluations=decided.evaluations,
        state=state,
        parameters=model.parameter_count(),
    )
    if checkpoint and restoration:
        training.restored(checkpoint.step, restoration.facts)
    _say_model(decided, training, ranks)
    return training


def confirm(run: Run, seen: Surroundings) -> tuple[list[Tracker], list[str]]:
    """Collective: lets hooks check the complete run, restores them, and reserves room for checkpoints. Writes nothing.

    Returns:
        The trackers of the recipe, on rank 0, and the keys of stored hook states that no hook takes.

    Raises:
        ForgeError: a hook cannot work with this run, or checkpoints have no room.
    """
    ranks, topology = run.ranks, run.topology
    with ranks.together("the hooks"):
        trackers = [tracker.build(run) for tracker in run.job.trackers] if topology.rank == 0 else []
        for hook in run.hooks:
            hook.check(run)
        dropped = restore_hooks(run.hooks, run.training.facts.get("hooks", ()))
    if seen.checkpoint:
        with ranks.together("what hooks keep", collective=True):
            seen.checkpoints.restore_hooks(seen.checkpoint, run.hooks, run.model)
    with ranks.together("memory for checkpoints", collective=True):
        run.saves.reserve()
    return trackers, dropped


def take_over(run: Run, seen: Surroundings, trackers: list[Tracker], dropped: list[str]) -> None:
    """Collective: takes the directory and its checkpoints from every older job, and opens logs and trackers.

    A checkpoint that an older job has saved since `look` is restored first.

    Raises:
        ForgeError: the directory or the store cannot be written, or a checkpoint that was saved since does not fit.
    """
    ranks, job, directory, checkpoints = run.ranks, run.job, run.directory, seen.checkpoints
    registry, rank_0 = run.decided.recipe.registry, run.topology.rank == 0
    store, checkpoint, differences = checkpoints.store, seen.checkpoint, run.decided.differences
    with ranks.together("taking over the directory"):
        if rank_0:
            prepare_directory(directory, store, seen.fresh, ranks.say)
    if seen.fresh:
        store = job.checkpoint.store.build(directory / CHECKPOINTS)  # the directory of the old store was moved
    with ranks.together("taking the checkpoints", collective=True):
        run.saves.own(store)
        run.stop.fence = checkpoints.fence
        if later := checkpoints.later(seen.policy):
            checkpoint = later
            differences = check_resume(later, run.decided.recipe, registry, run.data)
            facts = checkpoints.restore(later, run.model, run.optimizer, run.decided.optimizer)
            run.training.restored(later.step, facts)
            dropped = restore_hooks(run.hooks, facts.get("hooks", ()))
            checkpoints.restore_hooks(later, run.hooks, run.model)
        checkpoints.tidy(checkpoint)
    with ranks.together("the logs"):
        if ranks.log is not None and not ranks.log.is_open:
            ranks.watch.log_to(ranks.log.open(directory))
        if rank_0:
            keep_recipe(directory, run.decided.recipe.as_toml())
            keep_plugin_files(directory, (registry.find(group, name) for group, name in run.decided.recipe.used))
            note_start(directory, run.state.step, seen.automatic)
            record_start(run, rollback=seen.back is not None)
            run.trackers = _opened(trackers, directory)
    for tracker in run.trackers:
        tracker.rewind(run.state.step)
    _go_on(run, seen)
    if checkpoint:
        _say_resumed(run, elsewhere(store) or str(directory / CHECKPOINTS), differences, dropped)
    elif not seen.fresh:
        remind(directory, ranks.say)


def _set_threads(job: Job, ranks: JobRanks) -> None:
    """Sets the number of threads, and warns of a device that is not used or slow."""
    threads = threads_per_process(ranks.launch.local_size, job.train.threads, os.environ)
    torch.set_num_threads(threads.count)
    ranks.say(f"cpu: {threads}")
    if idle := idle_accelerator(ranks.device.type, os.environ):
        ranks.say("\n  ".join([f"warning: {idle}", *faults()]))
    bf16_on_cpu = ranks.device.type == "cpu" and job.precision.compute == "bf16"
    if bf16_on_cpu and ranks.console is not None and (remark := bf16_remark()):
        ranks.say(remark)


def _check_kernels(job: Job, device: torch.device) -> None:
    core = getattr(getattr(job.model, "attention", None), "core", None)
    if core in ("flex", "varlen") and not has_flex(device):
        why = f"needs a CUDA device, and this is {name(device)}"
        raise ForgeError(f"model.attention.core = {core!r} {why}; set it to 'auto' or 'sdpa'")
    if has_flex(device) and (why := flex_refusal(job)):
        raise ForgeError(why)


def _check_inputs(blueprint: Blueprint, sources: Iterable[Any]) -> None:
    """Checks that the model takes every input that the data have.

    Raises:
        ForgeError: names the inputs that it does not take.
    """
    takes = getattr(blueprint.module, "inputs", None)
    if isinstance(takes, frozenset) and (unknown := names_of(sources) - takes):
        raise ForgeError(
            f"the data have {' and '.join(sorted(unknown))}, which the model does not take; set model.name to one that does, "
            "such as 'vlm', or remove these sources"
        )


def _say_model(decided: Decided, training: Training, ranks: JobRanks) -> None:
    frozen = decided.optimizer.frozen(training.optimizer)
    detail = f" ({len(frozen)} tensors frozen)" if frozen else ""
    if stages := decided.optimizer.settings.stages:
        detail += f", stage {stage_at(stages, training.state.step) + 1} of {len(stages)}"
    transforms = ", ".join(decided.plan.names()) or "none"
    ranks.say(
        f"model: {training.parameters:,} parameters{detail}, layout {decided.topology.layout}, "
        f"{name(decided.topology.device)}, transforms: {transforms}"
    )


def _opened(trackers: list[Tracker], directory: Path) -> list[SafeTracker]:
    """Returns the trackers of a run. Every run writes metrics.jsonl, whether its recipe has that tracker or not."""
    metrics = JsonlTracker(directory / METRICS)
    others = [tracker for tracker in trackers if getattr(tracker, "path", None) != metrics.path]
    return [SafeTracker(tracker) for tracker in (metrics, *others)]


def _go_on(run: Run, seen: Surroundings) -> None:
    """Continues the health and the clock of the checkpoint, or from where a rollback leads."""
    facts, health = run.training.facts, run.health
    if "health" in facts:
        health.load(facts["health"], run.state.step)
    if seen.micro_batch_note:
        health.warn(seen.micro_batch_note)
    run.clock.earlier = facts.get(SECONDS, 0.0)
    if seen.back:
        run.state.cursor = seen.back.cursor
        health.rollbacks, health.lr_scale = seen.back.rollbacks, seen.back.lr_scale
        run.requests.save = True  # later starts go on from this data position


def _say_resumed(run: Run, where: str, differences: Iterable[str], dropped: Iterable[str]) -> None:
    differences, say, spec = list(differences), run.ranks.say, run.decided.optimizer
    changed = "; changed since:" if differences else ""
    say("\n  ".join([f"resuming after step {run.state.step} from {where}{changed}", *differences]))
    for line in changed_training(run.training.facts, spec.frozen(run.optimizer)):
        say(line)
    for key in dropped:
        say(f"the checkpoint has a state of hook {key!r}, and no hook of the recipe takes it: the state is dropped")
