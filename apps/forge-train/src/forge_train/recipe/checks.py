"""Rules across the sections of a recipe, as functions of (job, layout) that return faults. They run before torch is imported."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from forge_core.component import class_name
from forge_core.errors import Fault, MissingFile, RecipeWarning, did_you_mean
from forge_core.layout import Layout
from forge_core.machine import has_accelerator, hides_accelerators
from forge_train.components.evaluation import Best, EarlyStop, Evaluate, Sample, Tasks
from forge_train.components.hooks import Ema, Log, Profile, Progress, Replicas, Routing, Save
from forge_train.hooks.evaluation import result_names
from forge_train.recipe.schema import Job


def schedule_fits(job: Job, layout: Layout | None) -> list[Fault]:  # noqa: ARG001 (every check is given both)
    """A warm-up or decay that is longer than the run.

    Any schedule may answer `faults(steps)`; one of another distribution that does not is built without this check.
    """
    faults = getattr(job.schedule, "faults", None)
    return faults(job.train.max_steps) if faults else []


def schedule_suits_the_optimizer(job: Job, layout: Layout | None) -> list[Fault]:
    """A schedule that decays, for an optimizer whose averages take its place (Defazio et al., 2024).

    Steps of a decaying rate would weigh as much in the average as those of the full one.
    """
    steps = job.train.max_steps
    if not getattr(job.optimizer, "decays_by_itself", False) or schedule_fits(job, layout):
        return []
    factor, last = job.schedule.build(steps), 0.0
    for step in sorted({*range(0, steps, max(1, steps // 1000)), steps - 1}):
        now = factor(step)
        if now < last:
            return [
                Fault(
                    "schedule.name",
                    f"a rate that falls (from a factor of {last:.3g} to {now:.3g} at step {step}) is not for optimizer "
                    f"{class_name(job.optimizer)}, whose averages take the place of a decay",
                    hint="set schedule.name = 'constant', with a warm-up",
                )
            ]
        last = now
    return []


def stages_fit(job: Job, layout: Layout | None) -> Iterator[Fault]:  # noqa: ARG001 (every check is given both)
    """Stages of training that do not follow each other, or that never begin."""
    stages, first = job.train.stages, 0
    for index, stage in enumerate(stages):
        key, last = f"train.stages.{index}", index == len(stages) - 1
        if last and stage.until is not None:
            yield Fault(f"{key}.until", f"the last stage ends at step {stage.until}", hint="remove it, or add a stage behind it")
        elif not last and stage.until is None:
            yield Fault(f"{key}.until", "is missing: a stage follows that would never begin", hint="say at which step it ends")
        elif not last and (stage.until or 0) <= first:
            yield Fault(
                f"{key}.until", f"{stage.until} is not after {first}, where the stage begins", hint="stages stand in their order"
            )
        elif stage.until is not None and stage.until >= job.train.max_steps:
            text = (
                f"the stage after it begins at step {stage.until}, and the run ends with train.max_steps = {job.train.max_steps}"
            )
            yield RecipeWarning(f"{key}.until", text)
        length = (job.train.max_steps if stage.until is None else stage.until) - first
        for name, steps in stage.warmups.items():
            if 0 < length < steps:
                what = "" if name == "*" else f" of {name!r}"
                yield Fault(f"{key}.warmup", f"a warm-up of {steps} steps{what} is longer than its stage of {length}")
        first = stage.until or first


def mtp_fits(job: Job, layout: Layout | None) -> list[Fault]:  # noqa: ARG001 (every check is given both)
    """Multi-token prediction: a schedule of its weight that does not fit the run, or rows too short to have labels."""
    mtp = getattr(job.model, "mtp", None)
    if mtp is None:
        return []
    faults = getattr(mtp.schedule, "faults", None)
    found = [replace(fault, key=f"model.mtp.{fault.key}") for fault in (faults(job.train.max_steps) if faults else ())]
    if mtp.depth >= job.data.sequence_length:
        message = f"{mtp.depth} leaves no MTP label in rows of {job.data.sequence_length} tokens"
        found.append(Fault("model.mtp.depth", message, hint="lower it, or raise data.sequence_length"))
    return found


def evaluate_has_sets(job: Job, layout: Layout | None) -> list[Fault]:  # noqa: ARG001 (every check is given both)
    """A hook that evaluates, in a recipe without anything to evaluate on."""
    return [
        Fault(
            f"hooks.{index}.name",
            "'evaluate' needs a held-out set",
            hint='add a held-out set, such as [data.evaluation.held_out] name = "stdlib" split = "held_out"',
        )
        for index, hook in enumerate(job.hooks)
        if isinstance(hook, Evaluate) and not job.data.evaluation
    ]


def something_is_saved(job: Job, layout: Layout | None) -> list[Fault]:  # noqa: ARG001 (every check is given both)
    """A run whose weights are lost when it ends."""
    if any(isinstance(hook, Save) for hook in job.hooks):
        return []
    return [RecipeWarning("hooks", "hook 'save' is missing: no checkpoint is written", hint='add [[hooks]] name = "save"')]


def rollbacks_fit(job: Job, layout: Layout | None) -> Iterator[Fault]:  # noqa: ARG001 (every check is given both)
    """A run that may go back needs checkpoints; and data that it skips must not move a phase which counts in steps."""
    key = "train.rollback_after"
    if job.train.rollback_after is None:
        return
    if job.checkpoint.every == 0 or not any(isinstance(hook, Save) for hook in job.hooks):
        hint = 'set checkpoint.every, and add [[hooks]] name = "save"'
        yield Fault(key, "the run saves nothing that it could go back to", hint=hint)
    for index, phase in enumerate(job.data.phases):
        for name in ("sequence_length", "global_batch", "lr_scale"):
            if getattr(phase, name) is not None:
                text = f"going back skips data, so that data.phases.{index}.{name} would begin at another step than its data"
                yield Fault(key, text, hint="unset one of them")


def numbers_can_be_counted(job: Job, layout: Layout | None) -> list[Fault]:  # noqa: ARG001 (every check is given both)
    """Tokens and samples of the whole run are counted in 64 bits."""
    train = job.train
    tokens = train.max_steps * train.global_batch * job.data.sequence_length
    if tokens < 2**63:
        return []
    largest = max(
        ("train.max_steps", train.max_steps),
        ("train.global_batch", train.global_batch),
        ("data.sequence_length", job.data.sequence_length),
        key=lambda pair: pair[1],
    )
    return [Fault(largest[0], f"{largest[1]} gives {tokens:.1e} tokens, more than 64 bits can count", hint="lower it")]


def lengths_fit(job: Job, layout: Layout) -> list[Fault]:  # noqa: ARG001 (every check is given both)
    """A sequence that is longer than the model can take; a model that states no `max_length` takes any."""
    longest = getattr(job.model, "max_length", None)
    if longest is None or job.data.sequence_length <= longest:
        return []
    return [
        Fault(
            "data.sequence_length",
            f"{job.data.sequence_length} tokens are more than model.max_length = {longest}",
            hint=f"raise model.max_length or lower data.sequence_length to {longest}",
        )
    ]


def samples_can_be_made(job: Job, layout: Layout) -> Iterator[Fault]:  # noqa: ARG001 (every check is given both)
    """A hook that generates text: more text than the model can take."""
    longest = getattr(job.model, "max_length", None)
    for index, hook in enumerate(job.hooks):
        if not isinstance(hook, Sample):
            continue
        if empty := [place for place, prompt in enumerate(hook.prompts) if not prompt]:
            yield Fault(
                f"hooks.{index}.prompts.{empty[0]}", "is empty; a continuation needs a token to begin with", hint="leave it out"
            )
        counts = getattr(job.data.tokenizer, "tokens_of", None)  # of those that need neither training nor a file
        lengths = [counts(prompt) for prompt in hook.prompts] if counts is not None else []
        if longest is not None and hook.max_tokens < longest < max(lengths, default=0) + hook.max_tokens:
            yield Fault(
                f"hooks.{index}.prompts.{lengths.index(max(lengths))}",
                f"{max(lengths)} tokens and hooks.{index}.max_tokens = {hook.max_tokens} new ones are more than "
                f"model.max_length = {longest}",
                hint="shorten the prompt, or lower max_tokens",
            )
        if longest is not None and hook.max_tokens >= longest:
            yield Fault(
                f"hooks.{index}.max_tokens",
                f"{hook.max_tokens} new tokens leave no room for a prompt within model.max_length = {longest}",
                hint=f"lower it, to {max(longest // 2, 1)} for example",
            )


def kernels_fit_the_machine(job: Job, environment: Mapping[str, str]) -> Iterator[Fault]:
    """A kernel for GPUs where work runs on the CPU: a fault where the environment hides GPUs, else of a run that starts here."""
    core = getattr(getattr(job.model, "attention", None), "core", None)
    if core not in ("flex", "varlen"):
        return
    text, hint = f"{core!r} needs a CUDA device, and ", "set it to 'auto' or 'sdpa'"
    if hides_accelerators(environment):
        yield Fault("model.attention.core", f"{text}the environment hides all of them (CUDA_VISIBLE_DEVICES)", hint=hint)
    elif not has_accelerator():
        yield MissingFile("model.attention.core", f"{text}this machine shows none", hint=hint)


def profiles_fit(job: Job, layout: Layout | None) -> Iterator[Fault]:
    """A profile that never begins, windows that overlap, ranks that do not exist. One hook at a time can profile."""
    found = [(index, hook) for index, hook in enumerate(job.hooks) if isinstance(hook, Profile)]
    for index, hook in found:
        key, length = f"hooks.{index}", hook.warmup + hook.steps
        if index != found[0][0]:
            yield Fault(
                f"{key}.name", "'profile' is there twice; one profiler records a process", hint="remove one, and use `at`"
            )
        if not hook.at and not hook.every and hook.signal is None:
            yield Fault(f"{key}.name", "'profile' never begins", hint="set at = [100], every = 1000 or signal = 'SIGUSR2'")
        if late := [step for step in hook.at if step > job.train.max_steps]:
            yield Fault(f"{key}.at", f"step {late[0]} comes after the last one, train.max_steps = {job.train.max_steps}")
        begins = sorted({*hook.at, *(range(hook.every, job.train.max_steps + 1, hook.every) if hook.every else ())})
        close = [pair for pair in pairwise(begins) if pair[1] - pair[0] < length]
        if close:
            message = (
                f"windows of {hook.steps} steps after {hook.warmup} of warm-up overlap at steps {close[0][0]} and {close[0][1]}"
            )
            yield Fault(f"{key}.{'at' if hook.at else 'every'}", message, hint="set them further apart, or lower hooks.steps")
        absent = [rank for rank in hook.ranks if layout is not None and isinstance(rank, int) and rank >= layout.world]
        if absent:
            yield Fault(f"{key}.ranks", f"rank {absent[0]} does not exist: {layout.world if layout else 0} processes run")


def hooks_fit_together(job: Job, layout: Layout | None) -> Iterator[Fault]:  # noqa: ARG001 (every check is given both)
    """Hooks act in the order of the recipe: what uses the average of the weights, or a result, comes after what makes it, and
    what is saved was made before."""
    before: list[Any] = []
    for index, hook in enumerate(job.hooks):
        kinds = {type(other) for other in before}
        if isinstance(hook, Ema) and Ema in kinds:
            yield Fault(f"hooks.{index}.name", "'ema' is there twice; a run keeps one average", hint="remove one")
        if isinstance(hook, Ema) and getattr(job.optimizer, "decays_by_itself", False):
            yield Fault(
                f"hooks.{index}.name",
                f"'ema' averages weights, and optimizer {class_name(job.optimizer)} evaluates and saves averages already",
                hint="remove the hook",
            )
        if isinstance(hook, Evaluate | Sample | Tasks) and hook.weights == "ema" and Ema not in kinds:
            yield Fault(
                f"hooks.{index}.weights",
                "'ema' is the average that hook 'ema' keeps, and no such hook comes before",
                hint='add [[hooks]] name = "ema" above',
            )
        if isinstance(hook, Best | EarlyStop):
            yield from _metric_faults(job, f"hooks.{index}.metric", hook.metric, before)
        if isinstance(hook, Ema | Best | EarlyStop) and Save in kinds:
            yield Fault(
                f"hooks.{index}.name",
                f"'{_NAMES[type(hook)]}' comes after 'save', so a checkpoint would not have what it does at the same step",
                hint="put 'save' last",
            )
        before.append(hook)
    if not any(isinstance(hook, Save) for hook in job.hooks):
        for index, hook in enumerate(job.hooks):
            if isinstance(hook, Best):
                yield Fault(f"hooks.{index}.name", "'best' needs hook 'save', which saves", hint='add [[hooks]] name = "save"')


_NAMES: Mapping[type, str] = MappingProxyType({Ema: "ema", Best: "best", EarlyStop: "early_stop"})


def _metric_faults(job: Job, key: str, metric: str, before: Sequence[Any]) -> Iterator[Fault]:
    """A result of an evaluation that no hook before measures; of what other names hooks of others measure, nothing is known."""
    if not metric.startswith("evaluation/"):
        return
    known = _evaluated(job, before)
    if metric not in known:
        hint = did_you_mean(metric, known) or 'add [[hooks]] name = "evaluate" above'
        yield Fault(key, f"{metric!r} is measured by no hook that comes before", hint=hint)


def _evaluated(job: Job, hooks: Sequence[Any]) -> list[str]:
    """Results that some hooks measure."""
    found = [hook for hook in hooks if isinstance(hook, Evaluate)]
    return [name for hook in found for held_out in job.data.evaluation for name in result_names(held_out, hook.weights)]


_OURS = (Best, EarlyStop, Ema, Evaluate, Log, Progress, Replicas, Routing, Sample, Save)
_LOGGED = ("loss", "grad_norm", "tokens_per_second", "step_seconds", "peak_memory")


def final_metrics(job: Job) -> list[str] | None:
    """Numbers that a run of this recipe has at its end; None where hooks of others may log any."""
    if not all(type(hook) in _OURS for hook in job.hooks):
        return None
    logs = any(isinstance(hook, Log) for hook in job.hooks)
    return [*_evaluated(job, job.hooks), *(_LOGGED if logs else ())]


@dataclass(frozen=True)
class Switch:
    """What turns keys on.

    Attributes:
        key: of the recipe, as a person sets it.
        is_on: whether a recipe does.
        section: where the keys are.
        keys: of that section; None for all of them but `key`.
    """

    key: str
    is_on: Callable[[Job], bool]
    section: str
    keys: tuple[str, ...] | None = None


SWITCHES = (
    Switch("checkpoint.mode = 'async'", lambda job: job.checkpoint.mode == "async", "checkpoint", ("saver", "busy")),
    Switch("train.rollback_after", lambda job: job.train.rollback_after is not None, "train", ("max_rollbacks", "rollback_lr")),
    Switch("data.packing = 'best_fit'", lambda job: job.data.packing == "best_fit", "data", ("items_per_row",)),
    Switch("start.weights", lambda job: job.start.weights is not None, "start"),
)


def keys_have_a_part(job: Job, layout: Layout | None) -> Iterator[Fault]:  # noqa: ARG001 (every check is given both)
    """Keys with another value than their default, where what they are about is not asked for."""
    for switch in SWITCHES:
        if switch.is_on(job):
            continue
        section = getattr(job, switch.section)
        for field in fields(section):
            name = f"{switch.section}.{field.name}"
            is_meant = name != switch.key and (switch.keys is None or field.name in switch.keys)
            if is_meant and getattr(section, field.name) != field.default:
                yield Fault(name, f"has no effect without {switch.key}", hint=f"set {switch.key}, or leave this key out")
