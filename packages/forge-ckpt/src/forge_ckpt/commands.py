"""`forge-train ckpt`: ls, show, verify, diff, prune, average, convert."""

import json
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from forge_core.errors import CheckpointError, Damaged, ForgeError
from forge_core.terminal import Console

if TYPE_CHECKING:
    from forge_ckpt.checkpoint.fence import Owner
    from forge_ckpt.checkpoint.locate import AnyStore
    from forge_ckpt.checkpoint.retention import RetentionDecision
    from forge_ckpt.difference import CheckpointDifference
    from forge_ckpt.format.manifest import Manifest


Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="A run's directory, a directory of checkpoints, or one checkpoint; or its URL.")
]
Step = Annotated[
    str | None, typer.Argument(metavar="[STEP]", help="A step or a name. Default: DIR itself, or the newest checkpoint in it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Foreign = Annotated[bool, typer.Option("--foreign", help="Accept a directory that belongs to another user.")]


def opened(directory: str, foreign: bool) -> "tuple[AnyStore, str | None]":
    """Opens the checkpoints at a path or URL; also returns the name of the checkpoint if the path is a single one."""
    from forge_ckpt.checkpoint.locate import store_of

    try:
        return store_of(directory, foreign)
    except CheckpointError as cause:
        refuse(cause)


def named(store: "AnyStore", step: str | None) -> str:
    """Returns the name of the checkpoint for a step or a name; without either, of the newest one."""
    from forge_ckpt.checkpoint.locate import resolve
    from forge_ckpt.world import SingleProcessWorld

    try:
        return resolve(store, int(step) if step is not None and step.isdecimal() else step, SingleProcessWorld())
    except ForgeError as cause:
        refuse(cause)
    except OSError as cause:
        refuse(CheckpointError(f"{store.root} cannot be read: {cause}"))


def manifest_of(store: "AnyStore", name: str) -> "Manifest":
    """Returns the manifest of a checkpoint.

    Raises:
        Damaged: the checkpoint is damaged; the message names it.
    """
    from forge_ckpt.checkpoint.locate import CheckpointLocation

    try:
        return CheckpointLocation(store, name, None).manifest()
    except Damaged:  # `verify` reports it as its result
        raise
    except ForgeError as cause:
        refuse(cause)
    except OSError as cause:
        refuse(CheckpointError(f"{store.root} cannot be read: {cause}"))


def read_manifest(store: "AnyStore", step: str | None) -> "tuple[str, Manifest]":
    """Returns name and manifest of a checkpoint; see `named` and `manifest_of`."""
    name = named(store, step)
    return name, manifest_of(store, name)


def refuse(cause: ForgeError) -> NoReturn:
    """Raises an error, which `answering` prints."""
    raise cause


def answering(function: Callable[..., None]) -> Callable[..., None]:
    """Returns a command that prints an error, with --json as a document, and ends with its exit code."""

    @wraps(function)
    def run(*arguments: Any, **given: Any) -> None:
        try:
            function(*arguments, **given)
        except ForgeError as cause:
            passed_on = getattr(given.get("context"), "args", ())
            console = Console(as_json=given.get("as_json", False) or "--json" in passed_on)
            raise typer.Exit(console.error(cause)) from None

    return run


def list_(directory: Directory, as_json: AsJson = False, foreign: Foreign = False) -> None:
    """List all checkpoints of a directory, newest first. Checks lengths and manifests, but not contents."""
    store, rows = opened(directory, foreign)[0], []
    from forge_ckpt.checkpoint.verification import open_manifest
    from forge_ckpt.format.names import DAMAGED, SUPERSEDED, committed

    names = store.list()
    for entry in committed(names):
        row: dict[str, Any] = {"name": entry.name, "step": entry.step, "state": "complete"}
        try:
            manifest = open_manifest(store, entry.name)[0]
            row |= {"bytes": manifest.bytes, "tensors": len(manifest.tensors), "world": manifest.world}
        except (CheckpointError, OSError) as cause:
            row |= {"state": "unusable", "reason": str(cause)}
        rows.append(row)
    rows += [{"name": name, "state": "set aside"} for name in names if name.startswith((DAMAGED, SUPERSEDED))]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        typer.echo(f"no checkpoints in {store.root}")
    for row in rows:
        held = f"{row['bytes']:>16,} bytes  {row['tensors']:>6} tensors  {row['world']:>4} ranks" if "bytes" in row else ""
        typer.echo(f"{row['name']:<24} {row['state']:<10} {held}{row.get('reason', '')}".rstrip())


def show(directory: Directory, step: Step = None, as_json: AsJson = False, foreign: Foreign = False) -> None:
    """Show the tensors of one checkpoint and the trainer's metadata."""
    store, only = opened(directory, foreign)
    from forge_core.errors import Damaged

    try:
        name, manifest = read_manifest(store, step or only)
    except Damaged as cause:
        refuse(cause)
    _, borders = manifest.by_tensor
    pieces = (borders[1:] - borders[:-1]).tolist()
    if as_json:
        tensors = [
            {"name": info.name, "dtype": info.dtype, "shape": list(info.shape), "bytes": info.bytes, "pieces": count}
            for info, count in zip(manifest.tensors, pieces, strict=True)
        ]
        head = {"name": name, "step": manifest.step, "world": manifest.world, "generation": manifest.generation}
        typer.echo(json.dumps({**head, "bytes": manifest.bytes, "tensors": tensors, "meta": manifest.meta}, indent=2))
        return
    typer.echo(f"{name}: step {manifest.step}, {manifest.bytes:,} bytes, written by {manifest.world} ranks")
    for info, count in zip(manifest.tensors, pieces, strict=True):
        typer.echo(f"  {info.name:<60} {info.dtype:<10} {'x'.join(map(str, info.shape)) or 'scalar':<16} {count:>4} pieces")
    typer.echo("meta:\n" + json.dumps(manifest.meta, indent=2))


def verify(directory: Directory, step: Step = None, as_json: AsJson = False, foreign: Foreign = False) -> None:
    """Read every byte of one checkpoint and verify its checksums. Exit code 1 if it is damaged."""
    store, only = opened(directory, foreign)
    from forge_ckpt.checkpoint.verification import agreed_fault
    from forge_ckpt.world import SingleProcessWorld
    from forge_core.errors import Damaged

    name, manifest = named(store, step or only), None
    try:
        manifest = manifest_of(store, name)
        fault = agreed_fault(store, name, manifest, SingleProcessWorld())
        reason = f"{store.root}/{name} is damaged: {fault}"
    except Damaged as cause:
        fault = reason = str(cause)
    result = {"name": name, "verified": fault is None, "bytes": manifest.bytes if manifest else None, "reason": fault}
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    elif fault is None and manifest:
        typer.echo(f"{name} is verified: {manifest.bytes:,} bytes in {len(manifest.tensors)} tensors")
    else:
        typer.echo(reason, err=True)
    if fault:
        raise typer.Exit(1)


_SHOWN = 40


def diff(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A run's directory, a directory of checkpoints, or one checkpoint; or its URL.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    only_tensors: Annotated[bool, typer.Option("--only-tensors", help="Compare no metadata, such as the recipe.")] = False,
    as_json: AsJson = False,
    foreign: Foreign = False,
) -> None:
    """Compare two checkpoints: tensors, their values bit by bit, and metadata. Exit code 0 if equal, 1 if they differ."""
    from dataclasses import asdict, replace

    from forge_ckpt.checkpoint.read import StoredTensors
    from forge_ckpt.difference import ABSENT, difference

    try:
        stores = [opened(path, foreign) for path in (a, b)]
        sides = [StoredTensors(store, read_manifest(store, name)[0]) for store, name in stores]
        found = difference(*sides)
    except ForgeError as cause:
        refuse(cause)
    if only_tensors:
        found = replace(found, facts={})
    if as_json:
        facts = {
            key: {side: value for side, value in zip("ab", pair, strict=True) if value is not ABSENT}
            for key, pair in found.facts.items()
        }
        values = [asdict(each) | {"share": each.share} for each in found.values]
        body = asdict(replace(found, facts={}, values=())) | {"values": values, "facts": facts}
        typer.echo(json.dumps({"a": sides[0].origin, "b": sides[1].origin, "same": found.none, **body}, indent=2))
    else:
        typer.echo(f"a: {sides[0].origin}\nb: {sides[1].origin}")
        for line in _lines(found):
            typer.echo(line)
    if not found.none:
        raise typer.Exit(1)


def _lines(found: "CheckpointDifference") -> list[str]:
    total = found.equal + len(found.values)
    lines = [f"only in {side}: {name}" for side, names in (("a", found.only_a), ("b", found.only_b)) for name in names]
    lines += [f"another form: {name}: {a} in a, {b} in b" for name, a, b in found.forms]
    lines = _cut(lines)
    if found.values:
        lines.append(f"{'tensor':<52} {'differ':>9} {'largest':>10} {'relative':>10}")
        worst = sorted(found.values, key=lambda each: (-each.relative, each.name))
        lines += _cut(
            [
                f"{each.name:<52} {each.share:>9.3%} {each.absolute:>10.3g} {each.relative:>10.3g}"
                + (f"  and {each.not_finite} not finite" if each.not_finite else "")
                for each in worst
            ]
        )
    lines.append(f"{found.equal} of {total} tensors of the same form are equal, bit by bit")
    lines += _cut([f"{key}: {a!r} in a, {b!r} in b" for key, (a, b) in sorted(found.facts.items())])
    return lines


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return lines if more <= 0 else [*lines[:_SHOWN], f"and {more} more; --json has all"]


def prune(
    directory: Directory,
    last: Annotated[int | None, typer.Option(min=1, help="Number of newest steps to keep. Default: 1.")] = None,
    every: Annotated[int, typer.Option(min=0, help="Keep steps that are multiples of this number.")] = 0,
    log_spaced: Annotated[
        int | None, typer.Option(metavar="START", min=0, help="Keep the first from START, and from 1, 2, 4, ... steps after it.")
    ] = None,
    hours: Annotated[float, typer.Option(min=0.0, help="Keep the first checkpoint of every N hours of training.")] = 0.0,
    spare: Annotated[list[int] | None, typer.Option(metavar="STEP", help="Keep this step; may be repeated.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them. Without it, they are only listed.")] = False,
    ended: Annotated[bool, typer.Option("--ended", help="The job that wrote here on another host has ended.")] = False,
    as_json: AsJson = False,
    foreign: Foreign = False,
) -> None:
    """List the checkpoints that no rule keeps, and remove them with --yes. `best` and other marked checkpoints are kept.

    A checkpoint is removed only if a newer one that is kept was read and verified. Refused while a job writes to the directory.
    """
    from forge_ckpt.checkpoint.retention import RetentionPolicy, judged, retain, sweep
    from forge_ckpt.format.names import marked
    from forge_ckpt.world import SingleProcessWorld

    if last is None and not every and log_spaced is None and not hours:
        refuse(CheckpointError("no rule says which checkpoints to keep; add --last, --every, --log-spaced or --hours"))
    store, only = opened(directory, foreign)
    if only is not None:
        refuse(CheckpointError(f"{directory} is one checkpoint; use the directory that contains it, {store.root}"))
    policy = RetentionPolicy(last or 1, every, log_spaced, hours)
    try:
        steps = {name: mark for mark, name in marked(store).items()}
        verdicts = judged(store, policy)
        named = {verdict.entry.step: f"mark {steps[verdict.entry.name]}" for verdict in verdicts if verdict.entry.name in steps}
        spared = dict.fromkeys(spare or (), "spared") | named
        verdicts = judged(store, policy, spared)
        removed: list[str] = []
        if yes:
            may = _guard(store, ended)
            sweep(store)
            removed = retain(store, SingleProcessWorld(), policy, spared, may)
    except ForgeError as cause:
        refuse(cause)
    except OSError as cause:
        refuse(CheckpointError(f"{store.root} cannot be read: {cause}"))
    left = [verdict.entry.name for verdict in verdicts if not verdict.kept_by and verdict.entry.name not in removed]
    if as_json:
        typer.echo(json.dumps([_row(verdict, removed) for verdict in verdicts], indent=2))
    else:
        _say(store, verdicts, removed, yes)
    if yes and left:
        raise typer.Exit(1)


def _guard(store: "AnyStore", ended: bool) -> Callable[[], None]:
    """Returns a check to call before each removal, and runs it once now.

    Raises:
        CheckpointError: a job may be writing to the store.
    """
    from forge_ckpt.checkpoint.fence import Owner

    owner = Owner.of(store)
    if owner is not None and not _gone(owner, ended):
        raise CheckpointError(
            f"process {owner.process} on {owner.host} writes to {store.root}; it removes old checkpoints itself, by the rules of "
            "its [checkpoint] section. Stop it first"
            + ("" if owner.has_ended() is not None else f", or pass --ended once that job on {owner.host} has ended")
        )

    def may() -> None:
        if Owner.of(store) != owner:
            raise CheckpointError(f"a job has started in {store.root}; nothing more is removed")

    return may


def _gone(owner: "Owner", ended: bool) -> bool:
    gone = owner.has_ended()
    return ended if gone is None else gone


def _row(verdict: "RetentionDecision", removed: list[str]) -> dict[str, object]:
    return {
        "name": verdict.entry.name,
        "step": verdict.entry.step,
        "kept_by": list(verdict.kept_by),
        "reason": None if verdict.kept_by else verdict.why,
        "removed": verdict.entry.name in removed,
    }


def _say(store: "AnyStore", verdicts: "list[RetentionDecision]", removed: list[str], yes: bool) -> None:
    if not verdicts:
        typer.echo(f"no checkpoints in {store.root}")
    for verdict in verdicts:
        going = "removed" if verdict.entry.name in removed else "stays" if yes else "goes"
        if verdict.kept_by:
            typer.echo(f"{verdict.entry.name:<24} stays    {', '.join(verdict.kept_by)}")
        else:
            held = "; but no newer one that stays could be verified" if going == "stays" else ""
            typer.echo(f"{verdict.entry.name:<24} {going:<8} {verdict.why}{held}")
    if not yes and not all(verdict.kept_by for verdict in verdicts):
        typer.echo("nothing was removed; pass --yes to remove what goes")


def average(
    directory: Directory,
    steps: Annotated[list[str], typer.Argument(metavar="STEP STEP ...", help="Two or more steps or names.")],
    output: Annotated[str, typer.Option(help="The directory of checkpoints to create, or its URL.")],
    weights: Annotated[str | None, typer.Option(help="One weight per checkpoint, separated by commas. Default: equal.")] = None,
    ema: Annotated[
        float | None, typer.Option(metavar="DECAY", help="An exponential moving average from the oldest step on instead.")
    ] = None,
    foreign: Foreign = False,
    as_json: AsJson = False,
) -> None:
    """Average the weights of several checkpoints in fp64, for `evaluate`, `generate` and `convert`.

    The result has no optimizer state, so a run cannot resume from it.
    """
    from forge_ckpt.average import SECTION, normalized, of_ema, write_average
    from forge_ckpt.checkpoint.read import StoredTensors

    if len(steps) < 2:
        refuse(CheckpointError("an average needs at least two checkpoints; add their steps"))
    if weights is not None and ema is not None:
        refuse(CheckpointError("--weights and --ema exclude each other; remove one"))
    store = opened(directory, foreign)[0]
    try:
        names = [read_manifest(store, step)[0] for step in steps]
        if len(set(names)) < len(names):
            raise CheckpointError(f"{', '.join(names)}: a checkpoint is given twice; use --weights instead")
        sources = [StoredTensors(store, name, lambda tensor: tensor.startswith(SECTION)) for name in names]
        if ema is not None:
            sources.sort(key=lambda source: source.manifest.step)
            shares = of_ema(len(sources), ema)
        else:
            shares = normalized(_numbers(weights, len(names)))
        name = write_average(sources, shares, output)
    except ForgeError as cause:
        refuse(cause)
    if as_json:
        shared = [{"step": source.manifest.step, "share": share} for source, share in zip(sources, shares, strict=True)]
        document = {"checkpoint": f"{output.rstrip('/')}/{name}", "tensors": len(sources[0].tensors), "of": shared}
        typer.echo(json.dumps(document, indent=2))
        return
    parts = ", ".join(f"{share:.4g} of step {source.manifest.step}" for source, share in zip(sources, shares, strict=True))
    typer.echo(f"{output.rstrip('/')}/{name}: {len(sources[0].tensors)} tensors, {parts}")


def _numbers(weights: str | None, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    try:
        numbers = [float(part) for part in weights.split(",")]
    except ValueError:
        raise CheckpointError(f"--weights {weights}: use numbers separated by commas, such as 1,1,2") from None
    if len(numbers) != count:
        raise CheckpointError(f"--weights {weights}: {len(numbers)} numbers for {count} checkpoints")
    return numbers


def convert(context: typer.Context) -> None:
    """Convert weights to another format: --from hf --to forge SOURCE TARGET. The command `convert` of forge-train."""
    from typer.main import get_command

    from forge_core.registry import Registry

    try:
        loaded = Registry().load("forge.commands", "convert")
    except ForgeError as cause:
        refuse(cause)
    command = typer.Typer(add_completion=False, rich_markup_mode=None)
    command.command("convert")(loaded)
    try:
        code = get_command(command).main(args=list(context.args), prog_name="ckpt convert", standalone_mode=False)
    except ForgeError as cause:
        refuse(cause)
    raise typer.Exit(code if isinstance(code, int) else 0)


app = typer.Typer(name="ckpt", help="Inspect, verify and compare checkpoints.", no_args_is_help=True, add_completion=False)
app.command("ls")(answering(list_))
app.command("list", hidden=True)(answering(list_))
for function in (show, verify, diff, prune, average):
    app.command()(answering(function))
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)(
    answering(convert)
)
