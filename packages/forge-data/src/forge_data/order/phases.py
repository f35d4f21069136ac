"""What a recipe says of its sources: their keys, exact weights, and the phases of a run. Imports neither torch nor numpy.

A phase says which weights, lengths and batch sizes hold from a step on. A weight is the number that is written in the
recipe, in decimal. At a temperature it is a power of that, which has no end in decimal, so then the weight is the double
nearest to it. From there on nothing is rounded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from itertools import pairwise
from math import gcd, lcm

from forge_core.component import Component
from forge_core.errors import ConfigError, DataError, Fault, did_you_mean
from forge_core.protocols.data import SourceComponent
from forge_data.section import Data, Phase

Weight = float | Fraction
STAIRS = 32
"""Weights move over a ramp in at most this many equal stairs, each with exact shares."""


@dataclass(frozen=True)
class PhaseInterval:
    """Steps [step, step of the next interval) have everything in common.

    Attributes:
        step: the first one.
        weights: of every source of the recipe, in their order.
        length: tokens of a row.
        batch: rows of a step over all ranks.
        stair: a stair of a ramp of weights.
    """

    step: int
    weights: tuple[Weight, ...]
    length: int
    batch: int
    stair: bool = False


def intervals_of(data: Data, global_batch: int) -> list[PhaseInterval]:
    """The intervals of a run without an end, from step 0 on; `data` has no faults."""
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
    """The name of every source in phases and logs: its `label`, else that of its component, numbered from the second on."""
    labels: list[str] = []
    for index, component in enumerate(data.sources):
        label = label_of(component)
        labels.append(f"{label}-{index + 1}" if label in labels else label)
    return labels


def base_weights(data: Data) -> tuple[float, ...]:
    """Weights of the sources before the first phase."""
    return tuple(map(weight_of, data.sources))


def used_sources(data: Data) -> list[bool]:
    """Whether each source has a weight above 0 at some time."""
    return [any(interval.weights[index] for interval in intervals_of(data, 1)) for index in range(len(data.sources))]


def lr_scale_at(phases: Sequence[Phase], step: int) -> float:
    """Factor of the phases on the learning rate of a step; the first step of a phase has it already."""
    scale = 1.0
    for phase in phases:
        if phase.lr_scale is None or step < phase.start:
            continue
        done = min(1.0, (step - phase.start + 1) / (phase.ramp + 1))
        scale = phase.lr_scale if done == 1.0 else scale + (phase.lr_scale - scale) * done
    return scale


def _stairs(phase: Phase, before: PhaseInterval, after: PhaseInterval) -> Iterator[PhaseInterval]:
    """Stairs from the shares before to those after, each as high as the line in its middle, exactly."""
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
    """Everything that is wrong with labels, weights and phases; `max_steps` of the run, where it is known."""
    if faults := source_faults(data):
        return faults
    faults = [fault for index, phase in enumerate(data.phases) for fault in _own_faults(data, index, phase, max_steps)]
    for index, (first, second) in enumerate(pairwise(data.phases), 1):
        if second.start < first.start + max(first.ramp, 1):
            kind = (
                f"the phase before ramps until step {first.start + first.ramp}"
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
    """Labels that two sources share, and weights of which none is above 0."""
    faults = []
    labels = labels_of(data)
    for index, (source, label) in enumerate(zip(data.sources, labels, strict=True)):
        given = getattr(source, "label", None)
        if given is not None and given != label:
            other = f"is empty; {label!r} would be taken" if not given.strip() else f"{given!r} is another source's name, too"
            faults.append(Fault(f"data.sources.{index}.label", other, hint="give each source its own label"))
    if data.sources and not any(base_weights(data)):
        what = "no source has a weight above 0" + (" before the first phase" if data.phases else "")
        faults.append(Fault("data.sources.0.weight", what, hint="raise the weight of a source that is to be read"))
    return faults


def _own_faults(data: Data, index: int, phase: Phase, max_steps: int | None) -> Iterator[Fault]:
    key, labels = f"data.phases.{index}", labels_of(data)
    for name in phase.weights:
        if name not in labels:
            yield Fault(f"{key}.weights.{name}", f"no source has the label {name!r}", hint=did_you_mean(name, labels))
    if phase.weights and len(labels) < 2:
        yield Fault(f"{key}.weights", "a recipe with fewer than two sources has nothing to mix", hint="add [[data.sources]]")
    settings = (phase.weights, phase.lr_scale, phase.sequence_length, phase.global_batch)
    if not phase.weights and settings[1:] == (None, None, None):
        yield Fault(key, "changes nothing", hint="give it weights, lr_scale, sequence_length or global_batch, or remove it")
    elif phase.ramp and not phase.weights and phase.lr_scale is None:
        yield Fault(f"{key}.ramp", "only weights and lr_scale move over a ramp", hint="remove it")
    if max_steps is not None and phase.start >= max_steps:
        yield Fault(f"{key}.start", f"step {phase.start} is never reached: the run has {max_steps} steps", hint="lower it")
    elif max_steps is not None and phase.start + phase.ramp > max_steps:
        yield Fault(f"{key}.ramp", f"ends at step {phase.start + phase.ramp}, the run at {max_steps}", hint="shorten it")


def _size_faults(data: Data, intervals: Sequence[PhaseInterval]) -> Iterator[Fault]:
    """What lengths and batches do not allow; `intervals` has the base and then one per phase."""
    longest = max(interval.length for interval in intervals)
    for index, interval in enumerate(intervals):
        key = "data" if not index else f"data.phases.{index - 1}"
        if interval.length != longest and data.packing != "concatenate":
            what = f"packing {data.packing!r} puts documents into rows of one length; this one differs from {longest}"
            yield Fault(f"{key}.sequence_length", what, hint="keep the length, or use packing = 'concatenate'")
        elif longest % interval.length:
            yield Fault(f"{key}.sequence_length", f"{interval.length} does not divide the longest length of the run, {longest}")
        elif interval.batch * interval.length % longest:
            need = longest // interval.length
            rows = f"{interval.batch} rows of {interval.length} tokens"
            what = f"{rows} are not a whole number of the run's longest rows ({longest} tokens)"
            where = f"{key}.global_batch" if index else "train.global_batch"
            yield Fault(where, what, hint=f"take a multiple of {need}")


def batch_faults(data: Data, global_batch: int, ranks: int, micro_batch: int) -> Iterator[Fault]:
    """Phases whose batch cannot be shared by the data ranks in whole micro-batches."""
    for index, phase in enumerate(data.phases):
        batch = phase.global_batch
        if batch is not None and batch != global_batch and batch % (ranks * micro_batch):
            portion = f"{ranks * micro_batch} = {ranks} data ranks x micro_batch {micro_batch}"
            yield Fault(f"data.phases.{index}.global_batch", f"{batch} is not a multiple of {portion}", hint="change it")


def refuse_faults(faults: Sequence[Fault]) -> None:
    """Raises all faults as one error.

    Raises:
        ConfigError: there is one.
    """
    if faults:
        raise ConfigError(faults)


def weight_of(source: Component) -> float:
    """Share of the mixture relative to the other sources, before the first phase."""
    return float(getattr(source, "weight", SourceComponent.weight))


def max_epochs_of(source: Component) -> float | None:
    """How often the source is read at most; None = without a limit."""
    return getattr(source, "max_epochs", SourceComponent.max_epochs)


def too_long_of(source: Component) -> str | None:
    """What becomes of a document that is longer than a row: error, skip, truncate; None: it goes on in further rows."""
    return getattr(source, "too_long", SourceComponent.too_long)


def label_of(source: Component) -> str:
    """Its `label`, else the `default_label` of its class, else the name of the class.

    Labels decide the order of rows, so a class that gets another name keeps its label. Subclasses do not inherit it.
    """
    kind = type(source)
    return getattr(source, "label", SourceComponent.label) or vars(kind).get("default_label", kind.__name__.lower())


def exact_of(weight: Weight) -> Fraction:
    """A weight as it is written in decimal."""
    return weight if isinstance(weight, Fraction) else Fraction(str(weight))


def shares_of(weights: Sequence[Weight]) -> tuple[int, ...]:
    """Draws of each source in the shortest period in which they are exactly in the ratio of `weights`.

    Raises:
        DataError: no weight is above 0, or one is negative or not finite.
    """
    if any(not 0 <= weight < float("inf") for weight in weights):
        raise DataError(f"weights of sources must be finite and not negative: {[float(weight) for weight in weights]}")
    exact = [exact_of(weight) for weight in weights]
    if not any(exact):
        raise DataError("no source has a weight above 0; set the weight of at least one of [[data.sources]]")
    common = lcm(*(fraction.denominator for fraction in exact))
    shares = [int(fraction * common) for fraction in exact]
    divisor = gcd(*shares)
    return tuple(share // divisor for share in shares)


def tempered(weights: Sequence[Weight], temperature: float) -> tuple[Weight, ...]:
    """(weight / largest weight) ** (1 / temperature); 0 stays 0 at any temperature, and at 1 weights stay as they are.

    Powers are worked out in decimal to 40 digits and then rounded to the nearest double: the same one on every machine,
    as no mathematical library of the system takes part.
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
