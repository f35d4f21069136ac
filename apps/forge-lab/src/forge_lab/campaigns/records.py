"""Raw records of a campaign: what was run, how it ended, and the directory that holds them.

    benches/NAME/
      campaign.json            title, series, and the entries in order
      campaign.toml            a copy of the file
      entries/ENTRY/
        entry.json             what is run: values, ranks, recipe, fingerprint, or the refusal of `check`
        recipe.toml            the complete recipe
        attempt.json           how the run ended; absent while it runs, and after an interruption
        output.log             what its processes printed
        job.json               the job of a cluster
        run/                   the run's directory, with the metrics of its steps and the logs of its ranks
      earlier/ENTRY.N/         the same of an earlier result, which the tables leave out

Every table is made from these files alone; see `forge_lab.campaigns.results`.
"""

import fcntl
import glob
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from forge_core.errors import ForgeError
from forge_core.files import replace_file
from forge_core.redaction import redacted, redacted_text
from forge_lab.campaigns.campaign import Campaign, CampaignEntry, flat_values

CAMPAIGN_FILE, COPY = "campaign.json", "campaign.toml"
ENTRY_FILE, RECIPE_FILE, ATTEMPT_FILE, JOB_FILE, OUTPUT, RUN = (
    "entry.json",
    "recipe.toml",
    "attempt.json",
    "job.json",
    "output.log",
    "run",
)
LOCK = "lock"
EARLIER = "earlier"
FORMAT = 1


@dataclass(frozen=True)
class Attempt:
    """How the run of an entry ended.

    Attributes:
        fingerprint: fingerprint of the entry that was run.
        code: exit code, negative for a signal; None if it is unknown.
        seconds: from start to end.
        began: ISO time in UTC.
        limit_seconds: time limit of the entry.
        timed_out: whether the time limit ended it.
        oom_kills: processes that the kernel of this machine killed for memory meanwhile; None if unknown.
        refusal: faults of `check`; nothing was started then.
        job: number of its job on a cluster; None if it ran on this machine.
        note: what a cluster said about the end.
    """

    fingerprint: str
    code: int | None = None
    seconds: float = 0.0
    began: str = ""
    limit_seconds: float = 0.0
    timed_out: bool = False
    oom_kills: int | None = None
    refusal: str = ""
    job: str | None = None
    note: str = ""


def fingerprint_of(entry: CampaignEntry) -> str:
    """Returns a digest of what determines the numbers of an entry: its ranks, and all keys of its recipe except its place."""
    what: Any = entry.refusal if entry.recipe is None else flat_values(entry.recipe)
    text = json.dumps([FORMAT, entry.world, what], sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=12).hexdigest()


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Context in which files of a campaign are written.

    Raises:
        ForgeError: a file cannot be written; the error says that finished results are kept.
    """
    try:
        yield
    except OSError as cause:
        why = cause.strerror or str(cause)
        raise ForgeError(
            f"{directory} cannot be written: {why}; free space or choose another directory with --dir. Results that were "
            "written are kept, and the same command continues"
        ) from cause


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the lock of a campaign's directory inside the `with` block.

    Raises:
        ForgeError: another process holds it, or the directory cannot be written.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 200, 0).decode("utf-8", "replace").strip() or "another process"
            raise ForgeError(
                f"{owner} runs a campaign in {directory}; wait for it, or choose another directory with --dir=PATH"
            ) from None
        with writing(directory):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def require_own_directory(campaign: Campaign) -> None:
    """Checks that the directory is empty or of this campaign.

    Raises:
        ForgeError: it has another campaign, or other files.
    """
    directory = campaign.directory
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ForgeError(f"{directory} is not a directory; choose another one with --dir=PATH")
    if (directory / CAMPAIGN_FILE).is_file():
        try:
            record = read_campaign_record(directory)
        except ForgeError:  # damaged: it is written again, and fingerprints tell whose results are there
            return
        name, names = record["campaign"], {entry.name for entry in campaign.entries}
        if name != campaign.name:
            raise ForgeError(
                f"{directory} has results of the campaign {name!r}, not of {campaign.name!r}; choose another one with --dir=PATH"
            )
        if not names.intersection(record["entries"]):
            raise ForgeError(
                f"{directory} has results of another campaign {name!r}, without any entry of this one; "
                "choose another one with --dir=PATH"
            )
        return
    if others := sorted(path.name for path in directory.iterdir() if path.name != LOCK):
        raise ForgeError(
            f"{directory} has {others[0]} but no {CAMPAIGN_FILE}, so it is not of a campaign; choose another one with --dir=PATH"
        )


def read_campaign_record(directory: Path) -> dict[str, Any]:
    """Returns the record of a campaign.

    Raises:
        ForgeError: the directory has none, or it is damaged.
    """
    path = directory / CAMPAIGN_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found["entries"], dict) or not isinstance(found["campaign"], str):
            raise TypeError
    except OSError as cause:
        raise ForgeError(
            f"{path} cannot be read: {cause.strerror}; give the directory of a campaign, such as benches/mfu_scaling"
        ) from cause
    except (ValueError, KeyError, TypeError) as cause:
        raise ForgeError(f"{path} is damaged; run the campaign's command again, which writes it and keeps the results") from cause
    return found


def write_campaign(campaign: Campaign) -> None:
    """Writes the record of the campaign, and of every entry whose recipe has not been run or has changed.

    Raises:
        ForgeError: a file cannot be written.
    """
    settings = campaign.settings
    about = {
        "format": FORMAT,
        "campaign": campaign.name,
        "title": settings.title,
        "description": settings.description,
        "steps": settings.steps,
        "skip": settings.skip,
        "every": settings.every,
        "series": list(campaign.series),
        "entries": {entry.name: {"values": dict(entry.values), "world": entry.world} for entry in campaign.entries},
    }
    with writing(campaign.directory):
        campaign.directory.mkdir(parents=True, exist_ok=True)
        _replace(campaign.directory / CAMPAIGN_FILE, json.dumps(about, indent=1, default=str) + "\n")
        _replace(campaign.directory / COPY, campaign.file.read_text(encoding="utf-8"))


def prepare_entry(campaign: Campaign, entry: CampaignEntry, ranks_per_node: int) -> None:
    """Writes what is run. An earlier result is moved aside; what an interrupted run left is removed.

    Args:
        campaign: the campaign.
        entry: the entry.
        ranks_per_node: number of its ranks on each machine.

    Raises:
        ForgeError: a file cannot be removed or written.
    """
    folder = campaign.folder(entry)
    with writing(campaign.directory):
        if has_result(folder):
            kept = campaign.directory / EARLIER
            kept.mkdir(exist_ok=True)
            number = 1 + sum(1 for _ in kept.glob(f"{glob.escape(entry.name)}.*"))
            folder.rename(kept / f"{entry.name}.{number}")
        elif folder.exists():
            shutil.rmtree(folder)
        (folder / RUN).mkdir(parents=True)
        _replace(
            folder / ENTRY_FILE, json.dumps(_about(entry) | {"ranks_per_node": ranks_per_node}, indent=1, default=str) + "\n"
        )
        if entry.recipe is None:
            write_attempt(folder, Attempt(fingerprint_of(entry), refusal=redacted_text(entry.refusal)))
            return
        shared = campaign.directory / "data"
        shared.mkdir(exist_ok=True)
        (folder / RUN / "data").symlink_to(Path("..") / ".." / ".." / "data", target_is_directory=True)
        _replace(folder / RECIPE_FILE, entry.recipe.as_toml())


def _about(entry: CampaignEntry) -> dict[str, Any]:
    about: dict[str, Any] = {
        "format": FORMAT,
        "name": entry.name,
        "values": dict(entry.values),
        "world": entry.world,
        "fingerprint": fingerprint_of(entry),
    }
    if entry.recipe is None or entry.recipe.layout is None:
        return about
    job, layout = entry.recipe.job, entry.recipe.layout
    train = job.train
    return about | {
        "layout": {"text": str(layout), "sizes": layout.sizes()},
        "micro_batch": train.micro_batch,
        "micro_batches": train.global_batch // (train.micro_batch * layout.data),
        "global_batch": train.global_batch,
        "length": job.data.sequence_length,
        "compute": job.precision.compute,
        "state": job.precision.state,
        "steps": train.stop_at,
        "recipe": redacted({key: value for key, value in entry.recipe.as_json().items() if key != "job"}),
        "seed": job.job.seed,
    }


def _replace(path: Path, text: str) -> None:
    """Writes a file unless it has this text; a text with secrets is readable only by its owner."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    replace_file(path, text.encode())
    if redacted_text(text) != text:
        path.chmod(0o600)


def write_attempt(folder: Path, attempt: Attempt) -> None:
    """Records how an entry ended."""
    replace_file(folder / ATTEMPT_FILE, (json.dumps(asdict(attempt), indent=1) + "\n").encode())


def read_attempt(folder: Path) -> Attempt | None:
    """Returns how an entry ended; None if it has not, or if the record is damaged, so that it runs again."""
    found = read_json(folder / ATTEMPT_FILE)
    try:
        return Attempt(**found) if found is not None else None
    except TypeError:
        return None


def has_result(folder: Path) -> bool:
    """Whether the folder of an entry has the record of a run that has ended."""
    attempt = read_attempt(folder)
    return attempt is not None and not attempt.refusal


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the object in a JSON file; None if it is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def recorded_entry(folder: Path) -> Mapping[str, Any] | None:
    """Returns what is recorded about an entry that was prepared."""
    return read_json(folder / ENTRY_FILE)
