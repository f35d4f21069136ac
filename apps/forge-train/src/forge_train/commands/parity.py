"""`forge-train parity RECIPE`: measures whether a layout computes the same numbers as one process."""

from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from forge_core.terminal import Console
from forge_train.commands.options import RecipePath

FLOAT8 = "float8"
_OF_LAYOUTS = ("parallel", "transforms", "model", "optimizer", "precision", "data.sequence_length", "train.micro_batch")

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from forge_core.layout import Layout
    from forge_parallel.verify.parity import Measurement
    from forge_train.recipe.schema import Job


def parity(
    context: typer.Context,
    recipe: RecipePath,
    layouts: Annotated[str, typer.Option(help="Layout strings, separated by commas.")] = "dp2,hsdp2x1,hsdp2x2,dp4",
    mode: Annotated[str, typer.Option(help="fp64: all numbers within 1e-10; fp32: loss, norm, gradients within 2e-6.")] = "fp64",
    rows: Annotated[int, typer.Option(help="Sequences of the global batch.")] = 8,
    micro_batch: Annotated[int, typer.Option(help="Sequences per forward; gradients are accumulated over the global batch.")] = 1,
    length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 32,
    steps: Annotated[int, typer.Option(help="Optimizer steps; at least one per stage of train.stages.")] = 2,
    record: Annotated[
        Path | None,
        typer.Option(help="Write receipts of layouts that pass to this folder; check reads them with parallel.proofs = ['DIR']."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Compare layouts of a recipe with one process, on CPU.

    Compares loss, gradient norm, every gradient, and weights after updates. The batches are random tokens in packed documents,
    with uneven numbers of labels and one micro-batch without labels. Exit code 1 if a layout is not within tolerance.
    """
    from forge_core.errors import ForgeError
    from forge_core.layout import Layout
    from forge_parallel.launch.local_processes import spawn_local
    from forge_parallel.verify.parity import compare, within_rounding
    from forge_parallel.verify.proofs import TOLERANCE
    from forge_train.recipe.load import load_recipe

    console = Console(as_json=as_json)
    if mode not in TOLERANCE:
        raise ForgeError(f"--mode {mode}: choose one of {', '.join(TOLERANCE)}")
    parsed = {text: Layout.parse(text) for text in layouts.split(",")}
    for text, layout in parsed.items():
        if rows % (layout.data * micro_batch):
            raise ForgeError(
                f"--rows {rows} must be a multiple of {micro_batch} (--micro-batch) * {layout.data} (data ranks of {text})"
            )
    job = load_recipe(recipe, context.args).job
    refuse_layouts(recipe, context.args, parsed, mode, rows, micro_batch, length)
    for text, layout in parsed.items():
        if layout.pp > 1:
            schedule = job.parallel.pipeline.build().schedule
            if why := schedule.refusal(layout.pp, rows // (layout.data * micro_batch)):
                raise ForgeError(f"{text}: {why}; change --rows or --micro-batch")
    table: list[dict[str, Any]] = []

    def measured(layout: str, exact: bool = False) -> "list[Measurement]":
        arguments = [recipe, list(context.args), layout, mode, rows, micro_batch, length, steps, exact]
        return [
            _measurement(raw) for raw in spawn_local("forge_train.commands.parity:rank", Layout.parse(layout).world, arguments)
        ]

    (reference,) = measured("1")
    exact = None
    for text, layout in parsed.items():
        every = measured(text)
        ranks = [compare(reference, found) for found in every]
        worst = max(ranks, key=lambda difference: max(difference.loss, difference.norm, difference.gradients, difference.weights))
        passed = all(difference.accepted(mode) for difference in ranks)  # type: ignore[arg-type]
        rounded = False
        if not passed and FLOAT8 in job.transforms and all(difference.initial for difference in ranks):
            exact = exact or measured("1", exact=True)[0]
            rounded = all(within_rounding(exact, reference, found) for found in every)
        table.append({"layout": text, **asdict(worst), "passed": passed or rounded, "rounding": rounded})
        if rounded and record is not None:
            console.note(f"no receipt for {text}: its error is within the rounding of float8, but above {TOLERANCE[mode]:g}")
        if passed and record is not None:
            console.note(f"receipt: {_receipt(job, layout, mode, rows, micro_batch, asdict(worst), record)}")
    if as_json:
        console.document({"mode": mode, "tolerance": TOLERANCE[mode], "layouts": table})
    columns = ("layout", "loss", "norm", "gradients", "weights", "initial weights", "verdict")
    console.table(columns, [_row(entry) for entry in table], title=f"largest relative error against one process ({mode})")
    if not all(entry["passed"] for entry in table):
        raise typer.Exit(1)


def _receipt(job: "Job", layout: "Layout", mode: Any, rows: int, micro_batch: int, worst: dict[str, Any], folder: Path) -> Path:
    """Writes the receipt of a measurement: the recipe in this precision, with these batches."""
    import torch

    from forge_parallel.verify import proofs
    from forge_parallel.verify.proofs import TOLERANCE, features

    measured = as_measured(job, rows, micro_batch)
    uses = features(replace(measured, precision=replace(job.precision, compute=mode, state=mode)), layout)
    receipt = proofs.Receipt(
        features=tuple(sorted(use.name for use in uses)),
        layout=str(layout),
        mode=mode,
        tolerance=TOLERANCE[mode],
        errors={name: worst[name] for name in ("loss", "norm", "gradients", "weights")},
        digests=proofs.digests(uses),
        versions={"torch": torch.__version__, **{name: version(name) for name in ("forge-parallel", "forge-models")}},
    )
    return proofs.write(receipt, folder)


def _row(entry: dict[str, Any]) -> list[str]:
    errors = [f"{entry[key]:.1e}" for key in ("loss", "norm", "gradients", "weights")]
    equal = "equal, but for the rounding of float8" if entry["rounding"] else "equal"
    verdict = equal if entry["passed"] else f"NOT EQUAL (worst: {entry['worst']})"
    return [entry["layout"], *errors, "bitwise" if entry["initial"] else "DIFFERENT", verdict]


def rank(
    recipe: str,
    overrides: list[str],
    layout: str,
    mode: Literal["fp64", "fp32"],
    rows: int,
    micro_batch: int,
    length: int,
    steps: int,
    exact: bool = False,
) -> dict[str, Any]:
    """Returns the measurement of one rank of a layout, without float8 if `exact`; runs in a process of its own."""
    import torch

    from forge_core.layout import Layout
    from forge_core.registry import Registry
    from forge_parallel.optim import optimizers
    from forge_parallel.optim.groups import NO_SETTINGS
    from forge_parallel.verify.parity import Case, measure
    from forge_train.plan import plan_of
    from forge_train.recipe.load import load_recipe
    from forge_train.run.training import narrow_of

    registry = Registry()
    job = load_recipe(recipe, overrides, None, registry).job
    if exact:
        job = replace(job, transforms={name: part for name, part in job.transforms.items() if name != FLOAT8})
    at = Layout.parse(layout)
    narrow = narrow_of(job)
    case = Case(
        build=job.model.build,
        objective=job.objective.build(),
        optimizer=lambda model, settings=NO_SETTINGS: optimizers.build_optimizer(job.optimizer, model, settings),
        vocab_size=getattr(job.model, "vocab_size"),  # noqa: B009 (a plugin's model may call it otherwise)
        length=length,
        rows=rows,
        micro_batch=micro_batch,
        steps=max(steps, len(job.train.stages)),
        seed=job.job.seed,
        compute=mode,
        state=mode,
        groups=tuple(job.parameters.groups),
        narrow=None if narrow is None else narrow.build,
        stages=short_stages(job.train.stages),
    )
    return asdict(measure(case, plan_of(as_measured(job, rows, micro_batch), at, registry), torch.device("cpu")))


def refuse_layouts(
    recipe: str, overrides: "Sequence[str]", layouts: "Mapping[str, Layout]", mode: str, rows: int, micro_batch: int, length: int
) -> None:
    """Refuses layouts that `check` refuses for this model and these batches, before any process starts.

    Compositions without a proof are allowed, since parity is the way to prove them.

    Raises:
        ForgeError: a layout has faults; the error lists the faults of all layouts.
    """
    from forge_core.errors import ConfigError, ForgeError
    from forge_parallel.checks import UNPROVEN
    from forge_train.recipe.load import load_recipe

    batch = {"train.global_batch": rows, "train.micro_batch": micro_batch, "data.sequence_length": length}
    precision = {"precision.compute": mode, "precision.state": mode}
    messages = []
    for text, layout in layouts.items():
        ours = {**batch, **precision, **{f"parallel.{axis}": size for axis, size in layout.sizes().items()}}
        theirs = [override for override in overrides if override.removeprefix("--").partition("=")[0] not in ours]
        try:
            load_recipe(recipe, [*theirs, *(f"--{key}={value}" for key, value in ours.items())], layout.world)
        except ConfigError as cause:
            faults = [fault for fault in cause.faults if fault.key.startswith(_OF_LAYOUTS) and UNPROVEN not in fault.message]
            messages += [f"{text}: {fault.key}: {fault.message}" + (f"; {fault.hint}" if fault.hint else "") for fault in faults]
    if messages:
        raise ForgeError("check refuses these layouts:\n  " + "\n  ".join(messages))


def short_stages(stages: "Sequence[Any]") -> tuple[Any, ...]:
    """Returns the stages of a recipe, shortened to one step each; the last stage has all further steps."""
    return tuple(
        replace(stage, until=None if number == len(stages) else number, warmup=0) for number, stage in enumerate(stages, 1)
    )


def as_measured(job: "Job", rows: int, micro_batch: int) -> "Job":
    """Returns the job with the batch sizes of the measurement."""
    return replace(job, train=replace(job.train, global_batch=rows, micro_batch=micro_batch))


def _measurement(raw: dict[str, Any]) -> "Measurement":
    from forge_parallel.verify.parity import Measurement

    return Measurement(**raw)
