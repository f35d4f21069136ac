"""Runs entries as jobs of SLURM, one job per entry. The command submits them, and collects results when it is started again.

A job is not requeued: it ends with its run. Its time limit is that of the entry and the warning before it, after which the run
stops by itself.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from forge_core.errors import ConfigError, Fault, ForgeError
from forge_core.files import lines_of, replace_file
from forge_lab.campaigns.campaign import Campaign, CampaignEntry
from forge_lab.campaigns.records import (
    ATTEMPT_FILE,
    JOB_FILE,
    RECIPE_FILE,
    Attempt,
    fingerprint_of,
    prepare_entry,
    read_json,
    write_attempt,
    writing,
)
from forge_lab.sweep.execution import StopRequests
from forge_train.launch.cluster import Cluster, check_run
from forge_train.launch.slurm import slurm_script
from forge_train.launch.submission import queued_jobs, submit_job

_ENDED = re.compile(r"job \S+ ended with code (\d+)")
_CANCELED = "SLURM has canceled"


@dataclass
class ClusterRunner:
    """Submits the jobs of entries and collects their ends.

    Attributes:
        campaign: the campaign.
        cluster: the cluster file; its number of nodes, time and array are those of the entries.
        say: called with a line about each job.
        asked: stop requests of this process; after one, no further job is submitted.
    """

    campaign: Campaign
    cluster: Cluster
    say: Callable[[str], None]
    asked: StopRequests = field(default_factory=StopRequests)

    def __post_init__(self) -> None:
        if self.cluster.slurm.array is not None:
            raise ConfigError([Fault("slurm.array", "a campaign submits one job per entry", hint="remove it")])

    def submit(self, entries: Sequence[CampaignEntry]) -> None:
        """Submits a job for each entry.

        Raises:
            ForgeError: SLURM is missing, does not answer or refuses a job, an earlier job of an entry is still there, or the
                directory cannot be written.
        """
        alive = {number.partition("_")[0] for number, _, _ in queued_jobs()}
        for entry in entries:
            job = (read_json(self.campaign.folder(entry) / JOB_FILE) or {}).get("job")
            if job in alive:
                raise ForgeError(
                    f"job {job} still runs {entry.name}, which is to run again; wait for it, or cancel it with `scancel {job}`"
                )
        for count, entry in enumerate(entries, 1):
            if self.asked.times:
                return
            title = f"[{count}/{len(entries)}] {entry.name}"
            if entry.recipe is not None:
                cluster, refusal = self._of(entry)
                entry = replace(entry, recipe=None, refusal=refusal) if refusal else entry
            else:
                cluster = self.cluster
            prepare_entry(self.campaign, entry, cluster.slurm.ranks)
            if entry.recipe is None:
                self.say(f"{title}: refused")
                continue
            folder = self.campaign.folder(entry).absolute()
            run = check_run(str(folder / RECIPE_FILE), (), entry.world, folder=folder)
            job = submit_job(run, slurm_script(run, cluster))
            with writing(self.campaign.directory):
                replace_file(folder / JOB_FILE, f'{{"job": "{job}", "fingerprint": "{fingerprint_of(entry)}"}}\n'.encode())
            self.say(f"{title}: job {job} on {cluster.slurm.nodes} x {cluster.slurm.ranks} ranks")

    def _of(self, entry: CampaignEntry) -> tuple[Cluster, str]:
        """Returns the cluster file for an entry, and why its nodes do not fit; empty if they do."""
        slurm = self.cluster.slurm
        ranks = slurm.ranks
        if entry.world % ranks and entry.world > ranks:
            return self.cluster, f"{entry.world} ranks are not whole nodes of {ranks} (slurm.gpus_per_node or ranks_per_node)"
        own = min(ranks, entry.world)
        gpus = None if slurm.gpus_per_node is None else min(slurm.gpus_per_node, own) if own < ranks else slurm.gpus_per_node
        minutes = math.ceil(self.campaign.settings.limit_minutes + slurm.warn_seconds / 60)
        sizes = {"nodes": max(1, entry.world // ranks), "ranks_per_node": own, "gpus_per_node": gpus}
        return replace(self.cluster, slurm=replace(slurm, **sizes, time=str(minutes), max_requeues=0)), ""

    def collect(self, entries: Sequence[CampaignEntry]) -> list[CampaignEntry]:
        """Records the ends of jobs that have ended; returns the entries whose jobs are pending or running.

        Raises:
            ForgeError: SLURM's controller does not answer, or the directory cannot be written.
        """
        jobs = {entry.name: job for entry in entries if (job := job_of(self.campaign, entry)) is not None}
        if not jobs:
            return []
        alive = {number.partition("_")[0] for number, _, _ in queued_jobs()}
        left: list[CampaignEntry] = []
        for entry in entries:
            if (job := jobs.get(entry.name)) is None:
                continue
            folder = self.campaign.folder(entry)
            ended = _end_of(folder)
            if ended is None and job in alive:
                left.append(entry)
                continue
            code, note = ended or (None, f"job {job} is not in the queue and has recorded no end")
            with writing(self.campaign.directory):
                if _CANCELED in note:  # not a result: the entry runs again
                    (folder / JOB_FILE).unlink()
                    self.say(f"{entry.name}: job {job} was canceled")
                    continue
                limit = 60.0 * self.campaign.settings.limit_minutes
                write_attempt(folder, Attempt(fingerprint_of(entry), code, limit_seconds=limit, job=job, note=note))
        return left


def job_of(campaign: Campaign, entry: CampaignEntry) -> str | None:
    """Returns the number of the job that was submitted for an entry as it is now, and has no recorded end."""
    found = read_json(campaign.folder(entry) / JOB_FILE)
    if found is None or found.get("fingerprint") != fingerprint_of(entry) or (campaign.folder(entry) / ATTEMPT_FILE).is_file():
        return None
    return str(found["job"])


def _end_of(folder: Path) -> tuple[int, str] | None:
    """Returns the exit code and the last words of a job's script; None if it has not ended."""
    for path in sorted(folder.glob("*.out")):
        for line in reversed(lines_of(path.read_text(encoding="utf-8", errors="replace"))):
            if match := _ENDED.search(line):
                return int(match[1]), line.strip()
    return None
