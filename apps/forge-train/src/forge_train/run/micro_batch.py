"""If a step does not fit into the memory of a rank, all ranks end, and the next start uses smaller micro-batches.

Other ranks may be inside a collective, which cannot be interrupted, so a smaller micro-batch is not tried within the same step.
The rank writes a note to the run's directory and ends; the others end as after any loss of a rank. Every start reads the note.
The loss of a step is a sum over its tokens and does not depend on the micro-batch size. If a part of the recipe depends on the
size, or its layout is not tested with gradient accumulation, the run ends with an error instead.
"""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ckpt.world import from_rank_0
from forge_core.errors import ForgeError
from forge_core.files import replace_file
from forge_core.layout import Layout
from forge_core.protocols.checkpoint import World
from forge_parallel.accelerator import is_out_of_memory
from forge_parallel.checks import compositions_are_proven
from forge_train.directory import MICRO_BATCH
from forge_train.process.stop import FULL, TrainingError
from forge_train.recipe.schema import Job

if TYPE_CHECKING:
    from forge_train.run.run import Run


class OutOfMemory(ForgeError):
    """A step did not fit into the memory of a rank; after a restart, the run uses smaller micro-batches."""

    exit_code = FULL


@contextmanager
def note_out_of_memory(run: "Run") -> Iterator[None]:
    """Context in which forward and backward of a step run; writes the note if the device runs out of memory.

    Raises:
        OutOfMemory: the device ran out of memory, and the note is written.
        TrainingError: the device ran out of memory, and micro-batches cannot become smaller.
    """
    try:
        yield
    except Exception as cause:
        if not is_out_of_memory(cause):
            raise
        raise _full(run, cause) from cause


def _full(run: "Run", cause: Exception) -> ForgeError:
    size, step, rank = run.job.train.micro_batch, run.state.step + 1, run.topology.rank
    what = f"rank {rank} on {socket.gethostname()} ran out of memory in step {step} with micro-batches of {size}"
    first = (str(cause).splitlines() or [type(cause).__name__])[0]
    if size == 1:
        return TrainingError(
            f"{what}, the smallest there are ({first}). Set transforms.recompute, shard over more ranks (parallel.dp_shard, tp, "
            "cp), or train shorter rows (data.sequence_length)"
        )
    fits = smaller(size)
    if why := _refusal(replace(run.job, train=replace(run.job.train, micro_batch=fits)), run.topology.layout):
        return TrainingError(f"{what} ({first}), and smaller ones are not taken: {why}. Set train.micro_batch yourself")
    note = {"recipe": run.decided.recipe.job.train.micro_batch, "micro_batch": fits, "why": what}
    replace_file(run.directory / MICRO_BATCH, json.dumps(note).encode())
    return OutOfMemory(f"{what} ({first}). Started again, the run goes on with micro-batches of {fits} and the same loss")


def _refusal(job: Job, layout: Layout) -> str:
    """Returns why a run cannot continue with the micro-batches of this job; empty if it can."""
    if depends := getattr(job.model, "layout_dependent", ()):
        return f"what {', '.join(depends)} does depends on their size"
    return "; ".join(map(str, compositions_are_proven(job, layout)))


def smaller(size: int) -> int:
    """Returns the next smaller micro-batch size that divides `size`, at most half as large.

    Args:
        size: micro-batch size, at least 2.
    """
    return max(each for each in range(1, size // 2 + 1) if size % each == 0)


def read_note(directory: Path, job: Job, world: World) -> tuple[Job, str]:
    """Collective: reads the note; returns the job with the micro-batch size that fits, and a message about it. Returns the job
    unchanged if there is no note, or if the recipe's micro-batch size is not the one that did not fit."""

    def read() -> dict[str, Any] | None:
        try:
            note = json.loads((directory / MICRO_BATCH).read_text())
            return note if note["recipe"] == job.train.micro_batch and 0 < note["micro_batch"] < note["recipe"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    note = from_rank_0(world, read)
    if note is None:
        return job, ""
    text = (
        f"micro-batches of {note['micro_batch']} instead of train.micro_batch = {note['recipe']}: {note['why']}. Set "
        f"train.micro_batch = {note['micro_batch']} to keep it; remove {directory / MICRO_BATCH} to try the recipe's again"
    )
    return replace(job, train=replace(job.train, micro_batch=note["micro_batch"])), text
