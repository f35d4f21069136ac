"""Checks across the sections of a recipe: functions of (job, layout) that return faults. They run before torch is imported."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any

from forge_core.component import class_name
from forge_core.errors import Fault, MissingFile, RecipeWarning, did_you_mean
from forge_core.layout import Layout
from forge_core.machine import has_accelerator, hides_accelerators
from forge_models.flex_limits import refusal
from forge_models.shape import AttentionKernel
from forge_parallel.verify.proofs import batches_of, lengths_of
from forge_train.hooks.evaluation import Best, EarlyStop, Evaluate, Tasks, evaluated, result_names
from forge_train.hooks.metrics import Log
from forge_train.hooks.profile import Profile
from forge_train.hooks.progress import Progress
from forge_train.hooks.routing import RoutingStatistics
from forge_train.hooks.samples import Sample
from forge_train.hooks.save import Save
from forge_train.hooks.weights import EmaConfig, Replicas
from forge_train.recipe.schema import Job


def schedule_fits(job: Job, layout: Layout | None) -> list[Fault]:  # noqa: ARG001 (every check is given both)
    """Reports a warm-up or decay that is longer than the run.

    A schedule may define `faults(steps)`; a schedule of a plugin without this method is not checked.
    """
    faults = getattr(job.schedule, "faults", None)
    return faults(job.train.max_steps) if faults else []


def schedule_suits_the_optimizer(job: Job, layout: Layout | None) -> list[Fault]:
    """Reports a decaying schedule with an optimizer that averages weights instead of decaying (Defazio et al., 2024).

    The average would weigh steps at a decayed learning rate as much as steps at the full one.
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
                    f"the learning rate falls (from a factor of {last:.3g} to {now:.3g} at step {step}), but optimizer "
                    f"{class_name(job.optimizer)} averages weights instead of decaying the learning rate",
                    hint="set schedule.name = 'constant', with a warm-up",
                )
            ]
        last = now
    return []


def stages_fit(job: Job, layout: Layout | None) -> Iterator[Fault]:  # noqa: ARG001 (every check is given both)
    """Reports training stages that overlap, never begin, or are shorter than their warm-up."""
    stages, first = job.train.stages, 0
    for index, stage in enumerate(stages):
        key, last = f"train.stages.{index}", index == len(stages) - 1
        if last and stage.until is not None:
            message = f"{stage.until}: the last stage lasts until the end of the run and must not set it"
            yield Fault(f"{key}.until", message, hint="remove it, or add a stage after this one")
        elif not last and stage.until is None:
            yield Fault(f"{key}.until", "is missing, so the next stage would never begin", hint="set the step at which it ends")
        elif not last and (stage.until or 0) <= first:
            yield Fault(
                f"{key}.until", f"{stage.until} is not after step {first}, where the stage begins", hint="list stages in order"
            )
        elif stage.until is not None and stage.until >= job.train.max_steps:
            text = f"the next stage begins at step {stage.until}, but the run ends at train.max_steps = {job.train.max_steps}"
            yield RecipeWarning(f"{key}.until", text)
        length = (job.train.max_steps if stage.until is None else stage.until) - first
        for name, steps in stage.warmups.items():
            if 0 < length < steps:
                what = "" if name == "*" else f" of {name!r}"
                yield Fault(f"{key}.warmup", f"the warm-up{what} has {steps} steps, but its stage has only {length}")
        first = stage.until or first


def mtp_fits(job: Job, layout: Layout | None) -> list[Fault]:  # noqa: ARG001 (every check is given both)
    """Reports a weight schedule of multi-token prediction (MTP) that does not fit the run, and rows without an MTP label."""
    mtp = getattr(job.model, "mtp", None)
    if mtp is None:
        return []
    faults = getattr(mtp.schedule, "faults", None)
    mtp_faults = [replace(fault, key=f"model.mtp.{fault.key}") for fault in (faults(job.train.max_steps) if faults else ())]
    key, shortest = min(lengths_of(job).items(), key=lambda item: item[1])
    if mtp.depth >= shortest:
        message = f"{mtp.depth} leaves no MTP label in rows of {shortest} tokens"
        mtp_faults.append(Fault("model.mtp.depth", message, hint=f"lower it, or raise {key}"))
    return mtp_faults


def evaluate_has_sets(job: Job, layout: Layout | None) -> list[Fault]:  # noqa: ARG001 (every check is given both)
    """Reports hook 'evaluate' in a recipe without held-out sets."""
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
    """Warns about a run whose weights are lost when it ends."""
    if any(isinstance(hook, Save) for hook in job.hooks):
        return []
    return [RecipeWarning("hooks", "hook 'save' is missing: no checkpoint is written", hint='add [[hooks]] name = "save"')]


def rollbacks_fit(job: Job, layout: Layout | None) -> Iterator[Fault]:  # noqa: ARG001 (every check is given both)
    """Reports rollbacks without checkpoints, and rollbacks with data phases that begin at a step.

    A rollback skips data, so such a phase and its data would begin at different steps.
    """
    key = "train.rollback_after"
    if job.train.rollback_after is None:
        return
    if job.checkpoint.every == 0 or not any(isinstance(hook, Save) for hook in job.hooks):
        hint = 'set checkpoint.every, and add [[hooks]] name = "save"'
        yield Fault(key, "the run saves no checkpoint to roll back to", hint=hint)
    for index, phase in enumerate(job.data.phases):
        for name in ("sequence_length", "global_batch", "lr_scale"):
            if getattr(phase, name) is not None:
                text = f"a rollback skips data, so data.phases.{index}.{name} would begin at a different step than its data"
                yield Fault(key, text, hint=f"unset {key} or data.phases.{index}.{name}")


def numbers_can_be_counted(job: Job, layout: Layout | None) -> list[Fault]:  # noqa: ARG001 (every check is given both)
    """Reports a run with more tokens than a 64-bit counter can hold."""
    factors = ({"train.max_steps": job.train.max_steps}, batches_of(job), lengths_of(job))
    highest = [max(factor.items(), key=lambda pair: pair[1]) for factor in factors]
    tokens = prod(value for _, value in highest)
    if tokens < 2**63:
        return []
    largest = max(highest, key=lambda pair: pair[1])
    return [Fault(largest[0], f"{largest[1]} means {tokens:.1e} tokens in all, more than 64 bits can count", hint="lower it")]


def lengths_fit(job: Job, layout: Layout) -> list[Fault]:  # noqa: ARG001 (every check is given both)
    """Reports sequences that are longer than the model's `max_length`; a model without `max_length` accepts any length."""
    longest = getattr(job.model, "max_length", None)
    if longest is None or job.data.sequence_length <= longest:
        return []
    return [
        Fault(
            "data.sequence_length",
            f"{job.data.sequence_length} tokens exceed model.max_length = {longest}",
            hint=f"raise model.max_length or lower data.sequence_length to {longest}",
        )
    ]


def samples_can_be_made(job: Job, layout: Layout) -> Iterator[Fault]:  # noqa: ARG001 (every check is given both)
    """Reports empty prompts of hook 'sample', and prompts that exceed the model's `max_length` with their continuation."""
    longest = getattr(job.model, "max_length", None)
    for index, hook in enumerate(job.hooks):
        if not isinstance(hook, Sample):
            continue
        if empty := [place for place, prompt in enumerate(hook.prompts) if not prompt]:
            yield Fault(
                f"hooks.{index}.prompts.{empty[0]}", "is empty, but generation needs at least one token", hint="remove it"
            )
        counts = getattr(job.data.tokenizer, "tokens_of", None)  # only tokenizers that need no training and no file have it
        lengths = [counts(prompt) for prompt in hook.prompts] if counts is not None else []
        if longest is not None and hook.max_tokens < longest < max(lengths, default=0) + hook.max_tokens:
            yield Fault(
                f"hooks.{index}.prompts.{lengths.index(max(lengths))}",
                f"{max(lengths)} tokens and hooks.{index}.max_tokens = {hook.max_tokens} new tokens exceed "
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
    """Reports an attention kernel for GPUs on a machine without GPUs.

    Hidden GPUs (CUDA_VISIBLE_DEVICES) are always a fault; missing GPUs are a `MissingFile`, a fault only where the run starts.
    """
    core = getattr(getattr(job.model, "attention", None), "core", None)
    there = has_accelerator() and not hides_accelerators(environment)
    if (core == "flex" or there) and (why := flex_refusal(job)):
        yield Fault("model.attention.core", why)
    if core not in ("flex", "varlen"):
        return
    text, hint = f"{core!r} needs a CUDA device, and ", "set it to 'auto' or 'sdpa'"
    if hides_accelerators(environment):
        yield Fault("model.attention.core", f"{text}CUDA_VISIBLE_DEVICES hides all of them", hint=hint)
    elif not has_accelerator():
        yield MissingFile("model.attention.core", f"{text}this machine has no visible one", hint=hint)


def flex_refusal(job: Job) -> str:
    """Returns why the rows of a recipe need flex attention that is not proven on a GPU; "" if they do not."""
    attention = getattr(job.model, "attention", None)
    kind: AttentionKernel = getattr(attention, "core", "sdpa")
    capped = getattr(attention, "soft_cap", None) is not None
    compiled = "compile" in job.transforms
    reasons = (refusal(kind, length, length, compiled, capped) for length in lengths_of(job).values())
    return next((why for why in reasons if why), "")


def profiles_fit(job: Job, layout: Layout | None) -> Iterator[Fault]:
    """Reports profiles that never begin, overlapping windows, ranks that do not exist, and a second hook 'profile'."""
    profiles = [(index, hook) for index, hook in enumerate(job.hooks) if isinstance(hook, Profile)]
    for index, hook in profiles:
        key, length = f"hooks.{index}", hook.warmup + hook.steps
        if index != profiles[0][0]:
            yield Fault(
                f"{key}.name",
                "'profile' is listed twice, but a process can run only one profiler",
                hint="remove one, and list its steps in `at` of the other",
            )
        if not hook.at and not hook.every and hook.signal is None:
            yield Fault(f"{key}.name", "'profile' never begins", hint="set at = [100], every = 1000 or signal = 'SIGUSR2'")
        if late := [step for step in hook.at if step > job.train.max_steps]:
            yield Fault(f"{key}.at", f"step {late[0]} comes after the last step, train.max_steps = {job.train.max_steps}")
        begins = sorted({*hook.at, *(range(hook.every, job.train.max_steps + 1, hook.every) if hook.every else ())})
        close = [pair for pair in pairwise(begins) if pair[1] - pair[0] < length]
        if close:
            message = (
                f"windows of {hook.warmup} warm-up and {hook.steps} active steps overlap at steps {close[0][0]} and {close[0][1]}"
            )
            yield Fault(f"{key}.{'at' if hook.at else 'every'}", message, hint=f"set them further apart, or lower {key}.steps")
        absent = [rank for rank in hook.ranks if layout is not None and isinstance(rank, int) and rank >= layout.world]
        if absent:
            yield Fault(f"{key}.ranks", f"rank {absent[0]} does not exist: {layout.world if layout else 0} processes run")


def hooks_fit_together(job: Job, layout: Layout | None) -> Iterator[Fault]:  # noqa: ARG001 (every check is given both)
    """Reports hooks in the wrong order; hooks run in the order of the recipe.

    A hook that uses averaged weights or an evaluation result must come after the hook that computes it, and `save` after all
    hooks whose state it saves.
    """
    before: list[Any] = []
    for index, hook in enumerate(job.hooks):
        kinds = {type(other) for other in before}
        if isinstance(hook, EmaConfig) and EmaConfig in kinds:
            yield Fault(f"hooks.{index}.name", "'ema' is listed twice, but a run keeps only one average", hint="remove one")
        if isinstance(hook, EmaConfig) and getattr(job.optimizer, "decays_by_itself", False):
            yield Fault(
                f"hooks.{index}.name",
                f"'ema' averages weights, but optimizer {class_name(job.optimizer)} evaluates and saves averages already",
                hint="remove the hook",
            )
        if isinstance(hook, Evaluate | Sample | Tasks) and hook.weights == "ema" and EmaConfig not in kinds:
            yield Fault(
                f"hooks.{index}.weights",
                "'ema' needs the average of hook 'ema', but no such hook comes before this one",
                hint='add [[hooks]] name = "ema" above',
            )
        if isinstance(hook, Best | EarlyStop):
            yield from _metric_faults(job, f"hooks.{index}.metric", hook.metric, before)
        if isinstance(hook, EmaConfig | Best | EarlyStop) and Save in kinds:
            yield Fault(
                f"hooks.{index}.name",
                f"'{_NAMES[type(hook)]}' comes after 'save', so checkpoints would miss its changes of the same step",
                hint="put 'save' last",
            )
        before.append(hook)
    if not any(isinstance(hook, Save) for hook in job.hooks):
        for index, hook in enumerate(job.hooks):
            if isinstance(hook, Best):
                yield Fault(
                    f"hooks.{index}.name",
                    "'best' needs hook 'save', which writes the checkpoints",
                    hint='add [[hooks]] name = "save"',
                )


_NAMES: Mapping[type, str] = MappingProxyType({EmaConfig: "ema", Best: "best", EarlyStop: "early_stop"})


def _metric_faults(job: Job, key: str, metric: str, before: Sequence[Any]) -> Iterator[Fault]:
    """Reports an evaluation metric that no earlier hook measures; metrics of plugins' hooks are not checked."""
    if not metric.startswith("evaluation/"):
        return
    known = _evaluated(job, before)
    if metric not in known:
        hint = did_you_mean(metric, known) or 'add [[hooks]] name = "evaluate" above'
        yield Fault(key, f"no earlier hook measures {metric!r}", hint=hint)


def _evaluated(job: Job, hooks: Sequence[Any]) -> list[str]:
    """Returns the names of the evaluation results that `hooks` measure."""
    evaluates = [hook for hook in hooks if isinstance(hook, Evaluate)]
    metrics = evaluated(job.objective)
    sets = job.data.evaluation
    return [name for hook in evaluates for held_out in sets for name in result_names(held_out, hook.weights, metrics)]


_OURS = (Best, EarlyStop, EmaConfig, Evaluate, Log, Progress, Replicas, RoutingStatistics, Sample, Save)
_LOGGED = ("loss", "grad_norm", "tokens_per_second", "step_seconds", "peak_memory")


def final_metrics(job: Job) -> list[str] | None:
    """Returns the metrics that a run of this recipe has at its end; None if it has plugins' hooks, which may log any metric."""
    if not all(type(hook) in _OURS for hook in job.hooks):
        return None
    logs = any(isinstance(hook, Log) for hook in job.hooks)
    return [*_evaluated(job, job.hooks), *(_LOGGED if logs else ())]


@dataclass(frozen=True)
class Switch:
    """A setting without which other keys have no effect.

    Attributes:
        key: the setting, as written in messages.
        is_on: returns True if a recipe has the setting.
        section: the section of the keys that depend on the setting.
        keys: names of these keys in the section; None means all keys of the section except `key`.
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
    """Reports keys that are set although the feature they configure is off."""
    for switch in SWITCHES:
        if switch.is_on(job):
            continue
        section = getattr(job, switch.section)
        for field in fields(section):
            name = f"{switch.section}.{field.name}"
            is_meant = name != switch.key and (switch.keys is None or field.name in switch.keys)
            if is_meant and getattr(section, field.name) != field.default:
                yield Fault(name, f"has no effect without {switch.key}", hint=f"set {switch.key}, or remove this key")
