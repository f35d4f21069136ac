"""`forge-train bench CAMPAIGN`: measures a matrix of layouts, models and precisions, each in its own bounded processes or job."""

import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from forge_core.terminal import Console
    from forge_lab.campaigns.campaign import Campaign, CampaignEntry
    from forge_lab.campaigns.tables import CampaignResults

FAILED = 1
_POLL_SECONDS = 15.0

_RETRIED = {
    **{name: name for name in ("failed", "refused", "finished", "all")},
    "oom": "out of memory",
    "time-limit": "time limit",
}
"""Values of --retry, and the statuses that they stand for."""


def _campaign_names(incomplete: str) -> list[str]:
    from forge_lab.campaigns.campaign import shipped_campaigns

    folder = Path(incomplete).parent if "/" in incomplete else Path()
    files = [str(path) for path in sorted(folder.glob("*.toml"))] if folder.is_dir() else []
    return [name for name in (*shipped_campaigns(), *files) if name.startswith(incomplete)]


def bench(
    context: typer.Context,
    campaign: Annotated[
        str | None,
        typer.Argument(
            help="A TOML file, or the name of a shipped campaign.", show_default=False, autocompletion=_campaign_names
        ),
    ] = None,
    list_campaigns: Annotated[bool, typer.Option("--list-campaigns", help="List the campaigns that ship with Forge.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the entries with their state; start nothing.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="List the entries with what `check` refuses and the memory that `plan` estimates; start nothing."
        ),
    ] = False,
    device: Annotated[
        Literal["cpu", "a100", "h100", "h200", "b200"], typer.Option("--device", help="Device whose memory --dry-run estimates.")
    ] = "cpu",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Only entries whose name matches, such as '*tp=4*'; may be repeated.", show_default=False),
    ] = None,
    retry: Annotated[
        list[str] | None,
        typer.Option("--retry", help=f"Run entries with a result again: {', '.join(_RETRIED)}.", show_default=False),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="TOML file of a cluster: one SLURM job per entry.", show_default=False),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="With --cluster: wait until all jobs have ended.")] = False,
    tables: Annotated[
        Path | None, typer.Option("--tables", help="Only write the tables of this directory again.", show_default=False)
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory instead of benches/<name of CAMPAIGN>.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a matrix of layouts, models and precisions. Started again, it continues; any key can be set for all entries.

    Each entry is a short run in processes of its own, with a time limit. Out of memory, the time limit and a refusal are results.
    The directory benches/<name> gets table.md, results.csv, efficiency.svg, calibration.json, and the raw records that all of
    them are made from.

    \b
        forge-train bench --list-campaigns
        forge-train bench mfu_scaling --dry-run --device h200
        forge-train bench mfu_scaling --only '*world=8' --cluster cluster.toml
        forge-train bench --tables benches/mfu_scaling
    """
    from forge_core.errors import ForgeError
    from forge_core.terminal import Console
    from forge_train.commands.options import require_single_process

    require_single_process("bench")
    console = Console(as_json=as_json)
    modes = {"--list-campaigns": list_campaigns, "--list": listing, "--dry-run": dry_run, "--tables": tables is not None}
    if len(chosen := [name for name, given in modes.items() if given]) > 1:
        raise ForgeError(f"{' and '.join(chosen)} exclude each other; give only one")
    if wait and cluster is None:
        raise ForgeError("--wait waits for jobs of a cluster; give --cluster FILE, or remove it")
    if wrong := [status for status in retry or () if status not in _RETRIED]:
        raise ForgeError(f"--retry {wrong[0]}: choose one of {', '.join(_RETRIED)}")
    if device != "cpu" and not dry_run:
        raise ForgeError("--device is the device whose memory --dry-run estimates; add --dry-run, or remove it")
    if chosen and (idle := [name for name, given in {"--retry": retry, "--cluster": cluster}.items() if given]):
        raise ForgeError(f"{chosen[0]} starts nothing, so {' and '.join(idle)} would have no effect; remove one of them")
    if list_campaigns:
        _list_campaigns(console)
        return
    if tables is not None:
        from forge_lab.campaigns.records import locked, read_campaign_record
        from forge_lab.campaigns.tables import write_tables

        read_campaign_record(tables)
        with locked(tables):
            _tell(write_tables(tables), tables, console)
        return
    if campaign is None:
        raise ForgeError("CAMPAIGN is missing: a TOML file, or a name that `forge-train bench --list-campaigns` lists")
    raise typer.Exit(
        _campaign(context.args, campaign, directory, console, only or (), retry or (), cluster, wait, listing, dry_run, device)
    )


def _list_campaigns(console: "Console") -> None:
    from forge_core.config.toml import read_toml
    from forge_core.config.tree import plain
    from forge_lab.campaigns.campaign import shipped_campaigns

    found = {name: plain(read_toml(path)) for name, path in shipped_campaigns().items()}
    if console.as_json:
        console.document(
            [{"name": name, "title": tree["title"], "file": str(shipped_campaigns()[name])} for name, tree in found.items()]
        )
        return
    console.table(("campaign", "title"), [[name, tree["title"]] for name, tree in found.items()])


def _campaign(
    arguments: Sequence[str],
    given: str,
    directory: Path | None,
    console: "Console",
    only: Sequence[str],
    retry: Sequence[str],
    cluster: str | None,
    wait: bool,
    listing: bool,
    dry_run: bool,
    device: str,
) -> int:
    """Reads a campaign and does with it what the options say; returns the exit code."""
    from forge_core.errors import ForgeError
    from forge_lab.campaigns.campaign import read_campaign
    from forge_train.launch.cluster import split_overrides

    own, overrides = split_overrides(arguments)
    if own and cluster is None:
        raise ForgeError(f"{own[0].partition('=')[0]} is a key of a cluster file; give --cluster FILE, or remove it")
    campaign = read_campaign(given, overrides, directory)
    for warning in campaign.warnings:
        console.note(f"warning: {warning}")
    chosen = [entry for entry in campaign.entries if not only or any(fnmatchcase(entry.name, pattern) for pattern in only)]
    if not chosen:
        raise ForgeError(f"--only {only[0]}: no entry has such a name; `forge-train bench {given} --list` lists them")
    if listing:
        _list(campaign, chosen, console)
        return 0
    if dry_run:
        _dry_run(chosen, device, console)
        return 0
    return _run(campaign, chosen, [_RETRIED[status] for status in retry], cluster, own, wait, console)


def _statuses(campaign: "Campaign", entries: "Sequence[CampaignEntry]") -> dict[str, str]:
    """Returns the status of the result of each entry; `waiting` if there is none, or if the entry has changed since."""
    from forge_lab.campaigns.records import fingerprint_of, read_attempt
    from forge_lab.campaigns.results import read_result

    found: dict[str, str] = {}
    for entry in entries:
        folder = campaign.folder(entry)
        attempt, limit = read_attempt(folder), 60 * campaign.settings.limit_minutes
        status = "waiting"
        if attempt is not None and attempt.fingerprint == fingerprint_of(entry):
            status = read_result(folder, campaign.settings.skip).status
            if status == "time limit" and attempt.limit_seconds < limit:
                status = "waiting"  # a longer limit may be enough
        found[entry.name] = status
    return found


def _list(campaign: "Campaign", entries: "Sequence[CampaignEntry]", console: "Console") -> None:
    statuses = _statuses(campaign, entries)
    if console.as_json:
        rows = [
            {"entry": entry.name, "values": dict(entry.values), "ranks": entry.world, "status": statuses[entry.name]}
            | {"layout": str(entry.recipe.layout) if entry.recipe else None, "refusal": entry.refusal or None}
            for entry in entries
        ]
        console.document({"directory": str(campaign.directory), "entries": rows})
        return
    body = [
        [
            entry.name,
            entry.world,
            str(entry.recipe.layout) if entry.recipe else "",
            f"check refuses it: {entry.refusal.partition(chr(10))[0]}" if entry.refusal else statuses[entry.name],
        ]
        for entry in entries
    ]
    console.table(("entry", "ranks", "layout", "state"), body)
    console.text(f"{len(entries)} entries in {campaign.directory}; nothing was started")


def _dry_run(entries: "Sequence[CampaignEntry]", device: str, console: "Console") -> None:
    """Prints what each entry would take; runs its recipe dry on tensors without memory."""
    from forge_core.terminal import size

    rows: list[dict[str, Any]] = []
    for count, entry in enumerate(entries, 1):
        console.note(f"[{count}/{len(entries)}] {entry.name}")
        planned, refusal = (None, entry.refusal) if entry.recipe is None else _planned(entry, device)
        layout = str(entry.recipe.layout) if entry.recipe else None
        rows.append({"entry": entry.name, "ranks": entry.world, "layout": layout, "peak": planned, "refusal": refusal or None})
    if console.as_json:
        console.document({"device": device, "entries": rows})
        return
    body = [
        [row["entry"], row["ranks"], row["layout"] or "", size(row["peak"]) if row["peak"] else "", row["refusal"] or "fits"]
        for row in rows
    ]
    for line in body:
        line[-1] = line[-1].replace("\n", "; ")
    console.table(("entry", "ranks", "layout", f"peak of a rank ({device}, estimate)", "check"), body)
    console.text(f"{len(entries)} entries, {sum(not row['refusal'] for row in rows)} of them not refused; nothing was started")


def _planned(entry: "CampaignEntry", device: str) -> tuple[int | None, str]:
    """Returns the estimated peak bytes of the fullest rank, or None and why there is no estimate."""
    from forge_core.errors import ForgeError
    from forge_parallel.dryrun.fake_world import ACCELERATORS
    from forge_train.plan import dry_run

    recipe = entry.recipe
    assert recipe is not None and recipe.layout is not None
    try:
        found = dry_run(recipe.job, recipe.layout, recipe.registry, 8, (), ACCELERATORS.get(device))
    except ForgeError as refusal:
        return None, str(refusal)
    return max(sum(estimate.peak.values()) for estimate in found.ranks), ""


def _run(
    campaign: "Campaign",
    entries: "Sequence[CampaignEntry]",
    retry: Sequence[str],
    cluster: str | None,
    own: Sequence[str],
    wait: bool,
    console: "Console",
) -> int:
    """Runs entries, or submits their jobs and collects those that have ended; returns the exit code."""
    from forge_lab.campaigns.cluster import ClusterRunner
    from forge_lab.campaigns.execution import wanted
    from forge_lab.campaigns.records import EARLIER, has_result, locked, require_own_directory, write_campaign
    from forge_lab.campaigns.tables import write_tables
    from forge_lab.sweep.execution import StopRequests
    from forge_train.launch.cluster import load_cluster
    from forge_train.process.stop import REQUEUE

    def say(line: str) -> None:
        (console.note if console.as_json else console.text)(line)

    require_own_directory(campaign)
    asked, pending, not_run = StopRequests(), list["CampaignEntry"](), dict[str, str]()
    runner = ClusterRunner(campaign, load_cluster(cluster, own), say, asked) if cluster is not None else None
    with locked(campaign.directory), asked.listening():
        write_campaign(campaign)
        pending = runner.collect(entries) if runner is not None else []
        busy = {entry.name for entry in pending}
        todo = [entry for entry in wanted(entries, _statuses(campaign, entries), retry) if entry.name not in busy]
        if again := sum(has_result(campaign.folder(entry)) for entry in todo):
            say(f"{again} entries with a result run again; their earlier records are kept in {campaign.directory / EARLIER}")
        if done := len(entries) - len(todo) - len(busy):
            say(f"{done} of {len(entries)} entries already have a result")
        try:
            if runner is not None:
                runner.submit(todo)
                pending = runner.collect(entries)
                while pending and wait and not asked.times:
                    _sleep(asked)
                    pending = runner.collect(entries)
            elif todo:
                not_run = _run_here(campaign, todo, say, asked)
        finally:
            found = write_tables(campaign.directory)
    _tell(found, campaign.directory, console)
    if asked.times:
        say(f"stopped by {asked.name}; start the same command again to continue")
        return REQUEUE
    if pending:
        say(f"{len(pending)} jobs are pending or running; start the same command again to collect their results")
        return REQUEUE
    failed = [one.name for one in found.results if one.status == "failed" and one.name in {entry.name for entry in entries}]
    if failed:
        console.note(
            f"{len(failed)} entries failed: {', '.join(failed[:5])}; what they printed is in {campaign.directory}/entries"
        )
    for name, why in not_run.items():
        console.note(f"{name} was not run: {why}")
    return FAILED if failed or not_run else 0


def _run_here(campaign: "Campaign", entries: "Sequence[CampaignEntry]", say: Any, asked: Any) -> dict[str, str]:
    """Runs entries on this machine; returns those that it cannot run, with the reasons."""
    from forge_core.machine import available_memory
    from forge_lab.campaigns.execution import LocalRunner
    from forge_train.process.restarts import devices

    runner = LocalRunner(campaign, say, devices(), available_memory(), asked)
    runner.run(entries)
    return runner.not_run


def _sleep(asked: Any) -> None:
    until = time.monotonic() + _POLL_SECONDS
    while time.monotonic() < until and not asked.times:
        time.sleep(0.2)


def _tell(found: "CampaignResults", directory: Path, console: "Console") -> None:
    """Prints the table."""
    from forge_lab.campaigns.tables import TABLE, as_json, table_rows

    if console.as_json:
        console.document({"directory": str(directory), **as_json(found)})
        return
    console.table(*table_rows(found))
    console.text(f"tables: {directory / TABLE}")
