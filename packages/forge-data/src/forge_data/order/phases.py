"""The sources and phases of a recipe: labels, exact weights, checks and intervals. Imports neither torch nor numpy.

A phase sets weights, lengths and batch sizes from a step on. A weight is exactly the decimal number in the recipe. With a
temperature it is a power of that number, rounded to the nearest double. All further arithmetic is exact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from itertools import pairwise
from math import gcd, lcm
from typing import Any

from forge_core.component import Component
from forge_core.errors import ConfigError, DataError, Fault, did_you_mean
from forge_core.protocols.data import SourceComponent
from forge_data.section import Data, Phase

Weight = float | Fraction
STAIRS = 32
"""Maximum number of equal stairs in which weights move over a ramp; each stair has exact shares."""


@dataclass(frozen=True)
class PhaseInterval:
    """A range of steps with constant settings; it ends where the next interval begins.

    Attributes:
        step: first step.
        weights: weights of all sources of the recipe, in order.
        length: tokens per row.
        batch: rows per step over all ranks.
        stair: whether this is a stair of a ramp of weights.
    """

    step: int
    weights: tuple[Weight, ...]
    length: int
    batch: int
    stair: bool = False


def intervals_of(data: Data, global_batch: int) -> list[PhaseInterval]:
    """Returns the intervals of an endless run from step 0 on; `data` must be valid."""
    labels = labels_of(data)
    intervals = [PhaseInterval(0, base_weights(data), data.sequence_length, global_batch)]
    for phase in data.phases:
        before = intervals[-1]
        after = PhaseInterval(
            phase.start + phase.ramp,
            tuple(phase.weights.get(label, weight) for label, weight in zip(labels, before.weights, strict=True)),
            phase.sequence_length or before.length,
            phase.global_batch or before.batch,
        )
        intervals += [*_stairs(phase, before, after), after]
    return intervals


def labels_of(data: Data) -> list[str]:
    """Returns the labels of all sources: `label`, or else that of the component, numbered from the second one on."""
    labels: list[str] = []
    for index, component in enumerate(data.sources):
        label = label_of(component)
        labels.append(f"{label}-{index + 1}" if label in labels else label)
    return labels


def base_weights(data: Data) -> tuple[float, ...]:
    """Returns the weights of the sources before the first phase."""
    return tuple(map(weight_of, data.sources))


def used_sources(data: Data) -> list[bool]:
    """Returns, for each source, whether its weight is ever above 0."""
    return [any(interval.weights[index] for interval in intervals_of(data, 1)) for index in range(len(data.sources))]


def lr_scale_at(phases: Sequence[Phase], step: int) -> float:
    """Returns the factor of the phases on the learning rate of a step; it applies from the first step of a phase on."""
    scale = 1.0
    for phase in phases:
        if phase.lr_scale is None or step < phase.start:
            continue
        done = min(1.0, (step - phase.start + 1) / (phase.ramp + 1))
        scale = phase.lr_scale if done == 1.0 else scale + (phase.lr_scale - scale) * done
    return scale


def length_at(data: Any, step: int) -> int:
    """Returns the tokens per row of a step; `data` is a section with phases, such as `Data`."""
    begun = (phase.sequence_length for phase in reversed(data.phases) if phase.start <= step and phase.sequence_length)
    return next(begun, data.sequence_length)


def _stairs(phase: Phase, before: PhaseInterval, after: PhaseInterval) -> Iterator[PhaseInterval]:
    """Yields the stairs of a ramp; each has exactly the weights of the linear ramp at its middle."""
    count = min(phase.ramp, STAIRS)
    old, new = _normalized(before.weights), _normalized(after.weights)
    if count and old == new:
        yield PhaseInterval(phase.start, before.weights, after.length, after.batch)
        return
    for stair in range(count):
        way = Fraction(2 * stair + 1, 2 * count)
        weights = tuple(was + (is_now - was) * way for was, is_now in zip(old, new, strict=True))
        yield PhaseInterval(phase.start + phase.ramp * stair // count, weights, after.length, after.batch, stair=True)


def _normalized(weights: Sequence[Weight]) -> list[Fraction]:
    exact = [exact_of(weight) for weight in weights]
    total = sum(exact) or Fraction(1)
    return [weight / total for weight in exact]


def faults_of(data: Data, global_batch: int, max_steps: int | None = None) -> list[Fault]:
    """Returns the faults of labels, weights and phases; `max_steps` is the length of the run, if known."""
    if faults := source_faults(data):
        return faults
    faults = [fault for index, phase in enumerate(data.phases) for fault in _own_faults(data, index, phase, max_steps)]
    for index, (first, second) in enumerate(pairwise(data.phases), 1):
        if second.start < first.start + max(first.ramp, 1):
            kind = (
                f"the previous phase ramps until step {first.start + first.ramp}"
                if first.ramp
                else "phases must be in the order of their starts"
            )
            faults.append(Fault(f"data.phases.{index}.start", f"{second.start} is too early: {kind}", hint="raise it"))
    if faults:
        return faults
    by_step = {interval.step: interval for interval in intervals_of(data, global_batch)}
    intervals = [by_step[0], *(by_step[phase.start + phase.ramp] for phase in data.phases)]
    for index, (phase, interval) in enumerate(zip(data.phases, intervals[1:], strict=True)):
        if phase.weights and not any(interval.weights):
            faults.append(Fault(f"data.phases.{index}.weights", "no source has a weight above 0", hint="raise one"))
    return [*faults, *_size_faults(data, intervals)]


def source_faults(data: Data) -> list[Fault]:
    """Returns faults of labels that two sources share, and of weights that are all 0."""
    faults = []
    labels = labels_of(data)
    for index, (source, label) in enumerate(zip(data.sources, labels, strict=True)):
        chosen = getattr(source, "label", None)
        if chosen is not None and chosen != label:
            what = "is empty" if not chosen.strip() else f"{chosen!r} is also the label of another source"
            faults.append(Fault(f"data.sources.{index}.label", what, hint="give each source its own label"))
    if data.sources and not any(base_weights(data)):
        what = "no source has a weight above 0" + (" before the first phase" if data.phases else "")
        faults.append(Fault("data.sources.0.weight", what, hint="raise the weight of at least one source"))
    return faults


def _own_faults(data: Data, index: int, phase: Phase, max_steps: int | None) -> Iterator[Fault]:
    key, labels = f"data.phases.{index}", labels_of(data)
    for name in phase.weights:
        if name not in labels:
            yield Fault(f"{key}.weights.{name}", f"no source has the label {name!r}", hint=did_you_mean(name, labels))
    if phase.weights and len(labels) < 2:
        yield Fault(f"{key}.weights", "weights have no effect with fewer than two sources", hint="add [[data.sources]]")
    settings = (phase.weights, phase.lr_scale, phase.sequence_length, phase.global_batch)
    if not phase.weights and settings[1:] == (None, None, None):
        yield Fault(key, "changes nothing", hint="set weights, lr_scale, sequence_length or global_batch, or remove the phase")
    elif phase.ramp and not phase.weights and phase.lr_scale is None:
        yield Fault(f"{key}.ramp", "has no effect without weights or lr_scale", hint="remove it")
    if max_steps is not None and phase.start >= max_steps:
        yield Fault(f"{key}.start", f"step {phase.start} is never reached: the run has {max_steps} steps", hint="lower it")
    elif max_steps is not None and phase.start + phase.ramp > max_steps:
        yield Fault(
            f"{key}.ramp", f"ends at step {phase.start + phase.ramp}, after the run ({max_steps} steps)", hint="shorten it"
        )


def _size_faults(data: Data, intervals: Sequence[PhaseInterval]) -> Iterator[Fault]:
    """Yields the faults of lengths and batch sizes; `intervals` has the base interval and then one per phase."""
    longest = max(interval.length for interval in intervals)
    for index, interval in enumerate(intervals):
        key = "data" if not index else f"data.phases.{index - 1}"
        if interval.length != longest and data.packing != "concatenate":
            what = f"differs from {longest}, but packing {data.packing!r} requires rows of one length"
            yield Fault(f"{key}.sequence_length", what, hint="keep the length, or set packing = 'concatenate'")
        elif longest % interval.length:
            yield Fault(f"{key}.sequence_length", f"{interval.length} does not divide the longest length of the run, {longest}")
        elif interval.batch * interval.length % longest:
            need = longest // interval.length
            rows = f"{interval.batch} rows of {interval.length} tokens"
            what = f"{rows} do not fill a whole number of the run's longest rows ({longest} tokens)"
            where = f"{key}.global_batch" if index else "train.global_batch"
            yield Fault(where, what, hint=f"use a multiple of {need}")


def batch_faults(data: Data, global_batch: int, ranks: int, micro_batch: int) -> Iterator[Fault]:
    """Yields a fault for each phase whose batch cannot be split among the data ranks into whole micro-batches."""
    for index, phase in enumerate(data.phases):
        batch = phase.global_batch
        if batch is not None and batch != global_batch and batch % (ranks * micro_batch):
            portion = f"{ranks * micro_batch} = {ranks} data ranks x micro_batch {micro_batch}"
            yield Fault(f"data.phases.{index}.global_batch", f"{batch} is not a multiple of {portion}", hint="change it")


def refuse_faults(faults: Sequence[Fault]) -> None:
    """Raises all faults as one error.

    Raises:
        ConfigError: `faults` is not empty.
    """
    if faults:
        raise ConfigError(faults)


def weight_of(source: Component) -> float:
    """Returns the weight of a source in the mixture before the first phase."""
    return float(getattr(source, "weight", SourceComponent.weight))


def max_epochs_of(source: Component) -> float | None:
    """Returns the maximum number of epochs of a source; None = no limit."""
    return getattr(source, "max_epochs", SourceComponent.max_epochs)


def too_long_of(source: Component) -> str | None:
    """Returns the treatment of documents longer than a row: error, skip, truncate; None: continue in further rows."""
    return getattr(source, "too_long", SourceComponent.too_long)


def label_of(source: Component) -> str:
    """Returns the `label` of a source, else the `default_label` of its class, else the name of the class.

    The label determines the order of rows, so a class that is renamed keeps its `default_label`. Subclasses do not inherit it.
    """
    kind = type(source)
    return getattr(source, "label", SourceComponent.label) or vars(kind).get("default_label", kind.__name__.lower())


def exact_of(weight: Weight) -> Fraction:
    """Returns a weight as the exact value of its decimal notation."""
    return weight if isinstance(weight, Fraction) else Fraction(str(weight))


def shares_of(weights: Sequence[Weight]) -> tuple[int, ...]:
    """Returns the draws of each source in the shortest period that has exactly the ratio of `weights`.

    Raises:
        DataError: no weight is above 0, or a weight is negative or not finite.
    """
    if any(not 0 <= weight < float("inf") for weight in weights):
        raise DataError(f"weights of sources must be finite and not negative, got {[float(weight) for weight in weights]}")
    exact = [exact_of(weight) for weight in weights]
    if not any(exact):
        raise DataError("no source has a weight above 0; set the weight of at least one of [[data.sources]]")
    common = lcm(*(fraction.denominator for fraction in exact))
    shares = [int(fraction * common) for fraction in exact]
    divisor = gcd(*shares)
    return tuple(share // divisor for share in shares)


def tempered(weights: Sequence[Weight], temperature: float) -> tuple[Weight, ...]:
    """Returns (weight / largest weight) ** (1 / temperature); 0 stays 0, and at temperature 1 weights are unchanged.

    Powers are computed in decimal with 40 digits and then rounded to the nearest double. The result is the same on every
    machine, because the system's mathematical library is not used.
    """
    if temperature == 1:
        return tuple(weights)
    digits = Context(prec=40)
    exact = [exact_of(weight) for weight in weights]
    largest = max(exact, default=Fraction(0))

    def power(weight: Fraction) -> float:
        ratio = weight / largest
        written = digits.divide(Decimal(ratio.numerator), Decimal(ratio.denominator))
        return float(digits.exp(digits.divide(digits.ln(written), Decimal(str(temperature)))))

    return tuple(power(weight) if weight else 0.0 for weight in exact)
