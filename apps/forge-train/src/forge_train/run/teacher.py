"""The teacher of an objective that learns from another model: opened, compared with the run, and held whole by every rank that
computes losses."""

from dataclasses import replace
from typing import Any

import torch

from forge_core.errors import ForgeError
from forge_core.protocols.data import Tokenizer
from forge_core.registry import Registry
from forge_parallel.placement.topology import Topology
from forge_train.inference.stored import load_model, open_weights
from forge_train.process.ranks import JobRanks
from forge_train.recipe.schema import Job
from forge_train.run.training import Decided
from forge_train.run.weights import other_tokenizer

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
        job, registry = decided.job, decided.recipe.registry
        return replace(decided, objective=taught(objective, job, decided.topology, registry, decided.data.tokenizer))


def taught(objective: Any, job: Job, topology: Topology, registry: Registry, tokenizer: Tokenizer | None) -> Any:
    """Returns the objective with its teacher in compute precision, on ranks that compute losses; on others, the objective itself.

    Raises:
        ForgeError: the weights cannot be opened, or have another tokenizer or vocabulary.
    """
    weights = open_weights(objective.teacher, registry)
    vocab, own = getattr(weights.model, "vocab_size", None), getattr(job.model, "vocab_size", None)
    if vocab != own:
        raise ForgeError(
            f"objective.teacher: {objective.teacher} has {vocab} words, but the model has {own}: probabilities of different "
            "vocabularies cannot be compared; take a teacher with the same tokenizer, and set model.vocab_size to its number"
        )
    if tokenizer is not None and (why := other_tokenizer(weights, tokenizer, registry)):
        raise ForgeError(
            f"objective.teacher: the token ids of {objective.teacher} are of another tokenizer than those of the data: {why}; "
            "take a teacher with the same tokenizer"
        )
    longest, length = getattr(weights.model, "max_length", None), job.data.sequence_length
    if longest is not None and longest < length:
        raise ForgeError(f"objective.teacher: {objective.teacher} reads {longest} tokens, but data.sequence_length is {length}")
    if topology.coordinates["pp"] != topology.layout.pp - 1 and job.parallel.pipeline.build().schedule.stages_per_rank == 1:
        return objective  # an earlier stage never computes a loss
    return objective.with_teacher(load_model(weights, topology.device).to(_DTYPES[job.precision.compute]))
