"""`forge-train runs [DIR]`, `runs diff A B`, `runs log RUN`: shows many runs, two, or the logs of one. No torch."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forge_core.errors import ConfigError, ForgeError
from forge_core.terminal import Console, clock, count
from forge_train.commands.options import ListingGroup

if TYPE_CHECKING:
    from rich.table import Table

    from forge_train.runs.overview import RunOverview

COLUMNS = ("run", "state", "step", "loss", "lr", "left", "restarts", "goodput", "lost to", "remarks")
UNKNOWN = "?"
"""Text in a table for what a directory does not record."""


runs = typer.Typer(
    cls=ListingGroup,
    add_completion=False,
    rich_markup_mode=None,
    help="List runs with state, progress and goodput; compare two; merge the logs of all ranks. "
    "`runs DIR` is `runs list DIR`, with the options --watch, --interval and --json.",
)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@runs.command(name="list")
def list_(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder of runs, or one run.")] = Path("runs"),
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between refreshes.")] = 2.0,
    as_json: _Json = False,
) -> None:
    """List the runs below a directory with state, step, loss, time left, restarts and goodput.

    States: running, finished, preempted (a signal ended it; it can be resumed), failed, superseded (another job has taken its
    checkpoints), unknown. Goodput is the share of wall time that was spent on steps that count; "lost to" says where the rest
    went. A question mark stands for what the directory does not record. Only the ends of metrics are read.
    """
    if watch and as_json:
        raise ForgeError("--watch draws a table again and again, and --json is one document; remove one of them")
    try:
        if watch:
            _watch(directory, interval)
        else:
            _show(directory, Console(as_json=as_json))
    except KeyboardInterrupt:
        if not watch:
            raise


def _read(directory: Path) -> "list[RunOverview]":
    from forge_train.runs.overview import overview, run_directories

    now = time.time()
    return [overview(found, now) for found in run_directories(directory)]


def _show(directory: Path, console: Console) -> None:
    found = _read(directory)
    if console.as_json:
        console.document([run.as_json() for run in found])
    console.table(COLUMNS, (_row(run, directory) for run in found))


def _watch(directory: Path, interval: float) -> None:
    from rich.console import Console as Terminal
    from rich.live import Live

    terminal = Terminal()
    if not terminal.is_terminal:
        while True:
            _show(directory, Console())
            Console().text()
            time.sleep(interval)
    with Live(_drawn(directory), console=terminal, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(_drawn(directory), refresh=True)


def _drawn(directory: Path) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(*COLUMNS, box=None, header_style="bold", pad_edge=False)
    for run in _read(directory):
        table.add_row(*(Text(cell) for cell in _row(run, directory)))
    table.caption = f"{time.strftime('%H:%M:%S')}, Ctrl-C ends"
    return table


def _row(run: "RunOverview", below: Path) -> list[str]:
    name = run.directory.relative_to(below) if run.directory != below else run.directory.resolve().name
    left = "" if run.state != "running" else UNKNOWN if run.seconds_left is None else clock(run.seconds_left)
    told = run.why if run.state not in ("running", "finished") or run.why not in (run.state, "") else ""
    restarts = UNKNOWN if run.restarts is None else str(run.restarts)
    restarts += f" + {run.rollbacks} rollbacks" if run.rollbacks else ""
    return [
        str(name),
        run.state,
        f"{_text(run.step, ',')}/{_text(run.max_steps, ',')}",
        _text(run.loss, ".4f"),
        _text(run.lr, ".3g"),
        left,
        restarts,
        UNKNOWN if run.goodput is None else f"{run.goodput.share:.1%}",
        UNKNOWN if run.goodput is None else _losses(run),
        "; ".join(filter(None, [told, *run.notes])),
    ]


def _text(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def _losses(run: "RunOverview") -> str:
    """Returns the causes of lost time with their shares, the largest first; those below 0.5 % are left out."""
    assert run.goodput is not None
    wall = run.goodput.wall
    shares = {cause: seconds / wall for cause, seconds in run.goodput.lost.items()} if wall > 0 else {}
    largest = sorted((item for item in shares.items() if item[1] >= 0.005), key=lambda item: -item[1])
    return ", ".join(f"{cause} {share:.1%}" for cause, share in largest)


@runs.command()
def diff(
    one: Annotated[Path, typer.Argument(metavar="A", help="Directory of a run.", show_default=False)],
    other: Annotated[Path, typer.Argument(metavar="B", help="Directory of the run to compare with.", show_default=False)],
    as_json: _Json = False,
) -> None:
    """Show the recipe keys that differ between two runs, and their last metrics side by side; exit code 1 if keys differ."""
    from dataclasses import asdict

    from forge_core.config.toml import value_text
    from forge_train.commands.recipe import differences
    from forge_train.runs.overview import last_values

    _require_two(one, other)
    try:
        changes = differences(str(one), str(other))
    except ConfigError as cause:
        raise ForgeError(f"the recipes of {one} and {other} cannot be compared by this version of Forge: {cause}") from cause
    before, now = last_values(one), last_values(other)
    console = Console(as_json=as_json)
    if as_json:
        metrics = {name: {"one": _entry(before.get(name)), "other": _entry(now.get(name))} for name in {**before, **now}}
        console.document({"recipe": [asdict(change) for change in changes], "metrics": metrics})
    names = str(one), str(other)
    console.text("no key differs" if not changes else f"{len(changes)} key{'s differ' if len(changes) > 1 else ' differs'}")
    if changes:
        console.table(["key", *names], ([item.key, *map(_key_text(value_text), (item.was, item.now))] for item in changes))
    console.text()
    console.table(["last metric", *names], _side_by_side(before, now))
    if changes:
        raise typer.Exit(1)


def _require_two(one: Path, other: Path) -> None:
    """Checks that two different runs with recipes are given.

    Raises:
        ForgeError: names the path that is not one.
    """
    from forge_train.directory import RECIPE

    for path in (one, other):
        if not (path / RECIPE).is_file():
            raise ForgeError(f"{path} has no {RECIPE}, so it is not a run's directory; give one such as runs/demo")
    if one.resolve() == other.resolve():
        raise ForgeError(f"{one} and {other} are the same run; give two different ones")


def _key_text(text: Any) -> Any:
    return lambda value: "nothing" if value is None else text(value)


def _entry(value: tuple[int, float] | None) -> dict[str, Any] | None:
    from math import isfinite

    return None if value is None else {"step": value[0], "value": value[1] if isfinite(value[1]) else str(value[1])}


def _side_by_side(before: Mapping[str, tuple[int, float]], now: Mapping[str, tuple[int, float]]) -> Iterator[Sequence[str]]:
    for name in dict.fromkeys([*before, *now]):
        cells = (values.get(name) for values in (before, now))
        yield [name, *(UNKNOWN if cell is None else f"{_brief(cell[1])} (step {cell[0]:,})" for cell in cells)]


def _brief(value: float) -> str:
    return count(value) if abs(value) >= 1e5 else f"{value:.6g}"


@runs.command()
def log(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.", show_default=False)],
    rank: Annotated[list[int] | None, typer.Option("--rank", min=0, help="Only this rank; may be repeated.")] = None,
    tail: Annotated[int | None, typer.Option("--tail", min=1, help="Only the last N lines.", show_default=False)] = None,
    as_json: _Json = False,
) -> None:
    """Merge the logs of all ranks by time, each line after its rank."""
    from forge_train.runs.logs import log_files, merged

    files = log_files(run, frozenset(rank or ()))
    width, console = len(str(max(files))), Console(as_json=as_json)
    try:
        if as_json:
            console.document([{"rank": number, "line": line} for number, line in merged(files, tail)])
            return
        for number, line in merged(files, tail):
            console.text(f"{number:{width}} | {line}")
    except OSError as cause:
        if isinstance(cause, BrokenPipeError):
            raise
        raise ForgeError(f"a log of {run} cannot be read: {cause.strerror}") from cause
