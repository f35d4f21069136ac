"""The modeled time of a recipe's step on given hardware, and constants of the model from measured runs.

The model is in `forge_parallel.timing`; this module reads from a recipe what it needs.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from forge_core.config.toml import read_toml
from forge_core.config.tree import Table, build
from forge_core.errors import ForgeError
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_parallel.model.realize import Blueprint
from forge_parallel.timing.calibration import MOST, Observation, fit
from forge_parallel.timing.hardware import Hardware
from forge_parallel.timing.step_time import FREE, Efficiency, StepTime, predict
from forge_parallel.timing.work import Execution, ModelWork, Scores, stages_of, work_of
from forge_parallel.verify.proofs import DEFAULTS, features
from forge_train.directory import RECIPE
from forge_train.plan import largest_step
from forge_train.recipe.load import load_recipe
from forge_train.recipe.schema import Job
from forge_train.trackers import METRICS, json_objects

IMBALANCE = 1.2
"""Tokens of the busiest expert rank relative to the mean, with a trained router and a balancing loss; an assumption."""

WITHIN_STEPS = 0.715 / 0.803
"""Rate of the matrix products of a step relative to that of one large square product: the fitted share of the peak, and the
794.5 TFLOP/s that the best shape reaches on an H100 (published with mamf-finder)."""


@dataclass(frozen=True)
class ModeledRecipe:
    """A recipe's model, ready to predict steps in any layout.

    Raises:
        ForgeError: the time of this recipe's steps cannot be modeled; the message says why. Raised on first use.
    """

    job: Job

    @cached_property
    def blueprint(self) -> Blueprint:
        """The model on the meta device."""
        return Blueprint.of(self.job.model.build)

    @cached_property
    def work(self) -> ModelWork:
        """What a step computes."""
        from forge_models.flops import counts_of
        from forge_models.shape import AttentionChunk

        job = self.job
        counts = counts_of(job.model)
        name = getattr(job.model, "name", type(job.model).__name__)
        if counts is None:
            raise ForgeError(
                f"the model {name!r} or one of its parts does not declare its matrix products (`matrices`, `score_width`)"
            )
        if counts.note:
            raise ForgeError(f"the work of the model {name!r} does not follow from its tokens alone: {counts.note}")
        if reason := unmodeled(job):
            raise ForgeError(reason)
        shape: Any = job.model.shape  # type: ignore[attr-defined]  # models that declare counts have a shape
        widths = zip(range(shape.blocks), shape.windows(), strict=True)
        causal = shape.causal
        scores = [
            Scores(shape.attention.score_width(shape.context(index)), window, causal, isinstance(window, AttentionChunk))
            for index, window in widths
        ]
        return work_of(self.blueprint, scores, shape.moe.top_k if shape.moe is not None else 1)

    def predict(
        self, job: Job, layout: Layout, hardware: Hardware, efficiency: Efficiency, imbalance: float = IMBALANCE
    ) -> StepTime:
        """Returns the modeled step of `job`, a variant of this recipe with the same model, in a layout.

        Raises:
            ForgeError: see the class; or the hardware has no peak for the recipe's dtype.
        """
        pipeline = job.parallel.pipeline.build() if layout.pp > 1 else None
        stages = stages_of(self.blueprint, pipeline, layout.pp)
        return predict(self.work, stages, layout, execution_of(job, layout, imbalance), hardware, efficiency, pipeline)


MODELED: Mapping[str, frozenset[str]] = {
    "shard": frozenset({"reduce", "reshard"}),
    "tensor": frozenset({"sequence_parallel", "asynchronous"}),
    "context": frozenset({"kind"}),
    "expert": frozenset({"dispatcher", "ranks_per_node", "overlap"}),
    "recompute": frozenset({"policy", "every"}),
    "compile": frozenset({"fullgraph", "mode"}),
    "float8": frozenset({"recipe", "all_gather", "experts"}),
}
"""Transforms with a modeled time, and those of their keys that may be set. Other transforms and keys are refused."""


def unmodeled(job: Job) -> str:
    """Returns the first setting of a recipe whose effect on time is not modeled; empty if there is none."""
    for name, transform in job.transforms.items():
        if name not in MODELED:
            return f"[transforms.{name}] has no modeled time"
        usual: Any = type(transform)()
        for key in (item.name for item in fields(usual) if item.name not in MODELED[name]):
            if getattr(transform, key) != getattr(usual, key):
                return f"transforms.{name}.{key} = {getattr(transform, key)!r} has no modeled time; only its default has"
    if getattr(getattr(job.model, "moe", None), "capacity", None) is not None:
        return "model.moe.capacity drops tokens, and their number is not modeled"
    used = {use.name for use in features(job, Layout())}
    if "indexer" in used:
        return "model.attention has an indexer, whose loss and whose choice of keys have no modeled time"
    if "compressed_keys" in used:
        return "model.attention compresses keys, which has no modeled time"
    if "streams" in used:
        return "model.streams mixes several residual streams, which has no modeled time"
    if "value_embeddings" in used:
        return "model.attention.value_embeddings adds tables whose look-up and gathers have no modeled time"
    if "layer_inputs" in used:
        return "model.layer_inputs adds a table and a projection outside of blocks, which have no modeled time"
    if job.train.stages or any(group.frozen for group in job.parameters.groups):
        return "some parameters are frozen, and the model of time counts gradients of all of them"
    return ""


def execution_of(job: Job, layout: Layout, imbalance: float = IMBALANCE) -> Execution:
    """Returns how ranks run a step of `job`.

    Raises:
        ForgeError: a setting of the recipe is not modeled, see `unmodeled`.
    """
    if reason := unmodeled(job):
        raise ForgeError(reason)
    transforms: Mapping[str, Any] = {**DEFAULTS, **job.transforms}
    shard, tensor, context, expert = (transforms[name] for name in ("shard", "tensor", "context", "expert"))
    recompute, float8 = transforms.get("recompute"), transforms.get("float8")
    batch, length = largest_step(job)
    return Execution(
        rows=job.train.micro_batch,
        length=length,
        micro_batches=max(1, batch // (layout.data * job.train.micro_batch)),
        compute=job.precision.compute,
        state=job.precision.state,
        float8=float8 is not None,
        float8_experts=getattr(float8, "experts", False),
        recompute=getattr(recompute, "policy", None),
        every=getattr(recompute, "every", 1),
        compiled="compile" in transforms,
        reduce=shard.reduce,
        reshard=shard.reshard,
        sequence_parallel=tensor.sequence_parallel,
        asynchronous=tensor.asynchronous,
        context=context.kind,
        dispatcher=expert.dispatcher,
        ranks_per_node=expert.ranks_per_node or 0,
        # Rowwise scales need whole rows, so only tensorwise weights are gathered in float8.
        float8_gather=float8 is None or (float8.recipe == "tensorwise" and float8.all_gather is not False),
        imbalance=imbalance,
        gradient_bytes=8 if job.precision.compute == "fp64" else 4,
        frozen=getattr(job.model, "lora", None) is not None,
        orthogonalizes=getattr(job.optimizer, "newton_schulz_steps", 0),
    )


def constants_of(place: Path) -> Efficiency:
    """Returns the constants in a TOML file that `as_toml` wrote.

    Raises:
        ForgeError: the file cannot be read, or its constants make no sense.
    """
    try:
        given = tomllib.loads(place.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ForgeError(f"cannot read constants from {place}: {error}") from error
    if unknown := sorted(set(given) - {*FREE, "host", "dated"}):
        raise ForgeError(f"{place}: unknown constants {', '.join(unknown)}; known: {', '.join((*FREE, 'host', 'dated'))}")
    for name in (*FREE, "host"):
        value = given.get(name, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 100:
            raise ForgeError(f"{place}: {name} = {value!r} is not a positive number")
    return replace(Efficiency(), **given, error=None)


def as_toml(efficiency: Efficiency) -> str:
    """Returns constants as text that `constants_of` reads."""
    lines = [f"{name} = {getattr(efficiency, name):.4g}" for name in (*FREE, "host")]
    return "\n".join([f'dated = "{efficiency.dated}"', *lines]) + "\n"


def calibrated(
    places: list[Path], hardware: Hardware, start: Efficiency, registry: Registry
) -> tuple[Efficiency, list[Observation]]:
    """Returns constants that fit measurements, and the runs among these measurements.

    Args:
        places: run directories, `calibration.json` of a campaign, or `doctor.json`.
        hardware: where they were measured.
        start: constants to start from.
        registry: where components are found.

    Raises:
        ForgeError: a place is none of these, or has no measurement.
    """
    observations: list[Observation] = []
    for place in places:
        if place.is_dir() and (place / RECIPE).exists():
            observations.append(_of_run(place, hardware, registry))
            continue
        document = _document(place)
        if isinstance(document, dict) and "rows" in document:
            observations += _of_campaign(place, document["rows"], hardware, registry)
        elif isinstance(document, dict) and "steps" in document:
            start = _of_doctor(place, document, hardware, start)
        else:
            raise ForgeError(f"{place} is neither a run directory, nor calibration.json of a campaign, nor doctor.json")
    return (fit(observations, start) if observations else start), observations


def _document(place: Path) -> Any:
    try:
        return json.loads(place.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ForgeError(
            f"cannot calibrate with {place}: {error}; give a run directory, calibration.json or doctor.json"
        ) from error


def _of_run(place: Path, hardware: Hardware, registry: Registry) -> Observation:
    """Returns the measured speed of a run: the median of its later half of log lines."""
    world = _world_of(place)
    recipe = load_recipe(read_toml(place / RECIPE), (), world, registry, here=None)  # its plugins need the user's trust
    assert recipe.layout is not None, "a world was given"
    found = [line["tokens_per_second"] for line in json_objects(place / METRICS) if "tokens_per_second" in line]
    speeds = [float(speed) for speed in found if isinstance(speed, int | float)]
    if len(speeds) < 4:
        raise ForgeError(f"{place} has {len(speeds)} lines with tokens_per_second; a calibration needs at least 4")
    return _observation(str(place), recipe.job, recipe.layout, median(speeds[len(speeds) // 2 :]) / world, hardware)


def _world_of(place: Path) -> int:
    """Returns the number of processes of a run from its log, whose lines begin with `rank K/N`."""
    log = place / "logs" / "rank-0.log"
    try:
        with log.open(errors="replace") as lines:
            found = next((match for line in lines if (match := re.search(r" rank 0/(\d+) ", line))), None)
    except OSError as error:
        raise ForgeError(f"cannot read the number of processes of {place}: {error}") from error
    if found is None:
        raise ForgeError(f"{log} does not say how many processes the run had")
    return int(found[1])


def _of_campaign(place: Path, rows: Any, hardware: Hardware, registry: Registry) -> Iterator[Observation]:
    """Yields the runs of a campaign's `calibration.json`; entries that ran on a CPU say nothing of `hardware`."""
    for number, row in enumerate(rows):
        try:
            tree = build(row["recipe"], (), lambda _: f"{place}, row {number}", place.parent)  # noqa: B023 (called at once)
            name, world, speed = str(row["entry"]), int(row["world"]), float(row["tokens_per_second_per_rank"])
            on_device = row.get("device", "device") == "device"
        except (KeyError, TypeError, ValueError) as error:
            raise ForgeError(f"{place}: row {number} is not a row of a campaign ({error!r})") from error
        if not on_device:
            raise ForgeError(f"{place}: entry {name} ran on a CPU, and calibrates no GPU")
        if not isinstance(tree, Table):
            raise ForgeError(f"{place}: row {number} has no recipe")
        found = load_recipe(tree, (), world, registry, here=None)
        assert found.layout is not None, "a world was given"
        yield _observation(f"{name} of {place}", found.job, found.layout, speed, hardware)


def _observation(name: str, job: Job, layout: Layout, speed: float, hardware: Hardware) -> Observation:
    modeled = ModeledRecipe(job)
    modeled.work  # noqa: B018 (raises here if the time cannot be modeled)
    return Observation(name, speed, lambda efficiency: modeled.predict(job, layout, hardware, efficiency).tokens_per_second)


def _of_doctor(place: Path, document: Mapping[str, Any], hardware: Hardware, start: Efficiency) -> Efficiency:
    """Returns constants from the rates that the doctor measured: of a product, of the GPU's memory, and of a reduction."""
    rates = {
        (step.get("name"), check.get("name", "")): check.get("measured")
        for step in document["steps"]
        for check in step.get("checks", ())
        if isinstance(check.get("measured"), int | float)
    }
    found: dict[str, float] = {}
    for key, name, peak, factor in (
        (("matmul", "bf16"), "matmul", hardware.flops["bf16"] / 1e12, WITHIN_STEPS),
        (("matmul", "float8, tensorwise"), "float8", hardware.flops.get("fp8", 0.0) / 1e12, WITHIN_STEPS),
        (("bandwidth", "device memory"), "memory", hardware.bandwidth / 1e9, 1.0),
    ):
        if key in rates and peak:
            found[name] = min(MOST, factor * rates[key] / peak)
    buses = [rate for (step, check), rate in rates.items() if step == "collectives" and check.startswith("all-reduce of ")]
    if buses:
        found["node"] = min(MOST, max(buses) * 1e9 / hardware.node.bandwidth)
    if not found:
        raise ForgeError(f"{place} has no rates of a GPU; run forge-train doctor --acceptance on one")
    return replace(start, **found, error=None)
