"""From a resolved recipe to a `Run`: asks components to build themselves, in the one order that works.

Nothing concrete is named here. Data first, since it can refuse cheaply; then the newest checkpoint, which is compared with the
recipe; then the model through blueprint, plan and `realize`, where a checkpoint takes the place of initial weights; at last the
directory, when nothing is left that could refuse.
"""

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forge_ckpt.checkpoint.read import VerifiedCheckpoint
from forge_ckpt.checkpoint.retention import SECONDS
from forge_ckpt.world import ProcessGroupWorld, SingleProcessWorld
from forge_core.errors import ForgeError
from forge_core.machine import idle_accelerator, threads_per_process
from forge_core.redaction import redacted_text
from forge_core.registry import Registry
from forge_data.loading.evaluation import evaluation
from forge_data.loading.items import names_of
from forge_data.loading.stream import open_stream
from forge_models.accelerator import has_flex
from forge_parallel.accelerator import name
from forge_parallel.launch.environment import Launch
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import build_optimizer
from forge_parallel.optim.stages import apply, stage_at
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.step.timing import StepTimer
from forge_train.directory import CHECKPOINTS, elsewhere, forget, keep_recipe, prepare_directory, probe, refuse_fresh, remind
from forge_train.doctor.speed import bf16_remark
from forge_train.doctor.torch_build import faults
from forge_train.plan import plan_of
from forge_train.process.progress import is_automatic, note_start, refuse_without_progress
from forge_train.process.ranks import Agreement, rank_zero_first
from forge_train.process.stop import Stop
from forge_train.recipe.parameters import settings_in
from forge_train.run.checkpoints import Checkpoints, build_hooks, restore_hooks
from forge_train.run.health import Health
from forge_train.run.loop import Back
from forge_train.run.micro_batch import read_note
from forge_train.run.resume import check_resume, check_without_checkpoint
from forge_train.run.run import Run, State
from forge_train.run.saves import saves_of
from forge_train.run.weights import facts_of_checkpoint, facts_of_start, initial_weights
from forge_train.trackers import METRICS, JsonlTracker, SafeTracker

if TYPE_CHECKING:
    from rich.console import Console

    from forge_train.recipe.load import Resolved

_log = logging.getLogger(__name__)


def _refuse_extras(blueprint: Blueprint, sources: Iterable[Any]) -> None:
    """Refuses data that have more than tokens where the model says that it does not take that.

    Raises:
        ForgeError: names what it is.
    """
    takes = getattr(blueprint.module, "inputs", None)
    if isinstance(takes, frozenset) and (odd := names_of(sources) - takes):
        raise ForgeError(
            f"the data have {' and '.join(sorted(odd))}, which the model does not take; set model.name to one that does, such as "
            "'vlm', or remove these sources"
        )


def assemble(
    resolved: "Resolved",
    directory: Path,
    where: Launch,
    device: torch.device,
    registry: Registry,
    console: "Console | None",
    *,
    fresh: bool = False,
    back: Back | None = None,
    ranks: Agreement | None = None,
    begin: Callable[[], None] = lambda: None,
) -> Run:
    """Collective: builds everything on this rank, with an open process group.

    Everything that can refuse does so before the run's directory is taken over: until then nothing in it changes but prepared
    data, and an older job goes on.

    Args:
        fresh: start at step 0 and move what is there aside.
        back: go back to a checkpoint of this run, and on from there with other data.
        ranks: what says on every rank what one of them refuses; by default each one's faults are its own.
        begin: called once the directory is this run's.

    Raises:
        ForgeError: directory, data, plan, checkpoint or a component do not fit; see the packages.
    """
    job, layout = resolved.job, resolved.layout
    assert layout is not None, "a run is resolved for a world"
    ranks = ranks or Agreement()
    topology = Topology.of(layout, device)
    world = ProcessGroupWorld() if topology.size > 1 else SingleProcessWorld()
    say = _announcer(console)
    threads = threads_per_process(where.local_size, job.train.threads, os.environ)
    torch.set_num_threads(threads.count)
    say(f"cpu: {threads}")
    if idle := idle_accelerator(device.type, os.environ):
        say("\n  ".join([f"warning: {idle}", *faults()]))
    if device.type == "cpu" and job.precision.compute == "bf16" and console is not None and (remark := bf16_remark()):
        say(remark)

    with ranks.together("the kernels"):
        core = getattr(getattr(job.model, "attention", None), "core", None)
        if core in ("flex", "varlen") and not has_flex(device):
            why = f"needs a CUDA device, and this is {name(device)}"
            raise ForgeError(f"model.attention.core = {core!r} {why}; set it to 'auto' or 'sdpa'")
    asked = job.train.micro_batch
    with ranks.together("the micro-batch that fits", collective=True):
        job, fits = read_note(directory, job, world) if not fresh else (job, "")
    with ranks.together("the directory and the data"), rank_zero_first(world):
        refuse_fresh(job, fresh)
        if world.rank == 0 or directory.is_dir():  # one that is missing is tried out by one rank
            probe(directory, fresh)
        vocab_size = getattr(job.model, "vocab_size", None)
        shape: dict[str, Any] = {"workspace": directory / "data", "vocab_size": vocab_size, "model": job.model, "report": say}
        data = open_stream(
            job.data,
            seed=job.job.seed,
            global_batch=job.train.global_batch,
            micro_batch=job.train.micro_batch,
            rank=topology.data_rank,
            ranks=topology.data_size,
            **shape,
        )
        evaluations = evaluation(job.data, tokenizer=data.tokenizer, **shape)

    policy = back.step if back else "never" if fresh else job.checkpoint.resume
    store = job.checkpoint.store.build(directory / CHECKPOINTS)
    checkpoints = Checkpoints(store, world, resolved.as_json(), registry.used(resolved.used), job.checkpoint.policy())
    with ranks.together("the newest checkpoint and the devices", collective=True):
        found = checkpoints.newest(policy)
    automatic = back is None and is_automatic(os.environ)
    with ranks.together("the progress"):
        if topology.rank == 0:
            refuse_without_progress(directory, found.step if found else 0, automatic)
    with ranks.together("the weights to start from"):
        checkpoints.origin = facts_of_checkpoint(found.meta) if found else facts_of_start(job, registry, data.tokenizer)
        checkpoints.tokenizer = None if data.tokenizer is None else data.tokenizer.fingerprint
    with ranks.together("the plan"):
        noted = check_resume(found, resolved, registry, data) if found else check_without_checkpoint(resolved)
        blueprint = Blueprint.of(job.model.build)
        _refuse_extras(
            blueprint, [*getattr(data, "sources", ()), *(getattr(each, "source", None) for each in evaluations.values())]
        )
        settings = settings_in(job, blueprint)
        blueprint = apply(blueprint, settings)
        checkpoints.frozen = settings.frozen
        plan = plan_of(job, layout, registry)
        factor, objective = job.schedule.build(job.train.max_steps), job.objective.build()
    restored: list[Any] = []
    state = State(0, 0, data.start())
    meta: dict[str, Any] = {"hooks": []}

    def optimizer_of(model: ParallelModel) -> Any:
        return build_optimizer(job.optimizer, model, settings)

    def take_up(found: VerifiedCheckpoint, model: ParallelModel, optimizer: Any) -> None:
        # Beginning is what a stage begins with: of settings in which that is trained, by an optimizer of one stage.
        again = lambda some: build_optimizer(job.optimizer, some, getattr(optimizer, "stage_settings", settings))  # noqa: E731
        meta.update(checkpoints.restore(found, model, optimizer, again))
        state.step, state.tokens, state.cursor = found.step, meta["tokens"], meta["cursor"]

    def restore(model: ParallelModel) -> None:
        assert found is not None
        restored.append(optimizer_of(model))
        take_up(found, model, restored[0])

    with ranks.together("the model", collective=True):
        weights = restore if found else initial_weights(job, registry, say)
        model = realize(blueprint, plan, topology, weights, job.precision.compute, job.precision.state)
        optimizer = restored[0] if restored else optimizer_of(model)
    parameters = model.parameter_count()
    now = checkpoints.frozen_by(optimizer)
    frozen = f" ({len(now)} tensors frozen)" if now else ""
    if settings.stages:
        frozen += f", stage {stage_at(settings.stages, state.step) + 1} of {len(settings.stages)}"
    names = ", ".join(plan.names()) or "none"
    say(f"model: {parameters:,} parameters{frozen}, layout {layout}, {name(device)}, transforms: {names}")

    phases = StepTimer(device)
    run = Run(
        job=job,
        directory=directory,
        topology=topology,
        model=model,
        optimizer=optimizer,
        factor=factor,
        step=Step(model, objective, phases=phases),
        data=data,
        evaluations=evaluations,
        state=state,
        console=console,
        stop=Stop(job.train.max_steps, job.train.stop_at),
        health=Health(job.train.max_skipped, job.train.rollback_after, warns=topology.rank == 0),
        parameters=parameters,
        config=resolved.as_json(),
        phases=phases,
        lag=0 if device.type == "cpu" else 1,
        recipe_micro_batch=asked if fits else 0,
    )
    with ranks.together("the hooks"):
        trackers = [tracker.build(run) for tracker in job.trackers] if topology.rank == 0 else []
        run.hooks = build_hooks(resolved, registry)
        for hook in run.hooks:
            hook.check(run)
        dropped = restore_hooks(run.hooks, meta["hooks"])
    if found:
        with ranks.together("what hooks keep", collective=True):
            checkpoints.restore_kept(found, run)
    with ranks.together("memory for checkpoints", collective=True):
        saves = saves_of(job, checkpoints, run)

    with ranks.together("taking over the directory"):
        if topology.rank == 0:
            prepare_directory(directory, store, fresh, say)
    if fresh:
        checkpoints.store = job.checkpoint.store.build(directory / CHECKPOINTS)  # the old one's directory was moved
    with ranks.together("taking the checkpoints", collective=True):
        run.stop.fence = checkpoints.own()
        if later := checkpoints.later(policy):
            noted = check_resume(later, resolved, registry, data)
            take_up(later, model, optimizer)
            dropped = restore_hooks(run.hooks, meta["hooks"])
            checkpoints.restore_kept(later, run)
        checkpoints.tidy(later or found)
    with ranks.together("the logs"):
        begin()
        if topology.rank == 0:
            keep_recipe(directory, resolved.as_toml())
            note_start(directory, state.step, automatic)
            numbers = JsonlTracker(directory / METRICS)  # every run has it, in its recipe or not
            others = [tracker for tracker in trackers if getattr(tracker, "path", None) != numbers.path]
            run.trackers = [SafeTracker(tracker) for tracker in (numbers, *others)]
    for tracker in run.trackers:
        tracker.rewind(state.step)
    if "health" in meta:
        run.health.load(meta["health"], state.step)
    if fits:
        run.health.warn(fits)
    if back:
        back.take(run)
    if later or found:
        run.resumed, run.elapsed = True, meta.get(SECONDS, 0.0)
        changed = "; changed since:" if noted else ""
        say(
            "\n  ".join([f"resuming after step {state.step} from {elsewhere(store) or directory / CHECKPOINTS}{changed}", *noted])
        )
        for line in checkpoints.other_frozen(meta, optimizer):
            say(line)
        for key in dropped:
            say(f"the checkpoint has a state of hook {key!r}, and no hook of the recipe takes it: the state is dropped")
    elif not fresh:
        remind(directory, say)

    if saves.background is not None:
        saves.background.store, saves.background.fence = checkpoints.store, run.stop.fence
    saves.first = lambda: forget(directory)
    run.save, run.finish_saves, run.close = lambda: saves.save(run), lambda: saves.finish(run), saves.close
    run.may_save, run.check = lambda: saves.may_begin(run), lambda: checkpoints.check(run)

    def advice() -> str:
        saves.settle(run, wait=True)  # it may be the one to go back to
        return checkpoints.advice(run.health)

    def good_step() -> int | None:
        saves.settle(run, wait=True)
        return checkpoints.good_step(run.health)

    run.health.advice, run.good_step = advice, good_step
    return run


def _announcer(console: "Console | None") -> Callable[[str], None]:
    """Messages of the set-up: to the terminal on rank 0, to the log on every rank."""

    def say(message: str) -> None:
        _log.info(message)
        if console is not None:
            console.print(redacted_text(message), highlight=False, soft_wrap=True)

    return say
