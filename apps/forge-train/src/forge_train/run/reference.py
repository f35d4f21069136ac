"""Numbers of a frozen reference for an objective that compares with one, such as DPO: computed once, stored, read by a resume.

The reference is the model that the run starts from. Before the first step, its ranks read every row of the training and the
held-out data once, in the layout of the run. The numbers are in the folder of the run's data, in a file that is named by its
content. Checkpoints record the name, so that a resume in any layout uses the same numbers.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from forge_ckpt.checkpoint.read import VerifiedCheckpoint
from forge_core.batch import Batch
from forge_core.errors import ForgeError
from forge_core.files import replace_file
from forge_core.protocols.data import EvaluationSet
from forge_core.protocols.model import ReferencedObjective
from forge_data.loading.evaluation import training_sets
from forge_data.loading.stream import TrainingStream
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.stages import apply
from forge_parallel.step.reduce import reports
from forge_parallel.step.step import Step
from forge_train.process.ranks import JobRanks
from forge_train.run.training import Decided
from forge_train.run.weights import REFERENCE_KEY, InitialWeights


def with_reference(decided: Decided, checkpoint: VerifiedCheckpoint | None, ranks: JobRanks) -> Decided:
    """Collective: gives an objective that compares with a frozen reference its numbers: those that `checkpoint` names, or new
    ones. Other objectives are left alone.

    Raises:
        ForgeError: see `stored_reference` and `_computed`.
    """
    objective: Any = decided.objective
    if not hasattr(objective, "with_reference"):
        return decided
    with ranks.together("the reference", collective=True):
        if checkpoint is not None:
            return replace(decided, objective=stored_reference(objective, decided.directory / "data", checkpoint.meta))
        objective, name = _computed(decided, ranks)
        return replace(decided, objective=objective, origin={**decided.origin, REFERENCE_KEY: name})


def stored_reference(objective: ReferencedObjective, data: Path, facts: Mapping[str, Any]) -> ReferencedObjective:
    """Returns the objective with the stored numbers that a checkpoint names.

    Args:
        objective: the objective.
        data: folder of the run's data.
        facts: metadata of the checkpoint.

    Raises:
        ForgeError: the file is missing or damaged, or the checkpoint names none.
    """
    name = facts.get(REFERENCE_KEY)
    if name is None:
        raise ForgeError(
            "the checkpoint has no reference, because its run had another objective; start a new run from its weights"
        )
    path = data / name
    try:
        entries = path.read_bytes()
    except OSError as error:
        raise ForgeError(
            f"{path} has the numbers of the frozen reference, but cannot be read ({error.strerror or error}); restore it, or "
            "start a new run"
        ) from error
    if _name(entries) != name:
        raise ForgeError(f"{path} is damaged: its content differs from when it was written; restore it, or start a new run")
    return objective.with_reference(entries)


def _computed(decided: Decided, ranks: JobRanks) -> tuple[ReferencedObjective, str]:
    """Collective: runs the reference over all data; returns the objective with its numbers, and the name of the file that rank 0
    writes.

    Raises:
        ForgeError: the data are a stream, the weights do not fit the model, or the file cannot be written.
    """
    if not isinstance(decided.data, TrainingStream) or decided.data.reader.streams:
        raise ForgeError(
            "the reference reads all data once before the first step, but the source is a stream; prepare it into a store"
        )
    objective: Any = decided.objective
    job, weights = decided.job, InitialWeights(decided.job, decided.recipe.registry)
    # Strategies change a blueprint in place, and that of the decision is for the model to train.
    blueprint = apply(Blueprint.of(job.model.build), decided.optimizer.settings)
    model = realize(blueprint, decided.plan, decided.topology, weights, job.precision.compute, job.precision.state)
    sets = [*training_sets(decided.data), *decided.evaluations.values()]
    parts = [_entries(model, objective.scorer(), each, job.train.micro_batch) for each in sets]
    found = sorted({entry for part in ranks.world.all_gather(b"".join(parts)) for entry in _split(part)})
    entries = b"".join(found)
    name, folder = _name(entries), decided.directory / "data"
    if ranks.world.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / name, entries)
        except OSError as error:
            raise ForgeError(f"{folder / name} cannot be written: {error.strerror or error}; make room") from error
    ranks.say(f"reference: {len(found):,} preference pairs, in {folder / name}")
    return objective.with_reference(entries), name


_SIZE = 32
"""Bytes of an entry."""


def _split(entries: bytes) -> Iterator[bytes]:
    return (entries[at : at + _SIZE] for at in range(0, len(entries), _SIZE))


def _entries(model: ParallelModel, scorer: Any, held_out: EvaluationSet, micro_batch: int) -> bytes:
    """Collective: returns the entries of this rank's rows; empty on ranks that do not report."""
    topology, found = model.topology, []
    read: deque[Batch] = deque()
    batches = held_out.batches(topology.data_rank, topology.data_size, micro_batch)
    with model.inference():
        for terms in Step(model, scorer).scored(_kept(batches, read)):
            entries = scorer.entries(read.popleft(), terms)
            found += [entries] if reports(model) else []
    return b"".join(found)


def _kept(batches: Iterable[Batch], read: "deque[Batch]") -> Iterator[Batch]:
    """Yields batches, and adds each to `read`."""
    for batch in batches:
        read.append(batch)
        yield batch


def _name(entries: bytes) -> str:
    return f"reference-{sha256(entries).hexdigest()[:32]}"
