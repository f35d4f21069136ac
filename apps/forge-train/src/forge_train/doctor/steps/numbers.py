"""Does the device train to the same numbers? Tiny models, some optimizer steps, against fp64 on a CPU."""

from collections.abc import Iterator

import torch

from forge_core.layout import Layout
from forge_core.protocols.model import Optimizer
from forge_core.registry import Registry
from forge_parallel.accelerator import float8_fault
from forge_parallel.build.initial_weights import fill
from forge_parallel.build.parallel_model import ParallelModel
from forge_parallel.placement.boxes import local_box
from forge_parallel.verify.parity import Case, Measurement, compare, measure
from forge_parallel.verify.tolerance import TOLERANCE
from forge_train.doctor.step import Check, Settings
from forge_train.doctor.steps.measure import device
from forge_train.plan import plan_of
from forge_train.recipe.load import load

_TINY = {"dense": "debug", "experts": "debug-moe"}
_SMALL = ("--model.dim=32", "--model.layers=2", "--hooks=[]")
_ROUNDED = {"fp32": 1e-4, "bf16": 3e-2}
"""How far the loss may be from fp64's, relative."""


def examine_numbers(_: Settings) -> Iterator[Check]:
    """The step. The device takes all rows at once and the CPU one at a time, so the two agree on no sum by chance."""
    here = device()
    for label, preset in _TINY.items():
        exact = _measured(preset, torch.device("cpu"), 1, "fp64")
        yield _exact(label, exact, _measured(preset, here, 8, "fp64"))
        for precision, limit in _ROUNDED.items():
            found = _measured(preset, here, 8, precision)
            yield _rounded(f"{label}, {precision}", exact, found, limit)
    yield from _float8(here)


def _as_on_a_cpu(model: ParallelModel, seed: int) -> None:
    """Draws the initial weights again, from the streams of a CPU: each kind of device has others."""
    with torch.no_grad():
        for name, tensor, _ in model.trainable():
            fill(local_box(tensor), model.specs.tensors[name], name, seed, torch.device("cpu"))


def _measured(preset: str, here: torch.device, micro_batch: int, precision: str, float8: str = "") -> Measurement:
    registry = Registry()
    transforms = (f"--transforms.float8.emulate={float8}",) if float8 else ()
    job = load(preset, [*_SMALL, *transforms], None, registry).job

    def optimizer(model: ParallelModel) -> Optimizer:
        # Made before anything is measured; it keeps no copy of weights until its first step.
        _as_on_a_cpu(model, seed=0)
        return job.optimizer.build(model)

    case = Case(
        build=job.model.build,
        objective=job.objective.build(),
        optimizer=optimizer,
        vocab_size=getattr(job.model, "vocab_size"),  # noqa: B009 (a plugin's model may call it otherwise)
        micro_batch=micro_batch,
        steps=3,
        compute=precision,
        state="fp64" if precision == "fp64" else "fp32",
    )
    return measure(case, plan_of(job, Layout(), registry), here)


def _exact(label: str, exact: Measurement, found: Measurement) -> Check:
    difference = compare(exact, found)
    worst = max(difference.loss, difference.norm, difference.gradients, difference.weights)
    expected = f"loss, gradients and weights within {TOLERANCE['fp64']} of a CPU, after 3 steps"
    if difference.accepted("fp64"):
        return Check(f"{label}, fp64", "PASS", worst, "relative", expected)
    told = f"{worst:.1e}, worst: {difference.worst}" if difference.initial else "initial weights differ"
    remedy = "this installation computes wrong numbers: do not train; report it with this file"
    return Check(f"{label}, fp64", "FAIL", told, "", expected, remedy)


def _rounded(label: str, exact: Measurement, found: Measurement, limit: float) -> Check:
    worst = max(abs(one - other) / abs(one) for one, other in zip(exact.loss, found.loss, strict=True))
    expected = f"loss within {limit} of fp64"
    if worst <= limit:  # a number that is not finite is not
        return Check(label, "PASS", worst, "relative", expected)
    return Check(label, "FAIL", worst, "relative", expected, "report it with this file; train in fp32 until then")


def _float8(here: torch.device) -> Iterator[Check]:
    from importlib.util import find_spec

    label = "float8, native against emulated"
    if find_spec("torchao") is None:
        yield Check(label, "SKIPPED", "torchao is not installed", remedy='pip install "forge-parallel[float8]"')
        return
    if fault := float8_fault(here):
        yield Check(label, "SKIPPED", fault, remedy="recipes for it leave out transforms.float8")
        return
    native, emulated = (_measured("debug", here, 8, "bf16", emulate) for emulate in ("false", "true"))
    yield _rounded(label, emulated, native, 1e-2)
