"""The teacher of an objective that learns from another model: opened, compared with the run, and held whole by every rank that
computes losses; or its logits, stored once by `forge-train teach` and compared with the run in the same way."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from forge_core.component import class_name
from forge_core.errors import ForgeError
from forge_core.protocols.data import Tokenizer
from forge_core.protocols.weights import Weights
from forge_core.registry import Registry
from forge_data.loading.evaluation import evaluation, training_sets
from forge_data.loading.stream import TrainingStream, open_stream
from forge_models.distillation import top_logits
from forge_models.lora_weights import hash_of
from forge_models.teacher_logits import StoredTeacherLogits, TeacherFacts, TeacherLogitsWriter
from forge_parallel.placement.topology import Topology
from forge_train.directory import claim, run_directory
from forge_train.inference.stored import load_model, open_weights
from forge_train.process.ranks import JobRanks
from forge_train.recipe.schema import Job
from forge_train.run.training import Decided
from forge_train.run.weights import other_tokenizer

HASH = "sha256:"
"""Prefix of the hash of a teacher's weights, in place of their path."""
_BETWEEN = 30.0
"""Seconds between messages of progress."""
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def with_teacher(decided: Decided, ranks: JobRanks) -> Decided:
    """Collective: gives an objective that learns from a teacher its teacher; other objectives are left alone.

    Raises:
        ForgeError: see `taught`.
    """
    objective: Any = decided.objective
    if not hasattr(objective, "with_teacher"):
        return decided
    with ranks.together("the teacher"):
        job, registry, data = decided.job, decided.recipe.registry, decided.data
        sources = [*getattr(data, "sources", ()), *(getattr(each, "source", None) for each in decided.evaluations.values())]
        return replace(decided, objective=taught(objective, job, decided.topology, registry, data.tokenizer, sources))


def taught(
    objective: Any, job: Job, topology: Topology, registry: Registry, tokenizer: Tokenizer | None, sources: Iterable[Any]
) -> Any:
    """Returns the objective with its teacher in compute precision, or with its stored logits, on ranks that compute losses; on
    others, the objective itself.

    Args:
        objective: the objective.
        job: the recipe.
        topology: position of this rank.
        registry: where components are found.
        tokenizer: tokenizer of the data.
        sources: sources of training and held-out data.

    Raises:
        ForgeError: the weights or logits cannot be opened, or have another tokenizer or vocabulary; or the logits are of other
            data or of another teacher.
    """
    if getattr(objective, "stored", None) is not None:
        logits = StoredTeacherLogits(Path(objective.stored))
        _compare(logits, job, tokenizer, sources)
        if topology.rank == 0:
            _compare_teachers(logits, objective.teacher, registry)
        return objective if _is_early(job, topology) else objective.with_stored(logits)
    weights = _teacher(objective.teacher, job, tokenizer, registry)
    if _is_early(job, topology):
        return objective
    return objective.with_teacher(load_model(weights, topology.device).to(_DTYPES[job.precision.compute]))


def _is_early(job: Job, topology: Topology) -> bool:
    """Whether this rank has only early stages of a pipeline, which never compute a loss."""
    last = topology.coordinates["pp"] == topology.layout.pp - 1
    return not last and job.parallel.pipeline.build().schedule.stages_per_rank == 1


def _teacher(path: str, job: Job, tokenizer: Tokenizer | None, registry: Registry) -> Weights:
    """Opens a teacher, and compares it with the run."""
    if path.startswith(HASH):
        raise ForgeError(
            f"objective.teacher: {path} names weights that are elsewhere, and only stored logits can replace them; set "
            "objective.stored, or give the path of the weights"
        )
    weights = open_weights(path, registry)
    vocab, own = getattr(weights.model, "vocab_size", None), getattr(job.model, "vocab_size", None)
    if vocab != own:
        raise ForgeError(
            f"objective.teacher: {path} has {vocab} words, but the model has {own}: probabilities of different "
            "vocabularies cannot be compared; take a teacher with the same tokenizer, and set model.vocab_size to its number"
        )
    if tokenizer is not None and (why := other_tokenizer(weights, tokenizer, registry)):
        raise ForgeError(
            f"objective.teacher: the token ids of {path} are of another tokenizer than those of the data: {why}; "
            "take a teacher with the same tokenizer"
        )
    longest, length = getattr(weights.model, "max_length", None), job.data.sequence_length
    if longest is not None and longest < length:
        raise ForgeError(f"objective.teacher: {path} reads {longest} tokens, but data.sequence_length is {length}")
    return weights


def _data_facts(job: Job, sources: Iterable[Any]) -> dict[str, Any]:
    """Returns what determines the rows of a run, apart from their order."""
    found = sorted({source.fingerprint for source in sources if source is not None})
    data = job.data
    return {"sequence_length": data.sequence_length, "packing": data.packing, "documents": data.documents, "sources": found}


def _compare(logits: StoredTeacherLogits, job: Job, tokenizer: Tokenizer | None, sources: Iterable[Any]) -> None:
    """Compares stored logits with the run.

    Raises:
        ForgeError: they have another vocabulary or tokenizer, or are of other data.
    """
    facts, where = logits.facts, f"objective.stored: {logits.folder}"
    again = "run forge-train teach with this recipe"
    if facts.vocab_size != (own := getattr(job.model, "vocab_size", None)):
        raise ForgeError(f"{where} is of a teacher with {facts.vocab_size} words, but the model has {own}; {again}")
    if facts.tokenizer != (given := None if tokenizer is None else tokenizer.fingerprint):
        one, other = ((name or "none")[:12] for name in (facts.tokenizer, given))
        raise ForgeError(f"{where} is of data with the tokenizer {one}, but that of the run is {other}; {again}")
    data = _data_facts(job, sources)
    for name in ("sequence_length", "packing", "documents"):
        if facts.data[name] != data[name]:
            raise ForgeError(f"{where} is of data.{name} = {facts.data[name]!r}, but the run has {data[name]!r}; {again}")
    if missing := sorted(set(data["sources"]) - set(facts.data["sources"])):
        listed = ", ".join(name[:12] for name in missing)
        raise ForgeError(f"{where} has no rows of the sources with the fingerprints {listed}; {again}")


def _compare_teachers(logits: StoredTeacherLogits, teacher: str, registry: Registry) -> None:
    wanted = logits.facts.teacher
    if teacher.startswith(HASH):
        own = teacher.removeprefix(HASH)
    else:
        weights = open_weights(teacher, registry)
        own = hash_of(weights, sorted(weights.tensors))
    if own != wanted:
        raise ForgeError(
            f"objective.stored: {logits.folder} is of the teacher {HASH}{wanted}, but objective.teacher is {HASH}{own}; run "
            "forge-train teach with this teacher, or give the other one"
        )


def store_logits(job: Job, folder: Path, device: torch.device, registry: Registry, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs the teacher of a recipe over every row of its training and held-out data once, and writes its most likely words.

    Args:
        job: a recipe with an objective that has a teacher and `top_k`.
        folder: folder to create.
        device: where the teacher runs.
        registry: where components are found.
        say: called with progress messages.

    Returns:
        What was written, as JSON.

    Raises:
        ForgeError: the objective has no teacher, the teacher does not fit, the data are a stream, or the folder cannot be
            written.
    """
    objective: Any = job.objective
    top_k, vocab_size = getattr(objective, "top_k", None), getattr(job.model, "vocab_size", None)
    if not hasattr(objective, "stored"):
        raise ForgeError(f"objective {class_name(objective)} has no teacher; set objective.name = 'distillation'")
    if top_k is None or (vocab_size is not None and top_k >= vocab_size):
        raise ForgeError("objective.top_k must be fewer words than the vocabulary, such as 64; set it")
    if any(phase.sequence_length for phase in job.data.phases):
        raise ForgeError("data.phases change data.sequence_length, so rows are not the same in all phases; remove them")
    directory = run_directory(job)
    claim(directory)
    shared: dict[str, Any] = {"workspace": directory / "data", "vocab_size": vocab_size, "model": job.model, "report": say}
    size = job.train.micro_batch
    stream = open_stream(job.data, seed=job.job.seed, global_batch=size, micro_batch=size, **shared)
    if not isinstance(stream, TrainingStream) or stream.reader.streams:
        raise ForgeError("the teacher reads all data once, but the source is a stream; prepare it into a store")
    evaluations = evaluation(job.data, tokenizer=stream.tokenizer, **shared)
    weights = _teacher(objective.teacher, job, stream.tokenizer, registry)
    sets = [*training_sets(stream), *evaluations.values()]
    facts = TeacherFacts(
        teacher=hash_of(weights, sorted(weights.tensors)),
        tokenizer=None if stream.tokenizer is None else stream.tokenizer.fingerprint,
        vocab_size=getattr(weights.model, "vocab_size", 0),
        top_k=top_k,
        data=_data_facts(job, [each.source for each in sets]),
    )
    dtype, said = _DTYPES[job.precision.compute], monotonic()
    with TeacherLogitsWriter(folder, facts, torch.promote_types(dtype, torch.float32)) as writer:
        teacher = load_model(weights, device).to(dtype).eval()
        for each in sets:
            for batch in each.batches(0, 1, size):
                words, values = top_logits(teacher, batch.to(str(device)), top_k)
                writer.add(batch, words.cpu(), values.cpu())
                if monotonic() > said + _BETWEEN:
                    said = monotonic()
                    say(f"{each.name}: {writer.rows:,} rows, {writer.labels:,} labels so far")
    return {
        "folder": str(folder),
        "teacher": f"{HASH}{facts.teacher}",
        "rows": writer.rows,
        "labels": writer.labels,
        "top_k": top_k,
    }
